"""One rank of tests/test_faults.py: trains until something ends it, and says what it saw.

    fault_worker.py <phase> <victim> <directory>

The victim kills itself with SIGKILL in its fourth step, when the exchange enters `phase`: a method of the kernels
(scan: before the exponents; encode: after them; reduce: after the scatter; decode: after the gather), or "backward" or
"step" outside of the exchange; "encode 2" is the second call of a method. With the phase "never" all ranks train on
until they are interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from horovod_aps.torch import APSCompressor

FATAL_STEP = 3


def die(directory: Path) -> None:
    """Leave a sign, and be gone as if the machine had failed."""
    (directory / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Trap:
    """Kernels that kill the process when a method is called."""

    def __init__(self, kernels: Any, method: str, directory: Path) -> None:
        self._kernels, self._directory = kernels, directory
        self._method, _, count = method.partition(" ")
        self._n_left = int(count or 1)

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._n_left -= 1
            if self._n_left == 0:
                die(self._directory)
        return getattr(self._kernels, name)


def main(phase: str, victim: int, directory: Path) -> None:
    """Train; ends the process."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Tanh(), torch.nn.Linear(200, 5))
    compressor = APSCompressor(4, 3, bucket_mb=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters(), compression=compressor
    )
    before: list[torch.Tensor] = []
    try:
        for step in range(10**9):
            before = [p.detach().clone() for p in model.parameters()]
            fatal = step == FATAL_STEP and hvd.rank() == victim
            if fatal:
                for exchange in compressor._reducers.values():
                    exchange.kernels = Trap(exchange.kernels, phase, directory)
            optimizer.zero_grad()
            if fatal and phase == "backward":
                model[0].weight.register_hook(lambda grad: die(directory))
            model(torch.randn(4, 200)).square().mean().backward()
            if fatal and phase == "step":
                die(directory)
            optimizer.step()
            if step == FATAL_STEP:
                (directory / f"trained{hvd.rank()}").touch()
    except HorovodInternalError:
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        print(f"RAISED HorovodInternalError, parameters {'unchanged' if unchanged else 'CHANGED'}", flush=True)
        sys.exit(0)
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
        sys.exit(0)


def run_forked(environment: dict[str, str], output: Path, phase: str, victim: int, directory: Path) -> None:
    """`main` in a process that was forked, not executed: its environment and output are set here."""
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(phase, victim, directory)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
