"""Every example on two ranks, on tiny data made here in the real folder layouts, and with wrong flags and paths."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tqdm
from PIL import Image
from sklearn.metrics import confusion_matrix, jaccard_score

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import common  # noqa: E402
import segmentation_data  # noqa: E402

MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-np", "2"]
HOROVODRUN = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2"]
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",  # ranks share the cores
}
APS = ["--aps-allreduce", "--aps-exp-bits", "4", "--aps-man-bits", "3"]


def launch(command: list[str], timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=timeout, check=False
    )


def run_plan(
    plan: list[dict[str, Any]], folder: Path, launcher: list[str], n_ranks: int = 2
) -> list[list[dict[str, Any]]]:
    """Run the plan under a launcher; returns the results of every rank."""
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, str(ROOT / "tests" / "example_runner.py"), str(folder / "plan.json"), str(folder)]
    done = launch([*launcher, *command])
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(n_ranks)]


# ---- Data ----


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """imagenet/, folder/, cityscapes/ and VOC2012/ with a few random pictures each; VOC's differ in size."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)

    def save_image(path: Path, height: int = 40, width: int = 48) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(height, width, 3), dtype=np.uint8)).save(path)

    def save_labels(path: Path, ids: list[int], height: int = 40, width: int = 48) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.choice(ids, size=(height, width)).astype(np.uint8)).save(path)

    for name, n_train, n_val in (("n01440764", 6, 1), ("n01443537", 6, 2)):
        for split, n_images in (("train", n_train), ("val", n_val)):
            for i in range(n_images):
                save_image(root / "imagenet" / split / name / f"{name}_{i}.JPEG")
    for i in range(4):
        save_image(root / "one_class" / "train" / "only" / f"{i}.png")
    save_image(root / "one_class" / "val" / "only" / "0.png")
    (root / "foreign.index").write_text("of something else")
    (root / "foreign.keras").write_text("of something else")
    for split, n_images in (("train", 6), ("val", 3)):
        for i in range(n_images):
            save_image(root / "folder" / split / "images" / f"{i}.jpg")
            save_labels(root / "folder" / split / "labels" / f"{i}.png", [0, 3, 10, 11])
            city = Path(split) / "ulm" / f"ulm_{i:06}_000019"
            save_image(root / "cityscapes" / "leftImg8bit" / f"{city}_leftImg8bit.png")
            save_labels(root / "cityscapes" / "gtFine" / f"{city}_gtFine_labelIds.png", [0, 7, 26, 33])
            save_image(root / "VOC2012" / "JPEGImages" / f"{split}_{i}.jpg", 40 + i)
            save_labels(root / "VOC2012" / "SegmentationClass" / f"{split}_{i}.png", [0, 15, 20, 255], 40 + i)
        listing = root / "VOC2012" / "ImageSets" / "Segmentation" / f"{split}.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{split}_{i}\n" for i in range(n_images)))
    return root


def check_ratio(output: str, limit: float = 0.27) -> None:
    match = re.search(r"Gradients: .* MB sent by this rank, ([0-9.]+) of what fp32", output)
    assert match is not None, output
    assert 0 < float(match[1]) <= limit


def check_same_ending(whole: dict[str, Any], resumed: dict[str, Any], half: dict[str, Any]) -> None:
    """A run that was interrupted within an epoch ends in the same bits and says the same of its last epoch."""
    lines = [[line for line in run["output"].splitlines() if line.startswith("epoch")][-1] for run in (whole, resumed)]
    assert lines[0] == lines[1] and re.match(r"epoch 2: step 5, ", lines[0]), lines
    assert whole["digest"] == resumed["digest"] != half["digest"]


def known_pixels(labels: Iterable[Path], n_classes: int) -> int:
    """How many pixels of all label maps have a class."""
    return sum(int((np.asarray(Image.open(path)) < n_classes).sum()) for path in labels)


FOUR_BITS = ["--aps-allreduce", "--aps-exp-bits", "3", "--aps-man-bits", "0", "--aps-error-feedback"]
SMALL = ["--batch-size", "2", "--image-size", "32"]
FAST = [*SMALL, "--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]
Plan = dict[str, tuple[str, list[str]]]


def run_on_two_ranks(plan: Plan, folder: Path, launcher: list[str]) -> dict[str, dict[str, Any]]:
    """Rank 0's results, once it is known that the ranks agree. Names that begin with "wrong" must fail."""
    entries = [
        {"script": script, "arguments": arguments, "may_fail": name.startswith("wrong")}
        for name, (script, arguments) in plan.items()
    ]
    ranks = run_plan(entries, folder, launcher)
    for name, first, second in zip(plan, *ranks, strict=True):
        assert first["code"] == second["code"] == (1 if name.startswith("wrong") else 0), (name, first, second)
        assert first.get("digest") == second.get("digest"), f"{name}: replicas differ"
        assert not re.search("epoch|accuracy|Images/s|rank 1", second["output"]), "only rank 0 may print"
        if name.startswith("wrong"):
            assert not second["output"], "only rank 0 may complain"
            assert len(first["output"].splitlines()) == 1, first["output"]
    return dict(zip(plan, ranks[0], strict=True))


# ---- PyTorch ----


def pytorch_plan(data: Path, folder: Path) -> Plan:
    digits, imagenet = "pytorch/pytorch_digits.py", "pytorch/pytorch_imagenet_resnet50.py"
    segmentation, speed = "pytorch/pytorch_segmentation_fcn.py", "pytorch/pytorch_synthetic_benchmark.py"
    pictures = ["--train-dir", f"{data}/imagenet/train", "--val-dir", f"{data}/imagenet/val"]
    small = [*SMALL, "--model", "resnet18"]
    decay = [*pictures, *SMALL, "--model", "mobilenet_v2", "--weight-decay", "0.1", *APS]  # with dropout
    image = ["--checkpoint", f"{folder}/image.pt", "--resume"]
    crop = ["--model", "lraspp_mobilenet_v3_large", "--crop", "64", "64", "--batch-size", "2", "--epochs", "1"]
    hybrid = ["--aps-override", "classifier.*=float32", "--aps-override", "*.bias=5,10"]
    full, half = [["--checkpoint", f"{folder}/check/{name}.pt"] for name in ("full", "half")]
    report = ["--aps-report", f"{folder}/digits.html", "--log-dir", f"{folder}/logs"]
    return {
        "full": (digits, ["--epochs", "4", *FOUR_BITS, *full, *report]),
        "half": (digits, ["--epochs", "4", *FOUR_BITS, *half, "--resume", "--max-steps", "31"]),
        "resumed": (digits, ["--epochs", "4", *FOUR_BITS, *half, "--resume"]),
        "auto": (digits, ["--max-steps", "12", *APS, "--aps-override", "auto", "--mixed-precision"]),
        "fp16": (digits, ["--epochs", "4", "--fp16-allreduce", "--synthetic"]),
        "image": (imagenet, [*decay, *hybrid, "--max-steps", "5"]),
        "image half": (imagenet, [*decay, *hybrid, "--max-steps", "2", *image]),
        "image resumed": (imagenet, [*decay, *hybrid, "--max-steps", "5", *image]),
        "image synthetic": (imagenet, [*small, "--synthetic", "--max-steps", "1"]),
        "activations": (
            "pytorch/pytorch_activations_resnet.py",
            [*pictures, *small, *APS, "--max-steps", "2", "--activations-report", f"{folder}/saved.html"],
        ),
        "folder": (segmentation, ["--data-dir", f"{data}/folder", *crop, *APS]),
        "cityscapes": (segmentation, ["--data-dir", f"{data}/cityscapes", "--layout", "cityscapes", *crop]),
        "voc": (segmentation, ["--data-dir", f"{data}/VOC2012", "--layout", "voc", *crop, *APS]),
        "auxiliary": (
            segmentation,
            ["--synthetic", "--max-steps", "1", "--batch-size", "2", "--crop", "32", "32", "--mixed-precision", *APS],
        ),
        "speed": (speed, [*FAST, "--model", "resnet18", *APS]),
        "speed plain": (speed, [*FAST, "--model", "resnet18"]),
        "split": ("pytorch/pytorch_model_parallel.py", ["--steps", "40", "--format", "e4m3", "float32"]),
        "wrong folder": (imagenet, [*small, "--train-dir", "/no/such"]),
        "wrong checkpoint": (digits, ["--checkpoint", f"{folder}/image.pt", "--resume"]),
    }


@pytest.mark.parametrize("launcher", [MPIRUN, pytest.param(HOROVODRUN, marks=pytest.mark.slow)], ids=["mpirun", "gloo"])
def test_pytorch_examples_train_on_two_ranks(data: Path, tmp_path: Path, launcher: list[str]) -> None:
    results = run_on_two_ranks(pytorch_plan(data, tmp_path), tmp_path, launcher)
    output = {name: result["output"] for name, result in results.items()}
    assert float(re.findall(r"test accuracy ([0-9.]+)%", output["full"])[-1]) > 75, "ten classes: chance is 10 %"
    check_ratio(output["full"], 0.14)
    assert "half.pt yet, starting from random weights" in output["half"]
    assert "Resuming from" in output["resumed"] and "at step 31" in output["resumed"]  # 1437 // (2 * 32) = 22 per epoch
    assert re.findall(r"step (\d+): test accuracy .* on all 360 images", output["resumed"]) == ["44", "66", "88"]
    assert results["resumed"]["digest"] == results["full"]["digest"] != results["half"]["digest"]
    assert "test accuracy" in output["auto"] and "Gradients:" in output["auto"]
    assert float(re.findall(r"test accuracy ([0-9.]+)%", output["fp16"])[-1]) > 50, output["fp16"]
    assert "Gradients:" not in output["fp16"]
    assert re.search(r"epoch 1: step 2, train loss .* top-1 [0-9.]+% on all 3 images", output["image half"])
    check_same_ending(results["image"], results["image resumed"], results["image half"])
    assert re.search(r"step 1, .* top-1 [0-9.]+% on 4 images of noise .* not meaningful", output["image synthetic"])
    check_ratio(output["image"], 0.32)
    assert re.search(r"Activations: [0-9.]+ MB saved in [0-9.]+ MB, [2-9][0-9.]*x smaller", output["activations"])
    assert "Gradients:" in output["activations"] and (tmp_path / "saved.html").exists()
    for name in ("folder", "cityscapes", "voc", "auxiliary"):
        assert re.search(r"epoch 1: step 1, train loss [0-9.]+, mean IoU 0\.[0-9]+", output[name]), output[name]
    assert results["folder"]["pixels"] == known_pixels((data / "folder" / "val" / "labels").iterdir(), 11)
    labels = (data / "VOC2012" / "SegmentationClass").glob("val_*.png")
    assert results["voc"]["pixels"] == known_pixels(labels, 21)
    for name, sent in (("speed", r"APSCompressor\(e=4, m=3\)"), ("speed plain", "none")):
        assert re.search(f"2 ranks, {sent}\n" + r"Images/s per CPU rank: [0-9.]+ \+- [0-9.]+", output[name])
    sent = {}
    for name in ("e4m3", "float32"):
        pattern = rf"2 ranks, activations as {name}: .* ([0-9.]+) MB of activations .* accuracy ([0-9.]+)% on all 360"
        found = re.search(pattern, output["split"])
        assert found is not None and float(found[2]) > 60, output["split"]
        sent[name] = float(found[1])
    assert sent["e4m3"] < 0.26 * sent["float32"]
    assert "--train-dir /no/such is not a folder" in output["wrong folder"]
    assert "image.pt is no checkpoint of this model" in output["wrong checkpoint"]
    assert (tmp_path / "digits.html").read_text().startswith("<!DOCTYPE html>")
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))
    assert sorted(path.name for path in (tmp_path / "check").iterdir()) == [
        f"{name}.pt{ending}" for name in ("full", "half") for ending in ("", ".rank0", ".rank1")
    ]


def test_pytorch_example_runs_under_horovodrun(tmp_path: Path) -> None:
    plan = [{"script": "pytorch/pytorch_digits.py", "arguments": ["--max-steps", "3", *APS]}]
    ranks = run_plan(plan, tmp_path, HOROVODRUN)
    assert "step 3: test accuracy" in ranks[0][0]["output"]
    check_ratio(ranks[0][0]["output"], 0.3)


# ---- TensorFlow ----


def tensorflow_plan(data: Path, folder: Path) -> Plan:
    digits, imagenet = "tensorflow2/tensorflow2_keras3_fit.py", "tensorflow2/tensorflow2_keras_imagenet_resnet50.py"
    segmentation, speed = "tensorflow2/tensorflow2_segmentation.py", "tensorflow2/tensorflow2_synthetic_benchmark.py"
    pictures = ["--train-dir", f"{data}/imagenet/train", "--val-dir", f"{data}/imagenet/val"]
    small = [*SMALL, "--model", "MobileNet"]
    hybrid = [*APS, "--aps-override", "*dense*=float32"]
    crop = ["--backbone", "MobileNetV2", "--crop", "32", "32", "--batch-size", "2", "--epochs", "1"]
    full, half = [["--checkpoint", f"{folder}/check/{name}"] for name in ("full", "half.keras")]
    return {
        "full": (digits, ["--epochs", "3", *FOUR_BITS, *full, "--log-dir", f"{folder}/logs"]),
        "half": (digits, ["--epochs", "3", *FOUR_BITS, *half, "--resume", "--max-steps", "31"]),
        "resumed": (digits, ["--epochs", "3", *FOUR_BITS, *half, "--resume"]),
        "fp16": (digits, ["--epochs", "4", "--fp16-allreduce", "--synthetic"]),
        "image": (imagenet, [*pictures, *small, *hybrid, "--max-steps", "2", "--mixed-precision"]),
        "voc": (
            segmentation,
            ["--data-dir", f"{data}/VOC2012", "--layout", "voc", *crop, *APS, "--checkpoint", f"{folder}/voc"],
        ),
        "speed": (speed, [*FAST, "--model", "MobileNet", "--mixed-precision", *APS]),
        "wrong folder": (imagenet, [*small, "--train-dir", "/no/such"]),
        "wrong checkpoint": (digits, ["--checkpoint", f"{folder}/voc", "--resume"]),
    }


def test_tensorflow_examples_train_on_two_ranks(data: Path, tmp_path: Path) -> None:
    check_tensorflow(run_on_two_ranks(tensorflow_plan(data, tmp_path), tmp_path, MPIRUN), data, tmp_path)


def check_tensorflow(results: dict[str, dict[str, Any]], data: Path, folder: Path) -> None:
    output = {name: result["output"] for name, result in results.items()}
    assert float(re.findall(r"top-1 ([0-9.]+)%", output["full"])[-1]) > 75, "ten classes: chance is 10 %"
    check_ratio(output["full"], 0.14)
    assert "half.keras yet, starting from random weights" in output["half"]
    assert "Resuming from" in output["resumed"] and "at step 31" in output["resumed"]  # 1437 // 2 // 32 = 22 per epoch
    assert re.findall(r"(epoch \d: step \d+), .* on all 360 images", output["resumed"]) == [
        "epoch 2: step 44",
        "epoch 3: step 66",
    ]
    with zipfile.ZipFile(folder / "check" / "half.keras") as saved:  # which Keras has loaded for "resumed"
        assert {"metadata.json", "config.json", "model.weights.h5"} <= set(saved.namelist())
    assert results["resumed"]["digest"] == results["full"]["digest"] != results["half"]["digest"]
    assert float(re.findall(r"top-1 ([0-9.]+)%", output["fp16"])[-1]) > 50, output["fp16"]
    assert "Gradients:" not in output["fp16"]
    image = re.search(r"epoch 1: step 2, train loss .* top-1 ([0-9.]+)%", output["image"])
    # Two of the three images are rank 0's: a mean of the ranks' means could be 25 % or 75 %.
    assert image and image[1] in ("0.00", "33.33", "66.67", "100.00")
    assert re.search(r"epoch 1: step 1, train loss [0-9.]+, mean IoU 0\.[0-9]+", output["voc"])
    labels = (data / "VOC2012" / "SegmentationClass").glob("val_*.png")
    assert results["voc"]["pixels"] == known_pixels(labels, 21)
    # With Keras's 0.99, evaluation after few steps is at chance.
    assert results["image"]["momenta"] == results["voc"]["momenta"] == [0.9]
    assert re.search(r"Images/s per CPU rank: [0-9.]+ \+- [0-9.]+", output["speed"])
    assert "--train-dir /no/such is not a folder" in output["wrong folder"]
    assert "voc is no checkpoint of this model" in output["wrong checkpoint"]
    for name in ("image", "voc", "speed"):
        check_ratio(output[name])
    assert list((folder / "logs").glob("events.out.tfevents.*"))
    assert {path.name for path in (folder / "check").glob("*.rank?")} == {
        "full.rank0",
        "full.rank1",
        "half.keras.rank0",
        "half.keras.rank1",
    }


@pytest.mark.slow
def test_tensorflow_examples_train_under_horovodrun(data: Path, tmp_path: Path) -> None:
    """The same under horovodrun, and what takes too long for every day."""
    plan = tensorflow_plan(data, tmp_path)
    imagenet, segmentation, speed = (plan[name][0] for name in ("image", "voc", "speed"))
    small = [*SMALL, "--model", "MobileNet"]
    crop = ["--backbone", "MobileNetV2", "--crop", "32", "32", "--batch-size", "2"]
    one = ["--train-dir", f"{data}/one_class/train", "--val-dir", f"{data}/one_class/val"]
    plan |= {
        "one image": (imagenet, [*one, *small, "--epochs", "1", *FOUR_BITS]),
        "image synthetic": (imagenet, [*small, "--synthetic", "--max-steps", "1"]),
        "folder": (segmentation, ["--data-dir", f"{data}/folder", *crop, "--epochs", "1", *FOUR_BITS]),
        "cityscapes": (
            segmentation,
            ["--data-dir", f"{data}/cityscapes", "--layout", "cityscapes", *crop, "--epochs", "1", "--mixed-precision"],
        ),
        "synthetic": (segmentation, ["--synthetic", *crop, "--max-steps", "1", "--fp16-allreduce"]),
        "speed plain": (speed, [*FAST, "--model", "MobileNet"]),
    }
    pictures = ["--train-dir", f"{data}/imagenet/train", "--val-dir", f"{data}/imagenet/val", *small, *FOUR_BITS]
    scenes = ["--data-dir", f"{data}/folder", *crop, "--batch-size", "1", *FOUR_BITS]
    for name, script, flags in (("pictures", imagenet, pictures), ("scenes", segmentation, scenes)):
        file = ["--checkpoint", f"{tmp_path}/{name}{'.keras' if name == 'scenes' else ''}", "--resume"]
        plan |= {
            name: (script, [*flags, "--max-steps", "5"]),
            f"{name} half": (script, [*flags, "--max-steps", "2", *file]),
            f"{name} resumed": (script, [*flags, "--max-steps", "5", *file]),
        }
    results = run_on_two_ranks(plan, tmp_path, HOROVODRUN)
    for name in ("pictures", "scenes"):
        check_same_ending(*(results[name + part] for part in ("", " resumed", " half")))
    check_tensorflow(results, data, tmp_path)
    assert "top-1 100.00%" in results["one image"]["output"]  # rank 1 has nothing to validate
    assert results["folder"]["pixels"] == known_pixels((data / "folder" / "val" / "labels").iterdir(), 11)
    for name in ("folder", "cityscapes", "synthetic"):
        assert "epoch 1: step 1, train loss" in results[name]["output"]
    assert "2 ranks, none\n" in results["speed plain"]["output"]


# ---- The demo ----


def test_demo_ends_with_table_and_plot(tmp_path: Path) -> None:
    done = launch([sys.executable, str(ROOT / "examples" / "demo.py"), "--epochs", "1", "--out", str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "demo.json").read_text())}
    assert len(rows) == 5
    assert all(row["identical"] for row in rows.values())
    for name in rows:
        assert re.search(rf"^{re.escape(name)} .* yes$", done.stdout, re.MULTILINE), done.stdout
    if "two hosts" in done.stdout:  # loopback also counts what other programs send
        fp32 = rows["fp32"]["bytes_per_step"]
        assert rows["APS (4,3)"]["bytes_per_step"] <= 0.27 * fp32
        assert rows["APS (3,0) + EF"]["bytes_per_step"] <= 0.14 * fp32
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.size[0] > 1000
    assert "demo&#x27;s APS (4,3)" in (tmp_path / "demo_report.html").read_text()


# ---- Mistakes ----

SEGMENTATION = "segmentation_fcn.py"
MISTAKES = [
    ("digits.py", ["--aps-exp-bits", "5"], 2, "--aps-exp-bits needs --aps-allreduce"),
    ("digits.py", ["--fp16-allreduce", "--aps-allreduce"], 2, "exclude each other"),
    ("digits.py", ["--aps-allreduce", "--aps-exp-bits", "9"], 2, "e must be in 1..8, got 9"),
    ("digits.py", ["--aps-allreduce", "--aps-override", "fc=half"], 2, "must look like"),
    ("digits.py", ["--max-steps", "0"], 2, "--max-steps: must be at least 1, got 0"),
    ("digits.py", ["--epochs", "many"], 2, "--epochs: must be an integer, got 'many'"),
    ("digits.py", ["--seed", "-1"], 2, "--seed: must be in 0..4294967295, got -1"),
    ("digits.py", ["--batch-size", "2000"], 1, "1437 images make no batch of 2000 on each of 1 ranks"),
    ("digits.py", ["--checkpoint", "{data}/folder"], 1, "/folder is a folder"),
    ("digits.py", ["--checkpoint", "{data}/foreign.index/a.pt"], 1, "its folder cannot be made"),
    ("digits.py", ["--resume", "--checkpoint", "{data}/foreign.index"], 1, "is no checkpoint of this model"),
    ("digits.py", ["--resume"], 2, "--resume needs --checkpoint"),
    ("digits.py", ["--aps-alreduce"], 2, "unrecognized arguments: --aps-alreduce"),
    ("synthetic_benchmark.py", ["--num-iters", "0"], 2, "--num-iters: must be at least 1, got 0"),
    ("synthetic_benchmark.py", ["--num-batches-per-iter", "0"], 2, "--num-batches-per-iter: must be at least 1"),
    ("synthetic_benchmark.py", ["--num-warmup-batches", "-1"], 2, "--num-warmup-batches: must be at least 0"),
    ("imagenet_resnet50.py", ["--image-size", "0"], 2, "--image-size: must be at least 32, got 0"),
    ("imagenet_resnet50.py", ["--workers", "-1"], 2, "--workers: must be at least 0, got -1"),
    ("imagenet_resnet50.py", ["--model", "resnet5"], 2, "--model must be a torchvision classifier"),
    ("imagenet_resnet50.py", ["--train-dir", "/no/such"], 1, "--train-dir /no/such is not a folder"),
    ("imagenet_resnet50.py", ["--train-dir", "{data}/folder/train/images"], 1, "has no sub-folders"),
    (
        "imagenet_resnet50.py",
        ["--train-dir", "{data}/folder/train", "--val-dir", "{data}/imagenet/val"],
        1,
        "must have the same classes",
    ),
    ("imagenet_resnet50.py", ["--train-dir", "{data}/VOC2012"], 1, "holds no images"),
    (
        "imagenet_resnet50.py",
        ["--train-dir", "{data}/imagenet/train", "--val-dir", "{data}/imagenet/val", "--batch-size", "100"],
        1,
        "12 images make no batch of 100 on each of 1 ranks",
    ),
    (SEGMENTATION, ["--data-dir", "/no/such"], 1, "/no/such/train/images is not a folder"),
    (SEGMENTATION, ["--data-dir", "{data}/folder", "--layout", "voc"], 1, "train.txt is missing"),
    (SEGMENTATION, ["--data-dir", "{data}/folder", "--layout", "cityscapes"], 1, "is not a folder"),
    (SEGMENTATION, ["--layout", "coco"], 2, "invalid choice: 'coco'"),
    (SEGMENTATION, ["--crop", "0", "0"], 2, "--crop: must be at least 32, got 0"),
    (SEGMENTATION, ["--num-classes", "256"], 2, "--num-classes: must be in 1..255, got 256"),
    (SEGMENTATION, ["--num-classes", "0"], 2, "--num-classes: must be in 1..255, got 0"),
    (SEGMENTATION, ["--num-classes", "-3"], 2, "--num-classes: must be in 1..255, got -3"),
    (SEGMENTATION, ["--model", "deeplabv3_resnet50", "--batch-size", "1"], 2, "--batch-size must be at least 2"),
]


def check_mistakes(
    mistakes: list[tuple[str, list[str], int, str]], prefix: str, more: list[dict[str, Any]], data: Path, folder: Path
) -> list[dict[str, Any]]:
    """Check what examples say, in a single process; returns the results of the entries that come after."""
    plan = [
        {
            "script": f"{prefix}_{script}",
            "may_fail": True,
            "arguments": [argument.format(data=data) for argument in arguments],
        }
        for script, arguments, _, _ in mistakes
    ]
    (results,) = run_plan([*plan, *more], folder, [], n_ranks=1)
    for (script, arguments, code, message), result in zip(mistakes, results, strict=False):
        assert result["code"] == code, (script, arguments, result)
        assert message in result["output"], (script, arguments, result)
        assert "Traceback" not in result["output"]
    return results[len(mistakes) :]


def test_pytorch_examples_say_what_is_wrong(data: Path, tmp_path: Path) -> None:
    model = ["--model", "lraspp_mobilenet_v3_large", "--data-dir", f"{data}/folder", "--crop", "32", "32"]
    flags = [*model, "--batch-size", "3", "--epochs", "2"]
    more = [
        {"script": f"pytorch/pytorch_{SEGMENTATION}", "arguments": [*flags, "--workers", workers]}
        for workers in ("0", "1")
    ]
    here, in_worker = check_mistakes(MISTAKES, "pytorch/pytorch", more, data, tmp_path)
    # The pieces that are cut out of an image are new in every epoch, whoever cuts them.
    assert here["digest"] == in_worker["digest"]


def test_tensorflow_examples_say_what_is_wrong(data: Path, tmp_path: Path) -> None:
    mistakes = [
        ("keras_imagenet_resnet50.py", ["--train-dir", "/no/such"], 1, "--train-dir /no/such is not a folder"),
        ("keras_imagenet_resnet50.py", ["--model", "resnet5"], 2, "--model must be in keras.applications"),
        ("keras_imagenet_resnet50.py", ["--image-size", "16"], 2, "--image-size: must be at least 32"),
        ("segmentation.py", ["--data-dir", "/no/such"], 1, "/no/such/train/images is not a folder"),
        ("segmentation.py", ["--crop", "16", "16"], 2, "--crop: must be at least 32, got 16"),
        ("synthetic_benchmark.py", ["--model", "resnet5"], 2, "--model must be in keras.applications"),
        ("synthetic_benchmark.py", ["--num-iters", "0"], 2, "--num-iters: must be at least 1, got 0"),
        ("keras3_fit.py", ["--aps-allreduce", "--aps-man-bits", "24"], 2, "m must be in 0..23, got 24"),
        ("keras3_fit.py", ["--batch-size", "2000"], 1, "1437 images make no batch of 2000 on each of 1 ranks"),
        ("keras3_fit.py", ["--checkpoint", "{data}/folder"], 1, "/folder is a folder"),
        ("keras3_fit.py", ["--resume", "--checkpoint", "{data}/foreign"], 1, "is no checkpoint of this model"),
        ("keras3_fit.py", ["--resume", "--checkpoint", "{data}/foreign.keras"], 1, "is no checkpoint of this model"),
    ]
    check_mistakes(mistakes, "tensorflow2/tensorflow2", [], data, tmp_path)


def test_wrong_path_ends_all_ranks_with_one_message() -> None:
    script = str(ROOT / "examples" / "pytorch" / "pytorch_imagenet_resnet50.py")
    done = launch([*MPIRUN, sys.executable, script, "--train-dir", "/no/such"], timeout=120)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("--train-dir /no/such is not a folder") == 1, done.stderr


def test_wrong_flag_is_left_to_rank_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ranks wait for it: a launcher that sees one of them leave ends rank 0 before it has said anything."""
    waits: list[float] = []
    monkeypatch.setattr(common.time, "sleep", waits.append)
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    for rank, n_lines, n_waits in (("0", 2, 0), ("1", 0, 1)):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            common.Parser("").parse_args(["--aps-alreduce"])
        assert len(capsys.readouterr().err.splitlines()) == n_lines
        assert len(waits) == n_waits


def test_checks_report_trouble_of_any_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 of two says when it is fine and the other rank is not, and the other way round."""

    class World:
        def __init__(self, rank: int, others: str | None) -> None:
            self.rank, self.others = lambda: rank, others

        def allgather_object(self, problem: Any, name: str) -> list[Any]:
            return [problem, self.others]

    with common.checks(World(0, None)):
        pass
    logger = logging.getLogger("horovod_aps")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    with pytest.raises(SystemExit, match="1"), common.checks(World(0, "rank 1 on b: no such folder")):
        pass
    assert capsys.readouterr().err == "rank 1 on b: no such folder\n"
    assert not logger.isEnabledFor(logging.WARNING)  # such as that the compressor was never used
    with pytest.raises(SystemExit, match="1"), common.checks(World(1, None)):
        common.fail("no such folder")
    assert capsys.readouterr().err == ""


HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as done:
        assert done.code == 0, script
    heavy = {"torch", "torchvision", "tensorflow", "keras", "sklearn", "horovod"} & set(sys.modules)
    assert not heavy, (script, heavy)
    print("done", script)
"""


def test_help_needs_no_framework() -> None:
    """Their import takes seconds."""
    without_options = {"ddp_accelerate", "ddp_lightning", "ddp_ray"}
    found = sorted(path for path in (ROOT / "examples").glob("*/*_*.py") if path.stem not in without_options)
    scripts = list(map(str, found))
    done = launch([sys.executable, "-c", HELP, *scripts], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(scripts) == done.stdout.count("done ") == 11
    assert done.stdout.count("--aps-allreduce") >= 8  # those on Horovod


def test_torchvision_of_another_torch_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["x/imagenet.py"])
    with pytest.raises(SystemExit, match="2"), common.needs_torchvision():
        raise RuntimeError("operator torchvision::nms does not exist")
    said = capsys.readouterr().err
    assert said.startswith("imagenet.py: torchvision cannot be imported (operator torchvision::nms does not exist)")
    assert "the build that belongs to your torch" in said


# ---- What the examples share ----


def test_validation_sample_is_a_mixture() -> None:
    """Files lie sorted by class: 200 of 1000 images hold about 20 of each of 10 classes."""
    sample = common.validation_sample(1000, 200, seed=42)
    assert len(set(sample)) == 200 and sample == common.validation_sample(1000, 200, seed=42)
    assert all(8 <= count <= 35 for count in np.bincount(np.array(sample) // 100, minlength=10))
    assert common.validation_sample(5, None, 1) == common.validation_sample(5, 9, 1) == [0, 1, 2, 3, 4]
    assert common.judged_on(200, 1000, False) == "on 200 images picked from 1,000"
    assert common.judged_on(1000, 1000, False) == "on all 1,000 images"


def test_progress_does_not_flood_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every half minute, by a clock of our own, and nothing of what is over before."""
    stream, clock = io.StringIO(), [1000.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(tqdm.std, "time", lambda: clock[0])
    for n_steps, n_lines in ((20, 0), (200, 4)):
        with common.progress(n_steps, 0, "epoch 1") as bar:
            bar._time = lambda: clock[0]
            for _ in range(n_steps):
                clock[0] += 0.5
                bar.update()
        lines = stream.getvalue().splitlines()
        assert len(lines) == n_lines and "\r" not in stream.getvalue(), stream.getvalue()
    assert lines[-1].startswith("epoch 1: 100%")


def arguments(**more: Any) -> Namespace:
    return Namespace(
        **{
            "layout": "folder",
            "data_dir": None,
            "num_classes": None,
            "crop": (32, 32),
            "seed": 1,
            "synthetic": False,
            "batch_size": 2,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("layout", "folder", "known"),
    [("folder", "folder", {0, 3, 10}), ("cityscapes", "cityscapes", {0, 13, 18}), ("voc", "VOC2012", {0, 15, 20})],
)
def test_segmentation_layouts_map_label_ids(data: Path, layout: str, folder: str, known: set[int]) -> None:
    found = segmentation_data.SegmentationData(arguments(layout=layout, data_dir=data / folder), "train")
    assert len(found) == 6
    whole = segmentation_data.SegmentationData(arguments(layout=layout, data_dir=data / folder), "val")
    assert whole[0][0].shape == (40, 48, 3) and whole[0][1].shape == (40, 48)
    images, labels = zip(*(found[i] for i in range(6)), strict=True)
    assert {image.shape for image in images} == {(32, 32, 3)} and images[0].dtype == np.float32
    # Cityscapes' ids 7, 26, 33 are its training classes 0, 13, 18; what is left is void.
    assert set(np.unique(labels).tolist()) == known | {segmentation_data.VOID}


def test_segmentation_crop_pads_small_images_with_void(data: Path) -> None:
    found = segmentation_data.SegmentationData(arguments(data_dir=data / "folder", crop=(64, 64)), "train")
    image, labels = found[0]
    with Image.open(data / "folder" / "train" / "labels" / "0.png") as file:
        original = np.where(np.asarray(file) < 11, file, 255)
    inside = labels[12:52, 8:56]
    assert np.array_equal(inside, original) or np.array_equal(inside, original[:, ::-1])
    assert (labels[:12] == 255).all() and not image[:12].any()


def test_segmentation_label_maps_of_16_bits_do_not_wrap(tmp_path: Path) -> None:
    for folder in ("images", "labels"):
        (tmp_path / "val" / folder).mkdir(parents=True)
    ids = np.array([[0, 3, 10, 11], [255, 256, 257, 65535]], np.uint16)
    Image.fromarray(ids).save(tmp_path / "val" / "labels" / "a.png")
    Image.new("RGB", (4, 2)).save(tmp_path / "val" / "images" / "a.png")
    labels = segmentation_data.SegmentationData(arguments(data_dir=tmp_path), "val")[0][1]
    assert labels.tolist() == [[0, 3, 10, 255], [255] * 4]


def test_segmentation_augmentation_changes_with_the_epoch_and_is_repeatable(data: Path) -> None:
    found = segmentation_data.SegmentationData(arguments(data_dir=data / "folder"), "train")
    first = found[0][0]
    np.testing.assert_array_equal(found[0][0], first)
    found.epoch = 1
    assert not np.array_equal(found[0][0], first)


def test_mean_iou_agrees_with_scikit_learn() -> None:
    random = np.random.default_rng(3)
    labels, predictions = random.choice([0, 1, 2, 4, 255], size=(2, 50, 50)), random.integers(5, size=(2, 50, 50))
    matrix = segmentation_data.confusion(labels, predictions, 5)
    known = labels != 255
    np.testing.assert_array_equal(matrix, confusion_matrix(labels[known], predictions[known], labels=range(5)))
    expected = jaccard_score(labels[known], predictions[known], average="macro")
    assert segmentation_data.mean_iou(matrix) == pytest.approx(expected)


def test_learning_rate_warms_up_then_decays() -> None:
    args = Namespace(base_lr=0.1, warmup_epochs=5, epochs=90)
    assert common.learning_rate(args, 0, 8, "step") == pytest.approx(0.1)
    assert common.learning_rate(args, 2.5, 8, "step") == pytest.approx(0.45)
    assert common.learning_rate(args, 5, 8, "step") == pytest.approx(0.8)
    assert [common.learning_rate(args, epoch, 8, "step") for epoch in (29, 30, 60, 80)] == pytest.approx(
        [0.8, 0.08, 0.008, 0.0008]
    )
    assert common.learning_rate(args, 45, 8, "poly") == pytest.approx(0.8 * 0.5**0.9)
    assert common.learning_rate(args, 90, 8, "poly") == 0
