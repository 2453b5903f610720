"""PyTorch's tensors as the engine sees them; shared by the frontends of Horovod, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from horovod_aps.kernels import DTYPES

DTYPE_CODES = {getattr(torch, dtype.name): dtype.code for dtype in DTYPES}


def with_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its residuals as tensors, which `torch.load` takes without asking."""
    return {**state, "residuals": {name: torch.as_tensor(values) for name, values in state["residuals"].items()}}
