"""Ranks that die or are interrupted: every survivor ends or raises HorovodInternalError in time, none hangs.

Over MPI the launcher ends the survivors. Over Gloo the ranks are started here without one, for it would end the
survivors before they can show what they do by themselves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from test_parallel import ENVIRONMENT, ROOT, launcher, run

sys.path.insert(0, str(ROOT / "tests" / "workers"))
import fault_worker  # noqa: E402

FORKS = multiprocessing.get_context("forkserver")
START_LIMIT, LIMIT = 120, 30  # seconds for starting on a busy machine, and for ending after the fault
PHASES = {2: ("backward", "step", "scan", "encode", "decode"), 3: ("backward", "scan", "encode", "reduce", "decode")}
PHASES[4] = PHASES[3]
ALL_CASES = [(n_ranks, phase) for n_ranks, phases in PHASES.items() for phase in phases]
# A launch of mpirun takes long, and all that can be seen of it is that the launcher ends the job.
MPI_CASES = [(2, "scan"), (2, "decode"), (3, "encode"), (3, "reduce"), (4, "backward")]


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """A process that has imported what a rank needs, for the ranks to be forked from: saves seconds for each."""
    # Without TensorFlow: it makes every fork slower, and with both Horovod's optimizer for PyTorch reduces nothing.
    FORKS.set_forkserver_preload(["fault_worker"])
    with pytest.MonkeyPatch.context() as patch:
        # The server does not take over sys.path, and does not say so when it cannot preload.
        patch.setenv("PYTHONPATH", str(Path(fault_worker.__file__).parent), prepend=os.pathsep)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()


class Ranks:
    """Processes of one job: one per rank, or the launcher's alone."""

    def __init__(self, pids_and_waits: list[tuple[int, Callable[[float], int | None]]], directory: Path) -> None:
        self.pids = [pid for pid, _ in pids_and_waits]
        self._waits = [wait for _, wait in pids_and_waits]
        self.directory = directory
        self.outputs = [directory / f"output{i}" for i in range(len(self.pids))]

    def wait_for(self, name: str) -> None:
        """Until a worker has left the file `name`."""
        deadline = time.monotonic() + START_LIMIT
        while not (self.directory / name).exists():
            assert time.monotonic() < deadline, f"no {name} after {START_LIMIT} s\n{self.text()}"
            time.sleep(0.05)

    def ends(self) -> list[int]:
        """Exit codes of all processes, which must come within the limit."""
        deadline = time.monotonic() + LIMIT
        codes = [wait(max(0.1, deadline - time.monotonic())) for wait in self._waits]
        if None in codes:
            pytest.fail(f"still running {LIMIT} s after the fault\n{self.text()}", pytrace=False)
        return codes

    def text(self) -> str:
        """What all of them have printed."""
        return "\n".join(f"--- {path.name} ---\n{path.read_text()[-5000:]}" for path in self.outputs if path.exists())


@contextlib.contextmanager
def gloo_ranks(
    n_ranks: int,
    phase: str,
    victim: int,
    directory: Path,
    hosts: str = "",
    worker: str = "fault_worker",
) -> Iterator[Ranks]:
    """The ranks of a Gloo job as `horovodrun` starts them, but with nobody who watches over them."""
    rendezvous = RendezvousServer()
    plan = get_host_assignments(parse_hosts(f"localhost:{n_ranks}"), n_ranks)
    port = rendezvous.start()
    rendezvous.init(plan)
    common = {key: str(value) for key, value in create_run_env_vars("127.0.0.1", ["lo"], port).items()}
    processes = [
        FORKS.Process(
            target=fault_worker.run_forked,
            args=(
                {**common, **create_slot_env_vars(slot)},
                directory / f"output{i}",
                worker,
                phase,
                victim,
                directory,
                hosts,
            ),
        )
        for i, slot in enumerate(plan)
    ]
    for process in processes:
        process.start()

    def wait(process: Any, seconds: float) -> int | None:
        process.join(seconds)
        return process.exitcode

    try:
        yield Ranks([(process.pid, partial(wait, process)) for process in processes], directory)
    finally:
        for process in processes:
            process.kill()
            process.join()
        rendezvous.stop()


@contextlib.contextmanager
def mpi_ranks(n_ranks: int, phase: str, victim: int, directory: Path, hosts: str = "") -> Iterator[Ranks]:
    """A job under mpirun."""
    arguments = [fault_worker.__file__, phase, str(victim), str(directory), hosts]
    command = [*launcher("mpirun", n_ranks), sys.executable, *arguments]
    with open(directory / "output0", "w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None

    try:
        yield Ranks([(process.pid, wait)], directory)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_gloo_survivors(ranks: Ranks, victim: int) -> None:
    """No half-written gradient reaches the optimizer: the parameters are those from before the broken step."""
    for rank, (code, output) in enumerate(zip(ranks.ends(), ranks.outputs)):
        if rank == victim:
            assert code == -signal.SIGKILL
        else:
            assert "RAISED HorovodInternalError, parameters unchanged" in output.read_text(), ranks.text()
            assert code == 0, ranks.text()


@pytest.mark.parametrize("n_ranks, phase", ALL_CASES)
def test_gloo_survivors_of_a_killed_rank_raise_in_time(n_ranks, phase, tmp_path):
    victim = {2: 0, 3: 2, 4: 1}[n_ranks]  # rank 0 leads Horovod's background threads
    with gloo_ranks(n_ranks, phase, victim, tmp_path) as ranks:
        ranks.wait_for("died")
        check_gloo_survivors(ranks, victim)


@pytest.mark.parametrize("n_ranks, phase", MPI_CASES)
def test_mpi_job_ends_in_time_when_a_rank_is_killed(n_ranks, phase, tmp_path):
    with mpi_ranks(n_ranks, phase, 0, tmp_path) as ranks:
        ranks.wait_for("died")
        assert ranks.ends()[0] != 0
        assert "CHANGED" not in ranks.text()


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks, phase", [case for case in ALL_CASES if case not in MPI_CASES])
def test_mpi_job_ends_in_time_in_all_other_phases(n_ranks, phase, tmp_path):
    with mpi_ranks(n_ranks, phase, 1, tmp_path) as ranks:
        ranks.wait_for("died")
        assert ranks.ends()[0] != 0


def test_ctrl_c_on_all_ranks(tmp_path):
    """As a terminal sends it: to every process of the job, in the middle of its steps."""
    with gloo_ranks(2, "never", 0, tmp_path) as ranks:
        ranks.wait_for("trained0")
        ranks.wait_for("trained1")
        for pid in ranks.pids:
            os.kill(pid, signal.SIGINT)
        ranks.ends()
        for output in ranks.outputs:  # the other rank's end may reach a rank before its own signal
            assert "INTERRUPTED" in output.read_text() or "RAISED" in output.read_text(), ranks.text()
        assert "CHANGED" not in ranks.text()


# In a host: written to shared memory, summed, and scanned; then packed, reduced where there are three hosts, and read.
HOSTED_CASES = [
    ("aabb", "APS_HOST_WRITE"),
    ("aabb", "APS_HOST_SUM"),
    ("aabb", "APS_SCAN"),
    ("aabb", "APS_ENCODE"),
    ("abcabc", "APS_REDUCE"),
    ("aabb", "APS_DECODE"),
]


@pytest.mark.parametrize("hosts, phase", HOSTED_CASES)
def test_a_death_on_a_host_with_several_ranks(hosts, phase, tmp_path):
    """Nobody waits for the dead. Three hosts have got what emulated ones get before that."""
    with gloo_ranks(len(hosts), phase, 2, tmp_path, hosts) as ranks:
        ranks.wait_for("died")
        check_gloo_survivors(ranks, victim=2)
        assert ranks.text().count("SAME BITS") == (6 if "c" in hosts else 0), ranks.text()


@pytest.mark.parametrize("phase", ["APS_HOST_SUM", pytest.param("APS_ENCODE", marks=pytest.mark.slow)])
def test_a_death_on_a_host_with_several_ranks_of_tensorflow(phase, tmp_path):
    with gloo_ranks(4, phase, 2, tmp_path, "aabb", "tensorflow_fault_worker") as ranks:
        ranks.wait_for("died")
        check_gloo_survivors(ranks, victim=2)


@pytest.mark.parametrize("hosts, phase", [("aabb", "APS_HOST_SUM"), ("abcabc", "APS_REDUCE")])
def test_mpi_job_ends_in_time_when_a_host_loses_a_rank(hosts, phase, tmp_path):
    with mpi_ranks(len(hosts), phase, 2, tmp_path, hosts) as ranks:
        ranks.wait_for("died")
        assert ranks.ends()[0] != 0
        assert "CHANGED" not in ranks.text()
        assert ranks.outputs[0].read_text().count("SAME BITS") == (6 if "c" in hosts else 0), ranks.text()


def test_ctrl_c_on_one_rank_ends_the_others(tmp_path):
    with gloo_ranks(2, "never", 0, tmp_path) as ranks:
        ranks.wait_for("trained0")
        ranks.wait_for("trained1")
        os.kill(ranks.pids[1], signal.SIGINT)
        ranks.ends()
        assert "INTERRUPTED" in ranks.outputs[1].read_text(), ranks.text()
        assert "RAISED HorovodInternalError, parameters unchanged" in ranks.outputs[0].read_text(), ranks.text()


def test_ctrl_c_on_mpirun(tmp_path):
    with mpi_ranks(2, "never", 0, tmp_path) as ranks:
        ranks.wait_for("trained0")
        os.kill(ranks.pids[0], signal.SIGINT)
        assert ranks.ends()[0] != 0


def test_slow_rank_ends_its_last_exchange():
    """Horovod ends MPI everywhere when the first rank leaves; the others must have what they wait for by then."""
    worker = Path(fault_worker.__file__).with_name("last_exchange_worker.py")
    code, output = run([*launcher("mpirun", 2), sys.executable, str(worker)], 120, {})
    assert code == 0 and "SAVED" in output, output


def test_mpi_does_not_end_while_a_rank_is_in_it():
    """That would be a segmentation fault now and then."""
    worker = Path(fault_worker.__file__).with_name("end_of_mpi_worker.py")
    code, output = run([*launcher("mpirun", 2), sys.executable, str(worker)], 120, {})
    assert code == 0 and "ALIVE AFTER A CALL" in output and "ENDED IN A CALL" not in output, output
    assert "RAISED Horovod has been shut down on another rank" in output, output
