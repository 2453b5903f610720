"""The state of a compressor with several reducers, for process sets or call sites. Oracle: what was put in."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.feedback import Residuals, layer_of
from horovod_aps.engine.layer import Layer
from horovod_aps.frontends.compressor import ByBits
from horovod_aps.frontends.reducer import ReducerKey
from horovod_aps.frontends.tensors import with_tensors
from horovod_aps.kernels import CpuKernels
from horovod_aps.kernels.segments import SEGMENT
from horovod_aps.transports.local import LocalTransport

KEYS = [ReducerKey(0, "one", (0,)), ReducerKey(0, "other", (0,)), ReducerKey(1, "one", (0,))]


def compressor(state=None) -> ByBits:
    one = ByBits(3, 0, error_feedback=True)
    if state is not None:
        one.load_state_dict(state)
    return one


def exchange_of(owner: ByBits, key: ReducerKey) -> Exchange:
    return owner._keep(key, Exchange(CpuKernels(), LocalTransport.world(1)[0], owner._options))


def put(exchange: Exchange, **residuals: Any) -> None:
    """As if it had kept these."""
    exchange._residuals.load({name: np.float32(values) for name, values in residuals.items()})


def trained(values: list[float]) -> ByBits:
    """As if each reducer had reduced a tensor of the same name, so many times."""
    one = compressor()
    for number, (key, value) in enumerate(zip(KEYS, values)):
        exchange = exchange_of(one, key)
        exchange.step_number = 10 + number
        put(exchange, w=[value] * 3)
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
    put(exchange_of(one, KEYS[0]), w=[1.0] * 3)
    state = one.state_dict()
    assert "parts" not in state
    again = compressor(state)
    assert reduced(exchange_of(again, KEYS[1]), "w") == [1.0] * 3
    assert list(again.state_dict()["residuals"]) == ["w"]


def reduced(exchange: Exchange, name: str, value: float = 0.0) -> list[float]:
    """A gradient with what was kept of the last ones; if the format can hold that, nothing is kept of it."""
    gradient = np.full(3, value, np.float32)
    exchange.submit(Layer(name, (3,), 0, gradient.ctypes.data, gradient.ctypes.data, 1.0))
    exchange.wait()
    return gradient.tolist()


def test_resumed_elsewhere_nothing_is_saved_twice():
    """On another device in every run; saved before its first step, or after it."""
    one = compressor()
    for key, name, value in zip(KEYS, ("a", "b", "a"), (1.0, 2.0, 4.0)):
        exchange = exchange_of(one, key)
        exchange.step_number = 10 + int(value)
        put(exchange, **{name: [value] * 3})
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
    for key, name, size in zip(KEYS, ("w[0:2]", "w[2:3]", "other"), (2, 1, 2)):
        put(exchange_of(one, key), **{name: [1.0] * size})
    again = compressor(one.state_dict())
    exchange = exchange_of(again, ReducerKey(0, "new", (0,)))
    assert exchange._residuals.lender is not None
    assert set(exchange._residuals.lender({"w"})) == {"w[0:2]", "w[2:3]"}
    assert exchange._residuals.lender({"w"}) == {}
    assert list(again.state_dict()["residuals"]) == ["other"]


@pytest.mark.parametrize("other", ["emb[0:3]", "emb[:]", "emb[0:3][:]"])
def test_layer_whose_name_looks_like_a_piece(other):
    """It is never taken for a part of "emb", with the one before the other, nor when both are resumed elsewhere."""
    one = compressor()
    exchange = exchange_of(one, KEYS[0])
    for name, value in ((other, 5.0), ("emb", 3.0)):
        assert reduced(exchange, name, value) == [4.0] * 3  # powers of two are all that the format has
    assert [values.tolist() for values in exchange.residuals.values()] == [[1.0] * 3, [-1.0] * 3]
    resumed = exchange_of(compressor(one.state_dict()), KEYS[1])
    for again in (exchange, resumed):
        assert reduced(again, "emb") == [-1.0] * 3
        assert reduced(again, other) == [1.0] * 3
        again._residuals.drop(SimpleNamespace(name=other, folded=True))
        assert list(again.residuals) == ["emb"]


STATES = {
    "whole": ({"w": [1.0, 2.0, 4.0]}, [1.0, 2.0, 4.0]),
    "parts": ({"w[0:1]": [1.0], "w[2:3]": [4.0]}, [1.0, 0.0, 4.0]),
    "both": ({"w": [1.0, 2.0, 4.0], "w[1:2]": [8.0]}, [0.0] * 3),
    "both, all of it": ({"w[0:3]": [8.0] * 3, "w": [1.0, 2.0, 4.0]}, [0.0] * 3),
    "parts of two cuts": ({"w[0:2]": [1.0, 2.0], "w[1:3]": [8.0, 8.0]}, [0.0] * 3),
    "of another size": ({"w": [1.0] * 4}, [0.0] * 3),
    "parts of another size": ({"w[0:1]": [1.0], "w[2:6]": [4.0] * 4, "w[1:2]": [7.0] * 5}, [1.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("lent", [False, True], ids=["own", "lent"])
@pytest.mark.parametrize("state, wanted", STATES.values(), ids=STATES)
def test_residuals_of_a_state_are_used_once_in_the_flat_exchange(state, wanted, lent):
    """Whole or in parts; where there are two of an element nobody can say which is stale: none is used."""
    one = compressor()
    put(exchange_of(one, KEYS[0]), x=[0.0] * 3)
    state = one.state_dict() | {"residuals": {name: np.float32(values) for name, values in state.items()}}
    again = compressor(state)
    exchange = exchange_of(again, KEYS[1]) if lent else exchange_of(compressor(), KEYS[0])
    if not lent:
        exchange.load_state(state)
    assert reduced(exchange, "w") == wanted
    assert list(exchange.residuals) == ["w"] and reduced(exchange, "w") == [0.0] * 3
    if lent:
        assert list(again.state_dict()["residuals"]) == ["w"]


def segments(values: np.ndarray, *spans: tuple[int, int]) -> np.ndarray:
    """A table of parts of a gradient."""
    table = np.zeros(len(spans), SEGMENT)
    table["exp_bits"], table["man_bits"], table["factor"] = 4, 3, 1
    table["first"], table["n"] = [first for first, _ in spans], [last - first for first, last in spans]
    table["data"] = values.ctypes.data + 4 * table["first"]
    return table


def folded_parts(residuals: Residuals, layers: list[Layer], *spans: tuple[int, int]) -> list[list[float]]:
    """What this rank has, of the first of these layers, after gradients of zeros were added."""
    zeros = np.zeros(3, np.float32)
    kept = residuals.fold_parts(layers, segments(zeros, *spans), np.zeros(len(spans), np.int64))
    return [x.tolist() for x in kept]


@pytest.mark.parametrize("lent", [False, True], ids=["own", "lent"])
@pytest.mark.parametrize("state, wanted", STATES.values(), ids=STATES)
def test_residuals_of_a_state_are_used_once_in_two_levels(state, wanted, lent):
    """As in the flat exchange; layers of the bucket that this rank has no part of are used up as well."""
    state = {name: np.float32(values) for name, values in state.items()}
    state |= {name.replace("w", "v", 1): values for name, values in state.items()}
    asked = []

    def lender(names: set[str]) -> dict[str, np.ndarray]:
        asked.append(names)
        return {key: state.pop(key) for key in list(state) if layer_of(key) in names}

    residuals = Residuals(CpuKernels())
    residuals.load({} if lent else state, lender if lent else None)
    layers = [Layer(name, (3,), 0, 0, 0, 1.0) for name in "wv"]
    assert folded_parts(residuals, layers, (0, 2)) == [wanted[:2]]
    assert list(residuals.arrays) == ["w[0:2]"]
    assert folded_parts(residuals, layers, (0, 2)) == [wanted[:2]]  # nothing was sent, so it is there still
    assert folded_parts(residuals, layers, (1, 2), (2, 3)) == [wanted[1:2], [0.0]]
    assert asked == ([{"w", "v"}] if lent else [])
    residuals.drop(layers[0])
    assert not residuals.arrays
    assert folded_parts(residuals, layers, (0, 3)) == [[0.0] * 3] and len(asked) == lent


def test_gradient_that_was_added_and_not_sent_is_not_added_again():
    """In the flat exchange, whose guess was wrong; then the bucket goes in two levels, which add it themselves."""
    residuals, gradient = Residuals(CpuKernels()), np.ones(3, np.float32)
    layer = Layer("w", (3,), 0, gradient.ctypes.data, gradient.ctypes.data, 1.0)
    [whole] = residuals.fold([layer], segments(gradient, (0, 3)), np.zeros(1, np.int64))
    assert whole.tolist() == [1.0] * 3
    assert folded_parts(residuals, [layer], (0, 2)) == [[0.0] * 2]


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
        put(exchange_of(one, key), **{name: [1.0] * 100_000})
    file = io.BytesIO()
    torch.save(with_tensors(one.state_dict()), file)
    assert len(file.getvalue()) < 3 * 400_000 + 20_000
    file.seek(0)
    again = compressor(torch.load(file, weights_only=True))
    for key, name in zip(KEYS, "abc"):
        assert list(exchange_of(again, key).residuals) == [name]
