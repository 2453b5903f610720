"""1-bit SGD: which side of zero, and the two means of a bucket (Seide et al., Interspeech 2014)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from horovod_aps.formats.buckets import MAX_BUCKET, BucketFormat, Codes, Floats, bucket_sums, checked_int
from horovod_aps.kernels.codecs import Random
from horovod_aps.kernels.segments import FAMILY_ONEBIT, Table

DEFAULT: Literal["column"] = "column"


@dataclass(frozen=True, init=False, repr=False)
class OneBit(BucketFormat):
    """One bit per element: values below zero (code 1) become the mean of those, values from zero on that of those.

    `bucket` says which elements share their two means: "column" (as CNTK has it), a number of consecutive elements (64
    in the variant of Grubic et al., which doubles the bytes), or "tensor" (which trains badly). A column is what has
    the same first index, for a weight of shape (out, in, ...) all weights of one output; those lie together in memory,
    as a column does in CNTK, which stores matrices column by column. A tensor of one dimension or none is one column.
    "tensor" takes all elements of the layer that are in one message: a layer that is cut between ranks, or longer than
    2^20 elements, has means for every cut.

    A mean is that of float32 values: `bucket_sums` of them in double (0 in place of the others), divided by their
    number, rounded to float32; 0 where there are none. A message has for every bucket the mean from zero on, then that
    below. -0 counts as from zero on. A bucket with NaN or Inf has the means NaN and decodes to NaN; in an exchange the
    whole layer does.

    What rounding loses here is as large as the gradient itself, so training needs error feedback.
    """

    bucket: int | Literal["column", "tensor"]

    rounding = "nearest"
    needs_error_feedback = True
    n_sides = 2

    def __init__(self, bucket: int | Literal["column", "tensor"] = DEFAULT) -> None:
        if not (isinstance(bucket, str) and bucket in ("column", "tensor")):
            hint = "elements that share two means, such as bucket=64, or 'column', or 'tensor'"
            bucket = checked_int("OneBit", "bucket", bucket, 1, MAX_BUCKET, hint)
        object.__setattr__(self, "bucket", bucket)

    def __repr__(self) -> str:
        return f"OneBit(bucket={self.bucket!r})"

    def __str__(self) -> str:
        return "onebit" if self.bucket == DEFAULT else f"onebit-{self.bucket}"

    @classmethod
    def parse(cls, text: str) -> OneBit:
        """The format that `str()` of it names: "onebit" (also "onebit-column"), "onebit-128", "onebit-tensor"."""
        match = re.fullmatch(r"onebit(?:-(\d+|column|tensor))?", text)
        if match is None:
            raise ValueError(f"OneBit: text must look like 'onebit', 'onebit-128' or 'onebit-tensor', got {text!r}")
        bucket = match[1] or DEFAULT
        return cls(int(bucket) if bucket.isdigit() else bucket)  # type: ignore[arg-type]

    def for_shape(self, shape: tuple[int, ...]) -> OneBit:
        """For "column", the format with as many elements per bucket as a column of this shape has."""
        if self.bucket != "column":
            return self
        n = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
        return OneBit(min(max(n, 1), MAX_BUCKET))

    @property
    def bits(self) -> int:
        """1."""
        return 1

    @property
    def block(self) -> int:
        """Elements of a bucket; 0 for "tensor", and for "column" before `for_shape` has said what a column is."""
        return self.bucket if isinstance(self.bucket, int) else 0

    def describe(self, segment: Table | np.void) -> None:
        """The bucket."""
        segment["family"], segment["codec"], segment["flags"] = FAMILY_ONEBIT, 0, 0
        segment["exp_bits"], segment["man_bits"], segment["block"] = 0, 0, self.block

    # ---- arrays ---------------------------------------------------------------------------------------------

    def quantize(self, x: Any) -> Any:
        """The means in place of x's elements: a new array or tensor of the same kind, dtype and shape.

        Buckets are taken from x in row-major order.
        """
        return self._shaped(x)._quantize(x, None)

    def encode(self, x: Any) -> tuple[Any, Any]:
        """Codes as uint8, shaped like x, and float32 means of shape (buckets, 2): from zero on, below zero."""
        return self._shaped(x)._encode_array(x, None)

    def decode(self, codes: Any, scales: Any) -> Any:
        """float32 values of codes, shaped like them, and the means that `encode` gave with them."""
        return BucketFormat.decode(self._shaped(codes), codes, scales)

    def pack(self, codes: Any, scales: Any) -> Any:
        """What travels: the means, then the codes, eight to a byte; `bytes_for(n)` bytes of `for_shape`'s format."""
        return BucketFormat.pack(self._shaped(codes), codes, scales)

    def _shaped(self, x: Any) -> OneBit:
        return self.for_shape(tuple(np.shape(x)))

    # ---- the arithmetic -------------------------------------------------------------------------------------

    def _scales(self, buckets: Floats, n: int) -> Floats:
        below = buckets < 0
        wide = buckets.astype(np.float64)
        n_below = below.sum(axis=1)
        from_zero = bucket_sums(np.where(below, 0.0, wide)) / np.maximum(n - n_below, 1)
        under = bucket_sums(np.where(below, wide, 0.0)) / np.maximum(n_below, 1)
        return np.stack([from_zero, under], axis=1).astype(np.float32)

    def _codes(self, values: Floats, scales: Floats, random: Random) -> Codes:
        return (values < 0).astype(np.uint8)

    def _values(self, codes: Codes, scales: Floats) -> Floats:
        return np.asarray(np.where(codes, scales[:, 1], scales[:, 0]))
