"""Why a first ticket has no answer: another rank is late, or reduces its gradients without us.

Horovod finds operations by their names. A rank with `hvd.Compression.none` waits for gradients under their own names,
ours wait for a ticket, and both wait for ever. After a while a thread says so, and then asks: it hands in an integer
under the name of a gradient. If another rank holds a float under it, Horovod refuses both, and that is the proof. If
all ranks ask the same and still have no answer, they wait for the tickets of different compressors.

A rank that was only late must answer, or the question would stay: it is announced in the ticket first, and all ranks
hand in what was announced when the ticket is over. A question is asked only while the program waits for the ticket, so
that it comes at the same place among the operations that Horovod numbers on all ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
import zlib
from typing import Any

import torch
from horovod.torch import mpi_ops

from horovod_aps.frontends.checks import OTHER_COMPRESSION, OTHER_ORDER, no_answer
from horovod_aps.log import logger
from horovod_aps.torch.ticket import Ticket

WARN_SECONDS = 20.0
ASK_SECONDS = 2.0  # between announcing and asking: far longer than an all-reduce that has begun already
LOOK_SECONDS = 0.5
END_SECONDS = 10.0  # that Horovod may take to shut down
ANSWER_SECONDS = 0.01  # between looks for the answer: the rank that is refused will soon end, and Horovod with it


class OtherCompression(ValueError):
    """Another rank reduces the same tensor without APSCompressor."""

    def __init__(self) -> None:
        super().__init__(OTHER_COMPRESSION)


class OtherOrder(ValueError):
    """Ranks wait for each other in different compressors."""

    def __init__(self) -> None:
        super().__init__(OTHER_ORDER)


class Suspicion:
    """Watches over the first ticket of a reducer, or of a group."""

    def __init__(self, ticket: Ticket, process_set_id: int, n_grouped: int = 0) -> None:
        self._ticket, self._process_set_id, self._n_grouped = ticket, process_set_id, n_grouped
        self._names: dict[int, str] = {}  # what Horovod itself would call what this rank has handed in, by checksum
        self._asked: set[int] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="horovod_aps suspicion", daemon=True).start()

    def note(self, name: str) -> None:
        """A tensor, or group, of this name has been handed in."""
        self._names[zlib.crc32(name.encode()) & 0x7FFFFFFF or 1] = name

    def end(self) -> None:
        """The ticket is over: answer what other ranks have asked."""
        self._over.set()
        for question in sorted(self._ticket.announced()):
            if question in self._names and (handle := self._ask(question)) is not None:
                threading.Thread(target=self._attend, args=(handle,), daemon=True).start()

    def _watch(self) -> None:
        if self._over.wait(WARN_SECONDS) or self._ticket.is_over():
            return
        logger.warning(no_answer(WARN_SECONDS))
        if not self._names:
            return
        question = min(self._names)  # the same on all ranks that hold the same tensors
        self._ticket.announce(question)
        time.sleep(ASK_SECONDS)
        while not (self._over.is_set() or self._ticket.is_over()):
            if self._waiting_threads() and (handle := self._ask(question, early=True)) is not None:
                if self._attend(handle):
                    time.sleep(ASK_SECONDS)  # a rank that was only late has answered the ticket before
                    if self._waiting_threads():
                        self._give_up(OtherOrder)
                return
            time.sleep(LOOK_SECONDS)

    def _ask(self, question: int, early: bool = False) -> int | None:
        """Hand the integer in; None if it is not, or no longer, to be."""
        with self._lock:
            if question in self._asked or (early and (self._over.is_set() or self._ticket.is_over())):
                return None
            self._asked.add(question)
            name, ones = self._names[question].encode(), torch.ones(1, dtype=torch.int32)
            rest = (1, name, mpi_ops.Sum, 1.0, 1.0, self._process_set_id)
            if not self._n_grouped:
                return int(mpi_ops.mpi_lib.horovod_torch_allreduce_async_torch_IntTensor(ones, ones, *rest))
            group = [ones.clone() for _ in range(self._n_grouped)]
            return int(mpi_ops.mpi_lib.horovod_torch_grouped_allreduce_async_torch_IntTensor(group, group, *rest))

    def _attend(self, handle: int) -> bool:
        """Wait for the answer; True if all ranks have handed in the same."""
        try:
            while not mpi_ops.poll(handle):
                time.sleep(ANSWER_SECONDS)
            mpi_ops.mpi_lib.horovod_torch_wait_and_clear(handle)
            return True
        except ValueError:  # hvd.init() has begun a new world
            pass
        except RuntimeError as error:
            if "Mismatched" in str(error):
                self._give_up(OtherCompression)
        return False

    def _give_up(self, error: type[OtherCompression] | type[OtherOrder]) -> None:
        """Have an error on all ranks: each waits inside Horovod for what will never come, so that has to end."""
        logger.error("%s", error())
        over = threading.Event()
        atexit.register(over.wait, END_SECONDS)  # a second shutdown beside the first one would never end
        for thread in self._waiting_threads():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
        if error is OtherOrder:
            time.sleep(LOOK_SECONDS)  # the other ranks have found it at the same time, and raise the same
        mpi_ops._basics.shutdown()
        over.set()

    def _waiting_threads(self) -> list[int]:
        """Threads that wait for the ticket, inside Horovod or by themselves."""
        if self._ticket.is_over():
            return []
        return [thread for thread, frame in sys._current_frames().items() if self._is_waiting(frame)]

    def _is_waiting(self, frame: Any) -> bool:
        while frame is not None:
            if frame.f_code is mpi_ops.synchronize.__code__ and frame.f_locals.get("handle") == self._ticket.handle:
                return True
            if frame.f_code is Ticket.wait.__code__ and frame.f_locals.get("self") is self._ticket:
                return True
            frame = frame.f_back
        return False
