"""300 exchanges of mixed sizes and formats: `make soak` runs 10,000 of them.

Oracles: the process's resident size, Horovod's table of handles, the names that reach its C library, and a checksum
of all results on every rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
import soak  # noqa: E402

hvd.init()


def test_nothing_grows_and_replicas_stay_identical():
    figures = soak.soak(300)
    assert soak.faults(figures) == [], figures
    assert len(figures["ranks"]) == hvd.size()
    assert 50 < figures["ranks"][0]["names"] < 200  # the recorder saw names at all, and not one per exchange


def test_soak_reports_what_is_wrong():
    good = {"rank": 0, "growth": 0.001, "handles_left": 0, "names_after_warm_up": 9, "names": 9}
    figures = {"replicas_identical": True, "ranks": [good]}
    assert soak.faults(figures) == []
    for bad in ({"growth": 0.02}, {"handles_left": 1}, {"names": 10}):
        assert len(soak.faults({"replicas_identical": True, "ranks": [good | bad]})) == 1
    assert soak.faults(figures | {"replicas_identical": False}) == ["replicas differ"]
