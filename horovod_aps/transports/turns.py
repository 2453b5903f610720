"""Messages by collective operations that have no names, or all the same: all ranks must begin them in the same order.

Ranks get to their transfers in different orders, and none waits for another. So rank 0 begins operations as it comes to
them and tells the others which one it was; they begin theirs in that order. What an operation needs has come by earlier
ones, so everybody gets to each. Rank 0's word is a control message among those of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from horovod_aps.transports.base import Transport
from horovod_aps.transports.collective import NOW, CollectiveTransport, Operation, _Transfer

MESSAGE, TURN = b"m", b"t"  # what a control message begins with


class SizedOperations(Protocol):
    """Operations on the ranks of one group, which must be told what will come."""

    @property
    def way(self) -> str:
        """How bytes travel, for people."""

    def takes(self, array: Any) -> bool:
        """Whether a message is where the operations work."""

    def alltoall_sized(self, parts: Sequence[Any], sizes: Sequence[int]) -> Operation:
        """Send parts[k] to rank k, and receive sizes[k] bytes from it, one after the other."""

    def allgather_sized(self, part: Any, sizes: Sequence[int]) -> Operation:
        """Send a part to all ranks, and receive sizes[k] bytes from rank k, the own part among them."""

    def close(self) -> None:
        """Nobody will use them again; safe to call more than once."""


class TurnTransport(CollectiveTransport):
    """Transfers by `operations` in the order of rank 0, all else over the transport `below`."""

    def __init__(self, below: Transport, operations: SizedOperations) -> None:
        super().__init__(below, operations, "", lambda: NOW)  # type: ignore[arg-type]
        self._sized = operations
        self._turns: deque[str] = deque()

    def post(self, message: bytes) -> None:
        self.below.post(MESSAGE + message)

    def heard(self) -> list[tuple[int, bytes]]:
        messages = []
        for rank, message in self.below.heard():
            if message[:1] == TURN:
                self._turns.append(message[1:].decode())
            else:
                messages.append((rank, message[1:]))
        return messages

    def close(self) -> None:
        super().close()
        self._sized.close()

    def _next(self) -> _Transfer | None:
        if self.rank == 0:
            if not self._waiting:
                return None
            move = self._waiting.popleft()
            self.below.post(TURN + move.name.encode())
            return move
        for move in self._waiting if self._turns else ():
            if move.name == self._turns[0]:
                self._turns.popleft()
                self._waiting.remove(move)
                return move
        return None

    def _begin(self, move: _Transfer) -> Operation:
        sizes = [len(move.incoming.get(rank, b"")) for rank in range(self.size)]
        if self._is_gather(move.outgoing):
            part = next(iter(move.outgoing.values()))
            sizes[self.rank] = len(part)
            return self._sized.allgather_sized(part, sizes)
        nothing = next(iter(move.outgoing.values()))[:0]
        parts = [move.outgoing.get(rank, nothing) for rank in range(self.size)]
        return self._sized.alltoall_sized(parts, sizes)
