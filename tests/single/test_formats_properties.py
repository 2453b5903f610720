"""Laws that every format obeys, searched for counterexamples by hypothesis. The oracle is the law itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from horovod_aps.formats import FloatFormat

settings.register_profile("horovod_aps", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("horovod_aps")


def is_format(bits: tuple[int, int, bool]) -> bool:
    return bits != (1, 0, True)


formats = (
    st.tuples(st.integers(1, 8), st.integers(0, 23), st.booleans())
    .filter(is_format)
    .map(lambda args: FloatFormat(*args))
)
float32s = st.floats(width=32, allow_nan=False)
float64s = st.floats(allow_nan=False)
any_float32 = st.integers(0, 2**32 - 1).map(lambda bits: float(np.uint32(bits).view(np.float32)))


def array(values: Any, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.atleast_1d(np.array(values, dtype))


@given(formats, st.lists(float32s, min_size=2, max_size=20))
def test_quantize_is_monotone(fmt: FloatFormat, values: list[float]) -> None:
    result = fmt.quantize(np.sort(array(values)))
    assert np.all(result[:-1] <= result[1:])


@given(formats, st.lists(float64s, min_size=2, max_size=20))
def test_quantize_is_monotone_in_float64(fmt: FloatFormat, values: list[float]) -> None:
    result = fmt.quantize(np.sort(array(values, np.float64)))
    assert np.all(result[:-1] <= result[1:])


@given(formats, st.lists(any_float32, max_size=20))
def test_encode_is_sign_symmetric(fmt: FloatFormat, values: list[float]) -> None:
    x = array(values)
    sign = fmt.code_dtype.type(1 << (fmt.bits - 1))
    np.testing.assert_array_equal(fmt.encode(-x), fmt.encode(x) ^ sign)


@given(formats, st.lists(any_float32, max_size=20), st.sampled_from([np.float32, np.float64]))
def test_quantize_is_idempotent(fmt: FloatFormat, values: list[float], dtype: Any) -> None:
    once = fmt.quantize(array(values, dtype))
    np.testing.assert_array_equal(fmt.quantize(once), once)
    np.testing.assert_array_equal(np.signbit(fmt.quantize(once)), np.signbit(once))


@given(formats, st.lists(any_float32, max_size=20), st.integers(0, 2**64 - 1))
def test_stochastic_rounding_keeps_values_of_the_format(fmt: FloatFormat, values: list[float], seed: int) -> None:
    once = fmt.quantize(array(values))
    again = fmt.quantize(once, rounding="stochastic", seed=seed)
    if not fmt.specials or fmt.man_bits:  # NaN of these formats is not a value to keep
        once, again = once[~np.isnan(once)], again[~np.isnan(once)]
    np.testing.assert_array_equal(again, once)


@given(formats, st.lists(any_float32, max_size=20))
def test_quantize_is_decode_of_encode(fmt: FloatFormat, values: list[float]) -> None:
    x = array(values)
    np.testing.assert_array_equal(fmt.quantize(x), fmt.decode(fmt.encode(x)))


@given(formats, st.data())
def test_quantize_is_exact_under_power_of_two_scaling(fmt: FloatFormat, data: st.DataObject) -> None:
    lowest, highest = 1 - fmt.bias, fmt.max_exponent
    assume(lowest <= highest)
    before = data.draw(st.integers(lowest, highest), label="exponent before")
    after = data.draw(st.integers(lowest, highest), label="exponent after")
    significand = data.draw(st.floats(1.0, 2.0 - fmt.epsilon), label="significand")
    x = array([math.ldexp(significand, before), -math.ldexp(significand, before)], np.float64)
    scaled_first = fmt.quantize(np.ldexp(x, after - before))
    np.testing.assert_array_equal(scaled_first, np.ldexp(fmt.quantize(x), after - before))


def same_as_exact(fmt: FloatFormat, value: float) -> bool:
    expected = reference.quantize_exact(value, fmt.exp_bits, fmt.man_bits, fmt.specials)
    actual = float(fmt.quantize(array(value, np.float64))[0])
    return (actual, math.copysign(1, actual)) == (expected, math.copysign(1, expected))


@given(formats, float64s)
def test_quantize_is_nearest_in_exact_arithmetic(fmt: FloatFormat, value: float) -> None:
    assert same_as_exact(fmt, value)


@given(formats, st.data())
def test_quantize_is_nearest_around_midpoints(fmt: FloatFormat, data: st.DataObject) -> None:
    code = data.draw(st.integers(0, fmt.max_code) | st.just(fmt.max_code), label="code below")
    below = float(reference.decode(np.array(code), fmt))
    above = float(reference.decode(np.array(code + 1), fmt)) if code < fmt.max_code else 2.0 ** (fmt.max_exponent + 1)
    midpoint = (below + above) / 2
    for value in (midpoint, math.nextafter(midpoint, math.inf), math.nextafter(midpoint, 0.0)):
        assert same_as_exact(fmt, value) and same_as_exact(fmt, -value)


@given(formats, st.data())
def test_encode_inverts_decode(fmt: FloatFormat, data: st.DataObject) -> None:
    assume(fmt.exp_bits < 8 or fmt.specials)  # else float32 cannot hold the top binade
    codes = data.draw(st.lists(st.integers(0, fmt.max_code), max_size=20), label="codes")
    signed = np.array(codes + [c | 1 << (fmt.bits - 1) for c in codes], dtype=np.uint32).astype(fmt.code_dtype)
    np.testing.assert_array_equal(fmt.encode(fmt.decode(signed)), signed)


def format_of_width(bits: int) -> FloatFormat:
    exp_bits = min(8, bits - 1)
    return FloatFormat(exp_bits, bits - 1 - exp_bits, specials=False)


@pytest.mark.parametrize("bits", range(2, 33))
@given(data=st.data())
@settings(max_examples=40)
def test_unpack_inverts_pack_for_every_width(bits: int, data: st.DataObject) -> None:
    fmt = format_of_width(bits)
    n = data.draw(st.integers(0, 70), label="n")
    codes = np.array(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=n, max_size=n)), dtype=fmt.code_dtype)
    packed = fmt.pack(codes)
    np.testing.assert_array_equal(packed, reference.pack(codes, bits))
    unpacked = fmt.unpack(packed, n)
    assert unpacked.dtype == fmt.code_dtype
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1023, 1025, 100_003])
@pytest.mark.parametrize("bits", range(2, 33))
def test_unpack_inverts_pack_for_every_size(bits: int, n: int) -> None:
    fmt = format_of_width(bits)
    codes = np.random.default_rng(bits * 1000 + n).integers(0, 2**bits, n, dtype=np.uint64).astype(fmt.code_dtype)
    packed = fmt.pack(codes)
    assert packed.dtype == np.uint8 and packed.size == -(-n * bits // 8)
    if n <= 1025:
        np.testing.assert_array_equal(packed, reference.pack(codes, bits))
    np.testing.assert_array_equal(fmt.unpack(packed, n), codes)
