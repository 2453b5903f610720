"""Gradients at the edges of float32 through the whole exchange, over 2 and 3 emulated ranks.

Oracles: the NumPy simulation in `tests/reference.py`, bit for bit, and beside it what docs/reliability.md says of
each case, computed in float64 from the inputs.
"""

from __future__ import annotations

import numpy as np
import pytest
from exchange_oracle import CODES, assert_same_bits, expected
from reference import Format

from horovod_aps.engine.exchange import local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import EXP_NONFINITE, SEGMENT, SPECIALS, CpuKernels, library
from horovod_aps.options import Options

FORMATS = [(4, 3), (5, 2), (3, 0), (8, 7), (5, 10)]
LEAST = float(np.float32(1e-45))  # the smallest positive float32


def reduce_all(per_rank: list[dict[str, np.ndarray]], options: Options, factor: float) -> list[dict[str, np.ndarray]]:
    """Results of every rank."""
    outs: list[dict[str, np.ndarray]] = [{} for _ in per_rank]
    layers = []
    for grads, out in zip(per_rank, outs, strict=True):
        row = []
        for name, x in grads.items():
            out[name] = np.full_like(x, 77)
            row.append(Layer(name, x.shape, CODES[x.dtype], x.ctypes.data, out[name].ctypes.data, factor, (x, out)))
        layers.append(row)
    local_allreduce(layers, options, CpuKernels())
    return outs


def average(per_rank: list[np.ndarray], fmt: tuple[int, int], **options) -> np.ndarray:
    """The average of one layer, the same bits on all ranks and those of the simulation."""
    grads = [{"w": x} for x in per_rank]
    outs = reduce_all(grads, Options(*fmt, **options), 1 / len(grads))
    wanted = expected(grads, Format(*fmt), factor=1 / len(grads), mode=options.get("accumulate", "float32"))["w"]
    for rank, out in enumerate(outs):
        assert_same_bits(out["w"], wanted, f"rank {rank}")
    return outs[0]["w"]


def exact(per_rank: list[np.ndarray]) -> np.ndarray:
    return np.mean([x.astype(np.float64) for x in per_rank], axis=0)


def random(n_ranks: int, low: float, high: float, n: int = 1025, seed: int = 0) -> list[np.ndarray]:
    """Signed values with magnitudes spread evenly in the logarithm."""
    rng = np.random.default_rng(seed)
    values = np.exp(rng.uniform(np.log(low), np.log(high), (n_ranks, n))) * rng.choice([-1, 1], (n_ranks, n))
    return list(values.astype(np.float32))


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_smallest_float_survives(fmt, n_ranks):
    """All 1e-45: the sum of N is exact, and so the average is 1e-45 again."""
    result = average([np.full(9, LEAST, np.float32)] * n_ranks, fmt)
    np.testing.assert_array_equal(result, np.full(9, LEAST, np.float32))


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_denormals_only(fmt, n_ranks):
    """Relative error of normal numbers, down to the spacing of denormals, which no float32 can beat."""
    grads = random(n_ranks, 1e-43, 1e-39)
    result = average(grads, fmt)
    largest = max(np.abs(x).max() for x in grads)
    unit = 2.0 ** -fmt[1]  # of the largest binade: two roundings, sums of N values
    assert np.all(np.abs(result - exact(grads)) <= 2 * unit * largest + LEAST)
    assert np.any(result)


@pytest.mark.parametrize("flush", [0, 1])
def test_denormals_do_not_depend_on_flush_to_zero(flush):
    """TensorFlow's threads and some users set it; the oracle knows nothing of it."""
    before = library().aps_set_flush_to_zero(flush)
    try:
        grads = [{"w": x} for x in random(3, 1e-43, 1e-39)]
        outs = reduce_all(grads, Options(4, 3), 1 / 3)
    finally:
        library().aps_set_flush_to_zero(before)
    wanted = expected(grads, Format(4, 3), factor=1 / 3)["w"]
    for out in outs:
        assert_same_bits(out["w"], wanted)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_largest_floats_average_without_overflow(fmt, n_ranks):
    """3e38 on all ranks: the sum is beyond float32, the average is not, and no Inf appears on the way."""
    result = average([np.full(9, 3e38, np.float32)] * n_ranks, fmt)
    if fmt == (3, 0):  # one bit of mantissa rounds 1.76 * 2^127 up to 2^128, which no float32 holds
        np.testing.assert_array_equal(result, np.full(9, np.inf, np.float32))
        return
    assert np.all(np.isfinite(result))
    assert np.all(np.abs(result / 3e38 - 1) <= 2.0 ** -fmt[1])


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_sum_beyond_float32_is_infinite(n_ranks):
    """hvd.Sum of 3e38: Inf, as fp32 itself would give, never a wrong finite number."""
    grads = [{"w": np.full(9, 3e38, np.float32)} for _ in range(n_ranks)]
    for out in reduce_all(grads, Options(4, 3), 1.0):
        np.testing.assert_array_equal(out["w"], np.full(9, np.inf, np.float32))


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_outlier_among_tiny_values(fmt, n_ranks):
    """The outlier keeps its relative precision; values below its reach become zero, never anything larger."""
    grads = random(n_ranks, 1e-30, 1e-29)
    grads[0][500] = 1e30
    result = average(grads, fmt)
    assert abs(result[500] / (1e30 / n_ranks) - 1) <= 2.0 ** -fmt[1]
    rest = np.delete(result, 500)
    if fmt == (8, 7):  # 2^-126 below 2^127: 60 decades are within reach
        np.testing.assert_allclose(rest, np.delete(exact(grads), 500), atol=1e-29 * 2.0**-6, rtol=0)
    else:
        np.testing.assert_array_equal(rest, np.zeros(1024, np.float32))


def test_outlier_does_not_reach_other_layers():
    """Every layer has an exponent of its own: the tiny layer beside the outlier's keeps its precision."""
    tiny = random(3, 1e-30, 1e-29)
    grads = [{"big": np.full(100, 1e30, np.float32), "tiny": x} for x in tiny]
    outs = reduce_all(grads, Options(4, 3), 1 / 3)
    wanted = expected(grads, Format(4, 3), factor=1 / 3)
    for out in outs:
        assert_same_bits(out["tiny"], wanted["tiny"])
    error = np.linalg.norm(outs[0]["tiny"] - exact(tiny)) / np.linalg.norm(exact(tiny))
    assert error < 0.1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_one_bad_element_of_a_large_layer(bad, n_ranks):
    """One NaN or Inf among 10^6 on one rank makes the whole layer NaN on all ranks, and only that layer."""
    large = [np.ones(1_000_003, np.float32) for _ in range(n_ranks)]
    large[-1][777_777] = bad
    grads = [{"large": x, "other": np.full(100, 2.0, np.float32)} for x in large]
    for out in reduce_all(grads, Options(4, 3), 1 / n_ranks):
        assert np.all(np.isnan(out["large"]))
        np.testing.assert_array_equal(out["other"], np.full(100, 2.0, np.float32))


def test_one_nan_in_a_hundred_million():
    """The issue's size, in one scan: the exponent that all ranks would share says that the layer is not finite."""
    x = np.zeros(100_000_000, np.float32)
    table = np.zeros(1, SEGMENT)
    table["data"], table["n"], table["flags"] = x.ctypes.data, x.size, SPECIALS
    table["exp_bits"], table["man_bits"] = 4, 3
    CpuKernels().scan(table)
    assert table["exponent"][0] != EXP_NONFINITE
    x[87_654_321] = np.nan
    CpuKernels().scan(table)
    assert table["exponent"][0] == EXP_NONFINITE


@pytest.mark.parametrize("options", [{"accumulate": "kahan"}, {"accumulate": "format"}], ids=str)
def test_low_precision_sums_at_the_edges(options):
    for low, high in ((1e-44, 1e-40), (1e36, 3e38)):
        result = average(random(3, low, high), (4, 3), **options)
        assert np.all(np.isfinite(result))


def test_stochastic_rounding_at_the_edges_is_repeatable_and_finite():
    for low, high in ((1e-44, 1e-40), (1e36, 3e38)):
        grads = [{"w": x} for x in random(3, low, high)]
        runs = [reduce_all(grads, Options(4, 3, rounding="stochastic", seed=seed), 1 / 3) for seed in (1, 1, 2)]
        assert_same_bits(runs[0][0]["w"], runs[1][0]["w"])
        assert np.any(runs[0][0]["w"] != runs[2][0]["w"])
        for out in runs[0]:
            assert np.all(np.isfinite(out["w"]))
            assert_same_bits(out["w"], runs[0][0]["w"])


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 5}, {"error_feedback": True}], ids=str)
def test_same_exchange_twice_gives_the_same_bits(options):
    grads = [{"a": x, "b": x[:7].copy()} for x in random(3, 1e-6, 1.0)]
    first, second = (reduce_all(grads, Options(4, 3, **options), 1 / 3) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name in one:
            assert_same_bits(one[name], other[name])


def test_error_feedback_forgets_a_bad_step():
    """A NaN in one step must not stay in the residuals: the next step is finite again."""
    options = Options(4, 3, error_feedback=True)
    exchanges = None
    for step in range(3):
        xs = [np.linspace(0.1, 1, 9, dtype=np.float32) for _ in range(2)]
        if step == 1:
            xs[0][4] = np.nan
        outs = [np.empty_like(x) for x in xs]
        layers = [
            [Layer("w", x.shape, 0, x.ctypes.data, out.ctypes.data, 0.5, (x, out))]
            for x, out in zip(xs, outs, strict=True)
        ]
        exchanges = local_allreduce(layers, options, CpuKernels(), exchanges)
        assert np.all(np.isnan(outs[0])) if step == 1 else np.all(np.isfinite(outs[0]))
