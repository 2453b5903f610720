"""Calls of the simulator's native code: the CPU library through ctypes, the CUDA kernels through CuPy.

Both sides compile cuda/aps_simulate.h, so a result does not depend on the device.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from typing import Any

import numpy as np
import torch

from horovod_aps import kernels
from horovod_aps.kernels.nvrtc import load

TILE = 16  # as in aps_simulate.cu


@functools.lru_cache(maxsize=1)
def _cpu_library() -> ctypes.CDLL:
    library = kernels.library()
    pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.aps_simulate_quantize.argtypes = [pointer, pointer, size, flag, flag]
    library.aps_simulate_gemm.argtypes = [pointer] * 3 + [size] * 3 + [flag] * 4
    return library


@functools.lru_cache(maxsize=16)
def _cuda_kernel(name: str, device: int) -> Any:
    """The compiled kernel of a device."""
    import cupy

    with cupy.cuda.Device(device):
        return load(cupy, "aps_simulate.cu", device).get_function(name)


def _launch(name: str, tensor: torch.Tensor, grid: tuple[int, int], block: tuple[int, int], args: tuple) -> None:
    """Run a kernel on the tensor's device, ordered in torch's current stream."""
    import cupy

    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    device = tensor.device.index or 0
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
        _cuda_kernel(name, device)(grid, block, args)


def check_int(where: str, name: str, value: Any, low: int, high: int) -> int:
    """The value as an int; raise unless it is one, of Python or NumPy, in low..high."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{where}: {name} must be an int, got {type(value).__name__}")
    value = operator.index(value)
    if not low <= value <= high:
        raise ValueError(f"{where}: {name} must be in {low}..{high}, got {value}")
    return value


def check_format(where: str, e: Any, m: Any) -> tuple[int, int]:
    """(e, m) as ints; raise unless it fits into float32."""
    return check_int(where, "e", e, 1, 8), check_int(where, "m", m, 0, 23)


def on_cuda(where: str, name: str, tensor: torch.Tensor) -> bool:
    """Whether the CUDA kernels are to run; raise unless the tensor is where kernels can reach it."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{where}: {name} must be on a CPU or a CUDA device, got {tensor.device}")
    return tensor.is_cuda


def quantize(x: torch.Tensor, e: int, m: int) -> torch.Tensor:
    """Cast a float32 tensor to (e, m) values, into a new contiguous tensor."""
    is_cuda = on_cuda("float_quantize", "x", x)
    x = x.detach().contiguous().resolve_neg()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if is_cuda:
        blocks = min(65535, -(-x.numel() // 256))
        _launch(
            "simulate_quantize_kernel",
            x,
            (blocks, 1),
            (256, 1),
            (np.uint64(x.data_ptr()), np.uint64(out.data_ptr()), np.int64(x.numel()), np.int32(e), np.int32(m)),
        )
    else:
        _cpu_library().aps_simulate_quantize(x.data_ptr(), out.data_ptr(), x.numel(), e, m)
    return out


def gemm(a: torch.Tensor, b: torch.Tensor, e: int, m: int, kahan: bool) -> torch.Tensor:
    """`a @ b` of contiguous float32 matrices with the accumulator in (e, m)."""
    n_rows, depth = a.shape
    n_cols = b.shape[1]
    is_cuda = on_cuda("quant_gemm", "a", a)
    c = torch.zeros(n_rows, n_cols, dtype=torch.float32, device=a.device)
    if c.numel() == 0 or depth == 0:
        return c
    if is_cuda:
        grid = (-(-n_rows // TILE), -(-n_cols // TILE))
        _launch(
            "simulate_gemm_kernel",
            a,
            grid,
            (TILE, TILE),
            (
                np.uint64(a.data_ptr()),
                np.uint64(b.data_ptr()),
                np.uint64(c.data_ptr()),
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
