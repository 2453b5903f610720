"""Set-up of the tests that run on several ranks: `mpirun -np 2 python -m pytest tests/parallel/<file>`.

Collectives of a rank whose test failed would be out of step with the others for ever after, so the first failure
ends that rank at once with its traceback printed; the launcher then ends the others. Under plain pytest (no
launcher) the files are collected only if named on the command line, and then run on a single rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RANK = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK") or os.environ.get("RANK")
LOG_DIR = os.environ.get("HOROVOD_APS_TEST_LOG")
os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # read by hvd.init(); tests add and remove sets
if os.environ.get("HOROVOD_APS_TEST_MPI") == "mpi4py":
    from mpi4py import MPI  # noqa: F401 (starts MPI before Horovod does, which then leaves it running at its shutdown)

if RANK is None:
    collect_ignore_glob = ["test_*.py"]


def _log(text: str) -> None:
    """A line in this rank's own log, where the launcher looks for how far each rank got."""
    if RANK is not None and LOG_DIR:
        with open(Path(LOG_DIR) / f"rank{RANK}.log", "a") as log:
            log.write(text + "\n")


def _abort(where: str, text: str) -> None:
    _log(f"FAILED {where}\n{text}")
    if RANK is None:
        return
    sys.__stdout__.write(f"\n===== rank {RANK}: {where} failed; this rank ends here =====\n{text}\n")
    sys.__stdout__.flush()
    os._exit(1)


def pytest_runtest_logstart(nodeid: str) -> None:
    _log(f"started {nodeid}")


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        captured = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
        _abort(f"{report.nodeid} ({report.when})", report.longreprtext + captured)
    elif report.when == "call":
        _log(f"{report.outcome} {report.nodeid} in {report.duration:.2f} s")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _abort(report.nodeid, report.longreprtext)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if "ddp_common" in sys.modules:
        sys.modules["ddp_common"].end()
    _log(f"finished with {int(exitstatus)}: {session.testscollected} collected, {session.testsfailed} failed")


@pytest.fixture(autouse=True)
def no_handle_left() -> Iterator[None]:
    """After each test nothing may be left in Horovod's table of PyTorch operations."""
    yield
    if "horovod.torch.mpi_ops" in sys.modules:
        assert not sys.modules["horovod.torch.mpi_ops"]._handle_map
