"""How the error of a gradient sum grows with the number of ranks, for every way of summing in low precision.

    python benchmarks/roundoff.py                       # N = 2..256, about a minute; writes to
    benchmarks/results python benchmarks/roundoff.py --ranks 2 8 --elements 200 --out /tmp/study

Relative error ||s - exact|| / ||exact|| of the sum against float64, for
  ring      the paper's sum: shared exponent of max|g|*N, re-rounded after every addition, in rank order
  kahan     the same with Kahan's correction, also in the format
  grouped   the same in two levels, groups of about sqrt(N) ranks
  float32   our exchange: APS exponent without the factor N, sum in float32, two roundings (one for N = 2)
  no scale  the paper's sum without APS: values rounded as they are
Gradients are either independent between ranks (they cancel: the hard case) or share their signal (they add
up).
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from horovod_aps.exchange import Layer, local_allreduce
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.simulate import sum_gradients

RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
FORMATS = ((5, 2), (4, 3), (3, 4), (3, 2), (3, 0))
SCALE = 1e-3  # of the gradients: below the range of (4, 3) without scaling, as real ones are


def gradients(kind: str, n_ranks: int, n_elements: int, seed: int) -> list[torch.Tensor]:
    """One layer's gradient on every rank; "shared" has a common part that is as large as the noise."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n_elements, generator=generator) if kind == "shared" else torch.zeros(n_elements)
    return [SCALE * (common + torch.randn(n_elements, generator=generator)) for _ in range(n_ranks)]


def exchange_sum(grads: Sequence[torch.Tensor], e: int, m: int) -> torch.Tensor:
    """The sum as the real exchange forms it, emulated ranks and all."""
    copies = [grad.clone() for grad in grads]
    layers = [[Layer("layer", tuple(g.shape), 0, g.data_ptr(), g.data_ptr(), 1.0, g)] for g in copies]
    local_allreduce(layers, Options(e=e, m=m), CpuKernels())
    return copies[0]


def _paper(**options: bool) -> Callable[..., torch.Tensor]:
    def total(grads: Sequence[torch.Tensor], e: int, m: int) -> torch.Tensor:
        result = sum_gradients([[grad] for grad in grads], e, m, **options)[0]
        assert result is not None
        return result

    return total


def _grouped(grads: Sequence[torch.Tensor], e: int, m: int) -> torch.Tensor:
    result = sum_gradients([[grad] for grad in grads], e, m, groups=max(1, round(math.sqrt(len(grads)))))[0]
    assert result is not None
    return result


METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "ring": _paper(),
    "kahan": _paper(kahan=True),
    "grouped": _grouped,
    "float32": exchange_sum,
    "no scale": _paper(aps=False),
}


def relative_error(total: torch.Tensor, grads: Sequence[torch.Tensor]) -> float:
    """Against the sum in float64."""
    exact = torch.stack([grad.double() for grad in grads]).sum(0)
    return float((total.double() - exact).norm() / exact.norm())


def study(arguments: argparse.Namespace) -> list[dict]:
    """One record per kind of gradient, format, method and number of ranks; the mean over the seeds."""
    records = []
    for kind in ("independent", "shared"):
        for n_ranks in arguments.ranks:
            for seed in range(arguments.seeds):
                grads = gradients(kind, n_ranks, arguments.elements, seed)
                for e, m in FORMATS:
                    for method, total in METHODS.items():
                        records.append(
                            {"kind": kind, "e": e, "m": m, "method": method, "ranks": n_ranks, "seed": seed,
                             "error": relative_error(total(grads, e, m), grads)}
                        )  # fmt: skip
    return records


def mean_error(records: list[dict], **wanted: object) -> float:
    """Mean over the seeds of the records that match."""
    chosen = [r["error"] for r in records if all(r[key] == value for key, value in wanted.items())]
    return sum(chosen) / len(chosen)


def tables(records: list[dict], ranks: Sequence[int]) -> str:
    """Markdown: one table per kind and format."""
    lines = []
    for kind in ("independent", "shared"):
        for e, m in FORMATS:
            lines += [f"### ({e},{m}), {kind} gradients", "", "| N | " + " | ".join(METHODS) + " |",
                      "| ---: |" + " ---: |" * len(METHODS)]  # fmt: skip
            for n in ranks:
                cells = [
                    f"{mean_error(records, kind=kind, e=e, m=m, method=method, ranks=n):.3f}"
                    for method in METHODS
                ]
                lines.append(f"| {n} | " + " | ".join(cells) + " |")
            lines.append("")
    return "\n".join(lines)


def save_plot(records: list[dict], ranks: Sequence[int], path: Path) -> None:
    """Error against N, a panel per format, independent gradients above shared ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(FORMATS), figsize=(3 * len(FORMATS), 6), sharex=True, sharey=True)
    for row, kind in enumerate(("independent", "shared")):
        for column, (e, m) in enumerate(FORMATS):
            axis = axes[row][column]
            for method in METHODS:
                errors = [mean_error(records, kind=kind, e=e, m=m, method=method, ranks=n) for n in ranks]
                axis.plot(ranks, errors, marker=".", label=method)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(f"({e},{m}), {kind}", fontsize=9)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    for axis in axes[1]:
        axis.set_xlabel("ranks")
    axes[0][0].set_ylabel("relative error of the sum")
    axes[1][0].set_ylabel("relative error of the sum")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    records = study(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = (
        f"python benchmarks/roundoff.py --elements {arguments.elements} --seeds {arguments.seeds} --ranks "
        + " ".join(map(str, arguments.ranks))
    )
    text = f"Written by `{command}`; mean over {arguments.seeds} seeds.\n\n" + tables(
        records, arguments.ranks
    )
    (arguments.out / "roundoff.md").write_text(text)
    (arguments.out / "roundoff.json").write_text(
        json.dumps({"command": command, "records": records}, indent=1) + "\n"
    )
    save_plot(records, arguments.ranks, arguments.out / "roundoff.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
