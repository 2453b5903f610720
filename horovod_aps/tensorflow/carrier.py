"""transport="allreduce" for TensorFlow: exponents by a MAX all-reduce, rounded values by one in float16."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (makes NumPy know bfloat16)
import numpy as np
from horovod.tensorflow import mpi_ops

from horovod_aps import carrier
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.seeds import stochastic_seed
from horovod_aps.engine.statistics import Statistics
from horovod_aps.kernels import DTYPE_NAMES, ITEM_SIZES, Bytes, CpuKernels, Table
from horovod_aps.options import Options
from horovod_aps.tensorflow.collectives import allreduce


def array_at(address: int, layer: Layer) -> np.ndarray:
    """The flat array at a layer's source or target."""
    dtype = np.dtype(DTYPE_NAMES[layer.dtype])
    n_bytes = int(np.prod(layer.shape, dtype=np.int64)) * dtype.itemsize
    if n_bytes == 0:
        return np.empty(0, dtype)
    return np.frombuffer(memoryview((ctypes.c_uint8 * n_bytes).from_address(address)), dtype)


def carry(
    layers: Sequence[Layer], options: Options, step_number: int, process_set: Any, statistics: Statistics
) -> None:
    """All-reduce layers in two plain all-reduces, which ranks in hvd.join() take part in with zeros."""

    def account(name: str) -> Callable[[Table, Bytes, int], None]:
        return lambda segment, message, exponent: statistics.add_carried(
            name, kernels, segment, message, exponent, ITEM_SIZES[place.dtype], options, process_set.size(), step_number
        )

    kernels = CpuKernels()
    place = carrier.carrier_place(options, process_set.size(), mpi_ops.gloo_enabled())
    seed = stochastic_seed(options, step_number, process_set.rank())
    counts = [int(np.prod(layer.shape, dtype=np.int64)) for layer in layers]
    words = [carrier.exponent_word(kernels, layer.source, n, layer.dtype, options) for layer, n in zip(layers, counts)]
    words += carrier.option_words(options, [layer.factor for layer in layers])
    words = allreduce(np.array(words, np.int32), mpi_ops.Max, process_set.process_set_id).tolist()
    carrier.check_option_words(words[-2:], options)
    values = np.empty(sum(counts), np.dtype(DTYPE_NAMES[place.dtype]))
    ends = np.cumsum(counts)
    for layer, n, end, word in zip(layers, counts, ends, words[:-2]):
        carrier.fill_carrier(
            kernels,
            layer.source,
            n,
            layer.dtype,
            values[end - n : end].ctypes.data,
            word,
            place,
            options,
            seed,
            account(layer.shown),
        )
    totals = allreduce(values, mpi_ops.Sum, process_set.process_set_id)
    for layer, n, end, word in zip(layers, counts, ends, words[:-2]):
        power, finite = carrier.back_scale(word, place)
        # float64 holds every sum times every power of two that occurs, so this rounds once
        scaled = np.ldexp(totals[end - n : end].astype(np.float64), power) * layer.factor
        array_at(layer.target, layer)[:] = scaled if finite else np.nan
