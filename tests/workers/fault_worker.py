"""One rank of tests/test_faults.py: trains until something ends it, and says what it saw.

    fault_worker.py <phase> <victim> <directory> [<hosts>]

The victim kills itself with SIGKILL in its fourth step, when the exchange enters `phase`: a method of the kernels
(scan: before the exponents; encode: after them; reduce: after the scatter; decode: after the gather), or a phase by the
name that it has in a timeline, APS_..., or "backward" or "step" outside of the exchange. With the phase "never" all
ranks train on until they are interrupted. `hosts` has a letter for each rank's host, if they are to count to several;
where these are more than two, results are first compared with those of emulated ranks.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from exchange_oracle import assert_same_bits, hosted_exchanges, make_gradients, reduce_all  # noqa: E402

from horovod_aps import timeline  # noqa: E402
from horovod_aps.options import Options  # noqa: E402
from horovod_aps.torch import APSCompressor  # noqa: E402

FATAL_STEP = 3


def die(directory: Path) -> None:
    """Leave a sign, and be gone as if the machine had failed."""
    (directory / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Trap:
    """Kernels that kill the process when a method is called."""

    def __init__(self, kernels: Any, method: str, directory: Path) -> None:
        self._kernels, self._method, self._directory = kernels, method, directory

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            die(self._directory)
        return getattr(self._kernels, name)


class TimedTrap(timeline.Phases):
    """Phases of a bucket of which one kills the process."""

    def __init__(self, fatal: str, directory: Path) -> None:
        super().__init__(0, 0, 0, None)
        self._fatal, self._directory = fatal, directory

    def __call__(self, name: str, n_bytes: int = 0) -> None:
        if name == self._fatal:
            die(self._directory)


def set_trap(phase: str, directory: Path, compressor: Any) -> None:
    """Die in that phase of the next exchange."""
    if phase.startswith("APS_"):
        timeline.phases = lambda *args: TimedTrap(phase, directory)  # type: ignore[assignment]
    for exchange in compressor._reducers.values():
        exchange.kernels = Trap(exchange.kernels, phase, directory)


def compare_with_emulation(hosts: str) -> None:
    """All ranks get the bits that emulated ranks on such hosts get, NaN and infinity included."""
    grads = make_gradients((1, 1000, 70_001, 4096), len(hosts))
    grads[1]["layer1"][5] = np.nan
    grads[-1]["layer2"][-1] = np.inf
    for options in ({"bucket_mb": 0.1}, {"accumulate": "kahan"}):
        compressor, emulated = APSCompressor(4, 3, **options), hosted_exchanges(hosts, Options(4, 3, **options))
        for _ in range(2):
            mine = [torch.from_numpy(x.copy()) for x in grads[hvd.rank()].values()]
            results = hvd.grouped_allreduce(mine, name="compared", compression=compressor)
            for (name, x), result in zip(reduce_all(grads, emulated)[0].items(), results):
                assert_same_bits(result.numpy(), x, name)
        assert compressor.stats()["hierarchy"] == f"two-level ({len(set(hosts))} hosts with {hosts.count('a')} ranks)"
    print("SAME BITS", flush=True)


def main(phase: str, victim: int, directory: Path, hosts: str = "") -> None:
    """Train; ends the process."""
    hvd.init()
    if hosts:
        os.environ["HOROVOD_APS_HOST"] = hosts[hvd.rank()]
    if len(set(hosts)) > 2:  # tests/parallel/test_torch_two_level.py does so on two
        compare_with_emulation(hosts)
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
                set_trap(phase, directory, compressor)
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


def run_forked(environment: dict[str, str], output: Path, worker: str, *arguments: Any) -> None:
    """`main` of a worker in a process that was forked, not executed: its environment and output are set here."""
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module(worker).main(*arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
