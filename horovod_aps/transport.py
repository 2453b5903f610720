"""What the exchange asks of a network, and the transport that needs none.

A transport moves int32 maxima and packed bytes between the ranks of one process set; it knows nothing of formats
or layers. `horovod_aps.mpi_transport` speaks MPI, each frontend brings one over Horovod's own operations, and
`LocalTransport` below joins exchanges that emulate several ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Request(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether the operation has finished; never blocks, and makes progress when called."""

    def result(self) -> Any:
        """What the operation returns, once done; raises if it failed."""


class Transport(Protocol):
    """The collectives of the exchange, all non-blocking. `slot` tells concurrent operations apart."""

    rank: int
    size: int
    overlaps: bool
    """Whether operations may start at points that differ between ranks, as in the middle of backward."""

    def max(self, values: np.ndarray, slot: int) -> Request:
        """Element-wise maximum of an int32 vector over all ranks."""

    def alltoall(self, send: np.ndarray, bounds: np.ndarray, recv: np.ndarray, slot: int) -> Request:
        """Send bytes [bounds[k], bounds[k+1]) of `send` to rank k; the result has one array per sender."""

    def allgather(self, message: np.ndarray, sizes: Sequence[int], recv: np.ndarray, slot: int) -> Request:
        """Send `message` to all; rank k's has `sizes[k]` bytes; the result has one array per rank."""

    def gather_bytes(self, payload: bytes, slot: int) -> Request:
        """Send bytes of any length to all; the result is a list of bytes, one per rank."""


class PendingTransport:
    """Stands in for a transport until the first flush, the first moment at which all ranks are sure to meet.

    Making a transport is collective; doing it when the first gradient is handed in, inside backward, would wait there
    for ranks that have no gradient yet and may themselves wait for us in another collective of the user's.
    """

    overlaps = False

    def __init__(self, rank: int, size: int, connect: Callable[[], Transport]) -> None:
        self.rank, self.size, self.connect = rank, size, connect


def may_swap(sizes: Sequence[int]) -> bool:
    """Whether ranks with messages of these sizes can swap them by a sum: two ranks, whole int32 words."""
    return len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] % 4 == 0


def both_of_sum(total: np.ndarray, mine: np.ndarray, other: np.ndarray, rank: int) -> list[np.ndarray]:
    """Both messages, by rank, from their sum as int32 modulo 2^32: less one's own it is the other's, put into `other`.

    Gloo's all-gather sends first and asks for the other's message afterwards, behind its own on the same connection:
    two ranks take turns. Its all-reduce sends as many bytes, both ways at once.
    """
    np.subtract(total, mine.view(np.int32), out=other.view(np.int32))
    return [mine, other] if rank == 0 else [other, mine]


class _LocalRequest:
    def __init__(self, posts: dict[int, Any], size: int, finish: Callable[[dict[int, Any]], Any]) -> None:
        self._posts, self._size, self._finish = posts, size, finish

    def done(self) -> bool:
        return len(self._posts) == self._size

    def result(self) -> Any:
        return self._finish(self._posts)


class LocalTransport:
    """One rank of a world that lives in a single process; `LocalTransport.world(n)` makes all of them."""

    overlaps = False

    def __init__(self, rank: int, size: int, board: dict[tuple[str, int, int], dict[int, Any]]) -> None:
        self.rank, self.size, self._board = rank, size, board
        self._counts: dict[tuple[str, int], int] = {}

    @classmethod
    def world(cls, size: int) -> list[LocalTransport]:
        """All ranks of a fresh world."""
        board: dict[tuple[str, int, int], dict[int, Any]] = {}
        return [cls(rank, size, board) for rank in range(size)]

    def _post(self, kind: str, slot: int, value: Any, finish: Callable[[dict[int, Any]], Any]) -> Request:
        turn = self._counts[kind, slot] = self._counts.get((kind, slot), 0) + 1
        posts = self._board.setdefault((kind, slot, turn), {})
        posts[self.rank] = value
        self._board.pop((kind, slot, turn - 2), None)  # everyone has moved on from two turns ago
        return _LocalRequest(posts, self.size, finish)

    def max(self, values: np.ndarray, slot: int) -> Request:
        return self._post("max", slot, values.copy(), lambda posts: np.max(list(posts.values()), axis=0))

    def alltoall(self, send: np.ndarray, bounds: np.ndarray, recv: np.ndarray, slot: int) -> Request:
        mine = slice(int(bounds[self.rank]), int(bounds[self.rank + 1]))
        return self._post("alltoall", slot, send, lambda posts: [posts[k][mine] for k in range(self.size)])

    def allgather(self, message: np.ndarray, sizes: Sequence[int], recv: np.ndarray, slot: int) -> Request:
        return self._post("allgather", slot, message, lambda posts: [posts[k] for k in range(self.size)])

    def gather_bytes(self, payload: bytes, slot: int) -> Request:
        return self._post("bytes", slot, payload, lambda posts: [posts[k] for k in range(self.size)])
