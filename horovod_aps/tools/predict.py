"""What APS would buy: `horovod-aps predict` prints tables and a plot, `horovod_aps.predict(model)` returns them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from horovod_aps.formats import FloatFormat, Format, parse
from horovod_aps.tools import modelparallel, perfmodel, shapes
from horovod_aps.tools.perfmodel import GBIT, Machine, Network

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
SCALING_RANKS = [2**k for k in range(1, 11)]
# What a command line gives can stand in for what a calibration lacks.
OPTIONS = {
    "bandwidth": "--bandwidth",
    "latency": "--latency",
    "intra_bandwidth": "--intra-bandwidth",
    "intra_latency": "--intra-latency",
}


def parse_bandwidth(text: str) -> float:
    """Bytes per second of "1gbit", "100mbit", "1.5GB" (per second understood)."""
    match = re.fullmatch(NUMBER + r"\s*([kmgt]?)(bit|b)(/s|ps)?", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"bandwidth must look like 1gbit, 100mbit or 1.5GB, got {text!r}")
    value, unit, kind = float(match[1]), UNITS[match[2].lower()], match[3].lower()
    return value * unit / (8 if kind == "bit" else 1)


def parse_time(text: str) -> float:
    """Seconds of "50us", "5ms", "0.1s"; a bare number could mean any of them, and is refused."""
    match = re.fullmatch(NUMBER + r"\s*(ns|us|ms|s)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"time must have a unit, as 50us, 5ms or 0.1s, got {text!r}")
    return float(match[1]) * TIME_UNITS[match[2]]


def parse_milliseconds(text: str) -> float:
    """A number of milliseconds, for options whose name says so."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"milliseconds must be a number that is not negative, got {text!r}")
    return value


AnyFormat = tuple[int, int] | Format


def parse_format(text: str) -> AnyFormat:
    """(e, m) of "4,3", or any format by its text, such as "qsgd4"."""
    match = re.fullmatch(r"\(?(\d+),(\d+)\)?", text.strip())
    if not match:
        with contextlib.suppress(ValueError):
            return parse(text.strip())
    if not match or not 1 <= int(match[1]) <= 8 or not 0 <= int(match[2]) <= 23:
        raise argparse.ArgumentTypeError(f"format must be e,m with e in 1..8 and m in 0..23, got {text!r}")
    return int(match[1]), int(match[2])


def wire_format(fmt: AnyFormat) -> Format:
    """The format itself."""
    return fmt if isinstance(fmt, Format) else FloatFormat(*fmt)


def parse_count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def add_parser(subparsers: Any) -> None:
    """Add the `predict` subcommand."""
    parser = subparsers.add_parser("predict", help="predict time, speed-up and scaling of APS on a network")
    parser.add_argument(
        "--scheme",
        choices=("data-parallel", "model-parallel"),
        default="data-parallel",
        help="what ranks exchange: gradients, or activations of fully-connected layers that they share "
        "(default: data-parallel)",
    )
    parser.add_argument(
        "--model",
        default="resnet50",
        help=f"one of {', '.join(shapes.MODELS)}, or module:name of a model of PyTorch or Keras, or of a function that "
        f"returns one (default: resnet50)",
    )
    parser.add_argument(
        "--ranks", type=parse_count, nargs="+", default=[2, 4, 8], help="numbers of ranks (default: 2 4 8)"
    )
    parser.add_argument(
        "--bandwidth", type=parse_bandwidth, nargs="+", help="such as 1gbit (default: calibrated, or 1gbit)"
    )
    parser.add_argument(
        "--latency", type=parse_time, help="of one message, such as 50us (default: calibrated, or 50us)"
    )
    parser.add_argument(
        "--ranks-per-host", type=parse_count, help="ranks that share one host's link (default: calibrated, or 1)"
    )
    parser.add_argument("--intra-bandwidth", type=parse_bandwidth, help="between ranks of one host, such as 8GB")
    parser.add_argument("--intra-latency", type=parse_time, help="between ranks of one host, such as 2us")
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
    parser.add_argument(
        "--format",
        type=parse_format,
        nargs="+",
        default=[(4, 3)],
        metavar="E,M",
        help='exponent and mantissa bits, or any format by its text, such as "qsgd4" (default: 4,3)',
    )
    parser.add_argument(
        "--forward-ms",
        type=parse_milliseconds,
        default=0.0,
        help="milliseconds of forward in one step on one rank (default: 0)",
    )
    parser.add_argument(
        "--backward-ms",
        type=parse_milliseconds,
        default=0.0,
        help="milliseconds of backward in one step, which communication overlaps with (default: 0)",
    )
    parser.add_argument("--calibration", type=Path, help="JSON written by horovod-aps calibrate")
    parser.add_argument(
        "--assume-defaults",
        action="store_true",
        help="take this program's defaults for what the calibration could not measure",
    )
    parser.add_argument("--scaling", action="store_true", help="also print scaling from 2 to 1024 ranks")
    parser.add_argument("--plot", type=Path, help="save a plot of time against bandwidth and ranks here")
    parser.add_argument("--json", type=Path, help="save the tables here")
    modelparallel.add_arguments(parser, parse_count, parse_milliseconds)
    parser.set_defaults(run=run)


def model_sizes(model: Any) -> list[int]:
    """Element counts of a model's gradients in forward order.

    `model` is a built-in model's name, "module:name", a model of PyTorch or Keras, or a list of element counts.
    """
    if not isinstance(model, str):
        return _sizes_of(model, repr(type(model).__name__))
    if ":" not in model:
        if model not in shapes.MODELS:
            raise ValueError(f"--model must be one of {', '.join(shapes.MODELS)}, or module:name, got {model!r}")
        return shapes.layer_sizes(model)
    module, _, name = model.partition(":")
    if os.getcwd() not in sys.path:  # an installed command does not look here by itself
        sys.path.insert(0, os.getcwd())
    try:
        found = reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model must be module:name that can be imported, got {model!r}: {error}") from error
    is_model = not isinstance(found, type) and (hasattr(found, "parameters") or hasattr(found, "trainable_variables"))
    return _sizes_of(found if is_model or not callable(found) else found(), model)


def _sizes_of(model: Any, name: str) -> list[int]:
    if hasattr(model, "trainable_variables"):
        sizes = [math.prod(variable.shape) for variable in model.trainable_variables]
    elif hasattr(model, "parameters"):
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    elif isinstance(model, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in model):
        sizes = list(model)
    else:
        kind = type(model).__name__
        raise ValueError(f"--model must be a model of PyTorch or Keras, or give one, got {name}, which is a {kind}")
    if not sizes:
        raise ValueError(f"--model must have trainable parameters, got {name} with none; a Keras model must be built")
    return sizes


def load_parameters(
    path: Path | None,
    ranks: Sequence[int],
    changes: dict[str, Any],
    bandwidth_given: bool = False,
    assume_defaults: bool = False,
) -> tuple[Network, Machine]:
    """Calibrated (or default) parameters with `changes`; ValueError names those that are neither measured nor given."""
    found = perfmodel.Calibration(Network(), Machine())
    if path is not None:
        found = perfmodel.load_calibration(path, assume_defaults)
    network = replace(found.network, **changes)
    lacking = found.unmeasured.keys() - changes.keys() - ({"bandwidth"} if bandwidth_given else set())
    if max(ranks) <= network.ranks_per_host:
        lacking -= {"bandwidth", "latency"}
    if network.ranks_per_host == 1:
        lacking -= {"intra_bandwidth", "intra_latency"}
    if lacking:
        reasons = "; ".join(f"{name} ({found.unmeasured[name]})" for name in sorted(lacking))
        options = [OPTIONS[name] for name in sorted(lacking) if name in OPTIONS]
        way = f"give {' and '.join(options)}" if len(options) == len(lacking) else "calibrate again"
        raise ValueError(f"{path} did not measure {reasons}; {way}, or take defaults by --assume-defaults")
    return network, found.machine


def nominal(network: Network, bandwidth: float) -> Network:
    """The network with links of this nominal rate; a calibrated one was measured as payload, without headers."""
    return replace(network, bandwidth=bandwidth, efficiency=Network().efficiency)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, aligned for a terminal too."""
    widths = [max(len(str(row[i])) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(headers), "| " + " | ".join("-" * width for width in widths) + " |", *map(line, rows)])


def show_ranges(ranges: Sequence[tuple[float, float]]) -> str:
    """Ranges of bandwidth for people."""

    def one(low: float, high: float) -> str:
        if low == 0:
            return "always" if math.isinf(high) else f"below {high / GBIT:.3g} Gbit/s"
        return f"above {low / GBIT:.3g} Gbit/s" if math.isinf(high) else f"{low / GBIT:.3g} to {high / GBIT:.3g} Gbit/s"

    return " and ".join(one(*pair) for pair in ranges) or "never"


@dataclass(frozen=True)
class Question:
    """What is to be predicted; seconds of forward and backward."""

    sizes: list[int]
    ranks: Sequence[int]
    links: Sequence[Network]
    formats: Sequence[AnyFormat]
    machine: Machine
    forward: float
    backward: float


def predictions(question: Question) -> list[dict[str, Any]]:
    """One record per link, rank count and method."""
    sizes, machine, forward, backward = question.sizes, question.machine, question.forward, question.backward
    records = []
    for link in question.links:
        for n in question.ranks:
            methods = {
                "fp32": perfmodel.predict_ring(sizes, n, link, machine, 32, backward),
                "fp16": perfmodel.predict_ring(sizes, n, link, machine, 16, backward),
            }
            for fmt in question.formats:
                name = str(fmt) if isinstance(fmt, Format) else f"aps({fmt[0]},{fmt[1]})"
                for hierarchy in ("auto", "flat") if perfmodel.has_two_levels(n, link) else ("auto",):
                    methods[name if hierarchy == "auto" else f"{name} flat"] = perfmodel.predict_exchange(
                        sizes,
                        n,
                        link,
                        machine,
                        backward=backward,
                        hierarchy=hierarchy,
                        wire_format=wire_format(fmt),
                    )
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
                    "host_bytes": value.host_bytes,
                    "speedup": methods["fp32"].total / value.total if value.total else 1.0,
                }
                if forward + backward > 0:
                    record["efficiency"] = perfmodel.scaling_efficiency(value, forward, backward)
                records.append(record)
    return records


def predictions_table(records: Sequence[dict[str, Any]]) -> str:
    """The table of `predictions`."""
    timed = "efficiency" in records[0]
    headers = ["link Gbit/s", "ranks", "method", "ms", "over fp32", "wire ms", "cpu ms", "MB per rank", "MB per host"]
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
            f"{record['host_bytes'] / 1e6:.1f}",
        ]
        rows.append(row + ([f"{100 * record['efficiency']:.0f} %"] if timed else []))
    return table(headers + (["scaling"] if timed else []), rows)


@dataclass(frozen=True)
class Forecast:
    """What `predict` found; `print` shows it as the command does.

    `records` has one dict per link, rank count and method, with seconds and bytes. `pays` tells, by format and ranks,
    the ranges of bandwidth (bytes/s) in which APS is faster than fp32 and than fp16.
    """

    name: str
    sizes: list[int]
    records: list[dict[str, Any]]
    pays: dict[tuple[AnyFormat, int], tuple[list[tuple[float, float]], list[tuple[float, float]]]]

    def __str__(self) -> str:
        rows = [
            [str(fmt) if isinstance(fmt, Format) else f"({fmt[0]},{fmt[1]})", n, *map(show_ranges, both)]
            for (fmt, n), both in self.pays.items()
        ]
        return "\n".join(
            [
                f"{self.name}: {len(self.sizes)} layers, {sum(self.sizes) / 1e6:.2f} M parameters",
                "",
                predictions_table(self.records),
                "",
                "APS is faster at these bandwidths:",
                "",
                table(["format", "ranks", "than fp32", "than fp16"], rows),
            ]
        )


def forecast(name: str, question: Question) -> Forecast:
    """Everything for these links; the ranges of bandwidth agree with the times at the links."""
    links = question.links
    # A calibrated link was measured as payload; other bandwidths are nominal.
    link = nominal(links[0], links[0].bandwidth)
    also = [one.bandwidth * one.efficiency / link.efficiency for one in links]
    pays = {}
    for fmt in question.formats:
        for n in question.ranks:
            against = [
                perfmodel.paying_bandwidths(
                    question.sizes,
                    n,
                    link,
                    question.machine,
                    bits=bits,
                    backward=question.backward,
                    also=also,
                    wire_format=wire_format(fmt),
                )
                for bits in (32, 16)
            ]
            pays[fmt, n] = (against[0], against[1])
    return Forecast(name, question.sizes, predictions(question), pays)


def predict(
    model: Any,
    ranks: int | Sequence[int] = (2, 4, 8),
    bandwidth: str | Sequence[str] | None = None,
    *,
    formats: Sequence[AnyFormat | str] = ((4, 3),),
    forward_ms: float = 0.0,
    backward_ms: float = 0.0,
    calibration: str | Path | None = None,
    assume_defaults: bool = False,
    **network: Any,
) -> Forecast:
    """Predict time, speed-up and scaling of APS for a model, without any network.

    Args:
        model: a model of PyTorch or (built) Keras, a built-in model's name, or a list of element counts.
        ranks: one or several numbers of ranks.
        bandwidth: of the links, such as "1gbit" or ["1gbit", "10gbit"]; calibrated, or 1gbit, if left out.
        formats: (e, m) of each APS format, or any format of `horovod_aps.formats` or its text.
        forward_ms: milliseconds of forward in one step on one rank.
        backward_ms: milliseconds of backward, which communication overlaps with.
        calibration: file that `horovod-aps calibrate` wrote.
        assume_defaults: take defaults for what the calibration could not measure.
        network: other parameters of `horovod_aps.perfmodel.Network`, such as ranks_per_host=8.
    """
    counts = [ranks] if isinstance(ranks, int) else list(ranks)
    if not counts or min(counts) < 1:
        raise ValueError(f"predict: ranks must be at least 1, got {ranks}")
    for label, value in (("forward_ms", forward_ms), ("backward_ms", backward_ms)):
        if not 0 <= value < math.inf:
            raise ValueError(f"predict: {label} must be finite and not negative, got {value}")
    texts = [bandwidth] if isinstance(bandwidth, str) else list(bandwidth or [])
    path = None if calibration is None else Path(calibration)
    base, machine = load_parameters(path, counts, network, bool(texts), assume_defaults)
    try:
        links = [nominal(base, parse_bandwidth(text)) for text in texts] or [base]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"predict: {error}") from None
    name = model if isinstance(model, str) else type(model).__name__
    times = forward_ms / 1e3, backward_ms / 1e3
    wanted = [parse(fmt) if isinstance(fmt, str) else fmt for fmt in formats]
    return forecast(name, Question(model_sizes(model), counts, links, wanted, machine, *times))


def save_plot(path: Path, question: Question, title: str) -> None:
    """Left: time against bandwidth at the first rank count. Right: time against ranks at the first link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidths = [10 ** (k / 6) * GBIT for k in range(-6, 13)]
    ranks, link = question.ranks[0], question.links[0]
    by_link = predictions(replace(question, ranks=[ranks], links=[nominal(link, b) for b in bandwidths]))
    by_rank = predictions(replace(question, ranks=SCALING_RANKS, links=[link]))
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
    axes[0].set_xlabel(f"Gbit/s, {ranks} ranks")
    axes[1].set_xlabel(f"ranks, {link.bandwidth / GBIT:g} Gbit/s")
    axes[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> int:
    """Print the tables that were asked for."""
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    changes = {
        name: getattr(args, name)
        for name in ("latency", "ranks_per_host", "intra_bandwidth", "intra_latency", "host_rate", "allreduce")
        if getattr(args, name) is not None
    }
    ranks = [*args.ranks, *(SCALING_RANKS if args.scaling or args.plot else [])]
    network, machine = load_parameters(
        args.calibration,
        ranks,
        changes | {"hierarchical": args.hierarchical},
        bool(args.bandwidth),
        args.assume_defaults,
    )
    links = [nominal(network, b) for b in args.bandwidth] if args.bandwidth else [network]
    if args.scheme == "model-parallel":
        return modelparallel.run(args, links, [wire_format(fmt) for fmt in args.format])
    times = args.forward_ms / 1e3, args.backward_ms / 1e3
    question = Question(model_sizes(args.model), args.ranks, links, args.format, machine, *times)
    found = forecast(args.model, question)
    print(found)
    records = found.records
    if args.scaling:
        print(f"\nScaling at {links[0].bandwidth / GBIT:g} Gbit/s:\n")
        scaling = predictions(replace(question, ranks=SCALING_RANKS, links=links[:1]))
        print(predictions_table(scaling))
        records = records + scaling
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "predictions": records}, indent=2) + "\n")
    if args.plot:
        save_plot(args.plot, question, args.model)
        print(f"\nplot: {args.plot}")
    return 0
