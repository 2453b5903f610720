"""Formats whose messages carry the scales of their blocks: the array functions that all of them share.

A message of n elements is the scales, one per block, and then the codes, densely packed; no elements take no bytes.
Ranks need not agree on a scale. What the exchange agrees on are the two marks of a layer: all zero, and not finite.

A subclass says what the scales of float32 values are, what codes they get, and what codes stand for. That is the
reference in NumPy which the native kernels equal bit for bit; `encode_segment` and `decode_segment` make it a codec in
Python as well (`horovod_aps.kernels.codecs`).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from horovod_aps.formats.base import Format
from horovod_aps.formats.floats import _open, _torch_of
from horovod_aps.kernels import arrays
from horovod_aps.kernels.codecs import Random, Values
from horovod_aps.kernels.native import library
from horovod_aps.kernels.segments import DTYPE_CODES, EXP_NONFINITE, EXP_ZERO, Bytes, packed_bytes

Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]
Scales: TypeAlias = npt.NDArray[Any]


class BlockFormat(Format):
    """A `Format` of codes of at most 8 bits, in blocks with a scale each; values are rounded to float32 first."""

    scale = "block"
    specials = False

    # ---- what a format says -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def scale_dtype(self) -> np.dtype[Any]:
        """Type of a scale in a message."""

    @abstractmethod
    def n_scales(self, n_elements: int) -> int:
        """Scales that n elements have."""

    @abstractmethod
    def scales_of(self, values: Floats, stochastic: bool = False) -> Scales:
        """The scales of flat values, in `scale_dtype`."""

    @abstractmethod
    def codes_of(self, values: Floats, scales: Scales, random: Random = None) -> Codes:
        """The codes of flat values; random: 31 uniform bits for each, or None to round to nearest."""

    @abstractmethod
    def values_of(self, codes: Codes, scales: Scales | None = None) -> Floats:
        """What flat codes stand for; without scales, at a scale of 1."""

    # ---- arrays -----------------------------------------------------------------------------------------------

    def quantize(self, x: Any, rounding: str = "nearest", seed: int | None = None) -> Any:
        """The values that x becomes on its way: a new array or tensor of the same kind, dtype and shape.

        A NaN or an Inf makes all of its block NaN.
        """
        array, wrap, name = self._floats(x)
        codes, scales = self._encode(array, rounding, seed)
        return wrap(_rounded_to(self.values_of(codes, scales), name), array.shape)

    def encode(self, x: Any, rounding: str = "nearest", seed: int | None = None) -> tuple[Codes, Scales]:
        """The codes of x, shaped like it, and the scales of its blocks, as NumPy arrays."""
        array, _, _ = self._floats(x)
        codes, scales = self._encode(array, rounding, seed)
        return codes.reshape(array.shape), scales

    def decode(self, codes: Any, scales: Any = None) -> Floats:
        """float32 values of codes, shaped like them; without scales, at a scale of 1."""
        flat = self._checked_codes(np.asarray(_open(codes)[0]))
        if scales is not None:
            scales = np.asarray(scales)
            if scales.dtype != self.scale_dtype or scales.shape != (self.n_scales(flat.size),):
                raise ValueError(
                    f"{self._class}: scales must be {self.n_scales(flat.size)} of {self.scale_dtype} for {flat.size} "
                    f"codes, as encode returns them, got {scales.dtype} of shape {scales.shape}"
                )
        return self.values_of(flat.reshape(-1), scales).reshape(flat.shape)

    def pack(self, codes: Any, scales: Any) -> Bytes:
        """The bytes of a message: the scales, then the codes, little-endian, the last byte filled up with zeros."""
        flat = self._checked_codes(np.asarray(_open(codes)[0])).reshape(-1)
        side = np.asarray(scales, self.scale_dtype).reshape(-1)
        if side.size != self.n_scales(flat.size):
            raise ValueError(f"{self._class}: scales must be {self.n_scales(flat.size)}, got {side.size}")
        return np.concatenate([side.view(np.uint8), arrays.pack_codes(flat, self.bits)])

    def unpack(self, packed: Any, n: int) -> tuple[Codes, Scales]:
        """The n codes and the scales of what `pack` made: bytes, or a uint8 array or tensor."""
        if isinstance(packed, (bytes, bytearray, memoryview)):
            packed = np.frombuffer(packed, dtype=np.uint8)
        data = np.ascontiguousarray(_open(packed)[0])
        if data.dtype != np.uint8:
            raise TypeError(f"{self._class}: packed must be bytes or uint8, got {data.dtype}")
        if n < 0 or data.size < self.bytes_for(n):
            raise ValueError(f"{self._class}: packed must hold {self.bytes_for(max(n, 0))} bytes for n={n}")
        side = self.side_bytes(n)
        scales = data.reshape(-1)[:side].copy().view(self.scale_dtype)
        codes = data.reshape(-1)[side : side + packed_bytes(n, self.bits)]
        return arrays.unpack_codes(codes, self.bits, n), scales

    def side_bytes(self, n_elements: int) -> int:
        """Bytes of the scales."""
        return self.n_scales(n_elements) * self.scale_dtype.itemsize

    # ---- a codec in Python ------------------------------------------------------------------------------------

    def exponent_of(self, values: Values, stochastic: bool) -> int:
        """0, or a mark: float32 holds every value as 0, or cannot hold one."""
        floats = _to_float32(values)
        return EXP_NONFINITE if not np.isfinite(floats).all() else 0 if floats.any() else EXP_ZERO

    def encode_segment(self, values: Values, exponent: int, random: Random) -> Bytes:
        """The bytes of a segment; see `codecs.HostCodec`."""
        floats = _to_float32(values)
        random = None if self.rounding == "nearest" else random
        scales = self.scales_of(floats, random is not None)
        return self.pack(self.codes_of(floats, scales, random), scales)

    def decode_segment(self, data: Bytes, n_elements: int, exponent: int) -> Values:
        """The values of a segment's bytes, which float32 holds."""
        return self.values_of(*self.unpack(data, n_elements)).astype(np.float64)

    # ---- arguments --------------------------------------------------------------------------------------------

    @property
    def _class(self) -> str:
        return type(self).__name__

    def _floats(self, x: Any) -> tuple[Floats, Any, str]:
        """x as float32, what gives a result x's kind, and the name of x's dtype."""
        array, wrap = _open(x)
        torch = _torch_of(x)
        name = str(x.dtype).removeprefix("torch.") if torch else array.dtype.newbyteorder("=").name
        if name not in DTYPE_CODES:
            raise TypeError(f"{self._class}: x must be float32, float64, float16 or bfloat16, got {name}")
        if name == "bfloat16":
            floats = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            floats = _to_float32(array)

        def give(result: npt.NDArray[Any], shape: tuple[int, ...]) -> Any:
            if name != "bfloat16":
                return wrap(result.reshape(shape))
            if torch:
                return wrap(result.reshape(shape).view(np.int16)).view(torch.bfloat16)
            return result.reshape(shape).view(array.dtype)

        return floats, give, name

    def _encode(self, floats: Floats, rounding: str, seed: int | None) -> tuple[Codes, Scales]:
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"{self._class}: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
        if rounding == "stochastic" and self.rounding == "nearest":
            raise ValueError(f"{self._class}: rounding must be 'nearest'; MX and QSGD round stochastically")
        flat, random = np.ascontiguousarray(floats).reshape(-1), None
        if rounding == "stochastic":
            seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
            random = np.empty(flat.size, np.uint32)
            library().aps_random_array(random.ctypes.data, flat.size, seed & (2**64 - 1), 0, 0)
        scales = self.scales_of(flat, random is not None)
        return self.codes_of(flat, scales, random), scales

    def _checked_codes(self, codes: npt.NDArray[Any]) -> Codes:
        if codes.dtype.kind not in "iu":
            raise TypeError(f"{self._class}: codes must be integers, got {codes.dtype}")
        if codes.size and not (0 <= int(codes.min()) and int(codes.max()) < 1 << self.bits):
            raise ValueError(f"{self._class}: codes must be in 0..{(1 << self.bits) - 1}")
        return np.ascontiguousarray(codes, np.uint8).reshape(codes.shape)


def _to_float32(values: npt.NDArray[Any]) -> Floats:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _rounded_to(values: Floats, name: str) -> npt.NDArray[Any]:
    """Values in a dtype, to nearest; bfloat16 as its bits."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(name)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
