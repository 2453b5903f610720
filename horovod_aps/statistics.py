"""What a compressor has done: bytes sent against fp32, and per layer exponent, underflow and error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_aps.kernels import EXP_NONFINITE, EXP_ZERO
from horovod_aps.layout import LayerSpec

HISTORY = 512  # exponents kept per layer; every second one is dropped when it is full


@dataclass
class LayerStatistics:
    """Running figures of one layer; error and underflow only where the compressor measures them."""

    format: str
    n_elements: int
    n_exchanges: int = 0
    exponent: int | None = None
    n_nonfinite: int = 0
    n_measured: int = 0
    n_underflowed: float = 0.0
    squared_error: float = 0.0
    squared_norm: float = 0.0
    history: list[tuple[int, int, float, float]] = field(default_factory=list)
    stride: int = 1

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        measured = self.n_measured > 0
        share = self.n_underflowed / (self.n_measured * max(1, self.n_elements)) if measured else None
        error = (self.squared_error / self.squared_norm) ** 0.5 if measured and self.squared_norm else None
        return {"format": self.format, "n_elements": self.n_elements, "exponent": self.exponent,
                "n_exchanges": self.n_exchanges, "n_nonfinite": self.n_nonfinite,
                "underflow": share, "relative_error": 0.0 if measured and error is None else error,
                "history": list(self.history)}


class Statistics:
    """Collects figures as buckets are encoded; cheap except for the errors, which need a pass of their own."""

    def __init__(self) -> None:
        self.bytes_sent = 0.0
        self.bytes_fp32 = 0.0
        self.layers: dict[str, LayerStatistics] = {}

    def add_bytes(self, sent: float, fp32: float) -> None:
        """Count what one bucket sent, and what a ring all-reduce of fp32 would have."""
        self.bytes_sent += sent
        self.bytes_fp32 += fp32

    def add_layers(self, specs: Sequence[LayerSpec], exponents: np.ndarray, layer_of_segment: np.ndarray,
                   measured: np.ndarray | None) -> None:
        """Take in the exponents of one bucket's layers and, where given, the kernels' measurements."""
        sums = None
        if measured is not None:
            sums = np.zeros((len(specs), measured.shape[1]))
            np.add.at(sums, layer_of_segment, measured)
        for i, (spec, exponent) in enumerate(zip(specs, exponents.tolist())):
            entry = self.layers.get(spec.shown)
            if entry is None:
                entry = self.layers[spec.shown] = LayerStatistics(spec.format.name, spec.n_elements)
            entry.format = spec.format.name
            entry.n_exchanges += 1
            entry.n_nonfinite += exponent == EXP_NONFINITE
            entry.exponent = None if exponent in (EXP_ZERO, EXP_NONFINITE) or spec.format.scale != "layer" else exponent
            if sums is not None and exponent != EXP_NONFINITE:
                underflowed, squared_error, squared_norm = sums[i, :3].tolist()
                entry.n_measured += 1
                entry.n_underflowed += underflowed
                entry.squared_error += squared_error
                entry.squared_norm += squared_norm
                self._remember(entry, exponent, underflowed, squared_error, squared_norm)

    @staticmethod
    def _remember(entry: LayerStatistics, exponent: int, underflowed: float, error: float, norm: float) -> None:
        if entry.n_measured % entry.stride:
            return
        relative = (error / norm) ** 0.5 if norm else 0.0
        entry.history.append((entry.n_exchanges, exponent, underflowed / max(1, entry.n_elements), relative))
        if len(entry.history) > HISTORY:
            entry.history = entry.history[::2]
            entry.stride *= 2

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        ratio = self.bytes_sent / self.bytes_fp32 if self.bytes_fp32 else None
        return {"bytes_sent": self.bytes_sent, "bytes_fp32": self.bytes_fp32, "ratio": ratio,
                "layers": {name: entry.as_dict() for name, entry in self.layers.items()}}
