"""What ranks say to each other before packed bytes travel, and how it is put together.

Each rank says one thing per round. In a round in which all say the header of the same bucket, that bucket goes on its
way with the largest exponents. In a round in which all describe what they hold (a talk), they settle what to reduce
next. If they say different things, the round ends the epoch: whatever was said for later rounds of it no longer counts,
on any rank, and all of them talk next. Since every rank hears the same messages, all come to the same conclusion.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from horovod_aps.errors import cannot_go_on, not_ours

HEADER, TALK, CHOICE, NUDGE, FAILURE = 1, 2, 3, 4, 5
_FRONT = struct.Struct("<BxxxIII")  # what it is, epoch, round, ticket of the rank that speaks
_IDENTITY = struct.Struct("<16s8sI")  # digest of the plan, digest of the factors, bucket


@dataclass(frozen=True)
class Header:
    """Opens a bucket: which one, of which plan, with which scale factors, and this rank's exponents."""

    plan: bytes
    factors: bytes
    bucket: int
    exponents: np.ndarray

    def encode(self) -> bytes:
        return _IDENTITY.pack(self.plan, self.factors, self.bucket) + self.exponents.astype("<i4").tobytes()


def factors_digest(factors: Sequence[float]) -> bytes:
    """Eight bytes that stand for the scale factors of a bucket's layers, which mostly are all the same."""
    content = struct.pack(f"<{len(factors)}d", *factors)
    same = content[:8]
    return same if content == same * len(factors) else hashlib.sha256(content).digest()[:8]


def shared_exponents(bodies: Sequence[bytes]) -> np.ndarray | None:
    """The largest exponents, if all headers open the same bucket; None if they do not."""
    front, length = bodies[0][: _IDENTITY.size], len(bodies[0])
    if any(body[: _IDENTITY.size] != front or len(body) != length for body in bodies):
        return None
    return reduce(np.maximum, [np.frombuffer(body, "<i4", offset=_IDENTITY.size) for body in bodies])


class Rounds:
    """Everything that was said and not yet concluded from."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._size = rank, size
        self.epoch = 0
        self._n_said = self._n_concluded = 0
        self._heard: dict[tuple[int, int], dict[int, tuple[int, bytes]]] = {}  # by epoch and round, then by rank

    @property
    def answered(self) -> bool:
        """Whether everything that this rank has said in this epoch has been concluded from."""
        return self._n_said == self._n_concluded

    @property
    def asked(self) -> list[tuple[int, bytes]]:
        """What others have said in the next round, while this rank has not yet."""
        if not self.answered:
            return []
        return list(self._heard.get((self.epoch, self._n_concluded), {}).values())

    def say(self, kind: int, body: bytes, ticket: int = 0) -> bytes:
        """Note what this rank says next; returns the message for the others, with the number of its newest ticket."""
        self._heard.setdefault((self.epoch, self._n_said), {})[self.rank] = (kind, body)
        self._n_said += 1
        return _FRONT.pack(kind, self.epoch, self._n_said - 1, ticket) + body

    def nudge(self, ticket: int) -> bytes:
        """A message outside of all rounds: this rank waits for the others to open their ticket of this number."""
        return _FRONT.pack(NUDGE, 0, 0, ticket)

    def failure(self, why: str) -> bytes:
        """A message outside of all rounds: this rank cannot go on."""
        return _FRONT.pack(FAILURE, 0, 0, 0) + why.encode()

    def hear(self, rank: int, message: bytes) -> int:
        """Note what another rank has said; the number of its newest ticket.

        ValueError if no rank says so, LostPeer if that rank cannot go on.
        """
        if len(message) < _FRONT.size:
            raise not_ours(rank, len(message))
        kind, epoch, number, ticket = _FRONT.unpack_from(message)
        if kind == FAILURE:
            raise cannot_go_on(f"rank {rank}", message[_FRONT.size :])
        if kind != NUDGE and epoch >= self.epoch:  # what was said before an epoch ended is void
            self._heard.setdefault((epoch, number), {})[rank] = (kind, message[_FRONT.size :])
        return int(ticket)

    def missing(self) -> set[int]:
        """Ranks that the present round waits for; none if this rank waits for no answer."""
        if self.answered:
            return set()
        return set(range(self._size)) - set(self._heard.get((self.epoch, self._n_concluded), {}))

    def conclude(self) -> list[tuple[int, bytes]] | None:
        """What all ranks have said in the present round, by rank, once all have; the next round begins."""
        said = self._heard.get((self.epoch, self._n_concluded))
        if said is None or len(said) < self._size:
            return None
        del self._heard[self.epoch, self._n_concluded]
        self._n_concluded += 1
        return [said[rank] for rank in range(self._size)]

    def end_epoch(self) -> None:
        """Forget what was said for later rounds of this epoch."""
        self.epoch += 1
        self._n_said = self._n_concluded = 0
        self._heard = {key: value for key, value in self._heard.items() if key[0] >= self.epoch}
