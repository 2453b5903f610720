"""The transport straight over MPI, used when Horovod itself runs on MPI with thread support.

Exponents go by a non-blocking MAX all-reduce, packed bytes by tagged point-to-point messages: those have no
order that ranks must agree on, so buckets can overtake each other and start in the middle of backward.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from horovod.common.exceptions import HorovodInternalError

TAG_ALLTOALL, TAG_ALLGATHER, N_TAGS = 0, 1, 2
MAX_TAG = 1 << 15  # what every MPI can count to
MAX_MESSAGE = 1 << 30  # bytes; MPI counts are int32
# Between hosts in pieces that Open MPI sends at once. Of a longer message it sends the rest only when the receiver has
# answered, and while Horovod's thread is in MPI as well, that answer waits behind the data of the other direction.
MAX_EAGER = 60 << 10
FAREWELL_SECONDS = 10.0  # a rank that has failed must not wait long for those that wait for it
_communicators: list[Any] = []


def _take_leave() -> None:
    """Wait for the last exchanges of the others: Horovod ends MPI on all ranks as soon as the first one leaves."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    requests = [communicator.Ibarrier() for communicator in _communicators]
    deadline = time.monotonic() + FAREWELL_SECONDS
    while not MPI.Request.Testall(requests) and time.monotonic() < deadline:
        time.sleep(0.001)


class _MpiRequest:
    """MPI requests that finish together; keeps `buffers` alive until then."""

    def __init__(self, requests: list[Any], result: Any, buffers: Any = None) -> None:
        self._requests, self._result, self._buffers = requests, result, buffers

    def done(self) -> bool:
        from mpi4py import MPI

        if self._requests and MPI.Is_finalized():
            raise HorovodInternalError("Horovod has been shut down on another rank in the middle of an exchange")
        if self._requests and not MPI.Request.Testall(self._requests):
            return False
        self._requests, self._buffers = [], None
        return True

    def result(self) -> Any:
        return self._result


class MpiTransport:
    """Point-to-point and MAX all-reduce on a private duplicate of the process set's communicator."""

    overlaps = True

    def __init__(self, ranks: Sequence[int], tag: int = 0) -> None:
        """Make a communicator of `ranks`; collective over them, and `tag` tells apart what threads make at once."""
        from mpi4py import MPI

        self._mpi = MPI
        world = MPI.COMM_WORLD
        self._comm = world.Create_group(world.group.Incl(list(ranks)), tag=tag % MAX_TAG)
        if not _communicators:
            atexit.register(_take_leave)  # after Horovod has registered its own end, so that it comes before it
        _communicators.append(self._comm)
        self.rank, self.size = self._comm.rank, self._comm.size
        near = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        places = MPI.Group.Translate_ranks(self._comm.group, list(range(self.size)), near.group)
        self._piece = [MAX_EAGER if place == MPI.UNDEFINED else MAX_MESSAGE for place in places]
        near.Free()

    def max(self, values: np.ndarray, slot: int) -> _MpiRequest:
        out = np.empty_like(values)
        return _MpiRequest([self._comm.Iallreduce(values, out, op=self._mpi.MAX)], out, values)

    def _transfer(self, outgoing: list[np.ndarray], incoming: list[np.ndarray], tag: int) -> _MpiRequest:
        """Send outgoing[k] to rank k and receive incoming[k] from it; own entries stay where they are."""
        requests = []
        # Start with the next rank so that no receiver is everyone's first target.
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            for chunk in _chunks(incoming[source], self._piece[source]):
                requests.append(self._comm.Irecv(chunk, source=source, tag=tag))
        for step in range(1, self.size):
            target = (self.rank + step) % self.size
            for chunk in _chunks(outgoing[target], self._piece[target]):
                requests.append(self._comm.Isend(chunk, dest=target, tag=tag))
        incoming[self.rank] = outgoing[self.rank]
        return _MpiRequest(requests, incoming, (outgoing, incoming))

    def alltoall(self, send: np.ndarray, bounds: np.ndarray, recv: np.ndarray, slot: int) -> _MpiRequest:
        outgoing = [send[bounds[k]:bounds[k + 1]] for k in range(self.size)]
        n = int(bounds[self.rank + 1] - bounds[self.rank])
        incoming = [recv[k * n:(k + 1) * n] for k in range(self.size)]
        return self._transfer(outgoing, incoming, slot * N_TAGS + TAG_ALLTOALL)

    def allgather(self, message: np.ndarray, sizes: Sequence[int], recv: np.ndarray, slot: int) -> _MpiRequest:
        incoming, start = [], 0
        for source, n in enumerate(sizes):
            if source == self.rank:
                incoming.append(message)
                continue
            incoming.append(recv[start:start + n])
            start += n
        return self._transfer([message] * self.size, incoming, slot * N_TAGS + TAG_ALLGATHER)

    def gather_bytes(self, payload: bytes, slot: int) -> _MpiRequest:
        # Rare (a batch seen for the first time, or a disagreement), so it may block.
        n = np.array([len(payload)], np.int64)
        lengths = np.empty(self.size, np.int64)
        self._comm.Allgather(n, lengths)
        out = np.empty(int(lengths.sum()), np.uint8)
        counts = [int(length) for length in lengths]
        self._comm.Allgatherv(np.frombuffer(payload, np.uint8), [out, counts])
        ends = np.cumsum(lengths)
        return _MpiRequest([], [out[end - length:end].tobytes() for end, length in zip(ends, lengths)])


def _chunks(array: np.ndarray, piece: int) -> list[np.ndarray]:
    """Pieces of a message; none for an empty one."""
    return [array[start:start + piece] for start in range(0, len(array), piece)]
