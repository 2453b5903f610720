"""Ranks that do things in different orders, or hold different tensors for a while, as stock Horovod lets them.

Each of these hung, raised or corrupted memory in an earlier version. Oracles: exact sums of small integers, which every
format here holds, and the bits that all ranks got.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from functools import partial

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch_common import assert_replicas_equal, batch, loss_of, make_model

from horovod_aps.torch import APSCompressor

hvd.init()
COMPRESSIONS = {
    "aps": APSCompressor,
    "carrier": partial(APSCompressor, transport="allreduce"),
    "fp16": lambda e, m: hvd.Compression.fp16,
}
ALL = pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)


def wrap(model: torch.nn.Module, compression, prefix: str) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        compression=compression,
        named_parameters=[(f"{prefix}.{name}", p) for name, p in model.named_parameters()],
    )


def is_odd() -> bool:
    return hvd.rank() % 2 == 1


@pytest.mark.parametrize("differs", ["backward", "step"])
@pytest.mark.parametrize("shared", [True, False], ids=["one compressor", "two"])
@ALL
def test_two_models_in_another_order_on_each_rank(compression, shared, differs):
    """From the very first step: nothing may block in a hook, and results may be taken in any order."""
    compressors = [compression(4, 3)] * 2 if shared else [compression(4, 3), compression(4, 3)]
    models = [make_model(seed) for seed in (0, 1)]
    optimizers = [wrap(model, c, f"{differs}{shared}{i}") for i, (model, c) in enumerate(zip(models, compressors))]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models[:: -1 if is_odd() and differs == "backward" else 1]:
            loss_of(model, step, hvd.rank()).backward()
        for optimizer in optimizers[:: -1 if is_odd() and differs == "step" else 1]:
            optimizer.step()
    for model in models:
        assert_replicas_equal(model)


@ALL
def test_rank_without_backward_meets_the_others_in_a_collective_of_the_user(compression):
    """One rank has no gradient at all before the user's own all-reduce, in the first step and later."""
    model = make_model()
    optimizer = wrap(model, compression(4, 3), "late")
    for step in range(3):
        optimizer.zero_grad()
        late = hvd.rank() == step % hvd.size()
        if not late:
            loss_of(model, step, hvd.rank()).backward()
        hvd.allreduce(torch.ones(1), name="user's")
        if late:
            loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("compression", [COMPRESSIONS["aps"], COMPRESSIONS["fp16"]], ids=["aps", "fp16"])
def test_backward_and_step_of_two_models_interleaved_differently(compression):
    """One rank takes a model's result before it has begun the other's backward; the others begin both first."""
    models = [make_model(seed) for seed in (0, 1)]
    optimizers = [wrap(model, compression(4, 3), f"mixed{i}") for i, model in enumerate(models)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if is_odd():
            for model, optimizer in zip(models[::-1], optimizers[::-1]):
                loss_of(model, step, hvd.rank()).backward()
                optimizer.step()
        else:
            for model in models:
                loss_of(model, step, hvd.rank()).backward()
            for optimizer in optimizers:
                optimizer.step()
    for model in models:
        assert_replicas_equal(model)


@pytest.mark.parametrize("compression", [COMPRESSIONS["aps"], COMPRESSIONS["fp16"]], ids=["aps", "fp16"])
def test_metric_between_backward_and_step_while_a_rank_lacks_a_gradient(compression):
    """The metric is reduced at once; the missing gradient counts as zeros at the step."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(20, 2), "b": torch.nn.Linear(20, 2)})
    for p in model.parameters():
        torch.nn.init.ones_(p)
    compressor = compression(4, 3)
    optimizer = wrap(model, compressor, "metric")
    for step in range(4):
        optimizer.zero_grad()
        x = batch(step, hvd.rank())
        lacks = hvd.rank() == (step // 2) % hvd.size()
        (model["a"](x) + (0 if lacks else model["b"](x))).square().mean().backward()
        metric = hvd.allreduce(
            torch.full((3,), float(hvd.rank())), op=hvd.Sum, name="the metric", compression=compressor
        )
        assert torch.all(metric == sum(range(hvd.size())))
        optimizer.step()
    assert_replicas_equal(model)


def test_tensors_that_never_come_are_an_error_on_all_ranks():
    """A tensor that only one rank submits: the others notice in the next exchange at the latest."""
    compressor = APSCompressor(4, 3)
    names = ["here", "there"] if hvd.rank() == 0 else ["here"]
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(5)) for name in names})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), compression=compressor, named_parameters=list(model.items())
    )
    with pytest.raises(ValueError, match="tensor 'there' was submitted on rank 0 but not on rank 1"):
        for _ in range(2):
            optimizer.zero_grad()
            sum(p.sum() for p in model.values()).backward()
            optimizer.step()
    result = hvd.allreduce(torch.ones(5), name="after", compression=compressor, op=hvd.Sum)
    assert torch.all(result == hvd.size())


def test_process_set_whose_id_is_used_again():
    """Other members under the same id, fewer of them, the first ones again. Oracle: exact sums."""
    compressor = APSCompressor(5, 10)
    everyone = list(range(hvd.size()))
    for ranks in (everyone[:2], everyone[-2:], everyone, everyone[:2], everyone[-2:], everyone[:2]):
        process_set = hvd.add_process_set(ranks) if ranks != everyone else hvd.global_process_set
        if process_set.included():
            for step in range(3):
                result = hvd.allreduce(
                    torch.full((9,), 1.0 + hvd.rank() + step),
                    name="again",
                    op=hvd.Sum,
                    compression=compressor,
                    process_set=process_set,
                )
                assert torch.all(result == sum(1 + rank + step for rank in ranks))
        if ranks != everyone:
            hvd.remove_process_set(process_set)
    hvd.allreduce(torch.ones(1), name="all here")


def test_overlapping_process_sets_in_a_cycle():
    """Each rank is in two sets and takes the results of its own first. Needs three ranks."""
    if hvd.size() < 3:
        return
    compressor = APSCompressor(5, 10)
    n = hvd.size()
    sets = [hvd.add_process_set(sorted([i, (i + 1) % n])) for i in range(n)]
    mine = [i for i in range(n) if sets[i].included()]
    for step in range(3):
        models = {i: torch.nn.Parameter(torch.zeros(50)) for i in mine}
        optimizers = {
            i: hvd.DistributedOptimizer(
                torch.optim.SGD([p], 1.0), [(f"p{i}", p)], op=hvd.Sum, compression=compressor, process_set=sets[i]
            )
            for i, p in models.items()
        }
        for i in mine:
            (models[i].sum() * (1 + hvd.rank() + step)).backward()
        for i in sorted(mine, key=lambda i: (i - hvd.rank()) % n):
            optimizers[i].step()
        for i, p in models.items():
            assert torch.all(p == -sum(1 + rank + step for rank in sets[i].ranks)), (step, i)
    hvd.barrier()
    for process_set in sets:
        hvd.remove_process_set(process_set)


def test_state_loaded_between_backward_and_step():
    """Buckets are on their way: they must not write into residuals that are gone. Oracle: foreign memory."""
    compressor = APSCompressor(3, 0, error_feedback=True, bucket_mb=0.1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100, bias=False) for _ in range(12)))
    optimizer = wrap(model, compressor, "midflight")
    foreign: list[np.ndarray] = []
    state = compressor.state_dict()
    for step in range(10):
        optimizer.zero_grad()
        model(torch.ones(2, 100) * (1 + hvd.rank())).square().mean().backward()
        compressor.load_state_dict(state)
        gc.collect()
        foreign = [np.full(10_000, 7.0, np.float32) for _ in range(24)]  # where the residuals were
        optimizer.step()
        assert all(np.all(array == 7.0) for array in foreign), step
        assert compressor.state_dict()["step_number"] == state["step_number"], "the loaded state counts from now on"
        if step == 4:
            optimizer.zero_grad()
            model(torch.ones(2, 100)).square().mean().backward()
            optimizer.step()
            state = compressor.state_dict()
    with pytest.raises(ValueError, match=r"call state_dict\(\) after optimizer.step\(\)"):
        optimizer.zero_grad()
        model(torch.ones(2, 100)).square().mean().backward()
        compressor.state_dict()
    optimizer.step()
    assert_replicas_equal(model)


def test_changing_factors_and_shrinking_batches_keep_no_memory():
    """A factor that differs in every step belongs to no plan; a batch that has shrunk is talked about once."""
    compressor = APSCompressor(4, 3)
    x = torch.ones(250_000)
    tracemalloc.start()
    for step in range(30):
        result = hvd.allreduce(x, name="factor", op=hvd.Sum, compression=compressor, prescale_factor=1.0 + step / 32)
        torch.testing.assert_close(result, x * hvd.size() * (1.0 + step / 32), rtol=0.07, atol=0)
        if step == 5:
            early = tracemalloc.get_traced_memory()[0]
    exchange = next(iter(compressor._reducers.values()))
    assert len(exchange._plans) == 1
    assert exchange._pool.n_bytes < 2 * x.numel() * 4
    assert tracemalloc.get_traced_memory()[0] < early + x.numel()
    tracemalloc.stop()
    compressor = APSCompressor(4, 3, bucket_mb=0.001)
    parameters = [torch.nn.Parameter(torch.zeros(200)) for _ in range(6)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, 1.0), [(f"s{i}", p) for i, p in enumerate(parameters)], compression=compressor
    )
    for step in range(8):
        optimizer.zero_grad()
        if step == 3:  # frozen for good
            for p in parameters[:3]:
                p.requires_grad_(False)
                optimizer._requires_update.discard(p)
        sum(p.sum() for p in parameters).backward()
        optimizer.step()
        exchange = next(iter(compressor._reducers.values()))
        if step == 4:
            talks = exchange.n_talks
    assert exchange.n_talks == talks <= 4
    assert torch.all(parameters[5] == -8) and torch.all(parameters[0] == -3)


def test_gradients_are_freed_without_the_garbage_collector():
    """Groups too: it counts objects, not gigabytes, and may not come for many steps. Oracle: weak references."""
    compressor = APSCompressor(4, 3)
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(1000)
        xs = [torch.ones(1000) for _ in range(3)]
        ys = [hvd.allreduce(x, name="freed", compression=compressor)]
        ys += hvd.grouped_allreduce(xs, name="freed.group", compression=compressor)
        held = [weakref.ref(tensor) for tensor in (x, *xs, *ys)]
        del x, xs, ys
        assert [ref() for ref in held] == [None] * 8
    finally:
        gc.enable()


def test_dropped_compressors_give_their_connections_back():
    """As in a search over formats: each has a communicator or sockets of its own while it lives."""
    from horovod_aps.transports import mpi, sockets

    def n_links() -> int:
        return sum(len(module.farewells) for module in (mpi, sockets))

    gc.collect()
    before = n_links()
    for i in range(12):
        hvd.allreduce(torch.ones(10), name=f"drop.{i}", compression=APSCompressor(4, 3))
        hvd.allreduce(torch.ones(1), name="in step")
    assert n_links() <= before + 5  # those that some rank, or the thread that closes them, has not left yet


def test_more_compressors_than_a_communicator_number_allows_are_told_apart():
    compressors = [APSCompressor(5, 10) for _ in range(12)]
    for i in range(2):
        for k, compressor in enumerate(compressors):
            result = hvd.allreduce(
                torch.full((4,), float(k + hvd.rank())), name="same", op=hvd.Sum, compression=compressor
            )
            assert torch.all(result == sum(k + rank for rank in range(hvd.size()))), (i, k)


def test_late_tensor_of_one_rank_while_others_need_no_second_ticket():
    """The others are through with it, and wait elsewhere, before the late rank's Horovod asks for its ticket.

    The late rank must not be idle when it hands the tensor in: a large one is on its way still.
    """
    compressor = APSCompressor(4, 3, bucket_mb=0.01)
    sizes = {"first": 3, "large": 4_000_000, "late": 7}
    parameters = {name: torch.nn.Parameter(torch.zeros(n)) for name, n in sizes.items()}
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD([parameters[name] for name in names], 1.0),
            [(f"ticket.{name}", parameters[name]) for name in names],
            op=hvd.Sum,
            compression=compressor,
        )
        for names in (["first"], ["large", "late"])
    ]
    n_steps = 6
    for _ in range(n_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for name, p in parameters.items():
            if name != "late" or hvd.rank() > 0:
                p.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        hvd.allreduce(torch.ones(1), name="elsewhere")
    for name, p in parameters.items():
        assert torch.all(p == -n_steps * (hvd.size() - (name == "late"))), name


def test_async_tensor_that_another_rank_begins_after_a_barrier():
    """Rank 0 begins two and takes one, the others begin the second only after they have met in a barrier."""
    compressor = APSCompressor(5, 10)
    parameters = {name: torch.nn.Parameter(torch.zeros(30)) for name in "ca"}
    optimizers = {
        name: hvd.DistributedOptimizer(
            torch.optim.SGD([p], 1.0), [(f"barrier.{name}", p)], op=hvd.Sum, compression=compressor
        )
        for name, p in parameters.items()
    }
    for _ in range(3):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        if hvd.rank() == 0:
            for p in parameters.values():
                p.sum().backward()
            optimizers["c"].step()
            hvd.barrier()
            optimizers["a"].step()
        else:
            parameters["c"].sum().backward()
            optimizers["c"].step()
            hvd.barrier()
            parameters["a"].sum().backward()
            optimizers["a"].step()
    for p in parameters.values():
        assert torch.all(p == -3 * hvd.size())
