"""Memory for messages: what is handed out, what is kept, and what that costs. Oracle: the rules, applied one by one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horovod_aps.engine.pool import SPARE, Lease, Pool


def alloc(n_bytes: int) -> np.ndarray:
    return np.zeros(n_bytes, np.uint8)


@given(st.lists(st.lists(st.integers(0, 400), max_size=6), max_size=12))
def test_smallest_that_fits_is_used_again_and_memory_is_bounded(batches: list[list[int]]) -> None:
    pool = Pool(alloc)
    idle: list[int] = []  # sizes, longest idle first
    peaks = [0]
    for sizes in batches:
        lease, used = Lease(pool), []
        for n in sizes:
            fitting = [size for size in idle if n <= size <= max(64, SPARE * n)]
            wanted = min(fitting) if fitting else n
            if fitting:
                idle.remove(wanted)
            assert len(lease.take(n)) == n
            used.append(wanted)
            peaks[-1] = max(peaks[-1], sum(used))
            assert pool.n_bytes == sum(idle) + sum(used)
        lease.end()
        for k, size in enumerate(used, start=1):
            idle.append(size)
            while idle and sum(idle) + sum(used[k:]) > max(peaks[-8:]):
                del idle[0]
        assert pool.n_bytes == sum(idle)
        pool.end_batch()
        peaks.append(0)


def test_cost_does_not_grow_with_what_lies_idle() -> None:
    """Thousands of buckets, of a few bytes each, are on their way at once if bucket_mb is tiny."""

    def n_calls(n_idle: int) -> int:
        pool = Pool(alloc)
        lease = Lease(pool)
        for i in range(n_idle):
            lease.take(1 + i % 97)
        lease.end()
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        lease.take(50)
        lease.end()
        sys.setprofile(None)
        return calls

    assert n_calls(3000) == n_calls(100)
