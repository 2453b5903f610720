"""Three ranks and more: each sums one shard of the bucket and sends the rounded sum to all.

    scatter   rank k gets everyone's k-th shard
    reduce    decode the shards, add, find the new exponents, round and encode again
    gather    packed sums to everyone, and their exponents in a small message beside them
    decode    what was sent, on all ranks alike, so that replicas stay identical

Bytes per rank are those of a ring all-reduce, with two roundings whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from horovod_aps.engine.layout import EXPONENT_BYTES, BucketLayout
from horovod_aps.engine.reductions.base import Steps, Work
from horovod_aps.transports.base import Request


class ScatterGather:
    """A bucket in one shard per rank."""

    def __init__(self, bucket: BucketLayout, rank: int, size: int) -> None:
        self._bucket, self._rank, self._size = bucket, rank, size
        self._rows = slice(int(bucket.shard_segments[rank]), int(bucket.shard_segments[rank + 1]))
        self._mine = bucket.shard_table(rank)
        self._shards = [slice(int(a), int(b)) for a, b in zip(bucket.shard_bytes, bucket.shard_bytes[1:])]
        self._n_payload = self._shards[rank].stop - self._shards[rank].start
        self._others = [k for k in range(size) if k != rank]
        self._scratch: list[Any] = []  # float32 memory of earlier runs, for the sums before they are rounded

    def bytes_sent(self) -> float:
        scattered = int(self._bucket.shard_bytes[-1]) - self._n_payload
        return scattered + (self._n_payload + EXPONENT_BYTES * len(self._mine)) * len(self._others)

    def run(self, work: Work) -> Steps:
        send = work.lease.take(int(self._bucket.shard_bytes[-1]))
        work.encode(work.table, send)
        work.encoded(send)

        work.phase("APS_ALLTOALL", len(send) - self._n_payload)
        own = send[self._shards[self._rank]]
        inputs = [own if k == self._rank else work.lease.take(self._n_payload) for k in range(self._size)]
        yield work.transport.transfer(
            {k: send[self._shards[k]] for k in self._others}, {k: inputs[k] for k in self._others}, work.tag
        )
        gathered = work.lease.take(len(send))
        sums = [gathered[shard] for shard in self._shards]
        exponents = yield from self._reduce(work, inputs, sums[self._rank])

        n_sent = self._n_payload + EXPONENT_BYTES * len(self._mine)
        work.phase("APS_ALLGATHER", n_sent * len(self._others))
        bounds = self._bucket.shard_segments
        theirs = {k: np.empty(int(bounds[k + 1] - bounds[k]), "<i2") for k in self._others}
        small = work.transport.transfer(
            {k: exponents.view(np.uint8) for k in self._others},
            {k: theirs[k].view(np.uint8) for k in self._others},
            work.tag + 2,
        )
        yield work.transport.transfer(
            {k: sums[self._rank] for k in self._others}, {k: sums[k] for k in self._others}, work.tag + 1
        )
        yield small
        work.phase("APS_DECODE")
        work.point_at_targets()
        work.table["exponent"] = np.concatenate([theirs.get(k, exponents) for k in range(self._size)])
        work.kernels.decode(work.table, [gathered])

    def _reduce(self, work: Work, inputs: list[np.ndarray], sums: np.ndarray) -> Generator[Request, None, np.ndarray]:
        """Write the sums of this rank's shard; returns their exponents."""
        work.phase("APS_REDUCE")
        mine = self._mine.copy()
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
