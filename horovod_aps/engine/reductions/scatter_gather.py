"""Three ranks and more: each sums one shard of the bucket and sends the rounded sum to all.

    scatter   rank k gets everyone's k-th shard
    reduce    decode the shards, add, find the new exponents, round and encode again
    gather    packed sums to everyone, each shard's exponents behind its bytes
    decode    what was sent, on all ranks alike, so that replicas stay identical

Bytes per rank are those of a ring all-reduce, with two roundings whatever the number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_aps.engine.layout import EXPONENT_BYTES, BucketLayout, part_of
from horovod_aps.engine.reductions.base import Steps, Work


class ScatterGather:
    """A bucket in one shard per rank."""

    def __init__(self, bucket: BucketLayout, rank: int, size: int) -> None:
        self._bucket, self._rank, self._size = bucket, rank, size
        self._rows = slice(int(bucket.shard_segments[rank]), int(bucket.shard_segments[rank + 1]))
        self._mine = bucket.shard_table(rank)
        self._n_payload = int(bucket.shard_bytes[rank + 1] - bucket.shard_bytes[rank])
        self._gather_sizes = np.diff(bucket.gather_bytes).tolist()
        self._others = [k for k in range(size) if k != rank]
        self._scratch: list[Any] = []  # float32 memory of earlier runs, for the sums before they are rounded

    def bytes_sent(self) -> float:
        scattered = int(self._bucket.shard_bytes[-1]) - self._n_payload
        return scattered + self._gather_sizes[self._rank] * len(self._others)

    def run(self, work: Work) -> Steps:
        bounds = self._bucket.shard_bytes
        send = work.lease.take(int(bounds[-1]))
        shards = [send[bounds[k] : bounds[k + 1]] for k in range(self._size)]
        work.encode(work.table, send)
        work.encoded(send)

        work.phase("APS_ALLTOALL", len(send) - self._n_payload)
        inputs = [shards[k] if k == self._rank else work.lease.take(self._n_payload) for k in range(self._size)]
        yield work.transport.transfer(
            {k: shards[k] for k in self._others}, {k: inputs[k] for k in self._others}, work.tag
        )
        message = self._reduce(work, inputs)

        work.phase("APS_ALLGATHER", len(message) * len(self._others))
        gathered = [message if k == self._rank else work.lease.take(n) for k, n in enumerate(self._gather_sizes)]
        yield work.transport.transfer(
            {k: message for k in self._others}, {k: gathered[k] for k in self._others}, work.tag + 1
        )
        work.phase("APS_DECODE")
        work.point_at_targets()
        for shard, content in enumerate(gathered):
            self._decode(work, shard, content)

    def _reduce(self, work: Work, inputs: list[np.ndarray]) -> np.ndarray:
        """The message with the sums of this rank's shard."""
        work.phase("APS_REDUCE")
        mine = self._mine.copy()
        mine["exponent"] = work.table["exponent"][self._rows]
        mine["factor"] = work.table["factor"][self._rows]
        message = work.lease.take(self._gather_sizes[self._rank])
        sums = message[: self._n_payload]
        exact = scratch = None
        if work.options.error_feedback:
            scratch = self._scratch.pop() if self._scratch else work.kernels.zeros(int(mine["n"].sum()))
            exact = work.exact_sums(mine, scratch, inputs)
        work.kernels.reduce(
            mine, inputs, work.mode, sums, work.seed(self._size), keep_exponent=not work.options.scaling
        )
        if exact is not None:  # what rounding the sum loses comes back through the owner's gradient
            exact["exponent"] = mine["exponent"]
            work.return_losses(exact, sums, work.table["data"][self._rows])
            self._scratch.append(scratch)
        message[self._n_payload :] = mine["exponent"].astype("<i2").view(np.uint8)
        return message

    def _decode(self, work: Work, shard: int, content: np.ndarray) -> None:
        bucket = self._bucket
        rows = slice(int(bucket.shard_segments[shard]), int(bucket.shard_segments[shard + 1]))
        n_exponents = EXPONENT_BYTES * (rows.stop - rows.start)
        part = part_of(work.table, rows, bucket.shard_bytes[shard])
        part["exponent"] = content[len(content) - n_exponents :].view("<i2")
        work.kernels.decode(part, [content[: len(content) - n_exponents]], 0)
