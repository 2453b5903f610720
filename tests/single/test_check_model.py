"""benchmarks/check_model.py: the errors that it prints are those of the files it is given."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from horovod_aps.tools import perfmodel, shapes
from horovod_aps.tools.perfmodel import Machine, Network

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import check_model  # noqa: E402


def sync_results(link: Network, machine: Machine, factor: float, n_ranks: int = 2) -> dict:
    """A file as benchmarks/sync.py writes it, its measurements being the model's predictions times
    `factor`.
    """
    sizes = shapes.layer_sizes("resnet50")
    link = replace(link, allreduce="openmpi")
    methods = {
        "horovod_fp32": perfmodel.predict_ring(sizes, n_ranks, link, machine).total,
        "horovod_fp16": perfmodel.predict_ring(sizes, n_ranks, link, machine, 16).total,
        "aps_4_3": perfmodel.predict_exchange(sizes, n_ranks, link, machine).total,
        "ddp_fp32": 1.0,
    }
    return {
        "case": {"work": "resnet50", "link": "1gbit+5ms", "n_hosts": n_ranks, "launcher": "mpi"},
        "n_elements": sum(sizes),
        "n_ranks": n_ranks,
        "rate_bits": 1e9,
        "methods": {name: {"median": seconds * factor} for name, seconds in methods.items()},
    }


def test_check_prints_errors(capsys, tmp_path):
    machine = Machine()
    link = replace(Network(), bandwidth=1.25e8, latency=Network().latency + 5e-3)
    step = {**sync_results(link, machine, 1.0), "case": {"work": "step", "link": "1gbit", "launcher": "mpi"}}
    document = {"results": [sync_results(link, machine, 1.0), sync_results(link, machine, 1 / 1.3), step]}
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert check_model.main([str(tmp_path / "r.json")]) == 0
    text = capsys.readouterr().out
    assert text.count("+0 %") == 3 and text.count("+30 %") == 3
    # Of six comparisons, three are exact and three 30 % too high; 2 DDP and 4 step entries have no model.
    assert "6 comparisons, 6 without a counterpart; median error 15 %, largest 30 %" in text
    # A second file, of three hosts, 10 % too high: medians by link, hosts and method over both.
    (tmp_path / "s.json").write_text(json.dumps({"results": [sync_results(link, machine, 1 / 1.1, 3)]}))
    assert check_model.main([str(tmp_path / "r.json"), str(tmp_path / "s.json")]) == 0
    text = capsys.readouterr().out
    assert "9 comparisons, 7 without a counterpart; median error 10 %, largest 30 %" in text
    summary = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("Median")[1].splitlines()[4:]]
    assert [row for row in summary if len(row) == 5] == [
        ["link", "1gbit+5ms", "9", "10 %", "30 %"],
        ["hosts", "2", "6", "15 %", "30 %"],
        ["hosts", "3", "3", "10 %", "10 %"],
        *(["method", method, "3", "10 %", "30 %"] for method in ("horovod_fp32", "horovod_fp16", "aps_4_3")),
    ]


def test_check_knows_that_hosts_share_cores(capsys, tmp_path):
    """Oracle: a machine of two cores in the model itself; four hosts need twice the processor time."""
    link = replace(Network(), bandwidth=1.25e8, latency=Network().latency + 5e-3, host_rate=1e8)
    document = {"results": [sync_results(link, Machine(cores=2), 1.0, 4)], "machine": {"cores": 2}}
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert check_model.main([str(tmp_path / "r.json"), "--host-rate", "0.1GB"]) == 0
    assert "3 comparisons, 1 without a counterpart; median error 0 %, largest 0 %" in capsys.readouterr().out


def test_model_is_within_a_fifth_of_what_was_measured(capsys):
    """At 1 and 10 Gbit/s, 2 to 4 hosts. Oracle: the committed measurements, whose page shows every error."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    cases = {
        (case["case"]["link"], case["n_ranks"]) for case in json.loads((results / "hosts.json").read_text())["results"]
    }
    assert cases == {(link, hosts) for link in ("1gbit", "10gbit") for hosts in (2, 3, 4)}
    assert check_model.main([str(results / "hosts.json")]) == 0
    text = capsys.readouterr().out
    n_comparisons, median = map(int, re.search(r"(\d+) comparisons.*median error (\d+) %", text).groups())
    assert n_comparisons == 24 and median <= 20
    assert text.strip() in (results / "hosts.md").read_text()


def test_model_knows_hosts_with_several_ranks(capsys):
    """Oracle: the committed measurements on 2x1, 2x2, 2x4 and 3x2, whose figures the docs show."""
    results = BENCHMARKS / "results" / "two_level.json"
    assert check_model.main([str(results)]) == 0
    text = capsys.readouterr().out
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    assert "21 comparisons, 7 without a counterpart; median error 11 %" in text and "median error 11 %" in page
    for result in json.loads(results.read_text())["results"]:
        one = result["methods"]["aps_4_3"]
        assert f"{one['median'] * 1e3:.0f} ms, {one['bytes'] / 1e6:.1f} MB" in page
        assert one["bytes"] <= 0.27 * result["methods"]["horovod_fp32"]["bytes"]


def test_check_without_any_counterpart(capsys, tmp_path):
    (tmp_path / "r.json").write_text('{"results": []}')
    assert check_model.main([str(tmp_path / "r.json")]) == 2
    assert "at least one case" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["feedback", "kernels"])
def test_check_of_other_files_is_one_line(name, capsys):
    assert check_model.main([str(BENCHMARKS / "results" / f"{name}.json")]) == 2
    error = capsys.readouterr().err
    assert "benchmarks/sync.py wrote" in error and error.count("\n") == 1
