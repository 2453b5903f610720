"""Two levels with PyTorch, on 4 ranks that count to two hosts, or 6 to three: memory that processes really share.

Oracle: the same exchange among emulated ranks, which tests/single/test_two_level.py compares with NumPy.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from exchange_oracle import assert_same_bits, hosted_exchanges, make_gradients, reduce_all
from torch_common import assert_replicas_equal, loss_of, make_model, to_numpy, to_torch

from horovod_aps.options import Options
from horovod_aps.torch import APSCompressor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import soak_scenarios  # noqa: E402

hvd.init()
LAYOUTS = {"three": "abcabc"} if hvd.size() == 6 else {"neighbours": "aabb", "in turn": "abab"}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def hosts(request, monkeypatch) -> str:
    assert hvd.size() == len(request.param)
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
        grads[-1]["layer2"][-1] = np.inf
    compressor = APSCompressor(**options)
    for wanted in emulated(grads, hosts, Options(**options), n_steps=3):
        results = hvd.grouped_allreduce(
            [to_torch(x) for x in grads[hvd.rank()].values()], name="two levels", compression=compressor
        )
        for (name, x), result in zip(wanted.items(), results):
            assert_same_bits(to_numpy(result), x, name)
    assert compressor.stats()["hierarchy"] == f"two-level ({len(set(hosts))} hosts with 2 ranks)"


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


def allocate_at_most(n_calls: int, monkeypatch) -> None:
    """Let this rank have shared memory only so often."""
    allocate, calls = os.posix_fallocate, []

    def refuse(*args: int) -> None:
        calls.append(args)
        if len(calls) > n_calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", refuse)


@pytest.mark.parametrize("what", ["memory", "room"])
def test_memory_that_cannot_be_shared_means_flat(what, two_hosts, monkeypatch) -> None:
    from horovod_aps.transports.memory import HostMemory

    if hvd.rank() == 3 and what == "memory":
        monkeypatch.setattr(HostMemory, "open", lambda name: HostMemory(os.open("/nowhere", os.O_RDWR)))
    elif hvd.rank() == 3:
        allocate_at_most(1, monkeypatch)
    compressor = APSCompressor(4, 3)
    result = hvd.allreduce(torch.ones(10), name="x", compression=compressor)
    assert torch.equal(result, torch.ones(10))
    assert "rank 3 cannot share" in compressor.stats()["hierarchy"]


def test_memory_that_cannot_grow_is_a_memory_error_on_all_ranks(two_hosts, monkeypatch) -> None:
    """Not HorovodInternalError, after which elastic training would try the same again."""
    compressor = APSCompressor(4, 3)
    assert torch.equal(hvd.allreduce(torch.ones(10), name="small", compression=compressor), torch.ones(10))
    if hvd.rank() == 1:
        allocate_at_most(0, monkeypatch)
    handles = []
    for name in "ab":
        wired, context = compressor.compress(torch.ones(10_000))
        handles.append((hvd.allreduce_async_(wired, name=name), context))
    why = r"APSCompressor: .* could not go on: .* 2 ranks .* cannot grow to [\d,]+ bytes \(No space"
    for handle, context in handles:
        with pytest.raises(MemoryError, match=why):
            compressor.decompress(hvd.synchronize(handle), context)
    with pytest.raises(MemoryError, match=why):  # and so does every later one
        hvd.allreduce(torch.ones(10), name="small", compression=compressor)
    flat = APSCompressor(4, 3, hierarchy="flat")
    assert torch.equal(hvd.allreduce(torch.ones(10_000), name="a", compression=flat), torch.ones(10_000))


def test_stats_are_those_of_all_ranks_of_a_host(two_hosts) -> None:
    compressor = APSCompressor(4, 3, stats=True)
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(2):
        hvd.allreduce(x, name="x", compression=compressor)
    stats = compressor.stats()
    assert 0.01 < stats["layers"]["x"]["relative_error"] < 0.05
    everyone = hvd.allgather_object(stats["bytes_sent"], name="bytes")
    assert 2 * 10_000 <= everyone[0] + everyone[1] < 2 * 10_500 and 0.15 < stats["ratio"] < 0.18


def test_soak_scenario() -> None:
    """What `make soak` does for longer; its oracle is the emulation, tensor by tensor."""
    run = soak_scenarios.Soak(seed=2)
    for index in range(2):
        run.run("two_levels", index)
    assert run.n_results > 20 and run.hosted and "HOROVOD_APS_HOST" not in os.environ


def test_residuals_go_along_into_worlds_with_other_hosts(monkeypatch) -> None:
    """Flat, in two levels, cut in another way, flat again: results and residuals as in the emulation. Last: it ends
    worlds, which works over MPI only if mpi4py has started it (test_torch_faults.py)."""
    if hvd.mpi_enabled() and os.environ.get("HOROVOD_APS_TEST_MPI") != "mpi4py":
        return
    sizes, options = (1, 1000, 4097), {"e": 3, "m": 0, "error_feedback": True}
    compressor, emulation, ways = APSCompressor(**options), [], []
    for layout in ("aaaa", "aabb", "abab", "aaaa"):
        hvd.shutdown()
        hvd.init()
        monkeypatch.setenv("HOROVOD_APS_HOST", layout[hvd.rank()])
        before, emulation = emulation, hosted_exchanges(layout, Options(**options))
        for old, new in zip(before, emulation):
            new.load_state(old.state())
        for seed in range(3):
            grads = make_gradients(sizes, 4, seed=seed)
            wanted = reduce_all(grads, emulation)[hvd.rank()]
            results = hvd.grouped_allreduce(
                [to_torch(x) for x in grads[hvd.rank()].values()], name="worlds", compression=compressor
            )
            for (name, x), result in zip(wanted.items(), results):
                assert_same_bits(to_numpy(result), x, f"{layout} {seed} {name}")
        kept, wanted = compressor.state_dict()["residuals"], emulation[hvd.rank()].residuals
        n_kept = sum(hvd.allgather_object(sum(x.numel() for x in kept.values()), name=f"kept {len(ways)}"))
        assert n_kept == sum(sizes) * (4 if layout == "aaaa" else 2)  # once per rank, or per host
        assert len(kept) == len(wanted)
        for (name, x), (layer, y) in zip(sorted(kept.items()), sorted(wanted.items())):
            assert name.partition("[")[1:] == layer.partition("[")[1:]  # the same part of it
            assert_same_bits(x, y, f"{layout} {name}")
        ways.append(compressor.stats()["hierarchy"].split()[0])
    assert ways == ["flat", "two-level", "two-level", "flat"]
