"""Every example on two ranks, on tiny data made here in the real folder layouts, and with wrong flags and paths."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    """imagenet/, folder/, cityscapes/ and VOC2012/ with a few random pictures each."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)

    def save_image(path: Path, height: int = 40, width: int = 48) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(height, width, 3), dtype=np.uint8)).save(path)

    def save_labels(path: Path, ids: list[int], height: int = 40, width: int = 48) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.choice(ids, size=(height, width)).astype(np.uint8)).save(path)

    for split, n_images in (("train", 6), ("val", 3)):
        for name in ("n01440764", "n01443537"):
            for i in range(n_images):
                save_image(root / "imagenet" / split / name / f"{name}_{i}.JPEG")
        for i in range(n_images):
            save_image(root / "folder" / split / "images" / f"{i}.jpg")
            save_labels(root / "folder" / split / "labels" / f"{i}.png", [0, 3, 10, 11])
            city = Path(split) / "ulm" / f"ulm_{i:06}_000019"
            save_image(root / "cityscapes" / "leftImg8bit" / f"{city}_leftImg8bit.png")
            save_labels(root / "cityscapes" / "gtFine" / f"{city}_gtFine_labelIds.png", [0, 7, 26, 33])
            save_image(root / "VOC2012" / "JPEGImages" / f"{split}_{i}.jpg")
            save_labels(root / "VOC2012" / "SegmentationClass" / f"{split}_{i}.png", [0, 15, 20, 255])
        listing = root / "VOC2012" / "ImageSets" / "Segmentation" / f"{split}.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{split}_{i}\n" for i in range(n_images)))
    return root


def check_ratio(output: str, limit: float = 0.27) -> None:
    match = re.search(r"Gradients: .* MB sent by this rank, ([0-9.]+) of what fp32", output)
    assert match is not None, output
    assert 0 < float(match[1]) <= limit


# ---- PyTorch ----


def test_pytorch_examples_train_on_two_ranks(data: Path, tmp_path: Path) -> None:
    imagenet = ["--train-dir", f"{data}/imagenet/train", "--val-dir", f"{data}/imagenet/val", "--model", "resnet18"]
    small = ["--batch-size", "2", "--max-steps", "2"]
    segmentation = ["--model", "lraspp_mobilenet_v3_large", "--crop", "64", "64", "--batch-size", "2"]
    checkpoint = ["--checkpoint", f"{tmp_path}/check/digits.pt"]
    report = ["--aps-report", f"{tmp_path}/digits.html"]
    four_bits = ["--aps-allreduce", "--aps-exp-bits", "3", "--aps-man-bits", "0", "--aps-error-feedback"]
    hybrid = [*APS, "--aps-override", "fc.*=float32", "--aps-override", "*bn*=5,10"]
    digits, folder = "pytorch/pytorch_digits.py", "pytorch/pytorch_segmentation_fcn.py"
    plan = [
        (digits, ["--epochs", "4", *APS, *checkpoint, *report, "--log-dir", f"{tmp_path}/logs"]),
        (digits, ["--epochs", "5", *APS, *checkpoint, "--resume"]),
        (digits, ["--max-steps", "3", *four_bits, "--mixed-precision"]),
        (digits, ["--max-steps", "3", "--fp16-allreduce", "--synthetic"]),
        ("pytorch/pytorch_imagenet_resnet50.py", [*imagenet, *small, "--image-size", "32", *hybrid]),
        (folder, ["--data-dir", f"{data}/folder", "--max-steps", "1", *segmentation, *APS]),
        (folder, ["--data-dir", f"{data}/cityscapes", "--layout", "cityscapes", "--max-steps", "1", *segmentation]),
        (folder, ["--data-dir", f"{data}/VOC2012", "--layout", "voc", "--max-steps", "1", *segmentation, *APS]),
        (
            "pytorch/pytorch_synthetic_benchmark.py",
            [
                "--model",
                "resnet18",
                "--image-size",
                "32",
                "--batch-size",
                "2",
                "--num-warmup-batches",
                "1",
                "--num-batches-per-iter",
                "1",
                "--num-iters",
                "2",
                *APS,
            ],
        ),
    ]
    ranks = run_plan([{"script": script, "arguments": arguments} for script, arguments in plan], tmp_path, MPIRUN)
    assert [result["code"] for result in ranks[1]] == [0] * len(plan)
    assert all("accuracy" not in result["output"] for result in ranks[1]), "only rank 0 may print"
    first, resumed, four, fp16, image, camvid, cityscapes, voc, speed = [result["output"] for result in ranks[0]]
    accuracy = float(re.findall(r"test accuracy ([0-9.]+)%", first)[-1])
    assert accuracy > 75, "ten classes: chance is 10 %"
    check_ratio(first)
    assert "Resuming from" in resumed and "at step 88" in resumed  # 4 epochs of 1437 // (2 * 32) = 22 steps
    assert len(re.findall("test accuracy", resumed)) == 1
    check_ratio(four, 0.14)
    assert "test accuracy" in fp16 and "Gradients:" not in fp16
    assert re.search(r"epoch 1: step 2, train loss .* top-1 [0-9.]+%", image)
    check_ratio(image, 0.32)
    for output in (camvid, cityscapes, voc):
        assert re.search(r"epoch 1: step 1, train loss [0-9.]+, mean IoU 0\.[0-9]+", output), output
    assert re.search(r"Images/s per CPU rank: [0-9.]+ \+- [0-9.]+", speed)
    assert (tmp_path / "digits.html").read_text().startswith("<!DOCTYPE html>")
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))
    assert sorted(path.name for path in (tmp_path / "check").iterdir()) == [
        "digits.pt", "digits.pt.rank0", "digits.pt.rank1"]


def test_pytorch_example_runs_under_horovodrun(tmp_path: Path) -> None:
    plan = [{"script": "pytorch/pytorch_digits.py", "arguments": ["--max-steps", "3", *APS]}]
    ranks = run_plan(plan, tmp_path, HOROVODRUN)
    assert "step 3: test accuracy" in ranks[0][0]["output"]
    check_ratio(ranks[0][0]["output"], 0.3)


# ---- TensorFlow ----


def test_tensorflow_examples_train_on_two_ranks(data: Path, tmp_path: Path) -> None:
    imagenet = ["--train-dir", f"{data}/imagenet/train", "--val-dir", f"{data}/imagenet/val", "--model", "MobileNet"]
    checkpoint = ["--checkpoint", f"{tmp_path}/check/digits"]
    digits = "tensorflow2/tensorflow2_keras3_fit.py"
    plan = [
        (digits, ["--epochs", "3", *APS, *checkpoint, "--log-dir", f"{tmp_path}/logs"]),
        (digits, ["--epochs", "4", *APS, *checkpoint, "--resume"]),
        (
            "tensorflow2/tensorflow2_keras_imagenet_resnet50.py",
            [*imagenet, "--batch-size", "2", "--max-steps", "2", "--image-size", "32", *APS],
        ),
        (
            "tensorflow2/tensorflow2_segmentation.py",
            [
                "--data-dir",
                f"{data}/folder",
                "--backbone",
                "MobileNetV2",
                "--crop",
                "32",
                "32",
                "--batch-size",
                "2",
                "--max-steps",
                "1",
                *APS,
            ],
        ),
        (
            "tensorflow2/tensorflow2_synthetic_benchmark.py",
            [
                "--model",
                "MobileNet",
                "--image-size",
                "32",
                "--batch-size",
                "2",
                "--num-warmup-batches",
                "1",
                "--num-batches-per-iter",
                "1",
                "--num-iters",
                "2",
                "--mixed-precision",
                *APS,
            ],
        ),
    ]
    ranks = run_plan([{"script": script, "arguments": arguments} for script, arguments in plan], tmp_path, MPIRUN)
    assert [result["code"] for result in ranks[1]] == [0] * len(plan)
    first, resumed, image, camvid, speed = [result["output"] for result in ranks[0]]
    assert float(re.findall(r"top-1 ([0-9.]+)%", first)[-1]) > 75, "ten classes: chance is 10 %"
    check_ratio(first)
    assert "Resuming from" in resumed and "at step 69" in resumed  # 3 epochs of ceil(718 / 32) = 23 steps
    assert re.search(r"epoch 4: step 92", resumed) and "epoch 3" not in resumed
    assert {path.name for path in (tmp_path / "check").glob("*.rank?")} == {"digits.rank0", "digits.rank1"}
    assert re.search(r"epoch 1: step 2, train loss .* top-1 [0-9.]+%", image)
    assert re.search(r"epoch 1: step 1, train loss [0-9.]+, mean IoU 0\.[0-9]+", camvid)
    assert re.search(r"Images/s per CPU rank: [0-9.]+ \+- [0-9.]+", speed)
    for output in (image, camvid, speed):
        check_ratio(output)
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))


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
    ("digits.py", ["--max-steps", "0"], 2, "--max-steps must be at least 1, got 0"),
    ("digits.py", ["--resume"], 2, "--resume needs --checkpoint"),
    ("digits.py", ["--aps-alreduce"], 2, "unrecognized arguments: --aps-alreduce"),
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
    (SEGMENTATION, ["--model", "deeplabv3_resnet50", "--batch-size", "1"], 2, "--batch-size must be at least 2"),
]


def test_pytorch_examples_say_what_is_wrong(data: Path, tmp_path: Path) -> None:
    plan = [
        {
            "script": f"pytorch/pytorch_{script}",
            "may_fail": True,
            "arguments": [argument.format(data=data) for argument in arguments],
        }
        for script, arguments, _, _ in MISTAKES
    ]
    (results,) = run_plan(plan, tmp_path, [], n_ranks=1)
    for (script, arguments, code, message), result in zip(MISTAKES, results, strict=True):
        assert result["code"] == code, (script, arguments, result)
        assert message in result["output"], (script, arguments, result)
        assert "Traceback" not in result["output"]


def test_tensorflow_examples_say_what_is_wrong(data: Path, tmp_path: Path) -> None:
    mistakes = [
        ("keras_imagenet_resnet50.py", ["--train-dir", "/no/such"], 1, "--train-dir /no/such is not a folder"),
        ("keras_imagenet_resnet50.py", ["--model", "resnet5"], 2, "--model must be in keras.applications"),
        ("keras_imagenet_resnet50.py", ["--image-size", "16"], 2, "--image-size must be at least 32"),
        ("segmentation.py", ["--data-dir", "/no/such"], 1, "/no/such/train/images is not a folder"),
        ("segmentation.py", ["--crop", "16", "16"], 2, "--crop must be at least 32 32"),
        ("synthetic_benchmark.py", ["--model", "resnet5"], 2, "--model must be in keras.applications"),
        ("keras3_fit.py", ["--aps-allreduce", "--aps-man-bits", "24"], 2, "m must be in 0..23, got 24"),
    ]
    plan = [
        {"script": f"tensorflow2/tensorflow2_{script}", "arguments": arguments, "may_fail": True}
        for script, arguments, _, _ in mistakes
    ]
    (results,) = run_plan(plan, tmp_path, [], n_ranks=1)
    for (script, arguments, code, message), result in zip(mistakes, results, strict=True):
        assert result["code"] == code, (script, arguments, result)
        assert message in result["output"], (script, arguments, result)
        assert "Traceback" not in result["output"]


# ---- What the examples share ----


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
    images, labels = zip(*(found[i] for i in range(6)), strict=True)
    assert {image.shape for image in images} == {(32, 32, 3)} and images[0].dtype == np.float32
    # Cityscapes' ids 7, 26, 33 are its training classes 0, 13, 18; what is left is void.
    assert set(np.unique(labels).tolist()) == known | {segmentation_data.VOID}


def test_segmentation_crop_pads_small_images_with_void(data: Path) -> None:
    found = segmentation_data.SegmentationData(arguments(data_dir=data / "folder", crop=(64, 64)), "val")
    image, labels = found[0]
    with Image.open(data / "folder" / "val" / "labels" / "0.png") as file:
        original = np.asarray(file)
    np.testing.assert_array_equal(labels[12:52, 8:56], np.where(original < 11, original, 255))
    assert (labels[:12] == 255).all() and not image[:12].any()


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
