"""Two levels by messages, as GPUs take them, on emulated ranks; oracle: the same in shared memory, bit for bit.

`test_two_level.py` compares that with NumPy. On the stand-in for a GPU gradients are written late, by the framework's
stream: an order that events do not enforce gives wrong numbers in some of the seeds.
"""

from __future__ import annotations

from typing import Any

import cuda_standin
import numpy as np
import pytest
from exchange_oracle import SIZES, assert_same_bits, hosted_exchanges, make_gradients, reduce_all
from test_cuda_exchange import CudaAware, OnCpu, OnGpu, run

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.reductions import two_level_messages
from horovod_aps.engine.reductions.scatter_gather import ScatterGather
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.hosts import HostedTransport
from horovod_aps.transports.local import LocalTransport

LAYOUTS = ["aabb", "abab", "aabbcc", "abcabc", "aaabbb"]
OPTIONS = [
    Options(4, 3),
    Options(3, 0, error_feedback=True),
    Options(5, 2, rounding="stochastic", stats=True, bucket_mb=0.002),
    Options(4, 3, accumulate="kahan", error_feedback=True),
    Options(4, 3, overrides={"l*1": "qsgd4", "l*2": "float32"}, error_feedback=True),
]


def by_messages(hosts: str, options: Options, kernels: Any = None, kind: type = LocalTransport) -> list[Exchange]:
    """One emulated rank for each letter, which is its host."""
    return [
        Exchange(kernels or CpuKernels(), HostedTransport(one, options.why_flat, host, by_messages=True), options)
        for one, host in zip(kind.world(len(hosts)), hosts)
    ]


def of_layers(exchange: Exchange) -> Any:
    return exchange.statistics.as_dict()["layers"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_messages_give_what_shared_memory_gives(hosts: str, options: Options, dtype: str) -> None:
    grads = make_gradients(SIZES[1:], len(hosts), dtype)
    if not options.error_feedback:
        grads[1]["layer3"][2] = np.nan
        grads[-1]["layer4"][0] = np.inf
    ours, theirs = by_messages(hosts, options), hosted_exchanges(hosts, options)
    for _ in range(3):
        for mine, wanted in zip(reduce_all(grads, ours), reduce_all(grads, theirs)):
            for name, x in wanted.items():
                assert_same_bits(mine[name], x, name)
    for one, other in zip(ours, theirs):
        assert one.residuals.keys() == other.residuals.keys()
        assert all(np.array_equal(one.residuals[name], x) for name, x in other.residuals.items())
        assert repr(of_layers(one)) == repr(of_layers(other))
        assert one.way == f"two-level by messages ({len(set(hosts))} hosts with {hosts.count('a')} ranks)"
        assert "memory" not in one.way and one.transport.hosts.room is None


@pytest.mark.parametrize("n_bytes", [0, 5000])
def test_a_bucket_too_large_for_float32_messages_is_flat(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level_messages, "MAX_BYTES", n_bytes)
    options = Options(4, 3, bucket_mb=0.002)
    ranks = by_messages("aabb", options)
    grads = make_gradients((1025, 3000, 10), 4)
    found = reduce_all(grads, ranks)
    kinds = [type(one) for plan in ranks[0]._plans.values() for one in plan.reductions]
    assert ScatterGather in kinds and (two_level_messages.TwoLevelByMessages in kinds) == bool(n_bytes)
    flat = reduce_all(grads, hosted_exchanges("aabb", options.replace(hierarchy="flat")))
    for rank in found:
        assert_same_bits(rank["layer1"], flat[0]["layer1"])


def test_only_some_ranks_want_stats() -> None:
    grads = make_gradients((1025, 9), 4)
    ranks, all_of_them = (by_messages("aabb", Options(4, 3, stats=True)) for _ in range(2))
    ranks[2].options = ranks[2].options.replace(stats=False)
    for _ in range(2):
        reduce_all(grads, ranks)
        reduce_all(grads, all_of_them)
    assert repr(of_layers(ranks[0])) == repr(of_layers(all_of_them[0]))
    assert of_layers(ranks[3])["layer0"]["relative_error"] != of_layers(all_of_them[3])["layer0"]["relative_error"]


def test_one_rank_that_shares_no_memory_has_all_send_messages() -> None:
    world = LocalTransport.world(4)
    ranks = [
        Exchange(CpuKernels(), HostedTransport(one, "", host, by_messages=one.rank == 2), Options(4, 3))
        for one, host in zip(world, "aabb")
    ]
    reduce_all(make_gradients((100,), 4), ranks)
    assert all(one.way.startswith("two-level by messages") for one in ranks)


# ---- on the stand-in for a GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("hosts", ["aabb", "abcabc"])
def test_gpus_give_what_cpus_give(hosts: str, options: Options) -> None:
    wanted, cpu = run(OnCpu(), len(hosts), options, 3, hosted_exchanges(hosts, options))
    for seed in range(2):
        cuda_standin.reset(seed)
        side = OnGpu()
        exchanges = by_messages(hosts, options, side.kernels)
        found, _ = run(side, len(hosts), options, 3, exchanges)
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
        assert exchanges[0].way.endswith("through pinned host memory") and "by messages" in exchanges[0].way
        moved = cuda_standin.kernel_bytes()
        assert moved["read_pinned"] == moved["written_pinned"] == 0
        if not options.stats:  # for them the host waits, else only we do here, for results
            assert cuda_standin.counts()["waits"] == 3 * len(hosts)
    state = exchanges[1].state()["residuals"]
    assert state.keys() == cpu[1].residuals.keys()
    assert all(np.array_equal(state[name], x) for name, x in cpu[1].residuals.items())


def test_messages_go_straight_from_device_memory() -> None:
    options = OPTIONS[1]
    wanted, _ = run(OnCpu(), 4, options, 2, hosted_exchanges("aabb", options))
    cuda_standin.reset(5)
    side = OnGpu()
    found, exchanges = run(side, 4, options, 2, by_messages("aabb", options, side.kernels, CudaAware))
    assert exchanges[0].way.endswith("from device memory by MPI")
    assert all(a.tobytes() == b.tobytes() for a, b in zip(wanted, found))
