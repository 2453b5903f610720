"""How transports end: a rank that closes one says farewell, and lets go of it once all other ranks have.

A forked child has copies of them, and is not the one that they join: it says nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

FAREWELL = b""  # the last control message of a rank
FAREWELL_SECONDS = 10.0  # a rank that has failed must not wait long for those that wait for it


class Leaving(Protocol):
    """A transport that can end."""

    def close(self) -> None:
        """Nobody here will use it again."""

    def has_left(self) -> bool:
        """Say farewell, if not done yet; True, with everything let go, once all others have."""


class Farewells:
    """All transports of one kind in this process that have not left yet."""

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """`is_over` says that nothing can be sent any more."""
        self._is_over = is_over
        self._pid = os.getpid()
        self._open: list[Leaving] = []
        self._closed: list[Leaving] = []  # here, and some other rank may still send
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._open) + len(self._closed)

    @property
    def is_forked(self) -> bool:
        """Whether all of them are those of a parent."""
        return self._pid != os.getpid()

    def opened(self, transport: Leaving) -> None:
        """There is a new one; a moment to let go of old ones."""
        if self.is_forked:  # a lock may be held by a thread that is not in this process
            self._pid, self._open, self._closed, self._lock = os.getpid(), [], [], threading.RLock()
        with self._lock:
            self.sweep()
            self._open.append(transport)

    def closed(self, transport: Leaving) -> None:
        """It has been closed. May be called by the garbage collector: nothing is sent here."""
        if self.is_forked:
            return
        with self._lock:
            if transport in self._open:
                self._open.remove(transport)
                self._closed.append(transport)

    def sweep(self) -> int:
        """Let go of what every rank has left; returns how many are still waited for."""
        with self._lock:
            for transport in list(self._closed):
                if transport.has_left():
                    self._closed.remove(transport)
            return len(self._closed)

    def take_leave(self) -> None:
        """At the end of the process: close everything, and wait a little for the others."""
        if self.is_forked:
            return
        for transport in list(self._open):
            transport.close()
        deadline = time.monotonic() + FAREWELL_SECONDS
        while not self._is_over() and self.sweep() and time.monotonic() < deadline:
            time.sleep(0.001)
