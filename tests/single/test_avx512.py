"""The AVX-512 loops give the bytes of the portable ones, which the other tests hold against NumPy.

Blocks that are huge, tiny, zero or not finite leave these loops for others; so do elements of which a random number
decides by its last bits, about one of a million.
"""

from __future__ import annotations

import numpy as np
import pytest

from horovod_aps import config
from horovod_aps import kernels as K
from horovod_aps.formats import MX, QSGD, FloatFormat, Format

FORMATS = [
    MX(4, 3), MX(5, 2, saturate=True), MX(2, 1), MX(3, 2), QSGD(8), QSGD(8, norm="l2"), QSGD(4, 192), QSGD(7, 64, "l2"),
    FloatFormat(4, 3), FloatFormat(3, 2), FloatFormat(6, 1),
]  # fmt: skip
SIZES = [64, 96, 511, 2048, 2049, 9000]
FIRST = [0, 8, 64, 2**32 - 1024, 2**40]


def gradients(rng: np.random.Generator, n: int) -> np.ndarray:
    """Of one kind: plain, blocks of any size, tiny, huge, with zero blocks, zeros of both signs, or with a NaN."""
    x, blocks = rng.standard_normal(n), n // 32 + 1
    kind = rng.integers(7)
    if kind == 1:
        x *= np.exp2(np.repeat(rng.integers(-150, 127, blocks), 32)[:n])
    elif kind == 2:
        x *= np.exp2(rng.integers(-140, -100))
    elif kind == 3:
        x *= 2.0**120
    elif kind == 4:
        x *= np.repeat(rng.random(blocks) < 0.5, 32)[:n] * np.exp2(rng.integers(-20, 3, n))
    elif kind == 5:
        x *= 0.0
    elif kind == 6:
        x[rng.integers(n)] = rng.choice([np.nan, np.inf])
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def written(fmt: Format, data: list[np.ndarray], first: int, seed: int | None) -> list[np.ndarray]:
    """The message of each array and that of their sum, between other bytes."""
    cpu, n, at = K.CpuKernels(), data[0].size, first % 5
    segs = np.zeros(1, K.SEGMENT)
    fmt.describe(segs)
    segs["n"], segs["uid"], segs["first"], segs["offset"] = n, 3, first, at
    found = [np.full(at + fmt.bytes_for(n) + 9, 0xA5, np.uint8) for _ in range(len(data) + 1)]
    for x, message in zip(data, found, strict=False):
        segs["data"] = x.ctypes.data
        cpu.scan(segs, stochastic=seed is not None)
        cpu.encode(segs, message, seed)
    segs["exponent"] = 0
    cpu.reduce(segs, found[:-1], 0, found[-1], seed)
    return [*found, segs["exponent"].copy()]


def both(fmt: Format, data: list[np.ndarray], first: int, seed: int | None) -> None:
    lib = K.library()
    try:
        lib.aps_use_vectors(0)
        wanted = written(fmt, data, first, seed)
        if lib.aps_use_vectors(2) < 2:
            pytest.skip("no AVX-512 here")
        assert all(map(np.array_equal, wanted, written(fmt, data, first, seed)))
    finally:
        lib.aps_use_vectors(config.vectors())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_any_values_have_the_bytes_of_the_portable_loops(fmt: Format) -> None:
    rng = np.random.default_rng(17)
    for trial in range(40):
        n, n_in = int(rng.choice(SIZES)), int(rng.integers(1, 5))
        both(fmt, [gradients(rng, n) for _ in range(n_in)], int(rng.choice(FIRST)), trial % 2 or None)


@pytest.mark.parametrize("fmt", [FloatFormat(4, 3), MX(4, 3)], ids=str)
def test_random_numbers_decide_by_their_last_bits(fmt: Format) -> None:
    """So many elements that some are a last bit away from the next code; a third has subnormal codes."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(1 << 22, dtype=np.float32)
    x[::3] *= np.float32(2.0**-12)
    both(fmt, [x], 8, 5)
