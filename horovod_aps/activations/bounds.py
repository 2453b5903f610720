"""How large an error a layer's activations may have: from its momentum, by the theory of Jin et al.

Errors uniform in ±eb, one for every activation, meet in a weight's gradient as a sum over batch and places, weighted
with L, the loss gradient at the layer's output. So the gradient's error is normal, with

    sigma² = eb²/3 · ΣL²          (normalisation: L divided by the standard deviation of the input)

and eb follows from the sigma that is wanted: a share of the mean |momentum| of the layer's weight.

Momentum starts at zero and grows for some steps, and so do the errors that it collects from the gradients: after t
steps they have sqrt(1 - beta^2t) of the deviation that they come to. With a momentum larger by as much, the error that
the momentum has is the same share of it in the first step as in the hundredth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

START = 0.05  # of the tensor's rms: the bound of layers that have a theory before a gradient was seen
OTHER = 0.002  # of the tensor's rms: the bound where there is no theory
MOST = 0.5  # of the tensor's rms: wider bins would tell too little for errors to be uniform
BEHIND = 0.15  # of the share, for errors that reach only the gradient behind a batch norm: they add up over layers
KEPT = 0.9  # of the running mean of |gradient|

_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)
_NORMALISING = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


@dataclass
class Off:
    """A batch norm's measurements for the places where the ReLU behind it is off."""

    is_zero: bool = True
    """No gradient came back there."""
    n_places: int = 0
    """By channel."""
    squares: Tensor | None = None
    """By channel, sum of the squares of the loss gradient at the output."""
    inverse: Tensor | None = None
    """By channel, 1 / standard deviation."""

    def add(self, other: Off) -> Off:
        """Of two passes, with the deviations of the later."""
        if not (self.is_zero and other.is_zero) or self.squares is None or other.squares is None:
            return Off(is_zero=False)
        return Off(True, self.n_places + other.n_places, self.squares + other.squares, other.inverse)


@dataclass
class Layer:
    """What is known of one module, or of all tensors that no module saved (`module` is None)."""

    name: str
    module: nn.Module | None
    bound: float | None = None
    scale: float = 0.0
    """Root mean square of what it saved when it was last measured, where there is a theory."""
    partners: set[str] = field(default_factory=set)
    """Layers that save the same tensor later, with a smaller bound."""
    squares: float = 0.0
    """Mean over the weights of ΣL², summed since the last step of the optimizer."""
    gradient: float = 0.0
    """Running mean of the weight's |gradient|, for optimizers without momentum."""
    off_bound: float = 0.0
    """Of a batch norm's input, where the ReLU behind it is off; 0: as elsewhere."""
    follower: tuple[str, float] | None = None
    """A layer whose tensor this one predicts, and which share of its bound pays as a bound here."""
    predicts: bool = True
    """Whether to predict what it saves paid when it was last tried."""
    off: Off | None = None
    """What is known of such places since the last step of the optimizer."""
    share: float | None = None
    """Predicted sigma over mean |momentum| (in the first steps: over that divided by `grown`) at the bound in use."""

    @property
    def weight(self) -> Tensor | None:
        """The weight whose gradient the saved tensors go into; None if forward makes it, as pruned layers do."""
        weight = getattr(self.module, "weight", None)
        return weight if isinstance(weight, Tensor) and weight.requires_grad and weight.is_leaf else None

    @property
    def has_theory(self) -> bool:
        """Whether the bound can follow from the weight's momentum."""
        return isinstance(self.module, (*_WEIGHTED, *_NORMALISING)) and self.weight is not None

    @property
    def is_normalising(self) -> bool:
        """Whether it saves statistics beside its input, which are used as they are."""
        return isinstance(self.module, _NORMALISING)

    @property
    def default(self) -> float:
        """The bound before there is one."""
        return START * self.scale


def inverse_deviation(module: nn.Module, x: Tensor) -> Tensor | None:
    """1 / standard deviation that a normalising module divides its input by, to be broadcast; None for others."""
    if not isinstance(module, _NORMALISING):
        return None
    x = x.detach().float()
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        shape = (1, -1, *[1] * (x.dim() - 2))
        if module.running_var is not None and not module.training:
            variance = module.running_var.view(shape)
        else:
            variance = x.var([d for d in range(x.dim()) if d != 1], unbiased=False).view(shape)
    elif isinstance(module, nn.GroupNorm):
        groups = x.reshape(x.shape[0], module.num_groups, -1).var(-1, unbiased=False)
        variance = groups.repeat_interleave(x.shape[1] // module.num_groups, 1).view(*x.shape[:2], *[1] * (x.dim() - 2))
    else:
        assert isinstance(module, nn.LayerNorm)
        variance = x.var(list(range(x.dim() - len(module.normalized_shape), x.dim())), unbiased=False, keepdim=True)
    return (variance + module.eps).rsqrt()


def mean_squares(module: nn.Module, gradient: Tensor, inverse: Tensor | None) -> float:
    """Mean over the weights of ΣL², from the loss gradient at the module's output."""
    gradient = gradient.detach().float()
    if inverse is not None:
        gradient = gradient * inverse
        assert isinstance(module.weight, Tensor)
        n_sums = module.weight.numel()
    else:
        # All weights of one output channel or feature meet the same L.
        n_sums = module.out_features if isinstance(module, nn.Linear) else module.out_channels  # type: ignore[assignment]
    total = float(torch.linalg.vector_norm(gradient)) ** 2
    return total / n_sums


def momentum(optimizer: torch.optim.Optimizer, weight: Tensor) -> float | None:
    """Mean |momentum| of a weight: SGD's momentum_buffer, Adam's exp_avg; None if the optimizer has neither."""
    state: dict[str, Any] = optimizer.state.get(weight, {})
    for key in ("momentum_buffer", "exp_avg"):
        if isinstance(state.get(key), Tensor):
            return float(state[key].detach().abs().mean())
    return None


def grown(optimizer: torch.optim.Optimizer, weight: Tensor, n_steps: int | None) -> float:
    """Deviation of the errors in a weight's momentum after n_steps (None: many), over what it comes to."""
    if n_steps is None:
        return 1.0
    group = next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), {})
    decay = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return math.sqrt(1.0 - float(decay) ** (2 * n_steps)) if n_steps > 0 and 0 <= decay < 1 else 1.0


def bound_for(share: float, size: float, squares: float) -> float:
    """eb such that sigma is `share` of `size`, the mean |momentum|."""
    return share * size * math.sqrt(3.0 / squares)


def predicted_sigma(bound: float, squares: float) -> float:
    """Standard deviation of a weight gradient's error if activations have errors uniform in ±bound."""
    return bound * math.sqrt(squares / 3.0)


def off_bound_for(layer: Layer, off: Off, share: float, loss_scale: float) -> float:
    """The bound of a batch norm's input where no gradient comes back, 0 if it does.

    There its errors do not reach the weight. They reach the gradient of the input, by the term of batch norm that is
    -x · mean(L·x) for a normalised x: at most `BEHIND` of the share of that gradient's root mean square, and no more
    than `MOST` standard deviations.
    """
    weight = layer.weight
    if not off.is_zero or off.squares is None or off.inverse is None or weight is None or weight.grad is None:
        return 0.0
    with torch.no_grad():
        scale = weight.float() * off.inverse
        term = scale * off.inverse * weight.grad.float() / off.n_places
        noise = float(torch.linalg.vector_norm(term))
        whole = float((scale.square() * off.squares).sum() / loss_scale**2 / off.n_places) ** 0.5
        bound = MOST / max(float(off.inverse.square().mean().sqrt()), 1e-30)
    if noise > 0:
        bound = min(bound, BEHIND * share * math.sqrt(3.0) * whole / noise)
    return bound if math.isfinite(bound) else 0.0


def coarse_for(off_bound: float, bound: float) -> int:
    """How many times a bound may be doubled to stay within another."""
    return min(15, int(math.log2(off_bound / bound))) if 0 < bound < off_bound else 0


def refresh(
    layer: Layer, optimizer: torch.optim.Optimizer, share: float, loss_scale: float, n_steps: int | None
) -> None:
    """Set the layer's bound from what was measured since the optimizer's last step; starts a new measurement.

    n_steps: how many steps the momentum has seen; None if it is older than the saver.
    """
    squares, layer.squares = layer.squares / loss_scale**2, 0.0
    off, layer.off = layer.off, None
    layer.off_bound = 0.0
    weight = layer.weight
    if weight is None or not layer.has_theory:
        return
    size = momentum(optimizer, weight)
    size = layer.gradient if size is None else size / grown(optimizer, weight, n_steps)
    if not (size > 0 and squares > 0 and math.isfinite(size) and math.isfinite(squares)):
        return  # nothing was learned in this step: the bound stays
    bound = bound_for(share, size, squares)
    if layer.scale:
        bound = min(bound, MOST * layer.scale)
    layer.bound = bound
    layer.off_bound = off_bound_for(layer, off, share, loss_scale) if off is not None else 0.0
    layer.share = predicted_sigma(bound, squares) / size
