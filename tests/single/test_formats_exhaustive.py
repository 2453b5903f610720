"""FloatFormat at every point: zero tolerance against ml_dtypes, NumPy's float16 and tests/reference.py.

Every code is decoded; every float16 and every bfloat16 bit pattern is encoded and quantized, and so are all
midpoints between neighbouring values with their neighbours, and ten million random float32 bit patterns per
format.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference

from horovod_aps.formats import FloatFormat

N_RANDOM = 10_000_000

KNOWN: dict[str, tuple[FloatFormat, Any]] = {
    "float8_e4m3": (FloatFormat(4, 3), ml_dtypes.float8_e4m3),
    "float8_e5m2": (FloatFormat(5, 2), ml_dtypes.float8_e5m2),
    "float8_e3m4": (FloatFormat(3, 4), ml_dtypes.float8_e3m4),
    "float4_e2m1fn": (FloatFormat(2, 1, specials=False), ml_dtypes.float4_e2m1fn),
    "float6_e2m3fn": (FloatFormat(2, 3, specials=False), ml_dtypes.float6_e2m3fn),
    "float6_e3m2fn": (FloatFormat(3, 2, specials=False), ml_dtypes.float6_e3m2fn),
    "bfloat16": (FloatFormat(8, 7), ml_dtypes.bfloat16),
    "float16": (FloatFormat(5, 10), np.float16),
}
ALL_FORMATS = [
    FloatFormat(e, m, specials)
    for specials in (True, False)
    for e in range(1, 9)
    for m in range(16 - e)
    if not (specials and (e, m) == (1, 0))
]
OTHERS = [fmt for fmt in ALL_FORMATS if fmt not in [known for known, _ in KNOWN.values()]]
PATTERNS_16 = np.arange(2**16, dtype=np.uint16)
SOURCES = [np.float16, ml_dtypes.bfloat16]

# The conversions of the oracle warn when they overflow or meet a NaN, which here they do on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_same_floats(actual: Any, expected: Any) -> None:
    """Equal bits, where one NaN is as good as another of the same sign."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    differ = actual.view(bits) != expected.view(bits)
    both_nan = np.isnan(actual[differ]) & np.isnan(expected[differ])
    wrong = ~both_nan | (np.signbit(actual[differ]) != np.signbit(expected[differ]))
    assert not wrong.any(), f"{wrong.sum()} wrong, first {actual[differ][wrong][:3]} for {expected[differ][wrong][:3]}"


def assert_same_codes(fmt: FloatFormat, actual: Any, expected: Any) -> None:
    """Equal codes, where one NaN code is as good as another of the same sign."""
    assert actual.dtype == expected.dtype == fmt.code_dtype and actual.shape == expected.shape
    differ = actual != expected
    if differ.any():
        mine, theirs = actual[differ], expected[differ]
        both_nan = np.isnan(reference.decode(mine, fmt)) & np.isnan(reference.decode(theirs, fmt))
        wrong = ~both_nan | (mine >> (fmt.bits - 1) != theirs >> (fmt.bits - 1))
        assert not wrong.any(), f"{fmt}: {wrong.sum()} wrong, first {mine[wrong][:3]} for {theirs[wrong][:3]}"


@pytest.fixture(scope="module")
def random_float32() -> np.ndarray[Any, Any]:
    """Ten million uniform bit patterns: every exponent is as likely as any other; 1 in 128 is Inf or NaN."""
    return np.random.default_rng(20240229).integers(0, 2**32, N_RANDOM, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("name", KNOWN)
def test_decode_every_code_as_ml_dtypes(name: str) -> None:
    fmt, dtype = KNOWN[name]
    codes = np.arange(2**fmt.bits).astype(fmt.code_dtype)
    assert_same_floats(fmt.decode(codes), codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize("source", SOURCES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", KNOWN)
def test_encode_every_16_bit_float_as_ml_dtypes(name: str, source: Any) -> None:
    fmt, dtype = KNOWN[name]
    x = PATTERNS_16.view(source)
    # float16 and bfloat16 convert to each other by way of float32, which holds both exactly.
    expected = x.astype(np.float32).astype(dtype)
    assert_same_codes(fmt, fmt.encode(x), expected.view(fmt.code_dtype))
    assert_same_floats(fmt.quantize(x), reference.cast(expected.astype(np.float64), source))


@pytest.mark.parametrize("name", KNOWN)
def test_encode_random_float32_as_ml_dtypes(name: str, random_float32: np.ndarray[Any, Any]) -> None:
    fmt, dtype = KNOWN[name]
    expected = random_float32.astype(dtype)
    assert_same_codes(fmt, fmt.encode(random_float32), expected.view(fmt.code_dtype))
    assert_same_floats(fmt.quantize(random_float32), expected.astype(np.float32))


@pytest.mark.parametrize("fmt", OTHERS, ids=str)
def test_decode_every_code_as_reference(fmt: FloatFormat) -> None:
    codes = np.arange(2**fmt.bits).astype(fmt.code_dtype)
    assert_same_floats(fmt.decode(codes), reference.cast(reference.decode(codes, fmt), np.float32))


@pytest.mark.parametrize("fmt", OTHERS, ids=str)
def test_encode_every_16_bit_float_as_reference(fmt: FloatFormat) -> None:
    for source in SOURCES:
        x = PATTERNS_16.view(source)
        assert_same_codes(fmt, fmt.encode(x), reference.encode(x, fmt))
        assert_same_floats(fmt.quantize(x), reference.cast(reference.quantize(x, fmt), source))


def critical_points(fmt: FloatFormat) -> np.ndarray[Any, Any]:
    """Every value of the format, every midpoint, where it overflows, both zeros, the ends of float32."""
    values = reference.decode(np.arange(fmt.max_code + 1), fmt)
    above = values[-1] + reference.top_spacing(fmt) * np.array([0.5, 1.0, 1.5, 2.0])
    ends = np.array([2.0**-149, 3 * 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 2.0**127 * (2 - 2.0**-23)])
    points = np.concatenate((values, (values[1:] + values[:-1]) / 2, above, ends, [np.inf, 0.0]))
    return np.concatenate((points, -points))


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_encode_halfway_points_and_neighbours_as_reference(fmt: FloatFormat) -> None:
    points = critical_points(fmt)
    for dtype in (np.float32, np.float64):
        x = reference.cast(points, dtype)
        near = np.concatenate((x, np.nextafter(x, dtype(np.inf)), np.nextafter(x, dtype(-np.inf))))
        assert_same_codes(fmt, fmt.encode(near), reference.encode(near, fmt))
        assert_same_floats(fmt.quantize(near), reference.cast(reference.quantize(near, fmt), dtype))


@pytest.mark.parametrize(
    "fmt",
    [
        FloatFormat(1, 15),
        FloatFormat(2, 20, specials=False),
        FloatFormat(5, 11),
        FloatFormat(6, 17, specials=False),
        FloatFormat(7, 23),
        FloatFormat(8, 16, specials=False),
        FloatFormat(8, 22),
        FloatFormat(8, 23),
    ],
    ids=str,
)
def test_encode_wide_formats_as_reference(fmt: FloatFormat, random_float32: np.ndarray[Any, Any]) -> None:
    narrow = random_float32[:200_000]
    # Products of float32 numbers, which no float32 holds: a second rounding on the way would show.
    wide = narrow.astype(np.float64) * (1 + 2.0**-30 * np.arange(narrow.size))
    for x in (narrow, wide):
        assert_same_codes(fmt, fmt.encode(x), reference.encode(x, fmt))
    codes = fmt.encode(narrow)
    assert_same_floats(fmt.decode(codes), reference.cast(reference.decode(codes, fmt), np.float32))


class SortedPatterns:
    """Random float32 patterns in an order that makes the expected codes of any format cheap: sorted by
    magnitude."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        bits = x.view(np.uint32)
        rotated = np.sort(bits << np.uint32(1) | bits >> np.uint32(31))  # magnitude above, sign below
        self.negative = (rotated & np.uint32(1)).astype(bool)
        self.x = (rotated >> np.uint32(1) | rotated << np.uint32(31)).view(np.float32)
        self.n_finite = int(np.searchsorted(rotated, np.uint32(0xFF000000)))
        self.magnitudes = np.abs(self.x[: self.n_finite]).astype(np.float64)

    def expected(self, fmt: FloatFormat) -> np.ndarray[Any, Any]:
        sign = self.negative.astype(fmt.code_dtype) << fmt.code_dtype.type(fmt.bits - 1)
        finite = reference.nearest_codes_sorted(self.magnitudes, fmt) | sign[: self.n_finite]
        return np.concatenate((finite, reference.encode(self.x[self.n_finite :], fmt)))


@pytest.fixture(scope="module")
def sorted_patterns(random_float32: np.ndarray[Any, Any]) -> SortedPatterns:
    return SortedPatterns(random_float32)


def interleave(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bring far apart elements of a sorted array next to each other, so that vector lanes hold a mixture."""
    return np.ascontiguousarray(x.reshape(32, -1).T).reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", OTHERS, ids=str)
def test_encode_random_float32_as_midpoint_reference(fmt: FloatFormat, sorted_patterns: SortedPatterns) -> None:
    expected = interleave(sorted_patterns.expected(fmt))
    actual = fmt.encode(interleave(sorted_patterns.x))
    assert actual.dtype == expected.dtype and np.array_equal(actual, expected)


@pytest.mark.parametrize("fmt", ALL_FORMATS[::7] + [FloatFormat(1, 1), FloatFormat(1, 0, specials=False)], ids=str)
def test_reference_definitions_agree(fmt: FloatFormat, sorted_patterns: SortedPatterns) -> None:
    """The oracles themselves: by significands, by midpoints, and by fractions for one number at a time."""
    step = slice(None, None, 97)
    np.testing.assert_array_equal(sorted_patterns.expected(fmt)[step], reference.encode(sorted_patterns.x[step], fmt))
    x = np.concatenate((sorted_patterns.x[::50021], critical_points(fmt)[:: max(1, fmt.max_code // 50)]))
    one_by_one = [reference.quantize_exact(float(v), fmt.exp_bits, fmt.man_bits, fmt.specials) for v in x]
    assert_same_floats(reference.quantize(x, fmt), np.array(one_by_one))
