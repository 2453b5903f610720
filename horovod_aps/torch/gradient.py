"""A gradient in the hands of the PyTorch frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from horovod_aps.engine.layer import Layer
from horovod_aps.torch.seam import TYPE_NAME

if TYPE_CHECKING:
    from horovod_aps.torch.compressor import PackedCompressor


class Gradient(Layer):
    """A layer of the engine's, with its tensors; Horovod tells its name and its place only when it hands it in.

    One object for both sides, which does no more during backward than it must: there may be thousands of small ones.
    Horovod takes it for a tensor (`type`, `is_contiguous`, `new`, `data`), unless there is autograd to go on.
    """

    requires_grad = False
    result: Any
    """Where the result goes, once that is known."""
    batch: Any = None
    """What it was handed in with, once it was."""

    def __init__(
        self, original: torch.Tensor, staged: torch.Tensor, dtype_code: int, is_cpu: bool, compressor: PackedCompressor
    ) -> None:
        """A gradient that has not been handed in; `staged` is the user's tensor, contiguous."""
        self.original, self.staged, self.dtype_code, self.is_cpu = original, staged, dtype_code, is_cpu
        self.shape, self.compressor = staged.shape, compressor

    def __getattr__(self, name: str) -> Any:
        """What else a tensor has."""
        if name == "staged" or name.startswith("__"):  # not there yet; not meant for a tensor
            raise AttributeError(name)
        return getattr(self.staged, name)

    @property
    def aps_context(self) -> Gradient:
        """Itself, as that of a `seam.WireTensor`."""
        return self

    @property
    def data(self) -> Gradient:
        """Itself: Horovod's Adasum optimizer sends `.data`, and must reach us to be refused."""
        return self

    def type(self) -> str:
        """The name by which Horovod finds our functions."""
        return TYPE_NAME

    def is_contiguous(self) -> bool:
        return True

    def new(self, *args: Any) -> torch.Tensor:
        """A plain tensor of the same dtype and device, as Horovod makes for the output."""
        return self.staged.new(*args)

    def hand_in(self, name: str, factor: float, tensor: Any, output: Any, batch: Any) -> None:
        """Horovod has handed in what `compress` returned, and where the result goes: it belongs to a batch now."""
        if self.batch is not None:  # compressed once, and used again
            if not (self.done or self.error):
                raise ValueError(f"APSCompressor: {self.name!r} was compressed once and all-reduced twice")
            self.done, self.error, self.folded, self.group_size = False, None, False, 1
        self.name, self.factor, self.batch = name, factor, batch
        self.source = self.target = self.staged.data_ptr()
        if output is tensor:
            self.result = self.staged
        else:
            self.result = output.as_subclass(torch.Tensor)
            self.target = self.result.data_ptr()
