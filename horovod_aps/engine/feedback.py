"""Error feedback: what rounding has lost in a step is added to the next gradient.

The residual of a layer is a float32 array. Before a bucket is encoded its gradients are added to their residuals, which
are then what is sent; afterwards the residuals keep what the sent values do not hold.

In the flat exchange a rank loses something of its own gradient, and keeps whole residuals. Where ranks of a host add up
their gradients first, each keeps residuals of the parts of a layer that it encodes: what the host has lost there.

A layer has its residual in one way only. When its layout changes (other hosts in an elastic job, a checkpoint, layers
cut in another way) each rank goes on with what it has itself of what it is to keep now, and drops the rest. From parts
to whole residuals nothing is lost, for the ranks of a host have all of its parts. From whole ones to parts a rank keeps
its own part of its own loss; what it has lost elsewhere, and others of its host in that part, is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from horovod_aps.engine.layer import Layer

_PART = re.compile(r"(.*)\[(?:(\d+):(\d+)|:)\]", re.DOTALL)

Span = tuple[int, int]
"""First element and the one after the last."""

Lender = Callable[[set[str]], dict[str, np.ndarray]]
"""Gives away the residuals of layers, by their names, whole or in pieces."""


class Residuals:
    """The residuals of all layers, by name."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        # No layer is in both. One without parts is known to have none: nobody needs to be asked for them.
        self._wholes: dict[str, Any] = {}
        self._parts: dict[str, dict[Span, Any]] = {}
        self.lender: Lender | None = None
        """Where residuals may be that a layer has from an earlier run."""

    @property
    def arrays(self) -> Mapping[str, Any]:
        """All of them, to look at: whole ones under their layers' names, parts as "name[first:last]"."""
        wholes = {_key(name): kept for name, kept in self._wholes.items()}
        parts = {_key(name, span): kept for name, of in self._parts.items() for span, kept in of.items()}
        return MappingProxyType(wholes | parts)

    def fold(self, layers: list[Layer], table: np.ndarray, layer_of_segment: np.ndarray) -> list[Any]:
        """Add gradients to residuals and aim `table` at them; returns the arrays, which must live as long as it."""
        arrays = []
        self._borrow(layers)
        for layer in layers:
            n_elements = layer.n_elements
            kept = self._wholes.get(layer.name)
            if kept is None or kept.size != n_elements:
                kept = self._recut(layer, [(0, n_elements)])[0, n_elements]
                self._wholes[layer.name] = kept
            arrays.append(kept)
        bases = self._addresses(arrays)
        addresses = bases[layer_of_segment] + (4 * table["first"]).astype(np.uint64)
        fresh = np.array([not layer.folded for layer in layers])[layer_of_segment]
        if fresh.all():
            self._kernels.add(table, addresses)
        elif fresh.any():
            self._kernels.add(table[fresh], addresses[fresh])
        for layer in layers:
            layer.folded = True
        table["data"], table["dtype"] = addresses, 0
        return arrays

    def _addresses(self, arrays: list[Any]) -> np.ndarray:
        return np.array([self._kernels.address(kept) for kept in arrays], np.uint64)

    def fold_parts(self, layers: list[Layer], table: np.ndarray, layer_of_segment: np.ndarray) -> list[Any]:
        """As `fold`, for segments of which this rank keeps the residuals, each by itself.

        `layers` are all of the bucket: what is left of one that this rank encodes nothing of would be stale later.
        """
        owners = layer_of_segment.tolist()
        spans = list(zip(table["first"].tolist(), (table["first"] + table["n"]).tolist()))
        wanted: list[list[Span]] = [[] for _ in layers]
        for i, span in zip(owners, spans):
            wanted[i].append(span)
        self._borrow(layers)
        for layer, mine in zip(layers, wanted):
            held = self._parts.get(layer.name)
            if held is None or [*held] != mine:
                self._parts[layer.name] = self._recut(layer, mine)
        arrays = [self._parts[layers[i].name][span] for i, span in zip(owners, spans)]
        addresses = self._addresses(arrays)
        self._kernels.add(table, addresses)
        for i in set(owners):
            layers[i].folded = True
        table["data"] = addresses
        return arrays

    def _recut(self, layer: Layer, spans: list[Span]) -> dict[Span, Any]:
        """Make residuals of these spans with what this rank has of them, else zeros; all that it had is dropped."""
        old, whole = self._parts.pop(layer.name, {}), self._wholes.pop(layer.name, None)
        n_elements = layer.n_elements
        # A whole one that a gradient was added to, and not sent, holds what comes once more now.
        if whole is not None and whole.size == n_elements and not layer.folded:
            old = {(0, n_elements): whole}
        layer.folded = False
        if not old:
            return {(first, last): self._kernels.zeros(last - first) for first, last in spans}
        made = {}
        for first, last in spans:
            values = np.zeros(last - first, np.float32)
            for (start, stop), kept in old.items():
                low, high = max(first, start), min(last, stop)
                if low < high and stop <= n_elements:
                    values[low - first : high - first] = self._kernels.to_host(kept)[low - start : high - start]
            made[first, last] = self._kernels.from_host(values)
        return made

    def _borrow(self, layers: list[Layer]) -> None:
        """Have what others have kept of layers that nothing is known of."""
        if self.lender is not None:
            names = {one.name for one in layers if one.name not in self._wholes and one.name not in self._parts}
            if names:
                self._put(self.lender(names))

    def drop(self, layer: Layer) -> None:
        """Forget a residual that holds a gradient which was never sent."""
        if layer.folded:
            self._wholes.pop(layer.name, None)
            self._parts[layer.name] = {}

    def state(self) -> dict[str, np.ndarray]:
        """Copies on the host."""
        return {name: np.array(self._kernels.to_host(kept)) for name, kept in self.arrays.items()}

    def load(self, state: dict[str, np.ndarray], lender: Lender | None = None) -> None:
        """Replace all residuals; buckets on their way keep the arrays that they work with."""
        self.lender = lender
        self._wholes, self._parts = {}, {}
        self._put(state)

    def _put(self, residuals: Mapping[str, np.ndarray]) -> None:
        """Have these, by the names of `arrays`.

        If there are several of the same elements, as states of older versions have them, one is stale, and nothing says
        which: all of that layer are dropped. To lack a residual costs what one step has rounded off; a stale one is a
        wrong gradient.
        """
        wholes: dict[str, np.ndarray] = {}
        parts: dict[str, dict[Span, np.ndarray]] = {}
        for key, values in residuals.items():
            name, span = _parse(key)
            if span is None:
                wholes[name] = values
            elif span[1] - span[0] == values.size:
                parts.setdefault(name, {})[span] = values
        for name in wholes | parts:
            of = parts.get(name, {})
            if (name in wholes and of) or any(last > first for (_, last), (first, _) in pairwise(sorted(of))):
                self._parts[name] = {}
            elif name in wholes:
                self._wholes[name] = self._kernels.from_host(wholes[name])
            else:
                self._parts[name] = {span: self._kernels.from_host(values) for span, values in of.items()}


def layer_of(residual: str) -> str:
    """The layer that a residual, whole or a part, is of."""
    return _parse(residual)[0]


def _key(name: str, span: Span | None = None) -> str:
    """What a residual is called in a state; a layer whose name looks like a part of another is all of itself."""
    if span is not None:
        return f"{name}[{span[0]}:{span[1]}]"
    return f"{name}[:]" if _PART.fullmatch(name) else name


def _parse(key: str) -> tuple[str, Span | None]:
    """The layer, and the span of a part."""
    found = _PART.fullmatch(key)
    if found is None:
        return key, None
    return found[1], None if found[2] is None else (int(found[2]), int(found[3]))
