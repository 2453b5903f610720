"""overrides="auto" chooses per layer the smallest format that is accurate enough, and says so in text to paste back.

Oracle: the reference's rounding of every gradient that was measured, in NumPy.
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import reference
from exchange_oracle import assert_same_bits

from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.formats import FLOAT32, FloatFormat
from horovod_aps.frontends.compressor import ByBits
from horovod_aps.frontends.reducer import ReducerKey
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport

CANDIDATES = ((3, 0), (3, 2), (4, 3), (5, 10), "float32")
Gradients = list[dict[str, np.ndarray]]  # by rank


def make(n_ranks: int, step: int) -> Gradients:
    """Layers that need different formats, some with nothing to measure, and a name that is also a pattern."""

    def one(rank: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng((step, rank))
        wide = random.standard_normal(300) * np.exp2(random.integers(-12, 0, 300))
        return {
            "ternary": random.choice([-1.0, 0.0, 1.0], 300),
            "normal": random.standard_normal(500),
            "wide[0]": wide,
            "wide0": random.choice([-1.0, 1.0], 50),
            "zeros": np.zeros(20),
            "nan": np.full(20, np.nan),
            "sometimes inf": random.standard_normal(400) if step else np.full(400, np.inf),
            "ones here, normal there": random.standard_normal(200) if rank == 1 else np.ones(200),
        }

    return [{name: x.astype(np.float32) for name, x in one(rank).items()} for rank in range(n_ranks)]


def reduce(grads: Gradients, exchanges: list[Exchange]) -> dict[str, np.ndarray]:
    outs = [{name: np.empty_like(x) for name, x in rank.items()} for rank in grads]
    layers = [
        [Layer(name, x.shape, 0, x.ctypes.data, out[name].ctypes.data, 1.0, (x, out[name])) for name, x in rank.items()]
        for rank, out in zip(grads, outs)
    ]
    local_allreduce(layers, exchanges[0].options, exchanges[0].kernels, exchanges)
    return outs[0]


def world(n_ranks: int, **options: Any) -> list[Exchange]:
    opts = Options(4, 3, overrides="auto", **{"auto_steps": 3, "auto_candidates": CANDIDATES, **options})
    return [Exchange(CpuKernels(), transport, opts) for transport in LocalTransport.world(n_ranks)]


def expected_choice(n_ranks: int, n_steps: int, bound: float) -> dict[str, Any]:
    """By the definition: on every rank the squared errors of all finite steps, against the squared norm."""
    limit = bound**2 / (2 if n_ranks > 2 else 1)
    widest: dict[str, int] = {}
    for name in make(1, 0)[0]:
        for rank in range(n_ranks):
            seen = [make(n_ranks, step)[rank][name].astype(np.float64) for step in range(n_steps)]
            seen = [x for x in seen if np.isfinite(x).all()]
            norm = sum(float(x @ x) for x in seen)
            if not norm:
                continue
            for candidate in CANDIDATES:
                if candidate == "float32":
                    break
                fmt = FloatFormat(*candidate)
                exponents = [reference.scan_exponent(x, fmt) for x in seen]
                sent = [
                    reference.true_value(reference.quantize_scaled(x, e, fmt), e, fmt) for x, e in zip(seen, exponents)
                ]
                if sum(float((x - y) @ (x - y)) for x, y in zip(seen, sent)) <= limit * norm:
                    break
            widest[name] = max(widest.get(name, 0), CANDIDATES.index(candidate))
    return {name.replace("[", "[[]"): CANDIDATES[index] for name, index in sorted(widest.items())}


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("bound", [0.3, 0.05, 0.028, 1e-6])
def test_auto_chooses_the_smallest_sufficient_format(n_ranks, bound, caplog):
    exchanges = world(n_ranks, auto_error=bound)
    with caplog.at_level(logging.WARNING, logger="horovod_aps"):
        for step in range(3):
            grads = make(n_ranks, step)
            assert all(exchange.chosen is None for exchange in exchanges)
            results = reduce(grads, exchanges)  # in float32 as long as it measures
            for name in results:
                with np.errstate(invalid="ignore"):
                    exact = sum((rank[name] for rank in grads[1:]), grads[0][name])
                assert_same_bits(results[name], exact, name)
    wanted = expected_choice(n_ranks, 3, bound)
    assert [exchange.chosen for exchange in exchanges] == [wanted] * n_ranks
    assert "zeros" not in wanted and "nan" not in wanted  # nobody knows what they need: they stay at (4, 3)
    if bound == 0.05:
        assert wanted["ternary"] == (3, 0) and wanted["ones here, normal there"] != (3, 0)

    # The table on rank 0 is the choice as text, and a run that gets it pasted sends the same.
    (record,) = caplog.records
    text = record.getMessage()
    pasted = eval(text[text.rindex("overrides=") + len("overrides=") :])
    assert pasted == wanted
    given = [
        Exchange(CpuKernels(), transport, Options(4, 3, overrides=pasted))
        for transport in LocalTransport.world(n_ranks)
    ]
    grads = make(n_ranks, 9)
    chosen, fixed = reduce(grads, exchanges), reduce(grads, given)
    for name in chosen:
        assert_same_bits(chosen[name], fixed[name], name)


def test_auto_keeps_its_bound_when_sums_are_rounded_again():
    """More than two ranks round twice; the error of what arrives must still be under the bound."""
    for n_ranks in (2, 3, 4, 8):
        exchanges = world(n_ranks, auto_error=0.028, auto_steps=1)
        for step in range(3):
            grads = [
                {"normal": np.random.default_rng((step, rank)).standard_normal(20_000).astype(np.float32)}
                for rank in range(n_ranks)
            ]
            result = reduce(grads, exchanges)["normal"].astype(np.float64)
        exact = sum(rank["normal"].astype(np.float64) for rank in grads)
        assert 1e-6 < np.linalg.norm(result - exact) / np.linalg.norm(exact) < 0.028


def test_auto_leaves_small_layers_to_min_elements():
    exchanges = world(2, min_elements=100, auto_steps=1)
    reduce(make(2, 1), exchanges)
    assert "wide0" not in exchanges[0].chosen and "normal" in exchanges[0].chosen
    assert exchanges[0].options.format_for("wide0", 50) == FLOAT32


def test_auto_takes_formats_as_candidates_and_only_float32():
    exchanges = world(2, auto_steps=1, auto_candidates=(FloatFormat(3, 2), FloatFormat(5, 10)), auto_error=0.2)
    for step in (1, 2):  # the second step tells the others what was chosen
        reduce(make(2, step), exchanges)
    assert exchanges[0].chosen["normal"] == (3, 2)
    exchanges = world(2, auto_steps=1, auto_candidates=("float32",))
    reduce(make(2, 1), exchanges)
    assert set(exchanges[0].chosen.values()) == {"float32"}


def test_auto_refuses_candidates_that_are_no_choice():
    with pytest.raises(ValueError, match="needs at least one of auto_candidates"):
        Options(4, 3, overrides="auto", auto_candidates=())
    with pytest.raises(ValueError, match="auto_candidates entry .* must have specials=True"):
        Options(4, 3, auto_candidates=(FloatFormat(4, 3, specials=False),))
    with pytest.raises(TypeError, match="auto_error must be a number, got str"):
        Options(4, 3, auto_error="small")  # type: ignore[arg-type]


# ---- Compressors, which may have several exchanges ----


class Compressor(ByBits):
    """A compressor of rank `rank` in one process, with one exchange for each of `names`."""

    def join(self, transports: dict[str, LocalTransport]) -> None:
        for name, transport in transports.items():
            self._keep(ReducerKey(0, name, (0, 1)), Exchange(CpuKernels(), transport, self._options))

    def exchange(self, name: str) -> Exchange:
        return self._reducers[ReducerKey(0, name, (0, 1))]


def pair(names: list[str], **options: Any) -> list[Compressor]:
    compressors = [Compressor(3, 0, auto_steps=2, **{"overrides": "auto", **options}) for _ in range(2)]
    join(compressors, names)
    return compressors


def join(compressors: list[Compressor], names: list[str]) -> None:
    worlds = {name: LocalTransport.world(2) for name in names}
    for rank, compressor in enumerate(compressors):
        compressor.join({name: worlds[name][rank] for name in names})


def run(compressors: list[Compressor], names: list[str], step: int) -> dict[str, np.ndarray]:
    results = {}
    for name in names:
        grads = [
            {name: np.random.default_rng((step, rank, len(name))).standard_normal(64).astype(np.float32)}
            for rank in range(2)
        ]
        results |= reduce(grads, [compressor.exchange(name) for compressor in compressors])
        for compressor in compressors:
            compressor._look_for_idle_overrides(compressor.exchange(name))
    return results


@pytest.mark.parametrize("n_before", [1, 2, 3])
def test_auto_resumes_with_an_exchange_for_every_tensor(n_before):
    """As TensorFlow has them without groups. Oracle: the run that was not interrupted."""
    names = ["a", "bb"]
    straight = pair(names)
    for step in range(6):
        wanted = run(straight, names, step)
    assert set(straight[0].chosen_overrides() or {}) == set(names)
    first = pair(names)
    for step in range(n_before):
        run(first, names, step)
    second = pair([])
    for one, other in zip(second, first):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    join(second, names)
    for step in range(n_before, 6):
        results = run(second, names, step)
    assert second[0].chosen_overrides() == straight[0].chosen_overrides()
    for name in names:
        assert_same_bits(results[name], wanted[name], name)


@pytest.mark.parametrize("overrides", [{"a": "float32"}, {}, None])
def test_loading_a_state_keeps_the_callers_overrides(overrides):
    for before in ("auto", {"a": (5, 10)}):
        old = pair(["a"], overrides=before)
        for step in range(3):
            run(old, ["a"], step)
        new = pair(["a"], overrides=overrides)
        wanted = new[0]._options.format_for("a", 64)
        for one, other in zip(new, old):
            one.load_state_dict(other.state_dict())
        assert new[0].exchange("a").options.format_for("a", 64) == wanted
        assert new[0].exchange("a").step_number == 3 and new[0].chosen_overrides() is None


# ---- Overrides by hand ----


def test_overrides_that_match_nothing_are_named(caplog):
    """A typing error in a pattern must not go unnoticed; one warning, when all tensors have been there."""
    compressors = pair(["fc.weight", "conv"], overrides={"conv": (5, 10), "fx.*": "float32"})
    with caplog.at_level(logging.WARNING, logger="horovod_aps"):
        run(compressors, ["fc.weight", "conv"], 0)
        assert not caplog.records
        for step in (1, 2, 3):
            run(compressors, ["fc.weight", "conv"], step)
    assert [record.getMessage() for record in caplog.records] == [
        "overrides ['fx.*'] match none of the 2 tensors, which are called conv, fc.weight"
    ]


# ---- set_format ----


@pytest.mark.parametrize("step_of_change", [1, 4])
def test_set_format_ends_auto(step_of_change):
    """While it measures and after it has chosen: what is set by hand holds. Oracle: a run that began with it."""
    compressors, fixed = pair(["a"]), pair(["a"], overrides={"a": (5, 10)})
    for step in range(6):
        if step == step_of_change:
            for compressor in compressors:
                compressor.set_format(overrides={"a": (5, 10)})
        result = run(compressors, ["a"], step)
        if step >= step_of_change:
            assert_same_bits(result["a"], run(fixed, ["a"], step)["a"])
    assert compressors[0].chosen_overrides() is None


def test_set_format_changes_what_no_override_names():
    compressors = pair(["a", "bb"], overrides={"a": "float32"})
    fixed = pair(["a", "bb"], overrides={"a": "float32"})
    for step in range(3):
        if step == 1:
            for compressor in [*compressors, *fixed]:
                compressor.set_format(4, 3)
            for compressor in fixed:
                compressor.set_format(overrides={"bb": (4, 3), "a": "float32"})
        results, wanted = run(compressors, ["a", "bb"], step), run(fixed, ["a", "bb"], step)
        for name in results:
            assert_same_bits(results[name], wanted[name], name)
    assert compressors[0].exchange("bb").options.format_for("bb", 64).bits == 8


@pytest.mark.parametrize("changes", [{"e": 5}, {"overrides": {"a": "float32"}}])
def test_set_format_on_one_rank_only_raises_on_all(changes):
    compressors = pair(["a"], overrides=None)
    run(compressors, ["a"], 0)
    compressors[1].set_format(**changes)
    exchanges = [compressor.exchange("a") for compressor in compressors]
    x = np.ones(64, np.float32)
    for exchange in exchanges:
        exchange.submit(Layer("a", x.shape, 0, x.ctypes.data, x.copy().ctypes.data, 1.0, x))
    running = [exchange.steps() for exchange in exchanges]
    raised: dict[int, str] = {}
    for _ in range(1000):
        for rank, steps in enumerate(running):
            if rank not in raised:
                try:
                    next(steps, None)
                except ValueError as error:
                    raised[rank] = str(error)
    option = next(iter(changes))
    assert set(raised) == {0, 1} and raised[0] == raised[1]
    assert f"option {option} is" in raised[0] and "on rank 0" in raised[0] and "on rank 1" in raised[0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"e": 9}, "e must be in 1..8"),
        ({"overrides": {"a": 3}}, "overrides"),
        ({"overrides": "auto"}, "as a dict, got 'auto'"),
    ],
)
def test_set_format_refuses_what_the_constructor_refuses(changes, message):
    (compressor, _) = pair(["a"], overrides=None)
    with pytest.raises((ValueError, TypeError), match=message):
        compressor.set_format(**changes)
    assert compressor._options == compressor.exchange("a").options


# ---- set_format and checkpoints ----

CHANGES = [
    {"e": 5, "m": np.int64(2)},
    {"m": 1},
    {"overrides": {"a": FloatFormat(4, 1), "b*": (5, 10)}},
    {"e": 4, "overrides": {"bb": "float32"}},
]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint may be written; residuals aside."""
    return json.loads(json.dumps({**state, "residuals": {}})) | {"residuals": state["residuals"]}


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("overrides", ["auto", None])
@pytest.mark.parametrize("running", [False, True], ids=["new", "running"])
def test_set_format_survives_resuming(changes, overrides, running):
    """Oracle: the run that was not interrupted, bit for bit."""
    names = ["a", "bb"]
    straight = pair(names, overrides=overrides, error_feedback=True)
    for step in range(6):
        if step == 3:
            for compressor in straight:
                compressor.set_format(**changes)
        wanted = run(straight, names, step)
        if step == 4:
            states = [through_json(compressor.state_dict()) for compressor in straight]
    resumed = pair(names if running else [], overrides=overrides, error_feedback=True)
    for one, state in zip(resumed, states):
        one.load_state_dict(state)
        assert one.state_dict()["set_format"].keys() == changes.keys()
    if not running:
        join(resumed, names)
    for name, result in run(resumed, names, 5).items():
        assert_same_bits(result, wanted[name], name)


@pytest.mark.parametrize("overrides", ["auto", None])
def test_loading_a_state_from_before_set_format_takes_it_back(overrides):
    """Oracle: a run in which nobody called set_format."""
    straight, changed = (pair(["a"], overrides=overrides) for _ in range(2))
    for step in range(4):
        wanted = run(straight, ["a"], step)
        if step < 3:
            run(changed, ["a"], step)
    for compressor in changed:
        state = compressor.state_dict()
        compressor.set_format(5, 10, overrides={"x": "float32"})
        compressor.load_state_dict(state)
    assert_same_bits(run(changed, ["a"], 3)["a"], wanted["a"])


def test_states_without_set_format_leave_the_formats_alone():
    """Of a compressor that was made otherwise, and of a version that did not know of it."""
    state = pair(["a"], overrides=None)[0].state_dict()
    (compressor, _) = pair(["a"], overrides={"b": "float32"})
    compressor.set_format(m=7)
    old = {name: value for name, value in state.items() if name != "set_format"}
    compressor.load_state_dict(old)
    assert compressor.exchange("a").options.m == 7
    other = Compressor(5, 2, overrides={"b": "float32"})
    other.load_state_dict(state)
    assert (other._options.e, other._options.m, other._options.overrides) == (5, 2, {"b": "float32"})


def test_a_copy_keeps_what_set_format_has_set():
    compressor = Compressor(4, 3)
    compressor.set_format(m=1)
    twin = pickle.loads(pickle.dumps(compressor))
    assert (twin._options.e, twin._options.m) == (4, 1)
    twin.load_state_dict(Compressor(4, 3).state_dict())
    assert (twin._options.e, twin._options.m) == (4, 3)


@pytest.mark.parametrize("state", [None, [], "state"])
def test_what_is_no_state_is_named(state):
    with pytest.raises(TypeError, match=f"state must be what state_dict.. returns, got {type(state).__name__}"):
        Compressor(4, 3).load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"step_number": "x"}, {"residuals": None}, {"residuals": {"a": "b"}}])
def test_a_state_with_other_things_in_it_is_refused(wrong):
    compressor = Compressor(4, 3)
    with pytest.raises(ValueError, match="Compressor: state must be what state_dict.. returns, got one with"):
        compressor.load_state_dict(compressor.state_dict() | wrong)
