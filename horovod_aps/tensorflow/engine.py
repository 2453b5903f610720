"""What runs in a step: NumPy views of TensorFlow's tensors go through the exchange into fresh, aligned arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_aps.exchange import Exchange, Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.tensorflow.carrier import array_at, carry
from horovod_aps.tensorflow.horovod_transport import HorovodTransport, allreduce
from horovod_aps.transport import Transport
from horovod_aps.world import make_transport, process_set_of

if TYPE_CHECKING:
    from horovod_aps.tensorflow.compressor import APSCompressor

DTYPE_CODES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
UNNAMED = "noname"
ALIGNMENT = 64  # bytes; TensorFlow adopts an aligned array as a tensor and copies any other

# One exchange at a time: the order in which they run is the same on all ranks, and they share the transports.
_lock = threading.Lock()
_transports: dict[tuple[int, int, int], Transport] = {}


@dataclass(frozen=True)
class Call:
    """One all-reduce op of Horovod as it was called: everything but the tensors."""

    compressor: APSCompressor
    names: tuple[str, ...]
    stem: str
    op: int
    factor: float
    process_set_id: int

    def select(self, positions: Sequence[int]) -> Call:
        """The same call for some of its tensors."""
        return replace(self, names=tuple(self.names[i] for i in positions))

    def gradient(self) -> Call:
        """The call that reduces the gradients of this one's results."""
        return replace(self, names=tuple(f"{name}_grad" for name in self.names), stem=f"{self.stem}_grad")


def run(call: Call, n_present: int, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Reduce arrays over all ranks; `n_present` of them take part, the others are in hvd.join()."""
    arrays = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
    results = [_aligned_like(array) for array in arrays]
    with _lock:
        _reduce(call, n_present, [_entry(call, i, a, a.ctypes.data, r.ctypes.data) for i, (a, r)
                                  in enumerate(zip(arrays, results))])
    return results


def run_eagerly(call: Call, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Reduce eager tensors over all ranks without copying them."""
    with tf.device("/CPU:0"):
        values = [tf.identity(value) for value in values]
        results = [tf.raw_ops.Empty(shape=tf.shape(value), dtype=value.dtype) for value in values]
    with _lock:
        n_present = int(allreduce(np.ones(1, np.int32), mpi_ops.Sum, call.process_set_id)[0])
        _reduce(call, n_present, [_entry(call, i, _view(v), _view(v).ctypes.data, _view(r).ctypes.data) for i, (v, r)
                                  in enumerate(zip(values, results))])
    return results


def _view(tensor: tf.Tensor) -> np.ndarray:
    """The memory of an eager CPU tensor; NumPy's buffers do not know bfloat16."""
    if tensor.dtype == tf.bfloat16:
        return np.asarray(tf.bitcast(tensor, tf.uint16)).view(ml_dtypes.bfloat16)
    return np.asarray(tensor)


def _aligned_like(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start:start + array.nbytes].view(array.dtype).reshape(array.shape)


def _entry(call: Call, position: int, array: np.ndarray, source: int, target: int) -> Layer:
    return Layer(call.names[position], array.shape, DTYPE_CODES[array.dtype.name], source, target, call.factor)


def _reduce(call: Call, n_present: int, layers: list[Layer]) -> None:
    compressor = call.compressor
    process_set = process_set_of(mpi_ops._basics, call.process_set_id)
    size = process_set.size()
    if call.op == mpi_ops.Average:
        for layer in layers:
            layer.factor /= size
    if size == 1:  # nothing to agree on and nothing to round
        for layer in layers:
            array_at(layer.target, layer)[:] = array_at(layer.source, layer) * layer.factor
        return
    if compressor._options.transport == "allreduce":
        step_number = compressor._carried[call.stem] = compressor._carried.get(call.stem, -1) + 1
        carry(layers, compressor._options, step_number, process_set)
        return
    if n_present != size:
        raise ValueError(f"APSCompressor: {size - n_present} of {size} ranks are in hvd.join(), which only a plain "
                         f'all-reduce can go on without; use APSCompressor(..., transport="allreduce")')
    exchange = _exchange(compressor, call, process_set)
    try:
        for layer in layers:
            exchange.submit(layer)
        exchange.flush()
    except BaseException:
        exchange.forget()
        raise


def _exchange(compressor: APSCompressor, call: Call, process_set: Any) -> Exchange:
    """The exchange of one call site, so that steps are counted as the user counts them."""
    world = (call.process_set_id, mpi_ops.size(), mpi_ops.rank())
    key = (*world, call.stem)
    exchange = compressor._exchanges.get(key)
    if exchange is None:
        if world not in _transports:
            for other in [other for other in _transports if other[1:] != world[1:]]:
                del _transports[other]  # of a world before an elastic reset; it may come back with other workers
            _transports[world] = make_transport(mpi_ops._basics, process_set, _agree,
                                                lambda: HorovodTransport(process_set))
        exchange = compressor._keep_exchange(key, CpuKernels(), _transports[world])
    return exchange


def _agree(value: int, process_set: Any) -> int:
    """The smallest `value` of all ranks of the process set."""
    return int(allreduce(np.array([value], np.int32), mpi_ops.Min, process_set.process_set_id)[0])
