"""Pictures of the benchmark's results, made by sync.py or by `python benchmarks/plots.py sync.json`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from horovod_aps.bench.cases import Case
from horovod_aps.bench.names import label

LABEL, TITLE = 13, 15  # points; pages show the picture at about half its width
COLOURS = {"horovod": "#7f7f7f", "aps": "#1f77b4", "packed": "#2ca02c", "ddp": "#d9a441"}


def _colour(method: str) -> str:
    return COLOURS[method.partition(":")[0].split("_")[0]]


def plot_cases(results: list[dict[str, Any]], path: Path) -> None:
    """One panel per case: a bar per method with its spread, labelled with the speed-up over Horovod fp32."""
    n_columns = min(2, len(results))
    n_rows = -(-len(results) // n_columns)
    n_bars = [len(result["methods"]) for result in results]
    heights = [0.9 + 0.36 * max(n_bars[row * n_columns :][:n_columns]) for row in range(n_rows)]  # inches
    figure, axes = plt.subplots(
        n_rows, n_columns, figsize=(6.5 * n_columns, sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        names = list(result["methods"])[::-1]
        rows = [result["methods"][name] for name in names]
        medians = [1e3 * one["median"] for one in rows]
        spread = [
            [1e3 * (one["median"] - one["low"]) for one in rows],
            [1e3 * (one["high"] - one["median"]) for one in rows],
        ]
        axis.barh(
            [label(name) for name in names],
            medians,
            xerr=spread,
            color=[_colour(name) for name in names],
            error_kw={"elinewidth": 0.8, "alpha": 0.6},
        )
        for k, one in enumerate(rows):
            if one["over_horovod_fp32"] is not None:
                axis.text(1e3 * one["high"], k, f"  {one['over_horovod_fp32']:.2f}x", va="center", fontsize=LABEL)
        case = result["case"]
        axis.set_title(str(Case(**case)), fontsize=TITLE)
        axis.set_xlabel("ms per " + ("step" if case["work"] == "step" else "synchronisation"), fontsize=LABEL)
        axis.set_xlim(0, 1.25 * max(1e3 * one["high"] for one in rows))
        axis.tick_params(labelsize=LABEL)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_scaling(results: list[dict[str, Any]], path: Path) -> None:
    """Time and bytes per rank, relative to the fewest hosts, with the model 2(N-1)/N."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    n_ranks = [result["n_ranks"] for result in results]
    model = [2 * (n - 1) / n for n in n_ranks]
    for axis, key, title in (
        (axes[0], "median", "time per synchronisation"),
        (axes[1], "bytes", "bytes per rank"),
    ):
        axis.plot(n_ranks, [value / model[0] for value in model], "k--", label="2(N-1)/N")
        for name in results[0]["methods"]:
            values = [result["methods"][name][key] for result in results]
            if None not in values:
                axis.plot(n_ranks, [value / values[0] for value in values], "o-", label=label(name))
        axis.set_xticks(n_ranks)
        axis.set_xlabel("hosts, one rank each", fontsize=LABEL)
        axis.tick_params(labelsize=LABEL)
        axis.set_title(f"{title}, relative to {n_ranks[0]} hosts", fontsize=TITLE)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=LABEL)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    source = Path(sys.argv[1])
    results = json.loads(source.read_text())["results"]
    (plot_scaling if source.stem == "scaling" else plot_cases)(results, source.with_suffix(".png"))


if __name__ == "__main__":
    main()
