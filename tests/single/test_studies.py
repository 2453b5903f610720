"""The accuracy and round-off studies at a tiny size: they run, resume, and say what the numbers say."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import accuracy  # noqa: E402
import accuracy_tasks  # noqa: E402
import feedback  # noqa: E402
import gemm  # noqa: E402
import roundoff  # noqa: E402
import studies  # noqa: E402


def test_mean_iou_equals_counting():
    """Oracle: sets of pixels, class by class."""
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 4, (2, 5, 6)), rng.integers(0, 5, (2, 5, 6))
    truth[0, 0] = accuracy_tasks.VOID
    expected = []
    for k in range(6):
        a = {tuple(i) for i in np.argwhere(truth == k)}
        b = {tuple(i) for i in np.argwhere((predicted == k) & (truth != accuracy_tasks.VOID))}
        if a | b:
            expected.append(len(a & b) / len(a | b))
    got = accuracy_tasks.mean_iou(torch.from_numpy(predicted), torch.from_numpy(truth), 6)
    assert got == pytest.approx(np.mean(expected))


def test_digit_scenes_label_their_pixels():
    task = accuracy_tasks.load("segmentation", None)
    digits = accuracy_tasks.load("classification", None)
    # Upper right tile of the first picture is the second digit.
    assert torch.equal(task.train_x[0, 0, :8, 8:], digits.train_x[1, 0])
    ink = digits.train_x[1, 0] > -0.5
    assert torch.equal(task.train_y[0, :8, 8:], torch.where(ink, digits.train_y[1], 10))


def test_load_reads_photographs(tmp_path):
    from PIL import Image

    for part, count in (("train", 3), ("test", 2)):
        for k, name in enumerate(("a", "b")):
            (tmp_path / "cifar10-small" / part / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (32, 32), (100 * k, 0, 0))
                image.save(tmp_path / "cifar10-small" / part / name / f"{i}.jpg")
    task = accuracy_tasks.load("classification", tmp_path)
    assert task.source == "cifar10-small" and task.n_classes == 2
    assert task.train_y.tolist() == [0, 0, 0, 1, 1, 1] and task.test_x.shape == (4, 3, 32, 32)
    assert task.train_x[3, 0].mean() > task.train_x[0, 0].mean()  # b is red, a is black
    for part in ("train", "val"):
        (tmp_path / "camvid-small" / part / "images").mkdir(parents=True)
        (tmp_path / "camvid-small" / part / "labels").mkdir()
        Image.new("RGB", (240, 180)).save(tmp_path / "camvid-small" / part / "images" / "x.jpg")
        Image.fromarray(np.full((180, 240), 11, np.uint8)).save(tmp_path / "camvid-small" / part / "labels" / "x.png")
    scenes = accuracy_tasks.load("segmentation", tmp_path)
    assert torch.equal(scenes.train_y.unique(), torch.tensor([accuracy_tasks.VOID]))
    assert scenes.train_x.shape[2:] == scenes.train_y.shape[1:]


def test_accuracy_study_runs_resumes_and_reports(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--seeds", "1", "--ranks", "2", "--epochs", "1", "--formats", "3,0"]
    assert accuracy.main([*arguments, "--variants", "fp32", "aps", "no aps", "feedback"]) == 0
    first = json.loads((tmp_path / "accuracy_classification.json").read_text())["runs"]
    assert [run["variant"] for run in first] == ["fp32", "aps", "no aps", "feedback"]
    assert all(0 <= run["score"] <= 1 for run in first)
    # fp32 has learned something in one epoch of digits: chance is 0.1.
    assert first[0]["score"] > 0.3
    assert "were not run again" not in capsys.readouterr().out
    assert accuracy.main([*arguments, "--variants", "fp32", "hybrid", "--tasks", "classification"]) == 0
    said = capsys.readouterr().out
    assert "classification of digits: 1400 images to train on, 397 to test" in said
    assert f"1 of 2 runs were in {tmp_path} already and were not run again" in said
    again = json.loads((tmp_path / "accuracy_classification.json").read_text())["runs"]
    assert again[:4] == first and [run["variant"] for run in again[4:]] == ["hybrid"]
    assert accuracy.main(["--report", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "accuracy.md").read_text()
    assert f"fp32: {100 * first[0]['score']:.1f}" in text and "mean IoU in %, digits, 2 ranks" in text
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert accuracy.main(["--report", "--out", str(tmp_path / "empty")]) == 1


def record(variant: str, e: int, m: int, seed: int, score: float, **changes: object) -> dict:
    run = {"task": "classification", "source": "digits", "ranks": 8, "epochs": 6, "variant": variant}
    return run | {"e": e, "m": m, "seed": seed, "score": score} | changes


def test_accuracy_claims_follow_from_the_scores():
    runs = [record("fp32", 8, 23, seed, 0.70 + 0.01 * seed) for seed in range(3)]
    assert {held for _, held in accuracy.claims(runs)} == {None}
    runs += [record("aps", 4, 3, s, 0.71) for s in range(3)] + [record("aps", 5, 2, s, 0.60) for s in range(3)]
    runs += [record("no aps", 4, 3, s, 0.50) for s in range(3)] + [record("hybrid", 5, 2, s, 0.60) for s in range(3)]
    runs += [record("aps", 3, 0, 0, 0.4), record("feedback", 3, 0, 0, 0.5)]
    assert [held for _, held in accuracy.claims(runs)] == [True, False, True, True, True]
    assert accuracy.claims(runs)[-1][0].endswith("(+10.0 points)")


@pytest.mark.parametrize("change", [{"source": "cifar10-small"}, {"ranks": 4}, {"epochs": 1}, {"task": "segmentation"}])
def test_accuracy_does_not_mix_runs_of_different_settings(change):
    """By hand: 70 and 72 % in one setting, 20 and 40 % in the other."""
    runs = [record("fp32", 8, 23, 0, 0.70), record("fp32", 8, 23, 0, 0.20, **change)]
    runs += [record("fp32", 8, 23, 1, 0.72), record("fp32", 8, 23, 1, 0.40, **change)]
    lines = [line for line in accuracy.report(runs).splitlines() if line.startswith("fp32")]
    assert lines == ["fp32: 71.0 ± 1.4", "fp32: 30.0 ± 14.1"]


def test_accuracy_wrong_folder_is_an_error_and_changes_nothing(tmp_path, monkeypatch, capsys):
    """It used to train digits instead, and to write them into a tracked file."""
    monkeypatch.setattr(accuracy, "study", lambda arguments: pytest.fail("it began to train"))
    (tmp_path / "cifar10-small").mkdir()
    for more in ([], ["--tasks", "segmentation"]):
        with pytest.raises(SystemExit, match="2"):
            accuracy.main(["--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), *more])
        assert f"--data-dir: {tmp_path / 'camvid-small'} is not a folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="camvid-small must be a folder"):
        accuracy_tasks.load("segmentation", tmp_path)


@pytest.mark.parametrize("study", [accuracy, feedback, roundoff])
def test_show_prints_what_is_shipped_and_says_so(study, monkeypatch, capsys):
    monkeypatch.setattr(study, "study", lambda *arguments: pytest.fail("it began to train"))
    before = {path: path.stat().st_mtime_ns for path in studies.RESULTS.iterdir()}
    assert study.main(["--show"]) == 0
    said = capsys.readouterr().out
    name = f"{study.__name__}.md"
    assert said.startswith(f"As shipped in benchmarks/results/{name}, nothing was run:")
    assert (studies.RESULTS / name).read_text() in said
    assert {path: path.stat().st_mtime_ns for path in studies.RESULTS.iterdir()} == before


def rows(text: str) -> list[str]:
    """Of Markdown tables, without heads and rules."""
    return [line for line in text.splitlines() if line.startswith(("| (", *(f"| {k}" for k in range(1, 10))))]


def test_committed_tables_follow_from_the_committed_runs():
    """Tables in benchmarks/results and docs/accuracy.md are what the scripts write from the JSON beside them."""
    runs = [run for task in accuracy_tasks.TASKS for run in accuracy.read_records(studies.RESULTS, task)]
    paired = json.loads((studies.RESULTS / "feedback.json").read_text())["runs"]
    sums = json.loads((studies.RESULTS / "roundoff.json").read_text())["records"]
    texts = {
        "accuracy": accuracy.report(runs), "feedback": feedback.report(paired, feedback.EPOCHS),
        "roundoff": roundoff.tables(sums),
    }  # fmt: skip
    for name, text in texts.items():
        assert text in (studies.RESULTS / f"{name}.md").read_text()
    page = (studies.ROOT / "docs" / "accuracy.md").read_text()
    shown = rows(page.split("## Photographs")[1])
    assert set(rows(texts["accuracy"]) + rows(texts["feedback"])) <= set(shown)
    assert set(shown) <= {row for text in texts.values() for row in rows(text)}
    for line in texts["accuracy"].splitlines():
        if line.startswith("fp32: "):
            assert f"; {line}" in page
    heading = "| N | " + " | ".join(roundoff.METHODS) + " |"  # the names in the plot's legend
    table = page.split(heading)[1].split("\n\n")[0]
    assert set(rows(table)) <= set(rows(texts["roundoff"].split("### (4,3), independent")[1].split("###")[0]))


def test_only_what_is_to_be_shipped_goes_into_tracked_folders(tmp_path, monkeypatch):
    def folders(*arguments):
        found = studies.parse_arguments(argparse.ArgumentParser(), arguments)
        return found.out, found.images

    monkeypatch.chdir(studies.ROOT)
    assert folders("--show") == (studies.ROOT / "out" / "studies",) * 2
    assert folders("--out", str(tmp_path)) == (tmp_path, tmp_path)
    assert folders("--out", "benchmarks/results")[1] == studies.ROOT / "docs" / "images"
    page = (studies.ROOT / "docs" / "accuracy.md").read_text()
    assert all(f"(images/{name}.png)" in page for name in ("accuracy", "feedback", "roundoff"))


def test_values_picks_records_that_match():
    runs = [{"a": 1, "b": 2, "x": 3.0}, {"a": 1, "x": 4.0}, {"a": 2, "b": 2, "x": 5.0}]
    assert studies.values(runs, "x", a=1) == [3.0, 4.0] and studies.values(runs, "x", a=1, b=2) == [3.0]


def test_roundoff_study_ranks_the_methods(tmp_path):
    """What theory says: a float32 sum is best, the ring worst, and no scaling loses all at (3,4)."""
    assert roundoff.main(["--ranks", "2", "32", "--elements", "300", "--seeds", "1", "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "roundoff.json").read_text())["records"]

    def error(method: str, e: int = 4, m: int = 3) -> float:
        return roundoff.mean_error(records, kind="independent", e=e, m=m, method=method, ranks=32)

    assert error("two hosts") < error("float32") < error("kahan") < error("grouped") < error("ring")
    assert error("no scale", 3, 4) == 1.0
    assert "### (4,3), independent gradients" in (tmp_path / "roundoff.md").read_text()
    assert (tmp_path / "roundoff.png").read_bytes().startswith(b"\x89PNG")


def test_roundoff_relative_error_by_hand():
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    assert roundoff.relative_error(torch.tensor([3.0, 3.0]), grads) == pytest.approx(1 / 5)


def test_feedback_study_pairs_every_run_with_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(feedback, "FORMATS", ((3, 0),))
    arguments = ["--seeds", "1", "--ranks", "2", "--epochs", "4", "--out", str(tmp_path)]
    assert feedback.main(arguments) == 0
    runs = json.loads((tmp_path / "feedback.json").read_text())["runs"]
    assert len(runs) == 1 + len(feedback.VARIANTS)
    fp32 = runs[0]
    assert fp32["variant"] == "fp32" and fp32["accuracy"] > 0.8
    for run in runs:
        assert run["excess"] == pytest.approx(run["loss"] / fp32["loss"] - 1)
    # Theory: what is kept for the next step is not lost; without a scale most gradients are.
    by_variant = {run["variant"]: abs(run["excess"]) for run in runs}
    assert by_variant["aps + feedback"] < by_variant["aps"] < by_variant["no aps"]
    assert by_variant["no aps + feedback"] < by_variant["no aps"]
    text = (tmp_path / "feedback.md").read_text()
    assert "| (3,0) | 4 |" in text
    assert (tmp_path / "feedback.png").read_bytes().startswith(b"\x89PNG")
    assert feedback.main(["--report", "--epochs", "4", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "feedback.md").read_text() == text


def test_feedback_wins_are_counted_by_seed():
    def run(variant: str, seed: int, excess: float) -> dict:
        return {"variant": variant, "e": 3, "m": 0, "seed": seed, "excess": excess}

    runs = [run("aps", 0, 0.1), run("aps", 1, -0.1), run("aps", 2, 0.01)]
    runs += [run("aps + feedback", 0, 0.05), run("aps + feedback", 1, 0.05), run("aps + feedback", 2, -0.02)]
    assert feedback.wins(runs, "aps", 3, 0) == (2, 3)


def test_gemm_benchmark_agrees_before_it_times(capsys, monkeypatch):
    assert gemm.main(["--sizes", "5", "--repetitions", "1"]) == 0
    assert capsys.readouterr().out.count("quant_gemm, ") == 2
    monkeypatch.setattr(gemm, "quant_gemm", lambda a, b, e, m, kahan: a @ b)
    with pytest.raises(AssertionError, match="must agree bit for bit"):
        gemm.main(["--sizes", "5"])
