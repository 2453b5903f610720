"""The transport that needs no network: each collective against what its definition says, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_aps.transports.local import LocalTransport


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_max_is_elementwise_over_ranks(size):
    world = LocalTransport.world(size)
    values = np.random.default_rng(0).integers(-40000, 40000, (size, 5)).astype(np.int32)
    requests = [transport.max(row, 0) for transport, row in zip(world, values)]
    for request in requests:
        assert request.done()
        np.testing.assert_array_equal(request.result(), values.max(axis=0))


def test_request_is_not_done_before_everyone_has_posted():
    a, b = LocalTransport.world(2)
    request = a.max(np.zeros(1, np.int32), 0)
    assert not request.done()
    b.max(np.ones(1, np.int32), 1)
    assert not request.done(), "another slot is another operation"
    b.max(np.ones(1, np.int32), 0)
    assert request.done() and request.result()[0] == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_alltoall_delivers_kth_part_to_rank_k(size):
    world = LocalTransport.world(size)
    bounds = np.array([0, *np.cumsum(np.arange(1, size + 1))])  # parts of 1, 2, ... bytes
    requests = []
    for rank, transport in enumerate(world):
        send = np.concatenate([np.full(k + 1, 10 * rank + k, np.uint8) for k in range(size)])
        requests.append(transport.alltoall(send, bounds, np.empty(0, np.uint8), 0))
    for rank, request in enumerate(requests):
        for source, part in enumerate(request.result()):
            np.testing.assert_array_equal(part, np.full(rank + 1, 10 * source + rank, np.uint8))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_allgather_keeps_rank_order_and_sizes(size):
    world = LocalTransport.world(size)
    sizes = list(range(size))
    requests = [
        transport.allgather(np.full(rank, rank, np.uint8), sizes, np.empty(0, np.uint8), 0)
        for rank, transport in enumerate(world)
    ]
    for request in requests:
        for source, part in enumerate(request.result()):
            np.testing.assert_array_equal(part, np.full(source, source, np.uint8))


def test_gather_bytes_takes_any_length():
    world = LocalTransport.world(3)
    payloads = [b"", b"a", b"bc" * 1000]
    requests = [transport.gather_bytes(payload, 0) for transport, payload in zip(world, payloads)]
    assert all(request.result() == payloads for request in requests)


def test_turns_of_one_slot_do_not_mix_and_are_forgotten():
    world = LocalTransport.world(2)
    for turn in range(100):
        requests = [transport.max(np.array([turn + rank], np.int32), 0) for rank, transport in enumerate(world)]
        assert [int(request.result()[0]) for request in requests] == [turn + 1] * 2
    assert len(world[0]._board) <= 2
