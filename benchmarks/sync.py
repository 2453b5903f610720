"""Time gradient synchronisation by every method, side by side in one run, over links of chosen rates.

    python benchmarks/sync.py                                     # the default selection, under 15 minutes
    python benchmarks/sync.py --works resnet50 --links 100mbit 1gbit+5ms --hosts 3 4 --launchers mpi gloo
    python benchmarks/sync.py --ddp --links 1gbit 10gbit          # DDP plain, its hooks, and ours
    python benchmarks/sync.py --links shm                         # needs no root
    python benchmarks/sync.py --scaling                           # cost per rank for 2, 4 and 8 hosts

Prints a table per case and writes `sync.json`, `sync.md` and `sync.png` (`scaling.*` for --scaling) to --out.
In each case one process per host is launched (horovod_aps/bench/worker.py), in which all Horovod methods take turns,
and then another for the DDP methods, on the same hosts.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plots import plot_cases, plot_scaling

from horovod_aps.bench.cases import Case, Settings, run_case
from horovod_aps.bench.cluster import ClusterError
from horovod_aps.bench.names import DDP_METHODS, DEFAULT_METHODS, EXTRA_METHODS, FORMAT_METHODS, label
from horovod_aps.bench.works import WORKS

LINKS = ("100mbit", "1gbit", "10gbit", "1gbit+5ms", "shm")
SCALING_METHODS = ("horovod_fp32", "horovod_fp16", "aps_4_3")


DEFAULT_CASES = (
    *(Case(work, "1gbit") for work in ("resnet50", "flat", "step", "mobilenet_v2", "small")),
    Case("resnet50", "10gbit"),
    *(Case(work, "shm") for work in ("resnet50", "mobilenet_v2", "small")),
    Case("resnet50", "1gbit", launcher="gloo"),
    *(Case("resnet50", link, launcher="gloo", only_ddp=True) for link in ("1gbit", "10gbit")),
    Case("digits", "1gbit", n_places=2),
    Case("digits", "1gbit", n_places=4),
    Case("digits", "1gbit", n_hosts=3, n_places=2),
    Case("digits", "1gbit", launcher="gloo", n_places=4),
)
HOST_METHODS = ("horovod_fp32", "horovod_fp16", "aps_4_3", "aps_4_3_flat", "aps_3_0")
"""Of cases with several ranks on each host."""


def table(result: dict[str, Any]) -> str:
    """A case as a Markdown table."""
    case = Case(**result["case"])
    n_rounds = min(len(one["seconds"]) for one in result["methods"].values())
    per = "step" if case.work == "step" else "synchronisation"
    rounds = "rounds" if result["in_a_row"] == 1 else f"rounds of {result['in_a_row']} in a row"
    lines = [
        f"### {case}",
        "",
        f"{result['n_elements'] / 1e6:.2f} M elements, at least {n_rounds} {rounds}; "
        f"time is the median per {per} (fastest to slowest)",
        "",
        "| method | time, ms | MB per host | over fp32 | over fp16 | share of the wire | relative error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in result["methods"].items():
        cells = [
            label(name),
            f"{one['median'] * 1e3:.1f} ({one['low'] * 1e3:.1f} to {one['high'] * 1e3:.1f})",
            _cell(one["bytes"], lambda value: f"{value / 1e6:.2f}"),
            _cell(one["over_horovod_fp32"], lambda value: f"{value:.2f}x"),
            _cell(one["over_horovod_fp16"], lambda value: f"{value:.2f}x"),
            _cell(one["wire_share"], lambda value: f"{value:.0%}"),
            _cell(one["error"], lambda value: f"{value:.1e}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    differing = [label(name) for name, one in result["methods"].items() if not one["identical"]]
    if differing:
        lines += ["", f"Ranks do not agree bit for bit: {', '.join(differing)}."]
    return "\n".join(lines) + "\n"


def _cell(value: float | None, show: Any) -> str:
    return "-" if value is None else str(show(value))


def scaling_table(results: list[dict[str, Any]]) -> str:
    """Time and bytes per rank against 2(N-1)/N, both relative to two hosts."""
    lines = [
        "| hosts | method | time, ms | over N = 2 | MB per rank | model 2(N-1)/N, MB | model over N = 2 |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    first = results[0]
    for result in results:
        n_ranks, n_first = result["n_ranks"], first["n_ranks"]
        model_ratio = (n_ranks - 1) / n_ranks / ((n_first - 1) / n_first)
        for name, one in result["methods"].items():
            ratio = one["median"] / first["methods"][name]["median"]
            lines.append(
                f"| {n_ranks} | {label(name)} | {one['median'] * 1e3:.1f} | {ratio:.2f}x | "
                f"{_cell(one['bytes'], lambda value: f'{value / 1e6:.2f}')} | "
                f"{_cell(one['model_bytes'], lambda value: f'{value / 1e6:.2f}')} | {model_ratio:.2f}x |"
            )
    return "\n".join(lines) + "\n"


def choose_cases(arguments: argparse.Namespace) -> list[Case]:
    """The default selection, or the product of whatever was asked for."""
    if arguments.scaling:
        work = (arguments.works or ["mobilenet_v2"])[0]
        link = (arguments.links or ["100mbit"])[0]
        return [Case(work, link, n, (arguments.launchers or ["mpi"])[0]) for n in arguments.hosts or [2, 4, 8]]
    layout = (arguments.hosts, arguments.ranks_per_host, arguments.launchers)
    if not any((arguments.works, arguments.links, *layout, arguments.ddp)):
        return list(DEFAULT_CASES)
    return [
        Case(work, link, n_hosts, launcher, arguments.ddp, n_places)
        for launcher in arguments.launchers or (["gloo"] if arguments.ddp else ["mpi"])
        for n_places in arguments.ranks_per_host or [1]
        for n_hosts in arguments.hosts or [2]
        for link in arguments.links or ["1gbit"]
        for work in arguments.works or ["resnet50"]
    ]


def choose_methods(case: Case, arguments: argparse.Namespace) -> Sequence[str]:
    if arguments.methods:
        return list(arguments.methods)
    if arguments.scaling:
        return SCALING_METHODS
    if case.only_ddp:
        return DDP_METHODS
    if case.n_places > 1:
        return HOST_METHODS
    if case == Case("resnet50", "1gbit"):
        return DEFAULT_METHODS + FORMAT_METHODS + EXTRA_METHODS
    return DEFAULT_METHODS


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS)
    parser.add_argument("--links", nargs="+", help=f"such as {', '.join(LINKS)}")
    parser.add_argument("--hosts", nargs="+", type=int, help="numbers of hosts (2)")
    parser.add_argument("--ranks-per-host", nargs="+", type=int, help="numbers of ranks on each host (1)")
    parser.add_argument("--launchers", nargs="+", choices=("mpi", "gloo"))
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"of {' '.join(DEFAULT_METHODS + EXTRA_METHODS)} ddp_bf16, or aps_<e>_<m>, ddp_aps_<e>_<m>",
    )
    parser.add_argument("--ddp", action="store_true", help="compare what a user of DDP chooses among, over Gloo")
    parser.add_argument("--scaling", action="store_true", help="cost per rank as hosts go 2, 4, 8")
    parser.add_argument(
        "--in-a-row", type=int, default=1, help="synchronisations between two barriers; a training loop has none (1)"
    )
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing per launch (20)")
    parser.add_argument("--min-rounds", type=int, default=5)
    parser.add_argument("--max-rounds", type=int, default=50)
    parser.add_argument("--pin", action="store_true", help="give each host its own cores")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one case (900)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse_arguments()
    cases = choose_cases(arguments)
    names = ("budget", "min_rounds", "max_rounds", "pin", "timeout", "in_a_row")
    settings = Settings(**{name: getattr(arguments, name) for name in names})
    name = "scaling" if arguments.scaling else "sync"
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    start = time.monotonic()
    status = 0
    for case in cases:
        try:
            results.append(run_case(case, choose_methods(case, arguments), settings))
        except (ClusterError, ValueError) as error:
            print(error, file=sys.stderr)
            status = 1
            break
        print(table(results[-1]), flush=True)
    if not results:
        return status
    if arguments.scaling:
        print(scaling_table(results))
    command = " ".join(["benchmarks/sync.py", *sys.argv[1:]])
    machine = {"cores": os.cpu_count(), "seconds": time.monotonic() - start, "command": command}
    (arguments.out / f"{name}.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    text = "\n".join(map(table, results)) + ("\n" + scaling_table(results) if arguments.scaling else "")
    (arguments.out / f"{name}.md").write_text(text)
    (plot_scaling if arguments.scaling else plot_cases)(results, arguments.out / f"{name}.png")
    seconds = time.monotonic() - start
    print(f"{len(results)} of {len(cases)} cases in {seconds:.0f} s; see {arguments.out}/{name}.*")
    return status


if __name__ == "__main__":
    sys.exit(main())
