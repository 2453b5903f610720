"""`reduce` of two messages, which has loops of its own, bit for bit.

Oracle: of packed floats the portable loops, which test_kernels.py holds against integers, on all pairs of codes; of the
families with buckets the formats' own NumPy, with sums in float32.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_buckets_kernels import variant as variant

from horovod_aps import kernels as K
from horovod_aps.formats import MX, QSGD, DynamicTree, FloatFormat, Linear, MantissaTree, OneBit, StaticTree
from horovod_aps.formats.buckets import BucketFormat
from horovod_aps.kernels.segments import seed_argument

FLOATS = [(4, 3), (5, 2), (3, 2), (2, 1), (2, 3), (4, 2), (5, 1), (1, 2), (3, 4), (4, 0)]
BUCKETS: list[BucketFormat] = [
    DynamicTree(), StaticTree(), MantissaTree(), Linear(), MX(4, 3), MX(5, 2, 64, True), MX(2, 1), QSGD(8),
    QSGD(8, norm="l2"), QSGD(4), QSGD(3, 96), OneBit(64), OneBit(27), OneBit(576), OneBit("tensor"),
]  # fmt: skip


def packed(codes: np.ndarray, width: int) -> np.ndarray:
    bits = (codes[:, None] >> np.arange(width)) & 1
    return np.append(np.packbits(bits.reshape(-1).astype(np.uint8), bitorder="little"), np.zeros(8, np.uint8))


@pytest.mark.parametrize("bits", FLOATS, ids=str)
def test_every_pair_of_codes_has_the_sum_of_the_portable_loops(bits: tuple[int, int]) -> None:
    """With codes of any size and with small ones only, so that the sums need exponents above and below the inputs'."""
    lib, fmt, rng = K.library(), FloatFormat(*bits), np.random.default_rng(5)
    if not lib.aps_use_vectors(2):
        pytest.skip("no AVX2 here")
    width = 1 + sum(bits)
    every = np.arange(1 << width)
    a, b = (codes.reshape(-1) for codes in np.meshgrid(every, every))
    order = rng.permutation(np.resize(np.arange(a.size), max(a.size, 5000)))
    for small in (every, every & ~(1 << (width - 2)), every & (1 << (width - 1) | 1)):
        messages = [packed(small[codes][order], width) for codes in (a, b)]
        found = []
        for vectors in (0, 2):
            lib.aps_use_vectors(vectors)
            segs, out = np.zeros(1, K.SEGMENT), np.zeros_like(messages[0])
            fmt.describe(segs)
            segs["n"], segs["exponent"] = order.size, 3
            K.CpuKernels().reduce(segs, messages, 0, out)
            found.append((int(segs["exponent"][0]), out))
        assert found[0][0] == found[1][0]
        assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("fmt", BUCKETS, ids=str)
def test_large_sums_of_two_have_the_codes_of_numpy(fmt: BucketFormat, variant: str) -> None:
    """Values that go together, that cancel, and that have nothing to do with each other, and zeros of both signs."""
    n, rng, cpu = (1 << 17) + 77, np.random.default_rng(9), K.CpuKernels()
    x, y = rng.standard_normal((2, n))
    x[::7] *= 0.0
    seed = 11 if fmt.rounding == "stochastic" else None
    for pair in ((x, y), (x, -x * 1.001), (x, x + 0.01 * y), (x * 1e-4, y)):
        segs = np.zeros(1, K.SEGMENT)
        fmt.describe(segs)
        segs["n"], segs["uid"] = n, 4
        messages = []
        for values in pair:
            data = values.astype(np.float32)
            segs["data"] = data.ctypes.data
            cpu.scan(segs)
            messages.append(np.zeros(fmt.bytes_for(n), np.uint8))
            cpu.encode(segs, messages[-1], seed)
        out = np.zeros_like(messages[0])
        cpu.reduce(segs, messages, 0, out, seed)
        one, two = (fmt.decode_segment(message, n, 0).astype(np.float32) for message in messages)
        random = fmt.random_bits(n, None if seed is None else seed_argument(seed, reduce=True)[1], 4, 0)
        assert segs["exponent"] == 0
        assert np.array_equal(out, fmt.encode_segment((one + two).astype(np.float64), 0, random))
