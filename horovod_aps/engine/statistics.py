"""What a compressor has done: bytes sent against fp32, and per layer exponent, underflow and error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_aps.engine.layout import LayerSpec
from horovod_aps.formats import FloatFormat
from horovod_aps.kernels import EXP_NONFINITE, EXP_ZERO, FAMILY_FLOAT, ITEM_SIZES, UNIT, Bytes, Kernels, Table
from horovod_aps.options import Options

HISTORY = 512  # exponents kept per layer; every second one is dropped when it is full
# Histograms of exponents are taken by rounding to this format: a byte per value whose code is two bins per binade, down
# to 2^-62 of the largest. Its top binade is left empty, so that nothing saturates.
BINS = FloatFormat(6, 1)
N_BINS = (2**BINS.exp_bits - 1) * 2**BINS.man_bits - 1  # codes above zero
MAX_COUNTS = 256  # buckets that are counted before their layers are looked up
SAMPLE = 1 << 14  # values per layer and step that are put into the histogram


def exponent_histograms(
    kernels: Kernels, table: Table, layer_of_segment: np.ndarray, n_layers: int, step: int
) -> np.ndarray:
    """How many values of each layer lie how far below its shared exponent E, in half binades, from 2^(E+2) down.

    Every layer gives up to about SAMPLE values, another stretch of it in every step; zeros are not counted. Layers in
    formats other than a FloatFormat, or without a usual exponent, have empty rows. `table` is left as it is; any
    device's kernels will do.
    """
    sizes = np.bincount(layer_of_segment, table["n"], n_layers)[layer_of_segment]
    share = np.minimum(1.0, SAMPLE / np.maximum(sizes, 1))
    usual = (table["family"] == FAMILY_FLOAT) & (table["exponent"] != EXP_ZERO) & (table["exponent"] != EXP_NONFINITE)
    trial, owner = table[usual].copy(), layer_of_segment[usual]
    n = np.minimum(trial["n"], np.ceil(trial["n"] * share[usual] / UNIT).astype(np.int64) * UNIT)
    first = step * n % np.maximum(trial["n"] - n + 1, 1)
    trial["data"] += (first * np.array(ITEM_SIZES)[trial["dtype"]]).astype(np.uint64)
    trial["n"], trial["offset"] = n, np.cumsum(n) - n
    BINS.describe(trial)
    trial["exponent"] += 1
    message = kernels.alloc(int(n.sum()))
    kernels.encode(trial, message)
    codes = kernels.bytes_of(message)
    found = np.zeros((n_layers, N_BINS), np.int64)
    for layer, start, count in zip(owner.tolist(), trial["offset"].tolist(), n.tolist()):
        bins = np.bincount(codes[start : start + count] & (2 ** (BINS.bits - 1) - 1), minlength=N_BINS + 1)
        found[layer] += bins[N_BINS:0:-1]
    return found


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
    histogram: np.ndarray | None = None
    history: list[tuple[int, int, float, float]] = field(default_factory=list)
    stride: int = 1

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        measured = self.n_measured > 0
        share = self.n_underflowed / (self.n_measured * max(1, self.n_elements)) if measured else None
        error = (self.squared_error / self.squared_norm) ** 0.5 if measured and self.squared_norm else None
        return {
            "format": self.format,
            "n_elements": self.n_elements,
            "exponent": self.exponent,
            "n_exchanges": self.n_exchanges,
            "n_nonfinite": self.n_nonfinite,
            "underflow": share,
            "relative_error": 0.0 if measured and error is None else error,
            "histogram": None if self.histogram is None else np.trim_zeros(self.histogram, "b").tolist(),
            "history": list(self.history),
        }


@dataclass
class _Count:
    """Exponents of a bucket that has come by several times."""

    specs: Sequence[LayerSpec]
    n: int = 0
    exponents: np.ndarray = field(init=False)
    n_nonfinite: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.n_nonfinite = np.zeros(len(self.specs), np.int64)


class Statistics:
    """Collects figures as buckets are encoded; cheap except for the errors, which need a pass of their own."""

    def __init__(self) -> None:
        self.bytes_sent = 0.0
        self.bytes_fp32 = 0.0
        self._layers: dict[str, LayerStatistics] = {}
        self._counts: dict[int, _Count] = {}  # of buckets that were not measured, latest last
        self._lock = threading.RLock()  # buckets may come home in another thread than asks for figures

    @property
    def layers(self) -> dict[str, LayerStatistics]:
        """The figures of all layers, by what people call them."""
        with self._lock:
            self._settle()
            return dict(self._layers)

    def _settle(self) -> None:
        """Put what was counted bucket by bucket down to its layers."""
        for count in self._counts.values():
            for i, spec in enumerate(count.specs):
                entry = self._entry(spec, int(count.exponents[i]))
                entry.n_exchanges += count.n
                entry.n_nonfinite += int(count.n_nonfinite[i])
        self._counts.clear()

    def _entry(self, spec: LayerSpec, exponent: int) -> LayerStatistics:
        entry = self._layers.get(spec.shown)
        if entry is None:
            entry = self._layers[spec.shown] = LayerStatistics(spec.format.name, spec.n_elements)
        entry.format = spec.format.name
        entry.exponent = None if exponent in (EXP_ZERO, EXP_NONFINITE) or spec.format.scale != "layer" else exponent
        return entry

    def count(self, specs: Sequence[LayerSpec], exponents: np.ndarray) -> None:
        """Take in the exponents of one bucket's layers; quick if `specs` is the same list every time."""
        with self._lock:
            if len(self._counts) > MAX_COUNTS:
                self._settle()
            count = self._counts.pop(id(specs), None) or _Count(specs)
            count.n += 1
            count.exponents = exponents
            count.n_nonfinite += exponents == EXP_NONFINITE
            self._counts[id(specs)] = count

    def add_bytes(self, sent: float, fp32: float) -> None:
        """Count what one bucket sent, and what a ring all-reduce of fp32 would have."""
        self.bytes_sent += sent
        self.bytes_fp32 += fp32

    def add_layers(
        self,
        specs: Sequence[LayerSpec],
        exponents: np.ndarray,
        layer_of_segment: np.ndarray,
        measured: np.ndarray | None,
        histograms: np.ndarray | None = None,
    ) -> None:
        """Take in the exponents of one bucket's layers and, where given, the kernels' measurements."""
        self.count(specs, exponents)
        if measured is None:
            return
        sums = np.zeros((len(specs), measured.shape[1]))
        np.add.at(sums, layer_of_segment, measured)
        layers = self.layers
        for i, (spec, exponent) in enumerate(zip(specs, exponents.tolist())):
            if exponent != EXP_NONFINITE:
                entry = layers[spec.shown]
                underflowed, squared_error, squared_norm = sums[i, :3].tolist()
                entry.n_measured += 1
                entry.n_underflowed += underflowed
                entry.squared_error += squared_error
                entry.squared_norm += squared_norm
                if histograms is not None and histograms[i].any():
                    entry.histogram = histograms[i] + (0 if entry.histogram is None else entry.histogram)
                self._remember(entry, exponent, underflowed, squared_error, squared_norm)

    def add_carried(
        self,
        name: str,
        kernels: Kernels,
        segment: Table,
        message: Bytes,
        exponent: int,
        item_size: int,
        options: Options,
        n_ranks: int,
        step: int,
    ) -> None:
        """Take in one layer just encoded from `segment`: its bytes, `item_size` per value, and what rounding did.

        What the sum in float16 does to it is not counted.
        """
        n = int(segment["n"][0])
        ring = 2 * (n_ranks - 1) / n_ranks
        self.add_bytes(ring * (item_size * n + 4), ring * 4 * n)  # with the word of its exponent
        measured = histograms = None
        owner = np.zeros(1, np.int64)
        if options.stats:
            measured = kernels.measure(segment, message)
            histograms = exponent_histograms(kernels, segment, owner, 1, step) if options.scaling else None
        spec = LayerSpec(name, (n,), int(segment["dtype"][0]), options.default_format)
        self.add_layers([spec], np.array([exponent]), owner, measured, histograms)

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
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_fp32": self.bytes_fp32,
            "ratio": ratio,
            "layers": {name: entry.as_dict() for name, entry in self.layers.items()},
        }
