"""Measured cells: launches of gradients of a network's shapes, of small networks that train, of a user's script."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_aps.bench.cases import Case, Settings, parse_link, run_case
from horovod_aps.bench.cluster import Cluster, ClusterError
from horovod_aps.study import METHOD
from horovod_aps.tools.study.cells import Place, Record, bench_name

HERE = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Effort:
    """How much is run."""

    epochs: int = 8
    batch: int = 32
    seed: int = 1
    budget: float = 10.0
    """Seconds of timing per launch of prepared gradients."""
    timeout: float = 900.0
    script: str | None = None
    metric: str = "accuracy"

    def settings(self, kind: str) -> dict[str, Any]:
        """What tells a cell of this kind from one that was run otherwise."""
        names = {"trained": ("epochs", "batch", "seed"), "script": ("script", "metric")}.get(kind, ())
        return {name: getattr(self, name) for name in names}


def measure(place: Place, methods: Sequence[str], effort: Effort) -> list[Record]:
    """Run the cells of one place; ClusterError if the launch fails."""
    run = {"synchronised": _synchronised, "trained": _trained, "script": _script}[place.kind]
    common = {**vars(place), "settings": effort.settings(place.kind)}
    return [{**common, "method": method, **found} for method, found in run(place, methods, effort).items()]


def _synchronised(place: Place, methods: Sequence[str], effort: Effort) -> dict[str, Record]:
    case = Case(place.network, place.link, place.ranks, place.launcher)
    settings = Settings(effort.budget, 3, 50, False, effort.timeout)
    result = run_case(case, [bench_name(method) for method in methods], settings)
    found = {}
    for method in methods:
        one = result["methods"][bench_name(method)]
        found[method] = {
            "sync_s": one["median"],
            "low_s": one["low"],
            "high_s": one["high"],
            "bytes": one["bytes"],
            "error": one["error"],
            "identical": one["identical"],
        }
    return found


def _launch(place: Place, cluster: Cluster, command: list[str], environment: dict[str, str], timeout: float) -> None:
    launch = cluster.mpirun if place.launcher == "mpi" else cluster.horovodrun
    done = launch(command, place.ranks, env=environment, timeout=timeout)
    if done.returncode != 0:
        raise ClusterError(
            f"{place} failed with exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        )


def _trained(place: Place, methods: Sequence[str], effort: Effort) -> dict[str, Record]:
    rate, delay_ms = parse_link(place.link)
    with tempfile.TemporaryDirectory() as folder, Cluster(place.ranks, rate, delay_ms) as cluster:
        result = Path(folder) / "result.json"
        config = {
            "network": place.network,
            "methods": {method: bench_name(method) for method in methods},
            "epochs": effort.epochs,
            "batch": effort.batch,
            "seed": effort.seed,
            "interface": None if cluster.is_local else "eth0",
            "result": str(result),
        }
        command = [sys.executable, str(HERE / "worker.py"), json.dumps(config)]
        _launch(place, cluster, command, ENVIRONMENT, effort.timeout)
        found: dict[str, Record] = json.loads(result.read_text())
        return found


def _script(place: Place, methods: Sequence[str], effort: Effort) -> dict[str, Record]:
    """The user's command, once per method; rank 0's output is read for step numbers and the metric."""
    assert effort.script is not None
    rate, delay_ms = parse_link(place.link)
    found = {}
    with tempfile.TemporaryDirectory() as folder, Cluster(place.ranks, rate, delay_ms) as cluster:
        for method in methods:
            result = Path(folder) / "result.json"
            result.unlink(missing_ok=True)
            words = [word.replace("{method}", method) for word in shlex.split(effort.script)]
            config = {
                "metric": effort.metric,
                "interface": None if cluster.is_local else "eth0",
                "result": str(result),
            }
            command = [sys.executable, str(HERE / "watch.py"), json.dumps(config), *words]
            _launch(place, cluster, command, {**ENVIRONMENT, METHOD: method}, effort.timeout)
            found[method] = summary(json.loads(result.read_text()))
    return found


def summary(seen: dict[str, Any]) -> Record:
    """A cell from what `watch` saw: seconds per step between the first and the last step number that was printed."""
    points: list[dict[str, Any]] = seen["points"]
    steps = [(point["step"], point["seconds"]) for point in points if point["step"] is not None]
    gaps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(steps, steps[1:]) if b[0] > a[0]]
    curve = [point for point in points if point["accuracy"] is not None]
    n_steps = steps[-1][0] if steps else None
    return {
        "run_s": seen["seconds"],
        "step_s": statistics.median(gaps) if gaps else None,
        "accuracy": curve[-1]["accuracy"] if curve else None,
        "curve": curve,
        "bytes": seen["bytes"] / n_steps if seen["bytes"] is not None and n_steps else None,
    }
