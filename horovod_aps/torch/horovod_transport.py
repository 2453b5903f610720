"""The transport over Horovod's own operations, for Gloo and wherever MPI cannot be called directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from horovod.torch import mpi_ops

from horovod_aps.transport import both_of_sum, may_swap


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


class _SwapRequest(_HorovodRequest):
    """The sum of two ranks' messages on its way, in place of the other one's."""

    def __init__(self, handle: int, mine: np.ndarray, other: np.ndarray, rank: int) -> None:
        super().__init__(handle)
        self._mine, self._other, self._rank = mine, other, rank

    def result(self) -> list[np.ndarray]:
        return both_of_sum(super().result(), self._mine, self._other, self._rank)


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

    def allgather(self, message: np.ndarray, sizes: Sequence[int], recv: np.ndarray, slot: int) -> _HorovodRequest:
        if may_swap(sizes):
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
