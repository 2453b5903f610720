"""Messages of our kernels as tensors, for operations of PyTorch's or Horovod's that carry them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Messages:
    """Messages that kernels of `device` have made, or will read."""

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self._kernels, self._device = kernels, device

    def takes(self, array: Any) -> bool:
        """Whether a message is on the device."""
        return self._device.type == "cpu" or not isinstance(array, np.ndarray)

    @contextmanager
    def at_work(self) -> Generator[None, None, None]:
        """Our stream is PyTorch's current one."""
        if self._device.type != "cuda":
            yield
            return
        with self._kernels.at_work():
            with torch.cuda.stream(torch.cuda.ExternalStream(self._kernels.stream.ptr, self._device)):
                yield

    def empty(self, n_bytes: int) -> Tensor:
        """Memory for what will come."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)

    def pack(self, parts: Sequence[Any]) -> Tensor:
        """The parts in a row; a copy, but for a single one."""
        tensors = [self._tensor(part) for part in parts if len(part)]
        if len(tensors) == 1:
            return tensors[0]
        return torch.cat(tensors) if tensors else self.empty(0)

    def unpack(self, received: Tensor, places: Sequence[tuple[int, Any]]) -> None:
        """Copy parts of what has come to where they are wanted."""
        for start, array in places:
            if len(array):
                self._tensor(array).copy_(received[start : start + len(array)])
        if received.is_cuda:  # its stream may have it back only behind our copies
            received.record_stream(torch.cuda.current_stream(self._device))

    def _tensor(self, array: Any) -> Tensor:
        """The array's own memory as a tensor."""
        return torch.from_numpy(array) if self._device.type == "cpu" else torch.as_tensor(array, device=self._device)
