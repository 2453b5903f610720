"""The package as users get it: wheel, sdist, and an import that costs no framework.

Oracle: a fresh interpreter that sees the installed files only, not the checkout.
"""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from horovod_aps import kernels
from horovod_aps.tools import doctor

ROOT = Path(__file__).parents[2]
ROUND_TRIP = """
import numpy as np, horovod_aps
from horovod_aps import kernels
from horovod_aps.kernels.cuda import source_folder
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
assert (source_folder() / "aps_kernels.cu").is_file()
assert (source_folder() / "aps_codecs.h").is_file()
assert str(source_folder()).startswith({target!r})
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
    kept = {f"cuda/{name}" for name in ("aps_kernels.cu", "aps_codecs.h", "aps_scalar.h")} | {"tools/cli.py"}
    assert {f"horovod_aps/{name}" for name in kept} <= names
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert "Project-URL: Paper, https://arxiv.org/abs/1911.08907" in zipfile.ZipFile(wheel).read(metadata).decode()
    assert not [name for name in names if name.startswith(("tests", "cuda/", "benchmarks"))]
    with tarfile.open(sdist) as archive:
        members = {name.split("/", 1)[-1] for name in archive.getnames()}
    # Everything but what belongs to the repository: tests come with their helpers and with what they look at.
    present = {name for name in tracked if (ROOT / name).is_file()}
    assert present - members == {".ci/run", ".gitignore"}
    install_and_try(wheel, tmp_path)
    install_and_try(sdist, tmp_path)


# ---- Pinned versions ----

NOT_THERE = {"cupy-cuda12x", "cupy-cuda13x"}  # need a GPU


def requirements(path: str) -> dict[str, Requirement]:
    lines = (ROOT / path).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in found}


def of_setup_cfg() -> list[Requirement]:
    cfg = configparser.ConfigParser()
    cfg.read(ROOT / "setup.cfg")
    lists = [cfg["options"]["install_requires"], *cfg["options.extras_require"].values()]
    return [Requirement(line) for text in lists for line in text.split("\n") if line]


def is_exact(requirement: Requirement) -> bool:
    return any(one.operator == "==" and "*" not in one.version for one in requirement.specifier)


def test_packaging_pins_everything_that_setup_installs() -> None:
    """Oracle: what the installed packages themselves ask for, followed to the end."""
    pinned, wanted = requirements("scripts/constraints.txt"), requirements("requirements.txt")
    assert all(map(is_exact, pinned.values()))
    assert {name: one.specifier for name, one in wanted.items()}.items() <= {
        name: one.specifier for name, one in pinned.items()
    }.items()
    queue, seen = [*wanted, "tf-keras", "torchvision"], set()
    while queue:
        name = queue.pop()
        if name in seen or name in ("tensorflow", "horovod"):  # tensorflow-cpu is there instead
            continue
        seen.add(name)
        found, needs = version(name), requires(name) or []
        if name in pinned:
            assert found in pinned[name].specifier or found.partition("+")[0] in pinned[name].specifier, name
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                # torch's CUDA build pins its own CUDA packages
                assert canonicalize_name(need.name) in {*pinned, "tensorflow"} or is_exact(need), f"{name}: {need}"
                queue.append(canonicalize_name(need.name))
    assert len(seen) > 60


def test_packaging_ranges_are_closed_and_hold_what_is_pinned() -> None:
    pinned = requirements("scripts/constraints.txt")
    pinned["tensorflow"] = pinned["tensorflow-cpu"]
    text = (ROOT / "scripts" / "setup.sh").read_text()
    pinned["horovod"] = Requirement("horovod==" + re.findall(r"^HOROVOD_VERSION=(.*)$", text, re.MULTILINE)[0])
    for one in of_setup_cfg():
        assert {limit.operator for limit in one.specifier} == {">=", "<"}, one
        if one.name not in NOT_THERE:
            (pin,) = pinned[canonicalize_name(one.name)].specifier
            assert pin.version in one.specifier, one
    for name, tested in doctor.TESTED.items():
        (pin,) = pinned[name].specifier
        assert pin.version.startswith(tested + "."), name


def test_packaging_examples_extra_is_what_the_examples_import() -> None:
    """But for the frameworks and torchvision, whose builds must fit together and are the user's to choose."""
    imported: set[str] = set()
    for path in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    ours = {"common", "distributed", "pytorch_imagenet_resnet50", "training", "segmentation_data"}
    ours |= {"benchmarks", "horovod_aps"}
    frameworks = {"torch", "torchvision", "tensorflow", "keras", "horovod", "accelerate", "pytorch_lightning", "ray"}
    wanted = imported - set(sys.stdlib_module_names) - ours - frameworks - {"numpy"}
    cfg = configparser.ConfigParser()
    cfg.read(ROOT / "setup.cfg")
    extra = {Requirement(line).name for line in cfg["options.extras_require"]["examples"].split("\n") if line}
    assert extra == {{"sklearn": "scikit-learn", "PIL": "pillow"}.get(name, name) for name in wanted}


@pytest.mark.parametrize(
    "there, root, named",
    [
        ([], False, "openmpi-bin libopenmpi-dev g++ make python3 python3-venv python3-dev ccache clang"),
        (["mpirun", "mpicxx", "g++", "make", "python3"], True, "ccache clang iproute2"),
    ],
)
def test_packaging_setup_names_what_is_missing(there: list[str], root: bool, named: str, tmp_path: Path) -> None:
    """A machine with nothing but these commands; apt-get only says what it was asked for, and fails."""
    bins, scripts = tmp_path / "bin", tmp_path / "scripts"
    bins.mkdir()
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", scripts)
    for name in ("bash", "dirname", "basename", "mkdir", "tail", "sed"):
        (bins / name).symlink_to(shutil.which(name) or name)
    for name in there:
        (bins / name).symlink_to(sys.executable if name == "python3" else "/bin/true")
    fakes = {
        "id": f"echo {0 if root else 1000}",
        "apt-get": f'echo "$@" >>{tmp_path}/asked; exit 100',
        "cat": "exit 9",
    }  # ends the script after the system packages
    for name, line in fakes.items():
        (bins / name).write_text(f"#!/bin/bash\n{line}\n")
        (bins / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/true")
    done = subprocess.run(["bash", str(scripts / "setup.sh")], env={"PATH": str(bins), "HOME": str(tmp_path)},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode != 0
    if root:
        assert f"setup: going on without {named}" in done.stdout and (tmp_path / "asked").exists()
    else:
        assert f"sudo apt-get install {named}\n" in done.stderr and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("loads", [True, False])
def test_packaging_schemas_are_defined_only_where_operators_do_not_load(loads: bool, tmp_path: Path) -> None:
    """A stand-in for torchvision whose library loads, as beside the CUDA build of torch, or does not."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    library = tmp_path / "torchvision" / "_C.so"
    if loads:
        shutil.copy(kernels.library()._name, library)  # any library that needs nothing
    else:
        library.write_text("not a library")
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import torchvision_schemas, torchvision, torch\n"
        "assert torchvision.__file__.startswith(sys.argv[1]), torchvision.__file__\n"
        "print([hasattr(torch.ops.torchvision, name) for name in ('nms', 'qnms')])\n"
    )
    # -I -S: not the module that make setup has put into this environment
    packages = str(Path(pytest.__file__).parents[1])
    out = run(sys.executable, "-I", "-S", "-c", code, str(tmp_path), str(ROOT / "scripts"), packages, cwd=tmp_path)
    assert out.strip() == str([not loads] * 2)


def test_packaging_import_loads_neither_a_framework_nor_numpy() -> None:
    code = (
        "import sys, horovod_aps\n"
        "bad = {'torch', 'tensorflow', 'cupy', 'mpi4py', 'horovod', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "from horovod_aps import FloatFormat, kernels\n"
        "from horovod_aps.tools import cli\n"
        "cli.build_parser()\n"
        "from horovod_aps import perfmodel\n"
        "bad = {'torch', 'tensorflow', 'cupy', 'mpi4py', 'horovod'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    run(sys.executable, "-c", code, cwd=ROOT)
