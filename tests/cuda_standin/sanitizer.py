"""The stand-in under g++'s own sanitizers, one at a time: APS_STANDIN_SANITIZER=thread or address.

Without one, accesses are looked at by `runtime.cpp`, through the calls that g++ makes for its thread sanitizer; these
are then the sanitizer's own, which must be loaded before Python: `environment` says how.

- thread: streams are its fibers. Two streams that touch the same memory, and no event between them, are a race, in
  whatever order they happen to run.
- address: what a kernel or a copy touches beyond an allocation on the device, or after it was given back.
"""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

KIND = os.environ.get("APS_STANDIN_SANITIZER", "")
KERNEL_FLAGS = {
    "": ["-fsanitize=thread"],
    "thread": ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"],  # lanes of a warp take turns
    "address": ["-fsanitize=address"],
}[KIND]
RUNTIME_FLAGS = [f"-DSTANDIN_{KIND.upper()}"] if KIND else []
MAX_MARKS = 1 << 26
_libc = ctypes.CDLL(None)


def library(kind: str) -> Path:
    """What must be loaded before Python."""
    name = {"thread": "libtsan.so", "address": "libasan.so"}[kind]
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).resolve()


def environment(kind: str) -> dict[str, str]:
    """Variables with which Python runs the stand-in under a sanitizer; a finding ends it with code 66.

    What the interpreter and NumPy copy for themselves is left out, the host's side is theirs.
    """
    ignored = Path(__file__).with_name("tsan_suppressions.txt")
    return {
        "APS_STANDIN_SANITIZER": kind,
        "LD_PRELOAD": str(library(kind)),
        "TSAN_OPTIONS": f"exitcode=66:suppressions={ignored}",
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66:detect_stack_use_after_return=0",
    }


class _None:
    """Nothing listens."""

    def fiber(self) -> int:
        return 0

    def mark(self) -> int:
        return 0

    def release(self, fiber: int, mark: int) -> None:
        pass

    def acquire(self, fiber: int, mark: int) -> None:
        pass

    def poison(self, address: int, n_bytes: int) -> None:
        pass

    def unpoison(self, address: int, n_bytes: int) -> None:
        pass

    def copy(self, fiber: int, target: int, source: int, n_bytes: int) -> None:
        ctypes.memmove(target, source, n_bytes)

    def set(self, fiber: int, target: int, value: int, n_bytes: int) -> None:
        ctypes.memset(target, value, n_bytes)


class _Address(_None):
    def __init__(self) -> None:
        self._library = ctypes.CDLL(_build())

    def poison(self, address: int, n_bytes: int) -> None:
        self._library.standin_poison(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes))

    def unpoison(self, address: int, n_bytes: int) -> None:
        self._library.standin_unpoison(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes))


class _Thread(_None):
    """A mark is an address that is used once: what happened before its release comes before what follows an acquire."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_build())
        self._library.standin_fiber.restype = ctypes.c_void_p
        _libc.mmap.restype = ctypes.c_void_p
        self._marks = _libc.mmap(None, ctypes.c_size_t(MAX_MARKS), 3, 0x4022, -1, ctypes.c_long(0))
        self._n_marks = 0

    def fiber(self) -> int:
        return int(self._library.standin_fiber())

    def mark(self) -> int:
        self._n_marks += 8
        assert self._n_marks < MAX_MARKS
        return int(self._marks) + self._n_marks

    def release(self, fiber: int, mark: int) -> None:
        self._library.standin_release(ctypes.c_void_p(fiber), ctypes.c_void_p(mark))

    def acquire(self, fiber: int, mark: int) -> None:
        self._library.standin_acquire(ctypes.c_void_p(fiber), ctypes.c_void_p(mark))

    def copy(self, fiber: int, target: int, source: int, n_bytes: int) -> None:
        places = (ctypes.c_void_p(one) for one in (fiber, target, source))
        self._library.standin_copy(*places, ctypes.c_size_t(n_bytes))

    def set(self, fiber: int, target: int, value: int, n_bytes: int) -> None:
        places = (ctypes.c_void_p(one) for one in (fiber, target))
        self._library.standin_set(*places, value, ctypes.c_size_t(n_bytes))


def _build() -> str:
    folder = tempfile.mkdtemp()
    source, made = Path(__file__).with_name("sanitizer.cpp"), Path(folder) / "sanitizer.so"
    command = ["g++", "-O1", "-fPIC", "-shared", *RUNTIME_FLAGS, str(source), "-o", str(made)]
    subprocess.run(command, check=True, env={**os.environ, "LD_PRELOAD": ""})
    return str(made)


def sanitizer() -> Any:
    """The one that was asked for."""
    return {"": _None, "thread": _Thread, "address": _Address}[KIND]()
