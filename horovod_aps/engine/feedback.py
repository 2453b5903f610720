"""Error feedback: what rounding has lost in a step is added to the next gradient.

The residual of a layer is a float32 array. Before a bucket is encoded its gradients are added to their residuals, which
are then what is sent; afterwards the residuals keep what the sent values do not hold.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from horovod_aps.engine.layer import Layer


class Residuals:
    """The residuals of all layers, by name."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.arrays: dict[str, Any] = {}

    def fold(self, layers: list[Layer], table: np.ndarray, layer_of_segment: np.ndarray) -> list[Any]:
        """Add gradients to residuals and aim `table` at them; returns the arrays, which must live as long as it."""
        arrays = []
        for layer in layers:
            n_elements = math.prod(layer.shape)
            kept = self.arrays.get(layer.name)
            if kept is None or kept.size != n_elements:
                kept = self.arrays[layer.name] = self._kernels.zeros(n_elements)
                layer.folded = False
            arrays.append(kept)
        bases = np.array([self._kernels.address(kept) for kept in arrays], np.uint64)
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

    def drop(self, layer: Layer) -> None:
        """Forget a residual that holds a gradient which was never sent."""
        if layer.folded:
            self.arrays.pop(layer.name, None)

    def state(self) -> dict[str, np.ndarray]:
        """Copies on the host."""
        return {name: np.array(self._kernels.to_host(kept)) for name, kept in self.arrays.items()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Replace all residuals; buckets on their way keep the arrays that they work with."""
        self.arrays = {name: self._kernels.from_host(values) for name, values in state.items()}
