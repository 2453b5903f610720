"""How layers are laid out in packed messages: buckets, shards and their segment tables.

Between scale and pack in the flow of data: the exchange hands the sorted layers of a batch to `plan_buckets`,
and the kernels work on the segment tables that come out. Every rank computes the same layout from the same
layers, so no sizes travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from horovod_aps.formats import Format
from horovod_aps.kernels import ITEM_SIZES, NEAREST, SEGMENT, copied

MAX_LAYERS = 256  # layers per bucket: what one fixed-size exponent message has room for
PIECE = 1 << 20  # elements of a part of a bucket that two ranks swap while the next one is encoded
FIRST = 1 << 18  # elements of the first of several buckets
WORD = 16  # bytes; segments start at multiples of it, so that a GPU loads and stores whole words
EXPONENT_BYTES = 2  # per segment of a shard, in a message beside the packed sums


@dataclass(frozen=True)
class LayerSpec:
    """What all ranks must agree on about one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: int
    format: Format
    label: str = field(default="", compare=False)
    """What people call it; ranks need not agree on that."""
    group_size: int = 1
    is_stochastic: bool = field(default=False, compare=False)
    """Whether it is rounded with random bits; follows from the format and the options."""

    @property
    def shown(self) -> str:
        """The name for people."""
        return self.label or self.name

    @property
    def n_elements(self) -> int:
        """Elements of the layer."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """Layers that travel together, cut into one shard per rank (a single shard when two ranks swap wholes)."""

    layers: tuple[int, ...]
    segments: np.ndarray  # SEGMENT, sorted by shard; offsets count from the start of the scatter buffer
    layer_of_segment: np.ndarray  # index into `layers`
    shard_segments: np.ndarray  # n_shards + 1 bounds into `segments`
    shard_bytes: np.ndarray  # n_shards + 1 byte bounds, of what is scattered and of the sums that are gathered
    is_stochastic: bool = False  # whether any layer is rounded with random bits; the segments of others say NEAREST

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return len(self.shard_bytes) - 1

    @cached_property
    def is_uncut(self) -> bool:
        """Whether every layer is one segment."""
        return np.array_equal(self.layer_of_segment, np.arange(len(self.layers)))

    def by_segment(self, by_layer: np.ndarray) -> np.ndarray:
        """What each segment has of its layer."""
        return by_layer if self.is_uncut else by_layer[self.layer_of_segment]

    def largest_by_layer(self, by_segment: np.ndarray, least: int) -> np.ndarray:
        """The largest value among the segments of each layer, and `least` for one without."""
        if self.is_uncut:
            return by_segment.copy()
        found = np.full(len(self.layers), least, by_segment.dtype)
        np.maximum.at(found, self.layer_of_segment, by_segment)
        return found

    @cached_property
    def byte_of_segment(self) -> np.ndarray:
        """Where in its layer a segment starts."""
        return (self.segments["first"] * np.array(ITEM_SIZES)[self.segments["dtype"]]).astype(np.uint64)

    def parts(self) -> list[tuple[slice, slice]]:
        """Segments and bytes of the parts that two ranks swap one after the other, of at least PIECE elements."""
        parts, first, filled = [], 0, 0
        for row, n in enumerate(self.segments["n"], start=1):
            filled += int(n)
            if filled >= PIECE or row == len(self.segments):
                start = int(self.segments["offset"][first])
                end = int(self.segments["offset"][row]) if row < len(self.segments) else int(self.shard_bytes[-1])
                parts.append((slice(first, row), slice(start, end)))
                first, filled = row, 0
        return parts

    def shards(self, first: int, n: int) -> BucketLayout:
        """The same layers, of which only `n` shards are there."""
        rows = slice(int(self.shard_segments[first]), int(self.shard_segments[first + n]))
        bounds = slice(first, first + n + 1)
        return BucketLayout(
            self.layers,
            part_of(self.segments, rows, self.shard_bytes[first]),
            self.layer_of_segment[rows],
            self.shard_segments[bounds] - rows.start,
            self.shard_bytes[bounds] - self.shard_bytes[first],
            self.is_stochastic,
        )

    def shard_table(self, shard: int) -> np.ndarray:
        """Segments of one shard with offsets from the start of that shard's message."""
        rows = slice(self.shard_segments[shard], self.shard_segments[shard + 1])
        return part_of(self.segments, rows, self.shard_bytes[shard])


def part_of(table: np.ndarray, rows: slice, start: int) -> np.ndarray:
    """Some segments of a table, with offsets from byte `start` of the message, where their own bytes begin."""
    part = copied(table[rows])
    part["offset"] -= start
    return part


def split_into_buckets(specs: Sequence[LayerSpec], bucket_mb: float) -> list[list[int]]:
    """Cut the layers, in the given order, into runs of about `bucket_mb` MB of fp32 gradient.

    A layer is never split: one larger than a bucket has a bucket to itself. If there are several buckets, the first is
    a small one, so that the network has something to do early in backward.
    """
    full = bucket_mb * 1e6 / 4
    several = sum(spec.n_elements for spec in specs) > full
    limit = min(full, FIRST) if several else full
    buckets: list[list[int]] = []
    filled = 0
    for index, spec in enumerate(specs):
        if not buckets or filled + spec.n_elements > limit or len(buckets[-1]) == MAX_LAYERS:
            limit = full if buckets else limit
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += spec.n_elements
    return buckets


def lay_out_bucket(specs: Sequence[LayerSpec], layers: Sequence[int], n_shards: int) -> BucketLayout:
    """Cut the bucket's layers into `n_shards` shards of nearly equal packed size."""
    totals = [specs[layer].format.bytes_for(specs[layer].n_elements) for layer in layers]
    bounds = [sum(totals) * (shard + 1) // n_shards for shard in range(n_shards)]
    rows: list[tuple[int, int, int, int, int]] = []  # shard, layer position, first element, n, offset
    shard_bytes, shard, offset, filled = [0], 0, 0, 0  # filled: bytes without what lies between segments
    for position, layer in enumerate(layers):
        n, fmt = specs[layer].n_elements, specs[layer].format
        unit_bytes = fmt.bytes_for(fmt.unit)
        first = 0
        while first < n:
            room = max(0, bounds[shard] - filled)
            take = n - first
            if shard < n_shards - 1:
                take = min(take, -(-room // unit_bytes) * fmt.unit)
            elif n_shards == 1:
                take = min(take, max(PIECE // fmt.unit, 1) * fmt.unit)
            if take == 0:
                shard += 1
                shard_bytes.append(offset)
                continue
            rows.append((shard, position, first, take, offset))
            filled += fmt.bytes_for(take)
            offset += fmt.bytes_for(take)
            offset += -offset % WORD
            first += take
    while len(shard_bytes) <= n_shards:
        shard_bytes.append(offset)

    shard_of, layer_of_segment, first_of, n_of, offset_of = np.array(rows, np.int64).reshape(-1, 5).T
    segments = np.zeros(len(rows), SEGMENT)
    segments["n"], segments["offset"], segments["first"] = n_of, offset_of, first_of
    for column, values in (
        ("dtype", [specs[layer].dtype for layer in layers]),
        ("uid", layers),
    ):
        segments[column] = np.array(values)[layer_of_segment]
    formats = [specs[layers[position]].format for position in layer_of_segment]
    for fmt in set(formats):
        mine = np.array([other == fmt for other in formats])
        part = segments[mine]
        fmt.describe(part)
        segments[mine] = part
    draws = np.array([specs[layer].is_stochastic for layer in layers], np.bool_)
    if draws.any():
        segments["flags"] |= np.where(draws[layer_of_segment], 0, NEAREST).astype(np.uint8)
    shard_segments = np.searchsorted(shard_of, np.arange(n_shards + 1), side="left")
    return BucketLayout(
        tuple(layers),
        segments,
        np.ascontiguousarray(layer_of_segment),
        shard_segments,
        np.array(shard_bytes, np.int64),
        bool(draws.any()),
    )


def shards_among(n_ranks: int) -> int:
    """Into how many shards so many ranks cut what they exchange; two of them swap it in a single phase."""
    return n_ranks if n_ranks > 2 else 1


def plan_buckets(
    specs: Sequence[LayerSpec], n_ranks: int, bucket_mb: float, n_shards: int | None = None
) -> list[BucketLayout]:
    """Layouts of all buckets for `n_ranks` ranks."""
    n_shards = n_shards or shards_among(n_ranks)
    return [lay_out_bucket(specs, layers, n_shards) for layers in split_into_buckets(specs, bucket_mb)]
