"""A single rank: the compressor is a no-op that works, unless it is told to have two levels.

Oracle: the same program without Horovod.
"""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops
from torch_common import loss_of, make_model

from horovod_aps.torch import APSCompressor

hvd.init()


def test_there_is_one_rank():
    assert hvd.size() == 1


@pytest.mark.parametrize(
    "options", [{}, {"error_feedback": True}, {"transport": "allreduce"}, {"hierarchy": "flat"}], ids=str
)
def test_training_equals_training_without_horovod(options):
    alone = make_model()
    model = copy.deepcopy(alone)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    compressor = APSCompressor(4, 3, **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), compression=compressor, named_parameters=model.named_parameters()
    )
    for step in range(5):
        for net, opt in ((alone, plain), (model, optimizer)):
            opt.zero_grad()
            loss_of(net, step, 0).backward()
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters()))
    assert compressor.stats()["bytes_sent"] == 0
    compressor.load_state_dict(compressor.state_dict())


def test_allreduce_gives_the_tensor_back():
    x = torch.tensor([1.0, float("nan"), 1e-40, 3.14159])
    for op in (hvd.Average, hvd.Sum):
        result = hvd.allreduce(x, op=op, compression=APSCompressor(4, 3))
        torch.testing.assert_close(result, x, rtol=0, atol=0, equal_nan=True)
        grouped = hvd.grouped_allreduce([x, x], op=op, compression=APSCompressor(4, 3))
        torch.testing.assert_close(grouped[1], x, rtol=0, atol=0, equal_nan=True)


def test_two_levels_of_one_rank_are_refused(monkeypatch):
    """At once, since Horovod's optimizer leaves compressors alone here, or by the first tensor if made before init."""
    with pytest.raises(ValueError, match='hierarchy="two-level" cannot be: there is only one rank'):
        APSCompressor(4, 3, hierarchy="two-level")
    with monkeypatch.context() as before:
        before.setattr(mpi_ops, "is_initialized", lambda: False)
        early = APSCompressor(4, 3, hierarchy="two-level")
    for reduce in (hvd.allreduce, lambda x, compression: hvd.grouped_allreduce([x], compression=compression)):
        with pytest.raises(ValueError, match="there is only one rank"):
            reduce(torch.ones(3), compression=early)
