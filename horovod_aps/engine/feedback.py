"""Error feedback: what rounding has lost in a step is added to the next gradient.

The residual of a layer is a float32 array. Before a bucket is encoded its gradients are added to their residuals, which
are then what is sent; afterwards the residuals keep what the sent values do not hold.

Where ranks of a host add up their gradients first, each keeps residuals of the part that it encodes, as
"name[first:last]". If layers are cut in another way later, it goes on with what it has of its new part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from horovod_aps.engine.layer import Layer

_PART = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


Lender = Callable[[set[str]], dict[str, np.ndarray]]
"""Gives away the residuals of layers, by their names, whole or in pieces."""


class Residuals:
    """The residuals of all layers, by name."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.arrays: dict[str, Any] = {}
        self.lender: Lender | None = None
        """Where residuals may be that a layer has from an earlier run."""

    def fold(self, layers: list[Layer], table: np.ndarray, layer_of_segment: np.ndarray) -> list[Any]:
        """Add gradients to residuals and aim `table` at them; returns the arrays, which must live as long as it."""
        arrays = []
        self._borrow({layer.name for layer in layers if layer.name not in self.arrays})
        for layer in layers:
            n_elements = math.prod(layer.shape)
            kept = self.arrays.get(layer.name)
            if kept is None or kept.size != n_elements:
                kept = self.arrays[layer.name] = self._kernels.zeros(n_elements)
                layer.folded = False
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
        """As `fold`, for segments of which this rank keeps the residuals, each by itself."""
        names = [layers[i].name for i in layer_of_segment.tolist()]
        spans = list(zip(table["first"].tolist(), (table["first"] + table["n"]).tolist()))
        keys = [f"{name}[{first}:{last}]" for name, (first, last) in zip(names, spans)]
        if not all(key in self.arrays for key in keys):
            self._cut_anew(set(names), list(zip(keys, names, spans)))
        arrays = [self.arrays[key] for key in keys]
        addresses = self._addresses(arrays)
        self._kernels.add(table, addresses)
        for i in set(layer_of_segment.tolist()):
            layers[i].folded = True
        table["data"] = addresses
        return arrays

    def _cut_anew(self, names: set[str], parts: list[tuple[str, str, tuple[int, int]]]) -> None:
        """Make the residuals of parts, with what there is of them in other parts; those are dropped."""
        self._borrow(names - self.arrays.keys() - {layer_of(key) for key in self.arrays})
        old = [
            (found[1], int(found[2]), int(found[3]), self.arrays.pop(key))
            for key in list(self.arrays)
            if (found := _PART.fullmatch(key)) and found[1] in names
        ]
        for key, name, (first, last) in parts:
            values = np.zeros(last - first, np.float32)
            for other, start, stop, kept in old:
                low, high = max(first, start), min(last, stop)
                if other == name and low < high:
                    values[low - first : high - first] = self._kernels.to_host(kept)[low - start : high - start]
            self.arrays[key] = self._kernels.from_host(values)

    def _borrow(self, names: set[str]) -> None:
        """Have what others have kept of these layers."""
        if names and self.lender is not None:
            for name, values in self.lender(names).items():
                self.arrays[name] = self._kernels.from_host(values)

    def drop(self, layer: Layer) -> None:
        """Forget a residual that holds a gradient which was never sent."""
        if layer.folded:
            for key in [key for key in self.arrays if layer.name in (key, layer_of(key))]:
                del self.arrays[key]

    def state(self) -> dict[str, np.ndarray]:
        """Copies on the host."""
        return {name: np.array(self._kernels.to_host(kept)) for name, kept in self.arrays.items()}

    def load(self, state: dict[str, np.ndarray], lender: Lender | None = None) -> None:
        """Replace all residuals; buckets on their way keep the arrays that they work with."""
        self.lender = lender
        self.arrays = {name: self._kernels.from_host(values) for name, values in state.items()}


def layer_of(residual: str) -> str:
    """The layer that a residual, whole or a part, is of."""
    found = _PART.fullmatch(residual)
    return found[1] if found else residual
