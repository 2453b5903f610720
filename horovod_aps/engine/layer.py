"""One gradient on its way through the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Layer:
    """One gradient handed to an exchange: where it is, and where its result goes."""

    name: str
    shape: tuple[int, ...]
    dtype_code: int
    source: int
    target: int
    factor: float
    keep: Any = None
    """Holds the memory behind `source` and `target` alive."""
    label: str = ""
    """What people call it, in overrides and statistics, if not by its name; ranks need not agree on that."""
    group_size: int = 1
    """Of the group that it was handed in with, which must be the same on all ranks."""
    done: bool = False
    """Whether the result is in its place."""
    error: BaseException | None = None
    """Why there will be no result."""
    folded: bool = False
    """Whether the gradient has been added to its residual already."""

    @property
    def shown(self) -> str:
        """The name for people."""
        return self.label or self.name

    @property
    def n_elements(self) -> int:
        """Of its shape."""
        return math.prod(self.shape)
