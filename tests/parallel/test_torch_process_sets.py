"""Process sets: some ranks reduce among themselves. Oracle: the NumPy simulation of those ranks.

Last in its launch: ranks start different numbers of operations here, and Horovod numbers the unnamed ones of
a program, so that those of later tests would no longer match, with or without compression.
"""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from exchange_oracle import assert_same_bits, expected, make_gradients
from reference import Format
from torch_common import assert_replicas_equal, loss_of, make_model, to_numpy, to_torch

from horovod_aps.torch import APSCompressor

hvd.init()


@pytest.mark.parametrize("grouped_op", [False, True])
def test_allreduce_process_sets(grouped_op):
    """All but the last rank reduce among themselves; the last one alone. Oracle: simulation of those ranks."""
    rest = hvd.add_process_set(list(range(hvd.size() - 1)))
    last = hvd.add_process_set([hvd.size() - 1])
    compressor, in_two_levels = APSCompressor(4, 3), APSCompressor(4, 3, hierarchy="two-level")
    grads = make_gradients((100, 3), hvd.size())
    mine = [to_torch(x) for x in grads[hvd.rank()].values()]
    chosen, members = (rest, grads[:-1]) if hvd.rank() < hvd.size() - 1 else (last, grads[-1:])
    if grouped_op:
        results = hvd.grouped_allreduce(mine, name="set", compression=compressor, process_set=chosen)
    else:
        results = [
            hvd.allreduce(x, name=f"set.{i}", compression=compressor, process_set=chosen) for i, x in enumerate(mine)
        ]
    if len(members) == 1:
        for result, x in zip(results, mine):  # nobody to average with
            torch.testing.assert_close(result, x, rtol=0.07, atol=0)
        with pytest.raises(ValueError, match="there is only one rank"):
            hvd.allreduce(mine[0], name="two", compression=in_two_levels, process_set=chosen)
    else:
        for i, result in enumerate(results):
            part = members if grouped_op else [{f"layer{i}": rank[f"layer{i}"]} for rank in members]
            wanted = expected(part, Format(4, 3), factor=1 / len(members))[f"layer{i}"]
            assert_same_bits(to_numpy(result), wanted)
    everyone = expected(grads, Format(4, 3), factor=1 / hvd.size())
    results = hvd.grouped_allreduce(mine, name="everyone", compression=compressor)
    for name, result in zip(everyone, results):
        assert_same_bits(to_numpy(result), everyone[name])
    hvd.remove_process_set(rest)
    hvd.remove_process_set(last)


def test_allreduce_process_set_that_replaces_a_removed_one():
    """The next set may get the number of the removed one, and has other ranks. Oracle: exact sums."""
    compressor = APSCompressor(5, 10)
    for first in range(2):
        ranks = list(range(first, hvd.size() - 1 + first))
        process_set = hvd.add_process_set(ranks)
        if process_set.included():
            result = hvd.allreduce(
                torch.full((9,), 1.0 + hvd.rank()),
                name="replaced",
                compression=compressor,
                op=hvd.Sum,
                process_set=process_set,
            )
            assert torch.all(result == sum(rank + 1 for rank in ranks))
        hvd.remove_process_set(process_set)


def test_optimizer_process_set():
    """The first ranks train together, the last one by itself without Horovod's help."""
    process_set = hvd.add_process_set(list(range(max(1, hvd.size() - 1))))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        named_parameters=model.named_parameters(),
        compression=APSCompressor(4, 3),
        process_set=process_set,
    )
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    if process_set.included():
        assert_replicas_equal(model, process_set)
    hvd.barrier()
    hvd.remove_process_set(process_set)
