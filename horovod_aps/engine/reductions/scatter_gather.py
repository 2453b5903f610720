"""Three ranks and more: each sums one shard of the bucket and sends the rounded sum to all.

    scatter   rank k gets everyone's k-th shard
    reduce    decode the shards, add, find the new exponents, round and encode again
    gather    packed sums to everyone, and their exponents in a small message beside them
    decode    what was sent, on all ranks alike, so that replicas stay identical

Bytes per rank are those of a ring all-reduce, with two roundings whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from horovod_aps.engine.layout import EXPONENT_BYTES, BucketLayout
from horovod_aps.engine.reductions.base import Reduction, Steps, Work
from horovod_aps.kernels import copied
from horovod_aps.transports.base import Request


class ScatterGather(Reduction):
    """A bucket in one shard per rank."""

    def __init__(self, bucket: BucketLayout, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        """`rank` of `size` takes part; `ranks` has the transport's number of each, if it is another."""
        self._bucket, self._rank, self._size = bucket, rank, size
        self._ranks = list(range(size)) if ranks is None else list(ranks)
        self._segments = [slice(int(a), int(b)) for a, b in zip(bucket.shard_segments, bucket.shard_segments[1:])]
        self._shards = [slice(int(a), int(b)) for a, b in zip(bucket.shard_bytes, bucket.shard_bytes[1:])]
        self._rows = self._segments[rank]
        self._mine = bucket.shard_table(rank)
        self._n_payload = self._shards[rank].stop - self._shards[rank].start
        self._others = [k for k in range(size) if k != rank]
        self._scratch: list[Any] = []  # float32 memory of earlier runs, for the sums before they are rounded

    def bytes_sent(self) -> float:
        scattered = int(self._bucket.shard_bytes[-1]) - self._n_payload
        return scattered + (self._n_payload + EXPONENT_BYTES * len(self._mine)) * len(self._others)

    def run(self, work: Work) -> Steps:
        sums = work.lease.take(int(self._bucket.shard_bytes[-1]))
        exponents = np.empty(len(self._bucket.segments), "<i2")
        yield from self.exchange(work, sums, exponents)
        work.phase("APS_DECODE")
        work.point_at_targets()
        work.table["exponent"] = exponents
        work.kernels.decode(work.table, [sums])

    def exchange(self, work: Work, sums: np.ndarray, exponents: np.ndarray) -> Steps:
        """All ranks' sums, packed, into `sums`, and into `exponents` that of every segment."""
        send = work.lease.take(int(self._bucket.shard_bytes[-1]))
        work.encode(work.table, send)
        work.encoded(send)

        work.phase("APS_ALLTOALL", len(send) - self._n_payload)
        own = send[self._shards[self._rank]]
        inputs = [own if k == self._rank else work.lease.take(self._n_payload) for k in range(self._size)]
        yield work.transport.transfer(
            self._of_others([send[shard] for shard in self._shards]), self._of_others(inputs), work.tag
        )
        packed = [sums[shard] for shard in self._shards]
        small = [exponents[rows].view(np.uint8) for rows in self._segments]
        exponents[self._rows] = yield from self._reduce(work, inputs, packed[self._rank])

        work.phase("APS_ALLGATHER", (len(packed[self._rank]) + len(small[self._rank])) * len(self._others))
        requests = [
            work.transport.transfer(
                {self._ranks[k]: messages[self._rank] for k in self._others}, self._of_others(messages), work.tag + tag
            )
            for tag, messages in ((2, small), (1, packed))
        ]
        yield from requests

    def _of_others(self, arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        return {self._ranks[k]: arrays[k] for k in self._others}

    def _reduce(self, work: Work, inputs: list[np.ndarray], sums: np.ndarray) -> Generator[Request, None, np.ndarray]:
        """Write the sums of this rank's shard; returns their exponents."""
        work.phase("APS_REDUCE")
        mine = copied(self._mine)
        mine["exponent"] = work.table["exponent"][self._rows]
        mine["factor"] = work.table["factor"][self._rows]
        exact = scratch = None
        if work.options.error_feedback:
            scratch = self._scratch.pop() if self._scratch else work.kernels.zeros(int(mine["n"].sum()))
            exact = work.exact_sums(mine, scratch, inputs)
        yield work.kernels.reduce(
            mine, inputs, work.mode, sums, work.seed(self._size), keep_exponent=not work.options.scaling
        )
        if exact is not None:  # what rounding the sum loses comes back through the owner's gradient
            exact["exponent"] = mine["exponent"]
            work.return_losses(exact, sums, work.table["data"][self._rows])
            self._scratch.append(scratch)
        return mine["exponent"].astype("<i2")
