"""Dettmers' predictor. Oracle: the published figures."""

from __future__ import annotations

import json

import pytest

from horovod_aps.formats import FLOAT32, FloatFormat
from horovod_aps.tools import cli
from horovod_aps.tools.modelparallel import SUB_BATCHES, ModelParallel, published, sent_bytes
from horovod_aps.tools.predict import predict

# For 96 GPUs, by sub-batch: 32 and 8 bits at a step of 104.1 ms, then at 177 ms.
PUBLISHED = {
    128: (13.4, 13.8, 20.7, 21.4),
    256: (20, 24.4, 29.7, 35.2),
    512: (23, 39.3, 33.5, 51.9),
    1024: (14.8, 48.6, 22.7, 61),
    2048: (11.3, 50.6, 17.7, 62.8),
    12288: (1.3, 9.7, 2.15, 15.5),
}


def test_all_24_published_entries_for_96_gpus() -> None:
    assert tuple(PUBLISHED) == SUB_BATCHES
    found = {
        (one["sub_batch"], one["bits"], step): one["speedup"] for step in (104.1, 177.0) for one in published(step)
    }
    assert len(found) == 24
    for size, (at32, at8, long32, long8) in PUBLISHED.items():
        for bits, step, wanted in ((32, 104.1, at32), (8, 104.1, at8), (32, 177.0, long32), (8, 177.0, long8)):
            assert found[size, bits, step] == pytest.approx(wanted, abs=0.1), (size, bits, step)


@pytest.mark.parametrize("step_ms, at32, at8", [(104.1, 3.53, 3.67), (177.0, 3.71, 3.8)])
def test_published_entries_for_4_gpus(step_ms: float, at32: float, at8: float) -> None:
    model = ModelParallel(step_ms)
    assert model.speedup(4, 6.81) == pytest.approx(at32, abs=0.01)
    assert model.speedup(4, 2.55) == pytest.approx(at8, abs=0.01)


def test_command_prints_the_published_figures(capsys, tmp_path) -> None:
    out = tmp_path / "p.json"
    assert cli.main(["predict", "--scheme", "model-parallel", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "3.53x" in printed and "3.67x" in printed and "48.6x" in printed
    records = json.loads(out.read_text())["predictions"]
    assert len(records) == 2 + 12


def test_command_takes_the_users_own_figures(capsys, tmp_path) -> None:
    """Oracle: the formula by hand; a link of 1 Gbit/s moves 8 bits in a quarter of the time of 32."""
    out = tmp_path / "p.json"
    own = "--step-ms 50 --fc-ms 20 --sub-batches 2 --parallel-fc-ms 5 --conv-penalty-ms 1 --ranks 2"
    command = f"predict --scheme model-parallel {own} --fc-penalty-ms 9 3 --json {out}"
    assert cli.main(command.split()) == 0
    assert "96 ranks" not in capsys.readouterr().out
    found = [one["speedup"] for one in json.loads(out.read_text())["predictions"]]
    assert found == pytest.approx([100 / 50, 100 / 44])
    command = f"predict --scheme model-parallel {own} --activations 256 4096 --bandwidth 1gbit --json {out}"
    assert cli.main(command.split()) == 0
    wide, packed = json.loads(out.read_text())["predictions"]
    assert packed["bytes_sent"] == wide["bytes_sent"] / 4 == 2 * 2 * 256 * 4096 / 2
    assert 3 < wide["fc_penalty_ms"] / packed["fc_penalty_ms"] < 10 and packed["speedup"] > wide["speedup"]


def test_gradients_are_predicted_in_any_format(tmp_path) -> None:
    """Oracle: the bytes that the formats' own `bytes_for` tells, and (4, 3) for "e4m3"."""
    out = tmp_path / "p.json"
    assert cli.main(f"predict --ranks 2 8 --format 4,3 e4m3 qsgd4 --json {out}".split()) == 0
    records = json.loads(out.read_text())["predictions"]
    by_name = {(one["ranks"], one["method"]): one for one in records}
    for n in (2, 8):
        pair, text, four = (by_name[n, name] for name in ("aps(4,3)", "e4m3", "qsgd4"))
        assert pair["total_s"] == text["total_s"] and pair["bytes_sent"] == text["bytes_sent"]
        assert four["bytes_sent"] / pair["bytes_sent"] == pytest.approx((4 + 32 / 512) / 8, rel=0.01)
        assert four["total_s"] < pair["total_s"]
    assert str(predict("resnet50", 2, formats=["qsgd4", (4, 3)])).count("qsgd4") == 2


def test_bytes_of_activations_include_scales() -> None:
    assert sent_bytes(128, 4096, FLOAT32, 4) == 3 * 4 * 128 * 4096 / 4
    assert sent_bytes(128, 4096, FloatFormat(4, 3), 2) == 128 * 4096 / 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--step-ms 5 --fc-ms 6", "fc_ms must be at most step_ms"),
        ("--step-ms 0 --fc-ms 0", "step_ms must be positive"),
        ("--activations 4 4 --fc-penalty-ms 1 1", "give one of them"),
    ],
)
def test_wrong_figures_are_refused(arguments: str, words: str, capsys) -> None:
    assert cli.main(f"predict --scheme model-parallel {arguments}".split()) == 2
    assert words in capsys.readouterr().err
