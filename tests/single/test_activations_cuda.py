"""The CUDA kernels of the activations' codec without a GPU: NVRTC and nvcc compile them, and g++ behind a stand-in for
CuPy gives the CPU's bytes.
"""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_compilers import compile_with_nvcc, compile_with_nvrtc

from horovod_aps.activations import codec, cuda
from horovod_aps.kernels.nvrtc import source_folder

STREAM = 78
# Blocks and threads one after the other: the kernels share nothing. Far fewer than asked for, so that they must stride.
STAND_IN = r"""
struct Dim { unsigned x = 0; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
#define __global__
SOURCE
template <typename Kernel> static void launch(unsigned grid, unsigned block, Kernel kernel) {
  gridDim.x = grid < 3 ? grid : 3;
  blockDim.x = block < 8 ? block : 8;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel();
}
extern "C" void run_activations_plan_kernel(unsigned g, unsigned b, const void* data, long long n, int dtype,
                                            uint64_t eb, uint16_t* plans, int* sizes) {
  launch(g, b, [=] { activations_plan_kernel(data, n, dtype, eb, plans, sizes); });
}
extern "C" void run_activations_write_kernel(unsigned g, unsigned b, const void* data, long long n, int dtype,
                                             uint64_t eb, const uint16_t* plans, const long long* offsets,
                                             const long long* tables, uint8_t* stream) {
  launch(g, b, [=] { activations_write_kernel(data, n, dtype, eb, plans, offsets, tables, stream); });
}
extern "C" void run_activations_decode_kernel(unsigned g, unsigned b, const uint8_t* stream, const long long* tables,
                                              long long n, int dtype, uint32_t bound, void* out, int* wrong) {
  launch(g, b, [=] { activations_decode_kernel(stream, tables, n, dtype, bound, out, wrong); });
}
"""
C_TYPES = {
    np.uint64: ctypes.c_uint64,
    np.int64: ctypes.c_longlong,
    np.int32: ctypes.c_int,
    np.uint32: ctypes.c_uint32,
}


class Module:
    """As one that was compiled for a device: hands out kernels, here compiled by g++."""

    def __init__(self, folder: Path) -> None:
        code = (source_folder() / "aps_activations.cu").read_text()
        (folder / "standin.cpp").write_text(STAND_IN.replace("SOURCE", code))
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-I{source_folder()}"]
        command += [str(folder / "standin.cpp"), "-o", str(folder / "standin.so")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(folder / "standin.so"))

    def get_function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            typed = [C_TYPES[type(argument)](int(argument)) for argument in arguments]
            getattr(self._library, f"run_{name}")(grid[0], block[0], *typed)

        return launch


@pytest.fixture(scope="module")
def on_device(tmp_path_factory) -> Iterator[None]:
    """The launchers run with host memory for the device's, on torch's current stream."""
    module = Module(tmp_path_factory.mktemp("standin"))
    entered = []

    @contextmanager
    def stream(ptr: int) -> Iterator[None]:
        entered.append(ptr)
        yield

    device = SimpleNamespace(Device=lambda index: nullcontext(), ExternalStream=stream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=device))
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
        patch.setattr(cuda, "load", lambda cupy, source, index: module)
        cuda._kernel.cache_clear()
        yield
        cuda._kernel.cache_clear()
    assert set(entered) == {STREAM}


@pytest.mark.parametrize("dtype", list(codec.DTYPES), ids=str)
def test_streams_on_cuda_equal_cpu(on_device, dtype):
    """Oracle: the CPU library, itself tested against float64."""
    for n in (0, 1, 63, 65, 4097, 9000):
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(n, generator=generator).relu() + torch.randn(n, generator=generator) * (
            torch.arange(n) % 900 < 300
        )
        x[n // 2 : n // 2 + 1] = float("nan")
        for bound in (0.0, 1e-3, 0.1, 0.3, 4.0, 1e30):
            stream = codec.encode(x.to(dtype), bound)
            assert torch.equal(cuda.encode(x.to(dtype), bound), stream)
            whole = torch.int32 if dtype == torch.float32 else torch.int16
            expected = codec.decode(stream, n, dtype).view(whole)
            assert torch.equal(cuda.decode(stream, n, dtype).view(whole), expected)


def test_malformed_streams_are_refused_on_cuda(on_device):
    """The CPU's decoder says which; neither may accept what the other refuses."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).relu()
    stream = codec.encode(x, 0.05)
    generator = torch.Generator().manual_seed(1)
    verdicts = set()
    for _ in range(150):
        damaged = stream.clone()
        for _ in range(2):
            damaged[int(torch.randint(0, len(stream), (), generator=generator))] ^= 1 << int(
                torch.randint(0, 8, (), generator=generator)
            )
        outcomes = []
        for decode in (codec.decode, cuda.decode):
            try:
                outcomes.append(decode(damaged, 5000, torch.float32).view(torch.uint8).tolist())
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        verdicts.add(isinstance(outcomes[0], str))
    assert verdicts == {True, False}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_source_compiles_with_nvrtc(architecture):
    compile_with_nvrtc("aps_activations.cu", architecture)


def test_source_compiles_with_nvcc(tmp_path):
    compile_with_nvcc("aps_activations.cu", tmp_path / "kernels.o", "--fmad=false", "-c")
