"""Two levels as GPUs take them, on 4 ranks that count to two hosts: messages through Horovod's operations or pinned.

Tensors of the CPU, and the stand-in for a GPU. Oracle: the same work in shared memory, emulated or in the same launch,
bit for bit.
"""

from __future__ import annotations

import cuda_standin
import horovod.torch as hvd
import pytest
import torch
from exchange_oracle import assert_same_bits, hosted_exchanges, make_gradients, reduce_all
from test_torch_gpu import FRAMEWORK, gpu, train  # noqa: F401 (a fixture)
from test_torch_operations import StandinOperations, by_operations  # noqa: F401 (a fixture)
from torch_common import to_numpy, to_torch

from horovod_aps.options import Options
from horovod_aps.torch import APSCompressor, operations

hvd.init()
TWO_LEVELS = "two-level by messages (2 hosts with 2 ranks)"


@pytest.fixture
def two_hosts(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_APS_HOST", "aabb"[hvd.rank()])


@pytest.mark.parametrize(
    "hosts, options",
    [
        ("aabb", {"bucket_mb": 0.01, "stats": True}),
        ("abab", {"e": 3, "m": 0, "error_feedback": True}),
        ("abba", {"rounding": "stochastic", "seed": 3, "accumulate": "kahan"}),
    ],
    ids=str,
)
def test_by_operations_all_ranks_get_what_the_emulation_gets(hosts, options, by_operations, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setenv("HOROVOD_APS_HOST", hosts[hvd.rank()])
    names = by_operations()
    options = {"e": 4, "m": 3} | options
    grads = make_gradients((1, 1000, 70_001, 4096), hvd.size())
    compressor, emulated = APSCompressor(**options), hosted_exchanges(hosts, Options(**options))
    for _ in range(3):
        wanted = reduce_all(grads, emulated)[0]
        results = hvd.grouped_allreduce(
            [to_torch(x) for x in grads[hvd.rank()].values()], name="two levels", compression=compressor
        )
        for (name, x), result in zip(wanted.items(), results):
            assert_same_bits(to_numpy(result), x, name)
    assert compressor.stats()["hierarchy"] == f"{TWO_LEVELS}, by Horovod's operations"
    assert {kind for kind, _ in names} == {"allgather_async", "alltoall_async"}
    of_all = hvd.allgather_object(sorted(names), name="names")
    assert all(one == of_all[0] for one in of_all) and len(set(names)) == len(names)


@pytest.mark.parametrize("by", ["operations", "pinned memory", "operations on the stand-in"])
def test_training_with_error_feedback_and_a_checkpoint(by, two_hosts, by_operations, gpu, monkeypatch) -> None:  # noqa: F811
    expected, in_memory = train(4, False, error_feedback=True)
    assert in_memory.stats()["hierarchy"] == "two-level (2 hosts with 2 ranks)"
    if "operations" in by:
        by_operations()
    if by == "operations on the stand-in":
        monkeypatch.setattr(operations, "HorovodOperations", StandinOperations)
    on_standin = by != "operations"
    if on_standin:
        gpu()
    found, compressor = train(4, on_standin, error_feedback=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    kept, wanted = (one.state_dict()["residuals"] for one in (compressor, in_memory))
    assert kept.keys() == wanted.keys() and all(torch.equal(x, wanted[name]) for name, x in kept.items())
    assert compressor.stats()["hierarchy"].startswith(TWO_LEVELS)
    if on_standin:
        moved = cuda_standin.kernel_bytes()
        assert cuda_standin.counts()["launches"] and moved["read_pinned"] + moved["written_pinned"] == 0
        cuda_standin.cuda.ExternalStream(FRAMEWORK).synchronize()


def test_hierarchy_is_obeyed(monkeypatch, by_operations) -> None:  # noqa: F811
    by_operations()
    for layout, hierarchy, way in (
        ("aabb", "two-level", TWO_LEVELS),
        ("aabb", "flat", 'flat (hierarchy is "flat")'),
        ("aaab", "auto", "flat (hosts have different numbers of ranks: 3, 1)"),
    ):
        monkeypatch.setenv("HOROVOD_APS_HOST", layout[hvd.rank()])
        compressor = APSCompressor(4, 3, hierarchy=hierarchy)
        assert torch.equal(hvd.allreduce(torch.ones(10), name="x", compression=compressor), torch.ones(10))
        assert compressor.stats()["hierarchy"] == f"{way}, by Horovod's operations"
    with pytest.raises(ValueError, match="3, 1"):
        hvd.allreduce(torch.ones(10), name="x", compression=APSCompressor(4, 3, hierarchy="two-level"))


def test_ranks_have_different_devices(monkeypatch, two_hosts) -> None:
    """cuda:0 on one rank is cuda:1 on another; a rank may have tensors on several."""
    new_batch = APSCompressor._new_batch
    devices = [torch.device("cpu", index) for index in (hvd.rank(), 10 + hvd.rank())]
    compressor = APSCompressor(4, 3)
    for device in devices * 2:
        monkeypatch.setattr(
            APSCompressor, "_new_batch", lambda self, ps, _, *rest, device=device: new_batch(self, ps, device, *rest)
        )
        found = hvd.grouped_allreduce([torch.full((100,), 1.0 + hvd.rank())], name="g", compression=compressor)
        assert torch.equal(found[0], torch.full((100,), 2.5))
    assert len(compressor._reducers) == 2
