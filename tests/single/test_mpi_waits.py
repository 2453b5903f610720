"""How Open MPI waits: what is chosen from an environment, and that the real MPI does so.

Oracle of the real one: its own control variable `mpi_yield_when_idle`, read by MPI's tool interface.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_aps import cores
from horovod_aps.cores import Cores
from horovod_aps.frontends import idle

ROOT = Path(__file__).parents[2]
MPI = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
SLURM = {
    "PMIX_RANK": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}
LAUNCHERS = ("OMPI_", "PMI", "SLURM_", "OPAL_")


@pytest.fixture
def home(monkeypatch, tmp_path: Path) -> Path:
    """An empty one, without any launcher; the system has no file of Open MPI's."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPAL_SYSCONFDIR", str(tmp_path / "etc"))
    monkeypatch.setattr(idle, "_chosen", "")
    for folder in (".openmpi", "etc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "etc" / "openmpi-mca-params.conf").write_text("# nothing\n")
    return tmp_path


def choose(monkeypatch, variables: dict[str, str], found: Cores) -> tuple[str | None, str]:
    """The variable after the choice, and how the doctor describes it."""
    monkeypatch.setattr(cores, "count", lambda: found)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(idle.VARIABLE, "")  # to be put back
    if idle.VARIABLE not in variables:
        monkeypatch.delenv(idle.VARIABLE)
    else:
        monkeypatch.setenv(idle.VARIABLE, variables[idle.VARIABLE])
    idle.choose()
    idle.choose()  # another framework's module may be imported too
    return os.environ.get(idle.VARIABLE), idle.describe()


@pytest.mark.parametrize(
    "variables, found, value, text",
    [
        (MPI, Cores(12, 12), None, "busily: there are cores enough (4 ranks, 12 cores)"),
        (MPI, Cores(11, 11), "1", "gives up the core, chosen since 4 ranks with 3 threads each share 11 cores"),
        (MPI, Cores(1, 64), "1", "gives up the core, chosen since this rank, with 3 threads, is bound to 1 core"),
        (MPI, Cores(2, 64), "1", "gives up the core, chosen since this rank, with 3 threads, is bound to 2 cores"),
        (MPI, Cores(16, 64), None, "busily: there are cores enough (4 ranks, 64 cores)"),  # bound to a socket
        (MPI, Cores(2, 2), "1", "gives up the core, chosen since 4 ranks with 3 threads each share 2 cores"),
        (
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},  # as benchmarks/start.py starts it
            Cores(2, 2),
            "1",
            "gives up the core, chosen since 1 rank with 3 threads each share 2 cores",
        ),
        (SLURM, Cores(12, 12), None, "busily: there are cores enough (4 ranks, 12 cores)"),
        (SLURM, Cores(8, 8), "1", "gives up the core, chosen since 4 ranks with 3 threads each share 8 cores"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "many"}, Cores(1, 1), None, ""),
        ({"MPI_LOCALNRANKS": "4", "PMI_RANK": "0", "PMI_SIZE": "4"}, Cores(1, 1), None, ""),  # MPICH
        ({}, Cores(1, 1), None, ""),
        (MPI | {idle.VARIABLE: "0"}, Cores(1, 1), "0", f"busily, as {idle.VARIABLE} says"),
        (MPI | {idle.VARIABLE: "true"}, Cores(64, 64), "true", f"gives up the core, as {idle.VARIABLE} says"),
        (
            MPI | {"OMPI_MCA_mpi_oversubscribe": "1"},
            Cores(64, 64),
            None,
            "gives up the core, as Open MPI does where ranks outnumber slots",
        ),
        (
            MPI | {"OMPI_MCA_mpi_oversubscribe": "0"},
            Cores(64, 64),
            None,
            "busily: there are cores enough (4 ranks, 64 cores)",
        ),
    ],
    ids=str,
)
def test_choice_follows_the_environment(variables, found, value, text, home, monkeypatch):
    assert choose(monkeypatch, variables, found) == (value, text)


@pytest.mark.parametrize(
    "file, content, how",
    [
        (".openmpi/mca-params.conf", "mpi_yield_when_idle = 0\n", "busily"),
        (".openmpi/mca-params.conf", "btl = tcp,self\n  mpi_yield_when_idle=yes", "gives up the core"),
        (".openmpi/mca-params.conf", "mpi_yield_when_idle = 1\nmpi_yield_when_idle = n\n", "busily"),
        ("etc/openmpi-mca-params.conf", "mpi_yield_when_idle = 0\n", "busily"),
        (".openmpi/mca-params.conf", "# mpi_yield_when_idle = 0\nmpi_yield_when_idle_not = 0\n", ""),
        (".openmpi/mca-params.conf", "mpi_yield_when_idle\n= 0", ""),
        (".openmpi/other.conf", "mpi_yield_when_idle = 0\n", ""),
    ],
)
def test_choice_leaves_alone_what_a_file_sets(file, content, how, home, monkeypatch):
    """Ours would be a variable of the environment, which outranks files."""
    (home / file).write_text(content)
    value, text = choose(monkeypatch, MPI, Cores(2, 2))
    assert (value, text) == ((None, f"{how}, as {home / file} says") if how else ("1", text))


def test_choice_knows_other_names_of_the_files(home, monkeypatch):
    """Oracle: Open MPI 4.1, whose list has commas and whose first file wins."""
    (home / ".openmpi" / "mca-params.conf").write_text("mpi_yield_when_idle = 0\n")
    first, second = home / "first.conf", home / "second.conf"
    files = {"OMPI_MCA_mca_base_param_files": f"{home / 'none'},{first},{second}"}
    assert choose(monkeypatch, MPI | files, Cores(2, 2))[0] == "1"
    monkeypatch.setattr(idle, "_chosen", "")
    first.write_text("mpi_yield_when_idle = 1\n")
    second.write_text("mpi_yield_when_idle = 0\n")
    assert choose(monkeypatch, MPI | files, Cores(2, 2)) == (None, f"gives up the core, as {first} says")


# ---- the real MPI -----------------------------------------------------------------------------------------

READ = """
import ctypes, sys
lib = ctypes.CDLL(None)
if not hasattr(lib, "MPI_T_cvar_read"):
    lib = ctypes.CDLL("libmpi.so.40")
number, handle, value = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_ubyte(77)
assert lib.MPI_T_init_thread(0, ctypes.byref(number)) == 0
assert lib.MPI_T_cvar_get_index(b"mpi_yield_when_idle", ctypes.byref(number)) == 0
assert lib.MPI_T_cvar_handle_alloc(number, None, ctypes.byref(handle), ctypes.byref(number)) == 0
assert lib.MPI_T_cvar_read(handle, ctypes.byref(value)) == 0
print("yields:", value.value)
"""
HOROVOD = "import horovod.torch as hvd, horovod_aps.torch; hvd.init(); assert hvd.mpi_enabled()" + READ
QUICK = "from horovod_aps.frontends import idle; idle.choose(); from mpi4py import MPI" + READ


def launch(program: str, home: Path, *arguments: str) -> str:
    """What one rank under mpirun prints, bound to a core as mpirun does by itself: crowded on any machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", *LAUNCHERS))}
    roots = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": str(home)}
    command = ["mpirun", "-np", "1", "--bind-to", "core", *arguments, sys.executable, "-c", program]
    done = subprocess.run(command, env=clean | roots, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mpi_that_horovod_starts_yields_where_it_is_crowded(tmp_path):
    assert "yields: 1\n" in launch(HOROVOD, tmp_path)


def test_mpi_does_as_the_user_says(tmp_path):
    assert "yields: 0\n" in launch("from mpi4py import MPI" + READ, tmp_path)  # what would be without us
    assert "yields: 0\n" in launch(QUICK, tmp_path, "--mca", "mpi_yield_when_idle", "0")
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("mpi_yield_when_idle = 0\n")
    assert "yields: 0\n" in launch(QUICK, tmp_path)
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("mpi_yield_when_idle = 1\n")
    assert "yields: 1\n" in launch(QUICK, tmp_path)
