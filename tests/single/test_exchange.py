"""The exchange over emulated ranks in one process. Oracle: the NumPy simulation in `tests/reference.py`."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exchange_oracle import CODES, SIZES, assert_same_bits, expected, hosted_worlds, make_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Format

from horovod_aps.engine import layout
from horovod_aps.engine.exchange import MAX_FLYING, MAX_SERIAL, Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import PIECE
from horovod_aps.engine.reductions.scatter_gather import ScatterGather
from horovod_aps.errors import LostPeer
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport

Grads = Mapping[str, np.ndarray]


def layers_of(grads: Grads, out: dict[str, np.ndarray], factor: float = 1.0) -> list[Layer]:
    """Layers that read `grads` and write fresh arrays, put into `out`."""
    layers = []
    for name, x in grads.items():
        out[name] = np.full_like(x, 77)
        layers.append(Layer(name, x.shape, CODES[x.dtype], x.ctypes.data, out[name].ctypes.data, factor, (x, out)))
    return layers


def reduce_all(
    grads_per_rank: Sequence[Grads],
    options: Options,
    factor: float = 1.0,
    exchanges: Any = None,
    orders: Sequence[Sequence[str]] | None = None,
) -> tuple[list[dict[str, np.ndarray]], list[Exchange]]:
    """Results of every emulated rank; `orders` says in which order each rank submits."""
    outs: list[dict[str, np.ndarray]] = [{} for _ in grads_per_rank]
    per_rank = [layers_of(grads, out, factor) for grads, out in zip(grads_per_rank, outs)]
    if orders is not None:
        per_rank = [sorted(layers, key=lambda x: order.index(x.name)) for layers, order in zip(per_rank, orders)]
    return outs, local_allreduce(per_rank, options, CpuKernels(), exchanges)


def check(grads: Sequence[Grads], options: Options, factor: float = 1.0, formats: Any = None) -> None:
    """Every rank's result equals the simulation, and inputs are not overwritten."""
    before = [{name: x.copy() for name, x in rank.items()} for rank in grads]
    outs, _ = reduce_all(grads, options, factor)
    fmt = formats if formats is not None else Format(options.e, options.m, options.specials)
    wanted = expected(before, fmt, factor=factor, mode=options.accumulate, bucket_mb=options.bucket_mb)
    for rank, out in enumerate(outs):
        for name in out:
            assert_same_bits(out[name], wanted[name], f"rank {rank}, {name}")
            assert_same_bits(grads[rank][name], before[rank][name], f"input of rank {rank}, {name}")


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("fmt", [(4, 3), (5, 2), (3, 0), (2, 1), (5, 10), (8, 7)], ids=str)
def test_exchange_equals_simulation(n_ranks, fmt):
    check(make_gradients(SIZES, n_ranks), Options(*fmt), 1 / n_ranks)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("accumulate", ["format", "kahan"])
@pytest.mark.parametrize("fmt", [(4, 3), (5, 2), (3, 2)], ids=str)
def test_exchange_low_precision_sums_equal_simulation(n_ranks, accumulate, fmt):
    check(make_gradients(SIZES, n_ranks), Options(*fmt, accumulate=accumulate), 1 / n_ranks)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("specials", [True, False])
def test_exchange_dtypes_equal_simulation(n_ranks, dtype, specials):
    check(make_gradients(SIZES, n_ranks, dtype), Options(4, 3, specials=specials), 1 / n_ranks)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_exchange_many_buckets_equal_simulation(n_ranks):
    """1000 elements per bucket: layers share buckets, fill one alone, and are empty."""
    options = Options(4, 3, bucket_mb=0.004)
    check(make_gradients((900, 90, 9, 5000, 0, 0, 1, 1, 1000, 1001, 0), n_ranks), options, 1 / n_ranks)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_exchange_more_layers_than_a_message_holds(n_ranks):
    check(make_gradients([1 + i % 5 for i in range(600)], n_ranks), Options(4, 3), 1 / n_ranks)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_exchange_mixed_formats_equal_simulation(n_ranks):
    grads = make_gradients((17, 1000, 33, 12, 9), n_ranks)
    overrides = {"layer1": (5, 2), "layer[23]": "float32", "layer4": (3, 0)}
    formats = {"layer0": Format(4, 3), "layer1": Format(5, 2), "layer2": None, "layer3": None, "layer4": Format(3, 0)}
    check(grads, Options(4, 3, overrides=overrides), 1 / n_ranks, formats)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_exchange_min_elements_keeps_small_layers_in_float32(n_ranks):
    grads = make_gradients((10, 99, 100, 101), n_ranks)
    formats = {"layer0": None, "layer1": None, "layer2": Format(4, 3), "layer3": Format(4, 3)}
    check(grads, Options(4, 3, min_elements=100), 1 / n_ranks, formats)


@given(
    st.integers(2, 8),
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(0, 10),
    st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    st.floats(0.001, 1000),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_exchange_equals_simulation_anywhere(n_ranks, sizes, e, m, dtype, factor, seed):
    if e == 1 and m == 0:
        m = 1  # has no number but zero
    check(make_gradients(sizes, n_ranks, dtype, seed), Options(e, m, bucket_mb=0.0002), factor)


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
@pytest.mark.parametrize("fmt, bound", [((4, 3), 0.04), ((5, 2), 0.08)], ids=str)
def test_exchange_relative_error_at_any_scale(n_ranks, fmt, bound):
    """Oracle: the exact average in float64; the bounds are those of issue 3."""
    scales = [10.0**k for k in range(-30, 31, 5)]
    rng = np.random.default_rng(5)
    exact = [rng.standard_normal((n_ranks, 2000)) * scale for scale in scales]
    grads = [{f"{i}": x[rank].astype(np.float32) for i, x in enumerate(exact)} for rank in range(n_ranks)]
    out = reduce_all(grads, Options(*fmt), 1 / n_ranks)[0][0]
    for i, scale in enumerate(scales):
        mean = np.mean([grads[rank][f"{i}"].astype(np.float64) for rank in range(n_ranks)], axis=0)
        error = np.linalg.norm(out[f"{i}"] - mean) / np.linalg.norm(mean)
        assert error < bound, (scale, error)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_exchange_nonfinite_element_spoils_its_layer_only(n_ranks, bad):
    options = Options(4, 3)
    clean = make_gradients((50, 60, 70), n_ranks)
    spoilt = [{name: x.copy() for name, x in rank.items()} for rank in clean]
    spoilt[-1]["layer1"][59] = bad
    outs, exchanges = reduce_all(spoilt, options, 1 / n_ranks)
    wanted = expected(clean, Format(4, 3), factor=1 / n_ranks)
    for out in outs:
        assert np.all(np.isnan(out["layer1"]))
        assert_same_bits(out["layer0"], wanted["layer0"])
        assert_same_bits(out["layer2"], wanted["layer2"])
    outs, _ = reduce_all(clean, options, 1 / n_ranks, exchanges)  # the next step is clean
    for out in outs:
        for name in out:
            assert_same_bits(out[name], wanted[name])


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_exchange_zeros_give_zeros(n_ranks, error_feedback):
    grads = [{"zero": np.zeros(33, np.float32), "one": np.ones(9, np.float32)} for _ in range(n_ranks)]
    outs, _ = reduce_all(grads, Options(4, 3, error_feedback=error_feedback), 1.0)
    for out in outs:
        assert_same_bits(out["zero"], np.zeros(33, np.float32))
        assert_same_bits(out["one"], np.full(9, n_ranks, np.float32))


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 3e38])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_exchange_ends_of_the_float32_range(n_ranks, largest):
    """Subnormals keep their value to a subnormal's spacing; 3e38 neither overflows nor loses its scale."""
    rng = np.random.default_rng(1)
    grads = [{"x": (rng.uniform(-1, 1, 500) * largest).astype(np.float32)} for _ in range(n_ranks)]
    check(grads, Options(4, 3), 1 / n_ranks)
    out = reduce_all(grads, Options(4, 3), 1 / n_ranks)[0][0]["x"].astype(np.float64)
    mean = np.mean([rank["x"].astype(np.float64) for rank in grads], axis=0)
    assert np.all(np.isfinite(out))
    assert np.max(np.abs(out - mean)) <= largest / 8 + 2.0**-149


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_exchange_outlier_among_tiny_values(n_ranks):
    """One value of 1 leaves nothing of values of 1e-9: they underflow to zero, and the outlier is exact."""
    grads = [{"x": np.full(100, 1e-9, np.float32)} for _ in range(n_ranks)]
    for rank in grads:
        rank["x"][37] = 1.0
    out = reduce_all(grads, Options(4, 3), 1 / n_ranks)[0][0]["x"]
    assert out[37] == 1.0 and np.count_nonzero(out) == 1


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_exchange_submission_order_may_differ_between_ranks(n_ranks):
    grads = make_gradients((10, 20, 30, 40), n_ranks)
    names = list(grads[0])
    orders = [names[rank:] + names[:rank] for rank in range(n_ranks)]
    exchanges = None
    for step in range(3):
        outs, exchanges = reduce_all(grads, Options(4, 3, bucket_mb=0.0001), 1 / n_ranks, exchanges, orders)
        orders = orders[::-1]
        wanted = expected(grads, Format(4, 3), factor=1 / n_ranks, bucket_mb=0.0001)
        for out in outs:
            for name in names:
                assert_same_bits(out[name], wanted[name], f"step {step}")


def test_exchange_alternating_batches_reuse_their_plans():
    small, large = make_gradients((5, 6), 3), make_gradients((100, 200, 7), 3, seed=1)
    exchanges = None
    for _ in range(3):
        for grads in (small, large):
            outs, exchanges = reduce_all(grads, Options(4, 3), 1 / 3, exchanges)
            wanted = expected(grads, Format(4, 3), factor=1 / 3)
            assert_same_bits(outs[1]["layer1"], wanted["layer1"])
    assert len(exchanges[0]._plans) == 2


def test_exchange_rank_with_new_batch_among_ranks_that_know_theirs():
    """One rank brings another set of layers than all ranks did before: ValueError on all, and then it works again."""
    grads = make_gradients((10, 20), 3)
    _, exchanges = reduce_all(grads, Options(4, 3), 1.0)
    odd = [dict(grads[0]), dict(grads[1]), {**grads[2], "extra": np.ones(4, np.float32)}]
    errors = []
    for exchange, rank in zip(exchanges, odd):
        for layer in layers_of(rank, {}, 1.0):
            exchange.submit(layer)
    running = {rank: exchange.steps() for rank, exchange in enumerate(exchanges)}
    for _ in range(1000):
        for rank, steps in list(running.items()):
            try:
                if next(steps, None) is None:
                    del running[rank]
            except ValueError as error:
                errors.append(str(error))
                del running[rank]
        if not running:
            break
    assert errors == ["APSCompressor: tensor 'extra' was submitted on rank 2 but not on rank 0"] * 3
    outs, _ = reduce_all(grads, Options(4, 3), 1.0, exchanges)
    assert_same_bits(outs[2]["layer1"], expected(grads, Format(4, 3))["layer1"])


def test_exchange_refuses_the_same_name_twice():
    exchange = Exchange(CpuKernels(), LocalTransport.world(2)[0], Options(4, 3))
    layer = layers_of({"x": np.ones(3, np.float32)}, {})[0]
    exchange.submit(layer)
    with pytest.raises(ValueError, match="'x' was submitted twice"):
        exchange.submit(layer)


def test_exchange_is_not_idle_while_a_layer_is_taken_in():
    """A frontend asks in another thread, in the middle of it."""
    exchange = Exchange(CpuKernels(), LocalTransport.world(2)[0], Options(4, 3))
    seen = []

    class Watched(dict):
        def pop(self, *args: Any) -> Any:
            found = super().pop(*args)
            seen.append(exchange.is_idle)
            return found

    exchange._submitted = Watched()
    exchange.submit(*layers_of({"x": np.ones(3, np.float32)}, {}))
    exchange._take_in()
    assert seen == [False]


def test_closed_exchange_keeps_the_memory_that_the_network_writes_into():
    """Somebody has dropped it in the middle of a step. Oracle: weak references to the buffers."""

    class Slow(LocalTransport):
        def transfer(self, *_: Any) -> Any:
            return SimpleNamespace(done=lambda: False)

    ranks = [Exchange(CpuKernels(), one, Options(4, 3)) for one in Slow.world(2)]
    for rank in ranks:
        rank.self_driven = True
        rank.submit(*layers_of({"x": np.ones(3000, np.float32)}, {}))
    running = [rank.steps() for rank in ranks]
    while not ranks[0]._jobs:
        for steps in running:
            next(steps)
    buffers = [weakref.ref(buffer) for buffer in ranks[0]._jobs[0].work.lease.buffers]
    pool = weakref.ref(ranks[0]._pool)
    ranks[0].close()
    del ranks[0], running, steps, rank
    gc.collect()
    assert buffers and all(one() is not None for one in buffers)
    assert pool() is None, "what the network cannot write into"


def test_exchange_takes_what_else_was_handed_in_beside_a_name_twice():
    """Two threads hand in the same name, one while the other's is being taken in."""
    exchange = Exchange(CpuKernels(), LocalTransport.world(2)[0], Options(4, 3))
    ones = {name: np.ones(3, np.float32) for name in "abc"}
    first, second = layers_of(ones, {}), layers_of(ones, {})
    exchange.submit(first[0])
    exchange.look()
    exchange._submitted |= {"a": second[0], "b": first[1], "c": first[2]}
    with pytest.raises(ValueError, match="'a' was submitted twice"):
        exchange.look()
    assert [layer.error is None for layer in (*first, second[0])] == [True, True, True, False]
    assert set(exchange._pending) == {"a", "b", "c"} and not exchange._submitted


def test_exchange_refuses_a_name_that_another_thread_hands_in_at_the_same_moment():
    """Neither has seen the other's before both went in. Oracle: who comes second, and its whole group, is refused."""
    exchange = Exchange(CpuKernels(), LocalTransport.world(2)[0], Options(4, 3))
    exchange.self_driven = True
    ones = {name: np.ones(3, np.float32) for name in "ab"}
    first, second = layers_of(ones, {}), layers_of(ones, {})

    class Late(dict):
        def __contains__(self, name: object) -> bool:
            return False  # the other's goes in right after this look

    exchange._submitted = Late(b=first[1])
    with pytest.raises(ValueError, match="'b' was submitted twice"):
        exchange.submit(*second)
    assert dict(exchange._submitted) == {"b": first[1]}


def test_exchange_refuses_all_of_a_group_or_nothing():
    exchange = Exchange(CpuKernels(), LocalTransport.world(2)[0], Options(4, 3))
    first, second = layers_of({"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}, {})
    exchange.submit(second)
    with pytest.raises(ValueError, match="'b' was submitted twice"):
        exchange.submit(first, second)
    exchange.submit(first)


@pytest.mark.parametrize("error_feedback", [False, True])
def test_exchange_finds_exponents_before_all_are_known_to_be_there_and_says_nothing(error_feedback):
    """Nobody may hear of a batch that is refused since a rank is not there, and no residual is lost with it.

    Oracle: the same steps without the refused batch.
    """
    options = Options(4, 3, error_feedback=error_feedback)
    grads = make_gradients([1000, 7], 2)
    posts: list[bytes] = []

    class Watched(LocalTransport):
        def post(self, message: bytes) -> None:
            posts.append(message)
            super().post(message)

    ranks = [Exchange(CpuKernels(), one, options, overlap=True) for one in Watched.world(2)]
    reduce_all(grads, options, exchanges=ranks)
    n_posts, n_bytes = len(posts), [rank._pool.n_bytes for rank in ranks]
    for rank, mine in zip(ranks, grads):
        rank.gate = lambda: False  # somebody is in hvd.join()
        rank.submit(*layers_of(mine, {}))
        rank.look()
        assert rank._flight is not None and len(rank._flight.works) == (0 if error_feedback else 1)
        rank.forget()
        rank.gate = None
    assert len(posts) == n_posts and [rank._pool.n_bytes for rank in ranks] == n_bytes
    again, _ = reduce_all(grads, options, exchanges=ranks)
    without, _ = reduce_all(grads, options, exchanges=reduce_all(grads, options)[1])
    for out, wanted in zip(again, without):
        for name in wanted:
            assert_same_bits(out[name], wanted[name], name)


@pytest.mark.parametrize("hosts, n_fail", [("ab", 1), ("ab", 2), ("abc", 1), ("aabb", 1)])
@pytest.mark.parametrize("kernel", ["scan", "encode", "decode"])
def test_exchange_that_fails_on_a_rank_is_an_error_on_all(hosts, n_fail, kernel):
    """No layer counts as done, nobody waits, now or in later batches; with new connections all go on."""
    n_ranks = len(hosts)

    class FailsOnce(CpuKernels):
        def fail(self, *_: Any, **__: Any) -> None:
            delattr(self, kernel)
            raise MemoryError(f"{kernel} has failed")

    def errors_of_waits() -> list[Exception]:
        """What each rank gets, within a thousand looks."""
        waits = [exchange.steps() for exchange in exchanges]
        errors: dict[int, Exception] = {}
        for _ in range(1000):
            for rank in set(range(n_ranks)) - set(errors):
                try:
                    next(waits[rank])
                except (MemoryError, LostPeer) as error:
                    errors[rank] = error
        return [errors[rank] for rank in range(n_ranks)]

    kernels = [FailsOnce() for _ in range(n_ranks)]
    exchanges = [Exchange(one, world, Options(4, 3)) for one, world in zip(kernels, hosted_worlds(hosts))]
    grads = make_gradients([5, 100], n_ranks)
    wanted, _ = reduce_all(grads, Options(4, 3), exchanges=exchanges)
    for one in kernels[:n_fail]:
        setattr(one, kernel, one.fail)
    for _ in range(2):
        per_rank = [layers_of(rank, {}) for rank in grads]
        for exchange, layers in zip(exchanges, per_rank):
            exchange.submit(*layers)
        errors = errors_of_waits()
        assert all(
            f"MemoryError: {kernel} has failed" in str(error) or isinstance(error, MemoryError) for error in errors
        )
        assert all(isinstance(error, LostPeer) for error in errors[n_fail:])
        assert not any(layer.done for layers in per_rank for layer in layers)
    exchanges[0].self_driven = False
    exchanges[0].submit(*layers_of(grads[0], {}))
    with pytest.raises(LostPeer):
        exchanges[0].wait()
    assert not exchanges[0].is_active  # or whoever waits for another one would look at it without end
    for exchange, layers in zip(exchanges, per_rank):
        for layer in layers:
            with pytest.raises(LostPeer, match=f"could not go on: MemoryError: {kernel} has failed"):
                list(exchange.steps([layer]))
    for exchange, one, world in zip(exchanges, kernels, hosted_worlds(hosts)):
        vars(one).pop(kernel, None)  # the first failure may have spared it
        exchange.connect(world)
    outs, _ = reduce_all(grads, Options(4, 3), exchanges=exchanges)
    for out, other in zip(outs, wanted):
        for name in out:
            assert_same_bits(out[name], other[name], name)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_exchange_error_feedback_keeps_the_average_over_steps(n_ranks, rounding):
    """With feedback the mean result over many equal steps tends to the true mean; without, it stays rounded."""
    grads = make_gradients((1000,), n_ranks)
    true = np.mean([g["layer0"].astype(np.float64) for g in grads], axis=0)
    errors = {}
    for feedback in (False, True):
        options = Options(3, 0, error_feedback=feedback, rounding=rounding)
        exchanges, total = None, np.zeros(1000)
        for _ in range(64):
            outs, exchanges = reduce_all(grads, options, 1 / n_ranks, exchanges)
            total += outs[0]["layer0"]
        errors[feedback] = np.linalg.norm(total / 64 - true) / np.linalg.norm(true)
    if rounding == "nearest":
        assert errors[True] < errors[False] / 2
    assert errors[True] < 0.05


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("accumulate", ["float32", "format", "kahan"])
def test_exchange_error_feedback_loses_nothing(n_ranks, accumulate, monkeypatch):
    """What went in is what came out plus all residuals, up to float32's own rounding; several parts and buckets."""
    monkeypatch.setattr(layout, "PIECE", 512)
    grads = make_gradients((1000, 7, 521, 2048), n_ranks)
    for rank in grads:
        rank["raw"] = np.full(5, 0.1, np.float32)
    options = Options(3, 1, error_feedback=True, accumulate=accumulate, overrides={"raw": "float32"}, bucket_mb=0.008)
    totals, exchanges, n_steps = {name: np.zeros(x.shape) for name, x in grads[0].items()}, None, 5
    for _ in range(n_steps):
        outs, exchanges = reduce_all(grads, options, 1.0, exchanges)
        for name, total in totals.items():
            total += outs[0][name]
    for name, total in totals.items():
        went_in = n_steps * np.sum([rank[name] for rank in grads], axis=0, dtype=np.float64)
        kept = np.sum([exchange.residuals[name] for exchange in exchanges], axis=0, dtype=np.float64)
        largest = max(np.abs(rank[name]).max() for rank in grads)
        np.testing.assert_allclose(total + kept, went_in, rtol=0, atol=1e-5 * largest, err_msg=name)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_exchange_stochastic_rounding_repeats_with_its_seed(n_ranks):
    grads = make_gradients((1000,), n_ranks)

    def run(seed: int) -> list[np.ndarray]:
        options, exchanges, results = Options(4, 3, rounding="stochastic", seed=seed), None, []
        for _ in range(3):
            outs, exchanges = reduce_all(grads, options, 1 / n_ranks, exchanges)
            for out in outs:
                assert_same_bits(out["layer0"], outs[0]["layer0"])
            results.append(outs[0]["layer0"])
        return results

    first, again, other = run(1), run(1), run(2)
    for a, b in zip(first, again):
        assert_same_bits(a, b)
    assert np.any(first[0] != other[0])
    assert np.any(first[0] != first[1]), "another step must draw other bits"


def test_exchange_stochastic_rounding_is_unbiased():
    """Oracle: the mean over 400 steps; nearest rounding would stay at the nearest value for ever."""
    x = np.full(256, 1.03125, np.float32)  # a quarter of the way from 1 to 1.125
    options, exchanges, total = Options(4, 3, rounding="stochastic"), None, 0.0
    for _ in range(400):
        outs, exchanges = reduce_all([{"x": x}, {"x": x}], options, 0.5, exchanges)
        total += float(outs[0]["x"].mean(dtype=np.float64))
    assert abs(total / 400 - 1.03125) < 0.001  # 6 sigma: 0.054 / sqrt(400 * 256 * 2) = 1.2e-4


def test_exchange_without_scaling_uses_the_format_as_it_is():
    """Oracle: the format's own rounding; (4,3) reaches down to 2^-9 and up to 240."""
    from reference import quantize

    values = np.array([2.0**-11, 2.0**-9, 0.1, 1.1, 100.0, 240.0, 1000.0], np.float32)
    outs, _ = reduce_all([{"x": values}, {"x": values}], Options(4, 3, scaling=False), 0.5)
    assert_same_bits(outs[0]["x"], quantize(values, Format(4, 3), saturate=True).astype(np.float32))


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_exchange_warmup_sends_float32_first(n_ranks):
    grads = make_gradients((200,), n_ranks)
    options, exchanges = Options(4, 3, warmup_steps=2), None
    for step in range(4):
        outs, exchanges = reduce_all(grads, options, 1 / n_ranks, exchanges)
        wanted = expected(grads, {"layer0": None if step < 2 else Format(4, 3)}, factor=1 / n_ranks)
        assert_same_bits(outs[0]["layer0"], wanted["layer0"], f"step {step}")


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("fmt, share", [((4, 3), 0.25), ((3, 0), 0.125)], ids=str)
def test_exchange_counts_the_bytes_it_sends(n_ranks, fmt, share):
    _, exchanges = reduce_all(make_gradients((1_000_000,), n_ranks), Options(*fmt), 1.0)
    for exchange in exchanges:
        assert share <= exchange.statistics.as_dict()["ratio"] < share + 0.002


def test_exchange_statistics_measure_error_and_underflow():
    """Oracle: underflow counted and error computed here from the reference's rounding."""
    from reference import quantize_scaled, scan_exponent, true_value

    rng = np.random.default_rng(3)
    x = (rng.standard_normal(5000) * 10.0 ** rng.uniform(-6, 0, 5000)).astype(np.float32)
    _, exchanges = reduce_all([{"x": x}, {"x": x}], Options(4, 3, stats=True), 1.0)
    report = exchanges[0].statistics.as_dict()["layers"]["x"]
    exponent = scan_exponent(x, Format(4, 3))
    sent = true_value(quantize_scaled(x, exponent, Format(4, 3)), exponent, Format(4, 3))
    assert report["exponent"] == exponent
    assert report["underflow"] == np.mean((sent == 0) & (x != 0))
    assert report["relative_error"] == pytest.approx(np.linalg.norm(sent - x) / np.linalg.norm(x), rel=1e-6)


def test_exchange_forget_drops_what_the_old_world_taught():
    grads = make_gradients((10,), 2)
    _, exchanges = reduce_all(grads, Options(4, 3), 1.0)
    for exchange in exchanges:
        exchange.submit(layers_of(grads[0], {})[0])
        exchange.forget()
    outs, _ = reduce_all(grads, Options(4, 3), 1.0, exchanges)
    assert_same_bits(outs[0]["layer0"], expected(grads, Format(4, 3))["layer0"])


@pytest.mark.parametrize("fmt", [(4, 3), (3, 0), (3, 1)], ids=str)
def test_exchange_of_layers_in_several_parts_equals_simulation(fmt):
    check(make_gradients((2 * PIECE + 5, 11, 13, PIECE - 3), 2), Options(*fmt), 0.5)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_exchange_needs_at_most_0_8_bytes_per_byte_of_gradient(n_ranks):
    """Oracle: the bytes that the real kernels are asked to allocate, at 8 bits, for a layer and many small ones."""

    class CountingKernels(CpuKernels):
        def __init__(self) -> None:
            self.n_bytes = 0

        def alloc(self, n_bytes: int) -> np.ndarray:
            self.n_bytes += n_bytes
            return super().alloc(n_bytes)

        def zeros(self, n: int) -> np.ndarray:
            self.n_bytes += 4 * n
            return super().zeros(n)

    grads = make_gradients((3_000_000, *[64] * 300, 1_000_000), n_ranks)
    kernels = CountingKernels()
    n_gradient = sum(g.nbytes for g in grads[0].values())
    layers = [layers_of(rank, {}) for rank in grads]
    local_allreduce(layers, Options(4, 3), kernels)
    assert 0 < kernels.n_bytes / n_ranks <= 0.8 * n_gradient


def test_exchange_bounds_the_buckets_on_their_way():
    """Tags come back after MAX_SERIAL buckets; a tiny bucket_mb makes thousands. Oracle: the simulation."""
    flying: Counter[int] = Counter()
    most: Counter[int] = Counter()

    class Counting(ScatterGather):
        def run(self, work):
            rank = work.transport.rank
            flying[rank] += 1
            most[rank] = max(most[rank], flying[rank])
            yield from super().run(work)
            flying[rank] -= 1

    options = Options(4, 3, bucket_mb=1e-6)
    grads = make_gradients([1 + i % 3 for i in range(2 * MAX_FLYING + 9)], 3)
    outs: list[dict[str, np.ndarray]] = [{}, {}, {}]
    exchanges = [
        Exchange(CpuKernels(), transport, options, choose_reduction=Counting) for transport in LocalTransport.world(3)
    ]
    local_allreduce([layers_of(rank, out) for rank, out in zip(grads, outs)], options, CpuKernels(), exchanges)
    assert flying.total() == 0 and max(most.values()) <= MAX_FLYING < MAX_SERIAL
    wanted = expected(grads, Format(4, 3), bucket_mb=1e-6)
    for out in outs:
        for name in wanted:
            assert_same_bits(out[name], wanted[name], name)
