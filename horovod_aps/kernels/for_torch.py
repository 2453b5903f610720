"""The kernels that work where PyTorch's tensors are; imported only with PyTorch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from horovod_aps.kernels.cpu import CpuKernels


def kernels_for(device: torch.device) -> Any:
    """Return the kernels of a device, ordered with PyTorch's current stream there."""
    if device.type == "cpu":
        return CpuKernels()
    if device.type == "cuda":
        from horovod_aps.kernels.cuda import CudaKernels

        return CudaKernels(stream=lambda: torch.cuda.current_stream(device).cuda_stream, index=device.index)
    raise TypeError(f"APSCompressor: tensors must be on a CPU or a CUDA device, got {device}")


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one while kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
