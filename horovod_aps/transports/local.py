"""Several ranks in one process, for emulation and tests: messages are handed over in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import numpy as np

from horovod_aps.transports.base import Bytes

Posts = tuple[deque[Bytes], deque[tuple["_LocalRequest", Bytes]]]  # what was sent, and where it is wanted
Board = dict[tuple[int, int, int], Posts]  # by sender, receiver and tag


class _LocalRequest:
    """Arrays to be filled."""

    def __init__(self, n_open: int) -> None:
        self.n_open = n_open

    def done(self) -> bool:
        return self.n_open == 0


class LocalTransport:
    """One rank of a world that lives in a single process; `LocalTransport.world(n)` makes all of them."""

    memory = "host"
    hosts = None

    def __init__(
        self, rank: int, size: int, board: Board, mail: list[deque[tuple[int, bytes]]], lock: threading.Lock
    ) -> None:
        self.rank, self.size, self._board, self._mail, self._lock = rank, size, board, mail, lock

    @classmethod
    def world(cls, size: int) -> list[LocalTransport]:
        """All ranks of a fresh world."""
        board: Board = {}
        mail: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        lock = threading.Lock()  # the progress thread may move some of the ranks
        return [cls(rank, size, board, mail, lock) for rank in range(size)]

    def ready(self) -> bool:
        return True

    def post(self, message: bytes) -> None:
        for rank, box in enumerate(self._mail):
            if rank != self.rank:
                box.append((self.rank, message))

    def heard(self) -> list[tuple[int, bytes]]:
        box, messages = self._mail[self.rank], []
        while box:
            messages.append(box.popleft())
        return messages

    def gone(self) -> set[int]:
        return set()

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> _LocalRequest:
        request = _LocalRequest(len(incoming))
        with self._lock:
            for target, array in outgoing.items():
                # As a network does: a sender that reuses its buffer later must not change what was sent.
                self._posts(self.rank, target, tag)[0].append(array.copy())
                self._deliver(self.rank, target, tag)
            for source, array in incoming.items():
                self._posts(source, self.rank, tag)[1].append((request, array))
                self._deliver(source, self.rank, tag)
        return request

    def _posts(self, source: int, target: int, tag: int) -> Posts:
        return self._board.setdefault((source, target, tag), (deque(), deque()))

    def _deliver(self, source: int, target: int, tag: int) -> None:
        sent, wanted = self._posts(source, target, tag)
        while sent and wanted:
            request, array = wanted.popleft()
            np.copyto(array, sent.popleft())
            request.n_open -= 1
        if not sent and not wanted:
            del self._board[source, target, tag]

    def close(self) -> None:
        pass
