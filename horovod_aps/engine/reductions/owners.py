"""Reduce-scatter: every layer has an owner, which alone gets its sum. One phase, one rounding, and sums stay unpacked.

    scatter   rank k gets everyone's message with its layers
    decode    the messages, added in rank order, to where the results go

Layer i of a batch belongs to rank i mod N. Each rank sends (N-1)/N of what it packs.
"""

from __future__ import annotations

import numpy as np

from horovod_aps.engine.layout import BucketLayout
from horovod_aps.engine.reductions.base import Reduction, Steps, Work


class Owners(Reduction):
    """A bucket as one message per owner."""

    needs_exponents = True
    n_near = 1

    def __init__(self, bucket: BucketLayout, rank: int, size: int) -> None:
        self._rank, self._others = rank, [k for k in range(size) if k != rank]
        owner = np.array(bucket.layers, np.int64)[bucket.layer_of_segment] % size
        lengths = np.diff(bucket.segments["offset"].astype(np.int64), append=int(bucket.shard_bytes[-1]))
        by_owner = np.argsort(owner, kind="stable")
        self._offsets = np.empty(len(lengths), np.int64)
        self._offsets[by_owner] = np.cumsum(lengths[by_owner]) - lengths[by_owner]
        bounds = np.cumsum([0, *(int(lengths[owner == k].sum()) for k in range(size))]).tolist()
        self._messages = [slice(start, end) for start, end in zip(bounds, bounds[1:])]
        self._n_bytes, self._mine = bounds[-1], owner == rank
        self._n_layers = len(bucket.layers)

    @property
    def _n_own(self) -> int:
        return self._messages[self._rank].stop - self._messages[self._rank].start

    def bytes_sent(self) -> float:
        return self._n_bytes - self._n_own

    def run(self, work: Work) -> Steps:
        send = work.lease.take(self._n_bytes)
        work.table["offset"] = self._offsets
        work.encode(work.table, send)
        work.encoded(send)
        work.phase("APS_ALLTOALL", self._n_bytes - self._n_own)
        received = {k: work.lease.take(self._n_own) for k in self._others}
        yield work.transport.transfer({k: send[self._messages[k]] for k in self._others}, received, work.tag)
        work.phase("APS_DECODE")
        work.point_at_targets()
        own = self._messages[self._rank]
        mine = work.table[self._mine]
        mine["offset"] -= own.start
        inputs = [received.get(k, send[own]) for k in range(len(self._messages))]
        work.kernels.decode(mine, inputs, work.mode)
