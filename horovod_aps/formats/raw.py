"""float32 as it is, for layers that are not compressed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_aps.formats.base import Format
from horovod_aps.kernels.segments import FAMILY_RAW, Table


@dataclass(frozen=True)
class Raw32(Format):
    """The bits of float32, neither scaled nor rounded."""

    scale = "none"
    rounds_sums = True  # of float32, which every sum has

    @property
    def bits(self) -> int:
        """32."""
        return 32

    @property
    def top_exponent(self) -> int:
        """That of float32."""
        return 127

    def __str__(self) -> str:
        return "float32"

    @classmethod
    def parse(cls, text: str) -> Raw32:
        """FLOAT32, for "float32"."""
        if text != "float32":
            raise ValueError(f'Raw32: text must be "float32", got {text!r}')
        return FLOAT32

    def describe(self, segment: Table | np.void) -> None:
        """Only the family counts."""
        segment["family"], segment["codec"], segment["flags"] = FAMILY_RAW, 0, 0


FLOAT32 = Raw32()
