"""Runs the files of tests/parallel under mpirun and horovodrun; one launch per set of files, since starting costs most.

A launch passes if every rank ran at least one test, all ranks ran the same number, and none failed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PARALLEL = ROOT / "tests" / "parallel"
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PYTHONFAULTHANDLER": "1",
}
GLOO_SECONDS = "120"  # a thread may not get its turn for 30 where ranks outnumber cores (docs/reliability.md)
HOROVODRUN = Path(sys.executable).parent / "horovodrun"
TORCH_FILES = (
    "test_torch_optimizer.py",
    "test_torch_allreduce.py",
    "test_torch_faults.py",
    "test_simulate.py",
    "test_torch_orders.py",
    "test_torch_process_sets.py",
    "test_torch_activations.py",
)


def launcher(kind: str, n_ranks: int) -> list[str]:
    """The command in front of what every rank runs."""
    if kind == "mpirun":
        # Yielding helps: here ranks share cores, and a rank that spins keeps the one it waits for from running.
        return [
            "mpirun",
            "--oversubscribe",
            "--bind-to",
            "none",
            "--mca",
            "mpi_yield_when_idle",
            "1",
            "-np",
            str(n_ranks),
        ]
    if kind == "torchrun":
        return [str(HOROVODRUN.with_name("torchrun")), "--nproc-per-node", str(n_ranks), "--no-python"]
    command = [str(HOROVODRUN), "--gloo" if kind == "gloo" else "--mpi", "-np", str(n_ranks)]
    if kind == "horovodrun-mpi":
        command += ["--mpi-args=--oversubscribe --bind-to none"]
    return command


def run(command: Sequence[str], limit: float, env: dict[str, str]) -> tuple[int | None, str]:
    """Exit code (None if it took longer than `limit` seconds and was killed) and output of a launch."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **env},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.terminate()  # launchers end their ranks when asked politely
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return None, output


def launch(
    kind: str,
    n_ranks: int,
    files: Sequence[str],
    log_dir: Path,
    *,
    limit: float = 600,
    marker: str = "not slow",
    keyword: str = "",
    env: dict[str, str] | None = None,
) -> None:
    """Run test files on all ranks; fails with the output and each rank's log."""
    paths = [str(PARALLEL / name) for name in files if (PARALLEL / name).exists()]
    assert paths, f"none of {', '.join(files)} exists"
    command = [
        *launcher(kind, n_ranks),
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=60",
        "-m",
        marker,
        "-k",
        keyword,
        *paths,
    ]
    start = time.monotonic()
    environment = {"HOROVOD_APS_TEST_LOG": str(log_dir), "HOROVOD_GLOO_TIMEOUT_SECONDS": GLOO_SECONDS, **(env or {})}
    code, output = run(command, limit, environment)
    logs = {rank: _read(log_dir / f"rank{rank}.log") for rank in range(n_ranks)}
    endings = [re.search(r"finished with 0: (\d+) collected, 0 failed", log) for log in logs.values()]
    counts = {match[1] for match in endings if match}
    if code == 0 and all(endings) and len(counts) == 1 and counts != {"0"}:
        return
    reason = f"no end after {limit:.0f} s" if code is None else f"exit code {code}"
    tails = "\n".join(f"--- rank {rank} ---\n{log[-3000:]}" for rank, log in logs.items())
    pytest.fail(
        f"{' '.join(command)}\n{reason}, {time.monotonic() - start:.0f} s\n{output[-15000:]}\n{tails}", pytrace=False
    )


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "(this rank has run nothing)"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("kind", ["mpirun", "gloo"])
def test_two_levels(kind, framework, tmp_path):
    """Four ranks on one machine, told by the tests that they are two hosts."""
    on_gpus = {"torch": "test_torch_two_level_gpu.py", "tensorflow": "test_tensorflow_operations.py"}
    flat_too = kind == "gloo" and framework == "tensorflow"  # where operations are all-to-alls as well
    files = [on_gpus[framework], f"test_{framework}_two_level.py"]
    launch(kind, 4, files, tmp_path, keyword="" if flat_too else "two_level")


@pytest.mark.slow
def test_two_levels_on_three_hosts(tmp_path):
    """Six ranks: hosts scatter, reduce and gather, where two swap; test_faults.py compares some of that, too."""
    launch("mpirun", 6, ["test_torch_two_level.py"], tmp_path, keyword="emulation")


@pytest.mark.parametrize("kind, n_ranks", [("mpirun", 2), ("mpirun", 3), ("gloo", 2)])
def test_torch(kind, n_ranks, tmp_path):
    """MPI is started by Horovod on two ranks, and by mpi4py on three: then it outlives `hvd.shutdown()`."""
    launch(kind, n_ranks, TORCH_FILES, tmp_path, env={"HOROVOD_APS_TEST_MPI": "mpi4py"} if n_ranks == 3 else {})


def test_torch_three_ranks_over_gloo(tmp_path):
    """Slow on two cores, so only what depends on the number of ranks; four ranks run everything."""
    launch("gloo", 3, TORCH_FILES[:2], tmp_path, keyword="many_steps or equals_simulation or hook_order")


def test_one_rank(tmp_path):
    launch("mpirun", 1, ["test_torch_one_rank.py", "test_tensorflow_one_rank.py"], tmp_path)


@pytest.mark.slow
def test_torch_horovodrun_mpi(tmp_path):
    launch("horovodrun-mpi", 2, ["test_torch_allreduce.py"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mpirun", "gloo"])
def test_torch_four_ranks(kind, tmp_path):
    launch(kind, 4, TORCH_FILES, tmp_path, limit=1200)


def test_emulated_ranks_equal_four_real_ones(tmp_path):
    launch("mpirun", 4, ["test_simulate.py"], tmp_path)


@pytest.mark.slow
def test_torch_slow(tmp_path):
    launch("mpirun", 2, TORCH_FILES, tmp_path, limit=1200, marker="slow")


def test_torch_digits(tmp_path):
    launch("mpirun", 2, ["test_torch_digits.py"], tmp_path)


TENSORFLOW = ["test_tensorflow.py", "test_keras3.py", "test_tf_keras.py"]


@pytest.mark.parametrize("kind", ["mpirun", "gloo"])
@pytest.mark.parametrize("file", TENSORFLOW)
def test_tensorflow(file, kind, tmp_path):
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if file == "test_tf_keras.py" else {}
    # Both give the same bits, so one of them is enough for accuracy.
    launch(kind, 2, [file], tmp_path, keyword="" if kind == "mpirun" else "not accuracy", env=legacy)


@pytest.mark.parametrize("kind", ["mpirun", "gloo"])
def test_tensorflow_three_ranks(kind, tmp_path):
    keyword = "200- or tape_equals or process_sets or set_format or carrier"
    launch(kind, 3, ["test_tensorflow.py"], tmp_path, keyword=keyword + " or every_format" * (kind == "mpirun"))


@pytest.mark.parametrize("kind, n_ranks", [("mpirun", 2), ("mpirun", 3), pytest.param("gloo", 3)])
def test_torch_gpu(kind, n_ranks, tmp_path):
    launch(kind, n_ranks, ["test_torch_gpu.py", "test_torch_operations.py"], tmp_path)


@pytest.mark.parametrize("kind, n_ranks", [("mpirun", 2), pytest.param("gloo", 3)])
def test_torch_collectives(kind, n_ranks, tmp_path):
    """By themselves: they use Horovod's unnamed operations, which no longer match after tests of process sets."""
    launch(kind, n_ranks, ["test_torch_collectives.py"], tmp_path)


def test_tensorflow_gpu(tmp_path):
    launch("mpirun", 2, ["test_tensorflow_gpu.py", "test_tensorflow_operations.py"], tmp_path)


@pytest.mark.slow
def test_tensorflow_gpu_in_two_levels(tmp_path):
    launch("mpirun", 4, ["test_tensorflow_gpu.py"], tmp_path, keyword="two_levels")


@pytest.mark.slow
def test_tensorflow_operations_over_gloo(tmp_path):
    launch("gloo", 3, ["test_tensorflow_operations.py"], tmp_path)


@pytest.mark.parametrize("kind, n_ranks", [("mpirun", 3), pytest.param("gloo", 2, marks=pytest.mark.slow)])
def test_torch_and_tensorflow_give_the_same_bits(kind, n_ranks, tmp_path):
    worker = ROOT / "tests" / "workers" / "frontend_worker.py"
    results = []
    for framework in ("torch", "tensorflow"):
        path = tmp_path / f"{framework}.npz"
        code, output = run([*launcher(kind, n_ranks), sys.executable, str(worker), framework, str(path)], 300, {})
        assert code == 0, output[-5000:]
        results.append(np.load(path))
    assert set(results[0]) == set(results[1]) and len(results[0]) > 100
    for name in results[0]:
        np.testing.assert_array_equal(results[0][name].view(np.int32), results[1][name].view(np.int32), name)


FAILING = """
import os, time
def test_fails_on_one_rank():
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"])
    assert rank != 1, "as it should"
    time.sleep(600)  # as in a collective that the other rank never joins
"""


@pytest.mark.parametrize("kind", ["mpirun", "gloo"])
def test_launch_reports_a_failing_rank_and_does_not_hang(kind, tmp_path):
    """The launcher itself can fail: one rank fails, the other waits for it."""
    (tmp_path / "test_failing.py").write_text(FAILING)
    shutil.copy(PARALLEL / "conftest.py", tmp_path)
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="rank 1: .*test_fails_on_one_rank") as caught:
        launch(kind, 2, [str(tmp_path / "test_failing.py")], tmp_path)
    assert "as it should" in str(caught.value)
    assert time.monotonic() - start < 120
