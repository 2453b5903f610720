"""Which ranks share a host, and the memory that they share: found out when ranks have just been connected.

All ranks say three things, in messages before any other:

    1  the host that they are on
    2  the name of the host's memory, the first rank of each host
    3  whether they could open it, and have all that they need before the first bucket

Every rank hears all of it, so all come to the same conclusion. After the first there is nothing more to say if two
levels make no sense, or if ranks of a host would rather send each other messages, as those with GPUs. A rank that fails
otherwise, or cannot reach another, tells those that it has reached, who may wait for it.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from horovod_aps.config import host_name
from horovod_aps.errors import LostPeer, cannot_go_on, failure_of, not_ours
from horovod_aps.log import logger
from horovod_aps.transports.base import Bytes, Request, Transport
from horovod_aps.transports.memory import HostMemory, Room, in_words

POLL_SECONDS = 50e-6
MEMORY, MESSAGES = "memory", "messages"  # by which ranks of a host add up
NONE = "none: "  # in place of a name: why there is no memory
FAILED = b"horovod_aps cannot connect: "  # no other message begins like this
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def own_host() -> str:
    """What tells this host from others: HOROVOD_APS_HOST, else its name and its latest start."""
    given = host_name()
    if given:
        return "_".join(given.split())
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:  # some containers hide it
        boot = ""
    return hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Hosts:
    """How the ranks of a process set are spread over hosts.

    They reduce in two levels unless `why_flat` says why not: in memory that they share if there is a `room`, else by
    messages.
    """

    ranks: tuple[tuple[int, ...], ...]
    """Of every host, by their place on it; hosts are in the order of their first ranks."""
    rank: int
    room: Room | None = None
    why_flat: str = ""

    @property
    def n_hosts(self) -> int:
        return len(self.ranks)

    @cached_property
    def host(self) -> int:
        """The number of this rank's host."""
        return next(i for i, ranks in enumerate(self.ranks) if self.rank in ranks)

    @cached_property
    def place(self) -> int:
        """This rank's place on its host."""
        return self.ranks[self.host].index(self.rank)

    @property
    def n_places(self) -> int:
        return len(self.ranks[0])

    @cached_property
    def peers(self) -> list[int]:
        """The ranks with the same place, by host."""
        return [ranks[self.place] for ranks in self.ranks]

    def __str__(self) -> str:
        counts = sorted({len(ranks) for ranks in self.ranks})
        return f"{self.n_hosts} hosts with {' or '.join(map(str, counts))} ranks"


def group(keys: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host; `keys` names the host of each rank."""
    hosts: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        hosts.setdefault(key, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def why_not(ranks: Sequence[Sequence[int]]) -> str:
    """Why ranks that are spread like this cannot reduce in two levels; empty if they can."""
    if len(ranks) == 1:
        return "all ranks are on one host"
    if len({len(of_host) for of_host in ranks}) > 1:
        return f"hosts have different numbers of ranks: {', '.join(str(len(of_host)) for of_host in ranks)}"
    if len(ranks[0]) == 1:
        return "every rank has a host to itself"
    return ""


def _read(rank: int, message: bytes) -> str:
    try:
        text = json.loads(message)
    except ValueError:
        text = None
    if not isinstance(text, str):
        raise not_ours(rank, len(message))
    return text


class HostedTransport:
    """A transport whose ranks know their hosts when it is ready."""

    def __init__(
        self, transport: Transport, why_flat: str = "", host: str | None = None, by_messages: bool = False
    ) -> None:
        """`why_flat` is why this rank wants no two levels, if so; `by_messages`: it wants them without shared memory.

        What one rank wants, all do.
        """
        self._transport, self._why_flat, self._by_messages = transport, why_flat, by_messages
        self.rank, self.size, self.memory = transport.rank, transport.size, transport.memory
        self.hosts: Hosts | None = None
        self._host = own_host() if host is None else host
        self._ranks: tuple[tuple[int, ...], ...] = ()
        self._heard: list[deque[bytes]] = [deque() for _ in range(self.size)]  # before everything was said
        self._n_rounds = 0  # in which all have spoken
        self._memory: HostMemory | None = None
        self._room: Room | None = None
        self._broken: tuple[str, bytes] | None = None  # who could not connect, and why

    def ready(self) -> bool:
        if self._broken is not None:
            raise cannot_go_on(*self._broken)
        if self.hosts is not None:
            return True
        try:
            return self._transport.ready() and self._meet()
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Tell those that can be reached of an error, unless one of them has told of it."""
        if self._broken is not None:
            return
        why = failure_of(error).encode()
        self._broken = "this rank", why
        try:
            self._transport.post(FAILED + why)
        except Exception as second:
            logger.debug("telling others of an error: %s", second)

    def _listen(self) -> list[tuple[int, bytes]]:
        """Messages that have arrived; LostPeer if a rank could not connect."""
        messages = self._transport.heard()
        for rank, message in messages:
            if message.startswith(FAILED):
                self._broken = f"rank {rank}", message[len(FAILED) :]
                raise cannot_go_on(*self._broken)
        return messages

    def _meet(self) -> bool:
        """Say what is to be said; whether everything has been."""
        if not self._heard[self.rank] and self._n_rounds == 0:
            self._say(f"{self._host} {MESSAGES if self._by_messages else MEMORY} {self._why_flat}")
        for rank, message in self._listen():
            self._heard[rank].append(message)
        if gone := {rank for rank in self._transport.gone() if not self._heard[rank]}:
            raise LostPeer(f"rank {min(gone)} has ended while this rank waits for it")
        while self.hosts is None and all(self._heard):
            self._n_rounds += 1
            self._conclude([_read(rank, messages.popleft()) for rank, messages in enumerate(self._heard)])
        return self.hosts is not None

    def _say(self, text: str) -> None:
        message = json.dumps(text).encode()
        self._heard[self.rank].append(message)
        self._transport.post(message)

    def _conclude(self, said: list[str]) -> None:
        if self._n_rounds == 1:
            hosts, means, wishes = zip(*(f"{text}  ".split(" ", 2) for text in said))
            self._ranks = group(hosts)
            why_flat = next((why.strip() for why in wishes if why.strip()), "") or why_not(self._ranks)
            if why_flat or MESSAGES in means:
                self._end(why_flat)
            else:
                self._say(self._make())
        elif self._n_rounds == 2:
            self._say(self._open(said))
        else:
            failures = [f"rank {rank} cannot share its host's memory: {text}" for rank, text in enumerate(said) if text]
            if failures:
                self._memory = self._room = None
            self._end(failures[0] if failures else "")
            if failures and self.rank == 0:
                logger.warning("%s; every rank exchanges with every other instead", failures[0])

    def _mine(self) -> tuple[int, ...]:
        return next(ranks for ranks in self._ranks if self.rank in ranks)

    def _make(self) -> str:
        if self.rank != self._mine()[0]:
            return ""
        try:
            self._memory = HostMemory.make()
            return self._memory.name
        except Exception as error:
            return f"{NONE}{in_words(error)}"

    def _open(self, names: list[str]) -> str:
        """Open the host's memory, and have one's room in it; returns why it did not work, if so."""
        mine = self._mine()
        name = names[mine[0]]
        if name.startswith(NONE):
            return name[len(NONE) :]
        try:
            memory = self._memory or HostMemory.open(name)
            self._room = Room(memory, mine.index(self.rank), len(mine))
        except Exception as error:
            return in_words(error)
        return ""

    def _end(self, why_flat: str) -> None:
        self.hosts = Hosts(self._ranks, self.rank, self._room, why_flat)

    def heard(self) -> list[tuple[int, bytes]]:
        if not self._heard:
            return self._listen()
        kept = [(rank, message) for rank, messages in enumerate(self._heard) for message in messages]
        self._heard = []
        return kept + self._listen()

    def post(self, message: bytes) -> None:
        self._transport.post(message)

    def gone(self) -> set[int]:
        return self._transport.gone()

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> Request:
        return self._transport.transfer(outgoing, incoming, tag)

    def pause(self, seconds: float) -> None:
        """Sleep until the network has something, at most so long; memory that ranks share must be looked at."""
        pause = getattr(self._transport, "pause", None)
        if pause is not None and (self.hosts is None or self.hosts.room is None):
            pause(seconds)
        else:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._transport.close()
