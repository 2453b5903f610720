"""Memory that the ranks of a host cannot share, or not as much as they need, and ranks that fail while they connect.

Emulated ranks, real memory; a call of the system is made to fail. Oracle: the flat exchange, bit for bit, where ranks
do without; else an error on every rank within a bounded number of looks. Nobody may wait for a rank that has failed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_oracle import assert_same_bits, hosted_exchanges, hosted_worlds, make_gradients, reduce_all

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.reductions import two_level
from horovod_aps.errors import LostPeer, OutOfSharedMemory, for_users
from horovod_aps.options import Options
from horovod_aps.transports import memory as memory_module
from horovod_aps.transports.memory import HostMemory

HOSTS = "aabb"
N_OPENING = 8  # calls of posix_fallocate while four ranks connect: each has the first line, then its room
MAX_LOOKS = 1000


class Allocations:
    """`posix_fallocate`, of which one call fails."""

    def __init__(self, number: int, error: Exception) -> None:
        self.number, self.error = number, error
        self.asked: list[int] = []
        self._allocate = os.posix_fallocate

    def __call__(self, descriptor: int, start: int, n_bytes: int) -> None:
        self.asked.append(n_bytes)
        if len(self.asked) == self.number + 1:
            raise self.error
        self._allocate(descriptor, start, n_bytes)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def exchanges(**options: Any) -> list[Exchange]:
    return hosted_exchanges(HOSTS, Options(4, 3, **options))


def submit(ranks: Sequence[Exchange]) -> list[Layer]:
    x = np.ones(3000, np.float32)
    layers = [Layer("x", x.shape, 0, x.ctypes.data, x.ctypes.data, 1.0, x) for _ in ranks]
    for rank, layer in zip(ranks, layers):
        rank.self_driven = True
        rank.submit(layer)
    return layers


def errors_of(ranks: Sequence[Exchange]) -> list[Exception]:
    """What every rank gets, within so many looks."""
    layers, errors = submit(ranks), {}
    waits = [rank.steps() for rank in ranks]
    for _ in range(MAX_LOOKS):
        for number in set(range(len(ranks))) - set(errors):
            try:
                next(waits[number])
            except Exception as error:
                errors[number] = error
    assert sorted(errors) == list(range(len(ranks))), "the others wait"
    assert not any(layer.done for layer in layers)
    return [errors[number] for number in range(len(ranks))]


@pytest.fixture
def grads() -> list[dict[str, np.ndarray]]:
    return make_gradients((5, 1000), len(HOSTS))


def assert_flat(grads: list[dict[str, np.ndarray]], why: str) -> None:
    """All ranks exchange with all others, for the same reason, and get the sums of those who want that."""
    ranks = exchanges()
    wanted = reduce_all(grads, exchanges(hierarchy="flat"))
    for mine, theirs in zip(reduce_all(grads, ranks), wanted):
        for name in mine:
            assert_same_bits(mine[name], theirs[name], name)
    reasons = {rank.transport.hosts.why_flat for rank in ranks}
    assert len(reasons) == 1 and why in reasons.pop()
    assert all(rank.room is None for rank in ranks)


def without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Pythons are that were built where the C library did not have it."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "MFD_CLOEXEC")


def test_python_without_memfd_create_shares_memory(grads, monkeypatch) -> None:
    wanted = reduce_all(grads, exchanges())
    without_memfd(monkeypatch)
    ranks = exchanges()
    for mine, theirs in zip(reduce_all(grads, ranks), wanted):
        for name in mine:
            assert_same_bits(mine[name], theirs[name], name)
    assert all(rank.room is not None for rank in ranks)
    memory = HostMemory.make()
    assert not os.get_inheritable(memory._descriptor)  # a program that a rank starts must not keep it


@pytest.mark.parametrize("why", ["has no memfd_create", os.strerror(errno.EPERM)])
def test_system_without_memfd_create_means_flat(why: str, grads, monkeypatch, caplog) -> None:
    """An old C library, or a sandbox that forbids it."""
    without_memfd(monkeypatch)

    class Library:
        def __init__(self, *_: Any, **__: Any) -> None:
            if "has no" not in why:
                self.memfd_create = self._refuse

        def _refuse(self, *_: Any) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(memory_module.ctypes, "CDLL", Library)
    assert_flat(grads, why)
    assert why in caplog.text
    for error in errors_of(exchanges(hierarchy="two-level")):
        assert isinstance(error, ValueError) and why in str(error)


@pytest.mark.parametrize("error", [no_space(), MemoryError("none left"), ValueError("odd")], ids=lambda one: str(one))
@pytest.mark.parametrize("number", range(N_OPENING))
def test_memory_that_a_rank_cannot_have_means_flat(number: int, error: Exception, grads, monkeypatch) -> None:
    """Whichever call fails, on whichever rank; with hierarchy="two-level" all ranks get an error that says why."""
    why = getattr(error, "strerror", None) or str(error)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing := Allocations(number, error))
        assert_flat(grads, why)
        assert number < len(failing.asked) <= N_OPENING
    monkeypatch.setattr(os, "posix_fallocate", Allocations(number, error))
    errors = errors_of(exchanges(hierarchy="two-level"))
    assert all(isinstance(one, ValueError) for one in errors) and len(set(map(str, errors))) == 1
    assert 'hierarchy="two-level" cannot be' in str(errors[0]) and why in str(errors[0])


def test_opening_takes_as_many_calls_as_are_made_to_fail(monkeypatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", calls := Allocations(-1, no_space()))
    ranks = exchanges()
    while not all([rank.transport.ready() for rank in ranks]):
        pass
    assert len(calls.asked) == N_OPENING


@pytest.mark.parametrize("n_rounds", range(4))
@pytest.mark.parametrize("error", [OSError("broken"), LostPeer("broken"), MemoryError("broken")], ids=repr)
def test_rank_that_fails_while_ranks_connect_is_an_error_on_all(n_rounds: int, error: Exception, monkeypatch) -> None:
    """While it joins the network, and in each of the rounds after that; the others may be past the last one."""
    ranks = exchanges()
    weak = ranks[1].transport
    what, name = (weak, "_conclude") if n_rounds else (weak._transport, "ready")
    real = getattr(what, name)

    def fail(*args: Any) -> Any:
        if weak._n_rounds == n_rounds:
            raise error
        return real(*args)

    monkeypatch.setattr(what, name, fail)
    errors = errors_of(ranks)
    assert errors[1] is error
    for one in (errors[0], *errors[2:]):
        assert isinstance(one, LostPeer) and "rank 1 could not go on" in str(one) and "broken" in str(one)
    monkeypatch.undo()
    for one in errors_of(ranks):  # no retry waits, either
        assert isinstance(one, LostPeer) and "broken" in str(one)
    for rank, world in zip(ranks, hosted_worlds(HOSTS)):
        rank.connect(world)
    reduce_all(make_gradients((5,), len(HOSTS)), ranks)


def test_rank_that_fails_while_only_a_thread_looks_tells_the_others(monkeypatch) -> None:
    ranks = exchanges()
    monkeypatch.setattr(ranks[0].transport, "_conclude", lambda said: 1 / 0)
    submit(ranks)
    for _ in range(3):
        for rank in ranks:
            rank.drive(impatient=False, launch=False)
    for rank in ranks:
        with pytest.raises(LostPeer, match="could not go on: ZeroDivisionError"):
            list(rank.steps())


def test_foreign_first_message_is_an_error_on_all(monkeypatch) -> None:
    ranks = exchanges()
    stranger = ranks[2].transport
    monkeypatch.setattr(stranger, "_say", lambda text: stranger._transport.post(b"\x01\xfenonsense"))
    errors = errors_of(ranks)
    for number in (0, 1, 3):
        assert "rank 2 has sent 10 bytes" in str(errors[number])
    assert "could not go on" in str(errors[2])


# ---- growing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_memory_that_cannot_grow_is_the_same_error_on_all(number: int, monkeypatch) -> None:
    """A MemoryError for users: elastic training would take a lost peer, and retry into the same."""
    ranks = exchanges()
    reduce_all(make_gradients((64,), len(HOSTS)), ranks)
    monkeypatch.setattr(os, "posix_fallocate", failing := Allocations(number, no_space()))
    errors = errors_of(ranks)
    n_bytes = failing.asked[-1]
    assert n_bytes > 2 * 4 * 3000
    n_own = 0
    for error in errors:
        shown = for_users(error, "Somebody", KeyError)
        assert type(shown) is MemoryError and str(shown).startswith("Somebody: ")
        n_own += "this rank could not go on" in str(shown)
        for part in (f"{n_bytes:,} bytes", "2 ranks", "No space left", "bucket_mb", 'hierarchy="flat"', "limit"):
            assert part in str(shown), part
    assert n_own == 1
    for error in errors_of(ranks):
        assert type(for_users(error, "Somebody", KeyError)) is MemoryError
    monkeypatch.undo()
    for rank, world in zip(ranks, hosted_worlds(HOSTS)):
        rank.connect(world)
    reduce_all(make_gradients((64,), len(HOSTS)), ranks)


def test_room_that_cannot_grow_is_as_it_was(monkeypatch) -> None:
    """What is in it can still be read, and it grows later: nothing touches memory that was not had."""
    memory = HostMemory.make()
    room = memory_module.Room(memory, 0, 1)
    need = memory_module.Need(1, 1 << 12, 1 << 12)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", Allocations(0, no_space()))
        with pytest.raises(OutOfSharedMemory):
            room.make_fit(need, 0)
    assert memory.n_bytes == os.fstat(memory._descriptor).st_size < 1 << 12
    assert room.make_fit(need, 0)
    room.slot(3)[:] = 7


@pytest.mark.parametrize("hosts, n_kept", [("aabb", 2), ("aabbcc", 1)])
@pytest.mark.parametrize("n, n_piece", [(40_000, 40_000), (100_000, 65_536)])
def test_memory_is_as_large_as_documented(hosts: str, n_kept: int, n: int, n_piece: int, monkeypatch) -> None:
    """docs/how-it-works.md: 2 k 4 p + 4 c s bytes, here with a piece of 2^16 elements at most."""
    monkeypatch.setattr(two_level, "PIECE", 1 << 16)
    ranks = hosted_exchanges(hosts, Options(4, 3))
    reduce_all(make_gradients((n // 2, n // 2), len(hosts)), ranks)
    wanted = 2 * 2 * 4 * n_piece + 4 * n_kept * n
    for rank in ranks:
        assert wanted <= rank.room._memory.n_bytes < wanted + 30_000


# ---- kill -9 ----------------------------------------------------------------------------------------------

RANK = """
import os, sys
from horovod_aps.transports.memory import HostMemory, Need, Room
place, how = int(sys.argv[1]), sys.argv[2]
if how == "ctypes":
    del os.memfd_create
memory = HostMemory.make() if place == 0 else HostMemory.open(sys.stdin.readline().strip())
room = Room(memory, place, 2)
assert room.make_fit(Need(1, 1 << 16, 1 << 16), 0)
room.part(0, place)[:] = place + 1
print(memory.name, flush=True)
sys.stdin.readline()
print(room.part(0, 0).min() + room.part(0, 1).max(), flush=True)
sys.stdin.readline()
"""


def holders(inode: tuple[int, int]) -> set[int]:
    """The processes that have a file open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            status = link.stat()
        except OSError:  # it ends, or is another user's
            continue
        if (status.st_dev, status.st_ino) == inode:
            found.add(int(link.parts[2]))
    return found


@pytest.mark.parametrize("how", ["os", "ctypes"])
def test_kill_leaves_nothing_in_the_system(how: str) -> None:
    """Two ranks of a host, killed one after the other; the memory is the other's until it ends, too."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(place), how], **pipes) for place in range(2)]

    def tell(rank: subprocess.Popen[str], text: str) -> None:
        rank.stdin.write(f"{text}\n")
        rank.stdin.flush()

    try:
        name = ranks[0].stdout.readline().strip()
        tell(ranks[1], name)
        assert ranks[1].stdout.readline()
        status = os.stat(name.split()[0])
        inode = status.st_dev, status.st_ino
        assert holders(inode) == {rank.pid for rank in ranks}
        for rank in ranks:  # nothing that a rank shares with others has a name that could stay
            lines = Path(f"/proc/{rank.pid}/maps").read_text().splitlines()
            shared = [line for line in lines if line.split()[1] == "rw-s"]
            assert shared and all(line.endswith("/memfd:horovod_aps (deleted)") for line in shared), shared
        ranks[0].kill()
        ranks[0].wait()
        tell(ranks[1], "")
        assert ranks[1].stdout.readline().strip() == "3"
        ranks[1].kill()
        ranks[1].wait()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert holders(inode) == set()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        assert inode not in [(one.stat().st_dev, one.stat().st_ino) for one in Path(folder).iterdir()]
