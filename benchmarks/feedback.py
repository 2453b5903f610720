"""What does error feedback buy at 4 bits? Every run is paired with the fp32 run of its seed.

    python benchmarks/feedback.py              # all runs, a quarter of an hour; results in out/studies
    python benchmarks/feedback.py --report     # tables, claims and plot from its results
    python benchmarks/feedback.py --seeds 2    # a quick look
    python benchmarks/feedback.py --show       # the tables that are shipped

A network of one hidden layer learns scikit-learn's digits on N emulated ranks through the real exchange. It has
no batch normalisation and the same batches in every run, so a run follows its fp32 twin closely, and what rounding
has cost is the training loss above that twin's. Photographs (accuracy.py) are the opposite: there any two runs
drift apart, and seeds differ by more than 4 bits do.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from accuracy_tasks import Task, load
from studies import Records, parse_arguments, pyplot, save, show, values
from torch import nn

from horovod_aps.simulate import EmulatedOptimizer

FORMATS = ((3, 2), (2, 1), (3, 0))
VARIANTS: dict[str, dict[str, Any]] = {
    "aps": {},
    "aps + feedback": {"error_feedback": True},
    "no aps": {"scaling": False},
    "no aps + feedback": {"scaling": False, "error_feedback": True},
}
FP32 = {"e": 4, "m": 3, "overrides": {"*": "float32"}}
HIDDEN, EPOCHS, BATCH, RATE = 256, 20, 64, 0.1


def train(task: Task, options: dict[str, Any], seed: int, n_ranks: int, epochs: int) -> dict[str, float]:
    """Train one network; its loss on all training data and its test accuracy."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    inner = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    optimizer = EmulatedOptimizer(inner, n_ranks, options, model.named_parameters())
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(task.train_y), generator=order).split(BATCH):
            shards = chosen.tensor_split(n_ranks)

            def rank_loss(rank: int, shards: Any = shards) -> torch.Tensor:
                return F.cross_entropy(model(task.train_x[shards[rank]]), task.train_y[shards[rank]])

            optimizer.step(rank_loss)
    with torch.no_grad():
        loss = float(F.cross_entropy(model(task.train_x), task.train_y))
    return {"loss": loss, "accuracy": task.score(model)}


def study(n_seeds: int, rank_counts: Sequence[int], epochs: int) -> Records:
    """All runs; `excess` is the training loss above fp32's, as a share of it."""
    task = load("classification", None)
    records = []
    for n_ranks in rank_counts:
        for seed in range(n_seeds):
            fp32 = train(task, FP32, seed, n_ranks, epochs)
            records.append({"ranks": n_ranks, "seed": seed, "variant": "fp32", "excess": 0.0, **fp32})
            for e, m in FORMATS:
                for variant, options in VARIANTS.items():
                    run = train(task, {"e": e, "m": m, **options}, seed, n_ranks, epochs)
                    record = {"ranks": n_ranks, "seed": seed, "variant": variant, "e": e, "m": m, **run}
                    records.append({**record, "excess": run["loss"] / fp32["loss"] - 1})
            print(f"{n_ranks} ranks, seed {seed}: fp32 loss {fp32['loss']:.4f}", flush=True)
    return records


def report(records: Records, epochs: int) -> str:
    """Markdown: a table per number of ranks, and how often feedback came closer to fp32."""
    lines = ["Written by `python benchmarks/feedback.py`.", ""]
    for n_ranks in sorted({r["ranks"] for r in records}):
        mine = [r for r in records if r["ranks"] == n_ranks]
        fp32 = values(mine, "accuracy", variant="fp32")
        lines += [
            f"### digits, {n_ranks} ranks, {epochs} epochs, {len(fp32)} seeds",
            "",
            f"Training loss above fp32's in %, and test accuracy in % (fp32: {100 * statistics.fmean(fp32):.2f})",
            "",
            "| format | bits | " + " | ".join(VARIANTS) + " |",
            "| --- | ---: |" + " ---: |" * len(VARIANTS),
        ]
        for e, m in FORMATS:
            cells = []
            for variant in VARIANTS:
                excess = values(mine, "excess", variant=variant, e=e, m=m)
                accuracy = values(mine, "accuracy", variant=variant, e=e, m=m)
                cells.append(f"{100 * statistics.fmean(excess):+.1f}, {100 * statistics.fmean(accuracy):.2f}")
            lines.append(f"| ({e},{m}) | {1 + e + m} | " + " | ".join(cells) + " |")
        lines.append("")
        for e, m in FORMATS:
            for variant in ("aps", "no aps"):
                won, n_seeds = wins(mine, variant, e, m)
                held = "holds" if won > n_seeds / 2 else "DOES NOT HOLD"
                lines.append(
                    f"- {held}: ({e},{m}), {variant}: closer to fp32 with error feedback ({won} of {n_seeds} seeds)"
                )
        lines.append("")
    return "\n".join(lines)


def wins(records: Records, variant: str, e: int, m: int) -> tuple[int, int]:
    """In how many seeds feedback has the training loss nearer to fp32's, and of how many."""
    without = values(records, "excess", variant=variant, e=e, m=m)
    with_feedback = values(records, "excess", variant=f"{variant} + feedback", e=e, m=m)
    return sum(abs(b) < abs(a) for a, b in zip(without, with_feedback, strict=True)), len(without)


def save_plot(records: Records, path: Path) -> None:
    """Distance of the training loss from fp32's, a dot per seed."""
    counts = sorted({r["ranks"] for r in records})
    figure, axes = pyplot().subplots(1, len(counts), figsize=(6 * len(counts), 4), squeeze=False, sharey=True)
    for axis, n_ranks in zip(axes[0], counts, strict=True):
        for k, variant in enumerate(VARIANTS):
            for i, (e, m) in enumerate(FORMATS):
                excess = values(records, "excess", ranks=n_ranks, variant=variant, e=e, m=m)
                axis.scatter(
                    [i + 0.15 * (k - 1.5)] * len(excess),
                    [100 * abs(x) for x in excess],
                    16,
                    f"C{k}",
                    alpha=0.7,
                    label=variant if i == 0 else None,
                )
        axis.set_yscale("log")
        axis.set_xticks(range(len(FORMATS)), [f"({e},{m})" for e, m in FORMATS])
        axis.set_title(f"digits, {n_ranks} ranks: training loss off fp32's, %")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncol=len(VARIANTS))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parse_arguments(parser, argv)
    if arguments.show:
        return show("feedback")
    path = arguments.out / "feedback.json"
    if not arguments.report:
        torch.set_num_threads(1)  # layers are too small to share
        records = study(arguments.seeds, arguments.ranks, arguments.epochs)
        path.write_text(json.dumps({"runs": records}, indent=1) + "\n")
    records = json.loads(path.read_text())["runs"]
    text = report(records, arguments.epochs)
    (arguments.out / "feedback.md").write_text(text)
    save_plot(records, arguments.images / "feedback.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
