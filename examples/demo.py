"""Train one network on real data with five gradient formats on two hosts, and show what each costs and gives.

    python examples/demo.py            (or `make demo`; about a minute)

The hosts are network namespaces joined by a 1 Gbit/s link, so the bytes in the table are what their network
interfaces counted, headers and all. Where that is not allowed (no root), both ranks run on this machine over
loopback instead, and the table says so. Writes out/demo.png, out/demo.json and out/demo_report.html.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import Cluster, ClusterError  # noqa: E402

WORKER = Path(__file__).with_name("demo_worker.py")
YIELD = {"mpi_yield_when_idle": "1"}  # other programs may want the cores too
LOOPBACK = {"btl": "tcp,self", "btl_tcp_if_include": "lo", **YIELD}
COLORS = {
    "fp32": "#555555",
    "fp16": "#1f77b4",
    "APS (4,3)": "#2ca02c",
    "APS (3,0) + EF": "#9467bd",
    "(4,3) without APS": "#d62728",
}


def run(folder: Path, rate: str, arguments: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Run the worker on two hosts, or on this one; returns its results and how they were counted."""
    results = folder / "demo.json"
    results.unlink(missing_ok=True)
    # One thread per rank: the two share this machine, and results must not depend on its cores.
    env = {"OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "0.2" if sys.stderr.isatty() else "5"}
    command = [sys.executable, str(WORKER), str(results), *arguments]
    try:
        with Cluster(2, rate=rate) as cluster:
            done = cluster.mpirun([*command, "--interface", "eth0"], env=env, capture=False, extra_mca=YIELD)
        counted = f"sent per host, counted at the network interfaces of two hosts joined at {rate}/s"
    except ClusterError as error:
        print(f"demo: {error}\ndemo: going on with two ranks on this machine, over loopback.\n", flush=True)
        with Cluster(2, rate="shm") as cluster:
            done = cluster.mpirun([*command, "--interface", "lo"], env=env, capture=False, extra_mca=LOOPBACK)
        counted = "half of what loopback counted, which includes other programs' traffic"
    if done.returncode != 0 or not results.exists():
        raise subprocess.CalledProcessError(done.returncode or 1, command)
    return json.loads(results.read_text()), counted


def table(results: list[dict[str, Any]]) -> str:
    """The results as lines of text, one row for each format."""
    titles = f"{'gradients as':<20}{'accuracy':>9}{'bytes/step':>12}{'of fp32':>9}{'ms/step':>9}"
    lines = [f"{titles}  replicas identical"]
    lines.append("-" * len(lines[0]))
    for row in results:
        lines.append(
            f"{row['name']:<20}{row['accuracy']:>8.1%} {row['bytes_per_step']:>11,.0f}"
            f"{row['bytes_per_step'] / results[0]['bytes_per_step']:>9.3f}{row['ms_per_step']:>9.1f}  "
            f"{'yes' if row['identical'] else 'NO'}"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Loss curves on the left, accuracy against bytes on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    window = 10
    for row in results:
        smooth = np.convolve(row["losses"], np.ones(window) / window, mode="valid")
        left.plot(np.arange(window, window + len(smooth)), smooth, color=COLORS[row["name"]], label=row["name"])
        right.scatter(
            row["bytes_per_step"] / 1e6,
            100 * row["accuracy"],
            s=70,
            color=COLORS[row["name"]],
            label=row["name"],
            zorder=3,
        )
    left.set(xlabel="step", ylabel=f"training loss (mean of {window} steps)", title="Loss", yscale="log")
    right.set(
        xlabel="MB sent per step and rank",
        ylabel="test accuracy, %",
        title="Accuracy against bytes",
        xlim=(0, None),
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("One small conv net on scikit-learn's digits, 2 ranks, one seed")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data for each format (10)")
    parser.add_argument("--rate", default="1gbit", help="of the link between the hosts (1gbit)")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the plot and the figures (out)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(
        "demo: the same network and data five times on 2 ranks; only the gradients' format differs.\n",
        flush=True,
    )
    try:
        results, counted = run(args.out.resolve(), args.rate, ["--epochs", str(args.epochs)])
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    plot(results, args.out / "demo.png")
    print(
        f"\n{table(results)}\n\nbytes/step: {counted}.\nEF is error feedback. Accuracy is of one seed on 360 "
        f"test images: its standard error is about one point.\nms/step is a median. Both ranks compute on this "
        f"machine, which takes as long in every row, so time falls less than bytes.\nPlot: "
        f"{args.out / 'demo.png'}   Report of APS (4,3), layer by layer: {args.out / 'demo_report.html'}"
    )
    return 0 if all(row["identical"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
