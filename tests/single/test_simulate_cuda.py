"""The simulator's CUDA kernels without a GPU: NVRTC compiles them, and host threads in their place give CPU
bits.
"""

import ctypes
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from horovod_aps.cuda_kernels import source_folder
from horovod_aps.simulate import _native, float_quantize, quant_gemm

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
#include "aps_simulate.cu"

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
extern "C" void run_quantize(unsigned blocks, unsigned size, const float* x, float* out, long long n, int e, int m) {
  launch({blocks, 1}, {size, 1}, [=] { simulate_quantize_kernel(x, out, n, e, m); });
}
extern "C" void run_gemm(unsigned gx, unsigned gy, const float* a, const float* b, float* c, long long rows,
                         long long cols, long long depth, int e, int m, int kahan) {
  launch({gx, gy}, {TILE, TILE}, [=] { simulate_gemm_kernel(a, b, c, rows, cols, depth, e, m, kahan); });
}
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("standin")
    (folder / "standin.cpp").write_text(STAND_IN)
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    command += [f"-I{source_folder()}", str(folder / "standin.cpp"), "-o", str(folder / "standin.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "standin.so"))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("n", [1, 7, 64, 1025])
@pytest.mark.parametrize("e,m", [(4, 3), (3, 0), (8, 7)])
def test_quantize_kernel_equals_cpu(stand_in, n, e, m):
    """Oracle: the CPU library, itself tested against rational arithmetic; 3 blocks of 8 threads must cover
    all.
    """
    x = np.random.default_rng(n).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    out = np.full_like(x, 123.0)
    stand_in.run_quantize(3, 8, pointer(x), pointer(out), ctypes.c_longlong(n), e, m)
    np.testing.assert_array_equal(out, float_quantize(torch.from_numpy(x), e, m).numpy())


@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("rows,depth,cols", [(1, 1, 1), (17, 16, 15), (5, 33, 18)])
def test_gemm_kernel_equals_cpu(stand_in, rows, depth, cols, kahan):
    """Sizes around the tile of 16, so that a wrong edge, order of K or padded step shows."""
    torch.manual_seed(rows)
    a, b = torch.randn(rows, depth), torch.randn(depth, cols)
    out = np.full((rows, cols), np.nan, np.float32)
    grid = (-(-rows // _native.TILE), -(-cols // _native.TILE))
    sizes = [ctypes.c_longlong(size) for size in (rows, cols, depth)]
    stand_in.run_gemm(*grid, pointer(a.numpy()), pointer(b.numpy()), pointer(out), *sizes, 4, 3, int(kahan))
    np.testing.assert_array_equal(out, quant_gemm(a, b, 4, 3, kahan=kahan).numpy())


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_source_compiles_with_nvrtc(architecture):
    """Oracle: NVIDIA's run-time compiler, with the options that the launcher passes to CuPy."""
    spec = find_spec("nvidia.cuda_nvrtc")
    assert spec is not None and spec.submodule_search_locations, "pip install -r requirements.txt"
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libnvrtc.so*"))))
    program = ctypes.c_void_p()
    code = (source_folder() / "aps_simulate.cu").read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), code, b"aps_simulate.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", f"-I{source_folder()}", *_native.CUDA_OPTIONS]
    table = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = library.nvrtcCompileProgram(program, len(options), table)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
