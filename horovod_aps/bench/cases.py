"""One case of a measurement: a work on a number of hosts, joined by a link, started by a launcher."""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_aps.bench.cluster import Cluster, ClusterError
from horovod_aps.bench.names import bits_per_element
from horovod_aps.bench.ports import free_port

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Case:
    """One table of the benchmark: a work on a number of hosts, joined by a link, started by a launcher."""

    work: str
    link: str
    n_hosts: int = 2
    launcher: str = "mpi"
    only_ddp: bool = False
    """Whether it compares what a user of DDP chooses among."""
    n_places: int = 1
    """Ranks on each host."""

    def __str__(self) -> str:
        ranks = f" x {self.n_places} ranks" if self.n_places > 1 else ""
        end = ", DDP" if self.only_ddp else ""
        return f"{self.work}, {self.link}, {self.n_hosts} hosts{ranks}, {self.launcher}{end}"


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    budget: float = 20.0
    """Seconds of timing per launch."""
    min_rounds: int = 5
    max_rounds: int = 50
    pin: bool = False
    """Whether each host gets cores of its own."""
    timeout: float = 900.0
    """Seconds for one launch."""
    in_a_row: int = 1
    """Synchronisations between two barriers: 1 times each by itself, more as a training loop has them."""


def parse_link(link: str) -> tuple[str, float]:
    """Rate and delay in milliseconds of a link such as "1gbit", "1gbit+5ms" or "shm"."""
    rate, plus, delay = link.partition("+")
    if not plus:
        return rate, 0.0
    if not delay.endswith("ms"):
        raise ValueError(f'bench: a link looks like "1gbit+5ms", got {link!r}')
    return rate, float(delay.removesuffix("ms"))


def run_case(case: Case, methods: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Build the hosts, run the workers, take the hosts down; returns the result with derived numbers."""
    rate, delay_ms = parse_link(case.link)
    merged: dict[str, Any] = {}
    with Cluster(case.n_hosts, rate, delay_ms, settings.pin) as cluster:
        for kind in ("horovod", "ddp"):
            chosen = [name for name in methods if name.startswith("ddp_") == (kind == "ddp")]
            if chosen:
                result = _run_workers(case, chosen, cluster, settings)
                merged = result | {"methods": merged.get("methods", {}) | result["methods"]}
        merged["case"] = case.__dict__
        merged["rate_bits"] = cluster.rate_bits
    merged["methods"] = {name: merged["methods"][name] for name in methods}
    derive(merged)
    return merged


def _run_workers(case: Case, methods: list[str], cluster: Cluster, settings: Settings) -> dict[str, Any]:
    """Launch one worker per host, in which the methods take turns, and read what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.json"
        config = {
            "work": case.work,
            "methods": methods,
            "address": cluster.address(0),
            "port": free_port(),
            "budget": settings.budget,
            "min_rounds": settings.min_rounds,
            "max_rounds": settings.max_rounds,
            "in_a_row": settings.in_a_row,
            "byte_rounds": 2,
            "interface": None if cluster.is_local else "eth0",
            "result": str(result_path),
        }
        environment = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if cluster.is_local else "eth0",
            # Room for the tensors of all methods, as each would find in the default of 1024 if it ran alone.
            "HOROVOD_CACHE_CAPACITY": "8192",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        launch = cluster.mpirun if case.launcher == "mpi" else cluster.horovodrun
        command = [sys.executable, str(WORKER), json.dumps(config)]
        done = launch(command, case.n_hosts * case.n_places, env=environment, timeout=settings.timeout)
        if done.returncode != 0 or not result_path.exists():
            raise ClusterError(
                f"bench: {case} failed with exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            )
        result: dict[str, Any] = json.loads(result_path.read_text())
        return result


def derive(result: dict[str, Any]) -> None:
    """Add medians, ratios and shares to a worker's raw numbers."""
    methods = result["methods"]
    for one in methods.values():
        one["median"] = statistics.median(one["seconds"])
        one["low"], one["high"] = min(one["seconds"]), max(one["seconds"])
        one["bytes"] = statistics.fmean(one["bytes_by_rank"]) if one["bytes_by_rank"] else None
    for name, one in methods.items():
        for base in ("horovod_fp32", "horovod_fp16"):
            other = base if base in methods else base.replace("horovod", "ddp")
            one[f"over_{base}"] = methods[other]["median"] / one["median"] if other in methods else None
        known = one["bytes"] is not None and result["rate_bits"] is not None
        one["wire_share"] = max(one["bytes_by_rank"]) * 8 / result["rate_bits"] / one["median"] if known else None
        bits = bits_per_element(name)
        n_ranks = result["n_ranks"] // result.get("case", {}).get("n_places", 1)
        one["model_bytes"] = None if bits is None else 2 * (n_ranks - 1) / n_ranks * result["n_elements"] * bits / 8
