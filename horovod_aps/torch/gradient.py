"""A gradient in the hands of the PyTorch frontend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from horovod_aps.engine.layer import Layer


@dataclass(slots=True, eq=False)
class Gradient(Layer):
    """A layer of the engine's, with its tensors; Horovod tells its name and its place only when it hands it in.

    One object for both sides: there may be thousands of small ones in a step.
    """

    original: Any = None
    """The user's tensor."""
    staged: Any = None
    """The same, contiguous."""
    result: Any = None
    """Where the result goes, once that is known."""
    batch: Any = None
    """What it was handed in with, once it was."""

    @classmethod
    def of(cls, original: torch.Tensor, staged: torch.Tensor, dtype: int) -> Gradient:
        """A gradient that has not been handed in."""
        return cls("", staged.shape, dtype, staged.data_ptr(), 0, 1.0, original=original, staged=staged)

    def hand_in(self, name: str, factor: float, result: torch.Tensor, batch: Any) -> None:
        """It belongs to a batch now."""
        if self.batch is not None:  # compressed once, and used again
            if not (self.done or self.error):
                raise ValueError(f"APSCompressor: {self.name!r} was compressed once and all-reduced twice")
            self.done, self.error, self.folded, self.group_size = False, None, False, 1
        self.name, self.factor, self.result, self.batch = name, factor, result, batch
        self.target = result.data_ptr()
