"""Two levels where the ranks of a host share no memory, as GPUs do not: what `two_level` does, by messages.

    copy      gradients as float32 into a message, behind what the framework has queued
    scatter   the ranks of a host send each other shards of it; each adds up its own, in the order of places
    scan      exponents of the hosts' sums, the largest of all ranks
    exchange  ranks with the same place on each host swap that shard, or scatter and gather it, packed
    gather    the ranks of a host send each other the packed shards that they have
    decode    all of them

Sums are those of `two_level`, so results have the same bits. The scatter moves the bytes of a reduce-scatter; one that
adds up on its way, as NCCL's, would do so in an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_aps.engine.layout import WORD, BucketLayout, LayerSpec, lay_out_bucket, shards_among, split_into_buckets
from horovod_aps.engine.reductions.base import N_COLUMNS, Reduction, Steps, Work
from horovod_aps.engine.reductions.scatter_gather import ScatterGather
from horovod_aps.engine.reductions.swap import Swap
from horovod_aps.formats import FLOAT32
from horovod_aps.kernels import EXP_ZERO, copied
from horovod_aps.kernels import FLOAT32 as FLOAT32_CODE
from horovod_aps.transports.base import Request
from horovod_aps.transports.hosts import Hosts

MAX_BYTES = (1 << 31) - 1  # of the messages of one rank to its host; a larger bucket is exchanged flat


def as_float32(bucket: BucketLayout, n_places: int) -> tuple[np.ndarray, list[slice]]:
    """The segments of a bucket as float32 in one message, and the part of it that is each place's shard."""
    table = bucket.segments.copy()
    FLOAT32.describe(table)
    table["factor"] = 1
    lengths = 4 * table["n"] + -4 * table["n"] % WORD
    ends = np.cumsum(lengths)
    table["offset"] = ends - lengths
    rows = bucket.shard_segments[:: bucket.n_shards // n_places].tolist()
    bounds = [int(lengths[:row].sum()) for row in rows]
    return table, [slice(start, end) for start, end in zip(bounds, bounds[1:])]


class TwoLevelByMessages(Reduction):
    """A bucket in one shard, or one shard per host, for each rank of a host."""

    needs_exponents = False

    def __init__(self, bucket: BucketLayout, hosts: Hosts) -> None:
        self._bucket, self._hosts = bucket, hosts
        self.n_near = hosts.n_places
        self._near = list(hosts.ranks[hosts.host])  # by place, this rank among them
        self._far = [rank for rank in hosts.peers if rank != hosts.rank]
        self._floats, self._shards = as_float32(bucket, hosts.n_places)
        per_place = bucket.n_shards // hosts.n_places
        self._mine = bucket.shards(hosts.place * per_place, per_place)
        rows, self._n_bytes = bucket.shard_segments[::per_place].tolist(), int(bucket.shard_bytes[-1])
        self._rows = [slice(start, end) for start, end in zip(rows, rows[1:])]
        bounds = bucket.shard_bytes[::per_place].tolist()
        self._packed = [slice(start, end) for start, end in zip(bounds, bounds[1:])]
        self._scatter = None
        if per_place > 1:
            self._scatter = ScatterGather(self._mine, hosts.host, hosts.n_hosts, hosts.peers)

    def bytes_sent(self) -> float:
        exponents = 4 * (1 + len(self._bucket.layers)) * len(self._near) * (self._hosts.n_hosts - 1)
        if self._scatter is not None:
            return exponents + self._scatter.bytes_sent()
        return exponents + int(self._mine.shard_bytes[-1]) * len(self._far)

    def prepare(self, work: Work) -> Request:
        """Copy the gradients, as float32, to where they are sent from."""
        work.phase("APS_HOST_COPY")
        work.staged = work.lease.take(self._shards[-1].stop)
        table = copied(self._floats)
        table["data"], table["dtype"] = work.table["data"], work.table["dtype"]
        return work.kernels.copy(table, work.staged)

    def run(self, work: Work) -> Steps:
        sums = work.lease.take(4 * int(self._mine.segments["n"].sum()))
        yield from self._sum(work, sums)
        inner = work.part(self._mine, self._rows[self._hosts.place], sums)
        yield from self._share_exponents(work, inner)
        if self._scatter is None:
            yield from self._swap(work, inner)
        else:
            yield from self._scatter_and_gather(work, inner, self._scatter)
        if inner.any_stats:
            yield from self._share_measures(work, inner)

    def _of_near(self, parts: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """By rank, what is of each other rank of the host."""
        return {rank: part for rank, part in zip(self._near, parts) if rank != self._hosts.rank}

    def _to_near(self, work: Work, parts: Sequence[np.ndarray], tag: int) -> Request:
        """Send this rank's part to the others of its host, and receive theirs."""
        others = self._of_near(parts)
        return work.transport.transfer(dict.fromkeys(others, parts[self._hosts.place]), others, work.tag + tag)

    def _sum(self, work: Work, sums: np.ndarray) -> Steps:
        """The host's sums of this rank's shard."""
        place, staged = self._hosts.place, work.staged
        shard = self._shards[place]
        inputs = [
            staged[shard] if number == place else work.lease.take(shard.stop - shard.start)
            for number in range(len(self._near))
        ]
        work.phase("APS_HOST_SCATTER")
        outgoing = self._of_near([staged[part] for part in self._shards])
        yield work.transport.transfer(outgoing, self._of_near(inputs), work.tag)
        work.phase("APS_HOST_SUM")
        table = copied(self._floats[self._rows[place]])
        table["offset"] -= shard.start
        starts = 4 * (np.cumsum(table["n"]) - table["n"])
        table["data"] = work.kernels.address(sums) + starts.astype(np.uint64)
        table["dtype"] = FLOAT32_CODE
        work.kernels.decode(table, inputs)

    def _share_exponents(self, work: Work, inner: Work) -> Steps:
        """Find the exponents of the sums and make them the largest of all ranks; tell whether anybody wants stats."""
        inner.add_residuals()
        work.phase("APS_SCAN")
        yield work.kernels.scan(inner.table, stochastic=inner.bucket.is_stochastic)
        exponents = inner.bucket.largest_by_layer(inner.table["exponent"], EXP_ZERO)
        mine = np.insert(exponents, 0, work.options.stats)
        send, transport = mine.astype("<i4").view(np.uint8), work.transport
        received = {rank: np.empty_like(send) for rank in range(transport.size) if rank != transport.rank}
        work.owned += [send, *received.values()]
        work.phase("APS_EXPONENTS", len(send) * (transport.size - len(self._near)))
        yield transport.transfer(dict.fromkeys(received, send), received, work.tag + 3)
        shared = np.max([mine, *(array.view("<i4") for array in received.values())], axis=0)
        inner.any_stats = bool(shared[0])
        work.scale(shared[1:], self._hosts.n_hosts)
        inner.scale(shared[1:], self._hosts.n_hosts)

    def _swap(self, work: Work, inner: Work) -> Steps:
        """Two hosts: every rank has all that both have encoded, and adds it up."""
        place, host = self._hosts.place, self._hosts.host
        packed = work.lease.take(self._n_bytes * self._hosts.n_hosts)
        of_hosts = [packed[k * self._n_bytes : (k + 1) * self._n_bytes] for k in range(self._hosts.n_hosts)]
        wires = [message[self._packed[place]] for message in of_hosts]
        send = wires[host]
        inner.encode(inner.table, send)
        work.phase("APS_ALLGATHER", len(send) * len(self._far))
        received = {rank: wire for rank, wire in zip(self._hosts.peers, wires) if rank != self._hosts.rank}
        between = work.transport.transfer(dict.fromkeys(self._far, send), received, work.tag)
        inside = [self._to_near(work, [of_hosts[host][part] for part in self._packed], 1)]
        inner.encoded(send)
        yield between
        # All hosts lose the same where partial sums are rounded; one of them keeps it.
        if inner.options.error_feedback and inner.options.accumulate != "float32" and host == 0:
            Swap.keep_losses(inner, inner.table, wires, inner.table["data"])
        work.phase("APS_HOST_GATHER")
        for k, message in enumerate(of_hosts):
            if k != host:
                inside.append(self._to_near(work, [message[part] for part in self._packed], 1))
        yield from inside
        work.phase("APS_DECODE")
        work.point_at_targets()
        work.kernels.decode(work.table, of_hosts, work.mode)

    def _scatter_and_gather(self, work: Work, inner: Work, scatter: ScatterGather) -> Steps:
        """More hosts: every rank has the packed sums of all, each made by one rank."""
        place = self._hosts.place
        packed = work.lease.take(self._n_bytes)
        exponents = np.empty(len(self._bucket.segments), "<i2")
        work.owned.append(exponents)
        yield from scatter.exchange(inner, packed[self._packed[place]], exponents[self._rows[place]])
        work.phase("APS_HOST_GATHER")
        small = self._to_near(work, [exponents[rows].view(np.uint8) for rows in self._rows], 2)
        large = self._to_near(work, [packed[part] for part in self._packed], 1)
        yield small
        yield large
        work.phase("APS_DECODE")
        work.point_at_targets()
        work.table["exponent"] = exponents
        work.kernels.decode(work.table, [packed])

    def _share_measures(self, work: Work, inner: Work) -> Steps:
        """What is measured of a layer is measured by several ranks of the host."""
        mine = np.empty((len(work.layers), N_COLUMNS))
        inner.put_measures(mine)
        parts = [mine if rank == self._hosts.rank else np.empty_like(mine) for rank in self._near]
        work.owned += parts
        yield self._to_near(work, [part.reshape(-1).view(np.uint8) for part in parts], 3)
        work.take_measures(parts)


def in_two_levels_by_messages(
    specs: Sequence[LayerSpec], bucket_mb: float, hosts: Hosts
) -> tuple[list[BucketLayout], list[Reduction]]:
    """The buckets of a batch, and their reductions; flat if a bucket is too large for messages of float32."""
    n_ranks = hosts.n_hosts * hosts.n_places
    buckets: list[BucketLayout] = []
    reductions: list[Reduction] = []
    for layers in split_into_buckets(specs, bucket_mb):
        bucket = lay_out_bucket(specs, layers, hosts.n_places * shards_among(hosts.n_hosts))
        if int((4 * bucket.segments["n"] + WORD).sum()) <= MAX_BYTES:
            reductions.append(TwoLevelByMessages(bucket, hosts))
        else:
            bucket = lay_out_bucket(specs, layers, n_ranks)
            reductions.append(ScatterGather(bucket, hosts.rank, n_ranks))
        buckets.append(bucket)
    return buckets, reductions
