"""Training steps with a real backward on two hosts, and what the performance model says of them.

    python benchmarks/step.py                                        # 1 and 10 Gbit/s, about five minutes, needs root
    python benchmarks/step.py --report benchmarks/results/step.json  # the comparison again, with today's model

A convolutional net of 43 tensors and 5.9 million parameters trains on random images, its backward taking some tenths of
a second on one core, so that there is something for communication to hide behind. fp32, fp16 and APS (4, 3) take turns
in one run with steps that do not communicate, whose forward, backward and update are what the model is told. It is
asked twice: with its default rates, and with those that `horovod-aps calibrate` has measured on the same hosts.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError

from horovod_aps.tools import perfmodel, predict
from horovod_aps.tools.perfmodel import Calibration, Machine, Network

METHODS = ("horovod_fp32", "horovod_fp16", "aps_4_3")
LINKS = ("1gbit", "10gbit")
N_WARM_UP = 3
BATCH_SIZE = 16


# ---- One rank -------------------------------------------------------------------------------------------------


def make_net() -> Any:
    """The same on every rank and for every method."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    n_in = 3
    for width, n_layers, stride in ((64, 3, 2), (128, 4, 2), (256, 6, 1)):
        for k in range(n_layers):
            layers += [
                nn.Conv2d(n_in, width, 3, stride if k == 0 else 1, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            n_in = width
    return nn.Sequential(
        *layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256 * 16, 512), nn.ReLU(), nn.Linear(512, 10)
    )


class Trainer:
    """A net of its own, trained by one method, or alone if there is none."""

    def __init__(self, name: str) -> None:
        import torch

        from horovod_aps.bench.methods import LEARNING_RATE, make_compression

        self.net = make_net()
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=0.9)
        if name != "alone":
            import horovod.torch as hvd

            named = [(f"{name}.{label}", value) for label, value in self.net.named_parameters()]
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=named, compression=make_compression(name)
            )

    def step(self, images: Any, labels: Any) -> tuple[float, float, float]:
        """Seconds of forward, backward and update of one step."""
        import torch

        times = [time.perf_counter()]
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def work(config: dict[str, Any]) -> None:
    """All methods in turn until the time is over; rank 0 writes what the slowest rank took, step by step."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()
    names = ["alone", *METHODS]
    trainers = {name: Trainer(name) for name in names}
    generator = torch.Generator().manual_seed(hvd.rank())
    batch = (
        torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator),
        torch.randint(0, 10, (BATCH_SIZE,), generator=generator),
    )
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    start = time.perf_counter()
    n_rounds, number = 1 << 30, 0
    while number < n_rounds:
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            hvd.barrier()
            spent = trainers[name].step(*batch)
            if number >= N_WARM_UP:
                times[name].append(spent)
        number += 1
        if number == N_WARM_UP + 1:  # all ranks must do as many
            per_round = (time.perf_counter() - start) / number
            wanted = torch.tensor([max(config["min_rounds"], config["budget"] / per_round)])
            n_rounds = N_WARM_UP + int(hvd.broadcast(wanted, 0, name="step.rounds"))
    everyone = hvd.allgather_object(times, name="step.times")
    if hvd.rank() == 0:
        methods = {}
        for name in names:
            steps = list(zip(*(one[name] for one in everyone)))
            methods[name] = {
                "seconds": [max(map(sum, ranks)) for ranks in steps],
                "parts": [statistics.median(max(ranks, key=sum)[k] for ranks in steps) for k in range(3)],
            }
        sizes = [value.numel() for value in trainers["alone"].net.parameters()]
        Path(config["result"]).write_text(json.dumps({"n_ranks": hvd.size(), "sizes": sizes, "methods": methods}))
    hvd.barrier()


# ---- The hosts ------------------------------------------------------------------------------------------------


def run_link(link: str, args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate and train on two hosts with this link."""
    load = os.getloadavg()[0]
    environment = {"OMP_NUM_THREADS": "1", "HOROVOD_CACHE_CAPACITY": "8192", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder, Cluster(2, link) as cluster:
        result, calibration = Path(folder) / "result.json", Path(folder) / "calibration.json"
        commands = [
            [sys.executable, "-m", "horovod_aps.tools.cli", "calibrate", "--shared-cores", "--format", "4,3", "--out",
             str(calibration)],
            [sys.executable, str(Path(__file__).resolve()), "--worker",
             json.dumps({"result": str(result), "budget": args.budget, "min_rounds": args.min_rounds})],
        ]  # fmt: skip
        for command in commands:
            done = cluster.mpirun(command, env=environment, timeout=args.timeout)
            if done.returncode != 0:
                raise ClusterError(f"step.py: {link} failed\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        measured = json.loads(result.read_text())
        found = json.loads(calibration.read_text())
    found.pop("measured")
    return {"link": link, "rate_bits": cluster.rate_bits, "load": load, **measured, "calibration": found}


def calibrated(document: dict[str, Any]) -> Calibration:
    """The calibration that is stored with a result; what it lacks has defaults, which two hosts do not need."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        path.write_text(json.dumps(document))
        return perfmodel.load_calibration(path, assume_defaults=True)


def predicted(result: dict[str, Any], method: str, network: Network, machine: Machine) -> float:
    """Seconds of a step by this method: the lone step with the model's backward in place of the lone one."""
    forward, backward, update = result["methods"]["alone"]["parts"]
    sizes, n_ranks = result["sizes"], result["n_ranks"]
    link = replace(predict.nominal(network, result["rate_bits"] / 8), ranks_per_host=1, allreduce="openmpi")
    if method.startswith("aps_"):
        exp_bits, man_bits = map(int, method.split("_")[1:])
        found = perfmodel.predict_exchange(sizes, n_ranks, link, machine, exp_bits, man_bits, backward)
    else:
        found = perfmodel.predict_ring(sizes, n_ranks, link, machine, int(method[-2:]), backward)
    return forward + found.total + update


def compare(document: dict[str, Any]) -> str:
    """Measured and predicted steps side by side, with the errors; the predictions go into the document, too."""
    rows, errors = [], {"default": [], "calibrated": []}  # type: dict[str, list[float]]
    cores = document["machine"]["cores"]
    for result in document["results"]:
        lone = statistics.median(result["methods"]["alone"]["seconds"])
        rows.append([result["link"], "no communication", f"{1e3 * lone:.0f}", "", "", "", "", ""])
        own = calibrated(result["calibration"])
        rates = {
            "default": (Network(), Machine(cores=cores, calibrated_ranks=result["n_ranks"])),
            "calibrated": (own.network, own.machine),
        }
        for method in METHODS:
            one = result["methods"][method]
            median = statistics.median(one["seconds"])
            times = {kind: predicted(result, method, *pair) for kind, pair in rates.items()}
            one["predicted"] = times
            cells = []
            for kind, seconds in times.items():
                errors[kind].append(abs(seconds / median - 1))
                cells += [f"{1e3 * seconds:.0f}", f"{100 * (seconds / median - 1):+.0f} %"]
            spread = f"{1e3 * min(one['seconds']):.0f} to {1e3 * max(one['seconds']):.0f}"
            rows.append([result["link"], method, f"{1e3 * median:.0f}", spread, *cells])
    headers = ["link", "method", "step, ms", "fastest to slowest", "default rates", "error", "calibrated", "error"]
    text = [predict.table([*headers[:5], "error ", "calibrated", "error"], rows), ""]
    for kind, values in errors.items():
        text.append(
            f"{kind} rates: median error {100 * statistics.median(values):.0f} %, largest {100 * max(values):.0f} %"
        )
    return "\n".join(text)


def page(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    sizes, parts = document["results"][0]["sizes"], []
    for result in document["results"]:
        alone = result["methods"]["alone"]
        forward, backward, update = (f"{1e3 * seconds:.0f} ms" for seconds in alone["parts"])
        load = "not recorded" if result["load"] is None else f"{result['load']:.1f} before it"
        parts.append(
            f"{result['link']}: forward {forward}, backward {backward}, update {update}, "
            f"{len(alone['seconds'])} steps of each, load {load}"
        )
    return (
        f"Written by `python benchmarks/step.py`; `step.json` is beside it. Two hosts on "
        f"{document['machine']['cores']} cores, {sum(sizes) / 1e6:.2f} M parameters in {len(sizes)} tensors.\n\n"
        f"{compare(document)}\n\nWithout communication: {'; '.join(parts)}.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=list(LINKS))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of training per link (60)")
    parser.add_argument("--min-rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one launch (900)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--report", type=Path, help="print the comparison of this file instead")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return 0
    if args.report:
        print(page(json.loads(args.report.read_text())), end="")
        return 0
    try:
        document = {"machine": {"cores": os.cpu_count()}, "results": [run_link(link, args) for link in args.links]}
    except (ClusterError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    text = page(document)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.out / "step.md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
