"""The emulator against a real job: every rank trains for real, emulates all ranks, and compares the bits.

Run with `mpirun -np N pytest tests/parallel/test_simulate.py`, N = 2, 3, 4 (also under horovodrun).
"""

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_aps.simulate import EmulatedOptimizer
from horovod_aps.torch import APSCompressor

hvd.init()
N_STEPS = 4


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 7, 3),
        torch.nn.BatchNorm2d(7),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(252, 11),
    )
    model.eval()  # running statistics would mix the emulated ranks
    return model


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 11, (5,), generator=generator)


def loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return torch.nn.functional.cross_entropy(model(x), y)


def train_real(options: dict) -> list[np.ndarray]:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.2, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=APSCompressor(**options),
    )
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss(model, step, hvd.rank()).backward()
        optimizer.step()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def train_emulated(options: dict) -> list[np.ndarray]:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    optimizer = EmulatedOptimizer(inner, hvd.size(), options, model.named_parameters())
    for step in range(N_STEPS):
        optimizer.step(lambda rank, step=step: loss(model, step, rank))
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"e": 4, "m": 3},
        {"e": 5, "m": 2, "bucket_mb": 0.002},
        {"e": 3, "m": 0, "error_feedback": True},
        {"e": 3, "m": 2, "rounding": "stochastic", "seed": 7},
        {"e": 4, "m": 3, "accumulate": "kahan"},
        {"e": 4, "m": 3, "scaling": False},
        {"e": 4, "m": 3, "overrides": {"4.*": "float32", "1.*": (5, 10)}, "warmup_steps": 1},
    ],
    ids=str,
)
def test_emulated_optimizer_equals_real_job(options):
    """Oracle: the real job itself, on the same data; weights after several steps are equal bit for bit."""
    real, emulated = train_real(options), train_emulated(options)
    for a, b in zip(real, emulated, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    # The comparison means something only if training moved the weights.
    assert all(np.any(a != p.detach().numpy()) for a, p in zip(real, make_model().parameters(), strict=True))
