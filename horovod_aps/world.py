"""The world as Horovod sees it now, and the transport that fits it.

After an elastic reset size, rank and ids all change, so nothing here is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.common.process_sets import ProcessSet

from horovod_aps.log import trace
from horovod_aps.transport import Transport


def mpi_usable(basics: Any) -> bool:
    """Whether this rank could talk MPI directly, beside Horovod."""
    if not (basics.mpi_built() and basics.mpi_enabled() and basics.mpi_threads_supported()):
        return False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return False
    world = MPI.COMM_WORLD
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE and world.size == basics.size()
                and world.rank == basics.rank())


def make_transport(process_set: ProcessSet, speak_mpi: bool, over_horovod: Callable[[], Transport],
                   tag: int) -> Transport:
    """MPI if every rank of the process set can speak it, else what the frontend offers over Horovod.

    Collective over the process set. Calls from several threads at once need different tags.
    """
    if speak_mpi:
        from horovod_aps.mpi_transport import MpiTransport

        trace("transport: MPI")
        return MpiTransport(process_set.ranks, tag)
    trace("transport: Horovod's own operations")
    return over_horovod()


def process_set_of(basics: Any, process_set_id: int) -> ProcessSet:
    """The process set with this id, its ranks filled in."""
    process_set = ProcessSet(list(basics._get_process_set_ids_and_ranks()[process_set_id]))
    process_set.process_set_id = process_set_id
    return process_set
