"""Compiling the CUDA sources, through CuPy's binding of NVRTC, and keeping what was compiled.

CuPy's own RawModule is not used: it always asks for flush-to-zero, which would change results, and its cache does not
look into headers. What is compiled here is kept under a key of everything that it was made from, in a folder that only
the user can write.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from horovod_aps.kernels.sources import source_folder
from horovod_aps.log import logger

OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false")  # a fused multiply-add would change the last bit


class Nvrtc(Protocol):
    """cupy_backends.cuda.libs.nvrtc, as far as it is used; the names are CuPy's."""

    def getVersion(self) -> tuple[int, int]: ...  # noqa: N802
    def createProgram(self, src: str, name: str, headers: Sequence, include_names: Sequence) -> Any: ...  # noqa: N802
    def compileProgram(self, prog: Any, options: Sequence[str]) -> None: ...  # noqa: N802
    def getCUBIN(self, prog: Any) -> bytes: ...  # noqa: N802
    def getProgramLog(self, prog: Any) -> str: ...  # noqa: N802
    def destroyProgram(self, prog: Any) -> None: ...  # noqa: N802


def binding_of(device: Any) -> Nvrtc:
    """Return the compiler of CuPy, or that of what stands in for it."""
    return device.nvrtc if hasattr(device, "nvrtc") else import_module("cupy_backends.cuda.libs.nvrtc")


def load(device: Any, source: str, index: int) -> Any:
    """Return the module of a source, compiled for the device with this number, which must be current."""
    module = device.cuda.function.Module()
    module.load(cubin(binding_of(device), source, str(device.cuda.Device(index).compute_capability)))
    return module


def cubin(binding: Nvrtc, source: str, architecture: str, folder: Path | None = None) -> bytes:
    """Return a source of `folder` compiled for an architecture such as "80"; from the cache if it is there."""
    folder = source_folder() if folder is None else folder
    code = (folder / source).read_text()
    options = (*OPTIONS, f"--gpu-architecture=sm_{architecture}")
    parts = [repr(binding.getVersion()), repr(options), source, code]
    parts += [f"{path.name}\0{path.read_text()}" for path in sorted(folder.glob("*.h"))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    cache = cache_folder()
    kept = cache / f"{key}.cubin" if cache is not None else None
    if kept is not None and kept.is_file():
        with suppress(OSError):
            return kept.read_bytes()
    made = compile_source(binding, code, source, (*options, f"-I{folder}"))
    if kept is not None:
        _keep(made, kept)
    return made


def _keep(made: bytes, path: Path) -> None:
    """Write what was compiled to the cache, if there is room for it."""
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            name = file.name
            file.write(made)
        os.replace(name, path)
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
        if name is not None:
            Path(name).unlink(missing_ok=True)


def compile_source(binding: Nvrtc, code: str, name: str, options: Sequence[str]) -> bytes:
    """Return the cubin of a source; raises RuntimeError with the compiler's words if it is refused."""
    program = binding.createProgram(code, name, [], [])
    try:
        try:
            binding.compileProgram(program, list(options))
        except Exception as error:
            raise RuntimeError(f"NVRTC refuses {name}: {error}\n{binding.getProgramLog(program)}") from None
        return bytes(binding.getCUBIN(program))
    finally:
        binding.destroyProgram(program)


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, which only the user can write; None if there can be none."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(root) / "horovod_aps" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        logger.warning("compiled kernels are not kept: others can write %s; chmod 700 it", folder)
        return None
    return folder
