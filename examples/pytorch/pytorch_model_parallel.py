"""A large fully-connected layer split over the ranks, data parallel convolutions before it (Dettmers' scheme).

    horovodrun -np 2 python examples/pytorch/pytorch_model_parallel.py --format e4m3
    horovodrun -np 2 python examples/pytorch/pytorch_model_parallel.py --format float32 e4m3   # in turns, to compare

Each rank computes convolutions for its own images. The features of all ranks are gathered; every rank has a part of the
hidden units and computes it for all images; what the parts add to the output is summed and scattered back, a rank's own
images to each. So the split layers' weights and gradients never travel, their inputs and outputs do, packed in
`--format`. scikit-learn's digits ship with it. Needs common.py one folder up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("Model parallelism with packed activations, on handwritten digits")
    parser.add_argument(
        "--format",
        nargs="+",
        default=["e4m3"],
        help='of activations and their gradients, such as "e4m3" or "qsgd8"; with several, as many networks take turns',
    )
    parser.add_argument("--gradient-format", default="e4m3", help="of the convolutions' gradients")
    parser.add_argument("--hidden", type=common.integer(1), default=1024, help="units that the ranks share")
    parser.add_argument("--batch-size", type=common.integer(1), default=128, help="images per rank and step")
    parser.add_argument("--steps", type=common.integer(1), default=60, help="training steps")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of Adam")
    args = parser.parse_args()
    for name in (*args.format, args.gradient_format):
        try:
            common.Options(format=name)
        except (TypeError, ValueError) as error:
            parser.error(str(error))
    return args


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horovod_aps.torch as aps

FEATURES, OUTPUTS = 1024, 1024


class SplitLayers(torch.nn.Module):
    """Linear, ReLU, Linear; this rank has its share of the hidden units."""

    def __init__(self, hidden: int, format: str) -> None:
        super().__init__()
        self._format = format
        first, second = torch.nn.Linear(FEATURES, hidden), torch.nn.Linear(hidden, OUTPUTS, bias=False)
        own = slice(hidden * hvd.rank() // hvd.size(), hidden * (hvd.rank() + 1) // hvd.size())
        self.weight_in = torch.nn.Parameter(first.weight.detach()[own].clone())
        self.bias = torch.nn.Parameter(first.bias.detach()[own].clone())
        self.weight_out = torch.nn.Parameter(second.weight.detach()[:, own].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        everyone = aps.allgather(x, self._format, name="features")
        hidden = F.relu(F.linear(everyone, self.weight_in, self.bias))
        return aps.reduce_scatter(F.linear(hidden, self.weight_out), self._format, name="outputs")


class Net(torch.nn.Module):
    """Two convolutions, the split layers, and a classifier for 8x8 images."""

    def __init__(self, hidden: int, format: str) -> None:
        super().__init__()
        self.convolutions = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 64, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
        )
        self.split = SplitLayers(hidden, format)
        self.classifier = torch.nn.Linear(OUTPUTS, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(F.relu(self.split(self.convolutions(x))))


class Trainer:
    """A network in one format, its optimizers, and what its steps took."""

    def __init__(self, args: argparse.Namespace, format: str) -> None:
        torch.manual_seed(1)  # the same weights everywhere; each rank keeps its part of the split layers
        self.format, self.model = format, Net(args.hidden, format)
        shared = [(f"{format}.{name}", p) for name, p in self.model.named_parameters() if not name.startswith("split.")]
        # Horovod: average the gradients of what every rank has, and only these.
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam([p for _, p in shared], lr=args.lr),
            named_parameters=shared,
            compression=aps.PackedCompressor(args.gradient_format),
        )
        self._own = torch.optim.Adam(self.model.split.parameters(), lr=args.lr)
        self.seconds: list[float] = []
        self.sent: list[float] = []

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        began, before = time.perf_counter(), aps.collective_bytes()
        loss = F.cross_entropy(self.model(images), labels)
        self._optimizer.zero_grad()
        self._own.zero_grad()
        loss.backward()
        for p in self.model.split.parameters():
            p.grad /= hvd.size()  # they have the gradient of the sum of all ranks' losses
        self._optimizer.step()
        self._own.step()
        self.seconds.append(time.perf_counter() - began)
        self.sent.append(aps.collective_bytes() - before)

    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Of all ranks; each judges its part of the images, as many as the others."""
        n_each = len(images) // hvd.size()
        part = slice(hvd.rank() * n_each, (hvd.rank() + 1) * n_each)
        with torch.no_grad():
            hits = (self.model(images[part]).argmax(1) == labels[part]).float().mean()
        return float(hvd.allreduce(hits, name="accuracy"))


def main(args: argparse.Namespace) -> None:
    # Horovod: initialize library.
    hvd.init()
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(classes)
    is_test = torch.arange(len(images)) % 5 == 0
    train_images, train_labels = images[~is_test], labels[~is_test]
    trainers = [Trainer(args, name) for name in dict.fromkeys(args.format)]
    generator = torch.Generator().manual_seed(2)  # all ranks draw alike and take their own part
    for _ in range(args.steps):
        chosen = torch.randint(len(train_images), (hvd.size(), args.batch_size), generator=generator)[hvd.rank()]
        for trainer in trainers:
            trainer.step(train_images[chosen], train_labels[chosen])
    for trainer in trainers:
        accuracy = trainer.accuracy(images[is_test], labels[is_test])
        if hvd.rank() == 0:
            print(
                f"{hvd.size()} ranks, activations as {trainer.format}: "
                f"{1 / statistics.median(trainer.seconds):.2f} steps/s, "
                f"{statistics.median(trainer.sent) / 1e6:.3f} MB of activations sent per rank and step, "
                f"test accuracy {accuracy:.2%} on all {int(is_test.sum())} images",
                flush=True,
            )


if __name__ == "__main__":
    main(ARGS)
