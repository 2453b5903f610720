"""What transports that move the messages of a GPU over another one share: everything but `transfer` is the other's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from horovod_aps.transports.base import Transport

if TYPE_CHECKING:
    from horovod_aps.transports.hosts import Hosts


class Above:
    """Stands above the transport `below`, which carries control messages."""

    memory = "device"

    def __init__(self, below: Transport) -> None:
        self.below = below
        self.rank, self.size = below.rank, below.size

    @property
    def hosts(self) -> Hosts | None:
        """As below, without the memory that a host's ranks share, which is not a GPU's."""
        hosts = self.below.hosts
        return hosts and replace(hosts, room=None)

    def ready(self) -> bool:
        return self.below.ready()

    def post(self, message: bytes) -> None:
        self.below.post(message)

    def heard(self) -> list[tuple[int, bytes]]:
        return self.below.heard()

    def gone(self) -> set[int]:
        return self.below.gone()

    def close(self) -> None:
        self.below.close()
