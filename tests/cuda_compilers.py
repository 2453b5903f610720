"""NVIDIA's compilers, for tests that a CUDA source is one that they take."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cupy_backends.cuda.libs import nvrtc as binding

from horovod_aps.kernels import nvrtc

binding.getVersion()  # finds the library now: tests put something else in CuPy's place later


def compile_with_nvrtc(source: str, architecture: str) -> None:
    """Through CuPy's binding, with the options that a user's run has; raises RuntimeError if it is refused."""
    folder = nvrtc.source_folder()
    options = (*nvrtc.OPTIONS, f"--gpu-architecture={architecture}", f"-I{folder}")
    assert nvrtc.compile_source(binding, (folder / source).read_text(), source, options)


def compile_with_nvcc(source: str, target: Path, *options: str) -> None:
    """Where nvcc is installed; without it NVRTC is the proof, and this checks that it is absent indeed."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        assert not Path("/usr/local/cuda/bin/nvcc").exists(), "nvcc is installed but not on PATH"
        return
    command = [compiler, "-arch=sm_80", *options, str(nvrtc.source_folder() / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0
