"""Horovod's own all-to-all and all-gather of bytes from TensorFlow; with NCCL, from the memory of one GPU to another's.

TensorFlow cannot poll an operation: whoever calls one waits until all ranks have called it. Named ones live in graphs,
which need threads of a pool that may all be waiting for us; eager ones run in the thread that calls them, but those of
a kind have the same name. So they run eagerly, in a thread of their own, one after the other, in the order of rank 0
(`transports.turns`). Messages are copied, on the device, to and from tensors of TensorFlow's.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.eager.context import eager_mode
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

from horovod_aps import config
from horovod_aps.errors import LostPeer
from horovod_aps.kernels.memory import is_over
from horovod_aps.tensorflow import devices

OPS = ("HorovodAlltoall", "HorovodAllgather")
MAX_KEPT = 32  # tensors to send from, each of another size


def may_carry() -> bool:
    """Whether messages of this process's GPUs, where it has any, should travel so: if Horovod does it by NCCL.

    Not if Horovod says that an operation is over before it is (HOROVOD_ENABLE_ASYNC_COMPLETION).
    """
    return config.allows_operations() and has_nccl()


def carry(gpu: str | None) -> bool:
    """Whether these operations carry messages of a GPU, or of the host if None."""
    return gpu is not None


def has_nccl() -> bool:
    """Whether Horovod was built for NCCL, with both operations on GPUs."""
    return bool(mpi_ops._basics.nccl_built()) and all("GPU" in device_types(op) for op in OPS)


def device_types(op: str) -> set[str]:
    """Where TensorFlow can run an operation; elsewhere it would quietly copy to the CPU and back."""
    return {kernel.device_type for kernel in get_registered_kernels_for_op(op).kernel}


class _Thread:
    """Where operations run, one after the other."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, what: Callable[[], None]) -> None:
        self._waiting.put(what)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="horovod_aps operations", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            self._waiting.get()()


_thread = _Thread()


class _Operation:
    """One operation of Horovod's, waiting for the thread, under way, or over."""

    def __init__(self, owner: HorovodOperations, begin: Callable[..., tf.Tensor], parts: Sequence[Any]) -> None:
        self._owner, self._begin, self._parts = owner, begin, parts
        self._ready = owner.mark()
        self._received: tf.Tensor | None = None
        self._error: Exception | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """In the thread: blocks until all ranks have come to it."""
        try:
            with eager_mode(), tf.device(self._owner.device):
                self._received = self._begin(self._owner.pack(self._parts, self._ready))
        except Exception as error:
            self._error = error
        finally:
            self._parts = ()
            self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def put(self, places: Sequence[tuple[int, Any]]) -> None:
        if self._error is not None:
            raise LostPeer(f"an operation of Horovod's has failed: {self._error}") from None
        self._owner.unpack(self._received, places)


class HorovodOperations:
    """Of the ranks of a process set, on messages that kernels on `gpu` have made; None: on messages of the host."""

    def __init__(self, kernels: Any, gpu: str | None, process_set_id: int) -> None:
        self._kernels, self._gpu, self._process_set_id = kernels, gpu, process_set_id
        self.device = gpu or "/CPU:0"
        self._kept: OrderedDict[int, tuple[tf.Tensor, Any]] = OrderedDict()  # by size; with addresses
        self._leaving: deque[tuple[Any, Any]] = deque()  # what was received, until copies from it are over

    @property
    def way(self) -> str:
        return "from device memory by Horovod's NCCL" if self._gpu else "by Horovod's operations"

    def takes(self, array: Any) -> bool:
        """Whether a message is on the device."""
        return self._gpu is None or not isinstance(array, np.ndarray)

    def close(self) -> None:
        """Nobody will use it again."""

    def alltoall_sized(self, parts: Sequence[Any], sizes: Sequence[int]) -> _Operation:
        """See `SizedOperations`; Horovod finds out what will come by itself."""
        splits = np.array([len(part) for part in parts], np.int32)

        def begin(tensor: tf.Tensor) -> tf.Tensor:
            with tf.device("/CPU:0"):
                lengths = tf.constant(splits)
            return mpi_ops.MPI_LIB.horovod_alltoall(tensor, splits=lengths, process_set_id=self._process_set_id)[0]

        return self._start(begin, parts)

    def allgather_sized(self, part: Any, sizes: Sequence[int]) -> _Operation:
        """See `SizedOperations`."""

        def begin(tensor: tf.Tensor) -> tf.Tensor:
            return mpi_ops.MPI_LIB.horovod_allgather(tensor, process_set_id=self._process_set_id)

        return self._start(begin, [part])

    def _start(self, begin: Callable[..., tf.Tensor], parts: Sequence[Any]) -> _Operation:
        operation = _Operation(self, begin, parts)
        _thread.run(operation.run)
        return operation

    # ---- messages and tensors -----------------------------------------------------------------------------

    def mark(self) -> Any:
        """An event after the kernels that write what is sent."""
        if self._gpu is None:
            return None
        with self._kernels.at_work():
            return self._kernels._mark(self._kernels.stream)

    def pack(self, parts: Sequence[Any], ready: Any) -> tf.Tensor:
        """The parts in a row, in a tensor; waits for them, in the thread."""
        if self._gpu is None:
            return tf.convert_to_tensor(np.concatenate(parts))
        cuda, copies = self._kernels.device.cuda, self._kernels.copies
        tensor, address = self._tensor(sum(len(part) for part in parts))
        with cuda.Device(self._kernels.index):
            copies.wait_event(ready)
            for part in parts:
                if len(part):
                    kind = cuda.runtime.memcpyDeviceToDevice
                    cuda.runtime.memcpyAsync(address, part.ptr, len(part), kind, copies.ptr)
                    address += len(part)
            copies.synchronize()  # Horovod waits for TensorFlow's stream, not for ours
        return tensor

    def _tensor(self, n_bytes: int) -> tuple[tf.Tensor, int]:
        """A tensor to send from, and its address; kept, since TensorFlow may still use memory that it hands out."""
        if n_bytes not in self._kept:
            tensor = tf.raw_ops.Empty(shape=[n_bytes], dtype=tf.uint8)
            self._kept[n_bytes] = tensor, devices.Addresses([tensor])
            tf.test.experimental.sync_devices()
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(n_bytes)
        tensor, addresses = self._kept[n_bytes]
        return tensor, addresses.values[0]

    def unpack(self, received: tf.Tensor, places: Sequence[tuple[int, Any]]) -> None:
        """Copy parts of what has come to where they are wanted, on our stream."""
        if self._gpu is None:
            content = np.asarray(received)
            for start, array in places:
                array[:] = content[start : start + len(array)]
            return
        kernels, runtime = self._kernels, self._kernels.device.cuda.runtime
        addresses = devices.Addresses([received])
        with kernels.at_work():
            for start, array in places:
                if len(array):
                    source, kind = addresses.values[0] + start, runtime.memcpyDeviceToDevice
                    runtime.memcpyAsync(array.ptr, source, len(array), kind, kernels.stream.ptr)
            self._leaving.append((kernels._mark(kernels.stream), (received, addresses)))
        while self._leaving and is_over(kernels.device.cuda, self._leaving[0][0]):
            self._leaving.popleft()
