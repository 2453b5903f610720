"""The table of segments that all kernels work on: its record, its codes, and the checks of their arguments.

A segment is a run of elements of one layer and the bytes that encode it in a message. This is the one place that
knows the record of cuda/aps_codecs.h, the dtypes that gradients may have, and their codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

EXP_ZERO = -32768  # exponent of an all-zero layer
EXP_NONFINITE = 32767  # exponent of a layer with NaN or Inf
SPECIALS, NEAREST = 1, 2  # flags: some codes are Inf and NaN; rounds to nearest although a seed is given
SUM_FLOAT, SUM_FORMAT, SUM_KAHAN = 0, 1, 2  # accumulation modes
UNIT = 8  # elements; every width fills whole bytes with as many

# How elements are encoded. The numbers below HOST are those of cuda/aps_codecs.h. HOST is for formats whose codec is
# written in Python (`codecs`).
FAMILY_FLOAT, FAMILY_RAW, FAMILY_QSGD, FAMILY_ONEBIT, FAMILY_TABLE, FAMILY_MX, FAMILY_HOST = 0, 1, 2, 3, 4, 5, 255

SEGMENT = np.dtype(
    [
        ("data", np.uint64),  # address of the first element
        ("n", np.int64),  # elements
        ("offset", np.int64),  # first byte in the message
        ("exponent", np.int32),
        ("factor", np.float32),  # decode multiplies by it
        ("exp_bits", np.uint8),
        ("man_bits", np.uint8),
        ("flags", np.uint8),
        ("dtype", np.uint8),
        ("uid", np.uint32),  # random stream of the layer
        ("family", np.uint8),
        ("codec", np.uint16),  # which format of a family that keeps a list of them
        ("block", np.uint32),  # elements that share a scale; 0: all of the segment
        ("first", np.int64),  # index of the first element within its layer
    ],
    align=True,
)

Table: TypeAlias = npt.NDArray[np.void]
"""An array of dtype SEGMENT."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
Message: TypeAlias = "int | Bytes"
"""A uint8 array, or its address."""


class Dtype(NamedTuple):
    """A type that gradients may have."""

    name: str
    code: int
    size: int


DTYPES = (Dtype("float32", 0, 4), Dtype("float64", 1, 8), Dtype("float16", 2, 2), Dtype("bfloat16", 3, 2))
"""All of them, by code."""
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = (dtype.code for dtype in DTYPES)
DTYPE_CODES = {dtype.name: dtype.code for dtype in DTYPES}
DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES)
ITEM_SIZES = tuple(dtype.size for dtype in DTYPES)


def packed_bytes(n_elements: int, bits: int) -> int:
    """Bytes that `n_elements` codes of `bits` bits take, tail included."""
    return (n_elements * bits + 7) // 8


_ROW = np.dtype((np.void, SEGMENT.itemsize))


def copied(segs: Table) -> Table:
    """A copy of rows that lie together. NumPy's own copies field by field: 146 rows in 8 to 13 instead of 2 us."""
    return segs.view(_ROW).copy().view(SEGMENT)


# ---- checks of arguments, the same for every device -------------------------------------------------------


def check_segments(function: str, segs: Table) -> None:
    """Raise TypeError or ValueError unless segs is a contiguous one-dimensional array of dtype SEGMENT."""
    if not isinstance(segs, np.ndarray) or segs.dtype != SEGMENT:
        raise TypeError(f"{function}: segs must be a numpy array of dtype SEGMENT, got {type(segs).__name__}")
    if segs.ndim != 1 or not segs.flags.c_contiguous or not segs.flags.writeable:
        raise ValueError(f"{function}: segs must be one-dimensional, contiguous and writeable")


def check_accumulate(function: str, accumulate: int) -> None:
    """Raise ValueError unless accumulate is one of the modes 0, 1, 2."""
    if accumulate not in (SUM_FLOAT, SUM_FORMAT, SUM_KAHAN):
        raise ValueError(f"{function}: accumulate must be in 0..2, got {accumulate}")


def message_address(function: str, message: Message) -> tuple[int, int]:
    """Return (address, length) of a message; the length of a bare address is unknown and given as -1."""
    if isinstance(message, (int, np.integer)):
        return int(message), -1
    if not isinstance(message, np.ndarray) or message.dtype != np.uint8 or not message.flags.c_contiguous:
        raise TypeError(f"{function}: a message must be a contiguous uint8 array or an address")
    return message.ctypes.data, message.nbytes


def input_addresses(function: str, inputs: Sequence[Message], length: int | None) -> tuple[list[int], int]:
    """Return the addresses of the inputs and the length that all of them have at least (-1: unknown)."""
    if len(inputs) == 0:
        raise ValueError(f"{function}: inputs must hold at least 1 message, got 0")
    pairs = [message_address(function, message) for message in inputs]
    known = [size for _, size in pairs if size >= 0] + ([] if length is None else [length])
    return [address for address, _ in pairs], min(known, default=-1)


def target_addresses(segs: Table, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the addresses that `add` adds to, one per segment."""
    targets = np.ascontiguousarray(addresses, dtype=np.uint64)
    if targets.shape != segs.shape:
        raise ValueError(f"add: addresses must have one entry per segment, got {targets.shape}")
    return targets


def seed_argument(seed: int | None, reduce: bool = False) -> tuple[int, int]:
    """Return (stochastic, seed modulo 2^64); a reduce draws from a stream independent of the encode's."""
    if seed is None:
        return 0, 0
    return 1, (seed ^ (0xA5C3_96E7_1B2D_4F85 if reduce else 0)) & (2**64 - 1)
