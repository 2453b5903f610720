"""What the tests of DDP and FSDP2 share: the process group, from whatever launcher, and small models. No Horovod."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_aps.ddp import APSState, aps_hook


def start() -> None:
    """Gloo among all ranks; mpirun does not set what torch.distributed reads."""
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
        os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def end() -> None:
    """At the end of all tests: PyTorch's own threads may abort a process that leaves without it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model(seed: int = 0) -> nn.Sequential:
    """A small net with layers of 2 to 2,000 elements; equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 31), nn.Tanh(), nn.Linear(31, 2))


def wrap(module: nn.Module, state: APSState | None = None, **keywords) -> DDP:
    """The module in DDP, with our hook if there is a state; in several buckets."""
    keywords.setdefault("bucket_cap_mb", 0.004)
    model = DDP(module, **keywords)
    if state is not None:
        model.register_comm_hook(state, aps_hook)
    return model


def batch(step: int, rank: int, n: int = 8, width: int = 20) -> torch.Tensor:
    """Inputs of one rank in one step, that every rank can make."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: Callable[..., torch.Tensor], step: int, rank: int) -> torch.Tensor:
    """A loss whose gradients differ between ranks and steps."""
    x = batch(step, rank)
    return ((model(x) - x[:, :2].sin()) ** 2).mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients in the model now, copied."""
    module = model.module if isinstance(model, DDP) else model
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def gradients_of_all(module: nn.Module, step: int, size: int) -> list[dict[str, np.ndarray]]:
    """Gradients that each rank will have, by name, computed here for all ranks."""
    named = dict(module.named_parameters())
    per_rank = []
    for rank in range(size):
        grads = torch.autograd.grad(loss_of(module, step, rank), list(named.values()))
        per_rank.append({name: grad.numpy().copy() for name, grad in zip(named, grads)})
    return per_rank


def step(model: nn.Module, number: int, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Forward, backward; returns the averaged gradients and leaves none."""
    loss_of(model, number, dist.get_rank() if rank is None else rank).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def assert_replicas_equal(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """All parameters have the same bits on all ranks. Oracle: an all-gather of the bytes themselves."""
    raw = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    rows = [torch.empty_like(raw) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, raw, group=group)
    assert all(torch.equal(row, raw) for row in rows), "replicas differ"


def assert_close(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], error: float) -> None:
    """Every layer within a relative error."""
    assert set(actual) == set(wanted)
    for name, exact in wanted.items():
        norm = float(exact.double().norm())
        assert float((actual[name].double() - exact.double()).norm()) <= error * norm, name
