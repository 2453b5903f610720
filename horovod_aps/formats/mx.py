"""Microscaling: small floats in blocks that share a power of two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_aps.formats.buckets import BucketFormat, Codes, Floats, checked_int
from horovod_aps.formats.floats import FloatFormat, _checked_seed
from horovod_aps.kernels.codecs import Random
from horovod_aps.kernels.segments import FAMILY_MX, Table

BIAS, NAN_SCALE = 127, 255  # of the byte that stands for a power of two
MIN_BLOCK, MAX_BLOCK = 8, 2048
_BEYOND = {(4, 3): 1, (5, 2): 4}  # codes above the largest number, which OCP keeps for NaN and Inf


@dataclass(frozen=True, init=False, repr=False)
class MX(BucketFormat):
    """Elements of 1 sign, `e` exponent and `m` mantissa bits (at most 8 together); `block` of them share a scale 2^k.

    Elements have the values of the OCP formats: (4, 3) reaches 448, (5, 2) 57344, (3, 2) 28, (2, 3) 7.5, (2, 1) 6; of
    other pairs every code is a number. A scale is a byte, k + 127; 255 makes all of its block NaN.

    k is the least at which the block's largest magnitude, rounded, does not exceed the largest element (the magnitude
    itself for stochastic rounding), as APS chooses it for a layer. With saturate=True it is OCP's: floor(log2) of the
    magnitude, less that of the largest element, so that what is above the largest element saturates. k is at
    least -127, which a block of zeros has too. An element is x * 2^-k, x in float32, rounded once: to nearest with
    ties to even, or up with the probability that makes it unbiased. It stands for element * 2^k, rounded to float32.
    """

    exp_bits: int
    man_bits: int
    bucket: int
    saturate: bool

    scale_dtype = np.uint8
    nan_scale = NAN_SCALE

    def __init__(self, e: int, m: int, block: int = 32, saturate: bool = False) -> None:
        element = FloatFormat(e, m, specials=False)
        if element.bits > 8 or element.bits < 2:
            raise ValueError(f"MX: 1 + e + m must be at most 8, got {element.bits}; FloatFormat takes more")
        hint = "elements that share a scale, a power of two such as block=32"
        size = checked_int("MX", "block", block, MIN_BLOCK, MAX_BLOCK, hint)
        if size & (size - 1):
            raise ValueError(f"MX: block must be a power of two in {MIN_BLOCK}..{MAX_BLOCK}, got {size}")
        if not isinstance(saturate, (bool, np.bool_)):
            raise TypeError(f"MX: saturate must be True or False, got {saturate!r}")
        fields = {"exp_bits": element.exp_bits, "man_bits": element.man_bits}
        for name, value in {**fields, "bucket": size, "saturate": bool(saturate)}.items():
            object.__setattr__(self, name, value)

    # ---- elements ---------------------------------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 1 + self.exp_bits + self.man_bits

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self.bucket

    @property
    def max_code(self) -> int:
        """The code of the largest element."""
        return (1 << (self.bits - 1)) - 1 - _BEYOND.get((self.exp_bits, self.man_bits), 0)

    @property
    def max(self) -> float:
        """The largest element."""
        return float(self._elements()[self.max_code])

    @property
    def values(self) -> Floats:
        """All elements, in order; -0 is not listed."""
        positive = self._elements()[: self.max_code + 1]
        return np.concatenate([-positive[:0:-1], positive]).astype(np.float32)

    def _elements(self) -> np.ndarray:
        """Magnitudes of the codes without sign."""
        codes = np.arange(1 << (self.bits - 1))
        field, man = codes >> self.man_bits, codes & ((1 << self.man_bits) - 1)
        significand = np.where(field > 0, man + (1 << self.man_bits), man).astype(np.float64)
        return np.ldexp(significand, np.maximum(field, 1) - 1 + self._least - self.man_bits)

    @property
    def _least(self) -> int:
        """Exponent of the least normal element."""
        return 2 - (1 << (self.exp_bits - 1))

    @property
    def _top(self) -> int:
        """Exponent of the largest element."""
        return max(self.max_code >> self.man_bits, 1) - 1 + self._least

    # ---- arrays -----------------------------------------------------------------------------------------------

    def quantize(self, x: Any, rounding: str = "nearest", seed: int | None = None) -> Any:
        """x rounded to elements: a new array or tensor of the same kind, dtype and shape.

        Blocks are taken from x in row-major order; a NaN or an Inf makes all of its block NaN. The same seed gives the
        same stochastic rounding, and None draws a fresh one.
        """
        return self._quantize(x, _checked_seed(rounding, seed))

    def encode(self, x: Any, rounding: str = "nearest", seed: int | None = None) -> tuple[Any, Any]:
        """Codes of `quantize(x)` as uint8, shaped like x, and the bytes of the blocks' scales."""
        return self._encode_array(x, _checked_seed(rounding, seed))

    # ---- the arithmetic ---------------------------------------------------------------------------------------

    def _encode(self, values: Floats, random: Random) -> tuple[Codes, Any]:
        padded = np.pad(values, (0, -values.size % self.block)).reshape(-1, self.block)
        largest = np.abs(padded).max(axis=1)
        finite = np.isfinite(padded).all(axis=1)
        scales = np.where(finite, self._powers(np.where(finite, largest, 0), random is not None) + BIAS, NAN_SCALE)
        scales = scales.astype(np.uint8)
        return self._codes(values, self._spread(scales, values.size), random), scales

    def _scales(self, buckets: Floats, n: int) -> Any:
        return (self._powers(np.abs(buckets).max(axis=1, initial=0.0), False) + BIAS).astype(np.uint8)

    def _powers(self, largest: np.ndarray, stochastic: bool) -> np.ndarray:
        """k of blocks with these largest magnitudes."""
        usual = np.where(largest > 0, largest, 1).astype(np.float64)
        powers = np.frexp(usual)[1].astype(np.int64) - 1 - self._top
        for _ in range(0 if self.saturate else 2):
            ratios = np.ldexp(usual, -powers)
            powers += (ratios if stochastic else self._rounded(ratios, None)) > self.max
        return np.asarray(np.where(largest > 0, np.maximum(powers, -BIAS), -BIAS))

    def _rounded(self, magnitudes: np.ndarray, random: Random) -> np.ndarray:
        """Magnitudes as multiples of the spacing of elements, which go on beyond the largest."""
        exponent = np.maximum(np.frexp(magnitudes)[1].astype(np.int64) - 1, self._least)
        quantum = np.ldexp(1.0, exponent - self.man_bits)
        if random is None:
            return np.asarray(np.rint(magnitudes / quantum) * quantum)
        return np.asarray(np.floor((np.floor(magnitudes / quantum * 2.0**31) + random) / 2.0**31) * quantum)

    def _codes(self, values: Floats, scales: Any, random: Random) -> Codes:
        x = np.where(scales == NAN_SCALE, 0, values).astype(np.float64)
        ratios = np.ldexp(np.abs(x), BIAS - scales.astype(np.int64))
        magnitudes = np.minimum(self._rounded(ratios, random), self.max)
        codes = np.searchsorted(self._elements()[: self.max_code + 1], magnitudes)
        return (codes | np.signbit(x).astype(np.int64) << (self.bits - 1)).astype(np.uint8)

    def _values(self, codes: Codes, scales: Any) -> Floats:
        """A code that is no element stands for the number that it would be."""
        elements = self._elements()
        numbers = np.concatenate([elements, -elements])[codes]
        made = np.ldexp(numbers, scales.astype(np.int64) - BIAS).astype(np.float32)
        return np.asarray(np.where(scales == NAN_SCALE, np.float32(np.nan), made))

    # ---- text -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        block = "" if self.block == 32 else f"x{self.block}"
        return f"mx-e{self.exp_bits}m{self.man_bits}{block}{'-saturate' if self.saturate else ''}"

    def __repr__(self) -> str:
        saturate = ", saturate=True" if self.saturate else ""
        return f"MX(e={self.exp_bits}, m={self.man_bits}, block={self.block}{saturate})"

    @classmethod
    def parse(cls, text: str) -> MX:
        """The format that `str()` of it names, such as "mx-e4m3", "mx-e2m1x64" or "mx-e4m3-saturate"."""
        match = re.fullmatch(r"mx-e(\d)m(\d)(?:x(\d+))?(-saturate)?", text)
        if match is None:
            raise ValueError(f"MX: text must look like 'mx-e4m3', 'mx-e2m1x64' or 'mx-e4m3-saturate', got {text!r}")
        return cls(int(match[1]), int(match[2]), int(match[3] or 32), match[4] is not None)

    def describe(self, segment: Table | np.void) -> None:
        """Exponent and mantissa bits, the block, and the rule for scales."""
        segment["family"], segment["codec"], segment["flags"] = FAMILY_MX, int(self.saturate), 0
        segment["exp_bits"], segment["man_bits"], segment["block"] = self.exp_bits, self.man_bits, self.block
