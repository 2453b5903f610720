"""The activations study at a tiny size, and what is shipped of it: the tables of the docs are those of the JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import activation_models  # noqa: E402
import activations  # noqa: E402
import studies  # noqa: E402


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_docs_tables_are_those_of_the_json():
    records = activations.read(studies.RESULTS / "activations.json")
    page = (ROOT / "docs" / "activations.md").read_text()
    tables = (activations.memory_table, activations.course_table, activations.accuracy_table, activations.speed_table)
    for table in tables:
        assert table(records) in page, f"python benchmarks/activations.py --report --out {studies.RESULTS}"
    assert (studies.RESULTS / "activations.md").read_text() == activations.report(records)


@pytest.mark.parametrize("variant", activations.VARIANTS)
def test_memory_runs_of_all_variants(variant, monkeypatch):
    monkeypatch.setitem(activations.SIZES, "alexnet", (32, 4))
    record = activations.measure("alexnet", variant, None, 3)
    assert record["seconds"] > 0 and record["peak_mb"] >= 0
    if variant == "auto":
        assert record["ratio"] > 2 and record["saved_mb"] == pytest.approx(record["ratio"] * record["stored_mb"])
        assert len(record["ratios"]) == 3
    if variant == "plain":
        assert record["saved_mb"] == record["stored_mb"] > 0


@pytest.mark.parametrize("name", activation_models.NAMES)
def test_networks_train_with_and_without_checkpoints(name):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    model = activation_models.build(name, 64, 10).eval()
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    activation_models.checkpoint_parts(model)(x).square().mean().backward()
    for got, parameter in zip(expected, model.parameters(), strict=True):
        assert torch.allclose(got, parameter.grad, rtol=1e-3, atol=1e-6)


def test_accuracy_runs_resume_and_report(tmp_path, capsys):
    arguments = ["--parts", "accuracy", "--tasks", "classification", "--seeds", "1", "--epochs", "1"]
    arguments += ["--out", str(tmp_path), "--variants"]
    assert activations.main([*arguments, "plain", "auto"]) == 0
    first = json.loads((tmp_path / "activations.json").read_text())["runs"]
    assert [r["variant"] for r in first] == ["plain", "auto"] and all(r["score"] > 0.2 for r in first)
    assert first[0]["ratio"] is None and first[1]["ratio"] > 1.5
    assert activations.main([*arguments, "plain", "auto"]) == 0
    assert json.loads((tmp_path / "activations.json").read_text())["runs"] == first
    said = capsys.readouterr().out
    assert said.count("classification plain seed 0") == 1
    assert f"| 1 | {100 * first[0]['score']:.1f} ± 0.0 |" in (tmp_path / "activations.md").read_text()
    assert activations.main(["--report", "--out", str(tmp_path / "empty")]) == 1
