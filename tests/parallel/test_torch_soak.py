"""300 exchanges of mixed sizes and formats, and a few of the random scenarios that `make soak` runs for half an hour.

Oracles: the process's resident size, Horovod's table of handles, the names that reach its C library, and a checksum
of all results on every rank; for the scenarios, the exchange among emulated ranks in this process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
import soak  # noqa: E402
import soak_scenarios  # noqa: E402

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


@pytest.mark.parametrize("name", ["groups", "orders", "one_compressor", "unnamed"])
def test_scenario(name):
    """Bit for bit on every rank; a scenario that can be wrong is in test_scenarios_see_a_difference."""
    run = soak_scenarios.Soak(seed=1)
    for index in range(4):
        run.run(name, index)
    assert run.n_results > 20


def test_scenarios_see_a_difference(monkeypatch):
    """One bit of one result of one rank's oracle."""
    run = soak_scenarios.Soak(seed=1)
    reduced = run.reduced

    def wrong(*args):
        result = reduced(*args)
        result.view("u4")[-1] ^= 1
        return result

    monkeypatch.setattr(run, "reduced", wrong)
    with pytest.raises(soak_scenarios.Difference, match="1 of .* elements differ"):
        run.run("groups", 0)


def test_long_run_reports_what_is_wrong():
    good = {"rank": 0, "error": "", "results": 5, "growth": 0.001, "settled": True}
    assert soak.long_faults({"n_ranks": 1, "ranks": [good]}, 0) == []
    assert soak.long_faults({"n_ranks": 1, "ranks": [good | {"growth": 0.03, "settled": False}]}, 0) == []
    for bad in (
        {"growth": 0.03},
        {"growth": None},
        {"growth": 0.11, "settled": False},
        {"error": "rank 0, orders: Difference"},
        {"results": 0},
    ):
        assert len(soak.long_faults({"n_ranks": 1, "ranks": [good | bad]}, 0)) == 1
    assert soak.long_faults({"n_ranks": 2, "ranks": [good]}, 0) and soak.long_faults({"n_ranks": 1, "ranks": [good]}, 3)
