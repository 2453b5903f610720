"""`horovod-aps study`: does low precision help here, which format, and from which bandwidth on does it stop helping.

Runs and tabulates methods x networks x links x ranks x launchers. Cells are measured by real launches (`measured`) and
predicted by the performance model (`predicted`); `cells` keeps finished ones, `answers` puts them in words and `page`
on one HTML page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod_aps.bench.cluster import ClusterError, missing
from horovod_aps.tools import predict
from horovod_aps.tools.perfmodel import GBIT
from horovod_aps.tools.study import answers, page
from horovod_aps.tools.study.cells import (
    BUILT_IN,
    LOCAL,
    METHODS,
    RELATIVES,
    Place,
    Record,
    Store,
    check_link,
    network_of,
    parse_method,
    parse_network,
)
from horovod_aps.tools.study.measured import Effort, measure
from horovod_aps.tools.study.predicted import Setting, predicted_cells, stops_helping

KINDS = ("train", "sync")
SCRIPT = "script"


def add_parser(subparsers: Any) -> None:
    """Add the `study` subcommand."""
    parser = subparsers.add_parser("study", help="measure and predict which format helps, on which network and link")
    add = parser.add_argument
    add(
        "--networks",
        nargs="+",
        type=parse_network,
        help=f"of {', '.join((*BUILT_IN, *RELATIVES))}, or module:name (default: all, or none beside --script)",
    )
    add("--methods", nargs="+", type=parse_method, default=list(METHODS),
        help=f"fp32, fp16, and formats' texts, +ef with error feedback (default: {' '.join(METHODS)})")  # fmt: skip
    add("--links", nargs="+", type=check_link, default=["100mbit", "1gbit", "10gbit"],
        help="such as 1gbit, 1gbit+5ms, or shm for one machine as it is (default: 100mbit 1gbit 10gbit)")  # fmt: skip
    add("--ranks", nargs="+", type=predict.parse_count, default=[2], help="one on each host (default: 2)")
    add("--launchers", nargs="+", choices=("mpi", "gloo"), default=["mpi"], help="(default: mpi)")
    add("--measure", nargs="*", choices=KINDS, default=list(KINDS),
        help="train small networks, synchronise gradients of large ones; nothing if empty (default: both)")  # fmt: skip
    add("--measure-links", nargs="+", type=check_link, help="measure on these links only (default: those of --links)")
    add("--script", help="a command that trains, run once per method; see docs/study.md")
    add("--metric", default="accuracy", help="the word before the accuracy in the script's output (default: accuracy)")
    add("--target", type=_share, default=0.9, help="accuracy to reach, in 0..1 (default: 0.9)")
    add("--tolerance", type=_share, default=0.02, help="accuracy that a format may lose (default: 0.02)")
    add("--epochs", type=predict.parse_count, default=8, help="of the small networks (default: 8)")
    add("--seed", type=int, default=1, help="of the small networks (default: 1)")
    add("--batch", type=predict.parse_count, default=32, help="samples per rank and step (default: 32)")
    add("--tflops", type=_positive, default=5.0, help="what a rank computes, for predictions (default: 5)")
    add("--budget", type=_positive, default=10.0, help="seconds of timing per launch of --measure sync (default: 10)")
    add("--timeout", type=_positive, default=900.0, help="seconds for one launch (default: 900)")
    add("--calibration", type=Path, help="JSON written by horovod-aps calibrate, for predictions")
    add("--assume-defaults", action="store_true", help="take defaults for what the calibration could not measure")
    add("--out", type=Path, default=Path("out/study"), help="folder of results (default: out/study)")
    parser.set_defaults(run=run)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be in 0..1, got {text!r}")
    return value


class Progress:
    """How far a study is: a bar on a terminal, else a line for every launch."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self._n, self._total = 0, total
        if total and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc="study", unit="launch")

    def start(self, what: str) -> None:
        """A launch begins."""
        if self._bar is not None:
            self._bar.set_postfix_str(what)
        else:
            print(f"study: launch {self._n + 1} of {self._total}, {what}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """A launch is over."""
        self._n += 1
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def networks_of(args: argparse.Namespace) -> list[str]:
    """All that were asked for; with a script of one's own, none but those."""
    return list(dict.fromkeys(args.networks or ([] if args.script else [*BUILT_IN, *RELATIVES])))


def places(args: argparse.Namespace, links: Sequence[str]) -> list[Place]:
    """Where to measure."""
    kinds: list[tuple[str, str]] = [("script", SCRIPT)] if args.script else []
    for name in networks_of(args):
        if name in RELATIVES and "train" in args.measure:
            kinds.append(("trained", name))
        elif name not in RELATIVES and ":" not in name and "sync" in args.measure:
            kinds.append(("synchronised", name))
    grid = itertools.product(kinds, links, [n for n in args.ranks if n > 1], args.launchers)
    return [Place(kind, name, link, ranks, launcher) for (kind, name), link, ranks, launcher in grid]


def _links(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The links to measure on, and a note if they are not those that were asked for."""
    wanted = list(dict.fromkeys(args.measure_links or args.links))
    lacks = missing()
    if not lacks or wanted == [LOCAL]:
        return wanted, []
    note = (
        f"Hosts with slow links need {' and '.join(lacks)}: measured on this machine as it is (shm) instead of on "
        f"{', '.join(link for link in wanted if link != LOCAL)}."
    )
    return [LOCAL], [note]


def _measure_all(args: argparse.Namespace, store: Store, links: Sequence[str]) -> tuple[list[Record], list[str]]:
    """Run what is missing; the records that belong to this study, and what failed."""
    effort = Effort(args.epochs, args.batch, args.seed, args.budget, args.timeout, args.script, args.metric)
    methods = list(dict.fromkeys(args.methods))

    def lacking(place: Place) -> list[str]:
        return [name for name in methods if store.find(place, name, effort.settings(place.kind)) is None]

    wanted = places(args, links)
    todo = [place for place in wanted if lacking(place)]
    progress, failures = Progress(len(todo)), []
    for place in todo:
        progress.start(str(place))
        try:
            store.add(measure(place, lacking(place), effort))
        except ClusterError as error:
            failures.append(f"Failed and left out: {place}.")
            print(error, file=sys.stderr)
        progress.end()
    progress.close()
    found = [store.find(place, name, effort.settings(place.kind)) for place in wanted for name in methods]
    return [record for record in found if record is not None], failures


def _predict_all(args: argparse.Namespace, setting: Setting) -> list[Record]:
    methods = list(dict.fromkeys(args.methods))
    found: list[Record] = []
    for name, ranks, launcher in itertools.product(networks_of(args), args.ranks, args.launchers):
        if name not in RELATIVES:
            found += predicted_cells(network_of(name), args.links, ranks, launcher, methods, setting)
    return found


def _setting(args: argparse.Namespace) -> Setting:
    network, machine = predict.load_parameters(args.calibration, args.ranks, {}, True, args.assume_defaults)
    return Setting(replace(network, bandwidth=GBIT), machine, args.batch, args.tflops)


def notes(args: argparse.Namespace) -> list[str]:
    """What a reader must know of the numbers."""
    rates = f"calibrated ({args.calibration})" if args.calibration else "this program's defaults"
    return [
        f"Predicted steps take the published multiply-adds, {args.batch} samples per rank and {args.tflops:g} Tflop/s; "
        f"rates of kernels and latencies are {rates}. A format without rates has those of the nearest width, "
        f"and error feedback costs nothing in predictions.",
        "Measured: all ranks share this machine's processors. 'synchronised' is gradients of a network's shapes with "
        "nothing computed, 'trained' whole steps on scikit-learn's digits, one seed: a point of accuracy is noise.",
        "Methods that were added to a finished study later were timed in a launch of their own.",
    ]


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, predict, answer; 1 if a launch failed."""
    if "fp32" not in args.methods:
        args.methods = ["fp32", *args.methods]
    setting = _setting(args)
    predicted = _predict_all(args, setting)  # first: a network that cannot be had should not cost a launch
    args.out.mkdir(parents=True, exist_ok=True)
    links, remarks = _links(args) if args.measure or args.script else ([], [])
    measured, failures = _measure_all(args, Store(args.out / "cells.jsonl"), links)
    records = [*measured, *predicted]
    if not records:
        raise ValueError("nothing to study: give --networks, or --script, and 2 --ranks or more")
    (args.out / "predicted.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in predicted))

    def stops(network: str, method: str, ranks: int, launcher: str) -> float | None:
        return stops_helping(network_of(network), method, ranks, launcher, setting)

    names = [*([SCRIPT] if args.script else []), *networks_of(args)]
    grid = itertools.product(names, args.ranks, args.launchers)
    said = [answers.answer(records, name, ranks, launcher, args.tolerance, stops) for name, ranks, launcher in grid]
    found = [one for one in said if one is not None]
    remarks = [*remarks, *failures, *notes(args)]
    text = page.markdown(records, found, remarks, args.target)
    (args.out / "study.md").write_text(text)
    command = "horovod-aps study " + " ".join(sys.argv[2:])
    (args.out / "study.html").write_text(page.render(records, found, remarks, args.target, command), encoding="utf-8")
    print(text.partition("\n### ")[0])
    print(f"\nTables and plots: {args.out / 'study.html'}, {args.out / 'study.md'}")
    return 1 if failures else 0
