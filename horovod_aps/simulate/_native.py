"""Calls of the simulator's native code: the CPU library through ctypes, the CUDA kernels through CuPy.

Both sides compile cuda/aps_simulate.h, so a result does not depend on the device.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from horovod_aps import kernels

TILE = 16  # as in aps_simulate.cu
CUDA_OPTIONS = ("--std=c++14", "--fmad=false")


@functools.lru_cache(maxsize=1)
def _cpu_library() -> ctypes.CDLL:
    library = kernels.library()
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.aps_simulate_quantize.argtypes = [pointer, pointer, size, flag, flag]
    library.aps_simulate_gemm.argtypes = [pointer] * 3 + [size] * 3 + [flag] * 4
    return library


@functools.lru_cache(maxsize=16)
def _cuda_kernel(name: str, device: int) -> Any:
    """The compiled kernel; CuPy keeps modules per device, which is why the cache does too."""
    import cupy

    from horovod_aps.cuda_kernels import source_folder

    folder = source_folder()
    with cupy.cuda.Device(device):
        module = cupy.RawModule(
            code=(folder / "aps_simulate.cu").read_text(),
            options=(*CUDA_OPTIONS, f"-I{folder}"),
        )
        return module.get_function(name)


def _launch(name: str, tensor: torch.Tensor, grid: tuple[int, int], block: tuple[int, int], args: tuple) -> None:
    """Run a kernel on the tensor's device, ordered in torch's current stream."""
    import cupy

    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    device = tensor.device.index or 0
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
        _cuda_kernel(name, device)(grid, block, args)


def check_format(where: str, e: int, m: int) -> None:
    """Raise unless (e, m) fits into float32."""
    for name, value, low, high in (("e", e, 1, 8), ("m", m, 0, 23)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{where}: {name} must be an int, got {type(value).__name__}")
        if not low <= value <= high:
            raise ValueError(f"{where}: {name} must be in {low}..{high}, got {value}")


def quantize(x: torch.Tensor, e: int, m: int) -> torch.Tensor:
    """Cast a float32 tensor to (e, m) values, into a new contiguous tensor."""
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if x.is_cuda:
        import numpy as np

        blocks = min(65535, -(-x.numel() // 256))
        _launch(
            "simulate_quantize_kernel",
            x,
            (blocks, 1),
            (256, 1),
            (x.data_ptr(), out.data_ptr(), np.int64(x.numel()), np.int32(e), np.int32(m)),
        )
    else:
        _cpu_library().aps_simulate_quantize(x.data_ptr(), out.data_ptr(), x.numel(), e, m)
    return out


def gemm(a: torch.Tensor, b: torch.Tensor, e: int, m: int, kahan: bool) -> torch.Tensor:
    """`a @ b` of contiguous float32 matrices with the accumulator in (e, m)."""
    n_rows, depth = a.shape
    n_cols = b.shape[1]
    c = torch.zeros(n_rows, n_cols, dtype=torch.float32, device=a.device)
    if c.numel() == 0 or depth == 0:
        return c
    if a.is_cuda:
        import numpy as np

        grid = (-(-n_rows // TILE), -(-n_cols // TILE))
        _launch(
            "simulate_gemm_kernel",
            a,
            grid,
            (TILE, TILE),
            (
                a.data_ptr(),
                b.data_ptr(),
                c.data_ptr(),
                np.int64(n_rows),
                np.int64(n_cols),
                np.int64(depth),
                np.int32(e),
                np.int32(m),
                np.int32(kahan),
            ),
        )
    else:
        _cpu_library().aps_simulate_gemm(
            a.data_ptr(),
            b.data_ptr(),
            c.data_ptr(),
            n_rows,
            n_cols,
            depth,
            e,
            m,
            kahan,
            torch.get_num_threads(),
        )
    return c
