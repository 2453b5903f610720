"""Matrix products whose accumulator has (e, m) precision, and the layers built on them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable

from horovod_aps.simulate import _native


def quant_gemm(a: torch.Tensor, b: torch.Tensor, e: int, m: int, kahan: bool = True) -> torch.Tensor:
    """`a @ b` as low-precision hardware would sum it: every operation is rounded to (e, m), K in order.

    Per multiply-add p = q(a*b); then acc = q(acc + p), or with `kahan` y = q(p - c), t = q(acc + y),
    c = q(q(t - acc) - y), acc = t. The operands are not rounded (use `float_quantize`); each product and sum
    is formed in float32 and then rounded, as in CPD. A correction that is not finite is dropped, so that an
    overflow stays Inf with `kahan`, too (CPD goes on to NaN). float32 matrices (M, K) and (K, N) on one device;
    no autograd.
    """
    e, m = _native.check_format("quant_gemm", e, m)
    for name, matrix in (("a", a), ("b", b)):
        if not isinstance(matrix, torch.Tensor) or matrix.dtype != torch.float32:
            raise TypeError(
                f"quant_gemm: {name} must be a float32 tensor, got {getattr(matrix, 'dtype', type(matrix))}"
            )
        if matrix.dim() != 2:
            raise ValueError(f"quant_gemm: {name} must have 2 dimensions, got {matrix.dim()}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"quant_gemm: inner sizes must agree, got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.device != b.device:
        raise ValueError(f"quant_gemm: a and b must be on one device, got {a.device} and {b.device}")
    a, b = a.detach().resolve_neg(), b.detach().resolve_neg()
    # The CPU kernel's vector lanes are columns: a tall, narrow product is faster as its transpose, same
    # arithmetic.
    if b.shape[1] < 64 and a.shape[0] > b.shape[1]:
        return _native.gemm(b.t().contiguous(), a.t().contiguous(), e, m, kahan).t().contiguous()
    return _native.gemm(a.contiguous(), b.contiguous(), e, m, kahan)


class _QuantMatmul(torch.autograd.Function):
    """x @ weight.T by `quant_gemm`, and both of its gradients too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, options: tuple[int, int, bool]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return quant_gemm(x, weight.t(), *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = quant_gemm(grad, weight, *ctx.options) if ctx.needs_input_grad[0] else None
        grad_weight = quant_gemm(grad.t(), x, *ctx.options) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class QuantLinear(torch.nn.Linear):
    """`torch.nn.Linear` whose products, forward and backward, accumulate in (e, m); bias in float32."""

    def __init__(
        self, in_features: int, out_features: int, e: int, m: int, bias: bool = True, kahan: bool = True
    ) -> None:
        quant_format = _native.check_format("QuantLinear", e, m)
        super().__init__(in_features, out_features, bias)
        self.quant_options = (*quant_format, kahan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to the last dimension of `x`."""
        out = _QuantMatmul.apply(x.reshape(-1, self.in_features), self.weight, self.quant_options)
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class QuantConv2d(torch.nn.Conv2d):
    """`torch.nn.Conv2d` as im2col and a product that accumulates in (e, m), forward and backward.

    The bias, and the sum over overlapping windows in the input's gradient, stay in float32. Zero padding
    only.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        e: int,
        m: int,
        kahan: bool = True,
        **kwargs: Any,
    ) -> None:
        quant_format = _native.check_format("QuantConv2d", e, m)
        super().__init__(in_channels, out_channels, kernel_size, **kwargs)
        self.quant_options = (*quant_format, kahan)
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            raise ValueError(
                "QuantConv2d: padding must be a number of zeros per side, got "
                f"padding={self.padding!r}, padding_mode={self.padding_mode!r}"
            )
        self._pad = (int(self.padding[0]), int(self.padding[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve a batch of shape (B, C, H, W)."""
        if x.dim() != 4:
            raise ValueError(f"QuantConv2d: x must have 4 dimensions, got {x.dim()}")
        height, width = (
            (x.shape[2 + i] + 2 * self._pad[i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1) // self.stride[i] + 1
            for i in (0, 1)
        )
        columns = F.unfold(x, self.kernel_size, self.dilation, self._pad, self.stride)  # B, C*kh*kw, L
        out = []
        for group, weight in zip(columns.chunk(self.groups, 1), self.weight.chunk(self.groups, 0), strict=True):
            rows = group.transpose(1, 2).reshape(-1, group.shape[1])  # B*L, C*kh*kw
            out.append(_QuantMatmul.apply(rows, weight.flatten(1), self.quant_options))
        result = torch.cat(out, 1).reshape(x.shape[0], height * width, self.out_channels)
        result = result.transpose(1, 2).reshape(x.shape[0], self.out_channels, height, width)
        return result if self.bias is None else result + self.bias[None, :, None, None]
