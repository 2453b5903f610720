"""transport="allreduce" for TensorFlow: exponents by a MAX all-reduce, rounded values by one in float16."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (makes NumPy know bfloat16)
import numpy as np
from horovod.tensorflow import mpi_ops

from horovod_aps.engine.layer import Layer
from horovod_aps.engine.seeds import stochastic_seed
from horovod_aps.frontends.carrier import Carrier, back_scale, check_option_words
from horovod_aps.kernels import DTYPE_NAMES
from horovod_aps.options import Options
from horovod_aps.tensorflow.collectives import allreduce


def array_at(address: int, layer: Layer) -> np.ndarray:
    """The flat array at a layer's source or target."""
    dtype = np.dtype(DTYPE_NAMES[layer.dtype_code])
    n_bytes = layer.n_elements * dtype.itemsize
    if n_bytes == 0:
        return np.empty(0, dtype)
    return np.frombuffer(memoryview((ctypes.c_uint8 * n_bytes).from_address(address)), dtype)


class TensorFlowCarrier(Carrier):
    """Two plain all-reduces per call, which ranks in hvd.join() take part in with zeros."""

    def __init__(self, process_set: Any, options: Options) -> None:
        super().__init__(options, process_set.size(), mpi_ops.gloo_enabled())
        self._process_set = process_set

    def wait(self, layers: Sequence[Layer] | None = None) -> None:
        """All-reduce everything submitted."""
        held = [layer for group in self._waiting for layer in group]
        self._waiting = []
        step_number, self.step_number = self.step_number, self.step_number + 1
        self._carry(held, step_number)

    def _carry(self, layers: Sequence[Layer], step_number: int) -> None:
        terms, process_set = self.terms, self._process_set
        seed = stochastic_seed(terms.options, step_number, process_set.rank())
        words = self.words(layers, [layer.source for layer in layers])
        words = allreduce(np.array(words, np.int32), mpi_ops.Max, process_set.process_set_id).tolist()
        check_option_words(words[-2:], terms.options)
        counts = [layer.n_elements for layer in layers]
        values = np.empty(sum(counts), np.dtype(DTYPE_NAMES[terms.place.dtype]))
        parts = [slice(end - n, end) for n, end in zip(counts, np.cumsum(counts))]
        for layer, part, word in zip(layers, parts, words):
            self.fill(terms, layer, layer.source, values[part].ctypes.data, word, seed, step_number)
        totals = allreduce(values, mpi_ops.Sum, process_set.process_set_id)
        for layer, part, word in zip(layers, parts, words):
            power, finite = back_scale(word, terms.place)
            # float64 holds every sum times every power of two that occurs, so this rounds once
            scaled = np.ldexp(totals[part].astype(np.float64), power) * layer.factor
            array_at(layer.target, layer)[:] = scaled if finite else np.nan
            layer.done = True
