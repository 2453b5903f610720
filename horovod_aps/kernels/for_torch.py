"""The kernels that work where PyTorch's tensors are; imported only with PyTorch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from horovod_aps.kernels.cpu import CpuKernels


def kernels_for(device: torch.device) -> Any:
    """Return the kernels of a device, ordered with PyTorch's current stream there."""
    if device.type == "cpu":
        return CpuKernels()
    if device.type == "cuda":
        from horovod_aps.kernels.cuda import CudaKernels

        return CudaKernels(stream=partial(_stream, device), index=device.index)
    raise TypeError(f"APSCompressor: tensors must be on a CPU or a CUDA device, got {device}")


def _stream(device: torch.device) -> int:
    """The address of PyTorch's current stream."""
    refuse_capture(device)
    return torch.cuda.current_stream(device).cuda_stream


def refuse_capture(device: torch.device) -> None:
    """Raise ValueError while a CUDA graph is captured: it would have our kernels, not what ranks tell each other."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "APSCompressor: gradients cannot travel while a CUDA graph is captured; capture forward and backward "
            "alone, and all-reduce after its replay"
        )


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one while kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
