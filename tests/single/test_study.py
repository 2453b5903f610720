"""`horovod-aps study`: its cells, file, predictions, answers and page, and one real launch of a user's script.

Oracles: figures worked out by hand, the performance model asked directly, and what the script printed.
"""

from __future__ import annotations

import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from horovod_aps.formats import QSGD, FloatFormat
from horovod_aps.tools import cli, perfmodel, study
from horovod_aps.tools.study import answers, cells, measured, page, predicted, watch

SCRIPT = """
import os, time
import horovod.torch as hvd
import torch
from horovod_aps.study import compression

hvd.init()
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), [("weight", weight)], compression=compression())
for step in range(1, 4):
    optimizer.zero_grad()
    (weight * (1 + hvd.rank())).sum().backward()
    optimizer.step()
    if hvd.rank() == 0:
        print(f"step {step}: accuracy {30 * step} % by {os.environ['HOROVOD_APS_STUDY_METHOD']}")
assert torch.allclose(weight, torch.tensor(1 - 0.45), atol=0.05), weight[0]
"""


def cell(kind: str, link: str, method: str, **values: object) -> dict[str, object]:
    place = {"kind": kind, "network": "digits_fc", "link": link, "ranks": 2, "launcher": "mpi"}
    return {**place, "method": method, "settings": {}, **values}


def test_methods_are_formats_texts_and_wrong_ones_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert [cells.parse_method(text) for text in ("fp16", "4,3", "(3,0)+ef", "qsgd2-128")] == [
        "fp16",
        "e4m3",
        "e3m0+ef",
        "qsgd2-128",
    ]
    assert cells.format_of("e3m0+ef") == FloatFormat(3, 0) and cells.format_of("qsgd2-128") == QSGD(2, 128)
    assert cells.bits_of("qsgd4") == 4 + 32 / 512
    for arguments, message in {
        ("--methods", "onebit"): "write onebit+ef",
        ("--methods", "e4"): "method must be fp32, fp16, or a format",
        ("--methods", "float32"): "is called fp32",
        ("--links", "fast"): "rate must look like",
        ("--links", "1gbit+5s"): "looks like",
        ("--networks", "lenet"): "network must be one of alexnet",
        ("--target", "95"): "must be in 0..1",
        ("--tflops", "0"): "must be a positive number",
    }.items():
        with pytest.raises(SystemExit) as stop:
            cli.main(["study", *arguments])
        assert stop.value.code == 2 and message in capsys.readouterr().err, arguments


def test_default_methods_are_all_valid() -> None:
    assert [cells.parse_method(name) for name in cells.METHODS] == list(cells.METHODS)


def test_store_keeps_cells_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    store = cells.Store(path)
    place = cells.Place("trained", "digits_fc", "shm", 2, "mpi")
    store.add([{**vars(place), "method": "e4m3", "settings": {"epochs": 2}, "accuracy": 0.5}])
    with path.open("a") as file:
        file.write('{"kind": "trai')
    again = cells.Store(path)
    assert again.records == store.records == [json.loads(line) for line in path.read_text().splitlines()]
    assert again.find(place, "e4m3", {"epochs": 2}) and not again.find(place, "e4m3", {"epochs": 3})
    path.write_text("what\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        cells.Store(path)


def test_predicted_cells_are_the_performance_models() -> None:
    setting = predicted.Setting(perfmodel.Network(), perfmodel.Machine(), batch=16, tflops=2.0)
    network = cells.BUILT_IN["resnet50"]
    found = {
        record["method"]: record
        for record in predicted.predicted_cells(network, ["1gbit"], 4, "gloo", ["fp32", "e4m3", "qsgd4"], setting)
    }
    forward = 2 * 4.09e9 * 16 / 2e12
    ring = perfmodel.predict_ring(network.sizes, 4, perfmodel.Network(), perfmodel.Machine(), 32, 2 * forward)
    assert found["fp32"]["step_s"] == pytest.approx(forward + ring.total)
    assert found["fp32"]["epoch_s"] == pytest.approx(found["fp32"]["step_s"] * math.ceil(1_281_167 / 64))
    ours = perfmodel.predict_exchange(network.sizes, 4, perfmodel.Network(), perfmodel.Machine(), 4, 3)
    assert found["e4m3"]["sync_s"] == ours.total and found["e4m3"]["bytes"] == ours.bytes_sent
    # Half of the bits, and a scale of four bytes for every 512 elements.
    assert found["qsgd4"]["bytes"] / found["e4m3"]["bytes"] == pytest.approx((4 + 32 / 512) / 8, rel=1e-3)


def test_bandwidth_from_which_on_it_stops_helping() -> None:
    setting = predicted.Setting(perfmodel.Network(), perfmodel.Machine())
    rates = {}
    for name in ("alexnet", "resnet50"):
        network = cells.BUILT_IN[name]
        rate = rates[name] = predicted.stops_helping(network, "e4m3", 8, "gloo", setting)
        assert rate is not None
        for link, helps in ((f"{0.9 * rate:.6f}gbit", True), (f"{1.1 * rate:.6f}gbit", False)):
            two = list(predicted.predicted_cells(network, [link], 8, "gloo", ["fp32", "e4m3"], setting))
            assert (two[0]["step_s"] > 1.05 * two[1]["step_s"]) is helps
    assert rates["alexnet"] > rates["resnet50"]  # more to send for what it computes


def test_answer_names_what_is_fast_and_as_accurate() -> None:
    records = [
        cell("trained", "1gbit", "fp32", step_s=0.06, accuracy=0.96),
        cell("trained", "1gbit", "e4m3", step_s=0.03, accuracy=0.955),
        cell("trained", "1gbit", "onebit+ef", step_s=0.02, accuracy=0.90),
        cell("trained", "10gbit", "fp32", step_s=0.031, accuracy=0.96),
        cell("trained", "10gbit", "e4m3", step_s=0.03, accuracy=0.955),
    ]
    found = answers.answer(records, "digits_fc", 2, "mpi", 0.01, lambda *_: None)
    assert found is not None and found.helps
    assert "at 1gbit e4m3 is 2.00x as fast as fp32 (measured)" in found.text
    assert "at 10gbit nothing is 5% faster" in found.text and "Take e4m3 (8 bits)" in found.text
    assert "below: onebit+ef 90.0" in found.text
    assert answers.answer(records, "alexnet", 2, "mpi", 0.01, lambda *_: None) is None


class Reader(HTMLParser):
    """Tags that a page opens and does not close, and addresses that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_and_tables_tell_measured_from_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without launches; a finished cell in the folder is not run again."""
    place = cells.Place("trained", "digits_fc", "shm", 2, "mpi")
    settings = measured.Effort(epochs=3).settings("trained")
    curve = [{"seconds": 2.0, "step": 20, "accuracy": 0.8}, {"seconds": 4.0, "step": 40, "accuracy": 0.93}]
    done = [
        {**vars(place), "method": name, "settings": settings, "step_s": step, "accuracy": 0.93, "curve": curve}
        for name, step in (("fp32", 0.1), ("e4m3", 0.05))
    ]
    cells.Store(tmp_path / "cells.jsonl").add(done)
    arguments = [
        "study",
        "--networks",
        "digits_fc",
        "alexnet",
        "--methods",
        "e4m3",
        "--links",
        "1gbit",
        "--epochs",
        "3",
    ]
    assert cli.main([*arguments, "--measure", "train", "--measure-links", "shm", "--out", str(tmp_path)]) == 0
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2
    printed = capsys.readouterr().out
    assert "**digits_fc**, 2 ranks, mpi: Low precision helps: at shm e4m3 is 2.00x" in printed
    text = (tmp_path / "study.md").read_text()
    assert "### digits_fc, shm, 2 ranks, mpi: measured, trained" in text
    assert "### alexnet, 1gbit, 2 ranks, mpi: predicted" in text
    row = page.row({record["method"]: record for record in done}, "e4m3", 0.9)
    assert row == ["e4m3", "8", "", "50.0", "", "2.00", "", "", "93.0", "4"]
    assert page.row({"e4m3": done[1]}, "e4m3", 0.99)[-1] == "never"
    reader = Reader()
    reader.feed((tmp_path / "study.html").read_text())
    assert not reader.open and not reader.loads
    assert reader.seen.count("table") == 2 and reader.seen.count("svg") == 2 and "polyline" in reader.seen


def test_watch_reads_steps_and_accuracies() -> None:
    assert watch.read_line("step 40: test accuracy 97.22% (of 360 images)", "accuracy") == (40, 0.9722)
    assert watch.read_line("Step=7 loss 0.3", "accuracy") == (7, None)
    assert watch.read_line("val_acc: 0.5", "val_acc") == (None, 0.5)
    assert watch.read_line("nothing here", "accuracy") == (None, None)


def test_summary_is_made_of_what_was_printed() -> None:
    points = [{"seconds": s, "step": n, "accuracy": a} for s, n, a in ((5.0, 10, 0.5), (7.0, 20, None), (9.0, 30, 0.9))]
    found = measured.summary({"seconds": 10.0, "points": points, "bytes": 3000})
    assert found["step_s"] == pytest.approx(0.2) and found["bytes"] == 100 and found["accuracy"] == 0.9
    assert cells.seconds_to(found, 0.6) == 9.0 and cells.seconds_to(found, 0.95) is None
    assert measured.summary({"seconds": 10.0, "points": [], "bytes": None})["run_s"] == 10.0


def test_places_are_the_grid_and_one_rank_is_not_measured() -> None:
    parser = cli.build_parser()
    args = parser.parse_args(["study", "--networks", "alexnet", "digits_fc", "--ranks", "1", "2", "4"])
    found = study.places(args, ["shm", "1gbit"])
    assert len(found) == len(set(found)) == 2 * 2 * 2
    assert {(place.kind, place.network) for place in found} == {("synchronised", "alexnet"), ("trained", "digits_fc")}


def test_script_is_run_once_per_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = ["study", "--script", f"{sys.executable} {script}", "--methods", "fp32", "e4m3", "--links", "shm"]
    assert cli.main([*arguments, "--out", str(tmp_path), "--timeout", "120"]) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [record["method"] for record in records] == ["fp32", "e4m3"]
    for record in records:
        assert record["accuracy"] == 0.9 and [point["step"] for point in record["curve"]] == [1, 2, 3]
