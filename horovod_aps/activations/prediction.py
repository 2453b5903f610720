"""What is stored already tells much of what comes next: r = relu(batch norm of x), and x is stored anyway.

Flow: a batch norm that saves its input leaves a `Norm` at its node of the graph, a ReLU that saves its result a
`Result`. When the next ReLU saves, `guide` reads from the nodes what its argument was: a batch norm, or the sum of two
of these; the codec then stores what differs from the prediction. What is not recognised is stored alone. A prediction
is made of decoded streams, in coding and decoding alike, so a wrong one costs bytes and nothing else.

The mask of the ReLU serves the batch norm in turn: where it is off no gradient comes back, and the errors of x do not
reach the weight. `bounds` allows for a wider bound there.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from horovod_aps.activations import codec
from horovod_aps.activations.entries import Entry

MAX_DEPTH = 4  # predictions that follow from each other: each decodes all before it
_KEY = "horovod_aps.activations"


def _notes(node: Any) -> dict[str, Any]:
    """What goes with a node of the graph, as long as that lives."""
    notes: dict[str, Any] = node.metadata
    return notes


@dataclass(eq=False)
class Norm:
    """One call of a batch norm."""

    entry: weakref.ref[Entry] | None = None
    shape: torch.Size = torch.Size()
    stride: tuple[int, ...] = ()
    statistics: list[Tensor] = field(default_factory=list)
    """Mean and 1 / standard deviation, as autograd saves them."""
    scale: Tensor | None = None
    shift: Tensor | None = None
    mask: Tensor | None = None
    """Bits of the ReLU behind it."""

    def saves(self, entry: Entry, x: Tensor) -> None:
        """The input is stored, or will be."""
        self.entry, self.shape, self.stride = weakref.ref(entry), x.shape, x.stride()

    def leaves(self, module: torch.nn.Module, output: Any) -> None:
        """Forward is done: its node carries what a prediction needs."""
        if self.entry is None or not isinstance(output, Tensor) or output.grad_fn is None:
            return
        if [s.numel() for s in self.statistics] != 2 * [self.shape[1]]:
            return  # not in training, or another implementation
        with torch.no_grad():
            mean, scale = (s.detach().float() for s in self.statistics)
            weight, bias = module.weight, module.bias
            scale = scale * weight.float() if isinstance(weight, Tensor) else scale.clone()
            shift = -mean * scale
            self.scale = scale.contiguous()
            self.shift = (shift + bias.float() if isinstance(bias, Tensor) else shift).contiguous()
        self.statistics.clear()
        _notes(output.grad_fn)[_KEY] = self

    def source(self) -> codec.Source | None:
        entry = self.entry() if self.entry is not None else None
        if entry is None or entry.stream is None:
            return None
        if torch.empty(self.shape, device="meta").stride() == self.stride:
            plane = self.shape[2:].numel()
        elif self.stride[1] == 1:
            plane = 1  # channels last
        else:
            return None
        return codec.Source(entry.stream, self.scale, self.shift, plane, entry.layer)


@dataclass(eq=False)
class Result:
    """What a ReLU has given."""

    entry: weakref.ref[Entry]
    shape: torch.Size
    stride: tuple[int, ...]

    def source(self) -> codec.Source | None:
        entry = self.entry()
        return codec.Source(entry.stream) if entry is not None and entry.stream is not None else None


def remember(relu: Tensor, entry: Entry) -> None:
    """What a ReLU gave is in the entry."""
    assert relu.grad_fn is not None
    _notes(relu.grad_fn)[_KEY] = Result(weakref.ref(entry), relu.shape, relu.stride())


def arguments(relu: Tensor) -> list[Norm | Result]:
    """What a ReLU was the sum of, or nothing if that is not known, or is laid out in another way."""
    assert relu.grad_fn is not None
    node = relu.grad_fn.next_functions[0][0]
    parts = [node]
    if node is not None and node.name() == "AddBackward0" and getattr(node, "_saved_alpha", None) == 1:
        parts = [part for part, _ in node.next_functions]
    found = [_notes(part).get(_KEY) if part is not None else None for part in parts]
    known = [f for f in found if isinstance(f, (Norm, Result)) and f.shape == relu.shape and f.stride == relu.stride()]
    return known if len(known) == len(found) else []


def guide(parts: list[Norm | Result], mask: Tensor) -> codec.Guide | None:
    """How the ReLU's values follow from its arguments; None if one of these is not stored as a stream."""
    sources = [part.source() for part in parts]
    known = tuple(s for s in sources if s is not None and s.stream.depth < MAX_DEPTH)
    return codec.Guide(mask, 0, known) if known and len(known) == len(parts) else None


def is_zero_where_off(gradient: Tensor, norm: Norm) -> bool:
    """Whether no gradient comes back to the batch norm's output where the ReLU was off."""
    if norm.mask is None:
        return False
    flat = torch.empty_strided(norm.shape, norm.stride, dtype=gradient.dtype).copy_(gradient)
    some = codec.pack_mask(flat.as_strided((flat.numel(),), (1,)), positive=False)
    return not bool((some & ~norm.mask).any())
