"""Connections of our own, over the loopback: several ranks in one process, since nothing here ever blocks.

A process has one listener; here every rank gets one of its own.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from horovod_aps.errors import LostPeer
from horovod_aps.transports import sockets
from horovod_aps.transports.hosts import HostedTransport
from horovod_aps.transports.sockets import HELLO, Listener, SocketTransport

MAX_LOOKS = 50_000  # before a test gives up; nothing here is measured by the clock


listeners: dict[int, Listener] = {}


class Rank(SocketTransport):
    """A rank as in a process of its own."""

    def ready(self) -> bool:
        sockets._listener = listener(self.rank)
        return super().ready()


def listener(rank: int) -> Listener:
    if rank not in listeners:
        listeners[rank] = Listener()
    return listeners[rank]


@pytest.fixture(autouse=True)
def loopback(monkeypatch) -> Iterator[None]:
    """Listeners on 127.0.0.1, and nothing left behind."""
    monkeypatch.setattr(sockets, "own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(sockets, "_listener", None)
    yield
    for one in listeners.values():
        one._socket.close()
    listeners.clear()
    sockets.farewells._open.clear()
    sockets.farewells._closed.clear()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(MAX_LOOKS):
        if condition():
            return
        time.sleep(0)
    raise AssertionError("nothing moves any more")


def words(size: int) -> np.ndarray:
    return np.sum([listener(rank).words(rank, size) for rank in range(size)], axis=0, dtype=np.int32)


def world(size: int, name: bytes = b"n" * 16, connect: bool = True) -> list[Rank]:
    transports = [Rank(rank, words(size), name) for rank in range(size)]
    if connect:
        until(lambda: all([transport.ready() for transport in transports]))
    return transports


def all_heard(transports: list[Rank], n: int) -> list[list[tuple[int, bytes]]]:
    """Everything that each rank hears, until each has heard `n` messages."""
    heard: list[list[tuple[int, bytes]]] = [[] for _ in transports]

    def listen() -> bool:
        for transport, so_far in zip(transports, heard):
            so_far += transport.heard()
        return all(len(so_far) >= n for so_far in heard)

    until(listen)
    return heard


def n_open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 3])
def test_control_messages_of_any_size_arrive_in_order(size):
    transports = world(size)
    lengths = [1, 12, 5_000_000, 3, 70_000, 1]
    for i, n in enumerate(lengths):
        for transport in transports:
            transport.post(bytes([transport.rank, i]) * n)
    for transport, heard in zip(transports, all_heard(transports, len(lengths) * (size - 1))):
        for other in range(size):
            wanted = [] if other == transport.rank else [bytes([other, i]) * n for i, n in enumerate(lengths)]
            assert [message for rank, message in heard if rank == other] == wanted


def pattern(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("n", [0, 1, 1000, 3_000_001])
def test_transfers_in_all_directions_at_once(size, n):
    """Far more than the kernel's buffers hold; rank k gets k bytes more."""
    transports = world(size)
    results = [{k: np.zeros(n + t.rank, np.uint8) for k in range(size) if k != t.rank} for t in transports]
    requests = [
        t.transfer({k: pattern(n + k, 10 * t.rank + k) for k in results[t.rank]}, results[t.rank], 3)
        for t in transports
    ]
    until(lambda: all([request.done() for request in requests]))
    for rank, result in enumerate(results):
        for source, array in result.items():
            np.testing.assert_array_equal(array, pattern(n + rank, 10 * source + rank))


def test_transfers_with_one_tag_match_in_order_and_tags_do_not_mix():
    """Three are wanted before they come, the others come early, among control messages and another tag."""
    a, b = world(2)
    got = {tag: [np.zeros(4000, np.uint8) for _ in range(6)] for tag in (0, 7)}
    wanted = [b.transfer({}, {0: array}, 0) for array in got[0][:3]]
    sent = []
    for i in range(6):
        for tag in (7, 0):
            sent.append(a.transfer({1: pattern(4000, 10 * tag + i)}, {}, tag))
        a.post(b"%d" % i)
    assert all_heard([b], 6)[0] == [(0, b"%d" % i) for i in range(6)]
    wanted += [b.transfer({}, {0: array}, 0) for array in got[0][3:]]
    wanted += [b.transfer({}, {0: array}, 7) for array in got[7]]
    until(lambda: all([request.done() for request in [*sent, *wanted]]))
    for tag, arrays in got.items():
        for i, array in enumerate(arrays):
            np.testing.assert_array_equal(array, pattern(4000, 10 * tag + i), err_msg=f"tag {tag}, number {i}")
    assert not b._peers[0].early and not b._peers[0].wanted


def test_transfer_of_another_size_than_expected_is_an_error():
    a, b = world(2)
    request = b.transfer({}, {0: np.zeros(3, np.uint8)}, 0)
    a.transfer({1: np.zeros(4, np.uint8)}, {}, 0)
    with pytest.raises(LostPeer, match="rank 0 has sent 4 bytes where 3 were expected"):
        until(request.done)


def test_two_worlds_at_once_do_not_mix():
    first, second = world(2, b"1" * 16), world(2, b"2" * 16)
    first[0].post(b"first")
    second[0].post(b"second")
    assert all_heard([first[1], second[1]], 1) == [[(0, b"first")], [(0, b"second")]]


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 10_000,
        HELLO.pack(b"wrong!", b"n" * 16, 1),
    ],
    ids=["nothing", "http", "flood", "wrong secret"],
)
def test_a_stranger_is_refused_and_does_no_harm(hello):
    address = listener(0)._socket.getsockname()
    before = world(2, b"1" * 16)
    with socket.create_connection(address) as stranger:
        stranger.sendall(hello)
        a, b = world(2)
        for t in (a, b, *before):
            t.post(b"hello")
        assert all_heard([a, b, *before], 1) == [[(1, b"hello")], [(0, b"hello")]] * 2
        if len(hello) >= HELLO.size:
            stranger.settimeout(10)
            with pytest.raises(ConnectionError):  # closed or reset
                if stranger.recv(1) == b"":
                    raise ConnectionError
        assert not listener(0)._arrived
    until(lambda: listener(0).take(b"n" * 16, 1) is None and not listener(0)._strangers)


def test_a_peer_that_dies_is_noticed():
    transports = world(3)
    request = transports[0].transfer({}, {1: np.zeros(5, np.uint8)}, 0)
    transports[1].post(b"last words")
    assert all_heard([transports[0], transports[2]], 1) == [[(1, b"last words")]] * 2
    for peer in transports[1]._peers.values():
        peer.socket.close()  # as the kernel does for a process that is killed
    with pytest.raises(LostPeer, match="rank 1 has gone in the middle"):
        until(request.done)
    for rank in (0, 2):
        with pytest.raises(LostPeer, match="connection to rank 1 has ended"):
            until(lambda rank=rank: bool(transports[rank].heard()))
        assert transports[rank].gone() == set()


def test_last_words_are_heard_before_the_end_of_the_connection():
    a, b = world(2)
    a.post(b"last words")
    until(lambda: not a._peers[1].outbox)
    a._peers[1].socket.close()
    assert all_heard([b], 1) == [[(0, b"last words")]]


def test_nobody_there_is_an_error_after_the_deadline(monkeypatch):
    a, _ = world(2, connect=False)
    a._deadline = time.monotonic() - 1
    with pytest.raises(LostPeer, match="rank 1 cannot be reached at 127.0.0.1"):
        a.ready()


def test_a_call_that_is_cut_off_is_made_again(monkeypatch):
    class CutOff(socket.socket):
        n_left = 3

        def send(self, *args):
            if CutOff.n_left:
                CutOff.n_left -= 1
                raise ConnectionResetError
            return super().send(*args)

    monkeypatch.setattr(socket, "socket", CutOff)
    a, b, c = world(3)
    assert CutOff.n_left == 0
    b.post(b"here")
    assert all_heard([a, c], 1) == [[(1, b"here")]] * 2


def test_those_that_are_connected_hear_of_one_that_is_not(monkeypatch):
    """Ranks 1 and 2 do not reach each other; rank 0 reaches both, and would wait for what they say first."""
    below = world(3, connect=False)
    call = below[2]._call
    monkeypatch.setattr(below[2], "_call", lambda other: None if other == 1 else call(other))
    ranks = [HostedTransport(one, "", host) for one, host in zip(below, "aab")]
    until(lambda: not any([rank.ready() for rank in ranks]) and below[0].ready())
    for lost in (1, 2):
        below[lost]._deadline = 0
        with pytest.raises(LostPeer, match=f"rank {3 - lost} cannot be reached"):
            ranks[lost].ready()

    def is_told() -> bool:
        try:
            return ranks[0].ready()
        except LostPeer as error:
            return "could not go on: LostPeer: rank" in str(error) and "cannot be reached" in str(error)

    until(is_told)
    for rank in ranks:
        with pytest.raises(LostPeer, match="cannot be reached"):
            rank.ready()


def test_close_takes_leave_and_leaves_nothing_open():
    """A rank that closes first says farewell and goes on listening until the others have closed, too."""
    words(3)  # makes the listeners
    n_before = n_open_files()
    for _ in range(3):
        transports = world(3)
        assert n_open_files() > n_before
        for number, transport in enumerate(transports):
            transport.close()
            transport.close()
            assert sockets.farewells.sweep() == number + 1 or number == 2
            if number < 2:
                until(
                    lambda number=number, transports=transports: (
                        sockets.farewells.sweep(),
                        transports[2].heard(),
                        transports[2].gone() == set(range(number + 1)),
                    )[-1]
                )
        until(lambda: sockets.farewells.sweep() == 0)
        assert n_open_files() == n_before


def test_close_delivers_what_was_sent_before():
    a, b = world(2)
    message = bytes(3_000_000)
    a.post(message)
    a.close()
    heard = []

    def move() -> bool:
        sockets.farewells.sweep()
        heard.extend(b.heard())
        return bool(heard) and b.gone() == {0}

    until(move)
    assert heard == [(0, message)]


def test_close_before_anyone_has_come_leaves_nothing_open():
    words(2)  # makes the listeners
    n_before = n_open_files()
    for transport in world(2, connect=False):
        transport.close()
    until(lambda: sockets.farewells.sweep() == 0)
    del transport
    assert n_open_files() == n_before


def test_forked_child_listens_on_its_own():
    mine = sockets.listener()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, sockets.listener()._socket.getsockname()[1].to_bytes(2, "little"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert int.from_bytes(os.read(read, 2), "little") != mine._socket.getsockname()[1]
    mine._socket.close()
    os.close(read)
    os.close(write)
