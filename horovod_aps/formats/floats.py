"""Number formats of 1 sign, e exponent and m mantissa bits: rounding to them, their codes, dense packing.

A `FloatFormat` is what the user names a format by and what most layers of the exchange are encoded in. The
array methods work on plain arrays in the format's own, unscaled domain; the exchange itself scales each layer
first and calls the segment kernels. All arithmetic is in the native library (`horovod_aps.kernels`); this
module checks arguments and takes NumPy arrays and torch tensors apart. It never imports torch.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_aps.formats.base import Format
from horovod_aps.kernels import arrays
from horovod_aps.kernels.segments import BFLOAT16, DTYPE_CODES, FAMILY_FLOAT, SPECIALS, Table, packed_bytes

MAX_EXP_BITS = 8
MAX_MAN_BITS = 23
ROUNDINGS = ("nearest", "stochastic")
FINITE_SUFFIX = "-finite"


@dataclass(frozen=True, init=False, repr=False)
class FloatFormat(Format):
    """A floating-point format with 1 sign bit, `e` exponent bits (1..8) and `m` mantissa bits (0..23).

    The bias is 2^(e-1) - 1, and there are subnormals.
    With `specials` (IEEE-like) the top exponent is kept for Inf and NaN, and overflow rounds to Inf as in
    IEEE 754; (4, 3) then reaches 240 and (5, 2) 57344. Without, every code is a finite number and overflow
    saturates, as in the OCP MX formats: (2, 1) reaches 6. A code is sign << (e+m) | exponent << m | mantissa.
    """

    exp_bits: int
    man_bits: int
    specials: bool

    rounds_sums = True

    def __init__(self, e: int, m: int, specials: bool = True) -> None:
        exp_bits = _checked_int("e", e, 1, MAX_EXP_BITS)
        man_bits = _checked_int("m", m, 0, MAX_MAN_BITS)
        if not isinstance(specials, (bool, np.bool_)):
            raise TypeError(f"FloatFormat: specials must be True or False, got {specials!r}")
        if specials and exp_bits == 1 and man_bits == 0:
            raise ValueError(
                "FloatFormat: m must be in 1..23 for e=1 with specials=True, got 0: zero would be the only finite value"
            )
        object.__setattr__(self, "exp_bits", exp_bits)
        object.__setattr__(self, "man_bits", man_bits)
        object.__setattr__(self, "specials", bool(specials))

    @classmethod
    def parse(cls, text: str) -> FloatFormat:
        """The format that `str()` of it names: "e4m3", or "e2m1-finite" for specials=False."""
        if not isinstance(text, str):
            raise TypeError(f"FloatFormat: text must be a string such as 'e4m3', got {text!r}")
        match = re.fullmatch(rf"e(\d)m(\d\d?)({FINITE_SUFFIX})?", text)
        if match is None:
            raise ValueError(f"FloatFormat: text must look like 'e4m3' or 'e2m1{FINITE_SUFFIX}', got {text!r}")
        return cls(int(match[1]), int(match[2]), specials=match[3] is None)

    def __str__(self) -> str:
        return self.name + ("" if self.specials else FINITE_SUFFIX)

    @property
    def name(self) -> str:
        """The format in statistics and messages: "e4m3", with specials or without."""
        return f"e{self.exp_bits}m{self.man_bits}"

    def describe(self, segment: Table | np.void) -> None:
        """Exponent and mantissa bits, and the flag for specials."""
        segment["family"], segment["codec"] = FAMILY_FLOAT, 0
        segment["exp_bits"], segment["man_bits"] = self.exp_bits, self.man_bits
        segment["flags"] = SPECIALS if self.specials else 0

    def __repr__(self) -> str:
        specials = "" if self.specials else ", specials=False"
        return f"FloatFormat(e={self.exp_bits}, m={self.man_bits}{specials})"

    # ----------------------------------------------------------------------------------------------- limits

    @property
    def bits(self) -> int:
        """Width of a code, 1 + e + m; what one element costs on the wire."""
        return 1 + self.exp_bits + self.man_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field, 2^(e-1) - 1."""
        return int(2 ** (self.exp_bits - 1) - 1)

    @property
    def max_code(self) -> int:
        """Largest finite code: the one below Inf, or all ones without specials."""
        n_positive = 1 << (self.exp_bits + self.man_bits)
        return n_positive - (1 << self.man_bits) - 1 if self.specials else n_positive - 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        field, mantissa = divmod(self.max_code, 1 << self.man_bits)
        significand = mantissa + (1 << self.man_bits if field else 0)
        return float(significand * 2.0 ** (max(field, 1) - self.bias - self.man_bits))

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)): the binade of the largest value."""
        return (1 << self.exp_bits) - (2 if self.specials else 1) - self.bias

    @property
    def top_exponent(self) -> int:
        """The exponent that a layer's largest gradient gets: `max_exponent`; 1 for e=1, which has only subnormals."""
        return max(1, (1 << self.exp_bits) - (2 if self.specials else 1)) - self.bias

    @property
    def min_normal(self) -> float:
        """Smallest value with full precision; just above `max` for e=1 with specials, which has none."""
        return float(2.0 ** (1 - self.bias))

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value; equal to `min_normal` if m = 0."""
        return float(2.0 ** (1 - self.bias - self.man_bits))

    @property
    def epsilon(self) -> float:
        """Spacing of normal values relative to their power of two, 2^-m; rounding errs by half of it."""
        return float(2.0**-self.man_bits)

    @property
    def binades(self) -> int:
        """Dynamic range: powers of two from the smallest subnormal to the largest value (e5m2: 32)."""
        return self.max_exponent - (1 - self.bias - self.man_bits) + 1

    @property
    def normal_binades(self) -> int:
        """The part of the dynamic range that has full precision (e4m3: 14)."""
        return self.max_exponent - (1 - self.bias) + 1

    @property
    def code_dtype(self) -> np.dtype[Any]:
        """NumPy type of the codes: uint8 up to 8 bits, uint16 up to 16, else uint32."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)

    # ----------------------------------------------------------------------------------------------- arrays

    def quantize(self, x: Any, rounding: str = "nearest", seed: int | None = None) -> Any:
        """Values of the format nearest to x: a new array or tensor of the same kind, dtype and shape.

        Ties go to even; one rounding, straight from x's dtype. Stochastic rounding goes up with the
        probability that makes it unbiased; the same seed gives the same result, and None draws a fresh seed.
        (`seed` has no effect with "nearest".) Overflow and Inf: Inf with specials, else the largest value.
        NaN stays NaN; with specials and m=0 it becomes Inf, the only non-finite code; without specials there
        is no code for it, and as in ml_dtypes it becomes zero, so look for NaN first where it matters (the
        exchange does). A result beyond the range of x's own dtype is Inf in it (65504 as float16 rounds to
        65536 in e6m2).
        """
        random = _checked_seed(rounding, seed)
        return _apply_to_floats(x, lambda a, dtype: arrays.quantize_array(a, dtype, *self._key, random))

    def encode(self, x: Any, rounding: str = "nearest", seed: int | None = None) -> Any:
        """Codes of `quantize(x)`, in `code_dtype`, shaped like x."""
        random = _checked_seed(rounding, seed)
        return _apply_to_floats(x, lambda a, dtype: arrays.encode_array(a, dtype, *self._key, random), codes=True)

    def decode(self, codes: Any) -> Any:
        """float32 values of integer codes, shaped like them.

        Exact, except that e=8 without specials has a top binade beyond float32, which decodes to Inf.
        """
        array, wrap = _open(codes)
        return wrap(arrays.decode_array(self._checked_codes(array), *self._key))

    def pack(self, codes: Any) -> Any:
        """The codes, densely packed: a flat string of ceil(n * bits / 8) uint8.

        Code i has the bits from i * bits on, little-endian; the rest of the last byte is zero.
        """
        array, wrap = _open(codes)
        return wrap(arrays.pack_codes(self._checked_codes(array).reshape(-1), self.bits))

    def unpack(self, packed: Any, n: int) -> Any:
        """The first n codes of what `pack` made (bytes, a uint8 array or tensor), flat, in `code_dtype`."""
        if isinstance(packed, (bytes, bytearray, memoryview)):
            packed = np.frombuffer(packed, dtype=np.uint8)
        array, wrap = _open(packed)
        if array.dtype != np.uint8:
            raise TypeError(f"FloatFormat: packed must be bytes or uint8, got {array.dtype}")
        count = _checked_int("n", n, 0, 2**60)
        n_bytes = packed_bytes(count, self.bits)
        if array.size < n_bytes:
            raise ValueError(
                f"FloatFormat: packed must hold at least {n_bytes} bytes for n={count} codes "
                f"of {self.bits} bits, got {array.size}"
            )
        return wrap(arrays.unpack_codes(np.ascontiguousarray(array).reshape(-1)[:n_bytes], self.bits, count))

    @property
    def _key(self) -> tuple[int, int, bool]:
        return self.exp_bits, self.man_bits, self.specials

    def _checked_codes(self, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Contiguous codes in `code_dtype`; any integer type is taken, but no value that is not a code."""
        if codes.dtype.kind not in "iu":
            raise TypeError(f"FloatFormat: codes must be integers, got {codes.dtype}")
        # A code type with no bit to spare needs no look at the values.
        if codes.size and not (codes.dtype.kind == "u" and 8 * codes.dtype.itemsize <= self.bits):
            low, high = int(codes.min()), int(codes.max())
            if low < 0 or high >= 1 << self.bits:
                got = low if low < 0 else high
                raise ValueError(f"FloatFormat: codes must be in 0..{(1 << self.bits) - 1} for {self}, got {got}")
        return np.ascontiguousarray(codes, dtype=self.code_dtype).reshape(codes.shape)


FloatFormat.__module__ = "horovod_aps.formats"  # where users import it from, and pickles of older versions find it


# ----------------------------------------------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------------------------------------------


def _checked_int(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int within low..high; Python and NumPy integers are taken, bool and float are not."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"FloatFormat: {name} must be an integer in {low}..{high}, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"FloatFormat: {name} must be an integer in {low}..{high}, got {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"FloatFormat: {name} must be in {low}..{high}, got {number}")
    return number


def _checked_seed(rounding: str, seed: int | None) -> int | None:
    """The seed that the kernels take: None for rounding to nearest."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"FloatFormat: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if seed is not None:
        seed = _checked_int("seed", seed, 0, 2**64 - 1)
    if rounding == "nearest":
        return None
    return int.from_bytes(os.urandom(8), "little") if seed is None else seed


# ----------------------------------------------------------------------------------------------------------
# Arrays and tensors
# ----------------------------------------------------------------------------------------------------------

Wrap = Callable[[np.ndarray[Any, Any]], Any]


def _torch_of(x: Any) -> Any:
    """The torch module if x is one of its tensors, else None. Who has a tensor has imported torch already."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def _open(x: Any) -> tuple[np.ndarray[Any, Any], Wrap]:
    """x as a NumPy array, and what turns a result into x's kind: an array, or a tensor on x's device."""
    torch = _torch_of(x)
    if torch is None:
        return np.asarray(x), lambda result: result
    if x.layout is not torch.strided:
        raise TypeError(f"FloatFormat: a tensor must be dense, got one with layout {x.layout}")
    host = x.detach().cpu().resolve_neg()
    # NumPy has no bfloat16 of its own; its bits pass as integers.
    array = host.view(torch.int16).numpy().view(np.uint16) if host.dtype == torch.bfloat16 else host.numpy()
    return array, lambda result: torch.from_numpy(result).to(x.device)


def _apply_to_floats(x: Any, kernel: Callable[[np.ndarray[Any, Any], int], Any], codes: bool = False) -> Any:
    """Run an array kernel on contiguous x; its result gets x's kind and shape and, unless `codes`, dtype."""
    array, wrap = _open(x)
    torch = _torch_of(x)
    bfloat16 = x.dtype == torch.bfloat16 if torch else array.dtype.name == "bfloat16"
    dtype = BFLOAT16 if bfloat16 else DTYPE_CODES.get(array.dtype.newbyteorder("=").name)
    if dtype is None:
        raise TypeError(f"FloatFormat: x must be float32, float64, float16 or bfloat16, got {array.dtype}")
    native = array.view(np.uint16) if bfloat16 else array.astype(array.dtype.newbyteorder("="), copy=False)
    result = kernel(np.ascontiguousarray(native), dtype).reshape(array.shape)
    if codes:
        return wrap(result)
    if torch:
        tensor = torch.from_numpy(result.view(np.int16) if bfloat16 else result)
        return (tensor.view(torch.bfloat16) if bfloat16 else tensor).to(x.device)
    return result.view(array.dtype) if bfloat16 else result.astype(array.dtype, copy=False)
