"""What a reduction is, and what it is given: one bucket on its way.

A reduction is made once per bucket of a plan and run in every step. `run` is a generator: it yields what it waits for,
and is resumed when that is done.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from horovod_aps.engine.feedback import Residuals
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import BucketLayout, LayerSpec
from horovod_aps.engine.pool import Lease
from horovod_aps.engine.seeds import seed_of
from horovod_aps.engine.statistics import N_BINS, exponent_histograms
from horovod_aps.kernels import (
    DONE,
    EXP_NONFINITE,
    EXP_ZERO,
    FLOAT32,
    SUM_FLOAT,
    SUM_FORMAT,
    SUM_KAHAN,
    copied,
)
from horovod_aps.options import Options
from horovod_aps.timeline import Phases
from horovod_aps.transports.base import Request, Transport

ACCUMULATE_CODES = {"float32": SUM_FLOAT, "format": SUM_FORMAT, "kahan": SUM_KAHAN}
N_TAGS = 4  # that one bucket may use
N_MEASURES = 4  # of `Kernels.measure`
N_COLUMNS = N_MEASURES + N_BINS  # of what ranks measure for each other

Steps = Generator[Request, None, None]


class Reduction(Protocol):
    """One bucket from gradients that all ranks have to results."""

    needs_exponents: bool = True
    """Whether the exchange is to add residuals, and to share the gradients' exponents in the header."""
    n_near: int = 1
    """Ranks of a host, which together send what a ring all-reduce would have one of them send."""

    def bytes_sent(self) -> float:
        """Bytes that this rank sends in one run, without headers."""

    def prepare(self, work: Work) -> Request:
        """Without `needs_exponents`: what can be done with the gradients before the others have the bucket as well."""
        return DONE

    def run(self, work: Work) -> Steps:
        """Reduce the bucket; on return every target holds its result."""


@dataclass
class Work:
    """One bucket on its way: its layers, its tables, and the tools to reduce it with."""

    kernels: Any
    transport: Transport
    options: Options
    bucket: BucketLayout
    layers: list[Layer]
    lease: Lease
    phase: Phases
    step_number: int
    residuals: Residuals
    factors: list[float] = field(init=False)
    """By layer."""
    table: np.ndarray = field(init=False)
    """Segments that point at what is to be encoded, later at where results go; with the agreed exponents."""
    owned: list[Any] = field(default_factory=list)
    """Memory that the tables point into."""
    scanned: Request = DONE
    """When it is done, the table holds this rank's exponents, or the reduction has prepared."""
    staged: Any = None
    """What the reduction has prepared."""
    tag: int = 0
    specs: list[LayerSpec] = field(default_factory=list)
    layer_exponents: np.ndarray = field(init=False)
    """By layer, as agreed on."""
    measured: np.ndarray | None = None
    """What the kernels have measured of rounding, if asked to."""
    measured_layers: np.ndarray = field(init=False)
    """The layer of each row of `measured`."""
    histograms: np.ndarray | None = None
    """Of the values' exponents by layer, if asked to."""
    any_stats: bool = False
    """Whether any rank is asked to, where ranks measure for each other."""

    def __post_init__(self) -> None:
        self.table = copied(self.bucket.segments)
        self._point_at([layer.source for layer in self.layers])
        self.factors = [layer.factor for layer in self.layers]
        self.table["factor"] = self.bucket.by_segment(np.array(self.factors))
        self.measured_layers = self.bucket.layer_of_segment

    def part(self, bucket: BucketLayout, rows: slice, values: np.ndarray) -> Work:
        """The same work for some of the segments, which `bucket` has, and whose float32 values stand in a row."""
        part = copy.copy(self)
        part.bucket, part.measured_layers, part.owned = bucket, bucket.layer_of_segment, [values]
        part.table = copied(bucket.segments)
        part.table["factor"] = self.table["factor"][rows]
        starts = np.cumsum(part.table["n"]) - part.table["n"]
        part.table["data"] = self.kernels.address(values) + (4 * starts).astype(np.uint64)
        part.table["dtype"] = FLOAT32
        return part

    def put_measures(self, out: np.ndarray) -> None:
        """Write what this rank has measured, a row of N_COLUMNS for each layer, for `take_measures`."""
        out[:] = 0
        if self.measured is not None:
            np.add.at(out[:, :N_MEASURES], self.bucket.layer_of_segment, self.measured)
            if self.histograms is not None:
                out[:, N_MEASURES:] = self.histograms

    def take_measures(self, parts: Sequence[np.ndarray] | np.ndarray) -> None:
        """Have the sum of what several ranks have put, if asked to measure."""
        if self.options.stats:
            total = np.sum(parts, axis=0)
            self.measured, self.measured_layers = total[:, :N_MEASURES], np.arange(len(total))
            self.histograms = total[:, N_MEASURES:].astype(np.int64) if self.options.scaling else None

    def add_residuals(self) -> None:
        """With error feedback, add what earlier steps have lost of these segments; that sum is what is encoded."""
        if self.options.error_feedback:
            self.owned += self.residuals.fold_parts(self.layers, self.table, self.bucket.layer_of_segment)

    def scale(self, shared: np.ndarray, n_summed: int) -> None:
        """Encode with these exponents by layer: as shared, or as the paper's low-precision sums need them."""
        exponents = shared.copy()
        ordinary = (exponents != EXP_ZERO) & (exponents != EXP_NONFINITE)
        if self.options.accumulate != "float32":  # partial sums of so many values must not overflow
            exponents[ordinary] += int(np.ceil(np.log2(n_summed)))
        if not self.options.scaling:  # a fixed scale of 1: every format's own top exponent
            tops = np.array([spec.format.top_exponent for spec in self.specs], np.int32)
            exponents[ordinary] = tops[ordinary]
        self.layer_exponents = exponents
        self.table["exponent"] = self.bucket.by_segment(exponents)

    def _point_at(self, addresses: list[int]) -> None:
        starts = self.bucket.by_segment(np.frombuffer(array("Q", addresses), np.uint64))
        self.table["data"] = starts + self.bucket.byte_of_segment

    def point_at_targets(self) -> None:
        """Aim the segments at where the results go."""
        self._point_at([layer.target for layer in self.layers])
        self.table["dtype"] = self.bucket.segments["dtype"]  # residuals are float32

    @property
    def mode(self) -> int:
        """How the kernels add up."""
        return ACCUMULATE_CODES[self.options.accumulate]

    def seed(self, stream: int) -> int | None:
        """Seed of stochastic rounding: another one for every step and rank, the same in every run.

        None if no layer of the bucket asks for it.
        """
        return seed_of(self.options.seed, self.step_number, stream) if self.bucket.is_stochastic else None

    def exact_sums(self, segments: np.ndarray, scratch: Any, inputs: list[np.ndarray]) -> np.ndarray:
        """Sums that nothing has rounded to (e, m), in `scratch`, as segments that point at them."""
        exact = copied(segments)
        starts = 4 * (np.cumsum(exact["n"]) - exact["n"])
        exact["data"] = self.kernels.address(scratch) + starts.astype(np.uint64)
        exact["dtype"], exact["factor"] = 0, 1
        self.kernels.decode(exact, inputs, SUM_FLOAT)
        return exact

    def return_losses(self, exact: np.ndarray, sums: np.ndarray, residuals: np.ndarray) -> None:
        """Add what the encoded sums lack, partial sums that were rounded to (e, m) included, to the residuals."""
        self.kernels.residual(exact, sums)
        self.kernels.add(exact, residuals)

    def encode(self, segments: np.ndarray, message: np.ndarray) -> None:
        """Round, scale and pack what the segments point at."""
        self.phase("APS_ENCODE")
        self.kernels.encode(segments, message, self.seed(self.transport.rank))

    def encoded(self, message: np.ndarray) -> None:
        """All of the bucket is in `message`: keep what rounding has lost, and measure it if asked to."""
        if self.options.stats:
            self.measured = self.kernels.measure(self.table, message)
            if self.options.scaling:
                self.histograms = exponent_histograms(
                    self.kernels, self.table, self.bucket.layer_of_segment, len(self.layers), self.step_number
                )
        if self.options.error_feedback:
            self.kernels.residual(self.table, message)
