"""Codes that stand for the numbers of a table, scaled by the largest magnitude: the 8-bit types of Dettmers (2015).

`DynamicTree`, `Linear`, `StaticTree` and `MantissaTree` are tables of his; `TableFormat` takes any.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod_aps.formats.buckets import BucketFormat, Codes, Floats
from horovod_aps.kernels.codecs import Random
from horovod_aps.kernels.segments import FAMILY_TABLE, NEAREST, Table
from horovod_aps.kernels.tables import number_of

MAX_VALUES = 256


@dataclass(frozen=True, init=False, repr=False)
class TableFormat(BucketFormat):
    """The numbers of a table times a scale; code i is the i-th of them.

    The scale is the largest magnitude of what travels in one message: of the layer, or of the part of it that one
    rank reduces. All arithmetic is float32: y = x / scale (0 if the scale is 0), the code is that of the number nearest
    to y, and a code stands for scale * number. Halfway between two numbers, in float64, the one nearer to zero is
    taken, and between -v and v the positive one. With NaN or Inf among the values the scale is NaN
    and all codes are 0.
    """

    table: tuple[float, ...]

    rounding = "nearest"

    def __init__(self, values: Iterable[float]) -> None:
        given = np.asarray(list(values), np.float64)
        if given.ndim != 1 or not 2 <= given.size <= MAX_VALUES:
            raise ValueError(f"{self._kind}: values must be 2 to {MAX_VALUES} numbers, got shape {given.shape}")
        rounded = given.astype(np.float32)
        if not np.isfinite(rounded).all():
            raise ValueError(f"{self._kind}: values must be finite float32 numbers; leave NaN and Inf out")
        if not np.all(rounded[1:] > rounded[:-1]):
            raise ValueError(
                f"{self._kind}: values must be sorted, each greater than the one before it as float32; "
                "pass sorted(set(values))"
            )
        object.__setattr__(self, "table", tuple(float(value) for value in rounded))

    @property
    def values(self) -> Floats:
        """All numbers of the format at scale 1, in order of their codes."""
        return _arrays(self.table)[0].copy()

    @property
    def bits(self) -> int:
        """Bits of a code: 8 for more than 128 numbers."""
        return max(1, (len(self.table) - 1).bit_length())

    @property
    def block(self) -> int:
        """0: one scale for all that travels together."""
        return 0

    # ---- arrays -----------------------------------------------------------------------------------------------

    def quantize(self, x: Any) -> Any:
        """Scaled numbers of the table nearest to x: a new array or tensor of the same kind, dtype and shape.

        The scale is x's largest magnitude. A NaN or an Inf makes all of x NaN.
        """
        return self._quantize(x, None)

    def encode(self, x: Any) -> tuple[Any, Any]:
        """Codes of `quantize(x)` as uint8, shaped like x, and the scale, an array of one float32."""
        return self._encode_array(x, None)

    # ---- the arithmetic ---------------------------------------------------------------------------------------

    def _scales(self, buckets: Floats, n: int) -> Floats:
        return np.asarray(np.abs(buckets).max(axis=1, initial=0.0))

    def _codes(self, values: Floats, scales: Floats, random: Random) -> Codes:
        usual = scales > 0  # neither zero nor NaN
        ratios = np.where(usual, values / np.where(usual, scales, np.float32(1)), np.float32(0))
        codes = np.searchsorted(_arrays(self.table)[1], ratios, side="right")
        return np.where(np.isnan(scales), 0, codes).astype(np.uint8)

    def _values(self, codes: Codes, scales: Floats) -> Floats:
        """Codes behind the last number stand for it."""
        return np.asarray(_arrays(self.table)[0][np.minimum(codes, len(self.table) - 1)] * scales)

    # ---- text -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"table({','.join(str(value) for value in _arrays(self.table)[0])})"

    def __repr__(self) -> str:
        return f"TableFormat({list(self.table)})"

    @classmethod
    def parse(cls, text: str) -> TableFormat:
        """The table that `str()` of it names, such as "table(-1.0,0.0,1.0)"."""
        if not text.startswith("table(") or not text.endswith(")"):
            raise ValueError(f"TableFormat: text must look like 'table(-1,0,1)', got {text!r}")
        return TableFormat(float(part) for part in text[6:-1].split(","))

    def describe(self, segment: Table | np.void) -> None:
        """The number of the table."""
        segment["family"], segment["codec"] = FAMILY_TABLE, number_of(*_arrays(self.table))
        segment["flags"], segment["block"] = NEAREST, 0
        segment["exp_bits"], segment["man_bits"] = 0, 0


@lru_cache(maxsize=256)
def _arrays(table: tuple[float, ...]) -> tuple[Floats, Floats]:
    """The numbers, and the least float32 that belongs to each but the first."""
    values = np.array(table, np.float32)
    middles = (values[1:].astype(np.float64) + values[:-1]) / 2
    least = middles.astype(np.float32)
    with np.errstate(over="ignore"):
        above = np.nextafter(least, np.float32(np.inf))
    # Ties go towards zero: what lies above a positive middle, what is not below another.
    least = np.where(np.where(middles > 0, least <= middles, least < middles), above, least)
    return values, least


class _Named(TableFormat):
    """A table with a name of its own."""

    text = ""

    def __init__(self) -> None:
        super().__init__(self._numbers())

    @staticmethod
    @abstractmethod
    def _numbers() -> npt.NDArray[np.float64]:
        """All of them, in order."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{self._kind}()"

    @classmethod
    def parse(cls, text: str) -> TableFormat:
        """The format, for its name."""
        if text != cls.text:
            raise ValueError(f"{cls.__name__}: text must be {cls.text!r}, got {text!r}")
        return cls()


def _both_signs(magnitudes: Iterable[float]) -> npt.NDArray[np.float64]:
    """The magnitudes, 0 and their negatives, in order."""
    positive = np.array(sorted(magnitudes), np.float64)
    return np.concatenate([-positive[::-1], [0.0], positive])


@dataclass(frozen=True, init=False, repr=False)
class DynamicTree(TableFormat):
    """Leading zero bits count decades, the bits behind them bisect (0.1, 1).

    variant="dettmers" is the table of the paper: for t = 1..6 bits of tree, h = 2^(t-1) and k < h, the magnitudes
    10^(t-6) * (0.1 + 0.35 (k + 1/2) / h) and 10^(t-6) * (0.45 + 0.55 (k + 1/2) / h), and 0 and 1: 255 numbers.
    variant="bitsandbytes" is that of the library: for i = 0..6 the midpoints of linspace(0.1, 1, 2^i + 1) times
    10^(i-6) with both signs, and 0 and 1: 256 numbers, of which -1 is none.
    """

    variant: str

    def __init__(self, variant: str = "dettmers") -> None:
        if variant not in ("dettmers", "bitsandbytes"):
            raise ValueError(f"DynamicTree: variant must be 'dettmers' or 'bitsandbytes', got {variant!r}")
        super().__init__(_dettmers() if variant == "dettmers" else _bitsandbytes())
        object.__setattr__(self, "variant", variant)

    def __str__(self) -> str:
        return "dynamic-tree" if self.variant == "dettmers" else "dynamic-tree-bitsandbytes"

    def __repr__(self) -> str:
        return f"DynamicTree({self.variant!r})"

    @classmethod
    def parse(cls, text: str) -> DynamicTree:
        """The format, for "dynamic-tree" or "dynamic-tree-bitsandbytes"."""
        if text not in ("dynamic-tree", "dynamic-tree-bitsandbytes"):
            raise ValueError(f"DynamicTree: text must be 'dynamic-tree' or 'dynamic-tree-bitsandbytes', got {text!r}")
        return cls("dettmers" if text == "dynamic-tree" else "bitsandbytes")


def _dettmers() -> npt.NDArray[np.float64]:
    magnitudes = [1.0]
    for n_bits in range(1, 7):
        half, power = 2 ** (n_bits - 1), 10 ** (6 - n_bits)
        for k in range(half):
            share = (k + 0.5) / half
            magnitudes += [(0.1 + 0.35 * share) / power, (0.45 + 0.55 * share) / power]
    return _both_signs(magnitudes)


def _bitsandbytes() -> npt.NDArray[np.float64]:
    magnitudes: list[float] = []
    for i in range(7):
        bounds = np.linspace(0.1, 1, 2**i + 1)
        magnitudes += list((bounds[1:] + bounds[:-1]) / 2 * 10.0 ** (i - 6))
    return np.append(_both_signs(magnitudes), 1.0)


class Linear(_Named):
    """Multiples of 1/127, both signs and 0: 255 numbers. Small values are lost early."""

    text = "linear"

    @staticmethod
    def _numbers() -> npt.NDArray[np.float64]:
        return _both_signs(k / 127 for k in range(1, 128))


class StaticTree(_Named):
    """Eight decades with the same 16 numbers each, both signs, 0 and 1.

    A decade has 1, then 1.4375 to 4.5 in steps of 0.4375, then 5.175 to 9.225 in steps of 0.675, times 10^-1 to 10^-8.
    Of these 128 the two smallest give way to 0 and 1: 255 numbers.
    """

    text = "static-tree"

    @staticmethod
    def _numbers() -> npt.NDArray[np.float64]:
        decade = [1 + 0.4375 * k for k in range(9)] + [4.5 + 0.675 * k for k in range(1, 8)]
        magnitudes = sorted(number / 10**power for number in decade for power in range(1, 9))
        return _both_signs([*magnitudes[2:], 1.0])


class MantissaTree(_Named):
    """Integers 0 to 15 times 10^-1 to 10^-8, both signs: 227 numbers up to 1.5, of which 1 is the last used."""

    text = "mantissa-tree"

    @staticmethod
    def _numbers() -> npt.NDArray[np.float64]:
        return _both_signs({k / 10**power for k in range(1, 16) for power in range(1, 9)})
