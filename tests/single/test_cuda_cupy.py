"""The stand-in against the real CuPy, which imports without a GPU; compiling by its NVRTC, and the cache of kernels."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import stat
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_standin
import cupy
import numpy as np
import pytest
from cupy_backends.cuda.libs import nvrtc as real_nvrtc

from horovod_aps import kernels as K
from horovod_aps.kernels import nvrtc
from horovod_aps.kernels.cuda import CudaKernels

USED = [  # all that the package asks of CuPy
    "cuda.Stream",
    "cuda.Stream.synchronize",
    "cuda.Stream.record",
    "cuda.Stream.wait_event",
    "cuda.ExternalStream",
    "cuda.Event",
    "cuda.Event.record",
    "cuda.Event.done",
    "cuda.Event.synchronize",
    "cuda.Device",
    "cuda.Device.id",
    "cuda.Device.compute_capability",
    "cuda.alloc",
    "cuda.PinnedMemory",
    "cuda.runtime.memcpyAsync",
    "cuda.runtime.memsetAsync",
    "cuda.runtime.eventQuery",
    "cuda.runtime.eventRecord",
    "cuda.runtime.streamWaitEvent",
    "cuda.runtime.check_status",
    "cuda.runtime.pointerGetAttributes",
    "cuda.runtime.getDeviceCount",
    "cuda.runtime.getDeviceProperties",
    "cuda.runtime.driverGetVersion",
    "cuda.runtime.runtimeGetVersion",
    "cuda.runtime.memcpyDeviceToDevice",
    "cuda.runtime.memcpyHostToDevice",
    "cuda.runtime.memcpyDeviceToHost",
    "cuda.function.Module",
    "cuda.function.Module.load",
    "cuda.function.Module.get_function",
    "cuda.function.Function.__call__",
    "cuda.memory.OutOfMemoryError",
]
NVRTC = ["getVersion", "createProgram", "compileProgram", "getCUBIN", "getProgramLog", "destroyProgram"]


def find(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def parameters(function: Any) -> list[str] | None:
    """Names of the parameters, from the signature or, for what Cython has compiled, from the first line of the text."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        text = (getattr(function, "__doc__", None) or "").strip()
        found = re.match(r"[\w.]+\((.*?)\)( ->.*)?$", text.splitlines()[0]) if text else None
        if found is None:
            return None
        parts = [re.sub(r"\s*=.*", "", part).split() for part in found[1].split(",") if part.strip()]
        names = [part[-1].lstrip("*") for part in parts if part]
    return [name for name in names if name != "self"]


@pytest.mark.parametrize("path", USED)
def test_the_stand_in_offers_what_cupy_offers(path: str) -> None:
    real = find(cupy, path)
    if path in ("cuda.Device.id", "cuda.Device.compute_capability"):
        assert hasattr(cuda_standin.Device(0), path.rsplit(".", 1)[1])
        return
    fake = find(cuda_standin, path)
    if not callable(real) or isinstance(real, (int, property)) or path == "cuda.Event.done":
        assert isinstance(real, int) is isinstance(fake, int)
        if isinstance(real, int):
            assert real == fake
        return
    ours, theirs = parameters(fake), parameters(real)
    if theirs in (None, ["args", "kwargs"]) or "OutOfMemory" in path:
        return
    assert ours is not None
    assert ours[: len(theirs)] == theirs[: len(ours)], f"{path}: CuPy has {theirs}"


@pytest.mark.parametrize("name", NVRTC)
def test_the_stand_in_compiles_as_cupy_does(name: str) -> None:
    theirs, ours = parameters(getattr(real_nvrtc, name)), parameters(getattr(cuda_standin.nvrtc, name))
    assert callable(getattr(real_nvrtc, name)) and (theirs is None or ours == theirs)


def test_only_what_is_listed_is_asked_of_cupy() -> None:
    """A name that is not compared with the real one would be found wrong on a GPU first."""
    listed = {path for entry in USED for path in (entry, entry.rsplit(".", 1)[0])} | {"cuda.runtime", "cuda.function"}
    root = Path(K.__file__).parent.parent
    for file in (
        "kernels/cuda.py",
        "kernels/memory.py",
        "kernels/nvrtc.py",
        "transports/device.py",
        "tensorflow/operations.py",
        "tools/gpu_check.py",
    ):
        for name in re.findall(r"\bcuda\.([A-Za-z_]+)\b(?!\.py)", (root / file).read_text()):
            if name not in ("libs", "py"):
                assert f"cuda.{name}" in listed, f"{file} uses cuda.{name}"
        for name in re.findall(r"\bruntime\.([A-Za-z_]+)", (root / file).read_text()):
            assert f"cuda.runtime.{name}" in listed, f"{file} uses cuda.runtime.{name}"


# ---- compiling --------------------------------------------------------------------------------------------


def test_real_nvrtc_compiles_what_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through CuPy's own binding, with the options that a user's run has: no flush-to-zero, no fused operations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[list[str]] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(real_nvrtc, name)

        def compileProgram(self, prog: Any, options: list[str]) -> None:  # noqa: N802
            asked.append(options)
            real_nvrtc.compileProgram(prog, options)

    first = nvrtc.cubin(Watched(), "aps_kernels.cu", "80")
    assert first == nvrtc.cubin(Watched(), "aps_kernels.cu", "80") and len(asked) == 1, "the second is from the cache"
    assert b"scan_kernel" in first and b"decode_wide_kernel" in first
    assert "--fmad=false" in asked[0] and "--ftz=false" in asked[0]
    assert not any("ftz=true" in option or "fast" in option for option in asked[0])
    with pytest.raises(RuntimeError, match="NVRTC refuses bad.cu"):
        nvrtc.compile_source(real_nvrtc, "this is no source", "bad.cu", nvrtc.OPTIONS)


def test_cached_kernels_are_made_anew_when_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header, the source, the options, NVRTC's version and the architecture are all in the key."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(nvrtc.source_folder(), tmp_path / "cuda"))
    (folder / "probe.cu").write_text(
        '#include "probe.h"\nextern "C" __global__ void probe(uint64_t* x) { *x = VALUE; }'
    )
    (folder / "probe.h").write_text("#define VALUE 1\n")
    standin = cuda_standin.nvrtc
    made = [nvrtc.cubin(standin, "probe.cu", "80", folder)]

    def is_new() -> bool:
        before = standin.n_compiled
        made.append(nvrtc.cubin(standin, "probe.cu", "80", folder))
        return standin.n_compiled > before

    assert not is_new()
    (folder / "probe.h").write_text("#define VALUE 2\n")
    assert is_new() and made[-1] != made[0], "a stale kernel is in use"
    (folder / "probe.cu").write_text((folder / "probe.cu").read_text() + "// more\n")
    assert is_new() and not is_new()
    monkeypatch.setattr(standin, "version", (13, 0))
    assert is_new()
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-DMORE"))
    assert is_new()
    before = standin.n_compiled
    nvrtc.cubin(standin, "probe.cu", "90", folder)
    assert standin.n_compiled > before
    kept = nvrtc.cache_folder()
    assert kept is not None and stat.S_IMODE(kept.stat().st_mode) == 0o700
    os.chmod(kept, 0o770)
    assert nvrtc.cache_folder() is None, "others could have put a kernel there"


def test_subnormal_numbers_survive() -> None:
    """float32 layers hold them; CuPy's RawModule would have them flushed to zero, and the stand-in shows it."""
    values = np.array([1e-40, -3e-42, 2.5, 1e-45], np.float32)
    cuda_standin.reset()
    kernels = CudaKernels(cuda_standin)
    data, message = kernels.from_host(values), kernels.alloc(16)
    segs = np.zeros(1, K.SEGMENT)
    segs["data"], segs["n"], segs["factor"], segs["family"] = data.ptr, 4, 1.0, K.FAMILY_RAW
    kernels.encode(segs, message)
    kernels.decode(segs, [message])
    assert kernels.to_host(data).tobytes() == values.tobytes()
    source = (nvrtc.source_folder() / "aps_kernels.cu").read_text()
    flushed = cuda_standin.RawModule(source, options=(*nvrtc.OPTIONS, f"-I{nvrtc.source_folder()}"))
    own = CudaKernels.function
    try:
        CudaKernels.function = lambda self, name: flushed.get_function(name)  # type: ignore[method-assign]
        kernels.decode(segs, [message])
        assert kernels.to_host(data)[0] == 0.0
    finally:
        CudaKernels.function = own  # type: ignore[method-assign]


def test_extras_bring_headers_and_nvrtc() -> None:
    """A host with only a driver has neither; CuPy's [ctk] brings them."""
    import configparser

    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    extras = config["options.extras_require"]
    assert "cupy-cuda12x[ctk]" in extras["cuda12"] and "cupy-cuda13x[ctk]" in extras["cuda13"]


def test_cupy_imports_in_a_checkout() -> None:
    """Where the folder of our sources hides NVIDIA's packages of the same name."""
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", "import cuda, cupy; cupy.cuda.Stream"], cwd=root).returncode == 0


def test_importing_the_package_does_not_import_cupy() -> None:
    code = "import sys, horovod_aps, horovod_aps.kernels; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- memory -----------------------------------------------------------------------------------------------


def test_pinned_memory_has_the_size_asked_for_and_is_bounded() -> None:
    """CuPy's own pool rounds up to powers of two."""
    from horovod_aps.kernels.memory import PinnedPool

    cuda_standin.reset()
    pool = PinnedPool(cuda_standin.cuda)
    for step in range(50):
        taken = [pool.take(n) for n in (1000 + step, 70_001, 5)]
        assert [len(array) for array in taken] == [1000 + step, 70_001, 5]
        for array in taken:
            pool.give(array)
    assert pool.n_bytes <= sum(range(1000, 1050)) + 70_001 + 5
    assert sum(cuda_standin._state.pinned.values()) - pool.n_bytes < cuda_standin.ARENA
    assert cuda_standin.counts()["pinned bytes"] <= 50 * 1060 + 70_001 + 5


@pytest.mark.parametrize("n_flying", [1, 2, 3, 6])
def test_pinned_memory_of_buckets_that_take_turns_is_made_once(n_flying: int) -> None:
    """Freeing it stops the device; buckets have different sizes, and few are on their way at the same time."""
    from horovod_aps.kernels.memory import PinnedPool

    cuda_standin.reset()
    pool, made = PinnedPool(cuda_standin.cuda), []
    for _ in range(4):
        flying: deque[list[np.ndarray]] = deque()
        for size in range(10_000, 16_000, 1000):
            if len(flying) == n_flying:
                for array in flying.popleft():
                    pool.give(array)
            flying.append([pool.take(size) for _ in range(6)])
        for array in sum(flying, []):
            pool.give(array)
        made.append(cuda_standin.counts()["pinned bytes"])
    assert made[0] == made[-1] > 0


def test_pinned_memory_that_nobody_wants_is_given_back(monkeypatch) -> None:
    from horovod_aps.kernels import memory

    monkeypatch.setattr(memory, "IDLE_TAKES", 10)
    cuda_standin.reset()
    pool = memory.PinnedPool(cuda_standin.cuda)
    pool.give(pool.take(100_000))
    for _ in range(20):
        pool.give(pool.take(10))
    assert pool.n_bytes == 10


def test_a_full_device_says_what_to_do() -> None:
    cuda_standin.reset(limit=1 << 12)
    kernels = CudaKernels(cuda_standin)
    with pytest.raises(MemoryError, match="set_memory_growth"):
        for _ in range(3):
            kernels.zeros(1 << 20)
    cuda_standin.reset()


def test_memory_belongs_to_our_stream_and_device() -> None:
    """Residuals that were allocated on CuPy's null stream, on whatever device was current, would race."""
    cuda_standin.reset()
    kernels = CudaKernels(cuda_standin, index=3)
    cuda_standin.cuda.devices.clear()
    array = kernels.zeros(4)
    assert array._memory._stream == kernels.stream.ptr != 0
    assert set(cuda_standin.cuda.devices) == {3}


def test_a_table_that_is_on_the_device_is_not_sent_again() -> None:
    """Whatever lies between the fields of its records."""
    cuda_standin.reset()
    kernels = CudaKernels(cuda_standin)
    segs = np.zeros(3, K.SEGMENT)
    for noise in (0x00, 0xFF):
        with kernels.at_work():
            before = cuda_standin.counts()["copies"]
            np.full(segs.nbytes, noise, np.uint8)  # what a copy of the table finds in its memory
            kernels._table(segs, segs["exponent"])
            n_copies = cuda_standin.counts()["copies"] - before
    assert n_copies == 0
    cuda_standin.reset()


def test_nothing_is_exchanged_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels would become part of it, and what ranks tell each other would not: replays would send old bytes."""
    import torch

    from horovod_aps.kernels import for_torch

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for_torch.refuse_capture(gpu)
    kernels = for_torch.kernels_for(gpu)
    assert kernels.index == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for_torch.refuse_capture(torch.device("cpu"))
    for look in (lambda: for_torch.refuse_capture(gpu), kernels._framework_stream):
        with pytest.raises(ValueError, match="CUDA graph"):
            look()


@pytest.mark.parametrize("broken", ["tempfile.NamedTemporaryFile", "os.replace"])
def test_kernels_that_cannot_be_kept_are_used_all_the_same(broken: str, monkeypatch, tmp_path) -> None:
    """A full or read-only home: the other ranks would wait for the one that it stops."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(f"horovod_aps.kernels.nvrtc.{broken}", refuse)
    binding = SimpleNamespace(
        getVersion=lambda: (1, 0),
        createProgram=lambda *_: object(),
        compileProgram=lambda *_: None,
        getCUBIN=lambda _: b"made",
        destroyProgram=lambda _: None,
    )
    made = nvrtc.cubin(binding, "aps_simulate.cu", "80")
    assert made == b"made" and not [path for path in tmp_path.rglob("*") if path.is_file()]
