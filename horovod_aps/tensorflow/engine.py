"""What runs in a step: the memory of TensorFlow's tensors goes through the exchange into that of fresh ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops

from horovod_aps import config
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.errors import LostPeer, for_users
from horovod_aps.frontends.checks import check_present, refuse_alone
from horovod_aps.frontends.reducer import Reducer, ReducerKey
from horovod_aps.frontends.world import process_set_of
from horovod_aps.kernels import DTYPE_CODES, CpuKernels
from horovod_aps.tensorflow import devices, links, operations
from horovod_aps.tensorflow.carrier import TensorFlowCarrier, array_at
from horovod_aps.tensorflow.collectives import allreduce
from horovod_aps.transports.base import Transport
from horovod_aps.transports.shared import Channel, SharedTransport
from horovod_aps.transports.turns import TurnTransport

if TYPE_CHECKING:
    from horovod_aps.tensorflow.compressor import PackedCompressor

UNNAMED = "noname"
ALIGNMENT = 64  # bytes; TensorFlow adopts an aligned array as a tensor and copies any other

# One exchange at a time wherever operations of Horovod's find each other by their order alone. Exchanges in graphs over
# MPI have names and communicators of their own, so those of different compressors may run at the same time.
_lock = threading.Lock()


@dataclass(frozen=True)
class Call:
    """One all-reduce op of Horovod as it was called: everything but the tensors."""

    compressor: PackedCompressor
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

    @property
    def stock_name(self) -> str:
        """What Horovod itself would call the tensor, or the first of the group.

        The ticket has that name: if another rank reduces its gradients without us, Horovod finds a float under it there
        and integers here, and refuses both, where they would wait for ever.
        """
        return self.stem if self.names == (self.stem,) else f"{self.stem}_1of{len(self.names)}"

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
    """Reduce arrays over all ranks; `ticket` is the sum of what they said in `links.ticket`."""
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
        ticket = allreduce(links.ticket_words(call.process_set_id, call.packed), mpi_ops.Sum, call.process_set_id)
        return _reduce_tensors(call, ticket, values, devices.gpu_of(values))


def run_on_gpu(call: Call, gpu: str, ticket: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """As `run`, with the arguments of a `tf.py_function`."""
    words = ticket.numpy()
    with _turn(call, words):
        return _reduce_tensors(call, words, values, gpu)


def _turn(call: Call, ticket: np.ndarray) -> AbstractContextManager[Any]:
    """What an exchange in a graph holds while it runs."""
    by_operations = links.all_pack_on_gpus(ticket) and links.all_want_operations(ticket)
    return call.compressor._lock if call.packed and links.all_speak_mpi(ticket) and not by_operations else _lock


def _reduce_tensors(call: Call, ticket: np.ndarray, values: Sequence[tf.Tensor], gpu: str | None) -> list[tf.Tensor]:
    """Reduce eager tensors on the GPU, or on the host if there is none or nothing to pack."""
    if gpu and (not call.packed or _process_set(call).size() == 1 or not links.all_pack_on_gpus(ticket)):
        gpu = None
    with tf.device(gpu or "/CPU:0"):
        values = [tf.identity(value) for value in values]
        results = [tf.raw_ops.Empty(shape=value.shape, dtype=value.dtype) for value in values]
    if gpu:
        sources, targets = devices.Addresses(values), devices.Addresses(results)
        context: AbstractContextManager[Any] = devices.at_work(sources.values, gpu)
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
        refuse_alone(compressor._options)  # others have left since the graph was made
        for layer in layers:
            array_at(layer.target, layer)[:] = array_at(layer.source, layer) * layer.factor
        return
    check_present(int(ticket[links.PRESENT]), int(ticket[links.PACKED]), size)
    reducer = _reducer(call, process_set, ticket, gpu)
    try:
        reducer.submit(*layers)
        reducer.wait()
        if gpu and isinstance(reducer, Exchange):
            reducer.kernels.drain()  # TensorFlow's streams are not known here
        compressor._look_for_idle_overrides(reducer)
    except LostPeer as error:
        reducer.forget()
        if config.is_elastic():
            compressor._links.drop(call.process_set_id)
        raise for_users(error, compressor._options.who, _lost) from None
    except BaseException:
        reducer.forget()
        raise


def _lost(text: str) -> HorovodInternalError:
    """In a graph only the text survives, and Horovod's elastic wrapper looks for the name of its own operation."""
    return HorovodInternalError(f"HorovodAllreduce: {text}")


def _reducer(call: Call, process_set: Any, ticket: np.ndarray, gpu: str | None) -> Reducer:
    """What reduces the tensors of one call site, so that steps are counted as the user counts them."""
    compressor = call.compressor
    key = ReducerKey(call.process_set_id, f"{call.stem} {gpu}", tuple(process_set.ranks))
    found = compressor._reducers.get(key)
    if not call.packed:
        if found is None:
            _retire_place(compressor, key)
            found = compressor._keep(key, TensorFlowCarrier(process_set, compressor._options))
        return found
    shared = compressor._links.get(process_set, ticket, call.stem, by_messages=operations.carry(gpu)).shared
    if isinstance(found, Exchange) and _shared_of(found) is shared:
        return found
    _retire_place(compressor, key)
    kernels = devices.kernels() if gpu else CpuKernels()
    network: Transport = shared.channel(_shared_place(compressor, key, call.stem) if gpu else key.place)
    if operations.carry(gpu) and links.all_want_operations(ticket):
        those = operations.HorovodOperations(kernels, gpu, call.process_set_id)
        network = TurnTransport(network, those)
    exchange = Exchange(kernels, network, compressor._options)
    exchange.on_break = shared.fail
    return compressor._keep(key, exchange)


def _shared_of(exchange: Exchange) -> SharedTransport | None:
    """The link that an exchange goes over."""
    network = exchange.network
    channel = network.below if isinstance(network, TurnTransport) else network
    return channel.shared if isinstance(channel, Channel) else None


def _shared_place(compressor: PackedCompressor, key: ReducerKey, stem: str) -> str:
    """What all ranks call a call site's GPU: they may have different ones, GPU:0 and GPU:1, and several each."""
    places = [one.place for one in compressor._reducers if one.process_set_id == key.process_set_id]
    n_others = sum(place.startswith(f"{stem} /") and place != key.place for place in places)
    return f"{stem} gpu {n_others}"


def _retire_place(compressor: PackedCompressor, key: ReducerKey) -> None:
    """After an elastic reset the same call site has another link, and perhaps other ranks."""
    for old in list(compressor._reducers):
        if (old.process_set_id, old.place) == (key.process_set_id, key.place):
            compressor._retire(old)
