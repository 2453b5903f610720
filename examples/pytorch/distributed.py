"""What the examples take of Horovod, on torch.distributed under the same names: for --backend ddp.

Start them with torchrun, which says who and where we are.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Sum = dist.ReduceOp.SUM


def init() -> None:
    """DDP: initialize the process group."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def shutdown() -> None:
    """PyTorch's own threads may abort a process that leaves without it, or while a model's hooks hold the group."""
    gc.collect()  # a model of DDP's goes only now
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def allreduce(tensor: Tensor, op: Any, name: str) -> Tensor:
    """The sum over all ranks; operations have no names here."""
    total = tensor.clone()
    dist.all_reduce(total, op)
    return total


def allgather_object(value: Any, name: str) -> list[Any]:
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Any, root_rank: int) -> Any:
    values = [value]
    dist.broadcast_object_list(values, root_rank)
    return values[0]


def broadcast_parameters(parameters: Mapping[str, Tensor], root_rank: int) -> None:
    for tensor in parameters.values():
        dist.broadcast(tensor.data, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))
