"""`horovod-aps doctor` on this machine, on two real ranks, and on installations that are broken on purpose.

Oracle: the fault that each test plants; what is planted must come out red, with a remedy, and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horovod_aps import config
from horovod_aps.kernels import native
from horovod_aps.tools import doctor

COMMAND = [sys.executable, "-m", "horovod_aps.tools.cli", "doctor"]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none"]
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


def call(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command without any launcher's or our own variables around it."""
    others = ("HOROVOD_", "OMPI_", "PMI", "SLURM_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return subprocess.run(command, env=clean | ROOT | variables, capture_output=True, text=True, timeout=240)


def test_healthy_machine_has_no_red_line():
    done = call(COMMAND)
    assert done.returncode == 0, done.stdout + done.stderr
    for topic in (
        "versions",
        "horovod",
        "environment",
        "kernels",
        "gpu",
        "launchers",
        "local exchange",
        "import",
        "transport",
    ):
        assert f"[ ok ] {topic}: " in done.stdout, topic
    assert doctor.RED not in done.stdout
    assert "[ ok ] horovod: rank 0 of 1, built with mpi, gloo" in done.stdout
    assert "horovodrun -np 2 horovod-aps doctor" in done.stdout


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("HOROVOD_APS_THREADS", "4", "HOROVOD_APS_THREADS is not a variable of horovod_aps"),
        ("HOROVOD_APS_LOG", "loud", "HOROVOD_APS_LOG must be one of"),
        ("HOROVOD_APS_NUM_THREADS", "none", "HOROVOD_APS_NUM_THREADS must be an integer"),
        ("HOROVOD_APS_TIMELINE", "/no/such/folder/t.json", "HOROVOD_APS_TIMELINE must be a file in a folder"),
        ("HOROVOD_CONTROLLER", "mpich", "HOROVOD_CONTROLLER must be one of mpi, gloo, got 'mpich'"),
        ("HOROVOD_CYCLE_TIME", "1ms", "HOROVOD_CYCLE_TIME must be a number, got '1ms'"),
    ],
)
def test_wrong_variable_is_red(name, value, text, monkeypatch):
    monkeypatch.setenv(name, value)
    red = [finding for finding in doctor.check_environment() if finding.level == doctor.RED]
    assert len(red) == 1 and text in red[0].text and name in red[0].text + red[0].remedy


def test_wrong_variables_are_one_red_line_each():
    """In Horovod's own process, which two of them would end; nothing else is blamed, least of all Horovod."""
    wrong = {
        "HOROVOD_APS_LOG": "loud",
        "HOROVOD_APS_NUM_THREADS": "none",
        "HOROVOD_CONTROLLER": "x",
        "HOROVOD_CPU_OPERATIONS": "y",
    }
    done = call(COMMAND, **wrong)
    assert done.returncode == 1, done.stdout + done.stderr
    red = [line for line in done.stdout.splitlines() if line.startswith("[FAIL]")]
    assert len(red) == 4 and all(line.startswith("[FAIL] environment: ") for line in red), done.stdout
    assert all(f"-> unset {name} or correct it" in done.stdout for name in wrong) and "reinstall" not in done.stdout
    assert "[ ok ] horovod: rank 0 of 1" in done.stdout


@pytest.fixture
def broken_horovod(tmp_path: Path) -> str:
    """A folder for PYTHONPATH with a Horovod whose library was built for another torch."""
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN5torch')\n")
    return str(tmp_path)


def test_horovod_that_cannot_be_imported_is_red(broken_horovod):
    """And so is a wrong variable, in the same run."""
    done = call(COMMAND, PYTHONPATH=broken_horovod, HOROVOD_APS_LOG="loud")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for line in (
        "[FAIL] environment: HOROVOD_APS_LOG must be one of debug, info, warning, error",
        "       -> unset HOROVOD_APS_LOG or correct it",
        "[FAIL] import: horovod.torch cannot be imported: ImportError: undefined symbol: _ZN5torch",
        "       -> reinstall Horovod for the frameworks that are here now",
    ):
        assert line in done.stdout, done.stdout
    assert "[ ok ] import" not in done.stdout


def test_horovod_that_cannot_be_imported_under_a_launcher_is_red(broken_horovod):
    done = call(COMMAND, PYTHONPATH=broken_horovod, SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stdout.startswith("rank 1:\n") and "[FAIL] import: horovod.torch cannot be imported" in done.stdout


class _Alone:
    """Horovod as it is where its MPI does not know the launcher's PMI."""

    size = staticmethod(lambda: 1)
    init = staticmethod(lambda: None)


@pytest.mark.parametrize("size, n_red", [("4", 1), ("1", 0)])
def test_ranks_that_do_not_find_each_other_are_red(size, n_red, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", size)
    found = doctor.examine([doctor.check_init], _Alone)
    assert [finding.level for finding in found] == [doctor.RED] * n_red
    assert all(f"started {size} processes, but Horovod sees 1" in finding.text for finding in found)


def test_framework_that_horovod_was_not_built_for_is_noted(monkeypatch):
    def import_module(name):
        if name == "horovod.torch":
            return doctor
        raise ImportError("Extension horovod.tensorflow has not been built")

    for name in [name for names in config.LAUNCHERS for name in names]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    modules: list = []
    assert [finding.level for finding in doctor.check_import(modules)] == [doctor.YELLOW, doctor.GREEN]
    assert modules == [doctor]


def test_check_that_fails_names_its_topic_and_a_remedy(monkeypatch):
    """Every check there is: each has a remedy for what it did not foresee."""
    checks = [check for name, check in vars(doctor).items() if name.startswith("check_")]
    assert len(checks) >= 9
    for check in checks:

        def fails(*args):
            raise OSError("planted")

        fails.__name__ = check.__name__
        (finding,) = doctor.examine([fails], None)
        assert finding.level == doctor.RED and finding.text == "OSError: planted" and len(finding.remedy) > 10
        assert finding.topic == check.__name__[len("check_") :].replace("_", " ")


def test_wrong_variable_is_not_blamed_on_the_library(monkeypatch):
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setenv("HOROVOD_APS_NUM_THREADS", "none")
    (finding,) = doctor.examine([doctor.check_kernels])
    assert "HOROVOD_APS_NUM_THREADS must be" in finding.text and finding.remedy == "unset it or correct it"


def test_missing_library_is_red(monkeypatch):
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    (finding,) = doctor.examine([doctor.check_kernels])
    assert finding.level == doctor.RED and "pip install -e ." in finding.text and finding.topic == "kernels"


def test_missing_packages_are_red(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda *names: None)
    red = {finding.topic for finding in doctor.check_versions() if finding.level == doctor.RED and finding.remedy}
    assert red == {"horovod", "frameworks"}


def test_other_versions_are_noted(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda *names: "1.2.3")
    noted = {finding.topic for finding in doctor.check_versions() if finding.level == doctor.YELLOW}
    assert noted == {"torch", "tensorflow", "horovod"}


def test_wrong_result_is_red():
    values = doctor._values(0)
    assert doctor._judge("exchange", values, 1, True, "").level == doctor.GREEN
    assert doctor._judge("exchange", values + 1, 1, True, "").level == doctor.RED
    assert doctor._judge("exchange", values * float("nan"), 1, True, "").level == doctor.RED
    assert doctor._judge("exchange", values, 1, False, "").level == doctor.RED


def test_report_of_other_ranks_shows_what_differs():
    same = doctor.Finding(doctor.GREEN, "versions", "1")
    other = doctor.Finding(doctor.RED, "kernels", "broken", "mend it")
    text = doctor._table([[same], [same, other]])
    assert text.count("versions") == 1 and "rank 1: [FAIL] kernels: broken" in text and "1 failures" in text


def test_two_ranks_exchange():
    """Both may run on one core only, so that it is crowded on any machine."""
    one = str(min(os.sched_getaffinity(0)))
    done = call(["taskset", "-c", one, *MPIRUN, "-np", "2", *COMMAND])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[ ok ] hierarchy: flat (all ranks are on one host)\n" in done.stdout
    assert "[ ok ] MPI waits: gives up the core, chosen since 2 ranks with 3 threads each share 1 core\n" in done.stdout
    assert "[ ok ] exchange: 2 ranks, relative error" in done.stdout
    assert done.stdout.count("[ ok ] versions") == 1 and "2 ranks, all is well" in done.stdout


def test_fault_on_another_rank_is_shown_and_fails():
    done = call([*MPIRUN, "-np", "1", *COMMAND, ":", "-np", "1", "env", "HOROVOD_APS_THREADS=4", *COMMAND])
    assert done.returncode != 0
    assert "rank 1: [FAIL] environment: HOROVOD_APS_THREADS is not a variable" in done.stdout
    assert "2 ranks, 1 failures" in done.stdout


def test_absent_rank_is_reported_in_time():
    start = time.monotonic()
    done = call([*MPIRUN, "-np", "1", *COMMAND, "--timeout", "5", ":", "-np", "1", "sleep", "200"])
    assert done.returncode != 0 and time.monotonic() - start < 150
    assert "rank 0 waited 5 s for the others" in done.stdout and "-> check that all ranks run this" in done.stdout
