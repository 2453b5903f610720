"""Memory for messages, used again from bucket to bucket and from step to step.

What lies idle is bounded: together with what is in use never more than the most that was in use at once lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

SPARE = 1.25  # a buffer may be so much larger than what is asked for
N_PEAKS = 8  # how many batches count as lately


class Pool:
    """Hands out arrays of bytes by leases."""

    def __init__(self, alloc: Callable[[int], np.ndarray]) -> None:
        self._alloc = alloc
        self._idle: list[np.ndarray] = []  # longest idle first
        self._n_used = self._n_asked = 0
        self._peaks: deque[int] = deque([0], N_PEAKS)

    @property
    def n_bytes(self) -> int:
        """Bytes in use and idle."""
        return self._n_used + sum(map(len, self._idle))

    def _take(self, n_bytes: int) -> np.ndarray:
        fitting = [i for i, buffer in enumerate(self._idle) if n_bytes <= len(buffer) <= max(64, SPARE * n_bytes)]
        if not fitting and self.n_bytes + n_bytes > max(self._peaks):
            # A new one would push out another that the next batch may need: batches that take turns share instead.
            fitting = [i for i, buffer in enumerate(self._idle) if n_bytes <= len(buffer)]
        if fitting:
            buffer = self._idle.pop(min(fitting, key=lambda i: len(self._idle[i])))
        else:
            buffer = self._alloc(n_bytes)
        self._n_used += len(buffer)
        self._n_asked += n_bytes
        self._peaks[-1] = max(self._peaks[-1], self._n_asked)
        return buffer

    def _give(self, buffer: np.ndarray, n_bytes: int) -> None:
        self._n_used -= len(buffer)
        self._n_asked -= n_bytes
        self._idle.append(buffer)
        while self._idle and self.n_bytes > max(self._peaks):
            self._idle.pop(0)

    def end_batch(self) -> None:
        """From now on another batch counts."""
        self._peaks.append(self._n_asked)


class Lease:
    """The buffers of one bucket on its way; `end` gives them back, when nothing reads or writes them any more."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._buffers: list[tuple[np.ndarray, int]] = []

    def take(self, n_bytes: int) -> np.ndarray:
        """An array of `n_bytes` bytes with any content."""
        buffer = self._pool._take(n_bytes)
        self._buffers.append((buffer, n_bytes))
        return buffer[:n_bytes]

    def end(self) -> None:
        """Give all buffers back."""
        for buffer, n_bytes in self._buffers:
            self._pool._give(buffer, n_bytes)
        self._buffers = []
