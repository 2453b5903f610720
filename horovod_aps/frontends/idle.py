"""How Open MPI waits: busy, or giving up the core to whoever needs it.

It waits busily by default. Where ranks have fewer cores than threads (their own, Horovod's, the framework's) that
keeps the others from work: a fifth of the time at 10 Gbit/s. So where it is crowded this package chooses the other way,
before MPI starts, unless the user has chosen, in the environment or in a file of Open MPI's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from horovod_aps import config, cores

NAME = "mpi_yield_when_idle"
VARIABLE = f"OMPI_MCA_{NAME}"
FILES = ("OMPI_MCA_mca_base_param_files", "OMPI_MCA_mca_param_files")  # names of files instead of the usual ones
OVERSUBSCRIBED = "OMPI_MCA_mpi_oversubscribe"  # what mpirun tells its ranks; then Open MPI yields by itself
NO = ("0", "false", "f", "disabled", "no", "n", "")
THREADS_PER_RANK = 3  # that want a core in a step: the program's, Horovod's, and the network's
_chosen = ""  # why, if it was


def why_crowded() -> str:
    """Why the ranks that Open MPI's or Slurm's launcher has started here have too few cores; empty if they do not."""
    n_ranks = config.local_size()
    if not n_ranks:
        return ""
    found = cores.count()
    if not found.are_few(THREADS_PER_RANK, n_ranks):
        return ""
    if THREADS_PER_RANK * n_ranks <= found.shared:
        return f"this rank, with {THREADS_PER_RANK} threads, is bound to {_cores(found.own)}"
    return f"{_ranks(n_ranks)} with {THREADS_PER_RANK} threads each share {_cores(found.shared)}"


def choose() -> None:
    """Have Open MPI yield where it is crowded; without effect once MPI has started, or if the user has chosen."""
    global _chosen
    if VARIABLE in os.environ:
        return
    why = why_crowded()
    if why and not given():
        os.environ[VARIABLE] = "1"
        _chosen = why


def given() -> tuple[str, str] | None:
    """What is set, and where; a variable in the environment, ours too, outranks files."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE], VARIABLE
    for file in _files():
        value = _read(file)
        if value is not None:
            return value, str(file)
    return None


def describe() -> str:
    """How MPI waits here, for people; empty if neither Open MPI nor Slurm has started this process."""
    n_ranks = config.local_size()
    if not n_ranks:
        return ""
    if _chosen:
        return f"gives up the core, chosen since {_chosen}"
    found = given()
    if found is not None:
        value, where = found
        return f"{'busily' if value.strip().lower() in NO else 'gives up the core'}, as {where} says"
    if os.environ.get(OVERSUBSCRIBED, "0").strip().lower() not in NO:
        return "gives up the core, as Open MPI does where ranks outnumber slots"
    return f"busily: there are cores enough ({_ranks(n_ranks)}, {_cores(cores.count().shared)})"


def _ranks(n: int) -> str:
    return f"{n} rank{'s' * (n > 1)}"


def _cores(n: int) -> str:
    return f"{n} core{'s' * (n > 1)}"


def _files() -> Iterator[Path]:
    """Where Open MPI looks for what is set, the first that has it wins."""
    for name in FILES:
        if name in os.environ:
            yield from map(Path, filter(None, os.environ[name].split(",")))
            return
    yield Path(os.path.expanduser("~/.openmpi/mca-params.conf"))
    folders = [os.environ["OPAL_SYSCONFDIR"]] if "OPAL_SYSCONFDIR" in os.environ else []
    mpirun = shutil.which("mpirun")
    prefixes = [os.environ.get("OPAL_PREFIX"), mpirun and str(Path(mpirun).resolve().parents[1])]
    folders += [f"{prefix}/etc" for prefix in prefixes if prefix] + ["/etc/openmpi"]
    found = [path for path in (Path(folder, "openmpi-mca-params.conf") for folder in folders) if path.is_file()]
    yield from found[:1]


def _read(file: Path) -> str | None:
    """What a file sets, if it does: lines of `name = value`, of which the last counts."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return None
    pairs = [line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#")]
    return dict((name.strip(), value.strip()) for name, _, value in pairs).get(NAME)
