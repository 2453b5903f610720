"""Build the CPU kernel library and torch's pool of memory; everything else about the package is in setup.cfg.

The library is plain C++ loaded by ctypes. Instruction sets are chosen at run time, so no -march flag is needed and a
wheel runs on every machine of its architecture. OpenMP is used where the compiler has it. The pool (horovod_aps._torch)
is built where torch is at hand, for that version of it, and can be done without.
"""

import glob
import hashlib
import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

# Each library carries the checksum of all of these, so a change of any makes it old.
FILES = sorted(path for kind in ("h", "inc", "cpp") for path in glob.glob(f"cuda/*.{kind}"))


def checksum() -> str:
    """Of all that the library is made from, as horovod_aps.kernels.native has it: an old library must not be used."""
    paths = sorted(map(Path, FILES))
    parts = [f"{path.name}\0{path.read_text()}" for path in paths]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


SOURCES = ("APS_SOURCES", f'"{checksum()}"')


def torch_extension() -> list[Extension]:
    """The pool of memory for torch's large tensors; none where torch is not installed, as in an isolated build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None or sys.platform != "linux":
        return []
    try:
        built_for = version("torch")
    except PackageNotFoundError:
        return []
    folder = Path(spec.origin).parent
    return [
        Extension(
            "horovod_aps._torch",
            sources=["cuda/aps_torch.cpp"],
            depends=FILES,
            define_macros=[SOURCES, ("APS_TORCH", f'"{built_for}"')],
            include_dirs=[str(folder / "include")],
            library_dirs=[str(folder / "lib")],
            libraries=["c10"],
            language="c++",
            extra_compile_args=["-std=c++20", "-O2"],
            optional=True,
        )
    ]


class BuildLibrary(build_ext):
    """Build an extension that has no module init function, with OpenMP where the compiler offers it."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extensions(self) -> None:
        if self.has_flag("-fopenmp"):
            for extension in self.extensions:
                extension.extra_compile_args.append("-fopenmp")
                extension.extra_link_args.append("-fopenmp")
        super().build_extensions()

    def has_flag(self, flag: str) -> bool:
        compiler: Any = self.compiler
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "flag.cpp")
            with open(source, "w") as file:
                file.write("int main() { return 0; }\n")
            try:
                objects = compiler.compile([source], output_dir=folder, extra_postargs=[flag])
                compiler.link_executable(objects, os.path.join(folder, "flag"), extra_postargs=[flag])
            except Exception:  # setuptools and distutils raise different classes for a failed compile
                print(f"setup: the compiler has no {flag}; the kernels will use one thread", file=sys.stderr)
                return False
        return True


setup(
    packages=[*find_namespace_packages(include=["horovod_aps", "horovod_aps.*"]), "horovod_aps.cuda"],
    ext_modules=[
        Extension(
            "horovod_aps._cpu",
            sources=["cuda/aps_cpu.cpp", "cuda/aps_simulate.cpp", "cuda/aps_activations.cpp"],
            depends=FILES,
            define_macros=[SOURCES],
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fno-trapping-math",
                "-ffp-contract=off",
                "-fno-math-errno",
            ],
        ),
        *torch_extension(),
    ],
    cmdclass={"build_ext": BuildLibrary},
)
