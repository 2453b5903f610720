"""Several exchanges over one transport, each with its own conversation.

For a frontend with an exchange per call site, which run one after the other, in the same order on all ranks: their
control messages carry the name of the call site, and their transfers may use the same tags.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from horovod_aps.errors import cannot_go_on
from horovod_aps.transports.base import Bytes, Request, Transport

if TYPE_CHECKING:
    from horovod_aps.transports.hosts import Hosts

NAME_BYTES = 4
FAILED = b"\xff" * NAME_BYTES  # in place of a name: no conversation can go on


class SharedTransport:
    """One transport, and the conversations that go over it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._mail: dict[bytes, deque[tuple[int, bytes]]] = {}
        self._broken: tuple[str, bytes] | None = None  # who cannot go on, and why
        self._lock = threading.Lock()  # a thread may drive an exchange that is over while the next one begins

    def channel(self, name: str) -> Channel:
        """The transport as one exchange sees it; ranks find each other by the name."""
        number = zlib.crc32(name.encode()) % 0xFFFFFFFF  # the last one is `FAILED`
        return Channel(self, number.to_bytes(NAME_BYTES, "little"))

    def collect(self, name: bytes) -> list[tuple[int, bytes]]:
        """Messages for one channel; those for others are kept for them."""
        with self._lock:
            for rank, message in self.transport.heard():
                box, content = message[:NAME_BYTES], message[NAME_BYTES:]
                if box == FAILED:
                    self._broken = f"rank {rank}", content
                else:
                    self._mail.setdefault(box, deque()).append((rank, content))
            self.check()
            return list(self._mail.pop(name, ()))

    def fail(self, why: str) -> None:
        """This rank cannot go on in one conversation: no rank may in any, for transfers use the same tags."""
        self._broken = "this rank", why.encode()
        self.transport.post(FAILED + why.encode())

    def check(self) -> None:
        """Raise LostPeer if a rank cannot go on."""
        if self._broken is not None:
            raise cannot_go_on(*self._broken)


class Channel:
    """What one exchange sees of a shared transport."""

    def __init__(self, shared: SharedTransport, name: bytes) -> None:
        self.shared, self._name = shared, name
        transport = shared.transport
        self.rank, self.size, self.memory = transport.rank, transport.size, transport.memory

    @property
    def hosts(self) -> Hosts | None:
        return self.shared.transport.hosts

    def ready(self) -> bool:
        self.shared.check()
        return self.shared.transport.ready()

    def post(self, message: bytes) -> None:
        self.shared.transport.post(self._name + message)

    def heard(self) -> list[tuple[int, bytes]]:
        return self.shared.collect(self._name)

    def gone(self) -> set[int]:
        return self.shared.transport.gone()

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> Request:
        return self.shared.transport.transfer(outgoing, incoming, tag)

    def close(self) -> None:
        """Others may still use it."""
