"""The two tasks of the accuracy study: classify small photographs, segment street scenes; models that train
on a CPU.

`load(task, data_dir)` reads the CIFAR-10 and CamVid subsets from `data_dir` (README tells the layout); without one it
makes both tasks from scikit-learn's digits, so that the study runs anywhere.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn

VOID = 255  # pixels that neither train nor count
TASKS = ("classification", "segmentation")


@dataclass
class Task:
    """Data in memory (images float32 NCHW, labels int64), and what to train on it."""

    name: str
    source: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    n_classes: int

    def model(self) -> nn.Module:
        """A fresh model, initialised from torch's global generator."""
        build = ConvNet if self.name == "classification" else SegNet
        return build(self.train_x.shape[1], self.n_classes)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy, void left out."""
        return F.cross_entropy(model(x), y, ignore_index=VOID)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Accuracy, or mean intersection over union of the classes that occur, on the test set."""
        model.eval()
        predicted = torch.cat([model(x).argmax(1) for x in self.test_x.split(100)])
        model.train()
        if self.name == "classification":
            return float((predicted == self.test_y).float().mean())
        return mean_iou(predicted, self.test_y, self.n_classes)


def mean_iou(predicted: Tensor, truth: Tensor, n_classes: int) -> float:
    """Mean over the classes that occur in truth or prediction of intersection over union, void left out."""
    valid = truth != VOID
    pairs = truth[valid] * n_classes + predicted[valid]
    counts = torch.bincount(pairs, minlength=n_classes**2).reshape(n_classes, n_classes).double()
    hits = counts.diag()
    union = counts.sum(0) + counts.sum(1) - hits
    return float((hits / union)[union > 0].mean())


class ConvNet(nn.Module):
    """Three convolutions and a linear head, 25 thousand parameters."""

    def __init__(self, n_channels: int, n_classes: int) -> None:
        super().__init__()
        widths = (n_channels, 16, 32, 64)
        self.features = nn.Sequential()
        for i in range(3):
            self.features.append(nn.Conv2d(widths[i], widths[i + 1], 3, padding=1, bias=False))
            self.features.append(nn.BatchNorm2d(widths[i + 1]))
            self.features.append(nn.ReLU())
            self.features.append(nn.MaxPool2d(2))
        self.head = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class SegNet(nn.Module):
    """A small encoder and decoder with skip connections; group norm, as a rank sees one or two images."""

    def __init__(self, n_channels: int, n_classes: int, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(n_channels, width), _block(width, 2 * width), _block(2 * width, 4 * width)])
        self.up = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])
        self.head = nn.Conv2d(width, n_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        out = self.down[2](F.max_pool2d(second, 2))
        for block, skip in zip(self.up, (second, first), strict=True):
            out = block(torch.cat([F.interpolate(out, size=skip.shape[2:]), skip], 1))
        return self.head(out)


def _block(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.GroupNorm(4, n_out), nn.ReLU())


def folder_of(task: str, data_dir: Path) -> Path:
    """Where the photographs of a task are."""
    return data_dir / {"classification": "cifar10-small", "segmentation": "camvid-small"}[task]


def load(task: str, data_dir: Path | None) -> Task:
    """The task's data: photographs from `data_dir`, or digits if that is None."""
    if task not in TASKS:
        raise ValueError(f"load: task must be one of {', '.join(TASKS)}, got {task!r}")
    if data_dir is None:
        return _digits() if task == "classification" else _digit_scenes()
    folder = folder_of(task, data_dir)
    if not folder.is_dir():
        raise ValueError(f"load: {folder} must be a folder of photographs")
    return _read_classes(folder) if task == "classification" else _read_scenes(folder)


def _image(path: Path, size: tuple[int, int] | None = None) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        image = image.convert("RGB")
        return np.asarray(image.resize(size) if size else image, np.float32).transpose(2, 0, 1) / 255


def _read_classes(folder: Path) -> Task:
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())

    def part(name: str) -> tuple[Tensor, Tensor]:
        files = [(path, k) for k, c in enumerate(classes) for path in sorted((folder / name / c).glob("*.jpg"))]
        x = torch.from_numpy(np.stack([_image(path) for path, _ in files]))
        return (x - 0.47) / 0.25, torch.tensor([k for _, k in files])

    return Task("classification", folder.name, *part("train"), *part("test"), len(classes))


def _read_scenes(folder: Path, size: tuple[int, int] = (120, 88)) -> Task:
    """CamVid at half size; labels by nearest neighbour, class 11 is void."""
    from PIL import Image

    def part(name: str) -> tuple[Tensor, Tensor]:
        images = sorted((folder / name / "images").iterdir())
        labels = {path.stem: path for path in (folder / name / "labels").iterdir()}
        x = torch.from_numpy(np.stack([_image(path, size) for path in images]))
        maps = []
        for path in images:
            with Image.open(labels[path.stem]) as label:
                maps.append(np.asarray(label.resize(size, Image.Resampling.NEAREST), np.int64))
        y = torch.from_numpy(np.stack(maps))
        return (x - 0.47) / 0.25, torch.where(y >= 11, VOID, y)

    return Task("segmentation", folder.name, *part("train"), *part("val"), 11)


def _digits() -> Task:
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Task("classification", "digits", x[:1400], y[:1400], x[1400:], y[1400:], 10)


def _digit_scenes() -> Task:
    """Four digits to a picture; a pixel's class is its digit, 10 the background."""
    digits = _digits()

    def part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        n = len(y) // 4
        labels = torch.where(x[: 4 * n, 0] > -0.5, y[: 4 * n, None, None], 10)

        def tile(values: Tensor) -> Tensor:
            return values.reshape(n, 2, 2, 8, 8).permute(0, 1, 3, 2, 4).reshape(n, 16, 16)

        return tile(x[: 4 * n, 0])[:, None], tile(labels)

    train, test = part(digits.train_x, digits.train_y), part(digits.test_x, digits.test_y)
    return Task("segmentation", "digits", *train, *test, 11)
