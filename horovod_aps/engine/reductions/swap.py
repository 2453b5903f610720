"""Two ranks swap what they have encoded, part by part: one part is on its way while the next is encoded.

One phase and one rounding, where scatter and gather would take two of each and send as many bytes.
"""

from __future__ import annotations

import numpy as np

from horovod_aps.engine.layout import BucketLayout, part_of
from horovod_aps.engine.reductions.base import Reduction, Steps, Work
from horovod_aps.kernels import SUM_FLOAT


class Swap(Reduction):
    """A bucket in one piece, between two ranks."""

    def __init__(self, bucket: BucketLayout, rank: int, size: int) -> None:
        self._n_bytes, self._others = int(bucket.shard_bytes[-1]), [k for k in range(size) if k != rank]
        self._parts = bucket.parts()

    def bytes_sent(self) -> float:
        return self._n_bytes * len(self._others)

    def run(self, work: Work) -> Steps:
        rank, size = work.transport.rank, work.transport.size
        send = work.lease.take(self._n_bytes)
        received = {k: work.lease.take(self._n_bytes) for k in self._others}
        requests = []
        for rows, span in self._parts:
            work.encode(part_of(work.table, rows, span.start), send[span])
            work.phase("APS_ALLGATHER", (span.stop - span.start) * len(self._others))
            requests.append(
                work.transport.transfer(
                    {k: send[span] for k in self._others}, {k: received[k][span] for k in self._others}, work.tag
                )
            )
        work.encoded(send)
        residuals = work.table["data"].copy()
        work.point_at_targets()
        for number, ((rows, span), request) in enumerate(zip(self._parts, requests)):
            yield request
            work.phase("APS_DECODE")
            part = part_of(work.table, rows, span.start)
            inputs = [send[span] if k == rank else received[k][span] for k in range(size)]
            # Both ranks lose the same where partial sums are rounded; they take turns in keeping it.
            if work.options.error_feedback and work.mode != SUM_FLOAT and number % size == rank:
                self.keep_losses(work, part, inputs, residuals[rows])
            work.kernels.decode(part, inputs, work.mode)

    @staticmethod
    def keep_losses(work: Work, part: np.ndarray, inputs: list[np.ndarray], residuals: np.ndarray) -> None:
        """Return what partial sums lose when they are rounded to (e, m)."""
        scratch = work.kernels.zeros(int(part["n"].sum()))
        exact = work.exact_sums(part, scratch, inputs)
        sums = work.lease.take(len(inputs[0]))
        work.kernels.reduce(part.copy(), inputs, work.mode, sums)
        work.return_losses(exact, sums, residuals)
