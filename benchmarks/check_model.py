"""The performance model against measurements: every prediction beside what benchmarks/sync.py measured.

python benchmarks/check_model.py benchmarks/results/hosts.json
python benchmarks/check_model.py out/bench/sync.json --calibration calibration.json --host-rate 0.75GB
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horovod_aps.tools import perfmodel, predict, shapes
from horovod_aps.tools.perfmodel import Machine, Network

# Element counts of works.DigitsNet, which this program need not import PyTorch for.
DIGITS = [288, 32, 18_432, 64, 2_097_152, 2_048, 4_194_304, 2_048, 20_480, 10]


def check(paths: Sequence[Path], network: Network, machine: Machine) -> int:
    """Compare predictions with the measurements in JSON files of benchmarks/sync.py and print the errors.

    Covers Horovod's own methods and ours on built-in models and on one flat vector, over MPI on links of
    known rate; the rest (other frameworks, whole training steps) has no counterpart in the model and is left
    out. All hosts of the benchmark share one machine's cores.
    """
    rows, errors, left_out = [], [], 0
    groups: dict[str, dict[str, list[float]]] = {"link": {}, "hosts": {}, "method": {}}
    for path in paths:
        results, cores = _read_results(path)
        machine = replace(machine, cores=min(machine.cores, cores))
        for result in results:
            case, n_ranks = result["case"], result["n_ranks"]
            sizes = _case_sizes(case["work"], result["n_elements"])
            if sizes is None or result["rate_bits"] is None or case["launcher"] != "mpi":
                left_out += len(result["methods"])
                continue
            delay = float(case["link"].partition("+")[2].removesuffix("ms") or 0) / 1e3
            link = replace(
                predict.nominal(network, result["rate_bits"] / 8),
                ranks_per_host=case.get("n_places", 1),
                latency=network.latency + delay,
                allreduce="openmpi",  # Horovod over Open MPI
            )
            for method, one in result["methods"].items():
                predicted = _predict_method(method, sizes, n_ranks, link, machine)
                if predicted is None:
                    left_out += 1
                    continue
                error = predicted / one["median"] - 1
                errors.append(abs(error))
                n_places = case.get("n_places", 1)
                layout = str(n_ranks) if n_places == 1 else f"{case['n_hosts']}x{n_places}"
                for kind, name in (("link", case["link"]), ("hosts", layout), ("method", method)):
                    groups[kind].setdefault(name, []).append(abs(error))
                times = (f"{1e3 * one['median']:.1f}", f"{1e3 * predicted:.1f}", f"{100 * error:+.0f} %")
                rows.append([case["work"], case["link"], layout, method, *times])
    if not rows:
        names = ", ".join(map(str, paths))
        raise ValueError(f"check_model.py: {names} must hold at least one case that the model covers, got none")
    print(predict.table(["work", "link", "ranks", "method", "measured ms", "predicted ms", "error"], rows))
    print("\nMedian and largest error:\n")
    summary = [
        [kind, name, str(len(mine)), f"{100 * statistics.median(mine):.0f} %", f"{100 * max(mine):.0f} %"]
        for kind, by_name in groups.items()
        for name, mine in by_name.items()
    ]
    print(predict.table(["by", "", "comparisons", "median", "largest"], summary))
    print(
        f"\n{len(errors)} comparisons, {left_out} without a counterpart; median error "
        f"{100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %"
    )
    return 0


def _read_results(path: Path) -> tuple[list[dict[str, Any]], float]:
    """The results in a JSON file of benchmarks/sync.py, and the cores of the machine that it ran on."""
    document = json.loads(path.read_text())
    results = document.get("results") if isinstance(document, dict) else None
    needed = {"case", "n_ranks", "n_elements", "rate_bits", "methods"}
    if not isinstance(results, list) or any(not needed <= set(result) for result in results):
        raise ValueError(f"check_model.py: {path} must be a JSON file that benchmarks/sync.py wrote")
    return results, document.get("machine", {}).get("cores") or math.inf


def _case_sizes(work: str, n_elements: int) -> list[int] | None:
    if work == "flat":
        return [n_elements]
    if work == "digits":
        return DIGITS
    return shapes.layer_sizes(work) if work in shapes.MODELS else None


def _predict_method(method: str, sizes: list[int], n_ranks: int, link: Network, machine: Machine) -> float | None:
    """Seconds of one of the benchmark's methods; None if the model does not know it."""
    if method in ("horovod_fp32", "horovod_fp16"):
        return perfmodel.predict_ring(sizes, n_ranks, link, machine, int(method[-2:])).total
    match = re.fullmatch(r"aps_(\d+)_(\d+)(_flat)?", method)
    if match is None:
        return None
    bits, way = (int(match[1]), int(match[2])), "flat" if match[3] else "auto"
    return perfmodel.predict_exchange(sizes, n_ranks, link, machine, *bits, hierarchy=way).total


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files that benchmarks/sync.py wrote")
    parser.add_argument("--calibration", type=Path, help="JSON written by horovod-aps calibrate")
    parser.add_argument("--host-rate", type=predict.parse_bandwidth, help="what a rank moves through its network stack")
    args = parser.parse_args(argv)
    network, machine = Network(), Machine()
    try:
        if args.calibration:
            # Bandwidth and ranks per host are the benchmark's.
            found = perfmodel.load_calibration(args.calibration, assume_defaults=True)
            network, machine = found.network, found.machine
        if args.host_rate is not None:
            network = replace(network, host_rate=args.host_rate)
        return check(args.results, network, machine)
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
