"""Where APS enters an unpatched Horovod: a tensor type of our own, and the function Horovod looks up for it.

`horovod.torch.mpi_ops` picks the C function of an all-reduce by the tensor's type name. `compress` returns a
`WireTensor`, whose type name leads to `_allreduce_async` below; it receives what the Compressor interface
withholds (name, op, scale factors, process set) and hands the gradient to the compressor that made it. Integers get the
type, too, since Horovod picks a whole group's function by its first tensor; they go on to Horovod's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from horovod.torch import mpi_ops

if TYPE_CHECKING:
    from horovod_aps.torch.compressor import PackedCompressor

TYPE_NAME = "horovod_aps.WireTensor"


class WireTensor(torch.Tensor):
    """A tensor on its way to the exchange: an alias of the user's tensor that knows its compressor."""

    aps_compressor: PackedCompressor
    aps_context: Any = None  # none if Horovod is to reduce it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def type(self, *args: Any, **kwargs: Any) -> Any:
        """The name by which Horovod finds our functions; with arguments, `torch.Tensor.type`."""
        if args or kwargs:
            return super().type(*args, **kwargs)
        return TYPE_NAME

    @property
    def data(self) -> WireTensor:  # type: ignore[override]
        """Itself: Horovod's Adasum optimizer sends `.data`, and must reach us to be refused."""
        return self

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """A plain tensor of the same dtype and device, as Horovod makes for the output."""
        return torch.Tensor.new(self.as_subclass(torch.Tensor), *args, **kwargs)


def wire(tensor: torch.Tensor, compressor: PackedCompressor) -> WireTensor:
    """An alias of a contiguous tensor that Horovod will route to `compressor`."""
    alias: Any
    if tensor.requires_grad or type(tensor) is not torch.Tensor:
        alias = tensor.as_subclass(WireTensor)  # keeps autograd's link
    else:
        alias = tensor.data  # the same in a third of the time, which counts with hundreds of small gradients
        alias.__class__ = WireTensor
    alias.aps_compressor = compressor
    return cast(WireTensor, alias)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The alias as the tensor that it stands for."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, WireTensor) else tensor


def _allreduce_async(
    tensor: WireTensor,
    output: torch.Tensor,
    divisor: int,
    name: Any,
    op: int,
    prescale: float,
    postscale: float,
    process_set_id: int,
) -> int:
    if tensor.aps_context is None:
        function = mpi_ops._check_function(mpi_ops._allreduce_function_factory, plain(tensor))
        return int(
            getattr(mpi_ops.mpi_lib, function)(
                plain(tensor), plain(output), divisor, name, op, prescale, postscale, process_set_id
            )
        )
    text = name.decode() if isinstance(name, bytes) else None
    return tensor.aps_compressor._submit_one(tensor, output, text, op, prescale * postscale / divisor, process_set_id)


def _grouped_allreduce_async(
    tensors: Sequence[WireTensor],
    outputs: Sequence[torch.Tensor],
    divisor: int,
    name: Any,
    op: int,
    prescale: float,
    postscale: float,
    process_set_id: int,
) -> int:
    ours = [i for i, tensor in enumerate(tensors) if tensor.aps_context is not None]
    others = [i for i, tensor in enumerate(tensors) if tensor.aps_context is None]
    function = ""
    if others:  # looked up first, so that nothing is submitted if Horovod does not know the type
        function = mpi_ops._check_function(mpi_ops._grouped_allreduce_function_factory, plain(tensors[others[0]]))
    handle = 0
    if ours:
        text = name.decode() if isinstance(name, bytes) else None
        names = [None if text is None else f"{text}.{i}" for i in ours]
        handle = tensors[ours[0]].aps_compressor._submit_group(
            [tensors[i] for i in ours],
            [outputs[i] for i in ours],
            names,
            text,
            op,
            prescale * postscale / divisor,
            process_set_id,
        )
    if ours and others:
        mpi_ops._handle_map[handle] = ((), ())  # Horovod will wait for the others' handle, `decompress` for this one
    if others:
        handle = getattr(mpi_ops.mpi_lib, function)(
            [plain(tensors[i]) for i in others],
            [plain(outputs[i]) for i in others],
            divisor,
            name,
            op,
            prescale,
            postscale,
            process_set_id,
        )
    return handle


def register() -> None:
    """Make our functions known under the names that Horovod derives from the type; safe to call again."""
    suffix = TYPE_NAME.replace(".", "_")
    setattr(mpi_ops.mpi_lib, f"horovod_torch_allreduce_async_{suffix}", _allreduce_async)
    setattr(mpi_ops.mpi_lib, f"horovod_torch_grouped_allreduce_async_{suffix}", _grouped_allreduce_async)
