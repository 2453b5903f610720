"""`make gpu-check` as far as it goes without a GPU: it says so here, and runs on the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda_standin

from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.tools import gpu_check


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "horovod_aps.tools.gpu_check", "--out", str(tmp_path / "out.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == gpu_check.NO_GPU == 3 and len(done.stdout.splitlines()) == 1
    assert "no CUDA device" in done.stdout and not (tmp_path / "out.txt").exists()


def test_kernels_of_the_stand_in_are_found_equal_and_timed(monkeypatch) -> None:
    cuda_standin.reset()
    device = CudaKernels(cuda_standin, block=32)
    monkeypatch.setattr(gpu_check, "FORMATS", [(4, 3), None])  # all of them in the whole, below
    lines = list(gpu_check.compare(device))
    assert len(lines) == 7 and all(line.endswith("as on the CPU") for line in lines)
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    assert len(list(gpu_check.speeds(device, 1 << 12))) == 6
    own = CudaKernels.encode
    monkeypatch.setattr(CudaKernels, "encode", lambda self, segs, message, seed=None: own(self, segs, message, 7))
    assert any("DIFFERS" in line for line in gpu_check.compare(device)), "a wrong kernel is not seen"


def test_a_report_is_written_and_failures_count(tmp_path: Path, monkeypatch) -> None:
    def fails():
        raise RuntimeError("no such kernel")
        yield

    monkeypatch.setattr(gpu_check, "n_devices", lambda: 1)
    monkeypatch.setattr(gpu_check, "sections", lambda n_timed: iter([("one", lambda: iter(["fine"])), ("two", fails)]))
    out = tmp_path / "report.txt"
    assert gpu_check.main(["--out", str(out)]) == 1
    assert "fine" in out.read_text() and "FAILED: RuntimeError: no such kernel" in out.read_text()


def test_the_whole_of_it_runs_on_the_stand_in(tmp_path: Path) -> None:
    """As on a machine with a GPU, which the stand-in plays: every section, with two ranks of each framework."""
    tests = Path(__file__).parents[1]
    paths = [str(tests / "gpu_machine"), str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    out = tmp_path / "out.txt"
    command = [sys.executable, "-m", "horovod_aps.tools.gpu_check", "--out", str(out), "--elements", "512"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    text = out.read_text() if out.exists() else done.stderr
    assert done.returncode == 0, text
    for title in ("machine", "compiling", "kernels against the CPU", "speed", "two ranks, PyTorch"):
        assert f"\n{title}\n" in text
    assert text.count("of 2: as on the CPU; flat") == 4 and text.count("through pinned host memory") == 8, text
    assert text.count("of 4: as on the CPU; two-level by messages (2 hosts with 2 ranks)") == 4, text
    assert "FAILED" not in text and "not run" not in text
