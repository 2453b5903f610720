"""What a wire format is: how the elements of a layer become bytes, as far as layout, options and messages see it.

First stop of the flow gradient -> scale -> pack -> exchange -> reduce -> unpack: options give every layer a `Format`,
the layout cuts the layer by it, and `describe` tells the kernels. A format is a small record that compares by value;
its arithmetic is in the kernels' code of its family, or in Python (`host.HostFormat`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from horovod_aps.kernels.segments import UNIT, Table, packed_bytes

_families: list[type[Format]] = []


class Format(ABC):
    """How one layer travels."""

    scale: Literal["none", "layer", "block"] = "layer"
    """What is scaled together: nothing, a layer by the exponent that all ranks share, or blocks by side information."""
    specials: bool = True
    """Whether some codes stand for Inf and NaN; a field of its own in messages."""
    rounding: Literal["option", "nearest", "stochastic"] = "option"
    """Whether the compressor's `rounding` counts, or the format always rounds in one way."""
    needs_error_feedback: bool = False
    """Whether training goes wrong unless what rounding loses is added to the next gradient."""
    rounds_sums: bool = False
    """Whether there is an arithmetic of the format's own, for accumulate="format" and "kahan"."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _families.append(cls)

    def for_shape(self, shape: tuple[int, ...]) -> Format:
        """The format of a layer of this shape, for formats that look at rows and columns."""
        return self

    # ---- size -----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per element on the wire, without side information."""

    @property
    def unit(self) -> int:
        """Elements at multiples of which a layer may be cut: whole bytes, and whole blocks."""
        return UNIT

    def side_bytes(self, n_elements: int) -> int:
        """Bytes of side information that travel with n elements, such as one scale per block."""
        return 0

    def bytes_for(self, n_elements: int) -> int:
        """Bytes that n elements take in a message, side information included."""
        return packed_bytes(n_elements, self.bits) + self.side_bytes(n_elements)

    @property
    def top_exponent(self) -> int:
        """The exponent at which a layer is encoded at a scale of 1; 0 where layers are not scaled."""
        return 0

    # ---- text -----------------------------------------------------------------------------------------------

    @abstractmethod
    def __str__(self) -> str:
        """The format in options; `parse` reads it."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Format:
        """The format that `str()` of it names; ValueError for any other text."""

    @property
    def name(self) -> str:
        """The format in statistics and messages, which have a field of their own for `specials`."""
        return str(self)

    # ---- kernels --------------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self, segment: Table | np.void) -> None:
        """Fill in what the kernels must know: family, and the fields that the family reads."""


def parse(text: str) -> Format:
    """The format of any family that `text` names, such as "e4m3" or "float32"."""
    for family in _families:
        if not inspect.isabstract(family):
            try:
                return family.parse(text)
            except ValueError:
                continue
    raise ValueError(f"horovod_aps: no format is called {text!r}")
