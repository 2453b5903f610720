"""Several conversations over one transport. Oracle: the same conversations over transports of their own."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from horovod_aps.errors import LostPeer
from horovod_aps.transports.local import LocalTransport
from horovod_aps.transports.shared import Channel, SharedTransport


def channels(names: list[str], size: int = 2) -> list[dict[str, Channel]]:
    shared = [SharedTransport(transport) for transport in LocalTransport.world(size)]
    return [{name: one.channel(name) for name in names} for one in shared]


def test_channels_look_like_the_transport():
    a, b = channels(["x"])
    assert (a["x"].rank, b["x"].rank) == (0, 1)
    assert all(one["x"].size == 2 and one["x"].memory == "host" and one["x"].ready() for one in (a, b))
    assert a["x"].gone() == set()


def test_messages_reach_their_channel_only_and_in_order():
    a, b, c = channels(["x", "y", ""], 3)
    for i in range(3):
        a["x"].post(b"ax%d" % i)
        a["y"].post(b"ay%d" % i)
        b["x"].post(b"bx%d" % i)
    a["y"].post(b"")
    assert c[""].heard() == []
    assert c["y"].heard() == [(0, b"ay0"), (0, b"ay1"), (0, b"ay2"), (0, b"")]
    heard = c["x"].heard()
    assert [message for rank, message in heard if rank == 0] == [b"ax0", b"ax1", b"ax2"]
    assert [message for rank, message in heard if rank == 1] == [b"bx0", b"bx1", b"bx2"]
    assert c["x"].heard() == c["y"].heard() == []


def test_one_that_cannot_go_on_ends_all():
    """Transfers of another one would meet those that were given up."""
    a, b = channels(["x", "y"])
    a["x"].shared.fail("MemoryError: none left")
    for one in a.values():
        with pytest.raises(LostPeer, match="this rank could not go on: MemoryError: none left"):
            one.ready()
    assert b["y"].ready()
    for call in (b["y"].heard, b["x"].heard, b["x"].ready):
        with pytest.raises(LostPeer, match="rank 0 could not go on: MemoryError: none left"):
            call()


def test_a_thread_that_comes_in_between_loses_no_message():
    """It drives an exchange that is over, or the next one."""
    a, b = channels(["x"])
    heard, threads = [], []

    class Mail(dict):
        def setdefault(self, *args):
            box = super().setdefault(*args)
            threads.append(threading.Thread(target=lambda: heard.extend(a["x"].heard())))
            threads[-1].start()
            threads[-1].join(0.2)
            return box

    a["x"].shared._mail = Mail()
    b["x"].post(b"one")
    heard += a["x"].heard()
    for thread in threads:
        thread.join()
    assert heard == [(1, b"one")]


def test_a_channel_that_is_made_late_hears_what_came_before():
    shared = [SharedTransport(transport) for transport in LocalTransport.world(2)]
    shared[0].channel("late").post(b"early bird")
    assert shared[1].channel("other").heard() == []
    assert shared[1].channel("late").heard() == [(0, b"early bird")]


def test_transfers_go_straight_through():
    a, b = channels(["x", "y"])
    got = np.zeros(3, np.uint8)
    request = b["x"].transfer({}, {0: got}, 5)
    assert not request.done()
    a["x"].transfer({1: np.array([1, 2, 3], np.uint8)}, {}, 5)
    assert request.done()
    np.testing.assert_array_equal(got, [1, 2, 3])


def test_closing_a_channel_leaves_the_others():
    a, b = channels(["x", "y"])
    a["x"].close()
    a["y"].post(b"still here")
    assert b["y"].heard() == [(0, b"still here")]
