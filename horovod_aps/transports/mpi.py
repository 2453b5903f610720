"""The transport straight over MPI, used when Horovod itself runs on MPI with thread support.

Everything goes by point-to-point messages on a private communicator. Making that communicator is collective and blocks
until all its ranks have come, so a thread does it; freeing it waits until every rank has taken its leave, so that no
message can arrive for a communicator that is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_aps.config import gpu_way
from horovod_aps.errors import LostPeer
from horovod_aps.transports.base import Bytes
from horovod_aps.transports.farewell import FAREWELL, Farewells

TAG_CONTROL, TAG_DATA = 0, 1
MAX_TAG = 1 << 15  # what every MPI can count to
MAX_MESSAGE = 1 << 30  # bytes; MPI counts are int32
# Between hosts in pieces that Open MPI sends at once. Of a longer message it sends the rest only when the receiver has
# answered, and while Horovod's thread is in MPI as well, that answer waits behind the data of the other direction.
MAX_EAGER = 60 << 10


class _Usage:
    """Keeps MPI from ending while a thread of ours is in it.

    Horovod ends MPI on all ranks as soon as the first one leaves, in a thread of its own. Before anything else MPI then
    deletes what was attached to the communicator of this process alone, and that waits here until we are out.
    """

    def __init__(self) -> None:
        self.why_over = ""
        self._lock = threading.RLock()
        self._key: int | None = None

    def start(self, mpi: Any) -> None:
        """Be told of MPI's end."""
        with self._lock:
            if self._key is None:
                self._key = mpi.Comm.Create_keyval(delete_fn=self._deleted)
                mpi.COMM_SELF.Set_attr(self._key, self)

    def stop(self) -> None:
        """At the end of Python: no thread of ours uses MPI from here on."""
        with self._lock:
            self.why_over = self.why_over or "this process is ending"

    def _deleted(self, comm: Any, key: int, value: Any) -> None:
        with self._lock:
            self.why_over = self.why_over or "Horovod has been shut down on another rank in the middle of an exchange"

    def __enter__(self) -> None:
        """MPI does not end before `__exit__`; LostPeer if it has."""
        self._lock.acquire()
        if self.why_over:
            self._lock.release()
            raise LostPeer(self.why_over)

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


usage = _Usage()
farewells = Farewells(lambda: bool(usage.why_over))


def _leave() -> None:
    if not farewells.is_forked:
        farewells.take_leave()
        usage.stop()


def takes_device_memory() -> bool:
    """Whether the MPI that is loaded says that it knows CUDA; Open MPI does, of others it is not known."""
    if gpu_way() == "pinned":
        return False
    try:
        query = ctypes.CDLL(None).MPIX_Query_cuda_support
    except AttributeError:
        return False
    return bool(query())


class _MpiRequest:
    """MPI requests that finish together; keeps `buffers` alive until then, also if nobody keeps it."""

    def __init__(self, requests: list[Any], buffers: Any) -> None:
        self._requests, self._buffers = requests, buffers
        if requests:
            _under_way.add(self)

    def done(self) -> bool:
        if self._requests:
            from mpi4py import MPI

            with usage:
                if not MPI.Request.Testall(self._requests):
                    return False
        self._requests, self._buffers = [], None
        _under_way.discard(self)
        return True


_under_way: set[_MpiRequest] = set()


class MpiTransport:
    """Messages on a communicator of our own."""

    memory = "host"
    hosts = None

    def __init__(self, ranks: Sequence[int], tag: int = 0) -> None:
        """Join `ranks`, as they are numbered in the world; `tag` tells apart what is made at the same time."""
        from mpi4py import MPI

        self._mpi = MPI
        self.memory = "any" if takes_device_memory() else "host"
        self.rank, self.size = list(ranks).index(MPI.COMM_WORLD.rank), len(ranks)
        self._comm: Any = None
        self._piece: list[int] = []  # bytes that are sent at once to each rank
        self._all_direct = False  # whether all ranks' MPI takes device memory
        self._sends: list[tuple[Any, Any]] = []  # control messages under way, and what they send
        self._left: set[int] = set()
        self._said_farewell = False
        self._error: BaseException | None = None
        usage.start(MPI)
        farewells.opened(self)
        if len(farewells) == 1:  # registered late, so that it comes before Horovod's own end
            atexit.unregister(_leave)
            atexit.register(_leave)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._connect, args=(list(ranks), tag % MAX_TAG), name="horovod_aps connect", daemon=True
        )
        self._thread.start()

    def _connect(self, ranks: list[int], tag: int) -> None:
        try:
            mpi, world = self._mpi, self._mpi.COMM_WORLD
            comm = world.Create_group(world.group.Incl(ranks), tag=tag)
            near = comm.Split_type(mpi.COMM_TYPE_SHARED)
            places = mpi.Group.Translate_ranks(comm.group, list(range(self.size)), near.group)
            self._piece = [MAX_EAGER if place == mpi.UNDEFINED else MAX_MESSAGE for place in places]
            near.Free()
            # As a buffer: for an object mpi4py makes a further communicator and holds the interpreter meanwhile, which
            # the thread of another transport, that other ranks wait for, may need.
            direct = np.array([self.memory == "any"], np.int32)
            comm.Allreduce(mpi.IN_PLACE, direct, op=mpi.MIN)
            self._all_direct = bool(direct[0])
            self._comm = comm
        except BaseException as error:
            self._error = error

    def ready(self) -> bool:
        if self._thread is not None:
            if self._thread.is_alive():
                if usage.why_over:  # the others will never be there
                    raise LostPeer(usage.why_over)
                return False
            self._thread = None
        if self._error is not None:
            raise self._error
        return self._comm is not None

    def post(self, message: bytes) -> None:
        with usage:
            self._forget_sent()
            for step in range(1, self.size):
                target = (self.rank + step) % self.size
                self._sends.append((self._comm.Isend([message, self._mpi.BYTE], dest=target, tag=TAG_CONTROL), message))

    def _forget_sent(self) -> None:
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]

    def heard(self) -> list[tuple[int, bytes]]:
        messages = []
        with usage:
            status = self._mpi.Status()
            while (found := self._comm.Improbe(tag=TAG_CONTROL, status=status)) is not None:
                content = bytearray(status.Get_count(self._mpi.BYTE))
                source = status.Get_source()
                found.Recv([content, self._mpi.BYTE])
                if content == FAREWELL:
                    self._left.add(source)
                else:
                    messages.append((source, bytes(content)))
        return messages

    def gone(self) -> set[int]:
        return self._left

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> _MpiRequest:
        requests = []
        tag = TAG_DATA + tag
        with usage:
            # Start with the next rank so that no receiver is everyone's first target.
            for step in range(1, self.size):
                source = (self.rank - step) % self.size
                if source in incoming:
                    for chunk in self._chunks(incoming[source], source):
                        requests.append(self._comm.Irecv(chunk, source=source, tag=tag))
            for step in range(1, self.size):
                target = (self.rank + step) % self.size
                if target in outgoing:
                    for chunk in self._chunks(outgoing[target], target):
                        requests.append(self._comm.Isend(chunk, dest=target, tag=tag))
        return _MpiRequest(requests, (outgoing, incoming))

    def _chunks(self, array: Bytes, rank: int) -> list[Bytes]:
        """Pieces of a message, the same on both sides; none for an empty one."""
        in_device = self._all_direct and not isinstance(array, np.ndarray)  # where rendezvous spares copies
        piece = MAX_MESSAGE if in_device else self._piece[rank]
        return [array[start : start + piece] for start in range(0, len(array), piece)]

    def close(self) -> None:
        farewells.closed(self)

    def has_left(self) -> bool:
        """Say farewell, if not done yet, and free the communicator once all others have."""
        if usage.why_over or self._error is not None:
            return True
        try:
            if not self.ready():
                return False
            with usage:
                return self._take_leave()
        except LostPeer:  # MPI has ended meanwhile
            return True

    def _take_leave(self) -> bool:
        if not self._said_farewell:
            self.post(FAREWELL)
            self._said_farewell = True
        self.heard()
        self._forget_sent()
        if len(self._left) < self.size - 1 or self._sends:
            return False
        self._comm.Free()
        return True
