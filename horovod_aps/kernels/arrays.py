"""Array functions for `formats`: no scaling, the format's own domain. Inputs must be C-contiguous."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from horovod_aps.kernels.native import library, raise_on_error
from horovod_aps.kernels.segments import FLOAT32, ITEM_SIZES, packed_bytes, seed_argument

Array: TypeAlias = npt.NDArray[Any]
"""Of one of the four float types, or of codes in the least unsigned type that holds them."""


def _check_array(function: str, x: Array, dtype: int) -> None:
    if not 0 <= dtype < len(ITEM_SIZES) or x.dtype.itemsize != ITEM_SIZES[dtype]:
        raise TypeError(f"{function}: dtype code {dtype} does not describe an array of {x.dtype}")
    if not x.flags.c_contiguous:
        raise ValueError(f"{function}: the array must be contiguous")


def _code_dtype(width: int) -> npt.DTypeLike:
    return np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32


def quantize_array(
    x: Array,
    dtype: int,
    exp_bits: int,
    man_bits: int,
    specials: bool,
    seed: int | None = None,
) -> Array:
    """Return x rounded to the format, in x's own dtype; a bfloat16 array comes as its uint16 view.

    With specials overflow gives Inf, without the largest value. NaN stays NaN, or becomes Inf (specials, man_bits 0),
    or zero of the opposite sign (no specials), as ml_dtypes has it.
    """
    _check_array("quantize_array", x, dtype)
    out = np.empty_like(x)
    status = library().aps_quantize_array(
        x.ctypes.data,
        out.ctypes.data,
        x.size,
        dtype,
        exp_bits,
        man_bits,
        specials,
        *seed_argument(seed),
    )
    raise_on_error("quantize_array", status)
    return out


def encode_array(
    x: Array,
    dtype: int,
    exp_bits: int,
    man_bits: int,
    specials: bool,
    seed: int | None = None,
) -> Array:
    """Return the codes of x in the least of uint8, uint16, uint32; they round as in `quantize_array`."""
    _check_array("encode_array", x, dtype)
    out = np.empty(x.shape, dtype=_code_dtype(1 + exp_bits + man_bits))
    status = library().aps_encode_array(
        x.ctypes.data,
        out.ctypes.data,
        x.size,
        dtype,
        exp_bits,
        man_bits,
        specials,
        *seed_argument(seed),
    )
    raise_on_error("encode_array", status)
    return out


def decode_array(codes: Array, exp_bits: int, man_bits: int, specials: bool) -> npt.NDArray[np.float32]:
    """Return the values of codes as float32; only the top binade of e = 8 without specials overflows."""
    codes = np.ascontiguousarray(codes, dtype=_code_dtype(1 + exp_bits + man_bits)).reshape(codes.shape)
    out = np.empty(codes.shape, dtype=np.float32)
    status = library().aps_decode_array(
        codes.ctypes.data, out.ctypes.data, codes.size, FLOAT32, exp_bits, man_bits, specials
    )
    raise_on_error("decode_array", status)
    return out


def pack_codes(codes: Array, width: int) -> npt.NDArray[np.uint8]:
    """Return the low `width` bits of every code, packed little-endian; the last byte is zero padded."""
    flat = np.ascontiguousarray(codes, dtype=_code_dtype(width)).reshape(-1)
    out = np.empty(packed_bytes(flat.size, width), dtype=np.uint8)
    raise_on_error("pack_codes", library().aps_pack_codes(flat.ctypes.data, flat.size, width, out.ctypes.data))
    return out


def unpack_codes(data: Array, width: int, n: int) -> Array:
    """Return the first n codes of a packed uint8 array, in the least of uint8, uint16, uint32."""
    data = np.ascontiguousarray(data, dtype=np.uint8).reshape(-1)
    if not 1 <= width <= 32:
        raise ValueError(f"unpack_codes: width must be in 1..32, got {width}")
    if n < 0 or packed_bytes(n, width) > data.size:
        raise ValueError(f"unpack_codes: n must be in 0..{data.size * 8 // width}, got {n}")
    out = np.empty(n, dtype=_code_dtype(width))
    raise_on_error("unpack_codes", library().aps_unpack_codes(data.ctypes.data, n, width, out.ctypes.data))
    return out
