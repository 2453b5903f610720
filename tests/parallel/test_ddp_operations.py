"""Packed bytes by operations of a process group, as on GPUs with NCCL; here on tensors of the CPU, by Gloo.

The same code, with the device as a parameter. Oracle: the same work over the usual transports, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_common import assert_replicas_equal, loss_of, make_model, start, wrap

from horovod_aps.ddp import APSState, PackedState
from horovod_aps.frontends import group
from horovod_aps.frontends.group_operations import GroupOperations
from horovod_aps.fsdp import PackedReduceScatter

start()
RANK, SIZE = dist.get_rank(), dist.get_world_size()
WAY = "by torch.distributed's operations"


@pytest.fixture(autouse=True)
def together():
    """Ranks begin tests together, so that a failure is one of the test that it is found in."""
    dist.barrier()
    yield


@pytest.fixture
def by_operations(monkeypatch):
    """From here on messages travel by operations, which are noted."""
    begun = []

    def begin_with():
        begin = GroupOperations._begin

        def noted(self, operation, *arguments):
            begun.append((operation.__name__, len(arguments[0])))
            return begin(self, operation, *arguments)

        monkeypatch.setattr(GroupOperations, "_begin", noted)
        monkeypatch.setattr(group, "are_wanted", lambda group, device: True)
        return begun

    return begin_with


def train(state: PackedState, n_steps: int = 6) -> list[torch.Tensor]:
    """Parameters after some steps, whose buckets travel while the user's own operations do."""
    model = wrap(make_model(), state, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for number in range(n_steps):
        optimizer.zero_grad()
        loss_of(model, number, RANK).backward()
        total = torch.full((1,), float(RANK))
        dist.all_reduce(total)
        assert total.item() == SIZE * (SIZE - 1) / 2
        optimizer.step()
    assert_replicas_equal(model)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{}, {"rounding": "stochastic", "error_feedback": True}, {"accumulate": "kahan", "stats": True}],
    ids=["plain", "feedback", "kahan"],
)
def test_training_by_operations_is_the_same(options, by_operations):
    options |= {"bucket_mb": 0.003}  # several at once, so that ranks come to them in different orders
    expected = train(APSState(4, 3, **options))
    begun, state = by_operations(), APSState(4, 3, **options)
    found = train(state)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    assert WAY in state.stats()["hierarchy"]
    kinds = {name for name, _ in begun}
    assert kinds == ({"_allgather_base"} if SIZE == 2 else {"_allgather_base", "alltoall_base"})
    orders = [None] * SIZE
    dist.all_gather_object(orders, [name for name, _ in begun])
    assert all(order == orders[0] for order in orders)


def test_fsdp_by_operations_is_the_same(by_operations):
    def reduce() -> tuple[torch.Tensor, str]:
        output, whole = torch.empty(1025), torch.randn(SIZE * 1025, generator=torch.Generator().manual_seed(RANK))
        comm = PackedReduceScatter("mx-e4m3", block=300)
        comm(output, whole, dist.group.WORLD, dist.ReduceOp.AVG)
        return output, comm.stats()["hierarchy"]

    expected, _ = reduce()
    begun = by_operations()
    found, way = reduce()
    assert torch.equal(found, expected) and WAY in way and begun


def test_one_rank_without_operations(monkeypatch):
    """All take the way that all can take."""
    monkeypatch.setattr(group, "are_wanted", lambda group, device: RANK > 0)
    state = APSState(4, 3)
    train(state, 2)
    assert WAY not in state.stats()["hierarchy"]


def test_options_of_ranks_by_operations_must_be_the_same(by_operations):
    by_operations()
    with pytest.raises(ValueError, match="option m is 3 on rank 0 and 2 on rank 1"):
        train(APSState(4, 3 if RANK == 0 else 2), 2)
