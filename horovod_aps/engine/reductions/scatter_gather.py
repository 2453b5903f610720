"""Three ranks and more: each sums one shard of the bucket and sends the rounded sum to all.

    scatter   rank k gets everyone's k-th shard
    reduce    decode the shards, add, find the new exponents, round and encode again
    gather    packed sums to everyone, each shard's exponents behind its bytes
    decode    what was sent, on all ranks alike, so that replicas stay identical

Bytes per rank are those of a ring all-reduce, with two roundings whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_aps.engine.layout import BucketLayout
from horovod_aps.engine.reductions.base import Reduction, Steps, Work


class ScatterGather(Reduction):
    """A bucket in one shard per rank."""

    def __init__(self, bucket: BucketLayout, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        """`rank` of `size` takes part; `ranks` has the transport's number of each, if it is another."""
        self._bucket, self._rank, self._size = bucket, rank, size
        self._ranks = list(range(size)) if ranks is None else list(ranks)
        self._rows = slice(int(bucket.shard_segments[rank]), int(bucket.shard_segments[rank + 1]))
        self._mine = bucket.shard_table(rank)
        self._n_payload = int(bucket.shard_bytes[rank + 1] - bucket.shard_bytes[rank])
        self._others = [k for k in range(size) if k != rank]
        self._scratch: list[Any] = []  # float32 memory of earlier runs, for the sums before they are rounded

    def bytes_sent(self) -> float:
        scattered = int(self._bucket.shard_bytes[-1]) - self._n_payload
        return scattered + int(np.diff(self._bucket.gather_bytes)[self._rank]) * len(self._others)

    def run(self, work: Work) -> Steps:
        gathered = work.lease.take(int(self._bucket.gather_bytes[-1]))
        yield from self.exchange(work, gathered)
        work.phase("APS_DECODE")
        work.point_at_targets()
        self._bucket.read_gathered(work.table, gathered)
        work.kernels.decode(work.table, [gathered])

    def exchange(self, work: Work, gathered: np.ndarray) -> Steps:
        """All ranks' sums into `gathered`, which is laid out as the bucket says."""
        send = work.lease.take(int(self._bucket.shard_bytes[-1]))
        shards = _cut(send, self._bucket.shard_bytes)
        work.encode(work.table, send)
        work.encoded(send)

        work.phase("APS_ALLTOALL", len(send) - self._n_payload)
        inputs = [shards[k] if k == self._rank else work.lease.take(self._n_payload) for k in range(self._size)]
        yield work.transport.transfer(self._to_others(shards), self._to_others(inputs), work.tag)

        messages = _cut(gathered, self._bucket.gather_bytes)
        mine = messages[self._rank]
        self._reduce(work, inputs, mine)
        work.phase("APS_ALLGATHER", len(mine) * len(self._others))
        yield work.transport.transfer(
            {self._ranks[k]: mine for k in self._others}, self._to_others(messages), work.tag + 1
        )

    def _to_others(self, arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        return {self._ranks[k]: arrays[k] for k in self._others}

    def _reduce(self, work: Work, inputs: list[np.ndarray], message: np.ndarray) -> None:
        """Write the message with the sums of this rank's shard."""
        work.phase("APS_REDUCE")
        mine = self._mine.copy()
        mine["exponent"] = work.table["exponent"][self._rows]
        mine["factor"] = work.table["factor"][self._rows]
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


def _cut(array: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
    return [array[start:stop] for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist())]
