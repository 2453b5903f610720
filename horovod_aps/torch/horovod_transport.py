"""The transport over Horovod's own operations, for Gloo and wherever MPI cannot be called directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from horovod.torch import mpi_ops


class _HorovodRequest:
    """A Horovod handle; its output, split into one array per rank where sizes are given."""

    def __init__(self, handle: int, sizes: Sequence[int] | None = None) -> None:
        self._handle, self._sizes = handle, sizes

    def done(self) -> bool:
        return bool(mpi_ops.poll(self._handle))

    def result(self) -> Any:
        output = mpi_ops.synchronize(self._handle)
        array = (output[0] if isinstance(output, tuple) else output).numpy()
        if self._sizes is None:
            return array
        ends = np.cumsum(self._sizes)
        return [array[end - size:end] for end, size in zip(ends, self._sizes)]


class _SwapRequest:
    """Two ranks swap messages by summing them as int32, modulo 2^32: the sum less one's own is the other's."""

    def __init__(self, handle: int, mine: np.ndarray, sum_: np.ndarray, rank: int) -> None:
        self._handle, self._mine, self._sum, self._rank = handle, mine, sum_, rank

    def done(self) -> bool:
        return bool(mpi_ops.poll(self._handle))

    def result(self) -> list[np.ndarray]:
        mpi_ops.synchronize(self._handle)
        words = self._sum.view(np.int32)
        np.subtract(words, self._mine.view(np.int32), out=words)
        return [self._mine, self._sum] if self._rank == 0 else [self._sum, self._mine]


class _BytesRequest:
    """Two dependent all-gathers: the lengths, then the bytes."""

    def __init__(self, transport: HorovodTransport, payload: bytes, slot: int) -> None:
        self._transport, self._payload, self._slot = transport, payload, slot
        self._request = transport._allgather(np.array([len(payload)], np.int64), None, f"lengths.{slot}")
        self._lengths: list[int] | None = None

    def done(self) -> bool:
        if not self._request.done():
            return False
        if self._lengths is not None:
            return True
        self._lengths = self._request.result().tolist()
        payload = np.frombuffer(self._payload, np.uint8).copy()
        self._request = self._transport._allgather(payload, self._lengths, f"bytes.{self._slot}")
        return False

    def result(self) -> list[bytes]:
        return [part.tobytes() for part in self._request.result()]


class HorovodTransport:
    """Named all-reduce, all-to-all and all-gather on CPU tensors.

    Everything starts inside `flush`, a point of the program that is the same on all ranks, so that the numbers
    Horovod gives to unnamed operations of the user stay in step. Starting in the middle of backward would need either
    a wait there, which deadlocks with a rank that has no gradient for a parameter and already waits in the user's next
    collective, or operations whose number depends on timing.
    """

    overlaps = False

    def __init__(self, name: str, process_set: mpi_ops.ProcessSet) -> None:
        self._name, self._process_set = name, process_set
        self.rank, self.size = process_set.rank(), process_set.size()

    def max(self, values: np.ndarray, slot: int) -> _HorovodRequest:
        return _HorovodRequest(mpi_ops.allreduce_async_(torch.from_numpy(values), op=mpi_ops.Max,
                                                        name=f"{self._name}.exponents.{slot}",
                                                        process_set=self._process_set))

    def alltoall(self, send: np.ndarray, bounds: np.ndarray, recv: np.ndarray, slot: int) -> _HorovodRequest:
        splits = torch.from_numpy(np.diff(bounds).astype(np.int32))
        n = int(bounds[self.rank + 1] - bounds[self.rank])
        handle = mpi_ops.alltoall_async(torch.from_numpy(send), splits, name=f"{self._name}.alltoall.{slot}",
                                        process_set=self._process_set)
        return _HorovodRequest(handle, [n] * self.size)

    def allgather(self, message: np.ndarray, sizes: Sequence[int], recv: np.ndarray, slot: int
                  ) -> _HorovodRequest | _SwapRequest:
        if self.size == 2 and sizes[0] == sizes[1] == len(recv) and len(recv) % 4 == 0:
            # Gloo's all-gather sends first and asks for the other's message afterwards, behind its own on the same
            # connection: two ranks take turns. Its all-reduce sends as many bytes, both ways at once.
            recv[:] = message
            handle = mpi_ops.allreduce_async_(torch.from_numpy(recv.view(np.int32)), op=mpi_ops.Sum,
                                              name=f"{self._name}.swap.{slot}", process_set=self._process_set)
            return _SwapRequest(handle, message, recv, self.rank)
        return self._allgather(message, sizes, f"allgather.{slot}")

    def gather_bytes(self, payload: bytes, slot: int) -> _BytesRequest:
        return _BytesRequest(self, payload, slot)

    def _allgather(self, array: np.ndarray, sizes: Sequence[int] | None, label: str) -> _HorovodRequest:
        handle = mpi_ops.allgather_async(torch.from_numpy(array), name=f"{self._name}.{label}",
                                         process_set=self._process_set)
        return _HorovodRequest(handle, sizes)
