"""Where large tensors lie, so that what compression frees is used again, or goes back to the system.

Large tensors come from malloc's heap, and what is small and stays splits the holes that they leave, so the resident
size would grow with every layer as if all of them stayed. Against that, in this order: a pool in front of torch's CPU
allocator (cuda/aps_torch.cpp), or glibc's malloc_trim, which gives unused pages back at the cost of getting them again.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from horovod_aps.kernels import native

LARGE = 1 << 20  # bytes of a tensor whose memory is worth to be given back
SLACK = 48 << 20  # bytes that the process may grow until unused memory is given back
_PAGES = 1 << 16  # bytes from which pages of its own are worth it


class Pool:
    """torch's large CPU tensors in memory that is used again; on while anybody uses it."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        self._n_users = 0
        self._lock = threading.RLock()  # the garbage collector may call leave() in the middle of enter()

    @property
    def is_on(self) -> bool:
        return self._n_users > 0

    def enter(self) -> None:
        """One more user."""
        with self._lock:
            self._n_users += 1
            self._lib.aps_torch_use(1)

    def leave(self) -> None:
        """One user less; after the last new tensors come from malloc again, and free pages go back."""
        with self._lock:
            self._n_users -= 1
            if not self._n_users:
                self._lib.aps_torch_use(0)
                self._lib.aps_torch_give_back()

    def stream(self, size: int) -> torch.Tensor:
        """Bytes that stay until backward, away from tensors that go soon."""
        self._lib.aps_torch_side(1)
        try:
            return torch.empty(size, dtype=torch.uint8)
        finally:
            self._lib.aps_torch_side(0)

    def count(self) -> tuple[int, int]:
        """(bytes in use, bytes that are free and still resident)."""
        live, idle = ctypes.c_int64(), ctypes.c_int64()
        self._lib.aps_torch_count(ctypes.byref(live), ctypes.byref(idle))
        return live.value, idle.value


@functools.lru_cache(maxsize=1)
def pool() -> Pool | None:
    """The pool, put in front of torch's allocator by the first call; None where it was not built for this torch."""
    spec = find_spec("horovod_aps._torch")
    if spec is None or spec.origin is None:
        return None
    try:
        lib = ctypes.CDLL(spec.origin)
    except OSError:  # built for another torch
        return None
    lib.aps_torch_version.restype = lib.aps_torch_sources.restype = ctypes.c_char_p
    if lib.aps_torch_version().decode() != version("torch") or not native.is_current(lib.aps_torch_sources().decode()):
        return None
    return Pool(lib) if lib.aps_torch_install() else None


def apart(size: int) -> torch.Tensor:
    """Bytes outside of malloc's heap, in pages of their own.

    Streams stay while the tensors between them go. Among those, in the heap, each would split a hole that the next
    large tensor then no longer fits into, and the heap would grow as if nothing were compressed.
    """
    if size < _PAGES:
        return torch.empty(size, dtype=torch.uint8)
    recycled = pool()
    if recycled is not None and recycled.is_on:
        return recycled.stream(size)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


class _Trimmer:
    """Gives memory that malloc holds but nobody uses back to the system, once there is much of it.

    glibc only; elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._pages = Path("/proc/self/statm") if Path("/proc/self/statm").exists() else None
        self._low = 0
        self._lock = threading.Lock()

    def _resident(self) -> int:
        assert self._pages is not None
        return int(self._pages.read_text().split()[1]) * mmap.PAGESIZE

    def __call__(self) -> None:
        if self._trim is None or self._pages is None or not self._lock.acquire(blocking=False):
            return
        try:
            now = self._resident()
            if now > self._low + SLACK:
                self._trim(0)
                now = self._resident()
                self._low = now
            else:
                self._low = min(self._low, now)
        finally:
            self._lock.release()


@functools.lru_cache(maxsize=1)
def _trimmer() -> _Trimmer:
    return _Trimmer()


def trim() -> None:
    """Without a pool, give unused memory back if the process has grown by SLACK since the last time."""
    recycled = pool()
    if recycled is None or not recycled.is_on:
        _trimmer()()
