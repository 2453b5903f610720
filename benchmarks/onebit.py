"""Does 1 bit with error feedback train? Buckets, columns and tensors, with and without feedback, beside fp32.

    python benchmarks/onebit.py              # all runs, a quarter of an hour; results in out/studies
    python benchmarks/onebit.py --report     # the tables from its results
    python benchmarks/onebit.py --show       # the tables that are shipped

scikit-learn's digits on N emulated ranks through the real exchange, 32 samples per rank and step, momentum 0.9: a
perceptron with 256 hidden units, and the small relatives of `horovod-aps study`. All methods of a seed start from the
same weights and see the same batches.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from studies import Records, parse_arguments, show, values
from torch import nn

from horovod_aps.formats import OneBit
from horovod_aps.simulate import EmulatedOptimizer
from horovod_aps.tools.study.worker import RELATIVES, digits

BATCH = 32
SMALL = 2048  # layers below this travel as float32 in "small layers exact"


class WithoutFeedback(OneBit):
    """Options refuse 1 bit without error feedback; here is what they refuse."""

    needs_error_feedback = False


def perceptron() -> nn.Module:
    """19 thousand parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


NETWORKS: dict[str, tuple[Any, float]] = {"perceptron": (perceptron, 0.1), **RELATIVES}
CASES = (  # network, ranks, epochs
    ("perceptron", 2, 10),
    ("perceptron", 4, 20),
    ("digits_fc", 2, 12),
    ("digits_fc", 4, 30),
    ("digits_lstm", 2, 20),
)
METHODS: dict[str, dict[str, Any]] = {
    "fp32": {"format": "float32"},
    "column": {"format": OneBit("column"), "error_feedback": True},
    "column, small layers exact": {"format": OneBit("column"), "error_feedback": True, "min_elements": SMALL},
    "64": {"format": OneBit(64), "error_feedback": True},
    "tensor": {"format": OneBit("tensor"), "error_feedback": True},
    "column, no feedback": {"format": WithoutFeedback("column")},
}


def train(network: str, options: dict[str, Any], seed: int, n_ranks: int, epochs: int) -> float:
    """Train one network; its test accuracy."""
    images, labels, test_images, test_labels = digits()
    build, rate = NETWORKS[network]
    torch.manual_seed(seed)
    model = build()
    inner = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    optimizer = EmulatedOptimizer(inner, n_ranks, options, model.named_parameters())
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        shuffled = torch.randperm(len(labels), generator=order)
        for step in shuffled[: len(shuffled) // (BATCH * n_ranks) * BATCH * n_ranks].split(BATCH * n_ranks):
            shards = step.split(BATCH)

            def rank_loss(rank: int, shards: Any = shards) -> torch.Tensor:
                return F.cross_entropy(model(images[shards[rank]]), labels[shards[rank]])

            optimizer.step(rank_loss)
    model.eval()
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def study(n_seeds: int) -> Records:
    """All runs."""
    records = []
    for network, n_ranks, epochs in CASES:
        for method, options in METHODS.items():
            for seed in range(n_seeds):
                accuracy = train(network, options, seed, n_ranks, epochs)
                case = {"network": network, "ranks": n_ranks, "epochs": epochs, "method": method, "seed": seed}
                records.append({**case, "accuracy": accuracy})
            print(records[-1], flush=True)
    return records


def report(records: Records) -> str:
    """Markdown: mean test accuracy in %, with the lowest and highest of the seeds."""
    n_seeds = len({r["seed"] for r in records})
    lines = [
        "Written by `python benchmarks/onebit.py`.",
        "",
        f"Test accuracy on digits in %, mean of {n_seeds} seeds (lowest to highest)",
        "",
        "| network, ranks, epochs | " + " | ".join(METHODS) + " |",
        "| --- |" + " ---: |" * len(METHODS),
    ]
    for network, ranks, epochs in CASES:
        cells = []
        for method in METHODS:
            found = values(records, "accuracy", network=network, ranks=ranks, epochs=epochs, method=method)
            low, mean, high = (100 * f for f in (min(found), statistics.fmean(found), max(found)))
            cells.append(f"{mean:.1f} ({low:.1f} to {high:.1f})")
        lines.append(f"| {network}, {ranks}, {epochs} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parse_arguments(parser, argv)
    if arguments.show:
        return show("onebit")
    path = arguments.out / "onebit.json"
    if not arguments.report:
        torch.set_num_threads(1)  # layers are too small to share
        path.write_text(json.dumps({"runs": study(arguments.seeds)}, indent=1) + "\n")
    text = report(json.loads(path.read_text())["runs"])
    (arguments.out / "onebit.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
