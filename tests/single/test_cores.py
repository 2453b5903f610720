"""The cores of a rank and of its host: affinity, Slurm's word, and quotas of control groups, planted in a folder."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from exchange_oracle import hosted_exchanges, make_gradients, reduce_all

from horovod_aps import config, cores
from horovod_aps.cores import Cores
from horovod_aps.engine import exchange
from horovod_aps.options import Options

ALL = set(range(64))
PARENT = 4711


@pytest.fixture
def host(monkeypatch):
    """Says which cores this process and its parent may use, and the quota, and sets what launchers do."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_"))]:
        monkeypatch.delenv(name)

    def plant(own: set[int], parents: set[int], quota: float = math.inf, **variables: str) -> None:
        monkeypatch.setattr(os, "getppid", lambda: PARENT)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: own, PARENT: parents}[pid])
        monkeypatch.setattr(cores, "quota", lambda: quota)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return plant


STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_CPUS_ON_NODE": "16"}


@pytest.mark.parametrize(
    "own, parents, quota, variables, wanted",
    [
        (ALL, ALL, math.inf, {}, Cores(64, 64)),
        ({3}, ALL, math.inf, {}, Cores(1, 64)),  # mpirun binds up to two ranks to a core each
        (set(range(32)), ALL, math.inf, {}, Cores(32, 64)),  # and more of them to a socket
        ({0, 1, 2, 3}, {0, 1, 2, 3}, math.inf, {}, Cores(4, 4)),  # a container's set of cores, or taskset
        (ALL, ALL, 2.5, {}, Cores(2, 2)),
        (ALL, ALL, 0.5, {}, Cores(1, 1)),
        ({0}, ALL, 8.0, {}, Cores(1, 8)),
        ({4, 5}, ALL, math.inf, STEP, Cores(2, 16)),  # srun's parent may use more than the job
        ({4, 5}, {0}, math.inf, STEP, Cores(2, 16)),  # or less
        (ALL, ALL, math.inf, STEP, Cores(64, 64)),  # Slurm does not keep the job to what it has given to it
        ({0}, {0, 1}, math.inf, STEP | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Cores(1, 2)),  # of the step of mpirun
    ],
)
def test_cores_are_those_that_ranks_may_use(own, parents, quota, variables, wanted, host):
    host(own, parents, quota, **variables)
    assert cores.count() == wanted


def test_cores_of_this_process_bound_to_one(monkeypatch):
    """Oracle: the operating system, asked by a child that is bound as a launcher binds it."""
    one = min(os.sched_getaffinity(0))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.sched_setaffinity(0, {one})
        os.write(write, repr(cores.count()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() == repr(Cores(1, cores.count().shared))


@pytest.mark.parametrize(
    "n_threads, n_ranks, few",
    [(1, 8, False), (1, 9, True), (2, 4, False), (2, 5, True), (3, 1, True), (2, 1, False)],
)
def test_cores_are_few_for_a_rank_or_for_all(n_threads, n_ranks, few):
    assert Cores(own=2, shared=8).are_few(n_threads, n_ranks) is few


@pytest.mark.parametrize(
    "found, hosts, crowded, near",
    [
        (Cores(64, 64), "aa", False, True),
        (Cores(1, 64), "aa", True, True),  # its thread and Horovod's have one core
        (Cores(2, 2), "aa", True, True),
        (Cores(1, 1), "aa", True, False),
        (Cores(2, 2), "ab", False, False),
    ],
)
def test_exchange_waits_by_the_cores_of_its_rank_and_host(found, hosts, crowded, near, monkeypatch):
    monkeypatch.setattr(exchange, "CORES", found)
    ranks = hosted_exchanges(hosts, Options(4, 3))
    assert not ranks[0].is_crowded and not ranks[0].is_near  # not known yet
    reduce_all(make_gradients((9,), 2), ranks)
    assert all((rank.is_crowded, rank.is_near) == (crowded, near) for rank in ranks)


@pytest.mark.parametrize(
    "mine, files, wanted",
    [
        ("0::/", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1.0),  # what is above counts too
        ("0::/a", {"a/cpu.max": "400000 100000", "cpu.max": "200000 100000"}, 2.0),
        ("0::/docker/not/seen", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/../other", {"cpu.max": "300000 100000", "../other/cpu.max": "100000 100000"}, 3.0),
        ("4:memory:/\n1:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        (
            "1:cpu,cpuacct:/x",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "25000"},
            2.0,
        ),
        ("1:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "50000"}, 1.0),
        ("1:cpuset:/", {"cpuset/cpu.cfs_quota_us": "50000", "cpuset/cpu.cfs_period_us": "50000"}, math.inf),
        ("0::/", {"cpu.max": "what is this"}, math.inf),
        ("0::/", {"cpu.max": "100000 0"}, math.inf),
        ("nonsense", {}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_quota_of_control_groups(mine, files, wanted, tmp_path: Path):
    top = tmp_path / "cgroup"
    top.mkdir()
    (tmp_path / "mine").write_text(mine)
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    assert cores.quota(top, tmp_path / "mine") == wanted


def test_quota_without_control_groups(tmp_path: Path):
    assert cores.quota(tmp_path / "none", tmp_path / "nothing") == math.inf


SLURM = {"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}


@pytest.mark.parametrize(
    "variables, n_ranks",
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_NODEID": "2"} | SLURM, 4),  # mpirun in a step of srun's
        ({"SLURM_NODEID": "0"} | SLURM, 4),
        ({"SLURM_NODEID": "1"} | SLURM, 4),
        ({"SLURM_NODEID": "2"} | SLURM, 3),
        ({"SLURM_NODEID": "3"} | SLURM, 0),
        ({"SLURM_NODEID": "3", "SLURM_NTASKS_PER_NODE": "4"} | SLURM, 4),
        ({"SLURM_NODEID": "0"} | SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, 2),
        ({"SLURM_NODEID": "0"} | SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(y2),3"}, 0),
        ({"SLURM_NODEID": "0"} | SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x999999999999)"}, 1),
        ({"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "4"}, 0),  # no PMIx
        ({"PMIX_RANK": "0", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "4"}, 0),  # a script of sbatch's
        ({"MPI_LOCALNRANKS": "4", "PMI_RANK": "0", "PMI_SIZE": "4"}, 0),  # MPICH
    ],
)
def test_ranks_of_this_host(variables, n_ranks, host):
    host(ALL, ALL, **variables)
    assert config.local_size() == n_ranks
