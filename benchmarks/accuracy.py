"""Does training survive 8, 6 or 4 bits? N emulated ranks, every format, with and without APS.

    python benchmarks/accuracy.py --data-dir data    # all runs; continues where it stopped
    python benchmarks/accuracy.py --report           # tables and plot from the results so far
    python benchmarks/accuracy.py --show             # the tables that are shipped; nothing runs
    python benchmarks/accuracy.py --tasks classification --formats 4,3 --variants fp32 aps --seeds 1

Every run trains from the same initial weights on the same batches as the runs of other variants with its
seed; only the gradient exchange differs, and it is the real one (horovod_aps.simulate.EmulatedOptimizer).
Photographs are read from `cifar10-small` and `camvid-small` in --data-dir; without --data-dir both tasks are made of
scikit-learn's digits, so figures are others. Results go to `accuracy_<task>.json` after every run (one process per task
uses two cores), then to `accuracy.md` and `accuracy.png`, all in out/studies or --out; runs on other data, or with
other ranks or epochs, get tables of their own.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accuracy_tasks import TASKS, Task, folder_of, load
from studies import Records, parse_arguments, pyplot, save, show, values

from horovod_aps.simulate import EmulatedOptimizer
from horovod_aps.tools.predict import parse_format

FORMATS = ((5, 2), (4, 3), (3, 4), (3, 2), (3, 0), (2, 1))
# What a variant changes in APSCompressor's options.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"overrides": {"*": "float32"}},
    "aps": {},
    "no aps": {"scaling": False},
    # The layers that the paper keeps: the last one, and the few values of the normalisations.
    "hybrid": {"overrides": {"head.*": "float32"}, "min_elements": 128},
    "stochastic": {"rounding": "stochastic"},
    "feedback": {"error_feedback": True},
}
SETTING = ("task", "source", "ranks", "epochs")  # runs are compared within one
RECIPES = {
    "classification": {"epochs": 6, "batch": 128, "lr": 0.1},
    "segmentation": {"epochs": 12, "batch": 8, "lr": 0.1},
}


def options_of(variant: str, e: int, m: int, seed: int) -> dict[str, Any]:
    """Arguments of APSCompressor for one run."""
    return {"e": e, "m": m, "seed": seed, **VARIANTS[variant]}


def train(task: Task, options: dict[str, Any], seed: int, n_ranks: int, epochs: int) -> tuple[float, float]:
    """Train one model; returns its test score and the mean loss of the last epoch."""
    recipe = RECIPES[task.name]
    torch.manual_seed(seed)
    model = task.model()
    inner = torch.optim.SGD(model.parameters(), recipe["lr"], momentum=0.9, weight_decay=5e-4)
    optimizer = EmulatedOptimizer(inner, n_ranks, options, model.named_parameters())
    batch = min(recipe["batch"], len(task.train_y))
    n_steps = epochs * (len(task.train_y) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda step: min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / n_steps))
    )
    order = torch.Generator().manual_seed(1000 + seed)
    losses: list[float] = []
    for _ in range(epochs):
        losses.clear()
        permutation = torch.randperm(len(task.train_y), generator=order)
        for chosen in permutation[: len(permutation) // batch * batch].split(batch):
            flip = bool(torch.rand((), generator=order) < 0.5) and task.source != "digits"
            shards = chosen.tensor_split(n_ranks)

            def rank_loss(rank: int, shards: Any = shards, flip: bool = flip) -> torch.Tensor:
                x, y = task.train_x[shards[rank]], task.train_y[shards[rank]]
                if flip:
                    x = x.flip(-1)
                    y = y.flip(-1) if y.dim() > 1 else y
                return task.loss(model, x, y)

            losses.append(float(optimizer.step(rank_loss)))
            schedule.step()
    return task.score(model), statistics.fmean(losses)


def planned(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs asked for, seeds outermost so that an interrupted study is complete for the first seeds."""
    runs = []
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for variant in arguments.variants:
                formats = [(8, 23)] if variant == "fp32" else arguments.formats
                runs += [{"task": task, "variant": variant, "e": e, "m": m, "seed": seed} for e, m in formats]
    return runs


def read_records(folder: Path, task: str) -> Records:
    """The runs of one task so far."""
    path = folder / f"accuracy_{task}.json"
    return json.loads(path.read_text())["runs"] if path.exists() else []


def study(arguments: argparse.Namespace) -> None:
    """Run what is missing; a file per task, so that two processes can share the work."""
    tasks: dict[str, Task] = {}
    n_known = 0
    runs = planned(arguments)
    for run in runs:
        if run["task"] not in tasks:
            task = tasks[run["task"]] = load(run["task"], arguments.data_dir)
            print(f"{run['task']} of {task.source}: {len(task.train_y)} images to train on, {len(task.test_y)} to test")
        task, path = tasks[run["task"]], arguments.out / f"accuracy_{run['task']}.json"
        records = read_records(arguments.out, run["task"])
        epochs = arguments.epochs or RECIPES[run["task"]]["epochs"]
        run |= {"source": task.source, "ranks": arguments.ranks, "epochs": epochs}
        if any(all(record.get(key) == value for key, value in run.items()) for record in records):
            n_known += 1
            continue
        start = time.monotonic()
        e, m = (4, 3) if run["variant"] == "fp32" else (run["e"], run["m"])
        score, loss = train(task, options_of(run["variant"], e, m, run["seed"]), run["seed"], arguments.ranks, epochs)
        records.append({**run, "score": score, "loss": loss if math.isfinite(loss) else None,
                        "seconds": round(time.monotonic() - start, 1)})  # fmt: skip
        path.write_text(json.dumps({"runs": records}, indent=1) + "\n")
        print(
            f"{run['task']:15} {run['variant']:10} ({run['e']},{run['m']}) seed {run['seed']}: {score:.4f}",
            flush=True,
        )
    if n_known:
        print(f"{n_known} of {len(runs)} runs were in {arguments.out} already and were not run again")


def settings(records: Records) -> list[Records]:
    """The runs by task, data, ranks and epochs."""
    groups: dict[tuple[Any, ...], Records] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in SETTING), []).append(record)
    return list(groups.values())


def scores(records: Records, variant: str, e: int, m: int) -> list[float]:
    """Scores of one cell of a setting's table, by seed; fp32 has one row for all formats."""
    wanted = {} if variant == "fp32" else {"e": e, "m": m}
    return values(records, "score", variant=variant, **wanted)


def cell(values: list[float]) -> str:
    """Mean and spread (standard deviation over the seeds) in percent."""
    if not values:
        return "-"
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def claims(records: Records) -> list[tuple[str, bool | None]]:
    """The statements that the study is to check in one setting; None if the runs for it are missing."""
    fp32 = scores(records, "fp32", 8, 23)

    def mean(variant: str, e: int, m: int) -> float | None:
        found = scores(records, variant, e, m)
        return statistics.fmean(found) if found else None

    # Seed noise: two standard errors of a difference of means.
    noise = 2 * statistics.stdev(fp32) * math.sqrt(2 / len(fp32)) if len(fp32) > 1 else 0.01
    out: list[tuple[str, bool | None]] = []
    for e, m in ((4, 3), (5, 2)):
        value = mean("aps", e, m)
        held = None if value is None or not fp32 else value >= statistics.fmean(fp32) - noise
        out.append((f"({e},{m}) with APS is within the seed noise of fp32 ({100 * noise:.1f} points)", held))
    pairs = [(mean("aps", e, m), mean("no aps", e, m)) for e, m in FORMATS if 1 + e + m <= 8 and (e, m) != (5, 2)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    out.append(("without APS clearly worse somewhere at (4,3) or below",
                any(a - b > max(noise, 0.03) for a, b in known) if known else None))  # fmt: skip
    pairs = [(mean("hybrid", e, m), mean("aps", e, m)) for e, m in FORMATS]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    out.append(("hybrid is not below pure (beyond noise)", all(a >= b - noise for a, b in known) if known else None))
    a, b = mean("feedback", 3, 0), mean("aps", 3, 0)
    points = "" if a is None or b is None else f" ({100 * (a - b):+.1f} points)"
    out.append((f"(3,0) is better with error feedback{points}", None if a is None or b is None else a > b))
    return out


def report(records: Records) -> str:
    """Markdown tables, one per setting: formats down, variants across; then the claims."""
    lines: list[str] = []
    variants = [variant for variant in VARIANTS if variant != "fp32"]
    for mine in settings(records):
        first = mine[0]
        unit = "test accuracy" if first["task"] == "classification" else "mean IoU"
        n_seeds = len({record["seed"] for record in mine})
        lines += [
            f"### {first['task']}: {unit} in %, {first['source']}, {first['ranks']} ranks, {first['epochs']} epochs, "
            f"{n_seeds} seeds",
            "",
            f"fp32: {cell(scores(mine, 'fp32', 8, 23))}",
            "",
            "| format | bits | " + " | ".join(variants) + " |",
            "| --- | ---: |" + " ---: |" * len(variants),
        ]
        for e, m in sorted({(r["e"], r["m"]) for r in mine if r["variant"] != "fp32"}, key=lambda f: (-sum(f), f)):
            cells = " | ".join(cell(scores(mine, variant, e, m)) for variant in variants)
            lines.append(f"| ({e},{m}) | {1 + e + m} | {cells} |")
        lines.append("")
        for text, held in claims(mine):
            lines.append(f"- {'not run' if held is None else 'holds' if held else 'DOES NOT HOLD'}: {text}")
        lines.append("")
    return "\n".join(lines)


def save_plot(records: Records, path: Path) -> None:
    """Score by format, a panel per setting, one line per variant, fp32 as a band of one standard deviation."""
    groups = settings(records)
    figure, axes = pyplot().subplots(1, len(groups), figsize=(6 * len(groups), 4), squeeze=False)
    for axis, mine in zip(axes[0], groups, strict=True):
        fp32 = scores(mine, "fp32", 8, 23)
        if fp32:
            mean, spread = statistics.fmean(fp32), statistics.stdev(fp32) if len(fp32) > 1 else 0
            axis.axhspan(100 * (mean - spread), 100 * (mean + spread), color="0.85", label="fp32")
        for variant in VARIANTS:
            found = [(f"({e},{m})", scores(mine, variant, e, m)) for e, m in FORMATS]
            found = [(name, v) for name, v in found if v and variant != "fp32"]
            if found:
                axis.errorbar([name for name, _ in found], [100 * statistics.fmean(v) for _, v in found],
                              [100 * statistics.stdev(v) if len(v) > 1 else 0 for _, v in found],
                              marker="o", capsize=2, label=variant)  # fmt: skip
        unit = "accuracy" if mine[0]["task"] == "classification" else "mean IoU"
        axis.set_title(f"{mine[0]['task']}, {mine[0]['source']} ({unit}, %)")
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="holds cifar10-small and camvid-small (default: train on scikit-learn's digits instead)",
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--formats", type=parse_format, nargs="+", default=list(FORMATS), metavar="E,M")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, help="default: 6 and 12")
    arguments = parse_arguments(parser, argv)
    if arguments.show:
        return show("accuracy")
    if not arguments.report:
        for task in arguments.tasks if arguments.data_dir else ():
            if not folder_of(task, arguments.data_dir).is_dir():
                parser.error(f"--data-dir: {folder_of(task, arguments.data_dir)} is not a folder; see --help")
        study(arguments)
    records = [record for task in TASKS for record in read_records(arguments.out, task)]
    if not records:
        print(f"accuracy.py: {arguments.out} has no runs yet", file=sys.stderr)
        return 1
    text = "Written by `python benchmarks/accuracy.py`.\n\n" + report(records)
    (arguments.out / "accuracy.md").write_text(text)
    save_plot(records, arguments.images / "accuracy.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
