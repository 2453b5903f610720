"""Memory that the ranks of one host share, and the order in which buckets use it.

The memory has no name in any file system: the first rank of a host makes it (`memfd_create`), the others open it
through `/proc`, and it is gone with the last process that has it, however that ends. It grows as buckets need it; every
rank allocates the pages before it touches them, so that a lack of memory is an error and not a signal.

Buckets take it in turns that are the same on all ranks of the host. Each rank puts its gradients, piece by piece, into
its own part of an *area*, and adds up its share of everybody's. What travels lies in a *slot* until all have read it.
Counters say how far each rank is: flags[what, slot, place]. Only their own rank writes them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from horovod_aps.errors import OutOfSharedMemory
from horovod_aps.kernels.native import library
from horovod_aps.transports.base import Bytes

N_AREAS = 2  # pieces that may be on their way between the ranks of a host
N_SLOTS = 4  # buckets whose packed bytes may be in the memory
LINE = 64  # bytes between flags, so that ranks do not write to the same cache line
MFD_CLOEXEC = 1
N_MARK = 16  # bytes at the start, by which a process knows that it has opened the right memory
_NAME = re.compile(r"(/proc/\d+/fd/\d+) ([0-9a-f]{32})")
WRITTEN, SUMMED, SCANNED, FILLED, READ, N_FLAGS = range(6)


def in_words(error: Exception) -> str:
    """Why something did not work, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class Until:
    """A request that is done when a condition holds."""

    memory = None
    """That the network works on."""

    def __init__(self, condition: Callable[[], bool], behind: Callable[[], Iterable[int]]) -> None:
        """`behind` are the places of the ranks whose flags do not say so yet."""
        self._condition, self.behind = condition, behind

    def done(self) -> bool:
        return self._condition()


def _new_descriptor(name: str) -> int:
    """Of memory without a name in any file system; OSError if there is none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, MFD_CLOEXEC)
    # Pythons that were built with a C library older than 2.27 lack it, however new the one is that they run with.
    try:
        create = ctypes.CDLL(None, use_errno=True).memfd_create
    except AttributeError:
        raise OSError(errno.ENOSYS, "the C library has no memfd_create") from None
    descriptor = int(create(name.encode(), MFD_CLOEXEC))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


class HostMemory:
    """The memory itself: made by one process, opened by others of the same host."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._map, self.n_bytes = descriptor, np.zeros(0, np.uint8), 0
        weakref.finalize(self, os.close, descriptor)
        self.grow(LINE)

    @classmethod
    def make(cls) -> HostMemory:
        """New memory; OSError if there is none."""
        one = cls(_new_descriptor("horovod_aps"))
        one.array(0, N_MARK)[:] = np.frombuffer(os.urandom(N_MARK), np.uint8)
        return one

    @classmethod
    def open(cls, name: str) -> HostMemory:
        """What another process of this host has made and named; OSError if it is not to be found."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise OSError(0, f"{name!r} is no memory of horovod_aps")
        path, mark = found.groups()
        if not os.readlink(path).startswith("/memfd:horovod_aps"):  # of another container, with processes of its own
            raise OSError(0, f"{path} is something else here")
        one = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        if one.array(0, N_MARK).tobytes().hex() != mark:
            raise OSError(0, f"{path} is something else here")
        return one

    @property
    def name(self) -> str:
        """How other processes of the host open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor} {self.array(0, N_MARK).tobytes().hex()}"

    def grow(self, n_bytes: int) -> None:
        """Have at least so many bytes; arrays of before stay valid. OSError if there is not enough memory."""
        if n_bytes > self.n_bytes:
            os.posix_fallocate(self._descriptor, 0, n_bytes)  # never makes it smaller
            self._map = np.frombuffer(mmap.mmap(self._descriptor, n_bytes), np.uint8)
            self.n_bytes = n_bytes

    def array(self, start: int, n_bytes: int) -> Bytes:
        return self._map[start : start + n_bytes]


@dataclass(frozen=True)
class Need:
    """What a bucket takes of the memory: bytes of one rank's part of an area, and of a slot."""

    n_pieces: int
    """That it passes through the areas, at least one: that keeps buckets in order."""
    part: int
    slot: int


class Room:
    """The memory of a host as its ranks use it; `place` is this one's among them."""

    def __init__(self, memory: HostMemory, place: int, n_places: int) -> None:
        self.place, self.n_places = place, n_places
        self._memory = memory
        self._n_visits = self._n_pieces = 0  # that have been given numbers
        self._part = self._slot = 0  # bytes
        self._front = 2 * LINE + N_FLAGS * N_SLOTS * n_places * LINE  # bytes: the mark, the bell and the flags
        memory.grow(self._front)
        self._flags = memory.array(LINE, self._front - LINE)
        self._bell = self._flags.ctypes.data
        self._address = self._bell + LINE
        self._mine = np.zeros((N_FLAGS, N_SLOTS), np.int64)  # what this rank's flags say

    def visit(self, need: Need) -> Visit:
        """The next bucket's turn; buckets come in the same order on all ranks."""
        one = Visit(self, self._n_visits, self._n_pieces, need)
        self._n_visits += 1
        self._n_pieces += need.n_pieces
        return one

    def set(self, flag: int, slot: int, value: int) -> None:
        """Let the others see what was written before."""
        self._mine[flag, slot] = value
        first = self._address + self._line(flag, slot, 0)
        library().aps_set_flag(first, self.n_places, LINE, self.place, value, self._bell)

    def heard(self) -> int:
        """How often all ranks have come to the same point, for `rest`."""
        return int(library().aps_bell(self._bell))

    def rest(self, heard: int, seconds: float) -> None:
        """Sleep until they do so once more than `heard`, or for so long."""
        library().aps_rest(self._bell, heard, int(seconds * 1e9))

    def mine(self, flag: int, slot: int) -> int:
        return int(self._mine[flag, slot])

    def reached(self, flag: int, slot: int, value: int) -> bool:
        """Whether the flags of all ranks say so much; then what they wrote before can be read."""
        if self._mine[flag, slot] < value:
            return False
        return library().aps_least_flag(self._address + self._line(flag, slot, 0), self.n_places, LINE) >= value

    def behind(self, flag: int, slot: int, value: int) -> frozenset[int]:
        """The places of the ranks whose flags do not say so much."""
        lines = {place: self._address + self._line(flag, slot, place) for place in range(self.n_places)}
        return frozenset(place for place, line in lines.items() if library().aps_least_flag(line, 1, LINE) < value)

    def until(self, flag: int, slot: int, value: int) -> Until:
        """Until the flags of all ranks say so much."""
        return Until(partial(self.reached, flag, slot, value), partial(self.behind, flag, slot, value))

    def _line(self, flag: int, slot: int, place: int) -> int:
        return ((flag * N_SLOTS + slot) * self.n_places + place) * LINE

    def make_fit(self, need: Need, n_earlier: int) -> bool:
        """Whether the memory is large enough; grows it once all ranks have done with all earlier buckets.

        OutOfSharedMemory if it cannot grow; then it is as it was.
        """
        if need.part <= self._part and need.slot <= self._slot:
            return True
        if not all(self.reached(READ, slot, value) for slot, value in _read(n_earlier)):
            return False
        part, slot_bytes = max(self._part, need.part), max(self._slot, need.slot)
        n_bytes = self._front + N_AREAS * self.n_places * part + N_SLOTS * slot_bytes
        try:
            self._memory.grow(n_bytes)
        except (OSError, MemoryError) as error:
            raise OutOfSharedMemory(n_bytes, self.n_places, in_words(error)) from None
        self._part, self._slot = part, slot_bytes
        return True

    def part(self, piece: int, place: int) -> Bytes:
        """Where a rank of the host puts its gradients."""
        start = (piece % N_AREAS * self.n_places + place) * self._part
        return self._memory.array(self._front + start, self._part)

    def slot(self, number: int) -> Bytes:
        start = N_AREAS * self.n_places * self._part + number * self._slot
        return self._memory.array(self._front + start, self._slot)


class Visit:
    """One bucket in the room."""

    def __init__(self, room: Room, number: int, first_piece: int, need: Need) -> None:
        self._room, self._number, self._first, self._need = room, number, first_piece, need
        self._slot = number % N_SLOTS

    def turn(self) -> Until:
        """Until earlier buckets are through the areas and out of the slot."""
        return Until(self._is_my_turn, self._in_my_way)

    def _is_my_turn(self) -> bool:
        room = self._room
        return (
            room.mine(WRITTEN, 0) == self._first
            and room.reached(READ, self._slot, self._number + 1 - N_SLOTS)
            and room.make_fit(self._need, self._number)
        )

    def _in_my_way(self) -> frozenset[int]:
        flags = [(self._slot, self._number + 1 - N_SLOTS), *_read(self._number)]
        return frozenset().union(*(self._room.behind(READ, slot, value) for slot, value in flags))

    @property
    def content(self) -> Bytes:
        """The slot, from one's turn until `read`."""
        return self._room.slot(self._slot)

    def free(self, piece: int) -> Until:
        """Until this rank may write a piece."""
        return self._room.until(SUMMED, 0, self._first + piece + 1 - N_AREAS)

    def part(self, piece: int, place: int) -> Bytes:
        return self._room.part(self._first + piece, place)

    def wrote(self, piece: int) -> None:
        self._room.set(WRITTEN, 0, self._first + piece + 1)

    def written(self, piece: int) -> Until:
        """Until all have written a piece, and this rank has summed all before."""
        room, number = self._room, self._first + piece
        return Until(
            lambda: room.mine(SUMMED, 0) == number and room.reached(WRITTEN, 0, number + 1),
            partial(room.behind, WRITTEN, 0, number + 1),
        )

    def summed(self, piece: int) -> None:
        self._room.set(SUMMED, 0, self._first + piece + 1)

    def tell(self, flag: int) -> None:
        """Say that this rank has come so far: SCANNED, FILLED or READ."""
        self._room.set(flag, self._slot, self._number + 1)

    def all_told(self, flag: int) -> Until:
        return self._room.until(flag, self._slot, self._number + 1)


def _read(n_visits: int) -> list[tuple[int, int]]:
    """What READ says of each slot when all ranks have done with so many visits."""
    latest = [n_visits - 1 - (n_visits - 1 - slot) % N_SLOTS for slot in range(N_SLOTS)]
    return [(slot, last + 1) for slot, last in enumerate(latest) if last >= 0]
