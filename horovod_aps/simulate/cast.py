"""Casts of tensors to (e, m) values that stay in float32: what low precision would compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from horovod_aps.simulate import _native

FLOAT32 = (8, 23)


def float_quantize(x: torch.Tensor, e: int, m: int) -> torch.Tensor:
    """Round to the nearest value with `e` exponent and `m` mantissa bits (IEEE-like, top exponent reserved).

    Ties go to even; overflow gives Inf, underflow is gradual; NaN, Inf and signed zeros stay. A new tensor of
    the same shape and dtype (float32, float16 or bfloat16), without autograd: see `Quantizer`. The input is
    not changed. CPD's `float_quantize` gives the same bits except where it errs: values that round up out of
    the top binade (it leaves the format), subnormal results whose dropped bits decide a tie (it drops them
    first), and float32's own subnormals (it returns +0, also for negative ones and for e=8).
    """
    e, m = _native.check_format("float_quantize", e, m)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"float_quantize: x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype == torch.float32:
        return _native.quantize(x, e, m)
    if x.dtype in (torch.float16, torch.bfloat16):
        return _native.quantize(x.float(), e, m).to(x.dtype)
    raise TypeError(f"float_quantize: x must be float32, float16 or bfloat16, got {x.dtype}")


class _StraightThrough(torch.autograd.Function):
    """Quantise activations on the way forward and gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: tuple[int, int], backward: tuple[int, int]) -> torch.Tensor:
        ctx.backward_format = backward
        return x.clone() if forward == FLOAT32 else float_quantize(x, *forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.backward_format == FLOAT32:
            return grad, None, None
        return float_quantize(grad, *ctx.backward_format), None, None


def _check_pair(where: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"{where} must be an (e, m) pair, got {value!r}")
    return _native.check_format(where, *value)


def quantizer(x: torch.Tensor, forward: tuple[int, int] = FLOAT32, backward: tuple[int, int] = FLOAT32) -> torch.Tensor:
    """Quantise `x` to the format `forward`, and the gradient that comes back to the format `backward`.

    The derivative of rounding is taken to be one (straight-through), once: there is no second derivative.
    (8, 23) leaves a direction as it is.
    """
    formats = _check_pair("quantizer: forward", forward), _check_pair("quantizer: backward", backward)
    return _StraightThrough.apply(x, *formats)


class Quantizer(torch.nn.Module):
    """`quantizer` as a module, to stand between the layers of a network."""

    def __init__(self, forward: tuple[int, int] = FLOAT32, backward: tuple[int, int] = FLOAT32) -> None:
        super().__init__()
        self.forward_format = _check_pair("Quantizer: forward", forward)
        self.backward_format = _check_pair("Quantizer: backward", backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantise `x`."""
        return quantizer(x, self.forward_format, self.backward_format)

    def extra_repr(self) -> str:
        """The two formats, for `print(model)`."""
        return f"forward={self.forward_format}, backward={self.backward_format}"
