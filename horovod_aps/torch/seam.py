"""Where APS enters an unpatched Horovod: a tensor type of our own, and the function Horovod looks up for it.

`horovod.torch.mpi_ops` picks the C function of an all-reduce by the tensor's type name. `compress` returns a
`Gradient`, or a `WireTensor` where autograd goes on. Their type name leads to `_allreduce_async` below; it receives
what the Compressor interface withholds (name, op, scale factors, process set) and hands the gradient to the compressor
that made it. Integers get the type, too, since Horovod picks a whole group's function by its first tensor; they go on
to the functions that Horovod has for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Union

import torch
from horovod.torch import mpi_ops

from horovod_aps.log import logger

if TYPE_CHECKING:
    from horovod_aps.torch.gradient import Gradient

TYPE_NAME = "horovod_aps.WireTensor"
MAX_TEXTS = 1 << 16  # names that are kept
NOT_COMPILED = ("torch", "frontends", "engine", "kernels", "transports", "timeline", "cleanup", "log")


class WireTensor(torch.Tensor):
    """A tensor on its way to the exchange: an alias of the user's tensor that knows what the compressor made of it."""

    aps_context: Any = None  # a Gradient; none if Horovod is to reduce it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """The name by which Horovod finds our functions; with a dtype, `torch.Tensor.type`."""
        return TYPE_NAME if dtype is None else super().type(dtype, non_blocking)

    @property
    def data(self) -> WireTensor:  # type: ignore[override]
        """Itself: Horovod's Adasum optimizer sends `.data`, and must reach us to be refused."""
        return self

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """A plain tensor of the same dtype and device, as Horovod makes for the output."""
        return torch.Tensor.new(self.as_subclass(torch.Tensor), *args, **kwargs)


def wire(tensor: torch.Tensor) -> WireTensor:
    """An alias of a contiguous tensor that Horovod will route to us."""
    return tensor.as_subclass(WireTensor)


Wired = Union[WireTensor, "Gradient"]  # both have a `type()` and an `aps_context`


def plain(tensor: Any) -> torch.Tensor:
    """The alias as the tensor that it stands for."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, WireTensor) else tensor


def _allreduce_async(
    tensor: Wired,
    output: torch.Tensor,
    divisor: int,
    name: Any,
    op: int,
    prescale: float,
    postscale: float,
    process_set_id: int,
) -> int:
    gradient: Gradient | None = tensor.aps_context
    if gradient is None:
        function = mpi_ops._check_function(mpi_ops._allreduce_function_factory, plain(tensor))
        return int(
            getattr(mpi_ops.mpi_lib, function)(
                plain(tensor), plain(output), divisor, name, op, prescale, postscale, process_set_id
            )
        )
    text = _texts.get(name) or _text_of(name)
    factor = prescale * postscale / divisor
    return gradient.compressor._submit_one(gradient, tensor, output, text, op, factor, process_set_id)


_texts: dict[Any, str] = {}  # names come again in every step, and the same string is found faster


def _text_of(name: Any) -> str | None:
    """A name as Horovod hands it over; None if there is none."""
    if not isinstance(name, bytes):
        return None
    if len(_texts) >= MAX_TEXTS:
        _texts.clear()
    text = _texts[name] = name.decode()
    return text


def _grouped_allreduce_async(
    tensors: Sequence[Wired],
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
        text = _text_of(name)
        names = [None if text is None else f"{text}.{i}" for i in ours]
        handle = tensors[ours[0]].aps_context.compressor._submit_group(
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
    _keep_from_compiler()


@cache
def _keep_from_compiler() -> None:
    """Have `torch.compile` leave out what runs between backward and a step, as it leaves out Horovod's own library.

    It would take NumPy's arrays for tensors. There is no public way to say so for whole packages; every optimizer has
    imported the compiler already.
    """
    try:
        from torch._dynamo import trace_rules

        for package in NOT_COMPILED:
            trace_rules.add(f"horovod_aps.{package}")
    except (ImportError, AttributeError) as error:
        logger.debug("torch.compile cannot be told to leave out the exchange: %s", error)
