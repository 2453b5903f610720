"""Formats that send the scales of their buckets along with the codes: what `QSGD` and `OneBit` share.

A layer is cut into buckets of consecutive elements. A message has first the float32 scales of all its buckets, then
the codes, densely packed. Ranks need not agree on a scale, so the exponent of a layer says only whether it is all zero
or not finite. This is the reference in NumPy; the kernels (cuda/aps_buckets.h) give the same bits.

Elements count as float32: float64 is rounded to it first, and what is beyond its range is not finite. Sums over a
bucket are the same on every device: `bucket_sums`.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from horovod_aps.formats.base import Format
from horovod_aps.formats.floats import _open, _torch_of
from horovod_aps.kernels import arrays
from horovod_aps.kernels.codecs import Random, Values, random_bits
from horovod_aps.kernels.segments import DTYPE_CODES, EXP_NONFINITE, EXP_ZERO, UNIT, Bytes, packed_bytes

Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]

CHUNK = 256  # as APS_CHUNK in cuda/aps_buckets.h
LANES = 8
MAX_BUCKET = 2**30


def bucket_sums(terms: Values) -> Values:
    """Sums of the rows of a matrix, in double, in the order that all devices keep.

    A row is cut into chunks of 256. Element j of a chunk is added to its partial sum j mod 8, one after the other; then
    the partial sums are added pairwise, 0+4, 1+5, 2+6, 3+7, of these 0+2 and 1+3, and of these both. The sums of the
    chunks are added one after the other.
    """
    rows, n = terms.shape
    n_chunks = -(-n // CHUNK)
    padded = np.zeros((rows, n_chunks * CHUNK))
    padded[:, :n] = terms
    parts = padded.reshape(rows, n_chunks, CHUNK // LANES, LANES)
    lanes = np.zeros((rows, n_chunks, LANES))
    for step in range(min(CHUNK // LANES, -(-n // LANES))):
        lanes += parts[:, :, step, :]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    return np.asarray(np.cumsum(lanes[:, :, 0], axis=1)[:, -1])


class BucketFormat(Format):
    """A format whose buckets carry `n_sides` scales each, float32 unless `scale_dtype` says otherwise."""

    scale = "block"
    n_sides: int = 1
    scale_dtype: npt.DTypeLike = np.float32
    nan_scale: float = np.nan  # of a bucket that is not finite

    # ---- what a subclass says -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def block(self) -> int:
        """Elements of a bucket; 0: all that a message has of the layer."""

    @abstractmethod
    def _scales(self, buckets: Floats, n: int) -> Floats:
        """`n_sides` float32 for each row of a matrix, of whose elements only the first n are there, the rest zero."""

    @abstractmethod
    def _codes(self, values: Floats, scales: Floats, random: Random) -> Codes:
        """The codes of values, given the scales of the bucket of each."""

    @abstractmethod
    def _values(self, codes: Codes, scales: Floats) -> Floats:
        """The values of codes, given the scales of the bucket of each."""

    # ---- size -----------------------------------------------------------------------------------------------

    @property
    def unit(self) -> int:
        """Whole buckets in whole bytes; 8 where a bucket is all that a message has."""
        return math.lcm(UNIT, self.block or 1)

    def n_buckets(self, n_elements: int) -> int:
        """Buckets of n elements."""
        return -(-n_elements // (self.block or max(n_elements, 1)))

    def side_bytes(self, n_elements: int) -> int:
        """Bytes of the scales of all buckets."""
        return np.dtype(self.scale_dtype).itemsize * self.n_sides * self.n_buckets(n_elements)

    # ---- segments, as a `codecs.HostCodec` has it --------------------------------------------------------------

    def exponent_of(self, values: Values, stochastic: bool) -> int:
        """0, or what float32 makes of the values: not finite, or zero."""
        top = _float32(np.abs(values).max())
        return EXP_NONFINITE if not np.isfinite(top) else 0 if top else EXP_ZERO

    def encode_segment(self, values: Values, exponent: int, random: Random) -> Bytes:
        """Scales, then codes; no random bits: to nearest, where the format draws."""
        codes, scales = self._encode(_float32(values), random)
        return np.concatenate([scales.reshape(-1).view(np.uint8), arrays.pack_codes(codes, self.bits)])

    def decode_segment(self, data: Bytes, n_elements: int, exponent: int) -> Values:
        """The values in true units; float32 holds them."""
        codes, scales = self._split(data, n_elements)
        return self._decode(codes, scales).astype(np.float64)

    # ---- arrays ---------------------------------------------------------------------------------------------

    def _quantize(self, x: Any, seed: int | None) -> Any:
        values, like = self._open(x)
        return like(self._decode(*self._encode(values, self.random_bits(values.size, seed))))

    def _encode_array(self, x: Any, seed: int | None) -> tuple[Any, Any]:
        values, _ = self._open(x)
        _, wrap = _open(x)
        codes, scales = self._encode(values, self.random_bits(values.size, seed))
        return wrap(codes.reshape(np.shape(x))), wrap(scales)

    def decode(self, codes: Any, scales: Any) -> Any:
        """float32 values of codes, shaped like them, and the scales that `encode` gave with them."""
        array, wrap = _open(codes)
        flat = self._checked_codes(array)
        return wrap(self._decode(flat, self._checked_scales(scales, flat.size)).reshape(array.shape))

    def pack(self, codes: Any, scales: Any) -> Any:
        """What travels: the scales, then the codes as `FloatFormat.pack` packs them; `bytes_for(n)` bytes."""
        array, wrap = _open(codes)
        flat = self._checked_codes(array)
        sides = self._checked_scales(scales, flat.size).reshape(-1).view(np.uint8)
        return wrap(np.concatenate([sides, arrays.pack_codes(flat, self.bits)]))

    def unpack(self, packed: Any, n: int) -> tuple[Any, Any]:
        """The n codes, flat, and the scales of what `pack` made (bytes, a uint8 array or tensor)."""
        if isinstance(packed, (bytes, bytearray, memoryview)):
            packed = np.frombuffer(packed, dtype=np.uint8)
        array, wrap = _open(packed)
        if array.dtype != np.uint8:
            raise TypeError(f"{self._kind}: packed must be bytes or uint8, got {array.dtype}")
        count = checked_int(self._kind, "n", n, 0, 2**60, "it is the number of elements that were packed")
        if array.size < self.bytes_for(count):
            raise ValueError(
                f"{self._kind}: packed must hold at least {self.bytes_for(count)} bytes for n={count}, got {array.size}"
            )
        codes, scales = self._split(np.ascontiguousarray(array).reshape(-1), count)
        return wrap(codes), wrap(scales)

    # ---- random bits ----------------------------------------------------------------------------------------

    def random_bits(self, n: int, seed: int | None, uid: int = 0, first: int = 0) -> Random:
        """What the kernels draw for n elements of a layer, from its element `first` on; None without a seed."""
        return random_bits(n, seed, uid, first)

    # ---- the steps ------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> str:
        return type(self).__name__

    def _encode(self, values: Floats, random: Random) -> tuple[Codes, Floats]:
        """Codes, and scales of shape (buckets,) or (buckets, n_sides)."""
        n, block = values.size, self._block_of(values.size)
        n_buckets = self.n_buckets(n)
        padded = np.zeros(n_buckets * block, np.float32)
        padded[:n] = values
        whole = n // block
        rows = padded.reshape(-1, block)
        with np.errstate(invalid="ignore", over="ignore"):
            parts = [self._scales(rows[:whole], block), self._scales(rows[whole:], n - whole * block)]
            scales = np.concatenate(parts).astype(self.scale_dtype)
            scales[~np.isfinite(rows).all(axis=1)] = self.nan_scale
            codes = self._codes(values, self._spread(scales, n), random)
        return codes, scales

    def _decode(self, codes: Codes, scales: Floats) -> Floats:
        with np.errstate(invalid="ignore", over="ignore"):
            return self._values(codes, self._spread(scales, codes.size))

    def _spread(self, scales: Floats, n: int) -> Floats:
        """The scales of the bucket of each element."""
        return np.repeat(scales, self._block_of(n), axis=0)[:n]

    def _block_of(self, n: int) -> int:
        """Elements of a bucket, of n at most."""
        return max(min(self.block or n, n), 1)

    def _split(self, data: Bytes, n: int) -> tuple[Codes, Floats]:
        sides = self.side_bytes(n)
        shape = (-1,) if self.n_sides == 1 else (-1, self.n_sides)
        scales = data[:sides].copy().view(self.scale_dtype).reshape(shape)
        return arrays.unpack_codes(data[sides : sides + packed_bytes(n, self.bits)], self.bits, n), scales

    # ---- arguments ------------------------------------------------------------------------------------------

    def _open(self, x: Any) -> tuple[Floats, Any]:
        """x as flat float32, and what gives values x's kind, dtype and shape."""
        array, wrap = _open(x)
        torch = _torch_of(x)
        is_bfloat16 = x.dtype == torch.bfloat16 if torch else array.dtype.name == "bfloat16"
        if not is_bfloat16 and array.dtype.newbyteorder("=").name not in DTYPE_CODES:
            raise TypeError(f"{self._kind}: x must be float32, float64, float16 or bfloat16, got {array.dtype}")
        if is_bfloat16:
            values = (np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = _float32(array)

        def like(result: Floats) -> Any:
            shaped = result.reshape(array.shape)
            if torch:
                return torch.from_numpy(shaped).to(x.device, x.dtype)
            with np.errstate(over="ignore"):
                return shaped.astype(array.dtype)

        return values.reshape(-1), like

    def _checked_codes(self, codes: npt.NDArray[Any]) -> Codes:
        if codes.dtype.kind not in "iu":
            raise TypeError(f"{self._kind}: codes must be integers, got {codes.dtype}")
        if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << self.bits:
            raise ValueError(f"{self._kind}: codes must be in 0..{(1 << self.bits) - 1} for {self}")
        return np.ascontiguousarray(codes, np.uint8).reshape(-1)

    def _checked_scales(self, scales: Any, n: int) -> Floats:
        array, _ = _open(scales)
        wanted = (self.n_buckets(n),) if self.n_sides == 1 else (self.n_buckets(n), self.n_sides)
        if array.dtype != self.scale_dtype or array.shape != wanted:
            raise ValueError(
                f"{self._kind}: scales must be {np.dtype(self.scale_dtype)} of shape {wanted} for {n} codes, "
                f"as `encode` gives them, got {array.dtype} of shape {array.shape}"
            )
        return np.ascontiguousarray(array)


def checked_int(kind: str, name: str, value: Any, low: int, high: int, hint: str) -> int:
    """`value` as an int within low..high; bool and float are no integers."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{kind}: {name} must be an integer in {low}..{high}, got {value!r}: {hint}")
    if not low <= number <= high:
        raise ValueError(f"{kind}: {name} must be in {low}..{high}, got {number}: {hint}")
    return number


def _float32(values: npt.NDArray[Any]) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float32)
