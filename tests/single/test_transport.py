"""The transport that needs no network, by hand against what `transports.base` says; and how MPI's ends."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest

from horovod_aps.errors import LostPeer
from horovod_aps.kernels.memory import DeviceArray
from horovod_aps.transports import mpi
from horovod_aps.transports.local import LocalTransport


def filled(n: int, value: int = 0) -> np.ndarray:
    return np.full(n, value, np.uint8)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_post_reaches_all_others_once_and_in_order(size):
    world = LocalTransport.world(size)
    for number in range(3):
        for transport in world:
            transport.post(bytes([transport.rank, number]))
    for transport in world:
        assert transport.ready()
        heard = transport.heard()
        for source in range(size):
            wanted = [] if source == transport.rank else [bytes([source, number]) for number in range(3)]
            assert [message for rank, message in heard if rank == source] == wanted
        assert transport.heard() == []


def test_post_takes_any_length():
    world = LocalTransport.world(3)
    payloads = [b"", b"a", b"bc" * 1000]
    for transport, payload in zip(world, payloads):
        transport.post(payload)
    for rank, transport in enumerate(world):
        assert transport.heard() == [(other, payloads[other]) for other in range(3) if other != rank]


def test_request_is_not_done_before_the_other_has_sent():
    a, b = LocalTransport.world(2)
    got = filled(1, 7)
    request = a.transfer({}, {1: got}, 0)
    assert not request.done()
    b.transfer({0: filled(1, 5)}, {}, 1)
    assert not request.done() and got[0] == 7, "another tag is another operation"
    b.transfer({0: filled(1, 1)}, {}, 0)
    assert request.done() and got[0] == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_transfer_delivers_kth_part_to_rank_k(size):
    """Parts of 0, 1, 2, ... bytes; early ranks have sent before late ones ask."""
    world = LocalTransport.world(size)
    requests, results = [], []
    for rank, transport in enumerate(world):
        others = [k for k in range(size) if k != rank]
        results.append({k: filled(rank, 99) for k in others})
        requests.append(transport.transfer({k: filled(k, 10 * rank + k) for k in others}, results[-1], 0))
    for rank, request in enumerate(requests):
        assert request.done()
        for source, part in results[rank].items():
            np.testing.assert_array_equal(part, filled(rank, 10 * source + rank))


def test_sender_may_reuse_its_buffer_once_the_request_is_done():
    a, b = LocalTransport.world(2)
    sent, got = filled(3, 1), filled(3)
    assert a.transfer({1: sent}, {}, 0).done()
    sent[:] = 2
    assert b.transfer({}, {0: got}, 0).done()
    np.testing.assert_array_equal(got, filled(3, 1))


def test_transfers_with_one_tag_match_in_order_and_are_forgotten():
    a, b = LocalTransport.world(2)
    for turn in range(100):
        got = [filled(1), filled(1), filled(1)]
        early = a.transfer({}, {1: got[0]}, 4)
        for i in range(3):
            b.transfer({0: filled(1, turn + i)}, {}, 4)
        late = [a.transfer({}, {1: part}, 4) for part in got[1:]]
        assert early.done() and all(request.done() for request in late)
        assert [int(part[0]) for part in got] == [turn, turn + 1, turn + 2]
    assert not a._board


def test_nobody_is_gone_and_close_may_be_called_twice():
    a, b = LocalTransport.world(2)
    a.close()
    a.close()
    assert a.gone() == b.gone() == set()


def test_ranks_may_run_in_threads_of_their_own():
    """The progress thread drives one emulated rank while the program drives another: nothing may get lost."""
    world = LocalTransport.world(2)
    n_rounds, n_heard, undone = 3000, [0, 0], [0, 0]

    def run(rank: int) -> None:
        transport, other = world[rank], 1 - rank
        sent, requests = filled(2000, rank), []
        for _ in range(n_rounds):
            transport.post(b"x")
            requests.append(transport.transfer({other: sent}, {other: filled(2000)}, 0))
            n_heard[rank] += len(transport.heard())
        barrier.wait()
        n_heard[rank] += len(transport.heard())
        undone[rank] = sum(not request.done() for request in requests)

    barrier, interval = threading.Barrier(2), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert n_heard == [n_rounds] * 2 and undone == [0, 0]
    assert not world[0]._board


def test_mpi_that_ends_before_ranks_are_joined_is_a_lost_peer(monkeypatch):
    """Another rank has ended well; the thread that joins them waits for it in MPI, and never comes back."""
    over = threading.Event()
    transport = object.__new__(mpi.MpiTransport)
    transport._error, transport._comm = None, None
    transport._thread = threading.Thread(target=over.wait, daemon=True)
    transport._thread.start()
    assert not transport.ready()
    monkeypatch.setattr(mpi.usage, "why_over", "Horovod has been shut down")
    with pytest.raises(LostPeer, match="Horovod has been shut down"):
        transport.ready()
    over.set()


def test_mpi_sends_device_memory_in_one_piece_if_all_ranks_can():
    transport = object.__new__(mpi.MpiTransport)
    transport._piece = [mpi.MAX_MESSAGE, mpi.MAX_EAGER]
    host, device = np.zeros(200_000, np.uint8), DeviceArray(None, 4096, 200_000, np.uint8)
    for transport._all_direct, n_pieces in ((False, 4), (True, 1)):
        assert len(transport._chunks(host, 1)) == 4 and len(transport._chunks(host, 0)) == 1
        assert [len(piece) for piece in transport._chunks(device, 1)][:-1] == [mpi.MAX_EAGER] * (n_pieces - 1)
        assert sum(map(len, transport._chunks(device, 1))) == 200_000
    assert transport._chunks(device[:0], 1) == []


def test_mpi_keeps_memory_of_requests_that_nobody_keeps():
    """An exchange may be dropped while several of them are under way."""
    array = np.zeros(10, np.uint8)
    seen = weakref.ref(array)
    request = mpi._MpiRequest([object()], ({}, {1: array}))
    del array, request
    gc.collect()
    assert seen() is not None
    mpi._under_way.pop()
    assert seen() is None and mpi._MpiRequest([], ()).done() and not mpi._under_way
