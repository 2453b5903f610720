"""How many cores this rank has, and how many the ranks of its host have together.

A launcher may bind a rank to some of the host's cores; its parent, the launcher's own process on the host, still has
all of them. Slurm tells. A container has fewer than its machine by a set of cores, which is in the affinity, or by a
quota of time.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from horovod_aps import config

CGROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Cores:
    """Of one host."""

    own: int
    """On which this rank may run."""
    shared: int
    """On which the host's ranks may, all together."""

    def are_few(self, n_threads: int, n_ranks: int) -> bool:
        """Whether so many threads of each of so many ranks want more than there are, of its own or of the host's."""
        return n_threads > self.own or n_threads * n_ranks > self.shared


def count() -> Cores:
    """The cores as they are now; takes longer than many a kernel, so ask once."""
    mine = os.sched_getaffinity(0)
    slurm = config.slurm_cores()
    shared = max(slurm, len(mine)) if slurm else len(mine | _launchers())
    limit = max(1, int(min(quota(), shared)))
    return Cores(min(len(mine), limit), limit)


def _launchers() -> set[int]:
    """The cores of the process that has started this one; no more than its own if that is a script, bound as well."""
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended, or must not be asked
        return set()


def quota(cgroups: Path = CGROUPS, mine: Path = MINE) -> float:
    """How many cores' time the control groups of this process may take, version 1 or 2; infinite if nobody says."""
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return math.inf
    limits = [math.inf]
    for line in lines:
        _, controllers, path = f"{line}::".split(":", 2)
        if controllers == "":
            tops = [cgroups, cgroups / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [cgroups / controllers, cgroups / "cpu"]
        else:
            continue
        below = PurePosixPath(path.rstrip(":").lstrip("/"))
        # In a container the path may be one of the machine's, which is not there; the top is the container's.
        steps = [PurePosixPath()] if ".." in below.parts else [below, *below.parents]
        limits += [_limit(top / step) for top in tops for step in steps]
    return min(limits)


def _limit(folder: Path) -> float:
    """Of one control group."""
    try:
        if (folder / "cpu.max").exists():
            time, period = (folder / "cpu.max").read_text().split()
        else:
            time, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = float(time) / float(period)  # "max" and -1 are no limit
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
    return cores if cores > 0 else math.inf
