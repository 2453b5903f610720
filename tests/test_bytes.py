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


@pytest.mark.skipif(bool(missing()), reason=f"building hosts in network namespaces needs {' and '.join(missing())}")
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
    env = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with Cluster(n_hosts, rate=None) as cluster:
        done = getattr(cluster, launcher)([sys.executable, str(WORKER), framework], env=env, timeout=240)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    line = next(line for line in done.stdout.splitlines() if "SENT " in line)
    sent = json.loads(line.partition("SENT ")[2])
    share = {name: [n / fp32 for n, fp32 in zip(values, sent["fp32"])] for name, values in sent.items()}
    print(f"{framework}, {launcher}, {n_hosts} hosts:", {name: round(max(ratios), 4) for name, ratios in share.items()})
    ring = 2 * (n_hosts - 1) / n_hosts * 4 * 3 * 3_013_010  # bytes of fp32 that one rank sends in three steps
    for fp32 in sent["fp32"]:
        assert ring < fp32 < 1.1 * ring, "the counters do not show what fp32 must send"
    assert sum(sent["fp16"]) > 0.45 * sum(sent["fp32"])
    assert all(ratio <= 0.27 for ratio in share["(4,3)"]), share
    assert all(ratio <= 0.14 for ratio in share["(3,0)"]), share
    assert all(ratio >= 0.12 for ratio in share["(3,0)"]), "fewer bytes than the gradients have"
