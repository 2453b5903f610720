"""Formats whose codec is written in Python: for trying one out, and as the oracle of a native one.

A subclass says how the values of a segment become bytes and back; everything else (sums, error feedback, NaN, zeros,
statistics) is done for it, see `horovod_aps.kernels.codecs`. It must compare by value and be hashable: a frozen
dataclass is. Only the CPU kernels take it.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from horovod_aps.formats.base import Format
from horovod_aps.kernels import codecs
from horovod_aps.kernels.codecs import Random, Values
from horovod_aps.kernels.segments import FAMILY_HOST, Bytes, Table


class HostFormat(Format):
    """A `Format` that is its own codec; see `codecs.HostCodec` for what the three methods get and return."""

    scale = "block"

    def exponent_of(self, values: Values, stochastic: bool) -> int:
        """The exponent that finite values, not all zero, need of a layer; 0 for a scale of one's own."""
        return 0

    @abstractmethod
    def encode_segment(self, values: Values, exponent: int, random: Random) -> Bytes:
        """`bytes_for(len(values))` bytes."""

    @abstractmethod
    def decode_segment(self, data: Bytes, n_elements: int, exponent: int) -> Values:
        """The values that the bytes stand for, in true units."""

    def random_bits(self, n: int, seed: int | None, uid: int = 0, first: int = 0) -> Random:
        """31 uniform bits for each element; None without a seed."""
        return codecs.random_bits(n, seed, uid, first)

    def describe(self, segment: Table | np.void) -> None:
        """The number under which the codec is known in this process."""
        segment["family"], segment["codec"], segment["flags"] = FAMILY_HOST, codecs.number_of(self), 0
