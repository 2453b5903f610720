"""A long run of random scenarios on 2 to 5 ranks, over MPI and Gloo: does anything differ, hang, or grow?

`python benchmarks/soak.py` launches the ranks itself, one number of them after the other, for half an hour in all, and
prints the figures as JSON; exit code 1 if one is out of bounds. `--only` picks scenarios, `--stock` runs them with
Horovod's own compressor as a control, `--seed` repeats a run. The scenarios are in soak_scenarios.py.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
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
LAUNCHES = [(kind, n_ranks) for n_ranks in (2, 3, 4, 5) for kind in ("mpi", "gloo")]
LONG_WARM_UP = 0.3  # of a launch of random scenarios
MAX_LONG_GROWTH = 0.02
MAX_WARMING_GROWTH = 0.1  # while there are new pairs of scenario and compressor, each of which keeps its buffers
MIN_LONG_SAMPLES = 6  # of the resident size, one after each scenario
START = 300.0  # seconds for imports and hvd.init(), before the watchdog's patience counts
GRACE = 15.0  # seconds between the stacks of a rank that hangs and its end: the other ranks' are wanted, too


def resident_bytes() -> int:
    """Resident size of this process, without what is free: the allocator gives that back when it likes."""
    gc.collect()  # an optimizer and its hooks refer to each other
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def recorded_names(library: Any) -> Iterator[set[bytes]]:
    """Every name that reaches Horovod's C library in the meantime: looks on, and changes nothing."""
    names: set[bytes] = set()
    originals = {
        key: getattr(library, key) for key in dir(library) if key.startswith("horovod_torch_") and "async" in key
    }

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


# ---- a short run of plain exchanges, for tests ----------------------------------------------------------------


def soak(n_exchanges: int) -> dict[str, Any]:
    """Run exchanges of mixed sizes and formats on this rank, with Horovod initialised; the figures of all ranks."""
    import horovod.torch as hvd
    import torch
    from horovod.torch import mpi_ops

    from horovod_aps.torch import APSCompressor

    torch.manual_seed(hvd.rank())
    compressors = [
        APSCompressor(4, 3),
        APSCompressor(5, 2, error_feedback=True),
        APSCompressor(3, 0, rounding="stochastic", seed=1),
        APSCompressor(4, 3, accumulate="kahan"),
    ]
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
    mine = {
        "rank": hvd.rank(),
        "growth": growth(samples),
        "resident_mb": round(samples[-1] / 1e6, 1),
        "handles_left": len(mpi_ops._handle_map),
        "names_after_warm_up": names_warm,
        "names": n_names,
        "checksum": checksum,
    }
    ranks = hvd.allgather_object(mine, name="soak.figures")
    return {
        "exchanges": n_exchanges,
        "n_ranks": hvd.size(),
        "seconds": round(seconds, 1),
        "replicas_identical": len({rank["checksum"] for rank in ranks}) == 1,
        "ranks": ranks,
    }


def growth(samples: list[int]) -> float:
    """The mean of the last third against that of the first: one sample can catch a temporary."""
    third = max(1, len(samples) // 3)
    return round(sum(samples[-third:]) / sum(samples[:third]) - 1, 5)


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


# ---- one rank of a launch -------------------------------------------------------------------------------------


class Watchdog:
    """Ends this process, with all its stacks, if nothing has moved for `patience` seconds."""

    def __init__(self, patience: float) -> None:
        self._patience, self._doing, self._since = patience, "starting", time.monotonic() + START
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self, doing: str) -> None:
        """Say what this rank is at; the time starts anew."""
        self._doing, self._since = doing, time.monotonic()
        # In case the one that hangs holds the interpreter's lock, which the thread would need.
        faulthandler.dump_traceback_later(self._patience + 2 * GRACE, exit=True)

    def _watch(self) -> None:
        while time.monotonic() < self._since + self._patience:
            time.sleep(1)
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK")
        print(f"rank {rank} hangs in {self._doing}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        time.sleep(GRACE)
        os._exit(3)


def worker(args: argparse.Namespace) -> int:
    """Run scenarios for a while; writes rank<r>.json, and while it runs, on rank 0, progress.json."""
    watchdog = Watchdog(args.patience)
    import horovod.torch as hvd
    import torch
    from soak_scenarios import SCENARIOS, Soak

    hvd.init()
    names = args.only or list(SCENARIOS)
    run, counts, samples, start = Soak(args.seed, args.stock), dict.fromkeys(names, 0), [], time.monotonic()
    error, index, seconds, doing = "", 0, 60 * args.minutes, "starting"
    n_pairs, n_warming = 0, 0
    try:
        while True:
            going = hvd.broadcast(torch.tensor([int(time.monotonic() - start < seconds)]), 0, name="soak.going")
            if not going[0]:
                break
            name = names[zlib.crc32(f"{args.seed}/{index}/name".encode()) % len(names)]
            doing = f"{name}, scenario {index} of seed {args.seed} on {hvd.size()} ranks"
            watchdog.now(doing)
            if hvd.rank() == 0:
                _write(args.folder / "progress.json", {"n": index, "now": name})
            run.run(name, index)
            counts[name] += 1
            index += 1
            if time.monotonic() - start > LONG_WARM_UP * seconds:
                samples.append(resident_bytes())
                if len(run.pairs) > n_pairs:
                    n_pairs, n_warming = len(run.pairs), len(samples)
    except BaseException as problem:
        error = f"rank {hvd.rank()}, {doing}: {type(problem).__name__}: {problem}"
        traceback.print_exc()
    watchdog.now("ending")
    settled = len(samples) - n_warming >= MIN_LONG_SAMPLES
    judged = samples[n_warming:] if settled else samples
    _write(
        args.folder / f"rank{hvd.rank()}.json",
        {
            "rank": hvd.rank(),
            "scenarios": counts,
            "results": run.n_results,
            "error": error,
            "growth": growth(judged) if len(judged) >= MIN_LONG_SAMPLES else None,
            "growth_over": len(judged),  # scenarios
            "settled": settled,  # no pair of scenario and compressor was new in them
            "resident_mb": round(resident_bytes() / 1e6, 1),
        },
    )
    if error:  # others wait for this rank, which would wait for them at its exit
        print(error, file=sys.stderr, flush=True)
        time.sleep(1)
        os._exit(1)
    return 0


def _write(path: Path, content: dict[str, Any]) -> None:
    """All of it or nothing: it may be read at any time."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content))
    partial.replace(path)


# ---- the launcher ---------------------------------------------------------------------------------------------


def launch(kind: str, n_ranks: int, minutes: float, seed: int, args: argparse.Namespace, bar: Any) -> dict[str, Any]:
    """One launch; its figures and what is wrong with them."""
    prefix = [str(Path(sys.executable).parent / "horovodrun"), "--gloo"] if kind == "gloo" else MPIRUN
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            *prefix,
            "-np",
            str(n_ranks),
            sys.executable,
            __file__,
            "--worker",
            "--folder",
            name,
            "--minutes",
            str(minutes),
            "--seed",
            str(seed),
            "--patience",
            str(args.patience),
        ]
        command += ["--stock"] * args.stock + (["--only", *args.only] if args.only else [])
        start = time.monotonic()
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    bar.n = min(bar.total, bar.start + time.monotonic() - start)
                    progress = folder / "progress.json"
                    done = json.loads(progress.read_text()) if progress.exists() else {"n": 0, "now": "starting"}
                    bar.set_postfix_str(f"{kind}, {n_ranks} ranks: {done['n']} scenarios, {done['now']}")
            finally:  # Ctrl-C
                process.terminate()
                process.wait()
        bar.start += time.monotonic() - start
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        figures = {
            "kind": kind,
            "n_ranks": n_ranks,
            "seed": seed,
            "seconds": round(time.monotonic() - start, 1),
            "ranks": ranks,
        }
        found = long_faults(figures, process.returncode)
        if found:
            lines = (folder / "log").read_text(errors="replace").splitlines()
            bar.write("\n".join([*found, f"--- the log of {kind} on {n_ranks} ranks, seed {seed} ---", *lines[-400:]]))
    return figures | {"faults": found}


def long_faults(figures: dict[str, Any], code: int) -> list[str]:
    """What is wrong with a launch of random scenarios."""
    ranks = figures["ranks"]
    found = [rank["error"] for rank in ranks if rank["error"]]
    if code or len(ranks) != figures["n_ranks"]:
        found.append(f"exit code {code}, {len(ranks)} of {figures['n_ranks']} ranks came to an end")
    if not found and not all(rank["results"] for rank in ranks):
        found.append("a rank has compared nothing")
    for rank in ranks:
        if rank["growth"] is None:
            found.append(f"rank {rank['rank']}: too few scenarios to judge memory; take more --minutes")
        elif rank["growth"] >= (MAX_LONG_GROWTH if rank["settled"] else MAX_WARMING_GROWTH):
            found.append(f"rank {rank['rank']}: resident size grew by {100 * rank['growth']:.2f} %")
    return found


def main() -> int:
    """Launch the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="in all")
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", help="see soak_scenarios.py (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--launcher", choices=["mpi", "gloo"], nargs="+", default=["mpi", "gloo"])
    parser.add_argument("--seed", type=int, default=0, help="of the first launch; the next has the next one")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for a scenario before it counts as hung")
    parser.add_argument("--stock", action="store_true", help="Horovod's own compressor instead of ours, as a control")
    parser.add_argument("--json", type=Path, help="save the figures here, too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minutes <= 0 or min(args.ranks) < 2:
        parser.error("--minutes must be above 0 and --ranks at least 2")
    if args.worker:
        return worker(args)
    from tqdm import tqdm

    chosen = [(kind, n_ranks) for kind, n_ranks in LAUNCHES if kind in args.launcher and n_ranks in args.ranks]
    launches = []
    with tqdm(total=60 * args.minutes, unit="s", bar_format="{percentage:3.0f}% |{bar}| {elapsed} {postfix}") as bar:
        bar.start = 0.0
        for i, (kind, n_ranks) in enumerate(chosen):
            launches.append(launch(kind, n_ranks, args.minutes / len(chosen), args.seed + i, args, bar))
    found = [f"{entry['kind']} on {entry['n_ranks']} ranks: {fault}" for entry in launches for fault in entry["faults"]]
    figures = {"minutes": args.minutes, "stock": args.stock, "launches": launches, "faults": found}
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
