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
from horovod_aps.tensorflow import order
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
_links: dict[int, _Link] = {}


@dataclass(frozen=True)
class _Link:
    """The transport of one process set, and the world it was made in."""

    transport: Transport
    ranks: tuple[int, ...]
    rank: int


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


def run(call: Call, ticket: np.ndarray, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Reduce arrays over all ranks; `ticket` is the sum of what they said in `order.ticket`."""
    arrays = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
    results = [_aligned_like(array) for array in arrays]
    with _lock:
        _reduce(call, ticket, [_entry(call, i, a, a.ctypes.data, r.ctypes.data) for i, (a, r)
                               in enumerate(zip(arrays, results))])
    return results


def run_eagerly(call: Call, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Reduce eager tensors over all ranks without copying them."""
    with tf.device("/CPU:0"):
        values = [tf.identity(value) for value in values]
        results = [tf.raw_ops.Empty(shape=tf.shape(value), dtype=value.dtype) for value in values]
    with _lock:
        words = order.ticket_words(call.process_set_id)
        ticket = allreduce(words, mpi_ops.Sum, call.process_set_id)
        _reduce(call, ticket, [_entry(call, i, _view(v), _view(v).ctypes.data, _view(r).ctypes.data) for i, (v, r)
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


def _reduce(call: Call, ticket: np.ndarray, layers: list[Layer]) -> None:
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
    n_present, n_new = ticket.tolist()
    if n_present != size:
        raise ValueError(f"APSCompressor: {size - n_present} of {size} ranks are in hvd.join(), which only a plain "
                         f'all-reduce can go on without; use APSCompressor(..., transport="allreduce")')
    exchange = _exchange(compressor, call, process_set, n_new)
    try:
        for layer in layers:
            exchange.submit(layer)
        exchange.flush()
    except BaseException:
        exchange.forget()
        raise


def _exchange(compressor: APSCompressor, call: Call, process_set: Any, n_new: int) -> Exchange:
    """The exchange of one call site, so that steps are counted as the user counts them."""
    link = _link(process_set, n_new)
    key = (call.process_set_id, len(link.ranks), link.rank, call.stem)
    exchange = compressor._exchanges.get(key)
    if exchange is not None and exchange.transport is not link.transport:
        compressor._retired[key] = compressor._exchanges.pop(key)
        exchange = None
    if exchange is None:
        exchange = compressor._keep_exchange(key, CpuKernels(), link.transport)
    return exchange


def _link(process_set: Any, n_new: int) -> _Link:
    """The link of a process set, made anew by all ranks if any of them has none.

    After an elastic reset a new worker has none, while the others may not have noticed anything: neither size nor rank
    need to change. `n_new` ranks said so in their tickets; they may have been written before an earlier exchange of the
    same step made the link, so all ranks ask again.
    """
    ps_id, ranks, rank = process_set.process_set_id, tuple(process_set.ranks), process_set.rank()
    link = _links.get(ps_id)
    if link is not None and (link.ranks != ranks or link.rank != rank):
        link = None
    if n_new and not _agree(int(link is not None), process_set):
        link = None
    if link is None:
        transport = make_transport(mpi_ops._basics, process_set, _agree, lambda: HorovodTransport(process_set))
        link = _links[ps_id] = _Link(transport, ranks, rank)
        order.has_link(ps_id)
    return link


def _agree(value: int, process_set: Any) -> int:
    """The smallest `value` of all ranks of the process set."""
    return int(allreduce(np.array([value], np.int32), mpi_ops.Min, process_set.process_set_id)[0])
