"""A stand-in for the part of CuPy that CudaKernels uses, on the host: kernels compiled by g++.

`RawModule` compiles the very source text that it is given, with shim.h in place of CUDA's headers; a launch
runs the blocks and threads one after another. What it cannot show: races between threads, and
the behaviour of real streams.
"""

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MAX_ARGUMENTS = 10


class ndarray:  # noqa: N801 (CuPy's name)
    """Device array: only what the launchers touch."""

    def __init__(self, host: np.ndarray) -> None:
        self._host = host
        self.data = self
        self.size = host.size

    @property
    def ptr(self) -> int:
        return self._host.ctypes.data

    def get(self) -> np.ndarray:
        return self._host.copy()


def asarray(array: np.ndarray) -> ndarray:
    return ndarray(np.array(array, copy=True, order="C"))


def zeros(n: int, dtype: Any) -> ndarray:
    return ndarray(np.zeros(n, dtype=dtype))


class RawKernel:
    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library = library
        self._address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        assert len(arguments) <= MAX_ARGUMENTS
        slots = np.zeros(MAX_ARGUMENTS, dtype=np.uint64)
        for k, argument in enumerate(arguments):
            if isinstance(argument, ndarray):
                slots[k] = argument.ptr
            else:  # CuPy takes the size of a scalar from its type, so a plain int would be an error there
                assert isinstance(argument, np.integer), f"argument {k} must be a NumPy integer"
                slots[k] = int(argument) & (2**64 - 1)
        self._library.standin_launch(
            ctypes.c_void_p(self._address), grid[0], block[0], ctypes.c_void_p(slots.ctypes.data)
        )


class RawModule:
    """Compiles `code` once per text; -I options are passed on, options of NVRTC are replaced by g++'s."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        key = hashlib.sha256((code + repr(options)).encode()).hexdigest()[:16]
        self._folder = tempfile.TemporaryDirectory(prefix=f"aps_standin_{key}_")
        source = Path(self._folder.name) / "kernels.cpp"
        library = Path(self._folder.name) / "kernels.so"
        source.write_text(code)
        includes = [option for option in options if option.startswith("-I")]
        subprocess.run(
            [
                "g++",
                "-std=c++17",
                "-O2",
                "-ffp-contract=off",
                "-fPIC",
                "-shared",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-include",
                str(Path(__file__).parent / "shim.h"),
                *includes,
                str(source),
                "-o",
                str(library),
            ],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self._library, name)


class _Stream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __enter__(self) -> "_Stream":
        cuda.entered.append(self.ptr)
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Device:
    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Attributes:
    """Of an address: all memory belongs to device 0."""

    device = 0

    def __init__(self, address: int) -> None:
        assert address


class cuda:  # noqa: N801 (CuPy's name)
    """cupy.cuda: streams only remember that they were entered."""

    entered: list[int] = []
    ExternalStream = _Stream
    Device = _Device

    class runtime:  # noqa: N801 (CuPy's name)
        pointerGetAttributes = _Attributes  # noqa: N815

    @staticmethod
    def alloc_pinned_memory(n_bytes: int) -> Any:
        return memoryview(bytearray(n_bytes))
