"""QSGD: uniform levels, rounded stochastically, one scale per bucket (Alistarh et al., NIPS 2017)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from horovod_aps.formats.buckets import MAX_BUCKET, BucketFormat, Codes, Floats, bucket_sums, checked_int
from horovod_aps.kernels.codecs import Random, random_bits
from horovod_aps.kernels.segments import FAMILY_QSGD, Table

BUCKET = 512
NORMS = ("max", "l2")
FRACTION = 16  # bits of a level that are rounded away at random


@dataclass(frozen=True, init=False, repr=False)
class QSGD(BucketFormat):
    """Codes of `bits` (2..8) bits: a sign, and one of the levels 0..s, s = 2^(bits-1) - 1, of the bucket's scale.

    The scale of a bucket of consecutive elements is a float32: the largest magnitude (norm="max"), or the L2 norm
    (norm="l2"; the root of `bucket_sums` of the squares in double, rounded to nearest, at most float32's largest
    number). No element exceeds it. The usual buckets are 128 elements at 2 bits and 512 at 4 and 8.

    Level of x, in float32, every operation rounded: y = min(|x|p · (s / (scale p)), s); p is 1, or 2^64 for a scale
    below 2^-64, or 2^-64 for one above 2^64, so that nothing overflows. With 16 random
    bits u the level is floor((rint(2^16 y) + u) / 2^16), which is right on average to within 2^-17 of a level and never
    above s.
    Value of level l: scale · (l · (1/s)) in float32, so that level s is the scale itself. A code is
    sign << (bits-1) | level. A bucket of zeros has scale 0 and codes 0.

    Always stochastic: the same seed gives the same result. The random bits go by the element's index in its layer, and
    are so the same for every number of threads and every layout. A bucket with NaN or Inf has the scale NaN and decodes
    to NaN; in an exchange the whole layer does.
    """

    n_bits: int
    bucket: int
    norm: Literal["max", "l2"]

    rounding = "stochastic"

    def __init__(self, bits: int, bucket: int = BUCKET, norm: Literal["max", "l2"] = "max") -> None:
        n_bits = checked_int("QSGD", "bits", bits, 2, 8, "a sign and at least one level, such as bits=4")
        size = checked_int("QSGD", "bucket", bucket, 1, MAX_BUCKET, "elements that share a scale, such as bucket=512")
        if norm not in NORMS:
            raise ValueError(f"QSGD: norm must be 'max' (the largest magnitude) or 'l2', got {norm!r}")
        object.__setattr__(self, "n_bits", n_bits)
        object.__setattr__(self, "bucket", size)
        object.__setattr__(self, "norm", norm)

    def __repr__(self) -> str:
        return f"QSGD(bits={self.bits}, bucket={self.bucket}, norm={self.norm!r})"

    def __str__(self) -> str:
        bucket = "" if self.bucket == BUCKET else f"-{self.bucket}"
        return f"qsgd{self.bits}{bucket}{'-l2' if self.norm == 'l2' else ''}"

    @classmethod
    def parse(cls, text: str) -> QSGD:
        """The format that `str()` of it names: "qsgd4", "qsgd2-128", "qsgd8-l2"."""
        match = re.fullmatch(r"qsgd(\d)(?:-(\d+))?(-l2)?", text)
        if match is None:
            raise ValueError(f"QSGD: text must look like 'qsgd4', 'qsgd2-128' or 'qsgd4-512-l2', got {text!r}")
        return cls(int(match[1]), int(match[2] or BUCKET), "l2" if match[3] else "max")

    @property
    def bits(self) -> int:
        """Bits of a code: sign and level."""
        return self.n_bits

    @property
    def levels(self) -> int:
        """s: the greatest level, 2^(bits-1) - 1."""
        return int(2 ** (self.n_bits - 1) - 1)

    @property
    def block(self) -> int:
        """The bucket."""
        return self.bucket

    def describe(self, segment: Table | np.void) -> None:
        """Bits of a level, the norm, the bucket."""
        segment["family"], segment["codec"], segment["flags"] = FAMILY_QSGD, NORMS.index(self.norm), 0
        segment["exp_bits"], segment["man_bits"], segment["block"] = 0, self.bits - 1, self.bucket

    # ---- arrays ---------------------------------------------------------------------------------------------

    def quantize(self, x: Any, seed: int | None = None) -> Any:
        """x rounded at random to levels: a new array or tensor of the same kind, dtype and shape.

        Buckets are taken from x in row-major order. None draws a fresh seed.
        """
        return self._quantize(x, _checked_seed(seed))

    def encode(self, x: Any, seed: int | None = None) -> tuple[Any, Any]:
        """Codes of `quantize(x)` as uint8, shaped like x, and the float32 scales of the buckets."""
        return self._encode_array(x, _checked_seed(seed))

    def random_bits(self, n: int, seed: int | None, uid: int = 0, first: int = 0) -> Random:
        """16 uniform bits for each element; None without a seed."""
        return random_bits(n, seed, uid, first, bits=FRACTION)

    # ---- the arithmetic -------------------------------------------------------------------------------------

    def _scales(self, buckets: Floats, n: int) -> Floats:
        largest = np.abs(buckets).max(axis=1, initial=0.0)
        if self.norm == "max":
            return largest
        norms = np.sqrt(bucket_sums(np.square(buckets.astype(np.float64))))
        return np.asarray(np.minimum(norms, np.finfo(np.float32).max).astype(np.float32))

    def _codes(self, values: Floats, scales: Floats, random: Random) -> Codes:
        one = np.float32(1)
        power = np.where(scales < np.float32(2.0**-64), np.float32(2.0**64), one)
        power = np.where(scales > np.float32(2.0**64), np.float32(2.0**-64), power)
        step = np.float32(self.levels) / np.where(scales == 0, one, scales * power)
        y = (np.abs(values) * power) * step
        y = np.where(y < self.levels, y, np.float32(self.levels))
        fixed = np.rint(y * np.float32(2.0**FRACTION)).astype(np.uint32)
        draw = np.uint32(1 << (FRACTION - 1)) if random is None else random
        codes = (fixed + draw) >> np.uint32(FRACTION) | np.signbit(values).astype(np.uint32) << (self.bits - 1)
        return np.where(scales == 0, np.uint32(0), codes).astype(np.uint8)

    def _values(self, codes: Codes, scales: Floats) -> Floats:
        level = (codes & np.uint8(self.levels)).astype(np.float32)
        magnitude = scales * (level * (np.float32(1) / np.float32(self.levels)))
        return np.asarray(np.where(codes >> (self.bits - 1), -magnitude, magnitude))


def _checked_seed(seed: int | None) -> int:
    if seed is None:
        return int.from_bytes(os.urandom(8), "little")
    return checked_int("QSGD", "seed", seed, 0, 2**64 - 1, "the same seed gives the same result")
