"""The ranks of a torch.distributed process group, joined for the exchange; no Horovod is involved.

Ranks tell each other through the group's store who they are and where they listen. Nothing of it is a collective of the
group, so it cannot come between the user's.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from horovod_aps import config
from horovod_aps.engine.exchange import Exchange
from horovod_aps.errors import LostPeer
from horovod_aps.frontends.group_operations import GroupOperations, are_wanted
from horovod_aps.frontends.world import is_mpi_world, link
from horovod_aps.transports import sockets
from horovod_aps.transports.base import Transport
from horovod_aps.transports.turns import TurnTransport

WORD_BYTES = 4 * sockets.WORDS_PER_RANK
ASK_SECONDS = (1e-3, 50e-3)  # between questions to the store, at first and at most
MEET_SECONDS = 1800.0  # as torch.distributed waits in a collective: the first step may compile for long


def speaks_mpi() -> bool:
    """Whether this rank could talk MPI directly: MPI has started exactly the ranks of torch.distributed."""
    if config.mpi_size() != dist.get_world_size():
        return False
    return is_mpi_world(dist.get_rank(), dist.get_world_size())


class Meeting:
    """This rank comes to the group's next meeting; `link` joins the ranks once all have come. Never blocks.

    Meetings of a group are told apart by their number, so all ranks must come to them in the same order.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._device = device
        self.members = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._store = group.get_group_store()
        number = self._number = self._store.add(f"horovod_aps/{self.rank}", 1)
        self._name = f"{group.group_name} {number}"
        self._keys = [f"horovod_aps/{number}/{rank}" for rank in range(self.size)]
        words = sockets.listener().words(0, 1)
        self._store.set(self._keys[self.rank], words.tobytes() + bytes([speaks_mpi(), are_wanted(group, device)]))
        self._began = time.monotonic()
        self._wait = ASK_SECONDS[0]
        self._next = 0.0

    def is_over(self) -> bool:
        """Whether all ranks have come."""
        now = time.monotonic()
        if now < self._next:
            return False
        if self._store.check(self._keys):
            return True
        if now - self._began > MEET_SECONDS:
            missing = [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
            raise LostPeer(f"rank {missing[0]} has not begun to exchange gradients within {MEET_SECONDS:.0f} s")
        self._next = now + self._wait
        self._wait = min(2 * self._wait, ASK_SECONDS[1])
        return False

    def link(self, kernels: Any, why_flat: str) -> Transport:
        """The ranks joined: over MPI if all can talk it, else by connections of our own. Once it is over.

        They then find out who shares a host, unless `why_flat` says why not to. Packed bytes of the kernels' device go
        by operations of a group of our own if all ranks want that.
        """
        said = [bytes(self._store.get(key)) for key in self._keys]
        addresses = np.concatenate([np.frombuffer(one[:WORD_BYTES], np.int32) for one in said])
        n_able = sum(one[WORD_BYTES] for one in said)
        is_collective = all(one[WORD_BYTES + 1] for one in said)
        n_able = n_able if n_able == self.size else 0
        by_messages = is_collective or self._device.type == "cuda"
        transport = link(self._name, self.members, self.rank, n_able, addresses, why_flat, by_messages)
        if not is_collective:
            return transport
        store = dist.PrefixStore(f"horovod_aps/{self._number}", self._store)
        return TurnTransport(transport, GroupOperations(kernels, self._device, store, self.rank, self.size))


def join(exchange: Exchange, group: Any, device: torch.device, why_flat: str) -> tuple[int, ...]:
    """Have the exchange connect the ranks of a group as soon as all of them have come; returns who they are."""
    meeting = Meeting(group, device)
    exchange.gate = partial(_meet, exchange, meeting, why_flat)
    return meeting.members


def _meet(exchange: Exchange, meeting: Meeting, why_flat: str) -> bool:
    if not meeting.is_over():
        return False
    exchange.connect(meeting.link(exchange.kernels, why_flat))
    return True
