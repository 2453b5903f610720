"""How Open MPI waits: busy, or giving up the core to whoever needs it.

It waits busily by default. Where ranks have fewer cores than threads (their own, Horovod's, the framework's) that
keeps the others from work: a fifth of the time at 10 Gbit/s. So where it is crowded this package chooses the other way,
before MPI starts, unless the user has chosen.
"""

from __future__ import annotations

import os

VARIABLE = "OMPI_MCA_mpi_yield_when_idle"
_chosen = False
THREADS_PER_RANK = 3  # that want a core in a step: the program's, Horovod's, and the network's


def is_crowded() -> bool:
    """Whether the ranks that Open MPI has started on this host have fewer cores than threads."""
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if not local.isdecimal():
        return False
    bound = len(os.sched_getaffinity(0))
    return THREADS_PER_RANK * int(local) > (os.cpu_count() or 1) or bound < 2


def choose() -> None:
    """Have Open MPI yield where it is crowded; without effect once MPI has started, or if the user has chosen."""
    if VARIABLE not in os.environ and is_crowded():
        os.environ[VARIABLE] = "1"
        global _chosen
        _chosen = True


def describe() -> str:
    """How MPI waits here, for people; empty if Open MPI has not started this process."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" not in os.environ:
        return ""
    value = os.environ.get(VARIABLE)
    if value is None:
        return "busily: there are cores enough"
    how = "gives up the core" if value.strip().lower() not in ("0", "false", "no", "") else "busily"
    return f"{how}, " + ("chosen since ranks have fewer cores than threads" if _chosen else f"as {VARIABLE} says")
