"""benchmarks/step.py: the errors that it prints are those of the file it is given, and of the one that is committed."""

import copy
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import step  # noqa: E402

from horovod_aps.tools import perfmodel  # noqa: E402
from horovod_aps.tools.perfmodel import Machine, Network  # noqa: E402

RESULTS = BENCHMARKS / "results"


def document(factor: float) -> dict:
    """A file as step.py writes it, its measurements being `factor` times what the model says with its default rates."""
    machine = asdict(replace(Machine(cores=2, calibrated_ranks=2), copy_rate=4e9))
    calibration = {
        "schema": perfmodel.SCHEMA,
        "network": asdict(Network()) | {"host_rate": None},
        "machine": machine,
        "unmeasured": {},
        "notes": {},
    }
    result = {
        "link": "1gbit",
        "rate_bits": 1e9,
        "n_ranks": 2,
        "load": 0.5,
        "sizes": [10**5] * 40,
        "calibration": calibration,
        "methods": {"alone": {"seconds": [0.5, 0.5], "parts": [0.1, 0.3, 0.1]}},
    }
    link = replace(Network(), bandwidth=1.25e8, allreduce="openmpi")
    two = Machine(cores=2, calibrated_ranks=2)
    totals = [perfmodel.predict_ring(result["sizes"], 2, link, two, bits, 0.3).total for bits in (32, 16)]
    totals.append(perfmodel.predict_exchange(result["sizes"], 2, link, two, backward=0.3).total)
    for method, total in zip(step.METHODS, totals):
        result["methods"][method] = {"seconds": [(0.2 + total) * factor] * 3}
    return {"machine": {"cores": 2}, "results": [result]}


def test_page_prints_errors() -> None:
    assert "default rates: median error 0 %, largest 0 %" in step.page(document(1.0))
    text = step.page(document(1 / 1.25))
    assert "default rates: median error 25 %, largest 25 %" in text and text.count("+25 %") >= 3
    assert "forward 100 ms, backward 300 ms, update 100 ms, 2 steps of each, load 0.5 before it" in text


def test_committed_results_are_what_the_pages_say() -> None:
    """Oracle: the committed measurements, and the model as it is now."""
    stored = json.loads((RESULTS / "step.json").read_text())
    assert [result["link"] for result in stored["results"]] == list(step.LINKS)
    fresh = copy.deepcopy(stored)
    text = step.page(fresh)
    assert text == (RESULTS / "step.md").read_text()
    assert fresh == stored  # predictions and all
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    for line in step.compare(fresh).splitlines():
        assert line in page, line
