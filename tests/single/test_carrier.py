"""transport="allreduce" over Gloo's float16, which loses sums: no sum of ours is ever among those.

Oracle: a model of the C++ in Gloo's types.h and math.h as Horovod 0.28.1 ships them, over every bit pattern. The real
Gloo is in tests/parallel.
"""

from __future__ import annotations

import numpy as np
import pytest

from horovod_aps.engine.statistics import Statistics
from horovod_aps.formats import FloatFormat
from horovod_aps.frontends.carrier import Place, carrier_place, exponent_word, fill_carrier
from horovod_aps.kernels import FLOAT16, FLOAT32, CpuKernels
from horovod_aps.options import Options

PATTERNS = np.arange(2**16)
with np.errstate(over="ignore"):
    # cpu_float2half_rn(static_cast<float>(x)): what `rhs != *this` compares rhs with, by the bits x of *this
    COMPARED = PATTERNS.astype(np.float32).astype(np.float16).view(np.uint16)
VALUES = PATTERNS.astype(np.uint16).view(np.float16)
SIZES = (2, 3, 4, 5, 7, 8, 16, 64, 100, 128, 256, 512)
FORMATS = [
    (e, m, specials)
    for e in range(1, 6)
    for m in range(11)
    for specials in (True, False)
    if (e, m, specials) != (1, 0, True)
]


def assign(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """float16::operator=: `if (rhs != *this) x = rhs.x`, where != reads the bits of *this as an integer."""
    kept = COMPARED[old.view(np.uint16)] == new.view(np.uint16)
    return np.where(kept, old.view(np.uint16), new.view(np.uint16)).view(np.float16)


def gloo_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """gloo::sum(a, a, b): c[i] = a[i] + b[i], where operator+ copies a[i] and assigns the sum to the copy."""
    exact = (a.astype(np.float32) + b.astype(np.float32)).astype(np.float16)
    return assign(a, assign(a, exact))


def largest_sums(largest: float, size: int) -> np.ndarray:
    """The largest that float16 makes of sums of 1..size values up to `largest`, whatever the order of additions.

    Rounding and addition are monotone, so the largest sum of k is that of the largest of i and of k - i for some i.
    """
    found = np.zeros(size + 1, np.float16)
    found[1] = largest
    for k in range(2, size + 1):
        parts = found[1 : k // 2 + 1].astype(np.float32) + found[k - 1 : k - k // 2 - 1 : -1].astype(np.float32)
        found[k] = parts.astype(np.float16).max()
    return found


def test_the_model_loses_what_gloo_loses():
    """16384 + 13312 = 29696 = 0x7400, the bits of 16384; a rank with 2^-24 loses another's 1; MPI's sums are right."""
    a = np.array([16384, 13312, 2.0**-24, 1, 100 * 2.0**-24], np.float16)
    b = np.array([13312, 16384, 1, 2.0**-24, 100], np.float16)
    np.testing.assert_array_equal(gloo_sum(a, b), np.array([16384, 29696, 2.0**-24, 1, 100 * 2.0**-24], np.float16))


def test_no_sum_below_one_is_lost():
    """Every float16 below 1 in magnitude as the sum, every bit pattern as what it replaces."""
    below = np.flatnonzero(np.abs(VALUES.astype(np.float32)) < 1)  # NaN is not
    assert below.size == 2 * 0x3C00
    for old in PATTERNS:
        hit = below[COMPARED[old] == below]
        assert hit.size == 0 or hit.tolist() == [old] == [0]  # +0 is kept where +0 is to be written
    lost = [s for s in PATTERNS if 1 <= VALUES[s] <= 1024 and (COMPARED == s).any()]
    assert VALUES[lost].astype(int).tolist() == list(range(1, 1025))  # and from 1 on every integer is


@pytest.mark.parametrize("size", [2, 3, 128])
def test_every_pair_that_can_meet_is_added(size):
    """(4, 3): every value and every float16 that can be a sum of others, on either side. Oracle: plain addition."""
    place = carrier_place(Options(4, 3), size, over_gloo=True)
    fmt = FloatFormat(4, 3)
    values = fmt.decode(np.arange(2**fmt.bits, dtype=np.uint8))
    values = np.ldexp(values[np.isfinite(values)], place.top - fmt.max_exponent).astype(np.float16)
    bound = largest_sums(float(values.max()), size - 1)[-1]
    sums = VALUES[np.abs(VALUES.astype(np.float32)) <= bound]
    assert values.size == 240 and sums.size > 20_000
    for value in values:
        others = np.full_like(sums, value)
        for a, b in ((sums, others), (others, sums)):
            expected = (a.astype(np.float32) + b.astype(np.float32)).astype(np.float16)
            np.testing.assert_array_equal(gloo_sum(a, b).view(np.uint16), expected.view(np.uint16))


def test_sums_stay_where_they_are_right():
    """Any format, number of ranks and order: below 1 in float16 over Gloo, finite over MPI, every value exact."""
    n_float32 = 0
    for e, m, specials in FORMATS:
        fmt = FloatFormat(e, m, specials=specials)
        tops = {}
        for size in SIZES:
            for over_gloo in (True, False):
                try:
                    place = carrier_place(Options(e, m, specials=specials), size, over_gloo)
                except ValueError:
                    continue
                n_float32 += place.dtype == FLOAT32
                largest = float(np.ldexp(fmt.max, place.top - fmt.max_exponent))
                least = float(np.ldexp(fmt.min_subnormal, place.top - fmt.max_exponent))
                if place.dtype == FLOAT32:
                    assert over_gloo and largest * size < 2 and least > 2.0**-60
                    continue
                assert float(np.float16(largest)) == largest and float(np.float16(least)) == least > 0
                key = (place.top, largest)
                if len(tops.get(key, ())) <= size:
                    tops[key] = largest_sums(largest, size)
                assert tops[key][size] < 1 if over_gloo else np.isfinite(tops[key][size])
    assert n_float32


@pytest.mark.parametrize(
    "e, m, size, over_gloo, expected",
    [
        (4, 3, 2, True, Place(FLOAT16, -2)),
        (4, 3, 2, False, Place(FLOAT16, -2)),  # the same bits over MPI
        (4, 3, 128, True, Place(FLOAT16, -8)),
        (4, 3, 129, True, Place(FLOAT32, -9)),
        (3, 0, 512, True, Place(FLOAT16, -10)),
        (5, 2, 2, True, Place(FLOAT32, -2)),
        (5, 2, 64, True, Place(FLOAT32, -7)),
        (5, 2, 64, False, Place(FLOAT16, 9)),
    ],
)
def test_place(e, m, size, over_gloo, expected):
    assert carrier_place(Options(e, m), size, over_gloo) == expected


@pytest.mark.parametrize("over_gloo", [True, False])
def test_place_refuses_what_float16_cannot_hold(over_gloo):
    with pytest.raises(ValueError, match=r'transport="allreduce" cannot carry e=5, m=2 for 512 ranks in float16'):
        carrier_place(Options(5, 2), 512, over_gloo)


@pytest.mark.parametrize("place, item_size", [(Place(FLOAT16, -2), 2), (Place(FLOAT32, -2), 4)])
def test_statistics_count_the_bytes_of_the_type_that_travels(place, item_size):
    """Oracle: a ring of 2 ranks sends every byte once; the exponent is a word of 4 more."""
    options, statistics, kernels = Options(5, 2, transport="allreduce"), Statistics(), CpuKernels()
    x, carried = np.ones(100, np.float32), np.empty(100, np.float32)
    word = exponent_word(kernels, x.ctypes.data, 100, FLOAT32, options)
    fill_carrier(
        kernels,
        x.ctypes.data,
        100,
        FLOAT32,
        carried.ctypes.data,
        word,
        place,
        options,
        None,
        lambda *rounded: statistics.add_carried("x", kernels, *rounded, item_size, options, 2, 0),
    )
    assert (statistics.bytes_sent, statistics.bytes_fp32) == (100 * item_size + 4, 400)
