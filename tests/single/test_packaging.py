"""The package as users get it: wheel, sdist, and an import that costs no framework.

Oracle: a fresh interpreter that sees the installed files only, not the checkout.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUND_TRIP = """
import numpy as np, horovod_aps
from horovod_aps import cuda_kernels, kernels
assert horovod_aps.__file__.startswith({target!r}), horovod_aps.__file__
assert horovod_aps.__version__ == "0.1.0"
x = np.linspace(-3, 3, 1025, dtype=np.float32)
segs = np.zeros(1, dtype=kernels.SEGMENT)
segs["data"], segs["n"], segs["exp_bits"], segs["man_bits"], segs["factor"] = x.ctypes.data, x.size, 4, 3, 1
k = kernels.CpuKernels()
k.scan(segs)
message = k.alloc(1025)
k.encode(segs, message)
y = np.zeros_like(x)
segs["data"] = y.ctypes.data
k.decode(segs, [message])
assert 0 < np.abs(x - y).max() <= 0.125
assert (cuda_kernels.source_folder() / "aps_kernels.cu").is_file()
assert (cuda_kernels.source_folder() / "aps_scalar.h").is_file()
assert str(cuda_kernels.source_folder()).startswith({target!r})
fmt = horovod_aps.FloatFormat(4, 3)
assert fmt.decode(fmt.encode(x)).shape == x.shape
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def install_and_try(archive: Path, tmp_path: Path) -> None:
    """Install an archive into a folder of its own and run a round trip from there."""
    target = tmp_path / f"site_{archive.suffix[1:]}"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--target", str(target), str(archive), cwd=tmp_path)  # fmt: skip
    # -S -s keep the editable install of the checkout away; NumPy's folder comes last.
    packages = str(Path(pytest.__file__).parents[1])
    code = f"import sys; sys.path[:0] = [{str(target)!r}]; sys.path.append({packages!r})\n"
    run(sys.executable, "-S", "-s", "-c", code + ROUND_TRIP.format(target=str(target)), cwd=tmp_path)


@pytest.mark.slow
def test_packaging_wheel_and_sdist_work_without_the_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in tracked:  # a copy, so that building leaves nothing in the checkout
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
        str(source),
        cwd=tmp_path,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"horovod_aps/cuda/aps_kernels.cu", "horovod_aps/cuda/aps_scalar.h"} <= names
    assert not [name for name in names if name.startswith(("tests", "cuda/", "benchmarks"))]
    with tarfile.open(sdist) as archive:
        members = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {
        "cuda/aps_cpu.cpp",
        "cuda/aps_cpu_kernels.inc",
        "cuda/aps_cpu_avx2.inc",
        "cuda/aps_kernels.cu",
    } <= members
    install_and_try(wheel, tmp_path)
    install_and_try(sdist, tmp_path)


def test_packaging_import_loads_neither_a_framework_nor_numpy() -> None:
    code = (
        "import sys, horovod_aps\n"
        "bad = {'torch', 'tensorflow', 'cupy', 'mpi4py', 'horovod', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "from horovod_aps import FloatFormat, kernels\n"
        "bad = {'torch', 'tensorflow', 'cupy', 'mpi4py', 'horovod'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    run(sys.executable, "-c", code, cwd=ROOT)
