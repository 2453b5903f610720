"""Two levels with PyTorch, on 4 ranks that count to two hosts: memory that processes really share.

Oracle: the same exchange among emulated ranks, which tests/single/test_two_level.py compares with NumPy.
"""

from __future__ import annotations

import os

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from exchange_oracle import assert_same_bits, hosted_exchanges, make_gradients, reduce_all
from torch_common import assert_replicas_equal, loss_of, make_model, to_numpy, to_torch

from horovod_aps.options import Options
from horovod_aps.torch import APSCompressor

hvd.init()
LAYOUTS = {"neighbours": "aabb", "in turn": "abab"}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def hosts(request, monkeypatch) -> str:
    assert hvd.size() == 4
    monkeypatch.setenv("HOROVOD_APS_HOST", request.param[hvd.rank()])
    return request.param


@pytest.fixture
def two_hosts(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_APS_HOST", "aabb"[hvd.rank()])


def emulated(grads, hosts: str, options: Options, n_steps: int = 1) -> list[dict[str, np.ndarray]]:
    """What rank 0 gets in each step."""
    ranks = hosted_exchanges(hosts, options)
    return [reduce_all(grads, ranks)[0] for _ in range(n_steps)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_mb": 0.01},
        {"e": 3, "m": 0, "error_feedback": True},
        {"rounding": "stochastic", "seed": 3},
        {"accumulate": "kahan"},
        {"overrides": {"*1": "float32", "*2": (5, 2)}},
    ],
    ids=str,
)
def test_all_ranks_get_what_the_emulation_gets(options, hosts) -> None:
    options = {"e": 4, "m": 3} | options
    grads = make_gradients((1, 1000, 70_001, 4096), hvd.size())
    if "error_feedback" not in options:
        grads[1]["layer1"][5] = np.nan
    compressor = APSCompressor(**options)
    for wanted in emulated(grads, hosts, Options(**options), n_steps=3):
        results = hvd.grouped_allreduce(
            [to_torch(x) for x in grads[hvd.rank()].values()], name="two levels", compression=compressor
        )
        for (name, x), result in zip(wanted.items(), results):
            assert_same_bits(to_numpy(result), x, name)
    assert compressor.stats()["hierarchy"] == "two-level (2 hosts with 2 ranks)"


def test_training_with_error_feedback_and_a_checkpoint(two_hosts) -> None:
    def train(model, optimizer, steps) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()

    def start() -> tuple[torch.nn.Module, APSCompressor, torch.optim.Optimizer]:
        model, compressor = make_model(), APSCompressor(3, 1, error_feedback=True, bucket_mb=0.004)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters(), compression=compressor
        )
        return model, compressor, optimizer

    model, compressor, optimizer = start()
    train(model, optimizer, range(5))
    state, weights = compressor.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    assert state["residuals"] and sum(x.numel() for x in state["residuals"].values()) < sum(
        p.numel() for p in model.parameters()
    )
    train(model, optimizer, range(5, 10))
    assert_replicas_equal(model)
    other, compressor, optimizer = start()
    other.load_state_dict(weights)
    compressor.load_state_dict(state)
    train(other, optimizer, range(5, 10))
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)


def test_process_sets_inside_and_across_hosts(two_hosts) -> None:
    sets = {(0, 1): "one host", (2, 3): "one host", (0, 2): "to itself", (0, 1, 2): "2, 1", (1, 2, 3): "1, 2"}
    for members, way in sets.items():
        process_set, compressor = hvd.add_process_set(list(members)), APSCompressor(4, 3)
        if hvd.rank() in members:
            x = torch.full((100,), float(hvd.rank() + 1))
            result = hvd.allreduce(x, name="x", process_set=process_set, compression=compressor)
            assert torch.allclose(result, torch.tensor(np.mean(members) + 1.0).float(), rtol=0.1)
            assert way in compressor.stats()["hierarchy"]
        hvd.barrier()
        hvd.remove_process_set(process_set)


def test_ranks_that_want_different_things_all_get_an_error(two_hosts) -> None:
    compressor = APSCompressor(4, 3, hierarchy="flat" if hvd.rank() == 2 else "auto")
    with pytest.raises(ValueError, match="hierarchy is"):
        hvd.allreduce(torch.ones(10), name="x", compression=compressor)


def test_two_levels_that_cannot_be_are_an_error_on_all_ranks(monkeypatch) -> None:
    for layout, why in (("aaaa", "one host"), ("aaab", "3, 1")):
        monkeypatch.setenv("HOROVOD_APS_HOST", layout[hvd.rank()])
        compressor = APSCompressor(4, 3, hierarchy="two-level")
        with pytest.raises(ValueError, match=why):
            hvd.allreduce(torch.ones(10), name="x", compression=compressor)


def test_memory_that_cannot_be_shared_means_flat(two_hosts, monkeypatch) -> None:
    from horovod_aps.transports.memory import HostMemory

    if hvd.rank() == 3:
        monkeypatch.setattr(HostMemory, "open", lambda name: HostMemory(os.open("/nowhere", os.O_RDWR)))
    compressor = APSCompressor(4, 3)
    result = hvd.allreduce(torch.ones(10), name="x", compression=compressor)
    assert torch.equal(result, torch.ones(10))
    assert "rank 3 cannot share" in compressor.stats()["hierarchy"]


def test_stats_are_those_of_all_ranks_of_a_host(two_hosts) -> None:
    compressor = APSCompressor(4, 3, stats=True)
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(2):
        hvd.allreduce(x, name="x", compression=compressor)
    stats = compressor.stats()
    assert 0.01 < stats["layers"]["x"]["relative_error"] < 0.05
    everyone = hvd.allgather_object(stats["bytes_sent"], name="bytes")
    assert 2 * 10_000 <= everyone[0] + everyone[1] < 2 * 10_500 and 0.15 < stats["ratio"] < 0.18
