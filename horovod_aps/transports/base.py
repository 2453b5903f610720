"""What the engine asks of a network.

A transport joins the ranks of one process set. It carries short control messages, which arrive in the order in which a
rank has sent them, and transfers of packed bytes, which are told apart by tags. It knows nothing of formats or layers.
Nothing here ever blocks, and nothing has an order that ranks must agree on, so that a rank may start at any moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from horovod_aps.transports.hosts import Hosts

Bytes = np.ndarray  # of uint8


class Request(Protocol):
    """An operation under way."""

    def done(self) -> bool:
        """Whether the operation has finished; makes progress when called, and raises if it failed."""


class Transport(Protocol):
    """The ranks of one process set, joined."""

    rank: int
    size: int
    memory: str
    """Where the bytes that it moves must lie: "host", "device" (of one's own GPU, or host), or "any" of both."""

    @property
    def hosts(self) -> Hosts | None:
        """Once it is ready: how ranks are spread over hosts, if it knows that."""

    def ready(self) -> bool:
        """Whether all ranks are connected; makes progress when called, and raises if that has failed."""

    def post(self, message: bytes) -> None:
        """Send a control message, of one byte at least, to all other ranks."""

    def heard(self) -> list[tuple[int, bytes]]:
        """Control messages that have arrived since the last call, with their senders; each sender's in order."""

    def gone(self) -> set[int]:
        """Ranks that have closed their end and will never send again."""

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> Request:
        """Send outgoing[k] to rank k and fill incoming[k] from it; sizes are known on both sides.

        Transfers with the same tag between two ranks match in the order in which they were started. The arrays must
        stay as they are until the request is done; they are kept alive until then, even if the request is not.
        """

    def close(self) -> None:
        """Nobody will use it again; safe to call at any time, and more than once."""
