"""What runs in a step: the memory of TensorFlow's tensors goes through the exchange into that of fresh ones."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops

from horovod_aps.base import ExchangeKey
from horovod_aps.carrier import check_transports
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.errors import LostPeer
from horovod_aps.kernels import DTYPE_CODES, CpuKernels
from horovod_aps.tensorflow import devices, order
from horovod_aps.tensorflow.carrier import array_at, carry
from horovod_aps.tensorflow.collectives import allreduce
from horovod_aps.transports import sockets
from horovod_aps.transports.shared import SharedTransport
from horovod_aps.world import link as make_link
from horovod_aps.world import process_set_of

if TYPE_CHECKING:
    from horovod_aps.tensorflow.compressor import APSCompressor

UNNAMED = "noname"
ALIGNMENT = 64  # bytes; TensorFlow adopts an aligned array as a tensor and copies any other

# One exchange at a time wherever operations of Horovod's find each other by their order alone. Exchanges in graphs over
# MPI have names and communicators of their own, so those of different compressors may run at the same time.
_lock = threading.Lock()
_world_numbers: Counter[int] = Counter()  # by process set; links of an earlier world are not used any more


@dataclass(frozen=True)
class _Link:
    """The transport of a compressor in one process set, and the world it was made in."""

    shared: SharedTransport
    world_number: int
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
    labels: tuple[str, ...] = ()
    """What people call the tensors, if not by their names."""

    @property
    def packed(self) -> bool:
        """Whether it takes the exchange, not Horovod's own all-reduce."""
        return self.compressor._options.transport == "packed"

    def select(self, positions: Sequence[int]) -> Call:
        """The same call for some of its tensors."""
        return replace(
            self,
            names=tuple(self.names[i] for i in positions),
            labels=tuple(self.labels[i] for i in positions) if self.labels else (),
        )

    def gradient(self) -> Call:
        """The call that reduces the gradients of this one's results."""
        return replace(
            self,
            names=tuple(f"{name}_grad" for name in self.names),
            stem=f"{self.stem}_grad",
            labels=tuple(f"{label}_grad" for label in self.labels),
        )


def run(call: Call, ticket: np.ndarray, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Reduce arrays over all ranks; `ticket` is the sum of what they said in `order.ticket`."""
    arrays = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
    results = [_aligned_like(array) for array in arrays]
    layers = [
        _layer(call, i, array.shape, array.dtype.name, array.ctypes.data, result.ctypes.data)
        for i, (array, result) in enumerate(zip(arrays, results))
    ]
    with _turn(call, ticket):
        _reduce(call, ticket, layers)
    return results


def run_eagerly(call: Call, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Reduce eager tensors over all ranks without copying them."""
    with _lock:
        ticket = allreduce(order.ticket_words(call.process_set_id, call.packed), mpi_ops.Sum, call.process_set_id)
        return _reduce_tensors(call, ticket, values, devices.gpu_of(values))


def run_on_gpu(call: Call, gpu: str, ticket: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """As `run`, with the arguments of a `tf.py_function`."""
    words = ticket.numpy()
    with _turn(call, words):
        return _reduce_tensors(call, words, values, gpu)


def _turn(call: Call, ticket: np.ndarray) -> AbstractContextManager[Any]:
    """What an exchange in a graph holds while it runs."""
    return call.compressor._lock if call.packed and _all_speak_mpi(ticket) else _lock


def _all_speak_mpi(ticket: np.ndarray) -> bool:
    return bool(ticket[order.SPEAKS_MPI] == ticket[order.PRESENT])


def _reduce_tensors(call: Call, ticket: np.ndarray, values: Sequence[tf.Tensor], gpu: str | None) -> list[tf.Tensor]:
    """Reduce eager tensors on the GPU, or on the host if there is none or nothing to pack."""
    if gpu and (not call.packed or _process_set(call).size() == 1):
        gpu = None
    with tf.device(gpu or "/CPU:0"):
        values = [tf.identity(value) for value in values]
        results = [tf.raw_ops.Empty(shape=value.shape, dtype=value.dtype) for value in values]
    if gpu:
        sources, targets = devices.Addresses(values), devices.Addresses(results)
        context: AbstractContextManager[Any] = devices.at_work(sources.values)
        found = zip(sources.values, targets.values)
    else:
        context = nullcontext()
        found = zip([_address(value) for value in values], [_address(result) for result in results])
    layers = [
        _layer(call, i, tuple(value.shape), value.dtype.name, source, target)
        for i, (value, (source, target)) in enumerate(zip(values, found))
    ]
    with context:
        _reduce(call, ticket, layers, gpu)
    return results


def _address(tensor: tf.Tensor) -> int:
    """Where an eager CPU tensor is; NumPy's buffers do not know bfloat16."""
    return np.asarray(tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor).ctypes.data


def _aligned_like(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


def _layer(call: Call, position: int, shape: Any, dtype: str, source: int, target: int) -> Layer:
    return Layer(
        call.names[position],
        shape,
        DTYPE_CODES[dtype],
        source,
        target,
        call.factor,
        label=call.labels[position] if call.labels else "",
    )


def _process_set(call: Call) -> Any:
    return process_set_of(mpi_ops._basics, call.process_set_id)


def _reduce(call: Call, ticket: np.ndarray, layers: list[Layer], gpu: str | None = None) -> None:
    compressor = call.compressor
    process_set = _process_set(call)
    size = process_set.size()
    if call.op == mpi_ops.Average:
        for layer in layers:
            layer.factor /= size
    if size == 1:  # nothing to agree on and nothing to round
        for layer in layers:
            array_at(layer.target, layer)[:] = array_at(layer.source, layer) * layer.factor
        return
    check_transports(int(ticket[order.PACKED]), int(ticket[order.PRESENT]))
    if not call.packed:
        step_number = compressor._carried[call.stem] = compressor._carried.get(call.stem, -1) + 1
        carry(layers, compressor._options, step_number, process_set, compressor._carrier_statistics)
        return
    n_present = int(ticket[order.PRESENT])
    if n_present != size:
        raise ValueError(
            f"APSCompressor: {size - n_present} of {size} ranks are in hvd.join(), which only a plain "
            f'all-reduce can go on without; use APSCompressor(..., transport="allreduce")'
        )
    exchange = _exchange(call, process_set, ticket, gpu)
    try:
        for layer in layers:
            exchange.submit(layer)
        exchange.flush()
        compressor._look_for_idle_overrides(exchange)
    except LostPeer as error:
        exchange.forget()
        # In a graph only the text survives, and Horovod's elastic wrapper looks for the name of its own operation.
        raise HorovodInternalError(f"HorovodAllreduce: {error}") from None
    except BaseException:
        exchange.forget()
        raise


def _exchange(call: Call, process_set: Any, ticket: np.ndarray, gpu: str | None) -> Exchange:
    """The exchange of one call site, so that steps are counted as the user counts them."""
    compressor = call.compressor
    link = _link(call, process_set, ticket)
    key = ExchangeKey(call.process_set_id, f"{call.stem} {gpu}", link.ranks)
    exchange = compressor._exchanges.get(key)
    if exchange is None or compressor._link_of.get(key) is not link:
        # After an elastic reset the same call site has another link, and perhaps other ranks.
        for old in [old for old in compressor._exchanges if (old.process_set_id, old.place) == (key[0], key.place)]:
            compressor._retire_exchange(old)
        exchange = compressor._keep_exchange(
            key,
            Exchange(devices.kernels() if gpu else CpuKernels(), link.shared.channel(key.place), compressor._options),
        )
        compressor._link_of[key] = link
    return exchange


def _link(call: Call, process_set: Any, ticket: np.ndarray) -> _Link:
    """The link of a compressor in a process set, made anew by all ranks if any of them has none.

    After an elastic reset a new worker has none, while the others may not have noticed anything: neither size nor rank
    need to change. It says so in its ticket, which may have been written before an earlier exchange of the same step
    made the link, so all ranks ask again. Jobs that speak MPI are never elastic: there all ranks have a link, or none.
    """
    ps_id, ranks, rank = process_set.process_set_id, tuple(process_set.ranks), process_set.rank()
    links, speak_mpi = call.compressor._links, _all_speak_mpi(ticket)
    link = link_before = links.get(ps_id)
    if link is not None and (link.ranks, link.rank, link.world_number) != (ranks, rank, _world_numbers[ps_id]):
        link = None
    if ticket[order.NEW] and not speak_mpi and not _agree(int(link is not None), process_set):
        _world_numbers[ps_id] += 1  # a new worker has no link of any compressor
        link = None
    if link is None:
        if link_before is not None:
            link_before.shared.transport.close()
        addresses = np.zeros(0, np.int32)
        if not speak_mpi:
            addresses = allreduce(sockets.listener().words(rank, len(ranks)), mpi_ops.Sum, ps_id)
        name = f"{ps_id} {ranks} {call.stem}"  # compressors need not be made in the same order here
        n_able = len(ranks) if speak_mpi else 0
        link = links[ps_id] = _Link(
            SharedTransport(
                make_link(
                    name, ranks, ranks.index(mpi_ops.rank()), n_able, addresses, call.compressor._options.why_flat
                )
            ),
            _world_numbers[ps_id],
            ranks,
            rank,
        )
        order.has_link(ps_id)
    return link


def _agree(value: int, process_set: Any) -> int:
    """The smallest `value` of all ranks of the process set."""
    return int(allreduce(np.array([value], np.int32), mpi_ops.Min, process_set.process_set_id)[0])
