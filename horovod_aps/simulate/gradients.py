"""The paper's gradient sum for N emulated ranks in one process: shared exponent, low-precision partial
sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from horovod_aps.simulate import _native
from horovod_aps.simulate.cast import float_quantize


def _shared_exponent(grads: Sequence[torch.Tensor], n_ranks: int) -> int | None:
    """ceil(log2(max|g| * N)) over all ranks, exactly; None if every gradient is zero or one is not finite."""
    tops = [float(grad.abs().max()) for grad in grads if grad.numel()]
    largest = max(tops, default=0.0)
    if largest == 0.0 or not all(map(math.isfinite, tops)):
        return None
    fraction, exponent = math.frexp(largest)
    # ceil(log2(k)) of an integer k is the length of k - 1; 2^53 makes any float64 fraction an integer.
    return (int(fraction * 2**53) * n_ranks - 1).bit_length() + exponent - 53


def _ldexp(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """x * 2**exponent in float64, where every float32 has room for it."""
    half = exponent // 2  # 2.0**exponent itself may overflow for a float64 gradient
    return x.double() * 2.0**half * 2.0 ** (exponent - half)


def _add_in_order(values: Sequence[torch.Tensor], e: int, m: int, kahan: bool) -> torch.Tensor:
    """Sum with every operation rounded to (e, m), in the order given."""
    total = torch.zeros_like(values[0])
    rest = torch.zeros_like(total)
    for value in values:
        if not kahan:
            total = float_quantize(total + value, e, m)
            continue
        corrected = float_quantize(value - rest, e, m)
        new = float_quantize(total + corrected, e, m)
        rest = float_quantize(float_quantize(new - total, e, m) - corrected, e, m)
        rest = rest.where(rest.isfinite(), 0.0)  # an Inf stays Inf
        total = new
    return total


def sum_gradients(
    per_rank_grads: Sequence[Sequence[torch.Tensor | None]],
    e: int,
    m: int,
    aps: bool = True,
    kahan: bool = False,
    groups: int = 1,
) -> list[torch.Tensor | None]:
    """Sum the gradients of all ranks, layer by layer, in the arithmetic of the APS paper.

    `per_rank_grads[rank][layer]`. With `aps` each layer is scaled by a power of two so that max|g| * N falls
    on the format's top binade, rounded, summed in rank order with a rounding after every addition, and scaled
    back; without, the values are rounded as they are. `kahan` carries Kahan's correction, also in (e, m).
    `groups` sums that many runs of consecutive ranks first and then their results, so round-off grows with N
    / groups + groups, not N.

    Returns new float32 tensors, float64 for float64 gradients (which are rounded to float32 once they are
    scaled); the inputs are not changed. A layer that is None on every rank gives None, on some ranks counts as
    zero there. All-zero layers give zeros. A layer with NaN or Inf is not scaled, and gives what IEEE sums of its
    values rounded to (e, m) give. Sums are not averaged.

    max|g| * N leaves room for the exact sum; a sum that is rounded up again and again can still outgrow the format
    where there is no mantissa: with m=0 and `groups` finite gradients can give Inf (eight ones in (3, 0) with
    groups=3 do: 2 + 4 + 4, each a tie that rounds up).
    """
    e, m = _native.check_format("sum_gradients", e, m)
    n_ranks = len(per_rank_grads)
    if n_ranks == 0:
        raise ValueError("sum_gradients: per_rank_grads must hold at least one rank, got none")
    groups = _native.check_int("sum_gradients", "groups", groups, 1, n_ranks)
    n_layers = len(per_rank_grads[0])
    if any(len(grads) != n_layers for grads in per_rank_grads):
        raise ValueError(
            f"sum_gradients: every rank must have {n_layers} layers, got {[len(grads) for grads in per_rank_grads]}"
        )
    return [
        _sum_layer([grads[layer] for grads in per_rank_grads], e, m, aps, kahan, groups) for layer in range(n_layers)
    ]


def _sum_layer(
    grads: Sequence[torch.Tensor | None], e: int, m: int, aps: bool, kahan: bool, groups: int
) -> torch.Tensor | None:
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    for grad in present:
        if not isinstance(grad, torch.Tensor) or not grad.is_floating_point():
            raise TypeError(
                "sum_gradients: gradients must be floating-point torch tensors or None, got "
                f"{getattr(grad, 'dtype', '')} {type(grad).__name__}"
            )
    if any(grad.shape != present[0].shape for grad in present):
        raise ValueError(f"sum_gradients: shapes must agree between ranks, got {[tuple(g.shape) for g in present]}")
    values = [torch.zeros_like(present[0]) if grad is None else grad.detach() for grad in grads]

    # The format's top exponent is its bias, which is also what CPD shifts to.
    exponent = _shared_exponent(present, len(grads)) if aps else None
    shift = 0 if exponent is None else (1 << (e - 1)) - 1 - exponent
    values = [float_quantize(_ldexp(value, shift).float(), e, m) for value in values]

    bounds = [len(values) * group // groups for group in range(groups + 1)]
    partial = [_add_in_order(values[low:high], e, m, kahan) for low, high in zip(bounds, bounds[1:], strict=False)]
    total = _add_in_order(partial, e, m, kahan) if groups > 1 else partial[0]
    return _ldexp(total, -shift).to(torch.float64 if present[0].dtype == torch.float64 else torch.float32)
