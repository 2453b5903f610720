"""Formats whose codec is written in Python, and how the CPU kernels' operations follow from it.

A native family has its loops in cuda/aps_cpu_*.inc. A format that has none registers itself here and says how values
become bytes and back; sums, scaling by `factor`, error feedback, NaN and zeros are the same for all of them and are
done here, one segment at a time. That is slow (NumPy, one thread) and right: the way to try a format out, and the
oracle of a native family to come.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from horovod_aps.kernels.native import library, raise_on_error
from horovod_aps.kernels.segments import (
    BFLOAT16,
    EXP_NONFINITE,
    EXP_ZERO,
    FAMILY_HOST,
    ITEM_SIZES,
    NEAREST,
    SUM_FLOAT,
    Bytes,
    Table,
)

Values: TypeAlias = npt.NDArray[np.float64]
Random: TypeAlias = "npt.NDArray[np.uint32] | None"
_STORED = (np.float32, np.float64, np.float16, np.uint16)  # by dtype code; NumPy has no bfloat16


class HostCodec(Hashable, Protocol):
    """What a format in Python must be able to do with the values of one segment, all finite and not all zero."""

    def bytes_for(self, n_elements: int) -> int:
        """Bytes of n elements, the scales of their blocks included."""
        ...

    def exponent_of(self, values: Values, stochastic: bool) -> int:
        """The exponent that the values need; the largest of all ranks is what `encode_segment` gets. 0 if unused."""
        ...

    def encode_segment(self, values: Values, exponent: int, random: Random) -> Bytes:
        """`bytes_for(len(values))` bytes; random: of `random_bits`, or None to round to nearest."""
        ...

    def decode_segment(self, data: Bytes, n_elements: int, exponent: int) -> Values:
        """The values that the bytes stand for, in true units."""
        ...

    def random_bits(self, n: int, seed: int | None, uid: int, first: int) -> Random:
        """What is drawn for n elements of a layer, from its element `first` on; see the function."""
        ...


def random_bits(n: int, seed: int | None, uid: int = 0, first: int = 0, bits: int = 31) -> Random:
    """31 or 16 uniform bits for n elements of layer `uid`, from its element `first` on, as the kernels draw them.

    None without a seed.
    """
    if seed is None:
        return None
    out = np.empty(n, np.uint32)
    draw = library().aps_random_array if bits == 31 else library().aps_random16_array
    draw(out.ctypes.data, n, seed & (2**64 - 1), uid, first)
    return out


_codecs: list[HostCodec] = []
_numbers: dict[HostCodec, int] = {}
_lock = threading.Lock()


def number_of(codec: HostCodec) -> int:
    """The number by which segments of this process name a codec; equal codecs have the same."""
    with _lock:
        if codec not in _numbers:
            if len(_codecs) > np.iinfo(np.uint16).max:
                raise ValueError("horovod_aps: too many different formats in one process")
            _numbers[codec] = len(_codecs)
            _codecs.append(codec)
        return _numbers[codec]


# ---- splitting a table ------------------------------------------------------------------------------------


def is_hosted(segs: Table) -> bool:
    """Whether any segment has a format in Python."""
    return bool((segs["family"] == FAMILY_HOST).any())


def split(
    function: str,
    segs: Table,
    length: int,
    native: Callable[[Table, npt.NDArray[np.bool_]], object],
    hosted: Callable[[int, Segment], None],
) -> None:
    """Check the segments in Python, run the others natively, write their exponents back, then run ours."""
    is_host = segs["family"] == FAMILY_HOST
    ours = [(int(row), Segment(function, segs, int(row), length)) for row in np.flatnonzero(is_host)]
    part = segs[~is_host]
    native(part, ~is_host)
    segs[~is_host] = part
    for row, segment in ours:
        hosted(row, segment)


class Segment:
    """One segment of a table, with its codec and its memory."""

    def __init__(self, function: str, segs: Table, row: int, length: int) -> None:
        self._record = segs[row]  # a view: setting its exponent sets the table's
        self.n, self.offset, self.dtype = (int(self._record[field]) for field in ("n", "offset", "dtype"))
        number = int(self._record["codec"])
        # The same reasons and numbers as cuda/aps_cpu.cpp's.
        reason = 0
        if number >= len(_codecs):
            reason = 7
        elif self.dtype >= len(ITEM_SIZES):
            reason = 2
        elif self.n < 0:
            reason = 5
        elif function != "reduce" and self.n and not self._record["data"]:
            reason = 3
        elif length >= 0 and not 0 <= self.offset <= length - _codecs[number].bytes_for(self.n):
            reason = 4
        raise_on_error(function, 16 * (row + 1) + reason if reason else 0)
        self.codec = _codecs[number]
        self.n_bytes = self.codec.bytes_for(self.n)

    @property
    def exponent(self) -> int:
        """The exponent, or one of the two marks."""
        return int(self._record["exponent"])

    @exponent.setter
    def exponent(self, value: int) -> None:
        self._record["exponent"] = value

    @property
    def is_constant(self) -> bool:
        """Whether the layer is all zero, or not finite: nothing to encode."""
        return self.exponent in (EXP_ZERO, EXP_NONFINITE)

    def _memory(self) -> npt.NDArray[np.generic]:
        return _bytes_at(int(self._record["data"]), self.n * ITEM_SIZES[self.dtype]).view(_STORED[self.dtype])

    def load(self) -> Values:
        """The segment's elements; float64 holds every one exactly."""
        stored = self._memory()
        if self.dtype == BFLOAT16:
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float64)

    def store(self, values: Values) -> None:
        """Round the values to the segment's dtype and write them."""
        with np.errstate(over="ignore"):
            if self.dtype != BFLOAT16:
                self._memory()[:] = values.astype(_STORED[self.dtype])
                return
            bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        self._memory()[:] = np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)

    # ---- the operations -----------------------------------------------------------------------------------

    def scan(self, stochastic: bool) -> None:
        """See Kernels.scan."""
        self.exponent = self._exponent_of(self.load(), stochastic)

    @property
    def _draws(self) -> bool:
        """Whether it rounds stochastically where there is a seed."""
        return not int(self._record["flags"]) & NEAREST

    def _exponent_of(self, values: Values, stochastic: bool) -> int:
        if not np.isfinite(values).all():
            return EXP_NONFINITE
        return self.codec.exponent_of(values, stochastic and self._draws) if values.any() else EXP_ZERO

    def encode(self, message: int, seed: int | None) -> None:
        """See Kernels.encode."""
        self._write(message, None if self.is_constant else self.load(), seed)

    def _write(self, message: int, values: Values | None, seed: int | None) -> None:
        out = _bytes_at(message + self.offset, self.n_bytes)
        out[:] = 0 if values is None else self.codec.encode_segment(values, self.exponent, self._random(seed))

    def _random(self, seed: int | None) -> Random:
        uid, first = int(self._record["uid"]), int(self._record["first"])
        return self.codec.random_bits(self.n, seed if self._draws else None, uid, first)

    def _values(self, message: int) -> Values:
        """What one message says; zeros and NaN where there was nothing to encode."""
        if self.is_constant:
            return np.full(self.n, 0.0 if self.exponent == EXP_ZERO else np.nan)
        data = _bytes_at(message + self.offset, self.n_bytes)
        return np.asarray(self.codec.decode_segment(data, self.n, self.exponent), np.float64)

    def _sum(self, function: str, messages: Sequence[int], accumulate: int) -> Values:
        if accumulate != SUM_FLOAT:
            raise ValueError(f"{function}: {self.codec} has no arithmetic of its own; accumulate must be 0")
        total = self._values(messages[0])
        for message in messages[1:]:
            total = total + self._values(message)
        return total

    def decode(self, messages: Sequence[int], accumulate: int) -> None:
        """See Kernels.decode."""
        self.store(self._sum("decode", messages, accumulate) * float(self._record["factor"]))

    def reduce(self, messages: Sequence[int], accumulate: int, out: int, seed: int | None, keep: bool) -> None:
        """See Kernels.reduce."""
        if self.is_constant:
            self._write(out, None, seed)
            return
        total = self._sum("reduce", messages, accumulate)
        if not keep:
            self.exponent = self._exponent_of(total, seed is not None)
        self._write(out, None if self.is_constant else total, seed)

    def residual(self, message: int) -> None:
        """See Kernels.residual."""
        lost = np.zeros(self.n) if self.exponent == EXP_NONFINITE else self.load() - self._values(message)
        self.store(lost)

    def measure(self, message: int) -> Values:
        """See Kernels.measure."""
        values, decoded = self.load(), self._values(message)
        lost = np.count_nonzero((values != 0) & (decoded == 0))
        error = values - decoded
        return np.array([lost, error @ error, values @ values, np.abs(values).max(initial=0.0)], np.float64)


def _bytes_at(address: int, n_bytes: int) -> Bytes:
    """The memory at an address as an array."""
    if n_bytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_uint8 * n_bytes).from_address(address)), np.uint8)
