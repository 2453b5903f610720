"""A rank that trains with DDP and APS: `python ddp_worker.py <folder> [--kill-rank R] [--spawn N] [--hosts H] ...`.

Saves model and state after every step to <folder>, goes on from there, and writes the bytes of its weights at the end.
With --hosts it counts to one of so many hosts, and prints how gradients travel. With --operations packed bytes travel
as on GPUs, by operations of a process group.
With --kill-rank that rank kills itself in the middle of the third step's backward, the first time it is started.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_aps.ddp import APSState, aps_hook
from horovod_aps.frontends import group

N_STEPS = 6


def train(arguments: argparse.Namespace) -> None:
    rank, first = dist.get_rank(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))
    state = APSState(3, 0, error_feedback=True)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    path, begin = arguments.folder / f"checkpoint{rank}", 0
    if path.exists():
        saved = torch.load(path)
        module.load_state_dict(saved["model"])
        state.load_state_dict(saved["state"])
        begin = saved["step"]
    model = DDP(module)
    model.register_comm_hook(state, aps_hook)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(begin, N_STEPS):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * number + rank))
        optimizer.zero_grad()
        if first and number == 2 and rank == arguments.kill_rank:
            module[2].register_full_backward_hook(die)
        model(x).square().mean().backward()
        optimizer.step()
        torch.save({"model": module.state_dict(), "state": state.state_dict(), "step": number + 1}, path)
        dist.barrier()
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    (arguments.folder / f"weights{rank}").write_bytes(weights.numpy().tobytes())
    print(f"rank {rank}: {state.stats()['hierarchy']}", flush=True)
    dist.destroy_process_group()


def spawned(rank: int, arguments: argparse.Namespace) -> None:
    store = f"file://{arguments.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.spawn)
    train(arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--operations", action="store_true")
    arguments = parser.parse_args()
    if arguments.operations:
        group.are_wanted = lambda *_: True  # type: ignore[assignment]
    if arguments.spawn:
        torch.multiprocessing.spawn(spawned, (arguments,), nprocs=arguments.spawn)
    else:
        dist.init_process_group("gloo")
        if arguments.hosts:
            os.environ["HOROVOD_APS_HOST"] = f"host{dist.get_rank() * arguments.hosts // dist.get_world_size()}"
        train(arguments)
