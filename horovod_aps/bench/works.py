"""What the benchmark synchronises: gradients of a model's shapes, ready at once, or real training steps.

Both are modules whose `forward(batch)` returns a loss. For shapes, the loss's backward pass hands out
prepared gradients without computing or copying anything, so that what is timed is communication alone. Every
rank can compute every other rank's gradients, which gives the exact mean without trusting any communication.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from horovod_aps.tools.shapes import MODELS, layer_shapes

Batch = tuple[Tensor, Tensor] | None
N_FLAT = 25_600_000
BATCH_SIZE = 32


def work_shapes(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Layer names and shapes of a work: one of horovod_aps.tools.shapes, "digits", "flat" or "small"."""
    if name == "digits":
        return [(name, tuple(parameter.shape)) for name, parameter in DigitsNet().named_parameters()]
    if name == "flat":
        return [("flat", (N_FLAT,))]
    if name == "small":
        return _small_transformer()
    return layer_shapes(name)


def _small_transformer(n_layers: int = 12, width: int = 64) -> list[tuple[str, tuple[int, ...]]]:
    """146 tensors of 4,096 elements on average: messages so small that latency rules."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding", (256, width))]
    for k in range(n_layers):
        for part, n_out, n_in in (("qkv", 3, 1), ("projection", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes += [
                (f"{k}.{part}.weight", (n_out * width, n_in * width)),
                (f"{k}.{part}.bias", (n_out * width,)),
            ]
        for part in ("norm1", "norm2"):
            shapes += [(f"{k}.{part}.weight", (width,)), (f"{k}.{part}.bias", (width,))]
    return [*shapes, ("head.bias", (256,))]


class GradientSource:
    """One rank's gradients for a list of shapes, in one buffer that `refresh` sets back to what it was.

    Layers have scales from 1 to 2^-11, as those of real models differ; ranks share half of the variance.
    """

    def __init__(self, shapes: list[tuple[str, tuple[int, ...]]], rank: int) -> None:
        self.shapes = shapes
        sizes = [math.prod(shape) for _, shape in shapes]
        self._original = torch.empty(sum(sizes))
        for k, view in enumerate(self._original.split(sizes)):
            view.copy_(self._draw(k, rank))
        self._buffer = self._original.clone()
        self.tensors = [view.view(shape) for view, (_, shape) in zip(self._buffer.split(sizes), shapes, strict=True)]

    def _draw(self, layer: int, rank: int) -> Tensor:
        n = math.prod(self.shapes[layer][1])
        shared = torch.randn(n, generator=torch.Generator().manual_seed(7_919 * layer + 1))
        own = torch.randn(n, generator=torch.Generator().manual_seed(7_919 * layer + 100 + rank))
        return (shared + own).mul_(2.0 ** -(layer % 12))

    def refresh(self) -> None:
        """Undo what in-place reductions did to the gradients."""
        self._buffer.copy_(self._original)

    def exact_mean(self, n_ranks: int) -> list[Tensor]:
        """The float64 mean over ranks, layer by layer."""
        means = []
        for k in range(len(self.shapes)):
            total = torch.zeros(math.prod(self.shapes[k][1]), dtype=torch.float64)
            for rank in range(n_ranks):
                total += self._draw(k, rank)
            means.append(total / n_ranks)
        return means


class _HandOut(torch.autograd.Function):
    """A zero loss whose gradients are given tensors; as aliases, which autograd takes over uncopied."""

    @staticmethod
    def forward(ctx: Any, source: GradientSource, *parameters: Tensor) -> Tensor:
        ctx.source = source
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(tensor.detach() for tensor in reversed(ctx.source.tensors)))


class ShapesModel(nn.Module):
    """One parameter per layer; all gradients come at once, last layer first, from `source`."""

    def __init__(self, source: GradientSource, values: list[Tensor]) -> None:
        super().__init__()
        self.source = source
        # `values` are shared by all methods' models: nothing is ever trained here.
        self.layers = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, batch: Batch = None) -> Tensor:
        loss: Tensor = _HandOut.apply(self.source, *reversed(list(self.layers)))
        return loss


class DigitsNet(nn.Module):
    """A net for 8x8 digits with 6.3 M parameters: at 1 Gbit/s communication is most of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * 4 * 4, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )

    def forward(self, batch: Batch) -> Tensor:
        assert batch is not None
        images, labels = batch
        return nn.functional.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)


def digits_batches(rank: int, n_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One rank's endless batches of the digits that come with scikit-learn; ranks have disjoint shards."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[rank::n_ranks, None] / 16
    labels = torch.tensor(data.target)[rank::n_ranks]
    generator = torch.Generator().manual_seed(rank)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for chosen in order.split(BATCH_SIZE)[:-1]:
            yield images[chosen], labels[chosen]


WORKS = (*MODELS, "digits", "flat", "small", "step")
