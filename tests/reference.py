"""The oracle of the tests: number formats and the whole exchange in slow, readable NumPy.

Nothing here shares code with `horovod_aps` or `cuda/`. A format is anything with `exp_bits`, `man_bits` and
`specials` (`Format` below, or the library's FloatFormat); every limit is derived again from these three.
Values are float64, in which every value of every format, and its scaling by any power of two that occurs, is
exact.

First part: one number, then arrays of numbers (quantize, encode, decode, pack). Second part: the exchange
over N ranks, as small functions in the order in which data flows: scan_exponent, quantize_scaled, accumulate,
reduce_segment, finish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]

# Exponents with a meaning of their own; chosen so that MAX over the ranks does the right thing with them.
EXP_ZERO = -32768
EXP_NONFINITE = 32767
# Sums are formed with the format's top binade moved to 2^100, see `accumulate`.
ACC_EXPONENT = 100


class Format(NamedTuple):
    """What defines a format: exponent bits, mantissa bits, and whether it has Inf and NaN."""

    exp_bits: int
    man_bits: int
    specials: bool = True


# ----------------------------------------------------------------------------------------------------------
# Limits
# ----------------------------------------------------------------------------------------------------------


def bias_of(fmt: Any) -> int:
    """Exponent bias, 2^(e-1) - 1."""
    return int(2 ** (fmt.exp_bits - 1) - 1)


def min_exponent(fmt: Any) -> int:
    """Exponent of the smallest normal binade, which the subnormals share."""
    return 1 - bias_of(fmt)


def max_value(fmt: Any) -> float:
    """Largest finite value: the value of the largest finite code."""
    return float(decode(np.array([max_code(fmt)]), fmt)[0])


def max_code(fmt: Any) -> int:
    """Largest finite code: the one below Inf, or all ones if there is no Inf."""
    n_positive = 2 ** (fmt.exp_bits + fmt.man_bits)
    return int(n_positive - 2**fmt.man_bits - 1 if fmt.specials else n_positive - 1)


def max_exponent(fmt: Any) -> int:
    """floor(log2(max))."""
    return math.frexp(max_value(fmt))[1] - 1


def wire_exponent(fmt: Any) -> int:
    """The exponent emax that stands for a layer's E on the wire: the largest normal exponent.

    e = 1 with specials has only subnormals; there it is the one that they share with the missing normals, one
    above `max_exponent`.
    """
    return max(max_exponent(fmt), min_exponent(fmt))


def top_spacing(fmt: Any) -> float:
    """Spacing of the values in the top binade: from the largest value to the power of two above it."""
    return float(2.0 ** (max_exponent(fmt) + 1)) - max_value(fmt)


def width(fmt: Any) -> int:
    """Bits of one code."""
    return int(1 + fmt.exp_bits + fmt.man_bits)


# ----------------------------------------------------------------------------------------------------------
# One number
# ----------------------------------------------------------------------------------------------------------


def quantize_exact(x: float, e: int, m: int, specials: bool = True, saturate: bool | None = None) -> float:
    """Round one number to the nearest value of format (e, m), ties to even, in rational arithmetic.

    Overflow, by default: to Inf with specials, to the largest finite value without. NaN stays NaN if the
    format has it; with specials but no mantissa bit it becomes Inf (the only non-finite code); without
    specials it becomes a zero of the opposite sign, which is what ml_dtypes does.
    """
    fmt = Format(e, m, specials)
    if saturate is None:
        saturate = not specials
    sign = math.copysign(1.0, x)
    if math.isnan(x):
        if not specials:
            return -sign * 0.0
        return math.copysign(math.nan if m > 0 else math.inf, sign)
    if math.isinf(x):
        return sign * (max_value(fmt) if saturate else math.inf)
    magnitude = Fraction(abs(x))
    exponent = max(math.frexp(abs(x))[1] - 1, min_exponent(fmt)) if magnitude else min_exponent(fmt)
    spacing = Fraction(2) ** (exponent - m)
    # round() of a Fraction is exact and to even. With m = 0 a tie has the significands 1 and 2: it goes to
    # 2, the larger magnitude, as IEEE 754-2019 section 4.3.1 demands of one-digit precision.
    rounded = round(magnitude / spacing) * spacing
    if rounded > Fraction(max_value(fmt)):
        return sign * (max_value(fmt) if saturate else math.inf)
    return sign * float(rounded)


# ----------------------------------------------------------------------------------------------------------
# Arrays
# ----------------------------------------------------------------------------------------------------------


def as_float64(x: ArrayLike) -> F64:
    """Widen float16, bfloat16, float32 or float64 exactly."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(x).astype(np.float64)


def quantize(x: ArrayLike, fmt: Any, saturate: bool | None = None) -> F64:
    """The array twin of `quantize_exact`."""
    if saturate is None:
        saturate = not fmt.specials
    x = as_float64(x)
    finite = np.isfinite(x)
    magnitude = np.where(finite, np.abs(x), 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, min_exponent(fmt))
    exponent = np.where(magnitude == 0, min_exponent(fmt), exponent)
    significand = np.ldexp(magnitude, fmt.man_bits - exponent)  # in [0, 2^(m+1)), exact
    rounded = np.ldexp(np.rint(significand), exponent - fmt.man_bits)
    rounded = np.where(np.isinf(x), np.inf, rounded)
    top = max_value(fmt)
    rounded = np.where(rounded > top, top if saturate else np.inf, rounded)
    result = np.copysign(rounded, x)
    nan = np.isnan(x)
    if not fmt.specials:
        replacement = np.copysign(0.0, -x)
    else:
        replacement = np.copysign(np.nan if fmt.man_bits > 0 else np.inf, x)
    return np.where(nan, replacement, result)


def nearest_codes_sorted(magnitudes: F64, fmt: Any) -> NDArray[Any]:
    """Codes of sorted finite magnitudes, found by comparing with the midpoints between neighbouring values.

    A second definition of rounding to nearest even, which shares nothing with `quantize`; fast for long
    arrays.
    """
    codes = np.arange(max_code(fmt) + 1)
    values = decode(codes, fmt)
    neighbours = values[1:]
    if fmt.specials:  # Inf stands where the next value would be
        neighbours = np.append(neighbours, values[-1] + top_spacing(fmt))
    midpoints = (values[: neighbours.size] + neighbours) / 2
    # With m = 0 every value but zero has the odd significand 1: a tie goes up.
    lower_is_even = codes[: neighbours.size] % 2 == 0 if fmt.man_bits > 0 else codes[: neighbours.size] == 0
    first_above = np.where(
        lower_is_even,
        np.searchsorted(magnitudes, midpoints, side="right"),
        np.searchsorted(magnitudes, midpoints, side="left"),
    )
    counts = np.diff(np.concatenate(([0], first_above, [magnitudes.size])))
    return np.repeat(np.arange(counts.size).astype(code_dtype(fmt)), counts)


def code_dtype(fmt: Any) -> np.dtype[Any]:
    """Smallest unsigned type that holds a code."""
    return np.dtype(np.uint8 if width(fmt) <= 8 else np.uint16 if width(fmt) <= 16 else np.uint32)


def encode(x: ArrayLike, fmt: Any, saturate: bool | None = None) -> NDArray[Any]:
    """Codes, sign << (e+m) | exponent << m | mantissa, of the values nearest to x; NaN as the quiet one."""
    value = quantize(x, fmt, saturate)
    magnitude = np.where(np.isfinite(value), np.abs(value), 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, min_exponent(fmt))
    exponent = np.where(magnitude == 0, min_exponent(fmt), exponent)
    significand = np.ldexp(magnitude, fmt.man_bits - exponent).astype(np.int64)
    # A normal number's significand has the leading bit 2^m, which lifts the exponent field from 0 to at
    # least 1.
    code = ((exponent.astype(np.int64) - min_exponent(fmt)) << fmt.man_bits) + significand
    inf_code = (2**fmt.exp_bits - 1) << fmt.man_bits
    code = np.where(np.isinf(value), inf_code, code)
    code = np.where(np.isnan(value), inf_code | (1 << fmt.man_bits >> 1), code)
    code |= np.signbit(value).astype(np.int64) << (fmt.exp_bits + fmt.man_bits)
    return code.astype(code_dtype(fmt))


def decode(codes: ArrayLike, fmt: Any) -> F64:
    """Values of codes, by the definition of the format."""
    code = np.asarray(codes).astype(np.int64)
    mantissa = code & (2**fmt.man_bits - 1)
    field = (code >> fmt.man_bits) & (2**fmt.exp_bits - 1)
    negative = (code >> (fmt.exp_bits + fmt.man_bits)) & 1
    leading = np.where(field > 0, 2**fmt.man_bits, 0)
    exponent = np.maximum(field, 1) - bias_of(fmt) - fmt.man_bits
    magnitude = np.ldexp((leading + mantissa).astype(np.float64), exponent)
    if fmt.specials:
        special = field == 2**fmt.exp_bits - 1
        magnitude = np.where(special, np.where(mantissa == 0, np.inf, np.nan), magnitude)
    return np.copysign(magnitude, np.where(negative == 1, -1.0, 1.0))


def pack(codes: ArrayLike, bits: int) -> NDArray[np.uint8]:
    """Dense little-endian bit string of codes, zero padded to a byte: bit j of code i is bit i*bits + j."""
    code = np.asarray(codes).astype(np.uint64).ravel()
    matrix = (code[:, None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(matrix.astype(np.uint8).ravel(), bitorder="little")


def unpack(packed: ArrayLike, bits: int, n: int) -> NDArray[np.uint64]:
    """Inverse of `pack`."""
    string = np.unpackbits(np.asarray(packed, dtype=np.uint8), bitorder="little")[: n * bits]
    matrix = string.reshape(n, bits).astype(np.uint64)
    return (matrix << np.arange(bits, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)


def cast(x: ArrayLike, dtype: Any) -> NDArray[Any]:
    """Convert float64 to a gradient's dtype with one rounding.

    ml_dtypes converts float64 to bfloat16 by way of float32, which rounds twice below float32's normal range;
    so the rounding is done by `quantize`, after which the conversion is exact.
    """
    dtype = np.dtype(dtype)
    if dtype == np.dtype(ml_dtypes.bfloat16):
        x = quantize(x, Format(8, 7))
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(x).astype(dtype)


# ----------------------------------------------------------------------------------------------------------
# The exchange, step by step
# ----------------------------------------------------------------------------------------------------------


def scan_exponent(x: ArrayLike, fmt: Any, stochastic: bool = False) -> int:
    """Exponent E of a layer: the smallest for which |x|max * 2^(emax - E), rounded, is within the format.

    That is floor(log2(|x|max)), or one more if the largest value rounds up out of its binade. Stochastic
    rounding may always round up, so there the largest value itself has to be within the format.
    """
    x = as_float64(x)
    if x.size == 0 or not np.any(x):
        return EXP_ZERO
    if not np.all(np.isfinite(x)):
        return EXP_NONFINITE
    largest = float(np.max(np.abs(x)))
    exponent = math.frexp(largest)[1] - 1
    spacing = Fraction(top_spacing(fmt))
    while True:
        scaled = Fraction(largest) * Fraction(2) ** (wire_exponent(fmt) - exponent)
        # Rounding to the spacing of the top binade, as if the format went on above its largest value.
        rounded = scaled if stochastic else round(scaled / spacing) * spacing
        if rounded <= Fraction(max_value(fmt)):
            return exponent
        exponent += 1


def quantize_scaled(x: ArrayLike, exponent: int, fmt: Any) -> F64:
    """Values, in the format's own domain, that a rank sends for x: x * 2^(emax - E) rounded once, saturating.

    An all-zero layer and one with a NaN or Inf anywhere send zeros; the receiver knows from the exponent.
    """
    x = as_float64(x)
    if exponent in (EXP_ZERO, EXP_NONFINITE):
        return np.zeros_like(x)
    return quantize(np.ldexp(x, wire_exponent(fmt) - exponent), fmt, saturate=True)


def true_value(value: ArrayLike, exponent: int, fmt: Any) -> F64:
    """Undo the scaling: what a sent value stands for."""
    if exponent == EXP_ZERO:
        return np.zeros_like(as_float64(value))
    if exponent == EXP_NONFINITE:
        return np.full_like(as_float64(value), np.nan)
    return np.ldexp(as_float64(value), exponent - wire_exponent(fmt))


def accumulation_dtype(fmt: Any) -> Any:
    """float32, unless the format's range (e = 8) needs float64."""
    return np.float64 if fmt.exp_bits == 8 else np.float32


def accumulate(values: Sequence[F64], fmt: Any, mode: str = "float32") -> NDArray[Any]:
    """Sum of the ranks' values in rank order, starting from the first, times 2^(100 - emax).

    mode "float32": added in float32. "format": every partial sum is rounded to the format (saturating), as
    the paper's code does. "kahan": the same with Kahan's correction, every operation rounded to the format.
    The factor moves the top binade to 2^100, so that no value or sum is a float32 subnormal.
    """
    shift = ACC_EXPONENT - wire_exponent(fmt)
    if mode == "float32":
        scaled = [np.ldexp(as_float64(v), shift).astype(accumulation_dtype(fmt)) for v in values]
        total = scaled[0].copy()
        for v in scaled[1:]:
            total = total + v
        return total
    if mode not in ("format", "kahan"):
        raise ValueError(f"accumulate: mode must be float32, format or kahan, got {mode!r}")

    def q(x: F64) -> F64:
        # A float64 sum of values with p <= 24 bits rounds as the exact sum does, since 53 >= 2p + 2.
        return quantize(x, fmt, saturate=True)

    total = as_float64(values[0]).copy()
    correction = np.zeros_like(total)
    for v in values[1:]:
        if mode == "format":
            total = q(total + v)
        else:
            y = q(v - correction)
            new_total = q(total + y)
            correction = q(q(new_total - total) - y)
            total = new_total
    return np.ldexp(total, shift).astype(accumulation_dtype(fmt))


def reduce_segment(values: Sequence[F64], exponent: int, fmt: Any, mode: str = "float32") -> tuple[int, F64]:
    """What the owner of a shard does with one layer's part of it: sum, new exponent, round again.

    Returns the exponent and the values that it sends to everyone. The low-precision modes keep the exponent,
    because their sum is already a value of the format.
    """
    if exponent in (EXP_ZERO, EXP_NONFINITE):
        return exponent, np.zeros_like(as_float64(values[0]))
    total = accumulate(values, fmt, mode)
    if mode != "float32":
        return exponent, np.ldexp(as_float64(total), wire_exponent(fmt) - ACC_EXPONENT)
    if not np.any(total):
        return EXP_ZERO, np.zeros_like(as_float64(values[0]))
    sum_exponent = scan_exponent(total, fmt)
    return exponent + sum_exponent - ACC_EXPONENT, quantize_scaled(total, sum_exponent, fmt)


def finish(total: NDArray[Any], exponent: int, fmt: Any, factor: float, dtype: Any) -> NDArray[Any]:
    """The gradient that the optimizer sees: the accumulated sum times factor, scaled back, in its dtype."""
    if exponent == EXP_ZERO:
        return np.zeros(total.shape, dtype)
    if exponent == EXP_NONFINITE:
        return np.full(total.shape, np.nan, dtype)
    if np.dtype(dtype) == np.float64 or accumulation_dtype(fmt) is np.float64:
        product = total.astype(np.float64) * np.float64(np.float32(factor))
    else:
        product = total * np.float32(factor)
    return cast(np.ldexp(as_float64(product), exponent - ACC_EXPONENT), dtype)


# ----------------------------------------------------------------------------------------------------------
# The exchange over N ranks
# ----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Elements start..stop of one layer, inside one rank's shard."""

    name: str
    start: int
    stop: int


def even_shards(sizes: Mapping[str, int], n_ranks: int, align: int = 1) -> list[list[Piece]]:
    """Cut the layers, laid end to end, into one shard per rank, of equal length in units of `align`."""
    total = sum(sizes.values())
    length = -(-total // n_ranks)
    length = -(-length // align) * align
    shards: list[list[Piece]] = []
    for rank in range(n_ranks):
        low, high, position, shard = rank * length, (rank + 1) * length, 0, []
        for name, size in sizes.items():
            start, stop = max(low - position, 0), min(high - position, size)
            if start < stop:
                shard.append(Piece(name, start, stop))
            position += size
        shards.append(shard)
    return shards


def shared_exponent(
    layer_per_rank: Sequence[ArrayLike], fmt: Any, mode: str = "float32", stochastic: bool = False
) -> int:
    """MAX over the ranks of their exponents.

    The low-precision modes need room for the sum: ceil(log2(N)) more, i.e. the exponent of max|g| * N.
    """
    exponent = max(scan_exponent(x, fmt, stochastic) for x in layer_per_rank)
    if mode == "float32" or exponent in (EXP_ZERO, EXP_NONFINITE):
        return exponent
    return exponent + (len(layer_per_rank) - 1).bit_length()


def average_factor(n_ranks: int, op: str = "average") -> float:
    """Factor of the decoded sum, as a float32."""
    if op not in ("average", "sum"):
        raise ValueError(f"average_factor: op must be average or sum, got {op!r}")
    return float(np.float32(1.0 / n_ranks if op == "average" else 1.0))


def raw_exchange(layer_per_rank: Sequence[ArrayLike], factor: float) -> NDArray[Any]:
    """A layer sent unscaled as float32: added in rank order in float32, times factor."""
    dtype = np.asarray(layer_per_rank[0]).dtype
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows = [np.asarray(x).astype(np.float32) for x in layer_per_rank]
        total = rows[0].copy()
        for row in rows[1:]:
            total = total + row
        return cast(as_float64(total * np.float32(factor)), dtype)


def one_phase(layer_per_rank: Sequence[ArrayLike], fmt: Any, factor: float, mode: str = "float32") -> NDArray[Any]:
    """Every rank gets every rank's values and adds them itself: one rounding. Used for two ranks."""
    dtype = np.asarray(layer_per_rank[0]).dtype
    exponent = shared_exponent(layer_per_rank, fmt, mode)
    sent = [quantize_scaled(x, exponent, fmt) for x in layer_per_rank]
    return finish(accumulate(sent, fmt, mode), exponent, fmt, factor, dtype)


def two_phase(
    layer_per_rank: Sequence[ArrayLike],
    pieces: Sequence[tuple[int, int]],
    fmt: Any,
    factor: float,
    mode: str = "float32",
) -> NDArray[Any]:
    """Scatter, reduce, gather: each piece of the layer is summed and rounded again by its owner."""
    dtype = np.asarray(layer_per_rank[0]).dtype
    exponent = shared_exponent(layer_per_rank, fmt, mode)
    sent = [quantize_scaled(np.ravel(x), exponent, fmt) for x in layer_per_rank]
    result = np.zeros(sent[0].shape, dtype)
    for start, stop in pieces:
        new_exponent, summed = reduce_segment([s[start:stop] for s in sent], exponent, fmt, mode)
        result[start:stop] = finish(accumulate([summed], fmt), new_exponent, fmt, factor, dtype)
    return result.reshape(np.shape(layer_per_rank[0]))


def simulate_exchange(
    grads_per_rank: Sequence[Mapping[str, ArrayLike]],
    fmt: Any,
    *,
    op: str = "average",
    mode: str = "float32",
    scale: float = 1.0,
    phases: int | None = None,
    shards: Sequence[Sequence[Piece]] | None = None,
) -> dict[str, NDArray[Any]]:
    """The result that all ranks get, bit for bit, for one bucket of layers.

    `fmt` is one format for all layers or one per name; None sends a layer as raw float32. Two phases are used
    for more than two ranks unless `phases` says otherwise; `shards` (default `even_shards`) says who reduces
    what. `scale` multiplies the result together with the average.
    """
    n_ranks = len(grads_per_rank)
    first = grads_per_rank[0]
    formats = dict(fmt) if isinstance(fmt, Mapping) else {name: fmt for name in first}
    factor = float(np.float32(average_factor(n_ranks, op) * scale))
    if phases is None:
        phases = 1 if n_ranks <= 2 else 2
    if shards is None:
        shards = even_shards({name: int(np.size(x)) for name, x in first.items()}, n_ranks)
    results = {}
    for name in first:
        layer = [np.asarray(grads[name]) for grads in grads_per_rank]
        if formats[name] is None:
            results[name] = raw_exchange(layer, factor)
        elif phases == 1:
            results[name] = one_phase(layer, formats[name], factor, mode)
        else:
            pieces = [(p.start, p.stop) for shard in shards for p in shard if p.name == name]
            results[name] = two_phase(layer, pieces, formats[name], factor, mode)
    return results


def residual(x: ArrayLike, exponent: int, fmt: Any) -> F64:
    """What error feedback keeps: x minus the value sent for it; zeros if the layer was not finite."""
    if exponent == EXP_NONFINITE:
        return np.zeros_like(as_float64(x))
    return as_float64(x) - true_value(quantize_scaled(x, exponent, fmt), exponent, fmt)
