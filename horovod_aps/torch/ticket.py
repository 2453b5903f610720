"""A ticket: the Horovod operation that stands for tensors in our hands.

Horovod waits for it before it asks for results. It is a SUM all-reduce of a few words in which every rank says what
the others must know before they can talk to it; a rank in `hvd.join()` contributes zeros, and so is seen to be absent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from horovod_aps.frontends.checks import check_present
from horovod_aps.frontends.world import link
from horovod_aps.transports import sockets
from horovod_aps.transports.base import Transport

PRESENT, PACKED, SPEAKS_MPI, COLLECTIVE, N_WORDS = range(5)
N_LABELS = 8  # tickets of one exchange that may be under way at once
NUDGE_SECONDS = 0.05  # that the others may be late before they are nudged, and between nudges
LOOKS = 5  # before one sleeps: mostly Horovod's thread only has to get the core, and the shortest sleep takes longer
MAX_PAUSE_SECONDS = 1e-3  # between looks while one waits


class TicketHandle(int):
    """Horovod's number of a ticket. Its optimizer calls a handle that can be called, instead of waiting for it.

    Horovod waits by giving up the core again and again. Where threads outnumber cores that costs those that it waits
    for their turn, on some Linux kernels for many seconds, and Gloo gives up after 30 (docs/reliability.md).
    """

    _ticket: Ticket
    _meanwhile: Callable[[], None] | None

    def __new__(cls, ticket: Ticket, meanwhile: Callable[[], None] | None = None) -> TicketHandle:
        """`meanwhile` does, before a wait, what can be done without the others."""
        handle = super().__new__(cls, ticket.handle)
        handle._ticket, handle._meanwhile = ticket, meanwhile
        return handle

    def __call__(self) -> torch.Tensor | None:
        """What `hvd.synchronize` returns, after a wait that sleeps."""
        if self not in mpi_ops._handle_map:  # another tensor of the batch has waited
            return None
        if self._meanwhile is not None and not self._ticket.is_over():
            self._meanwhile()
        self._ticket.wait()
        return mpi_ops.synchronize(self)


class Ticket:
    """One such operation under way, or over."""

    def __init__(
        self,
        label: str,
        process_set_id: int,
        rank: int,
        size: int,
        *,
        packed: bool,
        speaks_mpi: bool,
        collective: bool = False,
    ) -> None:
        words = np.zeros(N_WORDS + (1 + sockets.WORDS_PER_RANK) * size, np.int32)
        words[:N_WORDS] = (1, packed, speaks_mpi, collective)
        if packed and not speaks_mpi:
            words[N_WORDS + size :] = sockets.listener().words(rank, size)
        self._rank, self._size, self._opened = rank, size, time.monotonic()
        self._words = words
        self._over = False
        tensor = torch.from_numpy(words)
        self.handle: int = mpi_ops.mpi_lib.horovod_torch_allreduce_async_torch_IntTensor(
            tensor, tensor, 1, label.encode(), mpi_ops.Sum, 1.0, 1.0, process_set_id
        )

    def is_over(self) -> bool:
        """Whether all ranks have answered; never blocks."""
        if not self._over:
            try:
                self._over = mpi_ops.poll(self.handle)
            except ValueError as error:  # Horovod has waited for it and forgotten it
                if type(error) is not ValueError:  # of `suspicion`, which comes at any moment
                    raise
                self._over = True
        return self._over

    def wait(self) -> None:
        """Until all ranks have answered; sleeps in between, longer the longer it takes."""
        for _ in range(LOOKS):
            if self.is_over():
                return
            os.sched_yield()
        begin = time.monotonic()
        while not self.is_over():
            time.sleep(min((time.monotonic() - begin) / 8, MAX_PAUSE_SECONDS))

    def waited_for(self) -> None:
        """Horovod has waited for it."""
        self._over = True

    @property
    def age(self) -> float:
        """Seconds since it was opened."""
        return time.monotonic() - self._opened

    def clear(self) -> bool:
        """Whether it is over; if so, Horovod forgets it. For a ticket that no tensor shares."""
        if not self.is_over():
            return False
        if self.handle not in mpi_ops._handle_map:  # else Horovod will
            try:
                mpi_ops.mpi_lib.horovod_torch_wait_and_clear(self.handle)
            except ValueError:
                pass  # it has
            except RuntimeError as error:
                raise HorovodInternalError(error) from None
        return True

    def word(self, which: int) -> int:
        """The sum of what all ranks have said, once it is over."""
        return int(self._words[which])

    @property
    def addresses(self) -> np.ndarray:
        """Where all ranks listen, once it is over."""
        return self._words[N_WORDS + self._size :]

    def all_there(self) -> bool:
        """Whether all ranks have answered and none is in `hvd.join()`; never blocks."""
        return self.is_over() and self.word(PRESENT) == self._size

    def link(self, name: str, members: Sequence[int], why_flat: str, by_messages: bool) -> Transport:
        """What joins the ranks that have answered; see `world.link`."""
        return link(name, members, self._rank, self.word(SPEAKS_MPI), self.addresses, why_flat, by_messages)

    def announce(self, question: int) -> None:
        """Tell the others of a question (`suspicion`): Horovod reads the words when the last rank has come."""
        self._words[N_WORDS + self._rank] = question

    def announced(self) -> set[int]:
        """The questions of all ranks, once it is over."""
        return {word for word in self._words[N_WORDS : N_WORDS + self._size].tolist() if word}

    def check(self) -> None:
        """Raise ValueError, on all ranks, if not all of them are here and mean the same transport."""
        check_present(self.word(PRESENT), self.word(PACKED), self._size)


class TicketOffice:
    """The tickets of single tensors in one exchange, numbered; all ranks must open each number for it to be over.

    A rank opens one with the first tensor of a batch. A tensor that one rank hands in before, and another after results
    were first taken, gets a ticket on the second only. Whatever ranks say has the number of their newest ticket, and
    those that hold tensors open theirs up to it; a rank that may not say anything yet nudges the others.
    """

    def __init__(self, label: str, open_one: Callable[[str], Ticket]) -> None:
        self._label, self._open_one = label, open_one
        self._lock = threading.Lock()  # the progress thread opens some
        self.number = 0
        self._newest: Ticket | None = None
        self._extra: list[Ticket] = []
        self._next_nudge = 0.0

    def open(self) -> Ticket:
        """The next ticket."""
        with self._lock:
            return self._open()

    def _open(self) -> Ticket:
        self._extra = [ticket for ticket in self._extra if not ticket.clear()]
        self.number += 1
        self._newest = self._open_one(f"{self._label}.{self.number % N_LABELS}")
        self._next_nudge = 0.0
        return self._newest

    def take_back(self) -> None:
        """The last one did not count: some ranks were not there."""
        self.number -= 1

    def open_until(self, number: int) -> None:
        with self._lock:
            while self.number < number:
                self._extra.append(self._open())

    def overdue(self, asked: bool) -> bool:
        ticket, now = self._newest, time.monotonic()
        if ticket is None or now < self._next_nudge or (ticket.age < NUDGE_SECONDS and not asked):
            return False
        self._next_nudge = now + NUDGE_SECONDS
        if ticket.is_over():
            self._newest = None
            return False
        return True
