"""The state of a compressor with several reducers, for process sets or call sites. Oracle: what was put in."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import torch

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.frontends.compressor import ByBits
from horovod_aps.frontends.reducer import ReducerKey
from horovod_aps.frontends.tensors import with_tensors
from horovod_aps.kernels import CpuKernels
from horovod_aps.transports.local import LocalTransport

KEYS = [ReducerKey(0, "one", (0,)), ReducerKey(0, "other", (0,)), ReducerKey(1, "one", (0,))]


def compressor(state=None) -> ByBits:
    one = ByBits(3, 0, error_feedback=True)
    if state is not None:
        one.load_state_dict(state)
    return one


def exchange_of(owner: ByBits, key: ReducerKey) -> Exchange:
    return owner._keep(key, Exchange(CpuKernels(), LocalTransport.world(1)[0], owner._options))


def trained(values: list[float]) -> ByBits:
    """As if each reducer had reduced a tensor of the same name, so many times."""
    one = compressor()
    for number, (key, value) in enumerate(zip(KEYS, values)):
        exchange = exchange_of(one, key)
        exchange.step_number = 10 + number
        exchange.residuals["w"] = np.full(3, value, np.float32)
    return one


def kept(owner: ByBits) -> list[tuple[int, list[float]]]:
    return [
        (owner._reducers[key].step_number, owner._reducers[key].residuals["w"].tolist())
        for key in KEYS
        if key in owner._reducers
    ]


def test_every_reducer_gets_its_own_part_back():
    state = trained([1.0, 2.0, 3.0]).state_dict()
    again = compressor(state)
    for key in reversed(KEYS):
        exchange_of(again, key)
    assert kept(again) == [(10, [1.0] * 3), (11, [2.0] * 3), (12, [3.0] * 3)]
    live = trained([4.0, 5.0, 6.0])
    live.load_state_dict(state)
    assert kept(live) == kept(again)


def test_second_resume_has_what_the_first_one_trained():
    again = compressor(trained([1.0, 2.0, 3.0]).state_dict())
    exchange = exchange_of(again, KEYS[0])
    exchange.residuals["w"][:] = 7.0
    exchange.step_number = 20  # the others have not been used again when this is saved
    last = compressor(again.state_dict())
    for key in KEYS:
        exchange_of(last, key)
    assert kept(last) == [(20, [7.0] * 3), (11, [2.0] * 3), (12, [3.0] * 3)]


def test_state_without_parts_is_for_all():
    """As files of one reducer have it."""
    one = compressor()
    exchange_of(one, KEYS[0]).residuals["w"] = np.ones(3, np.float32)
    state = one.state_dict()
    assert "parts" not in state
    again = compressor(state)
    assert reduced(exchange_of(again, KEYS[1]), "w") == [1.0] * 3
    assert list(again.state_dict()["residuals"]) == ["w"]


def reduced(exchange: Exchange, name: str) -> list[float]:
    """A gradient of zeros with what was kept of the last ones; the format can hold that, so nothing is kept of it."""
    gradient = np.zeros(3, np.float32)
    exchange.submit(Layer(name, (3,), 0, gradient.ctypes.data, gradient.ctypes.data, 1.0))
    exchange.wait()
    return gradient.tolist()


def test_resumed_elsewhere_nothing_is_saved_twice():
    """On another device in every run; saved before its first step, or after it."""
    one = compressor()
    for key, name, value in zip(KEYS, ("a", "b", "a"), (1.0, 2.0, 4.0)):
        exchange = exchange_of(one, key)
        exchange.step_number = 10 + int(value)
        exchange.residuals[name] = np.full(3, value, np.float32)
    state = one.state_dict()
    for run, uses in enumerate([False, True, False, True]):
        again = compressor(state)
        first, second = (exchange_of(again, ReducerKey(number, f"device {run}", (0,))) for number in range(2))
        if run <= 1:
            assert (first.step_number, second.step_number) == (12, 14)
        if uses:
            kept = [reduced(first, "a"), reduced(first, "b"), reduced(second, "a")]
            assert kept == ([[1.0] * 3, [2.0] * 3, [4.0] * 3] if run == 1 else [[0.0] * 3] * 3)
        state = again.state_dict()
        assert len(state["residuals"]) == 3
        assert len(state["parts"]) <= 5


def test_residuals_in_pieces_are_found_again():
    """As two levels keep them."""
    one = compressor()
    for key, name in zip(KEYS, ("w[0:2]", "w[2:3]", "other")):
        exchange_of(one, key).residuals[name] = np.ones(2, np.float32)
    again = compressor(one.state_dict())
    exchange = exchange_of(again, ReducerKey(0, "new", (0,)))
    assert exchange._residuals.lender is not None
    assert set(exchange._residuals.lender({"w"})) == {"w[0:2]", "w[2:3]"}
    assert exchange._residuals.lender({"w"}) == {}
    assert list(again.state_dict()["residuals"]) == ["other"]


def test_layer_whose_name_looks_like_a_piece():
    name = "emb[0:3]"
    one = compressor()
    exchange_of(one, KEYS[0]).residuals[name] = np.ones(3, np.float32)
    exchange = exchange_of(compressor(one.state_dict()), KEYS[1])
    assert reduced(exchange, name) == [1.0] * 3
    exchange._residuals.drop(SimpleNamespace(name=name, folded=True))
    assert not exchange.residuals


def test_state_that_is_loaded_in_mid_step_outlives_a_reset():
    """As an elastic job does it: a step has failed, the last commit is loaded, then the world is made anew."""
    state = trained([1.0]).state_dict()
    live = trained([8.0])
    exchange = live._reducers[KEYS[0]]
    exchange.self_driven = True
    gradient = np.zeros(3, np.float32)
    exchange.submit(Layer("w", (3,), 0, gradient.ctypes.data, gradient.ctypes.data, 1.0))
    exchange.step_number = 99
    live.load_state_dict(state)
    live._retire_all()
    again = exchange_of(live, KEYS[0])
    assert again.step_number == 10
    assert reduced(again, "w") == [1.0] * 3


def test_residuals_are_saved_once_and_loaded_without_asking():
    one = compressor()
    for key, name in zip(KEYS, "abc"):
        exchange_of(one, key).residuals[name] = np.ones(100_000, np.float32)
    file = io.BytesIO()
    torch.save(with_tensors(one.state_dict()), file)
    assert len(file.getvalue()) < 3 * 400_000 + 20_000
    file.seek(0)
    again = compressor(torch.load(file, weights_only=True))
    for key, name in zip(KEYS, "abc"):
        assert list(exchange_of(again, key).residuals) == [name]
