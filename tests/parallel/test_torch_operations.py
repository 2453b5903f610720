"""Packed bytes by Horovod's own all-to-all and all-gather, as on GPUs with NCCL; here on tensors of the CPU.

The same code, with the device as a parameter. Oracle: the same work over the usual transports, bit for bit. On the
stand-in for a GPU, messages lie in memory that only its streams may touch.
"""

from __future__ import annotations

import ctypes

import cuda_standin
import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from test_torch_gpu import FRAMEWORK, gpu, train  # noqa: F401 (a fixture)

from horovod_aps.torch import APSCompressor, operations
from horovod_aps.transports import collective

hvd.init()
alone = pytest.mark.skipif(hvd.size() == 1, reason="one rank sends nothing")
WAY = "by Horovod's operations"


@pytest.fixture
def by_operations(monkeypatch):
    """From here on messages travel by Horovod's operations; their names are noted."""
    names = []

    def start():
        begin = operations.HorovodOperations._begin

        def noted(self, operation, *arguments):
            names.append((operation.__name__, arguments[-1]))
            return begin(self, operation, *arguments)

        monkeypatch.setattr(operations.HorovodOperations, "_begin", noted)
        monkeypatch.setattr(operations, "are_wanted", lambda device: True)
        return names

    return start


@alone
@pytest.mark.parametrize(
    "options",
    [{}, {"rounding": "stochastic", "error_feedback": True}, {"accumulate": "kahan", "stats": True}],
    ids=["plain", "feedback", "kahan"],
)
def test_training_by_operations_is_the_same(options, by_operations):
    expected, _ = train(4, False, **options)
    names = by_operations()
    found, compressor = train(4, False, **options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    assert WAY in compressor.stats()["hierarchy"]
    kinds = {kind for kind, _ in names}
    assert kinds == ({"allgather_async"} if hvd.size() == 2 else {"allgather_async", "alltoall_async"})
    assert len(set(names)) == len(names), "a name is used twice"
    # what a rank sends, all ranks send, under the same names
    assert all(hvd.allgather_object(sorted(names))[0] == one for one in hvd.allgather_object(sorted(names)))


@alone
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_groups_and_dtypes(dtype, by_operations):
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(hvd.rank() + n)).to(dtype) for n in (1, 1003, 70_001)]
    expected = hvd.grouped_allreduce(xs, name="g", compression=APSCompressor(5, 2, bucket_mb=0.1))
    names = by_operations()
    found = hvd.grouped_allreduce(xs, name="h", compression=APSCompressor(5, 2, bucket_mb=0.1))
    assert names and all(torch.equal(a, b) for a, b in zip(expected, found))


@alone
def test_operations_begin_only_while_somebody_waits(by_operations):
    """So that the user's unnamed operations have the same numbers, however late a rank is in backward."""
    names = by_operations()
    compressor = APSCompressor(4, 3, bucket_mb=0.004)
    xs = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    for step in range(4):
        model = torch.nn.ParameterList([torch.nn.Parameter(x.clone()) for x in xs])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters(), compression=compressor
        )
        before = len(names)
        sum(p.square().sum() for p in model).backward()
        assert len(names) == before
        mean = hvd.allreduce(torch.tensor([float(hvd.rank())]))  # without a name
        assert mean.item() == (hvd.size() - 1) / 2
        optimizer.step()
        assert len(names) > before
        assert hvd.allreduce(torch.tensor([step])).item() == step


@alone
def test_ranks_may_wait_in_different_orders(by_operations, monkeypatch):
    by_operations()
    monkeypatch.setattr(collective, "PATIENCE_SECONDS", 0.01)
    one, two = APSCompressor(4, 3), APSCompressor(4, 3)
    x = torch.full((1000,), 1.0 + hvd.rank())
    for _ in range(3):
        handles = {}
        for name, compressor in (("one", one), ("two", two)):
            wired, context = compressor.compress(x)
            handles[name] = (compressor, context, hvd.allreduce_async(wired, name=name))
        for name in ("one", "two") if hvd.rank() % 2 else ("two", "one"):
            compressor, context, handle = handles[name]
            result = compressor.decompress(hvd.synchronize(handle), context)
            assert torch.equal(result, torch.full((1000,), (1 + hvd.size()) / 2))


@alone
def test_ranks_agree_on_the_way(by_operations, monkeypatch):
    """One rank whose Horovod has no NCCL: all take the way that all can take."""
    by_operations()
    monkeypatch.setattr(operations, "are_wanted", lambda device: hvd.rank() > 0)
    compressor = APSCompressor(4, 3)
    x = hvd.allreduce(torch.ones(10), name="agree", compression=compressor)
    assert torch.equal(x, torch.ones(10)) and WAY not in compressor.stats()["hierarchy"]


@alone
def test_an_operation_that_fails_is_an_error(by_operations, monkeypatch):
    """Horovod refuses an operation that ranks mean differently, on all of them."""
    by_operations()
    pack = operations.HorovodOperations.pack

    def other(self, parts):
        packed = pack(self, parts)
        return packed.to(torch.int32) if hvd.rank() == 0 else packed

    monkeypatch.setattr(operations.HorovodOperations, "pack", other)
    with pytest.raises(HorovodInternalError, match="[Mm]ismatched"):
        hvd.allreduce(torch.ones(10), name="fails", compression=APSCompressor(4, 3))


# ---- on the stand-in for a GPU ----------------------------------------------------------------------------


class _Queued:
    """Begins when the stand-in's stream has come so far, as Horovod waits for an event of the current stream."""

    def __init__(self, begin):
        self._begin, self._event, self._operation = begin, cuda_standin.Event(), None
        self._event.record(cuda_standin._StreamHandle(cuda_standin._current.streams[-1]))

    def done(self):
        if self._operation is None and self._event.done:
            self._operation = self._begin()
        return self._operation is not None and self._operation.done()

    def put(self, places):
        self._operation.put(places)


class StandinOperations(operations.HorovodOperations):
    """Messages in the stand-in's memory, which is read and written in the order of its streams."""

    way = "from device memory by Horovod's NCCL"
    at_work = property(lambda self: self._kernels.at_work)

    def takes(self, array):
        return not hasattr(array, "ctypes")

    def _begin(self, operation, *arguments):
        return _Queued(lambda: super(StandinOperations, self)._begin(operation, *arguments))

    def _queue(self, run):
        cuda_standin.enqueue(cuda_standin._current.streams[-1], run)

    def pack(self, parts):
        packed = torch.full((sum(map(len, parts)),), 0xEE, dtype=torch.uint8)
        at = packed.data_ptr()
        for part in parts:
            self._queue(lambda at=at, part=part: ctypes.memmove(at, part.ptr, len(part)))
            at += len(part)
        return packed

    def unpack(self, received, places):
        for start, array in places:
            piece = received[start : start + len(array)].clone()
            self._queue(lambda piece=piece, array=array: ctypes.memmove(array.ptr, piece.data_ptr(), len(array)))


@alone
@pytest.mark.parametrize("options", [{}, {"error_feedback": True}], ids=["plain", "feedback"])
def test_on_the_stand_in_bytes_stay_on_the_device(options, gpu, by_operations, monkeypatch):  # noqa: F811
    expected, _ = train(4, False, **options)
    names = by_operations()
    monkeypatch.setattr(operations, "HorovodOperations", StandinOperations)
    gpu()
    found, compressor = train(4, True, **options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    assert names and "NCCL" in compressor.stats()["hierarchy"]
    cuda_standin.cuda.ExternalStream(FRAMEWORK).synchronize()
