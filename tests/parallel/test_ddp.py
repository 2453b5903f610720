"""`model.register_comm_hook(APSState(...), aps_hook)`: DDP's meaning of everything around it is kept.

Oracles: the NumPy simulation of all ranks, bit for bit; else plain DDP of the same model, within the error of a format
that is as good as float32, in which a wrong factor or a gradient of another step cannot hide.
"""

from __future__ import annotations

import copy
import io
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from all_formats import every_format, options_for
from ddp_common import (
    assert_close,
    assert_replicas_equal,
    batch,
    gradients,
    gradients_of_all,
    loss_of,
    make_model,
    start,
    step,
    wrap,
)
from exchange_oracle import Emulation, assert_same_bits, expected
from reference import Format
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join

from horovod_aps.ddp import APSState, PackedState, aps_hook
from horovod_aps.options import Options

start()
RANK, SIZE = dist.get_rank(), dist.get_world_size()
FINE = (8, 23)  # what float32 has
ERROR = 1e-6  # of that, and of sums in another order


@pytest.fixture(autouse=True)
def together():
    """Ranks begin tests together, so that a failure is one of the test that it is found in."""
    dist.barrier()
    yield


@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_every_format_equals_emulation(fmt):
    module, options = make_model(), options_for(fmt, seed=3)
    model, emulation = wrap(module, PackedState(fmt, **options)), Emulation(SIZE, Options(format=fmt, **options))
    for number in range(3):
        grads = gradients_of_all(module, number, SIZE)
        wanted = emulation.step([dict(reversed(one.items())) for one in grads])
        actual = step(model, number)
        for name, values in wanted.items():
            assert_same_bits(actual[name].numpy(), values, f"step {number}, {name}")


def test_results_equal_the_simulation_bit_for_bit():
    overrides = {"2.weight": (5, 10), "4.*": "float32"}
    module = make_model()
    state = APSState(4, 3, overrides=overrides)
    model = wrap(module, state)
    formats = {name: Format(4, 3) for name, _ in module.named_parameters()}
    formats |= {"2.weight": Format(5, 10), "4.weight": None, "4.bias": None}
    for number in range(5):
        grads = gradients_of_all(module, number, SIZE)
        # the last layers come first, in the first step by our guess, later as DDP has seen them come
        ordered = [dict(reversed(one.items())) for one in grads]
        wanted = expected(ordered, {name: formats[name] for name in ordered[0]}, factor=1 / SIZE)
        actual = step(model, number)
        for name, values in wanted.items():
            assert_same_bits(actual[name].numpy(), values, f"step {number}, {name}")
    assert set(state.stats()["layers"]) == set(formats)
    assert 0.25 < state.stats()["ratio"] < 0.6
    exchange = next(iter(state._reducers.values()))
    assert exchange.n_talks <= 2  # of the first buckets, and of those that DDP has made from what it saw


def test_replicas_are_identical_after_200_steps():
    module = make_model(seed=RANK)
    state = APSState(4, 3)
    model = wrap(module, state)  # broadcasts
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    first = float(sum(loss_of(module, 500, rank).detach() for rank in range(SIZE)))
    for number in range(200):
        optimizer.zero_grad()
        loss_of(model, number, RANK).backward()
        optimizer.step()
    assert_replicas_equal(model)
    assert float(sum(loss_of(module, 500, rank).detach() for rank in range(SIZE))) < 0.5 * first
    assert state.state_dict()["step_number"] == 200


class Branches(nn.Module):
    """Layers that no rank, one rank, or all ranks use, and one whose use changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.odd, self.even = nn.Linear(20, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.unused, self.last = nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        x = self.first(x).tanh()
        x = (self.odd if (number + RANK) % 2 else self.even)(x).tanh()
        return self.last(x)


def test_unused_parameters():
    ours = wrap(Branches(), APSState(*FINE), find_unused_parameters=True)
    plain = wrap(Branches(), find_unused_parameters=True)
    for number in range(4):
        for model in (ours, plain):
            model(batch(number, RANK), number).square().mean().backward()
        assert "unused.weight" not in gradients(ours)
        assert_close(gradients(ours), gradients(plain), ERROR)
        ours.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize(
    "keywords",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 25},
        {"find_unused_parameters": True, "static_graph": True},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
def test_keywords_of_ddp(keywords):
    ours, plain = wrap(make_model(), APSState(*FINE), **keywords), wrap(make_model(), **keywords)
    for number in range(4):
        assert_close(step(ours, number), step(plain, number), ERROR)


def test_no_sync_accumulates():
    ours, plain = wrap(make_model(), APSState(*FINE)), wrap(make_model())
    for number in range(3):
        for model in (ours, plain):
            with model.no_sync():
                loss_of(model, 10 + number, RANK).backward()
                loss_of(model, 20 + number, RANK).backward()
        assert_close(step(ours, number), step(plain, number), ERROR)


def test_join_with_uneven_inputs():
    models = [wrap(make_model(), APSState(*FINE)), wrap(make_model())]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Join([model]):
            for number in range(3 + 2 * RANK):
                optimizer.zero_grad()
                loss_of(model, number, RANK).backward()
                optimizer.step()
    assert_replicas_equal(models[0])
    ours, plain = (dict(model.module.named_parameters()) for model in models)
    assert_close(ours, plain, 1e-5)


def test_a_loss_scaler_skips_the_step_on_all_ranks():
    model = wrap(make_model(), APSState(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for number in range(4):
        before = copy.deepcopy(model.module.state_dict())
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, number, RANK)
        if number == 2 and RANK == SIZE - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(before[name], value) for name, value in model.module.state_dict().items())
        assert same == (number == 2), number
    assert scaler.get_scale() == 512.0
    assert_replicas_equal(model)


class Mixed(nn.Module):
    """Parameters of all kinds that the exchange takes."""

    def __init__(self) -> None:
        super().__init__()
        for i, dtype in enumerate((torch.float32, torch.float64, torch.float16, torch.bfloat16)):
            for n in (1, 7, 1025):
                values = torch.randn(n, generator=torch.Generator().manual_seed(100 * i + n))
                self.register_parameter(f"p{i}_{n}", nn.Parameter(values.to(dtype)))

    def forward(self, scale: float) -> torch.Tensor:
        return sum((p.double() * scale).sin().sum() for p in self.parameters())


def test_mixed_dtypes():
    module = Mixed()
    model = wrap(module, APSState(4, 3), bucket_cap_mb=25)
    named = dict(module.named_parameters())
    for number in range(3):
        per_rank = [torch.autograd.grad(module(1.0 + rank + number), list(named.values())) for rank in range(SIZE)]
        exact = [torch.stack([grads[i].double() for grads in per_rank]).mean(0) for i in range(len(named))]
        model(1.0 + RANK + number).backward()
        for (name, p), mean in zip(named.items(), exact):
            assert p.grad.dtype == p.dtype
            assert (
                float((p.grad.double() - mean).norm())
                <= 0.15 * sum(float(g[list(named).index(name)].double().norm()) for g in per_rank) / SIZE + 1e-9
            ), name
        assert_gradients_equal(module)
        model.zero_grad()


def assert_gradients_equal(module: nn.Module) -> None:
    raw = torch.cat([p.grad.reshape(-1).view(torch.uint8) for p in module.parameters()])
    rows = [torch.empty_like(raw) for _ in range(SIZE)]
    dist.all_gather(rows, raw)
    assert all(torch.equal(row, raw) for row in rows)


def test_process_groups_of_some_ranks():
    """All but rank 0 in one group; the group is the model's, without a word to the state."""
    members = list(range(1, SIZE))
    alone, others = dist.new_group([0]), dist.new_group(members)
    group = alone if RANK == 0 else others
    for state in (APSState(*FINE), APSState(*FINE, process_group=group)):
        module = make_model()
        model = wrap(module, state, process_group=group)
        for number in range(3):
            per_rank = gradients_of_all(module, number, SIZE)
            mine = [per_rank[0]] if RANK == 0 else per_rank[1:]
            wanted = {name: torch.from_numpy(np.mean([one[name] for one in mine], axis=0)) for name in mine[0]}
            assert_close(step(model, number), wanted, ERROR)
    if RANK == 0:
        with pytest.raises(ValueError, match='hierarchy="two-level" cannot be: there is only one rank'):
            step(wrap(make_model(), APSState(*FINE, hierarchy="two-level"), process_group=alone), 0)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_compiled_modules(order):
    torch._dynamo.reset()
    overrides = {"4.*": "float32"}
    state = APSState(*FINE, overrides=overrides)
    if order == "inside":
        ours = wrap(torch.compile(make_model(), backend="aot_eager"), state, bucket_cap_mb=25)
        call = ours
    else:
        ours = wrap(make_model(), state, bucket_cap_mb=25)
        call = torch.compile(ours, backend="aot_eager")
    plain = wrap(make_model())
    for number in range(3):
        loss_of(call, number, RANK).backward()
        found = {name.replace("_orig_mod.", ""): value for name, value in gradients(ours).items()}
        ours.zero_grad()
        assert_close(found, step(plain, number), ERROR)
    assert set(state.stats()["layers"]) == set(found)


def test_different_options_are_an_error_on_all_ranks_and_there_is_a_next_step():
    state = APSState(4, 3 if RANK == 0 else 2)
    model = wrap(make_model(), state)
    with pytest.raises(ValueError, match=r"option m is 3 on rank 0 and 2 on rank"):
        step(model, 0)
    model.zero_grad()
    state.set_format(*FINE)
    plain = wrap(make_model())
    for number in range(3):
        assert_close(step(model, number), step(plain, number), ERROR)
    state.set_format(m=10 if RANK else 9)  # in the middle of a run
    with pytest.raises(ValueError, match="option m is 9 on rank 0 and 10"):
        step(model, 3)
    model.zero_grad()
    state.set_format(*FINE)
    assert_close(step(model, 4), step(plain, 4), ERROR)


def test_failure_of_one_rank_is_an_error_on_all(monkeypatch):
    """Rank 1 runs out of memory in the middle of a step, and its program goes on: nobody waits for it for ever."""
    state = APSState(4, 3)
    model = wrap(make_model(), state)
    step(model, 0)

    def fail(*_, **__):
        raise MemoryError("encode has failed")

    if RANK == 1:
        monkeypatch.setattr(next(iter(state._reducers.values())).kernels, "encode", fail)
    for number in (1, 2):  # now, and later
        with pytest.raises((MemoryError, RuntimeError), match="encode has failed"):
            step(model, number)
        monkeypatch.undo()
    ours, plain = wrap(make_model(), APSState(*FINE)), wrap(make_model())
    assert_close(step(ours, 0), step(plain, 0), ERROR)


def test_different_models_are_an_error_on_all_ranks():
    """DDP compares shapes itself; it does not know the options of each layer."""
    state = APSState(4, 3, overrides={"2.weight" if RANK else "2.bias": "float32"})
    with pytest.raises(ValueError, match="option overrides is"):
        step(wrap(make_model(), state), 0)


def test_state_is_saved_and_goes_on_bit_for_bit():
    options = {"error_feedback": True, "rounding": "stochastic", "warmup_steps": 2, "seed": 7}
    whole, half = make_model(), make_model()
    state = APSState(3, 0, **options)
    model = wrap(whole, state)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(8):
        if number == 5:
            saved = io.BytesIO()
            torch.save({"state": state, "dict": state.state_dict(), "model": whole.state_dict()}, saved)
        optimizer.zero_grad()
        loss_of(model, number, RANK).backward()
        optimizer.step()
    for kind in ("state", "dict"):
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        half.load_state_dict(loaded["model"])
        again = loaded["state"] if kind == "state" else APSState(3, 0, **options)
        if kind == "dict":
            again.load_state_dict(loaded["dict"])
        resumed = wrap(copy.deepcopy(half), again)
        optimizer = torch.optim.SGD(resumed.parameters(), 0.1)
        for number in range(5, 8):
            optimizer.zero_grad()
            loss_of(resumed, number, RANK).backward()
            optimizer.step()
        for name, value in whole.state_dict().items():
            assert_same_bits(resumed.module.state_dict()[name].numpy(), value.numpy(), name)


def test_auto_chooses_formats_by_name():
    state = APSState(4, 3, overrides="auto", auto_steps=3, auto_error=0.05)
    model = wrap(make_model(), state)
    for number in range(3):
        assert state.chosen_overrides() is None
        step(model, number)
    chosen = state.chosen_overrides()
    assert set(chosen) == set(dict(make_model().named_parameters()))
    step(model, 3)
    assert state.stats()["ratio"] < 1


def test_sparse_gradients_are_left_to_pytorch():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.table = nn.Embedding(10, 20, sparse=True)
            self.net = make_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x + self.table(torch.tensor([RANK, 3])).sum(0))

    ours, plain = wrap(Table(), APSState(*FINE)), wrap(Table())
    for number in range(3):
        found, wanted = step(ours, number), step(plain, number)
        assert found["table.weight"].is_sparse
        assert_close(
            {name: grad.to_dense() for name, grad in found.items()},
            {name: grad.to_dense() for name, grad in wanted.items()},
            ERROR,
        )


def test_complex_gradients():
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.turn = nn.Parameter(torch.randn(20, dtype=torch.complex64))
            self.net = make_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net((x * self.turn).abs())

    module = Turn()
    ours = wrap(module, APSState(*FINE))
    for number in range(3):
        named = dict(module.named_parameters())
        per_rank = [torch.autograd.grad(loss_of(module, number, rank), list(named.values())) for rank in range(SIZE)]
        exact = dict(zip(named, (torch.stack(grads).mean(0) for grads in zip(*per_rank))))
        found = step(ours, number)
        for grads in (found, exact):
            grads["turn"] = torch.view_as_real(grads["turn"])
        assert_close(found, exact, ERROR)


def test_two_models_take_turns():
    first, second = wrap(make_model(1), APSState(*FINE)), wrap(make_model(2), APSState(4, 3))
    plain = wrap(make_model(1))
    for number in range(3):
        wanted = step(plain, number)
        loss = loss_of(first, number, RANK) + loss_of(second, number, RANK)  # in one backward
        loss.backward()
        assert_close(gradients(first), wanted, ERROR)
        first.zero_grad()
        second.zero_grad()
        assert_close(step(first, number), wanted, ERROR)


def test_one_state_is_for_one_model():
    state = APSState(4, 3)
    first, second = wrap(make_model(1), state), wrap(make_model(2), state)
    with pytest.raises(ValueError, match="2 models were registered with this state"):
        loss_of(first, 0, RANK).backward()
    del second


def test_names_may_be_given():
    module = make_model()
    named = [(f"net.{name}", p) for name, p in module.named_parameters()]
    state = APSState(4, 3, named_parameters=named, overrides={"net.0.*": "float32"})
    step(wrap(module, state), 0)
    assert set(state.stats()["layers"]) == {name for name, _ in named}


def test_hooks_of_pytorch_around_ours():
    ours, plain = wrap(make_model()), wrap(make_model())
    ours.register_comm_hook(APSState(5, 10), fp16_compress_wrapper(aps_hook))
    for number in range(3):
        assert_close(step(ours, number), step(plain, number), 0.01)


def test_buckets_travel_while_backward_goes_on():
    """The first layer's gradient is computed last, and waits until the others have been averaged."""
    seen: list[torch.futures.Future] = []
    arrived = threading.Event()

    def hook(state, bucket):
        future = aps_hook(state, bucket)
        if bucket.index() == 0:
            future.add_done_callback(lambda _: arrived.set())
        seen.append(future)
        return future

    module = make_model()
    model = wrap(module)
    model.register_comm_hook(APSState(*FINE, bucket_mb=0.004), hook)
    for number in range(2):
        step(model, number)
    arrived.clear()
    handle = module[0].register_full_backward_pre_hook(
        lambda *_: None if arrived.wait(30) else pytest.fail("no overlap")
    )
    step(model, 2)
    handle.remove()
    assert arrived.is_set() and all(future.done() for future in seen)


def test_a_hook_checks_its_state():
    model = wrap(make_model())
    model.register_comm_hook(None, aps_hook)
    with pytest.raises(TypeError, match="state must be an APSState"):
        loss_of(model, 0, RANK).backward()
    with pytest.raises(ValueError, match='transport must be "packed"'):
        APSState(4, 3, transport="allreduce")
    with pytest.raises(ValueError, match="e must be in 1..8"):
        APSState(9, 3)
