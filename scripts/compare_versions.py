"""Compare two checkouts bit for bit: the same gradients through both, on several ranks.

    .venv/bin/python scripts/compare_versions.py <older checkout> <newer checkout>

Each checkout must have its native library built in place. Compared are results, statistics, and checkpoints that one
has written and the other goes on from. `--cases` and `--runs` choose less.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (0, 1, 7, 63, 1025, 5000, 70001)
N_STEPS, SAVE_AFTER = 5, 3
CASES: dict[str, dict[str, Any]] = {
    "default": {"e": 4, "m": 3},
    "(3,0)": {"e": 3, "m": 0},
    "(5,2)": {"e": 5, "m": 2},
    "no specials": {"e": 4, "m": 3, "specials": False},
    "error feedback": {"e": 3, "m": 0, "error_feedback": True},
    "stochastic": {"e": 4, "m": 3, "rounding": "stochastic", "seed": 7},
    "stochastic, one seed formula": {"e": 4, "m": 3, "rounding": "stochastic", "seed": 7},
    "overrides": {"e": 4, "m": 3, "overrides": {"*4": (5, 2), "*5": "float32", "*6": (2, 1)}},
    "min_elements": {"e": 4, "m": 3, "min_elements": 64},
    "warmup": {"e": 4, "m": 3, "warmup_steps": 2},
    "auto": {"e": 4, "m": 3, "overrides": "auto", "auto_steps": 2},
    "accumulate=format": {"e": 4, "m": 3, "accumulate": "format"},
    "accumulate=kahan": {"e": 4, "m": 3, "accumulate": "kahan"},
    "stats": {"e": 4, "m": 3, "stats": True},
    "no scaling": {"e": 5, "m": 2, "scaling": False},
    "allreduce": {"e": 4, "m": 3, "transport": "allreduce"},
    "NaN on one rank": {"e": 4, "m": 3},
}
COMMON = {"bucket_mb": 0.05}


def gradients(case: str, step: int, rank: int) -> list[np.ndarray]:
    """What one rank hands in: layers of very different magnitude, one of zeros, one of float64."""
    rng = np.random.default_rng([len(case), step, rank])
    found = [(rng.standard_normal(n) * 10.0 ** rng.integers(-8, 5)).astype(np.float32) for n in SIZES]
    found.append(np.zeros(100, np.float32))
    found.append(rng.standard_normal(300))
    if case.startswith("NaN") and step == 1 and rank == 1:
        found[4][17] = np.nan
    return found


def use_one_seed_formula(case: str) -> Callable[[], None]:
    """Give the newer version the older one's seeds, for this case only; returns what undoes it."""
    try:
        from horovod_aps.engine.reductions import base
    except ImportError:  # it is the older one
        return lambda: None
    before = base.stochastic_seed
    if case == "stochastic, one seed formula":
        base.stochastic_seed = lambda options, step, stream: (options.seed << 40) ^ (step << 16) ^ stream
    return lambda: setattr(base, "stochastic_seed", before)


# ---- what runs on every rank ----------------------------------------------------------------------------------


def torch_steps(compressor: Any, case: str, hvd: Any) -> Callable[[int], list[np.ndarray]]:
    """A step of an optimizer whose hooks hand in the gradients."""
    import torch

    shapes = gradients(case, 0, 0)
    parameters = [torch.nn.Parameter(torch.zeros(len(one), dtype=torch.from_numpy(one).dtype)) for one in shapes]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, 1.0),
        [(f"{case}.{i}", parameter) for i, parameter in enumerate(parameters)],
        compression=compressor,
    )

    def step(number: int) -> list[np.ndarray]:
        optimizer.zero_grad()
        mine = [torch.from_numpy(one) for one in gradients(case, number, hvd.rank())]
        sum((parameter * one).sum().double() for parameter, one in zip(parameters, mine)).backward()
        optimizer.step()
        return [parameter.grad.numpy().copy() for parameter in parameters]

    return step


def tensorflow_steps(compressor: Any, case: str, hvd: Any) -> Callable[[int], list[np.ndarray]]:
    """A grouped all-reduce, in even steps eagerly and in odd ones in a graph."""
    import tensorflow as tf

    def reduce(*tensors: Any) -> Any:
        return hvd.grouped_allreduce(list(tensors), compression=compressor, name=case.replace(" ", "_"))

    graph = tf.function(reduce)

    def step(number: int) -> list[np.ndarray]:
        mine = [tf.constant(one) for one in gradients(case, number, hvd.rank())]
        return [one.numpy() for one in (graph if number % 2 else reduce)(*mine)]

    return step


def work(framework: str, out: Path, cases: list[str], states: Path | None) -> None:
    """Reduce all cases, or go on from states that were saved, and write down everything that is compared."""
    if framework == "torch":
        import horovod.torch as hvd

        from horovod_aps.torch import APSCompressor

        steps = torch_steps
    else:
        import horovod.tensorflow as hvd

        from horovod_aps.tensorflow import APSCompressor

        steps = tensorflow_steps
    hvd.init()
    found = {}
    for case in cases:
        undo = use_one_seed_formula(case)
        compressor = APSCompressor(**CASES[case], **COMMON)
        if states is not None:
            compressor.load_state_dict(pickle.loads((states / f"{hvd.rank()}.pkl").read_bytes())[case]["state"])
        take = steps(compressor, case, hvd)
        results, sent, state = [], [], None
        for number in range(SAVE_AFTER if states is not None else 0, N_STEPS):
            results.append(take(number))
            sent.append(compressor.stats()["bytes_sent"])
            if number == SAVE_AFTER - 1:
                state = compressor.state_dict()
                state["residuals"] = {name: np.asarray(one) for name, one in state["residuals"].items()}
        found[case] = {"results": results, "sent": sent, "stats": compressor.stats(), "state": state}
        undo()
    (out / f"{hvd.rank()}.pkl").write_bytes(pickle.dumps(found))
    hvd.shutdown()


# ---- launching and comparing ----------------------------------------------------------------------------------


def launch(checkout: Path, run: str, out: Path, cases: list[str], states: Path | None = None) -> Path:
    framework, launcher, n_ranks = run.split("-")
    out.mkdir(parents=True)
    here = Path(sys.executable).parent
    if launcher == "mpi":
        command = [*"mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -np".split()]
        command.append(n_ranks)
    else:
        command = [str(here / "horovodrun"), "--gloo", "-np", n_ranks, "-H", f"localhost:{n_ranks}"]
    command += [sys.executable, __file__, "--work", framework, "--out", str(out), "--cases", *cases]
    command += ["--states", str(states)] if states is not None else []
    env = os.environ | {"PYTHONPATH": str(checkout), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=env, cwd=out, capture_output=True, text=True, timeout=280)
    if done.returncode:
        raise SystemExit(f"{checkout} {run}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return out


def load(folder: Path) -> list[dict[str, Any]]:
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.pkl"))]


def bits(values: Any) -> Any:
    """Something that is equal if and only if all bits are."""
    if isinstance(values, np.ndarray):
        return values.dtype.str, values.tobytes()
    if isinstance(values, dict):
        return {str(key): bits(value) for key, value in values.items()}
    return [bits(value) for value in values] if isinstance(values, (list, tuple)) else repr(values)


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]], case: str) -> dict[str, bool | str]:
    """What is equal on all ranks."""

    def same(of: Callable[[dict[str, Any]], Any]) -> bool:
        return all(bits(of(a[case])) == bits(of(b[case])) for a, b in zip(old, new, strict=True))

    layers = ("format", "n_elements", "exponent", "n_exchanges", "n_nonfinite", "underflow", "error")
    found: dict[str, bool | str] = {
        "results": same(lambda one: one["results"]),
        "state": same(lambda one: {key: one["state"][key] for key in ("step_number", "residuals", "overrides")}),
        "statistics": same(
            lambda one: {
                name: {key: layer.get(key) for key in layers} for name, layer in one["stats"]["layers"].items()
            }
        ),
    }
    a, b = old[0][case]["sent"], new[0][case]["sent"]
    found["bytes per step"] = f"{a[-1] - a[-2]:.0f}" if a == b else f"{a[-1] - a[-2]:.0f} -> {b[-1] - b[-2]:.0f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="the older one, then the newer one")
    parser.add_argument("--runs", nargs="+", help="as torch-mpi-2; by default all")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument(
        "--states-of", nargs="*", default=["torch-mpi-2", "tensorflow-gloo-2"], help="runs that also swap checkpoints"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--states", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.out, args.cases, args.states)
        return
    older, newer = (path.resolve() for path in args.checkouts)
    every = [f"{f}-{kind}-{n}" for f in ("torch", "tensorflow") for kind in ("mpi", "gloo") for n in (2, 3)]
    with tempfile.TemporaryDirectory() as folder:
        for run in args.runs or every:
            there = Path(folder) / run
            a, b = (launch(one, run, there / name, args.cases) for one, name in ((older, "old"), (newer, "new")))
            for case in args.cases:
                print(run, case, compare(load(a), load(b), case), sep=" | ", flush=True)
            if run in args.states_of:
                kept = [case for case in args.cases if case != "stochastic"]
                onward = launch(newer, run, there / "new from old", kept, a)
                back = launch(older, run, there / "old from new", kept, b)
                for case in kept:
                    for name, went_on, whole in (("new from old", onward, a), ("old from new", back, b)):
                        pairs = zip(load(went_on), load(whole))
                        same = all(bits(p[case]["results"]) == bits(q[case]["results"][SAVE_AFTER:]) for p, q in pairs)
                        print(run, case, f"{name} goes on as if uninterrupted: {same}", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
