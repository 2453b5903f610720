"""What the PyTorch tests share: NumPy arrays to tensors and back, small models, and replica checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import horovod.torch as hvd
import ml_dtypes
import numpy as np
import torch


def to_torch(x: np.ndarray) -> torch.Tensor:
    """A tensor with a copy of the array's bits, bfloat16 included."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """An array with the tensor's bits, bfloat16 included."""
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def make_model(seed: int = 0) -> torch.nn.Module:
    """A small net with layers of 2 to 2,000 elements; equal on all ranks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 31), torch.nn.Tanh(), torch.nn.Linear(31, 2)
    )


def batch(step: int, rank: int, n: int = 8, width: int = 20) -> torch.Tensor:
    """Inputs of one rank in one step, that every rank can make."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """A loss whose gradients differ between ranks and steps."""
    x = batch(step, rank)
    return ((model(x) - x[:, :2].sin()) ** 2).mean()


def gradients_of(model: torch.nn.Module, loss: Callable[[int], torch.Tensor]) -> list[dict[str, np.ndarray]]:
    """Gradients that each rank will have, by name, computed here for all ranks."""
    per_rank = []
    for rank in range(hvd.size()):
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(loss(rank), list(named.values()))
        per_rank.append({name: to_numpy(grad).copy() for name, grad in zip(named, grads)})
    return per_rank


def named_gradients(model: torch.nn.Module) -> Mapping[str, np.ndarray]:
    """The gradients in the model now, copied."""
    return {name: to_numpy(p.grad).copy() for name, p in model.named_parameters() if p.grad is not None}


def assert_replicas_equal(model: torch.nn.Module, process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
    """All parameters have the same bits on all ranks. Oracle: an all-gather of the bytes themselves."""
    raw = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    rows = hvd.allgather(raw[None], name="replicas", process_set=process_set)
    assert rows.shape[0] == process_set.size()
    assert all(torch.equal(row, raw) for row in rows), "replicas differ"


def relative_error(actual: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> float:
    """The largest relative error of any layer."""
    errors = []
    for name, wanted in exact.items():
        wanted = wanted.astype(np.float64)
        errors.append(float(np.linalg.norm(actual[name] - wanted) / max(np.linalg.norm(wanted), 1e-300)))
    return max(errors)


def mean_of(per_rank: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Exact averages, in float64."""
    return {name: np.mean([grads[name].astype(np.float64) for grads in per_rank], axis=0) for name in per_rank[0]}
