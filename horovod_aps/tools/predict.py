"""`horovod-aps predict`: tables and a plot of what APS would buy, from perfmodel and a model's shapes."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod_aps.tools import perfmodel, shapes
from horovod_aps.tools.perfmodel import GBIT, Machine, Network

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SCALING_RANKS = [2**k for k in range(1, 11)]


def parse_bandwidth(text: str) -> float:
    """Bytes per second of "1gbit", "100mbit", "1.5GB" (per second understood)."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(bit|b)(/s|ps)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"bandwidth must look like 1gbit, 100mbit or 1.5GB, got {text!r}")
    value, unit, kind = float(match[1]), UNITS[match[2].lower()], match[3].lower()
    return value * unit / (8 if kind == "bit" else 1)


def parse_time(text: str) -> float:
    """Seconds of "50us", "5ms", "0.1s"; a bare number is in seconds."""
    match = re.fullmatch(r"([0-9.e-]+)\s*(us|ms|s|)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"time must look like 50us, 5ms or 0.1s, got {text!r}")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}[match[2]]


def parse_format(text: str) -> tuple[int, int]:
    """(e, m) of "4,3"."""
    match = re.fullmatch(r"\(?(\d+),(\d+)\)?", text.strip())
    if not match or not 1 <= int(match[1]) <= 8 or not 0 <= int(match[2]) <= 23:
        raise argparse.ArgumentTypeError(f"format must be e,m with e in 1..8 and m in 0..23, got {text!r}")
    return int(match[1]), int(match[2])


def add_parser(subparsers: Any) -> None:
    """Add the `predict` subcommand."""
    parser = subparsers.add_parser("predict", help="predict time, speed-up and scaling of APS on a network")
    parser.add_argument(
        "--model",
        default="resnet50",
        help="a built-in model, or module:function returning a torch.nn.Module (default: resnet50)",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--bandwidth", type=parse_bandwidth, nargs="+", help="such as 1gbit (default: calibrated, or 1gbit)"
    )
    parser.add_argument(
        "--latency", type=parse_time, help="of one message, such as 50us (default: calibrated, or 50us)"
    )
    parser.add_argument("--ranks-per-host", type=int, help="ranks that share one host's link")
    parser.add_argument("--intra-bandwidth", type=parse_bandwidth, help="between ranks of one host")
    parser.add_argument(
        "--host-rate", type=parse_bandwidth, help="what a rank moves through its network stack, such as 1GB (no limit)"
    )
    parser.add_argument(
        "--allreduce",
        choices=perfmodel.ALLREDUCES,
        help="Horovod's own for fp32 and fp16; openmpi over MPI (default: calibrated, or ring)",
    )
    parser.add_argument(
        "--hierarchical",
        action="store_true",
        help="Horovod's two-level all-reduce (HOROVOD_HIERARCHICAL_ALLREDUCE) for fp32 and fp16",
    )
    parser.add_argument("--format", type=parse_format, nargs="+", default=[(4, 3)], metavar="E,M")
    parser.add_argument("--forward-ms", type=float, default=0.0, help="of one step on one rank")
    parser.add_argument(
        "--backward-ms", type=float, default=0.0, help="of one step; communication overlaps with it"
    )
    parser.add_argument("--calibration", type=Path, help="JSON written by horovod-aps calibrate")
    parser.add_argument("--scaling", action="store_true", help="also print scaling from 2 to 1024 ranks")
    parser.add_argument("--plot", type=Path, help="save a plot of time against bandwidth and ranks here")
    parser.add_argument("--json", type=Path, help="save the tables here")
    parser.set_defaults(run=run)


def model_sizes(name: str) -> list[int]:
    """Element counts of a built-in model's gradients, or of `module:function`'s, in forward order."""
    if ":" in name:
        module, _, function = name.partition(":")
        if os.getcwd() not in sys.path:  # an installed command does not look here by itself
            sys.path.insert(0, os.getcwd())
        try:
            model = getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--model must be module:function that can be imported, got {name!r}: {error}") from error
        return [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    if name not in shapes.MODELS:
        raise ValueError(
            f"--model must be one of {', '.join(shapes.MODELS)} or module:function, got {name!r}"
        )
    return shapes.layer_sizes(name)


def load_parameters(args: argparse.Namespace) -> tuple[Network, Machine]:
    """Calibrated (or default) parameters with the command line's changes."""
    network, machine = Network(), Machine()
    if args.calibration:
        network, machine = perfmodel.load_calibration(args.calibration)
    changes = {
        name: getattr(args, name)
        for name in ("latency", "ranks_per_host", "intra_bandwidth", "host_rate", "allreduce")
        if getattr(args, name) is not None
    }
    return replace(network, hierarchical=args.hierarchical, **changes), machine


def nominal(network: Network, bandwidth: float) -> Network:
    """The network with links of this nominal rate; a calibrated one was measured as payload, without headers."""
    return replace(network, bandwidth=bandwidth, efficiency=Network().efficiency)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned for a terminal too."""
    widths = [max(len(str(row[i])) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True))
            + " |"
        )

    return "\n".join(
        [line(headers), "| " + " | ".join("-" * width for width in widths) + " |", *map(line, rows)]
    )


def show_bandwidth(value: float) -> str:
    """Gbit/s for people; break-even may be 0 or infinite."""
    if math.isinf(value):
        return "always"
    return "never" if value == 0 else f"{value / GBIT:.3g} Gbit/s"


def predictions(
    sizes: list[int],
    ranks: Sequence[int],
    links: Sequence[Network],
    formats: Sequence[tuple[int, int]],
    machine: Machine,
    forward: float,
    backward: float,
) -> list[dict[str, Any]]:
    """One record per link, rank count and method."""
    records = []
    for link in links:
        for n in ranks:
            methods = {
                "fp32": perfmodel.predict_ring(sizes, n, link, machine, 32, backward),
                "fp16": perfmodel.predict_ring(sizes, n, link, machine, 16, backward),
            }
            for e, m in formats:
                methods[f"aps({e},{m})"] = perfmodel.predict_exchange(sizes, n, link, machine, e, m, backward)
            for method, value in methods.items():
                record = {
                    "bandwidth": link.bandwidth,
                    "ranks": n,
                    "method": method,
                    "total_s": value.total,
                    "exposed_s": value.exposed,
                    "wire_s": value.wire,
                    "cpu_s": value.cpu,
                    "bytes_sent": value.bytes_sent,
                    "speedup": methods["fp32"].total / value.total if value.total else 1.0,
                }
                if forward + backward > 0:
                    record["efficiency"] = perfmodel.scaling_efficiency(value, forward, backward)
                records.append(record)
    return records


def print_predictions(records: Sequence[dict[str, Any]]) -> None:
    """The table of `predictions`."""
    timed = "efficiency" in records[0]
    headers = ["link Gbit/s", "ranks", "method", "ms", "over fp32", "wire ms", "cpu ms", "MB sent"]
    rows = []
    for record in records:
        row = [
            f"{record['bandwidth'] / GBIT:g}",
            record["ranks"],
            record["method"],
            f"{1e3 * record['total_s']:.1f}",
            f"{record['speedup']:.2f}x",
            f"{1e3 * record['wire_s']:.1f}",
            f"{1e3 * record['cpu_s']:.1f}",
            f"{record['bytes_sent'] / 1e6:.1f}",
        ]
        rows.append(row + ([f"{100 * record['efficiency']:.0f} %"] if timed else []))
    print(table(headers + (["scaling"] if timed else []), rows))


def save_plot(
    path: Path,
    sizes: list[int],
    links: Sequence[Network],
    formats: Sequence[tuple[int, int]],
    machine: Machine,
    ranks: Sequence[int],
    forward: float,
    backward: float,
    title: str,
) -> None:
    """Left: time against bandwidth at the first rank count. Right: time against ranks at the first link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidths = [10 ** (k / 6) * GBIT for k in range(-6, 13)]
    by_link = predictions(
        sizes,
        [ranks[0]],
        [nominal(links[0], b) for b in bandwidths],
        formats,
        machine,
        forward,
        backward,
    )
    by_rank = predictions(sizes, SCALING_RANKS, [links[0]], formats, machine, forward, backward)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, records, key, unit in ((axes[0], by_link, "bandwidth", GBIT), (axes[1], by_rank, "ranks", 1)):
        for method in dict.fromkeys(record["method"] for record in records):
            chosen = [record for record in records if record["method"] == method]
            axis.plot(
                [record[key] / unit for record in chosen],
                [1e3 * record["total_s"] for record in chosen],
                marker=".",
                label=method,
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylabel("ms per synchronisation")
        axis.grid(alpha=0.3)
    axes[0].set_xlabel(f"Gbit/s, {ranks[0]} ranks")
    axes[1].set_xlabel(f"ranks, {links[0].bandwidth / GBIT:g} Gbit/s")
    axes[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> int:
    """Print the tables that were asked for."""
    network, machine = load_parameters(args)
    if min(args.ranks) < 1:
        raise ValueError(f"--ranks must be at least 1, got {min(args.ranks)}")
    sizes = model_sizes(args.model)
    links = [nominal(network, b) for b in args.bandwidth] if args.bandwidth else [network]
    forward, backward = args.forward_ms / 1e3, args.backward_ms / 1e3
    print(f"{args.model}: {len(sizes)} layers, {sum(sizes) / 1e6:.2f} M parameters\n")
    records = predictions(sizes, args.ranks, links, args.format, machine, forward, backward)
    print_predictions(records)

    rows = []
    for e, m in args.format:
        for n in args.ranks:
            limits = [
                perfmodel.break_even_bandwidth(
                    sizes, n, nominal(network, network.bandwidth), machine, e, m, bits, backward
                )
                for bits in (32, 16)
            ]
            rows.append([f"({e},{m})", n, *map(show_bandwidth, limits)])
    print("\nAPS pays below this bandwidth:\n")
    print(table(["format", "ranks", "against fp32", "against fp16"], rows))
    if args.scaling:
        print(f"\nScaling at {links[0].bandwidth / GBIT:g} Gbit/s:\n")
        scaling = predictions(sizes, SCALING_RANKS, [links[0]], args.format, machine, forward, backward)
        print_predictions(scaling)
        records = records + scaling
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "predictions": records}, indent=2) + "\n")
    if args.plot:
        save_plot(args.plot, sizes, links, args.format, machine, args.ranks, forward, backward, args.model)
        print(f"\nplot: {args.plot}")
    return 0
