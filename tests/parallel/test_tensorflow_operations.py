"""Packed bytes by Horovod's own all-to-all and all-gather from TensorFlow, as on GPUs with NCCL.

On tensors of the CPU, and on the stand-in for a GPU, where a second logical CPU of TensorFlow holds what Horovod sends
and receives. Oracle: the same work over the usual transports, bit for bit.
"""

from __future__ import annotations

import threading

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from exchange_oracle import check, make_gradients
from horovod.common.exceptions import HorovodInternalError
from test_tensorflow_gpu import GPU, HOST, MODES, reduce, stand_in  # noqa: F401 (a fixture)

from horovod_aps.tensorflow import APSCompressor, devices, engine, links, operations
from horovod_aps.transports import hosts

WAYS = {None: "by Horovod's operations", GPU: "from device memory by Horovod's NCCL"}
ON = pytest.mark.parametrize("gpu", [None, GPU], ids=["host", "device"])


@pytest.fixture
def by_operations():
    """From here on messages travel by Horovod's operations, also those of the host; what begins is noted."""
    begun, monkeypatch = [], pytest.MonkeyPatch()

    def start():
        make = operations.HorovodOperations._start

        def noted(self, begin, parts):
            begun.append((len(parts), sum(map(len, parts))))
            return make(self, begin, parts)

        monkeypatch.setattr(operations.HorovodOperations, "_start", noted)
        monkeypatch.setattr(operations, "may_carry", lambda: True)
        monkeypatch.setattr(operations, "carry", lambda gpu: True)
        links._renew_tickets(0)  # which graphs made earlier have in a variable
        return begun

    yield start
    monkeypatch.undo()
    links._renew_tickets(0)


def both_ways(by_operations, gpu, graph, **options) -> tuple[list, APSCompressor]:
    """Steps the usual way, then the same by operations: equal results and residuals; returns what was begun."""
    usual, ours = APSCompressor(4, 3, bucket_mb=0.004, **options), APSCompressor(4, 3, bucket_mb=0.004, **options)
    steps = [make_gradients((100, 7, 0, 3000, 1025, 1), hvd.size(), seed=step) for step in range(3)]
    wanted = [reduce(grads, usual, graph, gpu or HOST) for grads in steps]
    begun = by_operations()
    for grads, results in zip(steps, wanted):
        check(reduce(grads, ours, graph, gpu or HOST), results)
    assert WAYS[gpu] in ours.stats()["hierarchy"] and WAYS[gpu] not in usual.stats()["hierarchy"]
    states = [compressor.state_dict()["residuals"] for compressor in (usual, ours)]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
    return begun, ours


@ON
@MODES
@pytest.mark.parametrize("options", [{}, {"error_feedback": True, "rounding": "stochastic"}], ids=["plain", "feedback"])
def test_results_are_the_same(gpu, graph, options, by_operations, monkeypatch):
    if gpu is None:
        monkeypatch.setattr(devices, "gpus", lambda: [])
    begun, compressor = both_ways(by_operations, gpu, graph, **options)
    kinds = {n_parts for n_parts, _ in begun}
    assert kinds == ({1} if hvd.size() == 2 else {1, hvd.size()}), "all-gathers, and all-to-alls among more than two"
    if gpu and not options:
        (exchange,) = compressor._reducers.values()
        assert 0 < exchange.kernels.pinned.n_bytes < 1000, "only exponents go through the host"


@pytest.mark.skipif(hvd.size() != 4, reason="two hosts with two ranks each")
@ON
@MODES
def test_two_levels(gpu, graph, by_operations, monkeypatch):
    if gpu is None:
        monkeypatch.setattr(devices, "gpus", lambda: [])
    monkeypatch.setenv("HOROVOD_APS_HOST", "aabb"[hvd.rank()])
    _, compressor = both_ways(by_operations, gpu, graph, error_feedback=True)
    assert compressor.stats()["hierarchy"] == f"two-level by messages (2 hosts with 2 ranks), {WAYS[gpu]}"


@pytest.mark.skipif(hvd.size() != 4, reason="two hosts with two ranks each")
@MODES
def test_two_levels_on_gpus_need_no_shared_memory(graph, monkeypatch):
    """Nor do tensors of the host over the same link. Oracle: the same gradients where there is some."""
    monkeypatch.setenv("HOROVOD_APS_HOST", "aabb"[hvd.rank()])
    grads = make_gradients((100, 7, 0, 33), hvd.size())
    wanted = reduce(grads, APSCompressor(4, 3), False, HOST)

    def refuse():
        raise OSError(0, "none here")

    monkeypatch.setattr(hosts.HostMemory, "make", refuse)
    compressor = APSCompressor(4, 3)
    for device in (GPU, HOST, GPU):
        check(reduce(grads, compressor, graph, device), wanted)
    by_messages = "two-level by messages (2 hosts with 2 ranks)"
    assert {reducer.way.split(",")[0] for reducer in compressor._reducers.values()} == {by_messages}
    alone = APSCompressor(4, 3)
    reduce(grads, alone, False, HOST)
    assert "flat (rank 0 cannot share its host's memory" in alone.stats()["hierarchy"]


def test_ranks_agree_on_the_way(by_operations, monkeypatch):
    """One rank whose Horovod has no NCCL: all take the way that all can take."""
    begun = by_operations()
    compressor = APSCompressor(4, 3)
    with monkeypatch.context() as without:
        without.setattr(operations, "may_carry", lambda: hvd.rank() > 0)
        links._renew_tickets(0)
        reduce(make_gradients((9,), hvd.size()), compressor, True)
    assert not begun and "through pinned host memory" in compressor.stats()["hierarchy"]


def test_an_operation_that_fails_is_an_error(by_operations, monkeypatch):
    """Horovod refuses an operation that ranks mean differently, on all of them; the next one is sound."""
    by_operations()
    pack = operations.HorovodOperations.pack

    def other(self, parts, ready):
        packed = pack(self, parts, ready)
        return tf.cast(packed, tf.int32) if hvd.rank() == 0 else packed

    grads = make_gradients((9,), hvd.size())
    with monkeypatch.context() as broken:
        broken.setattr(operations.HorovodOperations, "pack", other)
        with pytest.raises(HorovodInternalError, match="[Mm]ismatched"):
            reduce(grads, APSCompressor(4, 3), False)
    reduce(grads, APSCompressor(4, 3), False)


def test_operations_run_in_one_thread_which_no_pool_lends(by_operations):
    """TensorFlow has one inter-op thread here, which the exchange of a graph holds while it waits for operations."""
    assert tf.config.threading.get_inter_op_parallelism_threads() == 1
    by_operations()
    threads = set()
    run = operations._Operation.run
    try:
        operations._Operation.run = lambda self: (threads.add(threading.current_thread().name), run(self))
        reduce(make_gradients((3000,), hvd.size()), APSCompressor(4, 3), True)
    finally:
        operations._Operation.run = run
    assert threads == {"horovod_aps operations"}


def test_a_horovod_for_cpus_has_no_such_operations_on_gpus():
    """Where there are none, TensorFlow would quietly copy to the CPU."""
    assert all("CPU" in operations.device_types(op) for op in operations.OPS)
    assert operations.has_nccl() == all("GPU" in operations.device_types(op) for op in operations.OPS)


def test_exchanges_by_operations_take_turns(by_operations):
    """Eager operations of a kind have one name, so exchanges of several compressors must not run at the same time."""
    ticket = np.array([2, 0, 2, 2, 2, 0])
    call = engine.Call(APSCompressor(4, 3), ("x",), "x", hvd.Sum, 1.0, 0)
    assert engine._turn(call, ticket) is call.compressor._lock
    ticket[engine.links.COLLECTIVE] = 2
    assert engine._turn(call, ticket) is engine._lock
