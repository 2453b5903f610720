"""Several hosts with several ranks each: float32 inside a host, packed bytes between hosts.

    sum       the ranks of a host put their gradients into memory that they share; each adds up one shard of them
    scan      exponents of the hosts' sums, the largest of all ranks
    exchange  ranks with the same place on each host swap that shard, or scatter and gather it, packed
    decode    every rank reads all shards from the shared memory

A host sends what one rank would, whatever the number of its ranks, and values are rounded once per host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_aps.engine.layout import EXPONENT_BYTES, BucketLayout, LayerSpec, plan_buckets, shards_among
from horovod_aps.engine.reductions.base import N_COLUMNS, Reduction, Steps, Work
from horovod_aps.engine.reductions.scatter_gather import ScatterGather
from horovod_aps.engine.reductions.swap import Swap
from horovod_aps.formats import FLOAT32
from horovod_aps.kernels import EXP_ZERO, ITEM_SIZES, copied
from horovod_aps.kernels import FLOAT32 as FLOAT32_CODE
from horovod_aps.transports.hosts import Hosts
from horovod_aps.transports.memory import FILLED, READ, SCANNED, Need, Visit

PIECE = 1 << 22  # elements that a rank puts into shared memory at once: a bucket of the default size
DIRECT = 1 << 14  # elements from which it pays not to copy a segment of the own shard
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class _Piece:
    """Some elements of every shard: segments of float32 in a rank's part of the shared memory."""

    table: np.ndarray
    layer: np.ndarray
    """The layer of each segment, by its place in the bucket."""
    written: np.ndarray
    """Which of them this rank puts there: all but long ones of its own shard, which it adds from where they are."""
    mine: np.ndarray
    """Those of its own shard that it has put there."""
    direct: list[int]
    """Those of its own shard that it has not."""
    starts: np.ndarray
    """How many elements of the own shard come before each."""


def _cut(bucket: BucketLayout, n_places: int, place: int) -> tuple[list[_Piece], int]:
    """The pieces of a bucket, and the bytes of a rank's part."""
    rows = bucket.shard_segments[:: bucket.n_shards // n_places]
    most = max(int(bucket.segments["n"][first:last].sum()) for first, last in zip(rows[:-1], rows[1:]))
    step = max(1, min(most, PIECE // n_places))
    step += -step % (ALIGNMENT // 4)
    pieces = []
    for low in range(0, max(1, most), step):
        tables, layers, bounds = [], [], [0]
        for number, (first, last) in enumerate(zip(rows[:-1], rows[1:])):
            table = bucket.segments[first:last].copy()
            ends = np.cumsum(table["n"])
            starts = ends - table["n"]
            begin, end = np.maximum(starts, low), np.minimum(ends, low + step)
            inside = begin < end
            table["n"], table["first"] = end - begin, table["first"] + begin - starts
            table["offset"] = 4 * (number * step + begin - low)
            tables.append(table[inside])
            layers.append(bucket.layer_of_segment[first:last][inside])
            bounds.append(bounds[-1] + int(inside.sum()))
        table = np.concatenate(tables)
        FLOAT32.describe(table)
        table["factor"] = 1
        numbers = np.arange(len(table))
        own = (numbers >= bounds[place]) & (numbers < bounds[place + 1])
        direct = own & (table["dtype"] == FLOAT32_CODE) & (table["n"] >= DIRECT)
        starts = np.cumsum(table["n"] * own) - table["n"] * own + low
        pieces.append(
            _Piece(table, np.concatenate(layers), ~direct, own & ~direct, np.flatnonzero(direct).tolist(), starts)
        )
    return pieces, 4 * n_places * step


class TwoLevel(Reduction):
    """A bucket in one shard, or one shard per host, for each rank of a host."""

    needs_exponents = False

    def __init__(self, bucket: BucketLayout, hosts: Hosts) -> None:
        assert hosts.room is not None
        self._bucket, self._hosts, self._room = bucket, hosts, hosts.room
        self.n_near = hosts.n_places
        self._per_place = bucket.n_shards // hosts.n_places
        self._first = hosts.place * self._per_place
        self._mine = bucket.shards(self._first, self._per_place)
        first, last = bucket.shard_segments[[self._first, self._first + self._per_place]].tolist()
        self._rows = slice(first, last)
        self._others = [rank for rank in hosts.peers if rank != hosts.rank]
        self._scatter = None
        if self._per_place > 1:
            self._scatter = ScatterGather(self._mine, hosts.host, hosts.n_hosts, hosts.peers)
        self._pieces, self._part = _cut(bucket, hosts.n_places, hosts.place)
        n_layers = len(bucket.layers)
        self._exponents = 4 * n_layers
        self._measures = 8 * n_layers * N_COLUMNS
        self._lay_out_slot(
            packed=int(bucket.shard_bytes[-1]) * (1 if self._scatter else hosts.n_hosts),
            sum_exponents=EXPONENT_BYTES * len(bucket.segments),
            exponents=self._exponents * hosts.n_places,
            measures=self._measures * hosts.n_places,
        )

    def _lay_out_slot(self, **sizes: int) -> None:
        """Where things lie in a slot: packed bytes, exponents of sums, and the ranks' exponents and measures."""
        self._spans, end = {}, 0
        for name, n_bytes in sizes.items():
            self._spans[name] = slice(end, end + n_bytes)
            end += n_bytes + -n_bytes % ALIGNMENT
        self.need = Need(len(self._pieces), self._part, end)

    def _in_slot(self, visit: Visit, name: str) -> np.ndarray:
        return visit.content[self._spans[name]]

    def bytes_sent(self) -> float:
        exponents = self._exponents * len(self._others)
        if self._scatter is not None:
            return exponents + self._scatter.bytes_sent()
        return exponents + int(self._mine.shard_bytes[-1]) * len(self._others)

    def run(self, work: Work) -> Steps:
        visit = self._room.visit(self.need)
        yield visit.turn()
        n_mine = int(self._mine.segments["n"].sum())
        sums = work.lease.take(4 * n_mine).view(np.float32)
        yield from self._sum(work, visit, sums)
        inner = work.part(self._mine, self._rows, sums)
        yield from self._share_exponents(work, inner, visit)
        yield from self._exchange(inner, visit)
        inner.put_measures(self._measures_of_all(visit)[self._hosts.place])
        visit.tell(FILLED)
        yield visit.all_told(FILLED)
        self._decode(work, visit)
        work.take_measures(self._measures_of_all(visit))
        visit.tell(READ)

    def _sum(self, work: Work, visit: Visit, sums: np.ndarray) -> Steps:
        """The host's sums of this rank's shard."""
        n_places, place = self._hosts.n_places, self._hosts.place
        sources = np.array([layer.source for layer in work.layers], np.uint64)
        for number, piece in enumerate(self._pieces):
            yield visit.free(number)
            work.phase("APS_HOST_WRITE")
            table = copied(piece.table)
            table["data"] = sources[piece.layer] + (table["first"] * _SIZES[table["dtype"]]).astype(np.uint64)
            work.kernels.encode(table[piece.written], visit.part(number, place))
            visit.wrote(number)
            yield visit.written(number)
            work.phase("APS_HOST_SUM")
            own = table["data"].copy()
            table["data"] = work.kernels.address(sums) + (4 * piece.starts).astype(np.uint64)
            table["dtype"] = FLOAT32_CODE
            parts: list[Any] = [visit.part(number, other) for other in range(n_places)]
            work.kernels.decode(table[piece.mine], parts)
            for row in piece.direct:
                parts[place] = int(own[row]) - int(table["offset"][row])
                work.kernels.decode(table[row : row + 1], parts)
            visit.summed(number)

    def _share_exponents(self, work: Work, inner: Work, visit: Visit) -> Steps:
        """Find the exponents of the sums and make them the largest of all ranks: on the host, then between hosts."""
        n_places, peers = self._hosts.n_places, self._others
        inner.add_residuals()
        work.phase("APS_SCAN")
        yield work.kernels.scan(inner.table, stochastic=inner.bucket.is_stochastic)
        table = self._in_slot(visit, "exponents").view(np.int32).reshape(n_places, -1)
        table[self._hosts.place] = inner.bucket.largest_by_layer(inner.table["exponent"], EXP_ZERO)
        visit.tell(SCANNED)
        yield visit.all_told(SCANNED)
        host = table.max(axis=0)
        send = work.lease.take(self._exponents)
        send[:] = host.astype("<i4").view(np.uint8)
        received = {rank: work.lease.take(self._exponents) for rank in peers}
        work.phase("APS_EXPONENTS", self._exponents * len(peers))
        yield work.transport.transfer(dict.fromkeys(peers, send), received, work.tag + 3)
        shared = np.max([host, *(array.view("<i4") for array in received.values())], axis=0)
        work.scale(shared, self._hosts.n_hosts)
        inner.scale(shared, self._hosts.n_hosts)

    def _exchange(self, inner: Work, visit: Visit) -> Steps:
        """The packed shard of all hosts into shared memory."""
        if self._scatter is not None:
            packed, exponents = self._shard_of(visit, 0), self._in_slot(visit, "sum_exponents").view("<i2")
            yield from self._scatter.exchange(inner, packed, exponents[self._rows])
            return
        wires = [self._shard_of(visit, host) for host in range(self._hosts.n_hosts)]
        send = wires[self._hosts.host]
        inner.encode(inner.table, send)
        inner.phase("APS_ALLGATHER", len(send) * len(self._others))
        request = inner.transport.transfer(
            dict.fromkeys(self._others, send),
            {rank: wires[host] for host, rank in enumerate(self._hosts.peers) if rank in self._others},
            inner.tag,
        )
        inner.encoded(send)
        yield request
        # All hosts lose the same where partial sums are rounded; one of them keeps it.
        if inner.options.error_feedback and inner.options.accumulate != "float32" and self._hosts.host == 0:
            Swap.keep_losses(inner, inner.table, wires, inner.table["data"])

    def _shard_of(self, visit: Visit, host: int) -> np.ndarray:
        """Where the packed shard of this rank's place lies, as a host has encoded it."""
        start, bounds = host * int(self._bucket.shard_bytes[-1]), self._bucket.shard_bytes
        packed = self._in_slot(visit, "packed")
        return packed[start + bounds[self._first] : start + bounds[self._first + self._per_place]]

    def _decode(self, work: Work, visit: Visit) -> None:
        work.phase("APS_DECODE")
        work.point_at_targets()
        packed = self._in_slot(visit, "packed")
        if self._scatter is not None:
            work.table["exponent"] = self._in_slot(visit, "sum_exponents").view("<i2")
            work.kernels.decode(work.table, [packed])
        else:
            work.kernels.decode(work.table, list(packed.reshape(self._hosts.n_hosts, -1)), work.mode)

    def _measures_of_all(self, visit: Visit) -> np.ndarray:
        """What is measured of a layer is measured by several ranks of the host."""
        n_places = self._hosts.n_places
        return self._in_slot(visit, "measures").view(np.float64).reshape(n_places, -1, N_COLUMNS)


def in_two_levels(
    specs: Sequence[LayerSpec], bucket_mb: float, hosts: Hosts
) -> tuple[list[BucketLayout], list[Reduction]]:
    """The buckets of a batch, and their reductions."""
    n_ranks = hosts.n_hosts * hosts.n_places
    buckets = plan_buckets(specs, n_ranks, bucket_mb, n_shards=hosts.n_places * shards_among(hosts.n_hosts))
    reductions = [TwoLevel(bucket, hosts) for bucket in buckets]
    part, slot = (max(getattr(one.need, name) for one in reductions) for name in ("part", "slot"))
    for one in reductions:  # so that the memory grows once
        one.need = Need(one.need.n_pieces, part, slot)
    return buckets, list(reductions)


_SIZES = np.array(ITEM_SIZES)
