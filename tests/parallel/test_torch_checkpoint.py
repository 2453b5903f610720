"""A compressor's state through a file, and the same run twice. Oracle: the uninterrupted run, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch_common import loss_of, make_model

from horovod_aps import FloatFormat
from horovod_aps.torch import APSCompressor

hvd.init()

OPTIONS = [
    {"error_feedback": True},
    {"rounding": "stochastic", "seed": 3},
    {"error_feedback": True, "rounding": "stochastic", "seed": 4},
    {"error_feedback": True, "warmup_steps": 5},
    {"overrides": "auto", "auto_steps": 2, "auto_error": 0.2},
    {"overrides": "auto", "auto_steps": 6, "auto_error": 0.2},
]


class Run:
    """A model, its optimizer with momentum, and a compressor of a very coarse format, so that residuals matter."""

    def __init__(self, options: dict[str, Any], seed: int = 0) -> None:
        self.model = make_model(seed)
        self.compressor = APSCompressor(3, 1, **options)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            compression=self.compressor,
        )

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, step, hvd.rank()).backward()
            self.optimizer.step()

    def parameters(self) -> np.ndarray:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).numpy().view(np.uint32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_resumed_run_equals_uninterrupted_run(options):
    """The checkpoint goes through torch.save and, as PyTorch loads by default, weights_only=True."""
    whole, first = Run(options), Run(options)
    whole.train(range(10))
    first.train(range(4))
    file = io.BytesIO()
    torch.save(
        {
            "model": first.model.state_dict(),
            "optimizer": first.optimizer.state_dict(),
            "compressor": first.compressor.state_dict(),
        },
        file,
    )
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = Run(options, seed=9)
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    resumed.compressor.load_state_dict(state["compressor"])
    resumed.train(range(4, 10))
    np.testing.assert_array_equal(resumed.parameters(), whole.parameters())


def test_set_format_survives_a_checkpoint():
    """In a file that PyTorch loads by default; formats of three kinds."""
    whole, resumed = Run({"error_feedback": True}), Run({"error_feedback": True}, seed=9)
    whole.train(range(2))
    names = [name for name, _ in whole.model.named_parameters()]
    whole.compressor.set_format(2, 3, overrides={names[0]: FloatFormat(4, 1), names[1]: (5, 2), "*.bias": "float32"})
    whole.train(range(2, 4))
    file = io.BytesIO()
    torch.save([whole.model.state_dict(), whole.optimizer.state_dict(), whole.compressor.state_dict()], file)
    file.seek(0)
    for part, state in zip((resumed.model, resumed.optimizer, resumed.compressor), torch.load(file, weights_only=True)):
        part.load_state_dict(state)
    for run in (whole, resumed):
        run.train(range(4, 7))
    np.testing.assert_array_equal(resumed.parameters(), whole.parameters())


def test_residuals_matter_for_resuming():
    """The comparison above can fail: without the compressor's state the runs part."""
    options = {"error_feedback": True}
    whole, first = Run(options), Run(options)
    whole.train(range(8))
    first.train(range(4))
    forgetful = Run(options, seed=9)
    forgetful.model.load_state_dict(first.model.state_dict())
    forgetful.optimizer.load_state_dict(first.optimizer.state_dict())
    forgetful.train(range(4, 8))
    assert np.any(forgetful.parameters() != whole.parameters())


def test_state_is_a_copy_and_loads_into_a_running_compressor():
    run = Run({"error_feedback": True})
    run.train(range(3))
    state = run.compressor.state_dict()
    kept = {name: values.numpy().copy() for name, values in state["residuals"].items()}
    assert state["step_number"] == 3 and set(kept) and any(np.any(values) for values in kept.values())
    run.train(range(3, 5))
    for name, values in state["residuals"].items():
        np.testing.assert_array_equal(values, kept[name])
    run.compressor.load_state_dict(state)
    assert run.compressor.state_dict()["step_number"] == 3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_run_twice_gives_the_same_bits(options):
    results = []
    for _ in range(2):
        run = Run(options)
        run.train(range(8))
        results.append(run.parameters())
    np.testing.assert_array_equal(*results)


def test_other_seed_gives_other_bits():
    """The determinism above is not that of a rounding that ignores its seed."""
    results = []
    for seed in (1, 2):
        run = Run({"rounding": "stochastic", "seed": seed})
        run.train(range(3))
        results.append(run.parameters())
    assert np.any(results[0] != results[1])
