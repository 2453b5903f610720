"""`hvd.DistributedOptimizer(..., compression=APSCompressor(...))`: Horovod's meaning of everything around it is kept.

Oracles: the NumPy simulation of all ranks where the order of layers is known, else the exact average of all
ranks' gradients, which every rank can compute, within the error of the format.
"""

from __future__ import annotations

import copy
import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from all_formats import every_format, options_for
from exchange_oracle import Emulation, assert_same_bits, expected
from horovod.torch import mpi_ops
from reference import Format
from torch_common import (
    assert_replicas_equal,
    gradients_of,
    loss_of,
    make_model,
    mean_of,
    named_gradients,
    relative_error,
    to_numpy,
)

from horovod_aps.options import Options
from horovod_aps.torch import APSCompressor, PackedCompressor

hvd.init()
ERROR = 0.005  # of (5, 10), in which a factor that is wrong cannot hide; layers of 2 elements may cancel


def wrap(model: torch.nn.Module, compressor: APSCompressor, lr: float = 0.1, **keywords) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr),
        compression=compressor,
        named_parameters=model.named_parameters(),
        **keywords,
    )


def reduced(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> dict[str, np.ndarray]:
    """The gradients after synchronize(), with the optimizer left ready for the next step."""
    loss_of(model, step, hvd.rank()).backward()
    optimizer.synchronize()
    grads = dict(named_gradients(model))
    optimizer.zero_grad()
    return grads


@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_training_in_every_format_equals_emulation(fmt):
    """Bit for bit what all ranks in one process get, over steps, with residuals and random bits where they belong."""
    model, options = make_model(), options_for(fmt, seed=3)
    compressor = PackedCompressor(fmt, **options)
    optimizer, emulation = wrap(model, compressor), Emulation(hvd.size(), Options(format=fmt, **options))
    for step in range(3):
        exact = gradients_of(model, lambda rank, step=step: loss_of(model, step, rank))
        loss_of(model, step, hvd.rank()).backward()
        optimizer.synchronize()
        actual = dict(named_gradients(model))
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        plan = next(iter(next(iter(compressor._reducers.values()))._plans.values()))
        names = [spec.name.removeprefix("allreduce.") for spec in plan.specs]
        wanted = emulation.step([{name: rank[name] for name in names} for rank in exact])
        for name in wanted:
            assert_same_bits(actual[name], wanted[name], f"{name}, step {step}")
    assert_replicas_equal(model)


def test_unnamed_collectives_of_the_user_between_backward_and_step():
    """They are numbered per process: were ours started at moments that differ between ranks, these would hang."""
    model = make_model()
    optimizer, other = wrap(model, APSCompressor(4, 3)), APSCompressor(5, 10)
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, step, hvd.rank())
        loss.backward()
        mean = hvd.allreduce(loss.detach())
        everyone = hvd.allgather(torch.tensor([hvd.rank()]))
        optimizer.step()
        hvd.allreduce(mean, compression=other)
        assert everyone.tolist() == list(range(hvd.size()))
    assert_replicas_equal(model)


def test_optimizer_waits_for_a_late_rank_asleep(monkeypatch):
    """Horovod's own wait gives up the core in a loop, and so is not to be entered before there is an answer."""
    model = make_model()
    optimizer = wrap(model, APSCompressor(4, 3))
    wait, entered = mpi_ops.mpi_lib.horovod_torch_wait_and_clear, []

    def watched(handle: int) -> None:
        entered.append(mpi_ops.poll(handle))
        wait(handle)

    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() == 1:
            time.sleep(0.2)
        loss_of(model, step, hvd.rank()).backward()
        with monkeypatch.context() as patch:
            patch.setattr(mpi_ops.mpi_lib, "horovod_torch_wait_and_clear", watched)
            optimizer.step()
    assert entered == [True] * 3
    assert not mpi_ops._handle_map
    assert_replicas_equal(model)


@pytest.mark.parametrize("optimizer_class, n_steps", [(torch.optim.SGD, 200), (torch.optim.Adam, 50)])
def test_optimizer_replicas_are_identical_after_many_steps(optimizer_class, n_steps):
    model = make_model(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer_class(model.parameters(), 0.01),
        named_parameters=model.named_parameters(),
        compression=APSCompressor(e=4, m=3),
    )
    start = copy.deepcopy(model)
    first = hvd.allreduce(loss_of(model, 0, hvd.rank()).detach(), name="loss")
    for step in range(n_steps):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    assert_replicas_equal(model)
    assert all(torch.any(a != b) for a, b in zip(start.parameters(), model.parameters()))
    assert hvd.allreduce(loss_of(model, 0, hvd.rank()).detach(), name="loss") < first


def test_optimizer_gradients_equal_simulation():
    """Bit for bit: hooks fire from the last layer to the first, so rank 0's order of arrival is known from it."""
    model = make_model()
    compressor = APSCompressor(4, 3)
    optimizer = wrap(model, compressor)
    order: list[str] = []
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: order.append(name))
    for step in range(3):
        exact = gradients_of(model, lambda rank, step=step: loss_of(model, step, rank))
        order.clear()
        actual = reduced(model, optimizer, step)
        plan = next(iter(next(iter(compressor._reducers.values()))._plans.values()))
        in_order = [
            {spec.name.removeprefix("allreduce."): rank[spec.name.removeprefix("allreduce.")] for spec in plan.specs}
            for rank in exact
        ]
        assert sorted(in_order[0]) == sorted(order)
        wanted = expected(in_order, Format(4, 3), factor=1 / hvd.size())
        for name in wanted:
            assert_same_bits(actual[name], wanted[name], f"{name}, step {step}")


@pytest.mark.parametrize("op, divisor", [(hvd.Average, hvd.size()), (hvd.Sum, 1)], ids=["average", "sum"])
def test_optimizer_op(op, divisor):
    model = make_model()
    exact = {
        name: x * hvd.size() / divisor
        for name, x in mean_of(gradients_of(model, lambda rank: loss_of(model, 0, rank))).items()
    }
    assert relative_error(reduced(model, wrap(model, APSCompressor(5, 10), op=op)), exact) < ERROR


def test_optimizer_gradient_predivide_factor():
    model = make_model()
    exact = mean_of(gradients_of(model, lambda rank: loss_of(model, 0, rank)))
    optimizer = wrap(model, APSCompressor(5, 10), gradient_predivide_factor=4.0)
    assert relative_error(reduced(model, optimizer), exact) < ERROR


@pytest.mark.parametrize("passes", [2, 3])
def test_optimizer_backward_passes_per_step(passes):
    model = make_model()
    optimizer = wrap(model, APSCompressor(5, 10), backward_passes_per_step=passes)
    for first in (0, passes):
        exact = mean_of(
            gradients_of(model, lambda rank, first=first: sum(loss_of(model, first + i, rank) for i in range(passes)))
        )
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, first + i, hvd.rank()).backward()
        optimizer.synchronize()
        assert relative_error(named_gradients(model), exact) < ERROR
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("groups", ["1", "2", "lists", "partial list"])
def test_optimizer_groups(groups):
    model = make_model()
    parameters = list(model.parameters())
    value = {"1": 1, "2": 2, "lists": [parameters[:3], parameters[3:]], "partial list": [parameters[1:3]]}[groups]
    optimizer = wrap(model, APSCompressor(5, 10), groups=value)
    for step in range(3):
        exact = mean_of(gradients_of(model, lambda rank, step=step: loss_of(model, step, rank)))
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.synchronize()
        assert relative_error(named_gradients(model), exact) < ERROR
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_replicas_equal(model)


class Branches(torch.nn.Module):
    """Uses one of its branches, or all; the others get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = torch.nn.Linear(20, 2)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(20, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.trunk(x) + self.branches[which](x)


@pytest.mark.parametrize("bucket_mb", [16.0, 0.0001])
@pytest.mark.parametrize("differ", [True, False])
def test_optimizer_parameters_without_gradient(differ, bucket_mb):
    """Each rank uses another branch, or all use the same: a missing gradient counts as zeros.

    With small buckets some are complete in backward on one rank and not on the other, while both meet in a
    collective of the user's before step.
    """
    model = Branches()
    optimizer = wrap(model, APSCompressor(5, 10, bucket_mb=bucket_mb))
    for step in range(4):
        optimizer.zero_grad()
        which = (step + hvd.rank()) % 3 if differ else step % 3
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
        model(x, which).square().mean().backward()
        own = {
            name: to_numpy(p.grad).copy() if p.grad is not None else np.zeros(p.shape, np.float32)
            for name, p in model.named_parameters()
        }
        exact = {
            name: to_numpy(hvd.allreduce(torch.from_numpy(g.copy()), name=f"exact.{name}")) for name, g in own.items()
        }
        optimizer.synchronize()
        assert relative_error(named_gradients(model), exact) < ERROR
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("groups", [None, 2])
def test_optimizer_hook_order_may_differ_between_ranks(groups):
    """Even and odd ranks compute the same loss in opposite orders, so that gradients arrive in opposite orders."""
    model = Branches()
    optimizer = wrap(model, APSCompressor(5, 10, bucket_mb=0.0001), groups=groups)
    arrived: list[int] = []
    for i, branch in enumerate(model.branches):
        branch.weight.register_hook(lambda grad, i=i: arrived.append(i))
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        modules = [model.trunk, *model.branches][:: 1 if hvd.rank() % 2 else -1]  # autograd goes the other way
        arrived.clear()
        sum(module(x).square().mean() for module in modules).backward()
        optimizer.step()
    orders = hvd.allgather(torch.tensor([arrived]), name="orders").tolist()
    assert orders[0] != orders[1], "this test wants different orders"
    assert_replicas_equal(model)


def embedding(sparse: bool) -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Embedding(30, 8, sparse=sparse), torch.nn.Linear(8, 1))


@pytest.mark.parametrize("as_dense", [True, False])
def test_optimizer_sparse_gradients(as_dense):
    """Oracle: the same model with dense gradients, in fp32. Left as they are, sparse gradients go by Horovod's own
    all-gather, in fp32; as dense ones they are compressed like any other."""
    results = []
    for sparse, compression in ((True, APSCompressor(5, 10)), (False, hvd.Compression.none)):
        model = embedding(sparse)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0),
            named_parameters=model.named_parameters(),
            compression=compression,
            sparse_as_dense=as_dense and sparse,
        )
        index = torch.arange(10) + 5 * hvd.rank()
        model(index % 30).square().sum().backward()
        optimizer.synchronize()
        grad = model[0].weight.grad
        assert grad.is_sparse == sparse
        results.append({"w": grad.to_dense().numpy().copy()})
        with optimizer.skip_synchronize():
            optimizer.step()
        assert_replicas_equal(model)
    assert relative_error(*results) < (ERROR if as_dense else 1e-6)


def test_optimizer_clipping_between_synchronize_and_step():
    model = make_model()
    optimizer = wrap(model, APSCompressor(4, 3))
    for step in range(5):
        optimizer.zero_grad()
        (100 * loss_of(model, step, hvd.rank())).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
        assert norm <= 1.0001
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("shared", [True, False])
def test_two_optimizers_in_one_program(shared):
    """As in a GAN: two models with parameters of the same shapes, stepped in turn, with one compressor or two."""
    compressors = [APSCompressor(4, 3)] * 2 if shared else [APSCompressor(4, 3), APSCompressor(5, 2)]
    models = [make_model(seed) for seed in (0, 1)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            compression=compressor,
            named_parameters=[(f"net{i}.{k}", p) for k, p in model.named_parameters()],
        )
        for i, (model, compressor) in enumerate(zip(models, compressors))
    ]
    for step in range(5):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
    for step in range(3):  # both backward passes before either step
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models:
            loss_of(model, step, hvd.rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        assert_replicas_equal(model)


def test_grad_scaler_skips_the_step_on_every_rank():
    """Overflow on one rank only: the scaler must see it everywhere, skip, halve its scale, and go on."""
    model = make_model()
    optimizer = wrap(model, APSCompressor(4, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(6):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, hvd.rank())).backward()
        optimizer.synchronize()
        if step in (2, 3):  # as if this rank's backward had overflowed
            optimizer.zero_grad()
            loss = loss_of(model, step, hvd.rank())
            scaler.scale(loss * (float("inf") if hvd.rank() == hvd.size() - 1 else 1.0)).backward()
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        changed = any(torch.any(before[k] != v) for k, v in model.state_dict().items())
        assert changed == (step not in (2, 3)), step
    assert scaler.get_scale() == 256.0
    assert_replicas_equal(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_optimizer_dtypes(dtype):
    model = make_model().to(dtype)
    optimizer = wrap(model, APSCompressor(4, 3))
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step * 10 + hvd.rank())).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        assert all(p.grad.dtype == dtype and torch.all(torch.isfinite(p.grad)) for p in model.parameters())
    assert_replicas_equal(model)


def test_optimizer_channels_last():
    """Oracle: the same net in the ordinary layout. Horovod asks for contiguous gradients only of its own types."""
    grads = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3)).to(memory_format=memory_format)
        optimizer = wrap(model, APSCompressor(4, 3))
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(hvd.rank()))
        for _ in range(2):
            optimizer.zero_grad()
            model(x.to(memory_format=memory_format)).square().mean().backward()
            optimizer.step()
        grads.append(named_gradients(model))
        assert_replicas_equal(model)
    for name in grads[0]:
        np.testing.assert_allclose(grads[0][name], grads[1][name], rtol=0.15, atol=0.02 * np.abs(grads[0][name]).max())


def test_optimizer_without_names_and_with_one_element_parameters():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compression=APSCompressor(4, 3))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 1), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
    assert_replicas_equal(model)
    assert model.bias.item() == pytest.approx(-0.3, rel=1e-6)


def test_optimizer_refuses_adasum():
    if hvd.size() not in (2, 4, 8):
        return  # Horovod itself refuses other numbers of ranks
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = wrap(model, APSCompressor(4, 3), op=hvd.Adasum)
    with pytest.raises(ValueError, match="op must be Average or Sum, got Adasum"):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def test_optimizer_with_different_formats_raises_on_every_rank_and_the_process_goes_on():
    model = make_model()
    fmt = (5, 2) if hvd.rank() == 1 else (4, 3)
    optimizer = wrap(model, APSCompressor(*fmt))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="option e is 4 on rank 0 and 5 on rank 1"):
        loss_of(model, 0, hvd.rank()).backward()
        optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    model = make_model()
    optimizer = wrap(model, APSCompressor(4, 3))
    loss_of(model, 0, hvd.rank()).backward()
    optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize(
    "options",
    [
        {"error_feedback": True},
        {"rounding": "stochastic"},
        {"accumulate": "kahan"},
        {"bucket_mb": 0.001},
        {"min_elements": 50},
        {"specials": False},
        {"warmup_steps": 3},
        {"overrides": {"*.bias": "float32"}},
    ],
    ids=str,
)
def test_optimizer_options_keep_replicas_identical(options):
    model = make_model()
    optimizer = wrap(model, APSCompressor(4, 3, **options))
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
    assert_replicas_equal(model)


@pytest.mark.parametrize("options", [{"rounding": "stochastic", "seed": 3}, {"error_feedback": True}], ids=str)
def test_checkpointed_run_equals_uninterrupted_run(options):
    """Residuals and the schedule's position go through state_dict; oracle: the run that was not interrupted."""

    def train(model, optimizer, steps) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()

    whole, first = make_model(), make_model()
    train(whole, wrap(whole, APSCompressor(3, 1, **options)), range(8))
    compressor = APSCompressor(3, 1, **options)
    train(first, wrap(first, compressor), range(4))
    resumed = make_model(seed=9)
    resumed.load_state_dict(first.state_dict())
    again = APSCompressor(3, 1, **options)
    again.load_state_dict(compressor.state_dict())
    train(resumed, wrap(resumed, again), range(4, 8))
    for a, b in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(a, b)


def test_compiled_steps_equal_plain_ones():
    """A whole step under `torch.compile`, which meets our code, and an all-reduce by itself. Oracle: without it."""
    models = [make_model(), make_model()]
    for model, is_compiled in zip(models, (False, True)):
        optimizer = wrap(model, APSCompressor(4, 3))

        def step(number: int, model=model, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number, hvd.rank())
            loss.backward()
            optimizer.step()
            return loss

        call = torch.compile(step, backend="eager") if is_compiled else step
        for number in range(3):
            call(number)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models)))
    compressor = APSCompressor(4, 3)
    double = torch.compile(
        lambda x: hvd.allreduce(2 * x, op=hvd.Sum, name="compiled", compression=compressor) + 1, backend="eager"
    )
    assert [double(torch.ones(3)).tolist() for _ in range(2)] == [[2 * hvd.size() + 1] * 3] * 2
    torch._dynamo.reset()


def test_same_run_twice_gives_the_same_bits():
    results = []
    for _ in range(2):
        model = make_model()
        optimizer = wrap(model, APSCompressor(4, 3, rounding="stochastic", seed=5))
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_nothing_is_left_behind():
    """50 steps: no handle stays in Horovod's table, and the compressor's own tables do not grow."""
    model = torch.nn.Linear(30, 3)
    compressor = APSCompressor(4, 3)
    optimizer = wrap(model, compressor, groups=1)
    for step in range(50):
        optimizer.zero_grad()
        model(torch.ones(2, 30) * step).sum().backward()
        optimizer.step()
    assert not mpi_ops._handle_map
    exchange = next(iter(compressor._reducers.values()))
    assert len(exchange._plans) == 1 and exchange.is_idle and not compressor._batches
