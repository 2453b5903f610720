"""How ranks compare batches: equal ones settle, every kind of difference gives one message that names both sides."""

from __future__ import annotations

import json

import pytest

from horovod_aps.engine.agreement import describe, digest_words, parse_all, proposal, settle, spec_of
from horovod_aps.engine.layer import Layer
from horovod_aps.formats import FLOAT32, FloatFormat
from horovod_aps.options import Options

PLAIN = Options(4, 3)


def specs(*layers: Layer, options: Options = PLAIN, warm: bool = False):
    return [spec_of(layer, options, warm) for layer in layers]


def message(*layers: Layer, options: Options = PLAIN, waits: bool = True, whole: bool = True) -> bytes:
    """What a rank that holds these layers says."""
    return proposal(
        specs(*layers, options=options), [layer.factor for layer in layers], options, waits=waits, whole=whole
    )


def settled(messages: list[bytes]) -> list[str]:
    return settle(parse_all(messages))


def layer(name: str = "w", shape: tuple[int, ...] = (3, 4), dtype: int = 0, factor: float = 0.5) -> Layer:
    return Layer(name, shape, dtype, 0, 0, factor)


def test_settle_takes_the_order_of_rank_0():
    a, b, c = layer("a"), layer("b"), layer("c")
    assert settled([message(b, c, a), message(a, b, c)]) == ["b", "c", "a"]


@pytest.mark.parametrize("waits", [(False, False), (False, True), (True, True)])
def test_settle_takes_what_all_hold_of_partial_batches(waits):
    a, b, c = layer("a"), layer("b"), layer("c")
    messages = [message(*held, waits=w, whole=False) for held, w in zip([(c, a, b), (b, c)], waits)]
    assert settled(messages) == ["c", "b"]


def test_settle_nothing_in_common_is_an_error_only_if_all_wait():
    a, b = layer("a"), layer("b")
    assert settled([message(a, whole=False), message(b, waits=False, whole=False)]) == []
    with pytest.raises(ValueError, match="'a' was submitted on rank 0 but not on rank 1"):
        settled([message(a, whole=False), message(b, whole=False)])


@pytest.mark.parametrize("whole", [0, 1])
def test_settle_a_whole_batch_allows_no_more_and_no_less(whole):
    """Whichever rank says that its batch is whole."""
    a, b = layer("a"), layer("b")
    with pytest.raises(ValueError, match="'b' was submitted on rank 0 but not on rank 1"):
        settled([message(a, b, whole=whole == 0), message(a, whole=whole == 1)])


@pytest.mark.parametrize(
    "mine, theirs, text",
    [
        ((layer(),), (layer(shape=(4, 3)),), "tensor 'w' has shape [3, 4] on rank 0 and [4, 3] on rank 1"),
        ((layer(),), (layer(dtype=2),), "tensor 'w' has dtype 'float32' on rank 0 and 'float16' on rank 1"),
        ((layer(),), (layer(factor=1.0),), "tensor 'w' has factor 0.5 on rank 0 and 1.0 on rank 1"),
        ((layer(), layer("x")), (layer(),), "tensor 'x' was submitted on rank 0 but not on rank 1"),
        ((layer(),), (layer(), layer("x")), "tensor 'x' was submitted on rank 1 but not on rank 0"),
    ],
)
def test_settle_names_the_ranks_and_both_values(mine, theirs, text):
    with pytest.raises(ValueError) as caught:
        settled([message(*mine), message(*theirs)])
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"e": 5},
        {"m": 2},
        {"specials": False},
        {"rounding": "stochastic"},
        {"accumulate": "kahan"},
        {"seed": 1},
        {"error_feedback": True},
        {"min_elements": 9},
        {"bucket_mb": 1.0},
        {"overrides": {"w": (5, 2)}},
        {"warmup_steps": 3},
        {"scaling": False},
    ],
    ids=str,
)
def test_settle_notices_every_option(changes):
    ours, theirs = Options(4, 3), Options(4, 3).replace(**changes)
    messages = [message(layer(), options=o) for o in (ours, ours, theirs)]
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"option {name} is .* on rank 0 and .* on rank 2"):
        settled(messages)
    assert digest_words(describe(specs(layer()), ours)) != digest_words(describe(specs(layer()), theirs))


def test_settle_ignores_stats_which_change_nothing_on_the_wire():
    messages = [message(layer(), options=Options(4, 3, stats=on)) for on in (False, True)]
    assert settled(messages) == ["w"]


def test_settle_notices_another_version():
    other = json.dumps(json.loads(message(layer())) | {"version": "99.0"}).encode()
    with pytest.raises(ValueError, match="rank 1 runs 99.0; install the same version everywhere"):
        settled([message(layer()), other])
    with pytest.raises(ValueError, match="rank 0 is .* not of horovod_aps"):
        settled([other, other])


def test_describe_does_not_depend_on_the_order_of_arrival():
    a, b = layer("a"), layer("b")
    assert describe(specs(a, b), Options(4, 3)) == describe(specs(b, a), Options(4, 3))


def test_digest_words_fit_a_signed_maximum():
    """Their negations travel too, so they must be non-negative and below 2^31."""
    for i in range(1000):
        words = digest_words(f"{i}")
        assert all(0 <= word < 2**31 for word in words)
    assert len({digest_words(f"{i}") for i in range(1000)}) == 1000


def test_spec_of_uses_float32_while_warming_up():
    assert spec_of(layer(), Options(4, 3), warm=True).format == FLOAT32
    assert spec_of(layer(), Options(4, 3), warm=False).format == FloatFormat(4, 3)


@pytest.mark.parametrize(
    "fmt, wanted",
    [(FloatFormat(4, 3), 7), (FloatFormat(5, 2), 15), (FloatFormat(4, 3, False), 8), (FloatFormat(1, 2), 1)],
)
def test_top_exponent_is_that_of_the_largest_binade(fmt, wanted):
    assert fmt.top_exponent == wanted
