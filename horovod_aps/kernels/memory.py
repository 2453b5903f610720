"""Memory for the CUDA kernels: arrays on the device, pinned host memory, and uploads that nobody waits for."""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 18  # bytes of pinned memory that uploads fill before they go on to the next
MAX_UPLOADS = 64 << 20  # bytes of tables kept on the device
IDLE_TAKES = 1024  # pinned memory that nobody wants for so many requests is given back; freeing it stops the device
IDLE_BYTES = 512 << 20  # that may lie idle all the same, or as many as were in use at once
NOT_READY = 600  # cudaErrorNotReady


def is_over(cuda: Any, event: Any) -> bool:
    """Whether the device has come to an event; raises what has gone wrong on it: CuPy's `Event.done` stays False."""
    status = cuda.runtime.eventQuery(event.ptr)
    if status not in (0, NOT_READY):
        cuda.runtime.check_status(status)
    return bool(status == 0)


class DeviceArray:
    """Elements on the device; a slice of it shares its memory."""

    def __init__(self, memory: Any, ptr: int, size: int, dtype: npt.DTypeLike) -> None:
        self._memory, self.ptr, self.size, self.dtype = memory, ptr, size, np.dtype(dtype)

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceArray:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"DeviceArray: slices must have step 1, got {step}")
        return DeviceArray(self._memory, self.ptr + start * self.dtype.itemsize, max(stop - start, 0), self.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For mpi4py and frameworks; whoever reads it must have waited for our stream."""
        return {"shape": (self.size,), "typestr": self.dtype.str, "data": (self.ptr, False), "version": 3}


class PinnedPool:
    """Pinned host memory in pieces of exactly the size asked for, used again; what lies idle is bounded."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._idle: deque[tuple[int, np.ndarray]] = deque()  # with the number of the request before it was given back
        self._n_takes = 0
        self._n_used = self._n_peak = self._n_idle = 0

    @property
    def n_bytes(self) -> int:
        """Bytes in use and idle."""
        return self._n_used + self._n_idle

    def take(self, n_bytes: int) -> np.ndarray:
        """An array of bytes with any content."""
        self._n_takes += 1
        found = next((i for i, (_, array) in enumerate(self._idle) if len(array) == n_bytes), None)
        if found is not None:
            array = self._idle[found][1]
            del self._idle[found]
            self._n_idle -= n_bytes
        else:
            array = self._new(n_bytes)
        self._n_used += n_bytes
        self._n_peak = max(self._n_peak, self._n_used)
        return array

    def _new(self, n_bytes: int) -> np.ndarray:
        memory = self._cuda.PinnedMemory(max(n_bytes, 1))
        block = (ctypes.c_uint8 * n_bytes).from_address(memory.ptr)
        block._memory = memory  # type: ignore[attr-defined]  # lives as long as the array
        return np.ctypeslib.as_array(block) if n_bytes else np.zeros(0, np.uint8)

    def give(self, array: np.ndarray) -> None:
        """Nothing reads or writes it any more."""
        self._n_used -= len(array)
        self._n_idle += len(array)
        self._idle.append((self._n_takes, array))
        while self._idle and (
            self._idle[0][0] + IDLE_TAKES < self._n_takes or self._n_idle > max(IDLE_BYTES, self._n_peak)
        ):
            self._n_idle -= len(self._idle.popleft()[1])


class Uploads:
    """Tables on the device. What is there already is not sent again, and nothing waits for what is sent."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._kept: OrderedDict[bytes, DeviceArray] = OrderedDict()
        self._n_kept = 0
        self._pool = PinnedPool(cuda)
        self._chunk, self._filled = self._pool.take(CHUNK), 0
        self._busy: deque[tuple[Any, np.ndarray]] = deque()  # chunks that are full, until their copies are over

    def put(self, array: np.ndarray) -> int:
        """The address of a copy of the array, valid for kernels that are launched before the next call."""
        content = array.tobytes()
        kept = self._kept.get(content)
        if kept is None:
            kept = DeviceArray(memory := self._cuda.alloc(max(len(content), 1)), memory.ptr, len(content), np.uint8)
            self.copy(content, kept.ptr)
            self._kept[content] = kept
            self._n_kept += len(content)
        self._kept.move_to_end(content)
        return kept.ptr

    def trim(self) -> None:
        """Forget what was used longest ago. Its memory goes back to our stream, behind the kernels that read it."""
        while self._n_kept > MAX_UPLOADS:
            content, _ = self._kept.popitem(last=False)
            self._n_kept -= len(content)

    def copy(self, content: bytes, target: int) -> None:
        """Send bytes to the device."""
        n_bytes = len(content)
        if n_bytes == 0:
            return
        if n_bytes > CHUNK:
            source = self._pool.take(n_bytes)
            self._send(source, content, target)
            self._retire(source)
            return
        if self._filled + n_bytes > CHUNK:
            self._retire(self._chunk)
            self._chunk, self._filled = self._pool.take(CHUNK), 0
        self._send(self._chunk[self._filled : self._filled + n_bytes], content, target)
        self._filled += -(-n_bytes // 16) * 16

    def _send(self, source: np.ndarray, content: bytes, target: int) -> None:
        source[:] = np.frombuffer(content, np.uint8)
        runtime = self._cuda.runtime
        runtime.memcpyAsync(target, source.ctypes.data, len(content), runtime.memcpyHostToDevice, self._stream.ptr)

    def _retire(self, source: np.ndarray) -> None:
        event = self._cuda.Event(disable_timing=True)
        event.record(self._stream)
        self._busy.append((event, source))
        while self._busy and is_over(self._cuda, self._busy[0][0]):
            self._pool.give(self._busy.popleft()[1])
