"""Messages by a framework's collective operations, for those that keep bytes on a GPU: Horovod's, built for NCCL.

A transfer is one operation on all ranks, known by its name: an all-gather if this rank sends the same array to all
others, else an all-to-all, with nothing for ranks that it is not with. All ranks must make one with as many others at
that place of their program, if only with other ranks. Control messages, and whatever the operations do not take, go
over a transport below.

Horovod calls a user's unnamed operation by a number that counts all operations of the process. So ours begin only while
the program waits for results: before and after that all ranks have begun the same number of them. A rank that waits for
another exchange begins those of this one after a while, for other ranks may wait for them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from horovod_aps.transports.above import Above
from horovod_aps.transports.base import Bytes, Request, Transport

PATIENCE_SECONDS = 0.1  # that somebody waits for another exchange before operations of this one begin
MAX_BYTES = (1 << 31) - 1  # of one operation: Horovod counts in int32
NEVER, LATER, NOW = range(3)


class Operation(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether it is over; LostPeer if it failed."""

    def put(self, places: Sequence[tuple[int, Any]]) -> None:
        """Copy what it has received, from each of these positions on, to each array; once it is done."""


class Operations(Protocol):
    """A framework's operations on the ranks of one process set."""

    @property
    def way(self) -> str:
        """How bytes travel, for people."""

    def takes(self, array: Any) -> bool:
        """Whether a message is where the operations work."""

    def alltoall(self, name: str, parts: Sequence[Any]) -> Operation:
        """Send parts[k] to rank k, and receive from all ranks, one after the other."""

    def allgather(self, name: str, part: Any) -> Operation:
        """Send a part to all ranks, and receive theirs, the own one among them, one after the other."""


class _Transfer:
    """One transfer, waiting for its turn, under way, or over."""

    def __init__(self, owner: CollectiveTransport, outgoing: Mapping[int, Any], incoming: Mapping[int, Any], name: str):
        self._owner, self.outgoing, self.incoming, self.name = owner, outgoing, incoming, name
        self.operation: Operation | None = None
        self.since = time.monotonic()
        self.over = False

    def done(self) -> bool:
        if not self.over:
            self._owner.pump()
        return self.over


class CollectiveTransport(Above):
    """Transfers by `operations`, all else over the transport `below`."""

    def __init__(self, below: Transport, operations: Operations, name: str, may_begin: Callable[[], int]) -> None:
        """`name` is the same on all ranks, and nobody else's; `may_begin` says NEVER, LATER or NOW."""
        super().__init__(below)
        self._operations, self._name, self._may_begin = operations, name, may_begin
        self._others = {rank for rank in range(self.size) if rank != self.rank}
        self._numbers: Counter[int] = Counter()  # of transfers so far, by tag
        self._waiting: deque[_Transfer] = deque()
        self._moving: list[_Transfer] = []

    @property
    def way(self) -> str:
        return self._operations.way

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> Request:
        arrays = [*outgoing.values(), *incoming.values()]
        if not all(self._operations.takes(array) for array in arrays):
            return self.below.transfer(outgoing, incoming, tag)
        if outgoing.keys() != incoming.keys() or not outgoing or not outgoing.keys() <= self._others:
            raise ValueError(
                f"CollectiveTransport: a transfer must be both ways, with other ranks, got {sorted(outgoing)} and "
                f"{sorted(incoming)}"
            )
        for way, messages in (("sent", outgoing), ("received", incoming)):
            if (n_bytes := sum(len(array) for array in messages.values())) > MAX_BYTES:
                raise ValueError(
                    f"APSCompressor: {n_bytes} bytes would be {way} in one operation, which takes "
                    f"{MAX_BYTES}; use a smaller bucket_mb, or HOROVOD_APS_GPU_WAY=pinned"
                )
        self._numbers[tag] += 1
        move = _Transfer(self, outgoing, incoming, f"{self._name}.{tag}.{self._numbers[tag]}")
        self._waiting.append(move)
        self.pump()
        return move

    def pump(self) -> None:
        """Begin what may begin, and hand over what has arrived."""
        may_begin = self._may_begin() if self._waiting else NEVER
        if may_begin == LATER and time.monotonic() - self._waiting[0].since > PATIENCE_SECONDS:
            may_begin = NOW
        while may_begin == NOW and (move := self._next()) is not None:
            move.operation = self._begin(move)
            self._moving.append(move)
        for move in [move for move in self._moving if move.operation is not None and move.operation.done()]:
            self._moving.remove(move)
            self._finish(move)

    def _next(self) -> _Transfer | None:
        """The transfer that may begin now, no longer among those that wait."""
        return self._waiting.popleft() if self._waiting else None

    def _is_gather(self, outgoing: Mapping[int, Any]) -> bool:
        """Whether one and the same array goes to all: the program says so, in the same way on all ranks."""
        return outgoing.keys() == self._others and len({id(array) for array in outgoing.values()}) == 1

    def _begin(self, move: _Transfer) -> Operation:
        if self._is_gather(move.outgoing):
            return self._operations.allgather(move.name, next(iter(move.outgoing.values())))
        nothing = next(iter(move.outgoing.values()))[:0]
        return self._operations.alltoall(move.name, [move.outgoing.get(rank, nothing) for rank in range(self.size)])

    def _finish(self, move: _Transfer) -> None:
        assert move.operation is not None
        own = len(next(iter(move.outgoing.values()))) if self._is_gather(move.outgoing) else 0
        places, start = [], 0
        for rank in range(self.size):
            if rank == self.rank:
                start += own
            elif rank in move.incoming:
                places.append((start, move.incoming[rank]))
                start += len(move.incoming[rank])
        move.operation.put(places)
        move.over, move.operation = True, None
        move.outgoing, move.incoming = {}, {}
