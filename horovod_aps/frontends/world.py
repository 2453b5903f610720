"""The world as Horovod sees it now.

After an elastic reset size, rank and ids all change, so nothing here is cached.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_aps.log import trace
from horovod_aps.transports.base import Transport
from horovod_aps.transports.hosts import HostedTransport


def mpi_usable(basics: Any) -> bool:
    """Whether this rank could talk MPI directly, beside Horovod."""
    if not (basics.mpi_built() and basics.mpi_enabled() and basics.mpi_threads_supported()):
        return False
    return is_mpi_world(basics.rank(), basics.size())


def is_mpi_world(rank: int, size: int) -> bool:
    """Whether mpi4py can be called from any thread, and its world is that of this rank among so many."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return False
    world = MPI.COMM_WORLD
    return bool(
        not MPI.Is_finalized()
        and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        and (world.rank, world.size) == (rank, size)
    )


def process_set_of(basics: Any, process_set_id: int) -> Any:
    """Horovod's process set with this id, its ranks filled in."""
    from horovod.common.process_sets import ProcessSet

    ranks = basics._get_process_set_ids_and_ranks()[process_set_id] if process_set_id else range(basics.size())
    process_set = ProcessSet(list(ranks))
    process_set.process_set_id = process_set_id
    return process_set


def link(
    name: str,
    members: Sequence[int],
    rank: int,
    n_able: int,
    addresses: np.ndarray,
    why_flat: str = "",
    by_messages: bool = False,
) -> Transport:
    """Join the ranks of a process set, which then find out who shares a host.

    With `by_messages` they share no memory there; `why_flat` is why who shares a host is not to matter, if so.
    """
    return HostedTransport(_link(name, members, rank, n_able, addresses), why_flat, by_messages=by_messages)


def _link(name: str, members: Sequence[int], rank: int, n_able: int, addresses: np.ndarray) -> Transport:
    """Over MPI if every rank can talk it directly, else by connections of our own.

    `rank` is this one's place among the members, `n_able` how many of them speak MPI, and `addresses` where they listen
    (`sockets.Listener.words`, summed over them). Never blocks. `name` is the same on all of them.
    """
    if n_able == len(members):
        from horovod_aps.transports.mpi import MpiTransport

        trace("%s: over MPI", name)
        return MpiTransport(members, tag=zlib.crc32(name.encode()))
    if n_able:
        raise ValueError(
            f"APSCompressor: {len(members) - n_able} of {len(members)} ranks cannot talk MPI directly; "
            f"install mpi4py on all hosts, or on none"
        )
    from horovod_aps.transports.sockets import SocketTransport

    trace("%s: by connections of our own", name)
    return SocketTransport(rank, addresses, hashlib.sha256(name.encode() + addresses.tobytes()).digest()[:16])
