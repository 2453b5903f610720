"""Images with label maps, from the three usual folder layouts, as NumPy arrays: for PyTorch and TensorFlow.

    folder       <root>/{train,val}/images/x.jpg and <root>/{train,val}/labels/x.png (CamVid, own data)
    cityscapes   <root>/leftImg8bit/{train,val}/<city>/*_leftImg8bit.png and gtFine/.../*_gtFine_labelIds.png
    voc          <root>/{JPEGImages,SegmentationClass,ImageSets/Segmentation}, such as VOCdevkit/VOC2012

Label maps hold a class id in each pixel; ids that are no class become VOID, which loss and metrics leave out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import IMAGE_ENDINGS, MEAN, STD, fail, integer
from PIL import Image

VOID = 255
# Cityscapes' 19 evaluated classes among its 34 label ids, in the order of their training ids.
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
Pairs = list[tuple[Path, Path]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say where the data is and how it is cut."""
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="root of the images and label maps")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="folder", help="how the files lie in --data-dir")
    parser.add_argument(
        "--num-classes",
        type=integer(1, VOID),
        metavar="N",
        help="ids 0..N-1 are classes, others are void (default: 19 Cityscapes, 21 VOC, 11 folder)",
    )
    parser.add_argument(
        "--crop",
        type=integer(32),
        nargs=2,
        default=(480, 480),
        metavar=("HEIGHT", "WIDTH"),
        help="size of the pieces that are trained on; evaluation takes whole images",
    )


def _folder(root: Path, split: str) -> Pairs:
    images, labels = root / split / "images", root / split / "labels"
    return [(path, labels / f"{path.stem}.png") for path in _images_in(images)]


def _cityscapes(root: Path, split: str) -> Pairs:
    pairs = []
    for city in _folders_in(root / "leftImg8bit" / split):
        for path in _images_in(city):
            name = path.name.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
            pairs.append((path, root / "gtFine" / split / city.name / name))
    return pairs


def _voc(root: Path, split: str) -> Pairs:
    listing = root / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not listing.is_file():
        fail(
            f"--data-dir {root}: {listing.relative_to(root)} is missing; expected the folder VOC2012 that "
            f"holds JPEGImages, SegmentationClass and ImageSets/Segmentation. --synthetic needs no data."
        )
    names = listing.read_text().split()
    return [(root / "JPEGImages" / f"{name}.jpg", root / "SegmentationClass" / f"{name}.png") for name in names]


LAYOUTS: dict[str, tuple[Callable[[Path, str], Pairs], int]] = {
    "folder": (_folder, 11),
    "cityscapes": (_cityscapes, 19),
    "voc": (_voc, 21),
}


def _folders_in(path: Path) -> list[Path]:
    if not path.is_dir():
        fail(f"--data-dir: {path} is not a folder; see --layout, or use --synthetic, which needs no data.")
    return sorted(child for child in path.iterdir() if child.is_dir())


def _images_in(path: Path) -> list[Path]:
    if not path.is_dir():
        fail(f"--data-dir: {path} is not a folder; see --layout, or use --synthetic, which needs no data.")
    return sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_ENDINGS)


class SegmentationData:
    """Pairs of an image (height, width, 3; float32, normalised) and its label map (height, width; int64)."""

    def __init__(self, args: argparse.Namespace, split: str) -> None:
        find, n_classes = LAYOUTS[args.layout]
        self.n_classes = args.num_classes or n_classes
        self.crop: tuple[int, int] = tuple(args.crop)
        self.augment = split == "train"
        self.seed, self.epoch = args.seed, 0
        self.synthetic = 64 * args.batch_size if args.synthetic else 0
        self.pairs: Pairs = [] if self.synthetic else find(args.data_dir, split)
        self._ids = np.full(256, VOID, np.uint8)
        known = CITYSCAPES_IDS[: self.n_classes] if args.layout == "cityscapes" else range(self.n_classes)
        for new, old in enumerate(known):
            self._ids[old] = new
        if self.synthetic:
            return
        if not self.pairs:
            fail(f"--data-dir {args.data_dir}: no {split} images found in the layout {args.layout!r}")
        missing = next((label for _, label in self.pairs if not label.is_file()), None)
        if missing is not None:
            fail(f"--data-dir {args.data_dir}: the label map {missing} is missing")

    def __len__(self) -> int:
        return self.synthetic or len(self.pairs)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """A sample: for training a random crop, flipped at random, else all of it; the same in every run."""
        random = np.random.default_rng((self.seed, self.epoch, i))
        if self.synthetic:
            image = random.standard_normal((*self.crop, 3), dtype=np.float32)
            return image, random.integers(self.n_classes, size=self.crop)
        with Image.open(self.pairs[i][0]) as image_file, Image.open(self.pairs[i][1]) as label_file:
            image = (np.asarray(image_file.convert("RGB"), np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
            ids = np.asarray(label_file).astype(np.int64)
        labels = self._ids[np.where((ids < 0) | (ids > VOID), VOID, ids)]
        if image.shape[:2] != labels.shape:
            fail(
                f"{self.pairs[i][0]} is {image.shape[:2]} but its label map {self.pairs[i][1]} is "
                f"{labels.shape}; label maps must hold one class id per pixel and have their image's size"
            )
        if self.augment:
            image, labels = self._cut(image, labels, random)
            if random.random() < 0.5:
                image, labels = image[:, ::-1], labels[:, ::-1]
        return np.ascontiguousarray(image), labels.astype(np.int64)

    def _cut(self, image: np.ndarray, labels: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A piece of the crop's size from anywhere; what the image lacks is padded with zeros and VOID."""
        missing = [max(0, want - have) for want, have in zip(self.crop, labels.shape, strict=True)]
        if any(missing):
            rows, columns = [(n // 2, n - n // 2) for n in missing]
            image = np.pad(image, (rows, columns, (0, 0)))
            labels = np.pad(labels, (rows, columns), constant_values=VOID)
        room = [have - want for want, have in zip(self.crop, labels.shape, strict=True)]
        top, left = [int(random.integers(n + 1)) for n in room]
        window = np.s_[top : top + self.crop[0], left : left + self.crop[1]]
        return image[window], labels[window]


def confusion(labels: np.ndarray, predictions: np.ndarray, n_classes: int) -> np.ndarray:
    """Counts of (label, prediction) over the pixels that have a class."""
    known = labels < n_classes
    pairs = labels[known].astype(np.int64) * n_classes + predictions[known]
    return np.bincount(pairs, minlength=n_classes**2).reshape(n_classes, n_classes)


def mean_iou(matrix: np.ndarray) -> float:
    """Mean intersection over union of the classes that occur in labels or predictions."""
    hits = np.diag(matrix).astype(float)
    union = matrix.sum(0) + matrix.sum(1) - hits
    return float((hits[union > 0] / union[union > 0]).mean()) if (union > 0).any() else 0.0
