"""How the error of a gradient sum grows with the number of ranks, for every way of summing in low precision.

    python benchmarks/roundoff.py                                 # N = 2..256, a few minutes; results in out/studies
    python benchmarks/roundoff.py --report                        # tables and plot again
    python benchmarks/roundoff.py --ranks 2 8 --elements 200      # a quick look
    python benchmarks/roundoff.py --show                          # the tables that are shipped

Relative error ||s - exact|| / ||exact|| of the sum against float64, for
  ring      the paper's sum: shared exponent of max|g|*N, re-rounded after every addition, in rank order
  kahan     the same with Kahan's correction, also in the format
  grouped   the same in two levels, groups of about sqrt(N) ranks
  float32   our exchange: APS exponent without the factor N, sum in float32, two roundings (one for N = 2)
  two hosts our exchange in two levels: float32 sums of half of the ranks each, then as float32 with N = 2
  no scale  the paper's sum without APS: values rounded as they are
Gradients are either "independent" between ranks (they cancel: the hard case) or "shared": a signal that all ranks have
plus noise of the same size (they add up).
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from studies import Records, parse_arguments, pyplot, save, show, values

from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.simulate import sum_gradients
from horovod_aps.transports.hosts import HostedTransport
from horovod_aps.transports.local import LocalTransport

RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
FORMATS = ((5, 2), (4, 3), (3, 4), (3, 2), (3, 0))
SCALE = 1e-3  # of the gradients: below the range of (4, 3) without scaling, as real ones are


def gradients(kind: str, n_ranks: int, n_elements: int, seed: int) -> list[torch.Tensor]:
    """One layer's gradient on every rank; "shared" has a common part that is as large as the noise."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n_elements, generator=generator) if kind == "shared" else torch.zeros(n_elements)
    return [SCALE * (common + torch.randn(n_elements, generator=generator)) for _ in range(n_ranks)]


def _exchange(n_hosts: int | None) -> Callable[..., torch.Tensor]:
    def total(grads: Sequence[torch.Tensor], e: int, m: int) -> torch.Tensor:
        """The sum as the real exchange forms it, emulated ranks and all."""
        copies, options, exchanges = [grad.clone() for grad in grads], Options(e=e, m=m), None
        layers = [[Layer("layer", tuple(g.shape), 0, g.data_ptr(), g.data_ptr(), 1.0, g)] for g in copies]
        if n_hosts is not None:
            exchanges = [
                Exchange(CpuKernels(), HostedTransport(one, host=str(n_hosts * one.rank // len(grads))), options)
                for one in LocalTransport.world(len(grads))
            ]
        local_allreduce(layers, options, CpuKernels(), exchanges)
        return copies[0]

    return total


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
    "float32": _exchange(None),
    "two hosts": _exchange(2),
    "no scale": _paper(aps=False),
}


def relative_error(total: torch.Tensor, grads: Sequence[torch.Tensor]) -> float:
    """Against the sum in float64."""
    exact = torch.stack([grad.double() for grad in grads]).sum(0)
    return float((total.double() - exact).norm() / exact.norm())


def study(arguments: argparse.Namespace) -> Records:
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


def mean_error(records: Records, **wanted: object) -> float:
    """Mean over the seeds of the records that match."""
    return statistics.fmean(values(records, "error", **wanted))


def tables(records: Records) -> str:
    """Markdown: one table per kind and format."""
    lines = []
    ranks = list(dict.fromkeys(record["ranks"] for record in records))
    for kind in ("independent", "shared"):
        for e, m in FORMATS:
            lines += [f"### ({e},{m}), {kind} gradients", "", "| N | " + " | ".join(METHODS) + " |",
                      "| ---: |" + " ---: |" * len(METHODS)]  # fmt: skip
            for n in ranks:
                cells = [
                    f"{mean_error(records, kind=kind, e=e, m=m, method=method, ranks=n):.3f}" for method in METHODS
                ]
                lines.append(f"| {n} | " + " | ".join(cells) + " |")
            lines.append("")
    return "\n".join(lines)


def save_plot(records: Records, path: Path) -> None:
    """Error against N, a panel per format, independent gradients above shared ones."""
    ranks = list(dict.fromkeys(record["ranks"] for record in records))
    figure, axes = pyplot().subplots(2, len(FORMATS), figsize=(3 * len(FORMATS), 6), sharex=True, sharey=True)
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
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--elements", type=int, default=16384)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parse_arguments(parser, argv)
    if arguments.show:
        return show("roundoff")
    path = arguments.out / "roundoff.json"
    if not arguments.report:
        command = (
            f"python benchmarks/roundoff.py --elements {arguments.elements} --seeds {arguments.seeds} --ranks "
            + " ".join(map(str, arguments.ranks))
        )
        path.write_text(json.dumps({"command": command, "records": study(arguments)}, indent=1) + "\n")
    document = json.loads(path.read_text())
    text = f"Written by `{document['command']}`; mean over the seeds.\n\n" + tables(document["records"])
    (arguments.out / "roundoff.md").write_text(text)
    save_plot(document["records"], arguments.images / "roundoff.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
