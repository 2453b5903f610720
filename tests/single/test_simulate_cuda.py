"""The simulator's CUDA kernels and launchers without a GPU: NVRTC compiles them, and host threads behind a stand-in
for CuPy give CPU bits.
"""

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import cuda_standin  # noqa: E402
from cuda_compilers import compile_with_nvrtc  # noqa: E402

from horovod_aps.engine import progress  # noqa: E402
from horovod_aps.kernels.nvrtc import OPTIONS, source_folder  # noqa: E402
from horovod_aps.simulate import EmulatedOptimizer, _native, float_quantize, quant_gemm  # noqa: E402

# One host thread per CUDA thread and a barrier for __syncthreads; blocks run one after the other, so that a
# static array is shared by exactly the threads of one block.
STAND_IN = r"""
#include <barrier>
#include <thread>
#include <vector>
struct Dim { unsigned x = 0, y = 0; };
static thread_local Dim threadIdx, blockIdx;
static Dim blockDim, gridDim;
static std::barrier<>* meeting;
#define __global__
#define __shared__ static
#define __syncthreads() meeting->arrive_and_wait()
SOURCE
template <typename Kernel> static void launch(Dim grid, Dim block, Kernel kernel) {
  gridDim = grid;
  blockDim = block;
  for (unsigned by = 0; by < grid.y; ++by) for (unsigned bx = 0; bx < grid.x; ++bx) {
    std::barrier<> all((long)block.x * block.y);
    meeting = &all;
    std::vector<std::thread> threads;
    for (unsigned y = 0; y < block.y; ++y) for (unsigned x = 0; x < block.x; ++x)
      threads.emplace_back([=] { threadIdx = {x, y}; blockIdx = {bx, by}; kernel(); });
    for (auto& thread : threads) thread.join();
  }
}
extern "C" void run_simulate_quantize_kernel(unsigned gx, unsigned gy, unsigned bx, unsigned by, const float* x,
                                             float* out, long long n, int e, int m) {
  // Far fewer threads than asked for: the kernel must stride over what is left.
  launch({gx < 3 ? gx : 3, gy}, {bx < 8 ? bx : 8, by}, [=] { simulate_quantize_kernel(x, out, n, e, m); });
}
extern "C" void run_simulate_gemm_kernel(unsigned gx, unsigned gy, unsigned bx, unsigned by, const float* a,
                                         const float* b, float* c, long long rows, long long cols, long long depth,
                                         int e, int m, int kahan) {
  launch({gx, gy}, {bx, by}, [=] { simulate_gemm_kernel(a, b, c, rows, cols, depth, e, m, kahan); });
}
"""


STREAM = 77
C_TYPES = {np.uint64: ctypes.c_void_p, np.int64: ctypes.c_longlong, np.int32: ctypes.c_int}


class RawModule:
    """As CuPy's: compiles the source that it is given, here with g++, and hands out its kernels."""

    def __init__(self, code: str, options: tuple[str, ...], folder: Path) -> None:
        assert "--fmad=false" in options
        (folder / "standin.cpp").write_text(STAND_IN.replace("SOURCE", code))
        command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
        command += [option for option in options if option.startswith("-I")]
        command += [str(folder / "standin.cpp"), "-o", str(folder / "standin.so")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(folder / "standin.so"))

    def get_function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int, int], block: tuple[int, int], arguments: tuple[Any, ...]) -> None:
            typed = [C_TYPES[type(argument)](int(argument)) for argument in arguments]
            getattr(self._library, f"run_{name}")(*grid, *block, *typed)

        return launch


def module_options() -> tuple[str, ...]:
    return (*OPTIONS, f"-I{source_folder()}")


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> RawModule:
    code = (source_folder() / "aps_simulate.cu").read_text()
    return RawModule(code, module_options(), tmp_path_factory.mktemp("standin"))


@pytest.fixture
def as_on_cuda(module, monkeypatch) -> Callable[[Callable[[], torch.Tensor]], torch.Tensor]:
    """Calls a function as if its tensors were on a GPU: through the launchers, on torch's current stream."""
    asked = []

    def load(device: Any, source: str, index: int) -> RawModule:
        asked.append((source, index))
        return module

    def call(function: Callable[[], torch.Tensor]) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cupy", cuda_standin)
            patch.setattr(_native, "load", load)
            patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
            patch.setattr(_native, "on_cuda", lambda where, name, tensor: True)
            _native._cuda_kernel.cache_clear()
            cuda_standin.cuda.entered.clear()
            result = function()
            _native._cuda_kernel.cache_clear()
        assert cuda_standin.cuda.entered == [STREAM]
        assert asked == [("aps_simulate.cu", 0)]
        return result

    return call


@pytest.mark.parametrize("n", [1, 7, 64, 1025])
@pytest.mark.parametrize("e,m", [(4, 3), (3, 0), (8, 7)])
def test_quantize_on_cuda_equals_cpu(as_on_cuda, n, e, m):
    """Oracle: the CPU library, itself tested against rational arithmetic."""
    x = torch.from_numpy(np.random.default_rng(n).integers(0, 2**32, n, dtype=np.uint32).view(np.float32))
    got = as_on_cuda(lambda: float_quantize(x, e, m))
    np.testing.assert_array_equal(got.numpy(), float_quantize(x, e, m).numpy())


@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("rows,depth,cols", [(1, 1, 1), (17, 16, 65), (5, 33, 18)])
def test_gemm_on_cuda_equals_cpu(as_on_cuda, rows, depth, cols, kahan):
    """Sizes around the tile of 16, so that a wrong edge, order of K, grid or padded step shows."""
    torch.manual_seed(rows)
    a, b = torch.randn(rows, depth), torch.randn(depth, cols)
    got = as_on_cuda(lambda: quant_gemm(a, b, 4, 3, kahan=kahan))
    np.testing.assert_array_equal(got.numpy(), quant_gemm(a, b, 4, 3, kahan=kahan).numpy())


def test_emulated_optimizer_on_cuda_equals_cpu(monkeypatch):
    """Oracle: the same steps by the CPU kernels; all launches are on torch's current stream.

    However long a step takes, nobody else may drive the emulated ranks: they share their kernels.
    """

    def train() -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(9, 4)
        optimizer = EmulatedOptimizer(torch.optim.SGD(model.parameters(), 0.1), 3, {"e": 4, "m": 3})
        for step in range(2):
            optimizer.step(lambda rank, step=step: model(torch.full((2, 9), 1.0 + rank - step)).square().sum())
        return model.weight.detach()

    expected = train()
    monkeypatch.setattr(progress, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "THREAD_SECONDS", 1e-4)
    monkeypatch.setitem(sys.modules, "cupy", cuda_standin)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # which a CPU build cannot tell
    monkeypatch.setattr(EmulatedOptimizer, "_device", lambda self: torch.device("cuda", 0))
    layer_of = EmulatedOptimizer._layer

    def on_device(*arguments):
        layer = layer_of(*arguments)
        for address in (layer.source, layer.target):
            cuda_standin.register(address, 4 * math.prod(layer.shape))
        return layer

    monkeypatch.setattr(EmulatedOptimizer, "_layer", on_device)
    cuda_standin.reset(1, eager=True)
    assert torch.equal(train(), expected)
    assert cuda_standin.counts()["launches"]


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_source_compiles_with_nvrtc(architecture):
    compile_with_nvrtc("aps_simulate.cu", architecture)
