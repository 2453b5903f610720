"""Bytes on the wire: hosts in network namespaces train, and the counters of their interfaces are compared.

Oracle: what stock Horovod sends in fp32 for the same training steps on the same hosts. The exponents, Horovod's
own negotiation and the headers of TCP are all in the counters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from cluster import Cluster, missing  # noqa: E402

WORKER = ROOT / "tests" / "workers" / "bytes_worker.py"


N_PARAMETERS, N_STEPS = 3_013_010, 3  # of the worker
NEEDS_ROOT = pytest.mark.skipif(
    bool(missing()), reason=f"building hosts in network namespaces needs {' and '.join(missing())}"
)


def sent_by_hosts(n_hosts: int, n_places: int, launcher: str, *arguments: str) -> dict[str, list[int]]:
    """What every rank's host has sent, by compression."""
    env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with Cluster(n_hosts, rate=None) as cluster:
        command = [sys.executable, str(WORKER), *arguments]
        done = getattr(cluster, launcher)(command, np=n_hosts * n_places, env=env, timeout=240)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    line = next(line for line in done.stdout.splitlines() if "SENT " in line)
    sent = json.loads(line.partition("SENT ")[2])
    assert all(len(values) == n_hosts * n_places for values in sent.values())
    return sent


def ring_bytes(n_hosts: int) -> float:
    """Bytes of fp32 that a ring all-reduce sends from each host."""
    return 2 * (n_hosts - 1) / n_hosts * 4 * N_STEPS * N_PARAMETERS


@NEEDS_ROOT
@pytest.mark.parametrize(
    "framework, n_hosts, launcher",
    [
        ("torch", 2, "mpirun"),
        ("torch", 4, "mpirun"),
        ("torch", 2, "horovodrun"),
        ("tensorflow", 2, "mpirun"),
        pytest.param("tensorflow", 2, "horovodrun", marks=pytest.mark.slow),
    ],
)
def test_bytes_on_the_wire_against_horovod_fp32(framework, n_hosts, launcher):
    sent = sent_by_hosts(n_hosts, 1, launcher, framework)
    share = {name: [n / fp32 for n, fp32 in zip(values, sent["fp32"])] for name, values in sent.items()}
    print(f"{framework}, {launcher}, {n_hosts} hosts:", {name: round(max(ratios), 4) for name, ratios in share.items()})
    ring = ring_bytes(n_hosts)
    for fp32 in sent["fp32"]:
        assert ring < fp32 < 1.1 * ring, "the counters do not show what fp32 must send"
    assert sum(sent["fp16"]) > 0.45 * sum(sent["fp32"])
    assert all(ratio <= 0.27 for ratio in share["(4,3)"]), share
    assert all(ratio <= 0.14 for ratio in share["(3,0)"]), share
    assert all(ratio >= 0.12 for ratio in share["(3,0)"]), "fewer bytes than the gradients have"


@NEEDS_ROOT
@pytest.mark.parametrize(
    "n_hosts, launcher, against",
    [
        (2, "mpirun", ["fp32"]),
        (3, "mpirun", []),
        pytest.param(2, "horovodrun", [], marks=pytest.mark.slow),
    ],
)
def test_host_with_two_ranks_sends_what_one_rank_would(n_hosts, launcher, against):
    """Oracle: the formula for a ring among the hosts, which is least, and fp32 where it is measured."""
    sent = sent_by_hosts(n_hosts, 2, launcher, "torch", "(4,3)", "(3,0)", *against)
    ring = ring_bytes(n_hosts)
    share = {name: [n / ring for n in values] for name, values in sent.items()}
    print(f"{launcher}, {n_hosts} hosts x 2:", {name: round(max(ratios), 4) for name, ratios in share.items()})
    assert all(1 < ratio < 1.1 for ratio in share.get("fp32", [])), share
    assert all(0.25 < ratio <= 0.27 for ratio in share["(4,3)"]), share
    for half, whole in zip(sent["(3,0)"], sent["(4,3)"]):
        assert 0.49 * whole < half < 0.52 * whole, share
