"""PyTorch's tensors as the engine sees them; shared by the frontends of Horovod, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from horovod_aps.kernels import DTYPES, CpuKernels

DTYPE_CODES = {getattr(torch, dtype.name): dtype.code for dtype in DTYPES}


def kernels_for(device: torch.device) -> Any:
    """The kernels that work where the gradients are."""
    if device.type == "cpu":
        return CpuKernels()
    if device.type == "cuda":
        from horovod_aps.kernels.cuda import CudaKernels

        return CudaKernels(stream=lambda: torch.cuda.current_stream(device).cuda_stream)
    raise TypeError(f"APSCompressor: tensors must be on a CPU or a CUDA device, got {device}")


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one while kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def with_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its residuals as tensors, which `torch.load` takes without asking."""
    return {**state, "residuals": {name: torch.as_tensor(values) for name, values in state["residuals"].items()}}
