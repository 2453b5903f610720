"""Memory for messages, used again from bucket to bucket and from step to step.

What lies idle is bounded: together with what is in use never more than the most that a batch has taken lately. Buckets
do not always overlap in the same way, so what is in use at once would not do: buffers would be made anew now and then.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np

SPARE = 1.25  # a buffer may be so much larger than what is asked for
N_PEAKS = 8  # how many batches count as lately


class Pool:
    """Hands out arrays of bytes by leases."""

    def __init__(self, alloc: Callable[[int], np.ndarray]) -> None:
        self._alloc = alloc
        self._ages = itertools.count()
        self._idle: OrderedDict[int, np.ndarray] = OrderedDict()  # by age, longest idle first
        self._sizes: list[tuple[int, int]] = []  # of what is idle, with ages; sorted
        self._n_idle = self._n_used = self._n_asked = 0  # bytes
        self._peaks: deque[int] = deque([0], N_PEAKS)

    @property
    def n_bytes(self) -> int:
        """Bytes in use and idle."""
        return self._n_used + self._n_idle

    def _take(self, n_bytes: int) -> np.ndarray:
        place = bisect_left(self._sizes, (n_bytes, 0))  # the smallest that is large enough
        # Where a new one would push out another that the next batch may need, batches that take turns share instead.
        limit = max(64, SPARE * n_bytes) if self.n_bytes + n_bytes <= max(self._peaks) else float("inf")
        if place < len(self._sizes) and self._sizes[place][0] <= limit:
            size, age = self._sizes.pop(place)
            buffer = self._idle.pop(age)
            self._n_idle -= size
        else:
            buffer = self._alloc(n_bytes)
        self._n_used += len(buffer)
        self._n_asked += n_bytes
        self._peaks[-1] += n_bytes
        return buffer

    def _give(self, buffer: np.ndarray, n_bytes: int) -> None:
        size, age = len(buffer), next(self._ages)
        self._n_used -= size
        self._n_asked -= n_bytes
        self._n_idle += size
        self._idle[age] = buffer
        insort(self._sizes, (size, age))
        while self._idle and self.n_bytes > max(self._peaks):
            age, buffer = self._idle.popitem(last=False)
            del self._sizes[bisect_left(self._sizes, (len(buffer), age))]
            self._n_idle -= len(buffer)

    def end_batch(self) -> None:
        """From now on another batch counts."""
        self._peaks.append(self._n_asked)


class Lease:
    """The buffers of one bucket on its way; `end` gives them back, when nothing reads or writes them any more."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._buffers: list[tuple[np.ndarray, int]] = []

    @property
    def buffers(self) -> list[np.ndarray]:
        """All that has been taken."""
        return [buffer for buffer, _ in self._buffers]

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
