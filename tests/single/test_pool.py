"""Memory for messages: used again, and bounded. Oracle: what the allocator is asked for."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_aps.engine.pool import N_PEAKS, SPARE, Lease, Pool


class Allocator:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, n_bytes: int) -> np.ndarray:
        self.sizes.append(n_bytes)
        return np.empty(n_bytes, np.uint8)


def batch(pool: Pool, sizes: list[int]) -> None:
    """All buffers of a batch in use at once."""
    lease = Lease(pool)
    for n in sizes:
        assert len(lease.take(n)) == n
    lease.end()
    pool.end_batch()


def test_equal_batches_use_the_same_memory():
    alloc = Allocator()
    pool = Pool(alloc)
    for _ in range(50):
        batch(pool, [1000, 1000, 300, 0])
    assert sorted(alloc.sizes) == [0, 300, 1000, 1000]
    assert pool.n_bytes == 2300


@pytest.mark.parametrize(
    "large, small", [([5000, 5000], [4500]), ([5000], [3000]), ([1600, 1600, 500], [1600, 200])], ids=str
)
def test_alternating_batches_do_not_allocate_again(large, small):
    """As the two models of a GAN: the larger one sets the bound, and the memory of both fits under it."""
    alloc = Allocator()
    pool = Pool(alloc)
    for _ in range(20):
        batch(pool, small)
        batch(pool, large)
    n_first = len(alloc.sizes)
    for _ in range(50):
        batch(pool, large)
        batch(pool, small)
    assert len(alloc.sizes) == n_first
    assert pool.n_bytes <= sum(large)


def test_buffers_in_use_are_never_handed_out_twice():
    pool = Pool(Allocator())
    first, second = Lease(pool), Lease(pool)
    a, b = first.take(100), second.take(100)
    assert not np.shares_memory(a, b)
    first.end()
    c = second.take(100)
    assert np.shares_memory(a, c) and not np.shares_memory(b, c)
    second.end()
    second.end()  # gives nothing back twice
    assert pool.n_bytes == 200


def test_smallest_that_fits_and_none_that_is_much_too_large():
    alloc = Allocator()
    pool = Pool(alloc)
    batch(pool, [1000, 1100, 10_000])
    lease = Lease(pool)
    lease.take(990)
    lease.take(990)
    assert alloc.sizes == [1000, 1100, 10_000], "1000 and 1100 serve"
    lease.end()
    large = Lease(pool)
    large.take(10_000)
    assert len(alloc.sizes) == 3, "and 10000 was left for this"


def test_a_large_batch_is_forgotten_after_some_small_ones():
    pool = Pool(Allocator())
    batch(pool, [1 << 20])
    for _ in range(N_PEAKS + 1):
        batch(pool, [100])
    assert pool.n_bytes <= 100 * SPARE


def test_memory_stays_bounded_when_sizes_change_in_every_batch():
    alloc = Allocator()
    pool, rng = Pool(alloc), random.Random(1)
    for _ in range(300):
        batch(pool, [rng.randrange(1, 100_000) for _ in range(10)])
        assert pool.n_bytes <= 10 * 100_000 * SPARE
    assert sum(alloc.sizes) > 20 * pool.n_bytes, "the sizes differed indeed"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_idle_memory_never_exceeds_what_a_batch_has_taken(actions):
    """Leases that begin and end in any order; the bound is all that was taken in the batch."""
    pool = Pool(Allocator())
    leases: list[tuple[Lease, np.ndarray]] = []
    taken = 0
    for takes, n in actions:
        if takes or not leases:
            lease = Lease(pool)
            leases.append((lease, lease.take(n)))
            taken += n
        else:
            leases.pop(n % len(leases))[0].end()
            in_use = sum(len(array.base if array.base is not None else array) for _, array in leases)
            assert pool.n_bytes <= max(taken, in_use)
        arrays = [array for _, array in leases]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_cost_does_not_grow_with_what_lies_idle():
    """Many buckets, of a few bytes each, are on their way at once if bucket_mb is tiny."""

    def n_calls(n_idle: int) -> int:
        pool = Pool(Allocator())
        lease = Lease(pool)
        for i in range(n_idle):
            lease.take(1 + i % 97)
        lease.end()
        calls = 0

        def count(frame, event, arg):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        lease.take(50)
        lease.end()
        sys.setprofile(None)
        return calls

    assert n_calls(3000) == n_calls(100)
