"""Faults that a GPU would punish, planted one by one: the stand-in must catch each, in one of a few orders of streams.

Oracle: the same exchange without the fault passes in all of these orders.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_standin
import numpy as np
import pytest
from test_cuda_exchange import OnCpu, OnGpu, run

from horovod_aps.kernels import cuda, memory, nvrtc
from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.kernels.segments import SEGMENT
from horovod_aps.options import Options
from horovod_aps.transports.device import DeviceTransport

SEEDS = range(6)
OPTIONS = Options(3, 0, error_feedback=True)
EXPECTED, _ = run(OnCpu(), 3, OPTIONS, 2)
Patch = pytest.MonkeyPatch


def is_right(seed: int) -> bool:
    """Whether an exchange gives the CPU's bits with this order of streams."""
    cuda_standin.reset(seed)
    side = OnGpu()
    try:
        found, _ = run(side, 3, OPTIONS, 2)
    except cuda_standin.IllegalAddress:
        return False
    finally:
        cuda_standin.drain_quietly()
    return all(a.tobytes() == b.tobytes() for a, b in zip(EXPECTED, found))


def source(old: str, new: str) -> Callable[[CudaKernels, str], Any]:
    """Kernels compiled from a text with a fault in it."""
    folder = nvrtc.source_folder()
    text = (folder / "aps_kernels.cu").read_text()
    assert old in text
    module = cuda_standin.Module()
    module.load(cuda_standin.compile_for_host(text.replace(old, new), (*nvrtc.OPTIONS, f"-I{folder}")))
    return lambda self, name: module.get_function(name)


def no_begin(patch: Patch) -> None:
    """Kernels do not wait for the gradients."""
    patch.setattr(CudaKernels, "begin", lambda self: None)


def no_end(patch: Patch) -> None:
    """The framework does not wait for the results."""
    patch.setattr(CudaKernels, "end", lambda self: None)


def all_waits_dropped(patch: Patch) -> None:
    """No stream waits for another."""
    patch.setattr(cuda_standin.Stream, "wait_event", lambda self, event: None)


def too_early(patch: Patch) -> None:
    """Exponents are read before they are there."""
    patch.setattr(cuda._Later, "done", lambda self: self._over or (self._then(), setattr(self, "_over", True)) and True)


def sent_too_early(patch: Patch) -> None:
    """A message is sent before its copy to the host is over."""
    patch.setattr(cuda_standin.Event, "query", lambda self: cuda_standin._state.progress() or 0)


def pageable(patch: Patch) -> None:
    """Copies go from and to memory that is not pinned."""
    patch.setattr(memory.PinnedPool, "_new", lambda self, n_bytes: np.zeros(n_bytes, np.uint8))


def misaligned(patch: Patch) -> None:
    """Vectors are loaded wherever a group begins."""
    old = "return count == APS_GROUP && address % alignment == 0;"
    patch.setattr(CudaKernels, "function", source(old, "return count == APS_GROUP && address && alignment;"))


def racing(patch: Patch) -> None:
    """Threads of a warp write the same codes."""
    old = "APS_GROUP * (int64_t)threadIdx.x, count;"
    patch.setattr(CudaKernels, "function", source(old, "APS_GROUP * (int64_t)(threadIdx.x / 2), count;"))
    reset = cuda_standin._state.reset

    def reset_and_look(*arguments: Any) -> None:
        reset(*arguments)
        cuda_standin.look_for_races()

    patch.setattr(cuda_standin._state, "reset", reset_and_look)


def given_back(patch: Patch) -> None:
    """Pinned memory is used again while copies from it are under way."""
    put_on = DeviceTransport._put_on

    def put_on_and_give(self: DeviceTransport, move: Any) -> None:
        hosts = list(move.filled.values())
        put_on(self, move)
        for host in hosts:
            host[:] = 0x77

    patch.setattr(DeviceTransport, "_put_on", put_on_and_give)


def host_address(patch: Patch) -> None:
    """A kernel is given messages in ordinary memory of the host."""
    kept: list[np.ndarray] = []

    def address(function: str, message: Any) -> tuple[int, int]:
        kept.append(np.zeros(len(message), np.uint8))
        return kept[-1].ctypes.data, len(message)

    patch.setattr(cuda, "_device_address", address)


FAULTS = [
    no_begin,
    no_end,
    all_waits_dropped,
    too_early,
    sent_too_early,
    pageable,
    misaligned,
    racing,
    given_back,
    host_address,
]


def test_without_a_fault_every_order_is_right() -> None:
    assert all(is_right(seed) for seed in SEEDS)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_fault_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        assert not all(is_right(seed) for seed in SEEDS), plant.__doc__
    cuda_standin.reset()


def test_a_stale_cubin_is_caught(tmp_path: Path, monkeypatch: Patch) -> None:
    """A cache whose key does not look into headers, as CuPy's, hands out what was compiled before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("probe.cu", "probe.h"):
        (tmp_path / name).write_text('#include "probe.h"\nextern "C" __global__ void probe(long* x) { *x = VALUE; }')
    made = []
    for planted in (False, True):
        with monkeypatch.context() as patch:
            if planted:
                patch.setattr(Path, "glob", lambda self, pattern: iter(()))
            for value in (1, 2):
                (tmp_path / "probe.h").write_text(f"#define VALUE {value}{int(planted)}\n")
                made.append(nvrtc.cubin(cuda_standin.nvrtc, "probe.cu", "80", tmp_path))
    assert made[0] != made[1] and made[2] == made[3]


def test_the_host_cannot_touch_device_memory() -> None:
    code = "import ctypes, cuda_standin as c\nmemory = c.cuda.alloc(4096)\nc.drain()\nctypes.memset(memory.ptr, 0, 1)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
    assert done.returncode == -signal.SIGSEGV


def test_memory_that_is_used_again_is_spoilt_first() -> None:
    cuda_standin.reset()
    kernels = CudaKernels(cuda_standin)
    first = kernels.zeros(8)
    address = first.ptr
    del first
    with kernels.at_work():
        again = kernels._empty(8, np.float32)
    assert again.ptr == address and cuda_standin.read(address, 4) == b"\xcd" * 4


def test_what_goes_wrong_on_the_device_is_raised_and_not_waited_for() -> None:
    """CuPy's `Event.done` says False of an event that will never come, as of one that is late."""
    cuda_standin.reset(0)
    kernels = CudaKernels(cuda_standin, block=32)
    segs = np.zeros(1, SEGMENT)
    pageable = np.ones(8, np.float32)
    segs["data"], segs["n"], segs["exp_bits"], segs["man_bits"] = pageable.ctypes.data, 8, 4, 3
    kernels.begin()
    request = kernels.scan(segs)
    with pytest.raises(cuda_standin.IllegalAddress):
        for _ in range(1000):
            assert not request.done()
    cuda_standin.drain_quietly()
