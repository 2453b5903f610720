"""All-gather: every layer has an owner, whose values all ranks get. One phase, one rounding.

    scan      the owner's layers
    gather    what the owner has packed to everyone, and its exponents in a small message beside it
    decode    what was sent, on all ranks alike, the owner included, so that replicas stay identical

Layer i of a batch belongs to rank i mod N; what other ranks have as its source is not read.
"""

from __future__ import annotations

import numpy as np

from horovod_aps.engine.reductions.base import Steps, Work
from horovod_aps.engine.reductions.owners import Owners
from horovod_aps.kernels import EXP_ZERO


class Gather(Owners):
    """A bucket as one message per owner, which goes to all others."""

    needs_exponents = False

    def bytes_sent(self) -> float:
        return (self._n_own + 4 * self._n_layers) * len(self._others)

    def run(self, work: Work) -> Steps:
        work.table["offset"] = self._offsets
        own, layer_of_segment = self._messages[self._rank], work.bucket.layer_of_segment
        mine = work.table[self._mine]
        mine["offset"] -= own.start
        work.phase("APS_SCAN")
        yield work.kernels.scan(mine, stochastic=work.bucket.is_stochastic)
        exponents = np.full((len(self._messages), self._n_layers), EXP_ZERO, "<i4")
        np.maximum.at(exponents[self._rank], layer_of_segment[self._mine], mine["exponent"])
        mine["exponent"] = exponents[self._rank][layer_of_segment[self._mine]]

        packed = work.lease.take(self._n_bytes)
        work.encode(mine, packed[own])
        work.phase("APS_ALLGATHER", int(self.bytes_sent()))
        small = [row.view(np.uint8) for row in exponents]
        parts = [packed[part] for part in self._messages]
        requests = [
            work.transport.transfer(
                dict.fromkeys(self._others, sent[self._rank]), {k: sent[k] for k in self._others}, work.tag + tag
            )
            for tag, sent in ((2, small), (1, parts))
        ]
        yield from requests
        work.phase("APS_DECODE")
        work.scale(exponents.max(axis=0).astype(np.int32), 1)
        work.point_at_targets()
        work.kernels.decode(work.table, [packed])
