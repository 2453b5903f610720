"""A long run on two ranks: does anything grow, is anything left behind, do the replicas stay identical?

`python benchmarks/soak.py` launches the ranks itself and prints the figures as JSON; exit code 1 if one is out of
bounds. Sizes and formats are mixed; names come from a fixed set, as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = (1, 7, 8, 9, 64, 1000, 1023, 1025, 4096, 10_000, 65_537, 200_000)
MAX_GROWTH = 0.01  # of the resident size, after the warm-up
WARM_UP = 0.2  # of the exchanges, but at least MIN_WARM_UP: after 240 every mixture has come by
MIN_WARM_UP = 250
N_SAMPLES = 50
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]


def resident_bytes() -> int:
    """Resident size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def recorded_names(library: Any) -> Iterator[set[bytes]]:
    """Every name that reaches Horovod's C library in the meantime: looks on, and changes nothing."""
    names: set[bytes] = set()
    originals = {key: getattr(library, key) for key in dir(library) if key.startswith("horovod_torch_")
                 and "async" in key}

    def watch(function: Any) -> Any:
        def call(*args: Any) -> Any:
            names.update(arg for arg in args if isinstance(arg, bytes))
            return function(*args)
        return call

    for key, function in originals.items():
        setattr(library, key, watch(function))
    try:
        yield names
    finally:
        for key, function in originals.items():
            setattr(library, key, function)


def soak(n_exchanges: int) -> dict[str, Any]:
    """Run the exchanges on this rank, with Horovod initialised, and return the figures of all ranks."""
    import horovod.torch as hvd
    import torch
    from horovod.torch import mpi_ops

    from horovod_aps.torch import APSCompressor

    torch.manual_seed(hvd.rank())
    compressors = [APSCompressor(4, 3), APSCompressor(5, 2, error_feedback=True),
                   APSCompressor(3, 0, rounding="stochastic", seed=1), APSCompressor(4, 3, accumulate="kahan")]
    base = [torch.randn(n) * 10.0 ** (i - 6) for i, n in enumerate(SIZES)]
    checksum, samples, names_warm = 0, [], 0
    warm = max(MIN_WARM_UP, int(WARM_UP * n_exchanges))
    start = time.monotonic()
    with recorded_names(mpi_ops.mpi_lib) as names:
        for step in range(n_exchanges):
            which = step % len(compressors)
            chosen = [i for i in range(len(SIZES)) if (step * 7 + i * i) % 5 < 2] or [step % len(SIZES)]
            inputs = [base[i] * (1.0 + step % 17) for i in chosen]
            if step % 3:
                label = f"soak.{which}.{(step * 7) % 5}"
                outputs = hvd.grouped_allreduce(inputs, name=label, compression=compressors[which])
            else:
                outputs = [hvd.allreduce(inputs[0], name=f"soak.{which}.{chosen[0]}", compression=compressors[which])]
            for output in outputs:
                checksum = zlib.crc32(output.numpy().view("u1"), checksum)
            if step == warm:
                names_warm = len(names)
            if step >= warm and (step - warm) % max(1, (n_exchanges - warm) // N_SAMPLES) == 0:
                samples.append(resident_bytes())
        n_names = len(names)
    seconds = time.monotonic() - start
    third = max(1, len(samples) // 3)
    # The mean of the last third against that of the first: one sample can catch a temporary.
    growth = sum(samples[-third:]) / sum(samples[:third]) - 1
    mine = {"rank": hvd.rank(), "growth": round(growth, 5), "resident_mb": round(samples[-1] / 1e6, 1),
            "handles_left": len(mpi_ops._handle_map), "names_after_warm_up": names_warm, "names": n_names,
            "checksum": checksum}
    ranks = hvd.allgather_object(mine, name="soak.figures")
    return {"exchanges": n_exchanges, "n_ranks": hvd.size(), "seconds": round(seconds, 1),
            "replicas_identical": len({rank["checksum"] for rank in ranks}) == 1, "ranks": ranks}


def faults(figures: dict[str, Any]) -> list[str]:
    """What is out of bounds."""
    found = [] if figures["replicas_identical"] else ["replicas differ"]
    for rank in figures["ranks"]:
        if rank["growth"] >= MAX_GROWTH:
            found.append(f"rank {rank['rank']}: resident size grew by {100 * rank['growth']:.2f} %")
        if rank["handles_left"]:
            found.append(f"rank {rank['rank']}: {rank['handles_left']} handles left")
        if rank["names"] != rank["names_after_warm_up"]:
            found.append(f"rank {rank['rank']}: names grew from {rank['names_after_warm_up']} to {rank['names']}")
    return found


def worker(n_exchanges: int) -> int:
    """One rank."""
    import horovod.torch as hvd

    hvd.init()
    figures = soak(n_exchanges)
    found = faults(figures)
    if hvd.rank() == 0:
        print(json.dumps(figures | {"faults": found}, indent=1), flush=True)
    return 1 if found else 0


def main() -> int:
    """Launch the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchanges", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gloo", action="store_true", help="launch by horovodrun --gloo instead of mpirun")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.exchanges < MIN_WARM_UP + N_SAMPLES:
        parser.error(f"--exchanges must be at least {MIN_WARM_UP + N_SAMPLES}, got {args.exchanges}")
    if args.worker:
        return worker(args.exchanges)
    launcher = [str(Path(sys.executable).parent / "horovodrun"), "--gloo"] if args.gloo else MPIRUN
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                                "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [*launcher, "-np", str(args.ranks), sys.executable, __file__, "--worker", "--exchanges",
               str(args.exchanges)]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
