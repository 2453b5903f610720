"""FloatFormat: limits, arguments, kinds of arrays, special values, stochastic rounding, sizes.

Oracles: published limits of known formats, ml_dtypes and NumPy's finfo, tests/reference.py, exact
probabilities.
"""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
import torch

from horovod_aps.formats import FloatFormat

E4M3 = FloatFormat(4, 3)
SIZES = [0, 1, 7, 8, 9, 1023, 1025]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
TORCH_DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def sample(n: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray[Any, Any]:
    """Numbers over twelve binades around one, with both signs."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * np.exp2(rng.integers(-6, 6, n))).astype(dtype)


# --------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (FloatFormat(4, 3), ml_dtypes.float8_e4m3),
        (FloatFormat(5, 2), ml_dtypes.float8_e5m2),
        (FloatFormat(3, 4), ml_dtypes.float8_e3m4),
        (FloatFormat(2, 1, specials=False), ml_dtypes.float4_e2m1fn),
        (FloatFormat(2, 3, specials=False), ml_dtypes.float6_e2m3fn),
        (FloatFormat(3, 2, specials=False), ml_dtypes.float6_e3m2fn),
        (FloatFormat(8, 7), ml_dtypes.bfloat16),
        (FloatFormat(5, 10), np.float16),
        (FloatFormat(8, 23), np.float32),
    ],
    ids=str,
)
def test_limits_as_finfo(fmt: FloatFormat, dtype: Any) -> None:
    info = ml_dtypes.finfo(dtype)
    assert fmt.bits == info.bits
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal)
    assert fmt.epsilon == float(info.eps)
    assert fmt.max_exponent == math.floor(math.log2(float(info.max)))


def test_limits_as_published() -> None:
    assert FloatFormat(4, 3).max == 240 and FloatFormat(5, 2).max == 57344
    assert FloatFormat(2, 1, specials=False).max == 6 and FloatFormat(3, 2, specials=False).max == 28
    assert FloatFormat(5, 2).binades == 32  # Micikevicius et al., FP8 formats for deep learning, table 1
    assert (E4M3.bias, E4M3.normal_binades, E4M3.binades) == (7, 14, 17)


@pytest.mark.parametrize("specials", [True, False])
@pytest.mark.parametrize("e", range(1, 9))
@pytest.mark.parametrize("m", [0, 1, 2, 3, 7])
def test_limits_as_all_decoded_values(e: int, m: int, specials: bool) -> None:
    if (e, m, specials) == (1, 0, True):
        with pytest.raises(ValueError, match=r"m must be in 1\.\.23 for e=1 with specials=True, got 0"):
            FloatFormat(e, m, specials)
        return
    fmt = FloatFormat(e, m, specials)
    values = reference.decode(np.arange(2 ** (fmt.bits - 1)), fmt)
    finite = values[np.isfinite(values)]
    assert fmt.max == finite.max() and fmt.min_subnormal == finite[finite > 0].min()
    assert fmt.max_code == finite.size - 1
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    exponents = np.unique(np.frexp(finite[finite > 0])[1])
    assert fmt.binades == exponents.max() - exponents.min() + 1
    full = finite[finite >= fmt.min_normal]
    assert fmt.normal_binades == np.unique(np.frexp(full)[1]).size


# ---------------------------------------------------------------------------------------- object, arguments


def test_format_is_a_value() -> None:
    assert FloatFormat(e=4, m=3) == E4M3 and hash(FloatFormat(np.int64(4), np.uint8(3))) == hash(E4M3)
    assert FloatFormat(4, 3, specials=False) != E4M3 != FloatFormat(3, 4)
    assert len({FloatFormat(4, 3), E4M3, FloatFormat(5, 2)}) == 2
    with pytest.raises(AttributeError):
        E4M3.man_bits = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(E4M3)) == copy.deepcopy(E4M3) == E4M3
    assert type(FloatFormat(np.int64(4), np.uint8(3)).exp_bits) is int


@pytest.mark.parametrize("fmt", [FloatFormat(4, 3), FloatFormat(8, 23), FloatFormat(2, 1, specials=False)], ids=str)
def test_names_round_trip(fmt: FloatFormat) -> None:
    assert FloatFormat.parse(str(fmt)) == fmt
    assert eval(repr(fmt)) == fmt
    assert str(FloatFormat(2, 1, specials=False)) == "e2m1-finite"
    assert repr(FloatFormat(2, 1, specials=False)) == "FloatFormat(e=2, m=1, specials=False)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 3), ValueError, r"FloatFormat: e must be in 1\.\.8, got 0"),
        ((9, 3), ValueError, r"FloatFormat: e must be in 1\.\.8, got 9"),
        ((4, -1), ValueError, r"FloatFormat: m must be in 0\.\.23, got -1"),
        ((4, 24), ValueError, r"FloatFormat: m must be in 0\.\.23, got 24"),
        ((4.0, 3), TypeError, r"FloatFormat: e must be an integer in 1\.\.8, got 4\.0"),
        ((4, "3"), TypeError, r"FloatFormat: m must be an integer in 0\.\.23, got '3'"),
        ((True, 3), TypeError, r"FloatFormat: e must be an integer in 1\.\.8, got True"),
        ((4, None), TypeError, r"FloatFormat: m must be an integer in 0\.\.23, got None"),
        ((4, 3, 1), TypeError, r"FloatFormat: specials must be True or False, got 1"),
    ],
)
def test_constructor_names_bad_argument(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FloatFormat(*arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: E4M3.quantize(x, rounding="up"),
            ValueError,
            "rounding must be 'nearest' or 'stochastic', got 'up'",
        ),
        (lambda x: E4M3.encode(x, "stochastic", seed=-1), ValueError, r"seed must be in 0\.\..*, got -1"),
        (
            lambda x: E4M3.encode(x, "stochastic", seed=0.5),
            TypeError,
            r"seed must be an integer in .*, got 0\.5",
        ),
        (
            lambda x: E4M3.quantize(x.astype(np.int32)),
            TypeError,
            "x must be float32, .* or bfloat16, got int32",
        ),
        (lambda x: E4M3.quantize(x.astype(np.complex64)), TypeError, "x must be float32, .*, got complex64"),
        (lambda x: E4M3.quantize(torch.arange(3)), TypeError, "x must be float32, .*, got int64"),
        (lambda x: E4M3.quantize(torch.eye(3).to_sparse()), TypeError, "must be dense, got one with layout"),
        (lambda x: E4M3.decode(x), TypeError, "codes must be integers, got float32"),
        (
            lambda x: E4M3.decode(np.array([3, 256])),
            ValueError,
            r"codes must be in 0\.\.255 for e4m3, got 256",
        ),
        (
            lambda x: FloatFormat(2, 1).pack(np.array([-1])),
            ValueError,
            r"codes must be in 0\.\.15 for e2m1, got -1",
        ),
        (lambda x: E4M3.unpack(x, 3), TypeError, "packed must be bytes or uint8, got float32"),
        (lambda x: E4M3.unpack(b"abc", 4), ValueError, "at least 4 bytes for n=4 codes of 8 bits, got 3"),
        (lambda x: E4M3.unpack(b"abc", -1), ValueError, r"n must be in 0\.\..*, got -1"),
        (lambda x: E4M3.unpack(b"abc", 1.0), TypeError, r"n must be an integer in .*, got 1\.0"),
        (
            lambda x: FloatFormat.parse("fp8"),
            ValueError,
            "text must look like 'e4m3' or 'e2m1-finite', got 'fp8'",
        ),
        (lambda x: FloatFormat.parse("e9m3"), ValueError, r"e must be in 1\.\.8, got 9"),
        (lambda x: FloatFormat.parse(8), TypeError, "text must be a string such as 'e4m3', got 8"),
    ],
)
def test_methods_name_bad_argument(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(sample(4))


# ------------------------------------------------------------------------------------------ kinds of arrays


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
def test_numpy_in_numpy_out(dtype: Any, n: int) -> None:
    x = sample(n, dtype)
    before = x.copy()
    result, codes = E4M3.quantize(x), E4M3.encode(x)
    assert result.dtype == x.dtype and result.shape == x.shape and not np.shares_memory(result, x)
    assert codes.dtype == np.uint8 and codes.shape == x.shape
    np.testing.assert_array_equal(result, reference.cast(reference.quantize(x, E4M3), dtype))
    np.testing.assert_array_equal(codes, reference.encode(x, E4M3))
    decoded = E4M3.decode(codes)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, reference.decode(codes, E4M3))
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_in_torch_out(dtype: torch.dtype, n: int) -> None:
    x = torch.from_numpy(sample(n)).to(dtype)
    before = x.clone()
    result, codes = E4M3.quantize(x), E4M3.encode(x)
    assert result.dtype == dtype and result.shape == x.shape and result.device == x.device
    assert codes.dtype == torch.uint8 and codes.shape == x.shape
    values = x.to(torch.float64).numpy()
    np.testing.assert_array_equal(result.to(torch.float64).numpy(), reference.quantize(values, E4M3))
    np.testing.assert_array_equal(codes.numpy(), reference.encode(values, E4M3))
    assert torch.equal(E4M3.decode(codes).to(dtype), result) and E4M3.decode(codes).dtype == torch.float32
    packed = E4M3.pack(codes)
    assert isinstance(packed, torch.Tensor) and torch.equal(E4M3.unpack(packed, n), codes)
    assert torch.equal(x, before)


def test_torch_codes_of_wide_formats() -> None:
    x = torch.from_numpy(sample(100))
    for fmt, dtype in ((FloatFormat(5, 10), torch.uint16), (FloatFormat(8, 23), torch.uint32)):
        codes = fmt.encode(x)
        assert codes.dtype == dtype
        np.testing.assert_array_equal(codes.numpy(), reference.encode(x.numpy(), fmt))
        assert torch.equal(fmt.decode(fmt.unpack(fmt.pack(codes), 100)), fmt.quantize(x))


def test_torch_tensor_that_requires_grad() -> None:
    x = torch.from_numpy(sample(10)).requires_grad_()
    assert not E4M3.quantize(x).requires_grad and x.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
def test_non_contiguous_arrays(dtype: Any) -> None:
    base = sample(24 * 10, dtype).reshape(24, 10)
    for view in (
        base[::3, ::-2],
        base.T,
        base[:, :0],
        np.broadcast_to(base[0], (3, 10)),
        base[5:6, 2].reshape(()),
    ):
        result = E4M3.quantize(view)
        assert result.shape == view.shape and result.dtype == view.dtype
        np.testing.assert_array_equal(result, E4M3.quantize(view.copy()))
        codes = E4M3.encode(view)
        np.testing.assert_array_equal(
            E4M3.decode(codes[::-1] if codes.ndim else codes),
            E4M3.decode(codes)[::-1] if codes.ndim else E4M3.decode(codes),
        )


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_non_contiguous_tensors(dtype: torch.dtype) -> None:
    base = torch.from_numpy(sample(24 * 10)).to(dtype).reshape(24, 10)
    for view in (base[::3, ::2], base.t(), base[:, :0], base[0].expand(3, 10), base[5, 2]):
        result = E4M3.quantize(view)
        assert result.shape == view.shape and torch.equal(result, E4M3.quantize(view.clone().contiguous()))


def test_byte_swapped_and_read_only_arrays() -> None:
    x = sample(9).astype(">f4")
    x.flags.writeable = False
    result = E4M3.quantize(x)
    assert result.dtype == np.dtype(">f4")
    np.testing.assert_array_equal(result, reference.quantize(x, E4M3).astype(np.float32))


def test_codes_of_any_integer_type() -> None:
    fmt = FloatFormat(5, 6)
    codes = np.arange(2**fmt.bits)
    for dtype in (np.int16, np.uint16, np.int64, np.uint64):
        np.testing.assert_array_equal(fmt.decode(codes.astype(dtype)), reference.decode(codes, fmt).astype(np.float32))
    np.testing.assert_array_equal(fmt.pack(codes), reference.pack(codes, fmt.bits))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_unpack_takes_bytes(kind: Any) -> None:
    fmt = FloatFormat(2, 3)
    codes = np.arange(50, dtype=np.uint8)
    np.testing.assert_array_equal(fmt.unpack(kind(fmt.pack(codes).tobytes()), 50), codes)
    np.testing.assert_array_equal(fmt.unpack(kind(fmt.pack(codes).tobytes() + b"tail"), 11), codes[:11])


def test_formats_import_no_framework() -> None:
    code = (
        "import sys, numpy; from horovod_aps.formats import FloatFormat; "
        "FloatFormat(4, 3).quantize(numpy.ones(3, numpy.float32)); "
        "found = [m for m in ('torch', 'tensorflow', 'horovod', 'ml_dtypes', 'cupy') if m in sys.modules]; "
        "sys.exit(' '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
def test_special_values_with_specials(dtype: Any) -> None:
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, -0.0, 0.0], dtype)
    result = E4M3.quantize(x)
    assert np.isposinf(result[0]) and np.isneginf(result[1]) and np.isnan(result[2:4]).all() and not result[4:].any()
    np.testing.assert_array_equal(np.signbit(result), np.signbit(x))
    np.testing.assert_array_equal(E4M3.encode(x), [0x78, 0xF8, 0x7C, 0xFC, 0x80, 0x00])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
def test_special_values_without_specials(dtype: Any) -> None:
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, -0.0, 0.0, 100, -100], dtype)
    fmt = FloatFormat(2, 1, specials=False)
    # ml_dtypes' float4_e2m1fn: Inf saturates, NaN becomes the zero of the other sign.
    expected = x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(fmt.encode(x), expected.view(np.uint8))
    np.testing.assert_array_equal(fmt.quantize(x).astype(np.float32), [6, -6, 0, 0, 0, 0, 6, -6])


def test_nan_without_mantissa_stays_non_finite() -> None:
    fmt = FloatFormat(5, 0)
    result = fmt.quantize(np.array([np.nan, -np.nan, np.inf], np.float32))
    np.testing.assert_array_equal(result, np.array([np.inf, -np.inf, np.inf], np.float32))


def test_top_binade_rounds_up_to_inf_or_saturates() -> None:
    x = np.array([240, 247.99, 248, 249, 1e30], np.float32)  # 248 is halfway to 256, and even
    np.testing.assert_array_equal(E4M3.quantize(x), [240, 240, np.inf, np.inf, np.inf])
    finite = FloatFormat(4, 3, specials=False)
    np.testing.assert_array_equal(finite.quantize(2 * x), [480, 480, 480, 480, 480])


def test_ties_go_to_even_and_sticky_bits_count() -> None:
    least = E4M3.min_subnormal
    x = np.array([1 + 1 / 16, 1 + 3 / 16, 0.5 * least, 1.5 * least, 2.5 * least])
    np.testing.assert_array_equal(E4M3.quantize(x), [1, 1.25, 0, 2 * least, 2 * least])
    above, below = np.nextafter(x, np.inf), np.nextafter(x, 0)
    np.testing.assert_array_equal(E4M3.quantize(above), [1.125, 1.25, least, 2 * least, 3 * least])
    np.testing.assert_array_equal(E4M3.quantize(below), [1, 1.125, 0, least, 2 * least])


def test_ties_without_mantissa_go_to_the_larger_magnitude() -> None:
    fmt = FloatFormat(5, 0)
    x = np.array([1.5, 3.0, -6.0, 0.75, 0.5 * fmt.min_subnormal], np.float32)  # IEEE 754-2019, 4.3.1
    np.testing.assert_array_equal(fmt.quantize(x), [2, 4, -8, 1, 0])


def test_result_beyond_the_dtype_is_inf_in_it() -> None:
    x = np.array([65504, -65504], np.float16)
    np.testing.assert_array_equal(FloatFormat(6, 2).quantize(x), np.array([np.inf, -np.inf], np.float16))
    top = np.finfo(np.float32).max
    fmt = FloatFormat(8, 7, specials=False)
    assert np.isinf(fmt.quantize(np.array([top]))[0]) and fmt.quantize(np.array([top], np.float64))[0] == 2.0**128


def test_float64_is_rounded_once() -> None:
    # Just above the midpoint of 1 and 1.125: float32 would hold the midpoint itself, which ties to 1.
    assert E4M3.quantize(np.array([1 + 1 / 16 + 2.0**-40]))[0] == 1.125
    # Far below float32's range, and far above it.
    np.testing.assert_array_equal(E4M3.quantize(np.array([5e-324, -1e-300, 1e300])), [0.0, -0.0, np.inf])


@pytest.mark.parametrize("fmt", [FloatFormat(8, 7), FloatFormat(8, 23), FloatFormat(8, 10, specials=False)], ids=str)
def test_float32_subnormals_survive_flush_to_zero(fmt: FloatFormat) -> None:
    bits = np.arange(1, 2**23, 4099, dtype=np.uint32)
    x = np.concatenate((bits, bits | np.uint32(1 << 31))).view(np.float32)
    codes, result = reference.encode(x, fmt), reference.quantize(x, fmt).astype(np.float32)
    assert torch.set_flush_denormal(True)
    try:
        flushed_codes, flushed, decoded = fmt.encode(x), fmt.quantize(x), fmt.decode(codes)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(flushed_codes, codes)
    np.testing.assert_array_equal(flushed.view(np.uint32), result.view(np.uint32))
    np.testing.assert_array_equal(decoded.view(np.uint32), result.view(np.uint32))


# -------------------------------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda t: t.__name__)
@pytest.mark.parametrize("fraction", [2.0**-10, 0.1, 0.5, 0.77, 1 - 2.0**-10])
@pytest.mark.parametrize("below", [0.0, E4M3.min_subnormal, 5 * E4M3.min_subnormal, 1.0, 1.875, -104.0, 224.0])
def test_stochastic_rounding_is_unbiased(below: float, fraction: float, dtype: Any) -> None:
    n = 400_000
    code = int(E4M3.encode(np.array([below]))[0])
    above = float(E4M3.decode(np.array([code + 1]))[0])
    x = np.full(n, below + fraction * (above - below), dtype)
    result = E4M3.quantize(x, rounding="stochastic", seed=12345).astype(np.float64)
    assert set(np.unique(result)) <= {below, above}
    probability = (float(x[0]) - below) / (above - below)
    went_up = float(np.mean(result == above))
    assert abs(went_up - probability) < 5 * math.sqrt(probability * (1 - probability) / n)


def test_stochastic_rounding_errs_independently() -> None:
    x = sample(400_000)
    error = E4M3.quantize(x, rounding="stochastic", seed=1).astype(np.float64) - x
    error /= np.abs(x)
    other = E4M3.quantize(x, rounding="stochastic", seed=2).astype(np.float64) - x
    other /= np.abs(x)
    bound = 5 / math.sqrt(x.size)
    for a, b in ((error[1:], error[:-1]), (error[8:], error[:-8]), (error, other), (error, x)):
        assert abs(np.corrcoef(a, b)[0, 1]) < bound


def test_stochastic_rounding_repeats_with_its_seed() -> None:
    x = sample(10_001)
    first = E4M3.encode(x, rounding="stochastic", seed=7)
    np.testing.assert_array_equal(first, E4M3.encode(x, rounding="stochastic", seed=7))
    np.testing.assert_array_equal(E4M3.decode(first), E4M3.quantize(x, rounding="stochastic", seed=7))
    np.testing.assert_array_equal(first, E4M3.encode(torch.from_numpy(x), rounding="stochastic", seed=7).numpy())
    np.testing.assert_array_equal(first[:77], E4M3.encode(x[:77], rounding="stochastic", seed=7))
    for seed in (8, 7 + 2**32, 2**64 - 1):
        assert np.mean(first != E4M3.encode(x, rounding="stochastic", seed=seed)) > 0.1
    a, b = (E4M3.encode(x, rounding="stochastic") for _ in range(2))
    assert np.mean(a != b) > 0.1
    np.testing.assert_array_equal(E4M3.encode(x, seed=7), E4M3.encode(x))


def test_stochastic_rounding_of_special_values() -> None:
    x = np.array([np.inf, -np.inf, 1e30, 0.0, -0.0, np.nan], np.float32)
    np.testing.assert_array_equal(E4M3.quantize(x, rounding="stochastic", seed=3), E4M3.quantize(x))
    finite = FloatFormat(4, 3, specials=False)
    np.testing.assert_array_equal(finite.encode(x, rounding="stochastic", seed=3), finite.encode(x))
    between = np.full(1000, 470.0, np.float32)
    assert set(finite.quantize(between, rounding="stochastic", seed=3)) == {448, 480}
    assert set(finite.quantize(between + 20, rounding="stochastic", seed=3)) == {480}


# ----------------------------------------------------------------------------------------------- huge sizes


@pytest.mark.slow
def test_pack_more_than_2_to_31_codes() -> None:
    n = 2**31 + 9
    fmt = FloatFormat(2, 1, specials=False)
    codes = np.zeros(n, np.uint8)  # pages that are never written take no memory
    places = np.array([0, 1, 2**30 + 3, 2**31 - 1, 2**31, n - 1])
    codes[places] = [3, 5, 7, 9, 11, 13]
    packed = fmt.pack(codes)
    assert packed.size == 2**30 + 5
    assert np.count_nonzero(packed) == np.unique(places // 2).size
    tail = fmt.unpack(packed[2**30 - 4 :], 17)
    np.testing.assert_array_equal(tail, codes[-17:])
    unpacked = fmt.unpack(packed, n)
    del packed
    np.testing.assert_array_equal(unpacked[places], codes[places])
    assert np.count_nonzero(unpacked) == places.size


@pytest.mark.slow
def test_encode_more_than_2_to_31_elements() -> None:
    n = 2**31 + 9
    x = np.zeros(n, np.float16)
    places = np.array([0, 2**31 - 1, 2**31, n - 1])
    x[places] = [1.0, -2.0, 3.0, 0.5]
    codes = E4M3.encode(x)
    np.testing.assert_array_equal(codes[places], reference.encode(x[places], E4M3))
    assert np.count_nonzero(codes) == places.size
