"""Microscaling: small floats in blocks that share a power of two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_aps.formats.blocks import BlockFormat, Codes, Floats, Scales
from horovod_aps.formats.floats import FloatFormat
from horovod_aps.kernels import codecs
from horovod_aps.kernels.codecs import Random
from horovod_aps.kernels.segments import FAMILY_HOST, Table

BIAS, NAN_SCALE = 127, 255  # of the byte that stands for a power of two
MIN_BLOCK, MAX_BLOCK = 8, 2048
_BEYOND = {(4, 3): 1, (5, 2): 4}  # codes above the largest number, which OCP keeps for NaN and Inf


@dataclass(frozen=True, init=False, repr=False)
class MX(BlockFormat):
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
    block: int
    saturate: bool

    def __init__(self, e: int, m: int, block: int = 32, saturate: bool = False) -> None:
        element = FloatFormat(e, m, specials=False)
        if element.bits > 8 or element.bits < 2:
            raise ValueError(f"MX: 1 + e + m must be at most 8, got {element.bits}; FloatFormat takes more")
        if isinstance(block, bool) or not isinstance(block, (int, np.integer)):
            raise TypeError(f"MX: block must be an integer, got {block!r}")
        if not MIN_BLOCK <= block <= MAX_BLOCK or block & (block - 1):
            raise ValueError(f"MX: block must be a power of two in {MIN_BLOCK}..{MAX_BLOCK}, got {block}")
        if not isinstance(saturate, (bool, np.bool_)):
            raise TypeError(f"MX: saturate must be True or False, got {saturate!r}")
        fields = {"exp_bits": element.exp_bits, "man_bits": element.man_bits}
        for name, value in {**fields, "block": int(block), "saturate": bool(saturate)}.items():
            object.__setattr__(self, name, value)

    # ---- elements ---------------------------------------------------------------------------------------------

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 1 + self.exp_bits + self.man_bits

    @property
    def unit(self) -> int:
        """A block."""
        return self.block

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

    # ---- blocks -----------------------------------------------------------------------------------------------

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """A byte: a power of two and 127."""
        return np.dtype(np.uint8)

    def n_scales(self, n_elements: int) -> int:
        """One per block."""
        return -(-n_elements // self.block)

    def scales_of(self, values: Floats, stochastic: bool = False) -> Scales:
        """The bytes of the blocks' powers of two."""
        padded = np.pad(values, (0, -values.size % self.block)).reshape(-1, self.block)
        largest = np.abs(padded).max(axis=1).astype(np.float64)
        finite = np.isfinite(largest)
        usual = np.where(finite & (largest > 0), largest, 1.0)
        power = np.frexp(usual)[1].astype(np.int64) - 1 - self._top
        if not self.saturate:
            for _ in range(2):
                ratio = np.ldexp(usual, -power)
                beyond = (ratio if stochastic else self._rounded(ratio, None)) > self.max
                power += beyond
        power = np.where(largest > 0, np.maximum(power, -BIAS), -BIAS)
        return np.where(finite, power + BIAS, NAN_SCALE).astype(np.uint8)

    def _rounded(self, magnitudes: np.ndarray, random: Random) -> np.ndarray:
        """Magnitudes as multiples of the spacing of elements, which go on beyond the largest."""
        exponent = np.maximum(np.frexp(magnitudes)[1].astype(np.int64) - 1, self._least)
        quantum = np.ldexp(1.0, exponent - self.man_bits)
        if random is None:
            return np.rint(magnitudes / quantum) * quantum
        return np.floor((np.floor(magnitudes / quantum * 2.0**31) + random) / 2.0**31) * quantum

    def codes_of(self, values: Floats, scales: Scales, random: Random = None) -> Codes:
        """The codes of the elements."""
        powers = np.repeat(scales.astype(np.int64) - BIAS, self.block)[: values.size]
        lost = np.repeat(scales == NAN_SCALE, self.block)[: values.size]
        x = np.where(lost, 0, values).astype(np.float64)
        magnitudes = np.minimum(self._rounded(np.ldexp(np.abs(x), -powers), random), self.max)
        codes = np.searchsorted(self._elements()[: self.max_code + 1], magnitudes)
        return (codes | np.signbit(x).astype(np.int64) << (self.bits - 1)).astype(np.uint8)

    def values_of(self, codes: Codes, scales: Scales | None = None) -> Floats:
        """Elements times the powers of two; a code that no element has stands for the next number."""
        elements = self._elements()
        numbers = np.concatenate([elements, -elements])[codes]
        if scales is None:
            return numbers.astype(np.float32)
        powers = np.repeat(scales.astype(np.int64), self.block)[: codes.size]
        with np.errstate(over="ignore"):
            made = np.ldexp(numbers, powers - BIAS).astype(np.float32)
        return np.where(powers == NAN_SCALE, np.float32(np.nan), made)

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
        segment["family"], segment["codec"] = FAMILY_HOST, codecs.number_of(self)
        segment["exp_bits"], segment["man_bits"], segment["block"] = self.exp_bits, self.man_bits, self.block
