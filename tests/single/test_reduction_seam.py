"""The seam for reductions: a toy one, all to rank 0 and back, made here and run by the exchange unchanged.

Oracle: the NumPy simulation with two phases, and a residual by its definition.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from exchange_oracle import SIZES, assert_same_bits, expected, make_gradients, reduce_all
from reference import Format

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.reductions.base import Reduction
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport


# ---- the toy reduction: all of it -------------------------------------------------------------------------
class Star(Reduction):
    """Rank 0 gets everyone's bucket, sums it, and sends the rounded sums with their exponents to everyone."""

    def __init__(self, bucket, rank: int, size: int) -> None:
        self.rank, self.others = rank, range(1, size)
        self.n_bytes, self.n_exponents = int(bucket.shard_bytes[-1]), 2 * len(bucket.segments)

    def bytes_sent(self) -> float:
        return self.n_bytes if self.rank else (self.n_bytes + self.n_exponents) * len(self.others)

    def run(self, work):
        send = work.lease.take(self.n_bytes)
        message = work.lease.take(self.n_bytes + self.n_exponents)
        work.encode(work.table, send)
        work.encoded(send)
        if self.rank:
            yield work.transport.transfer({0: send}, {}, work.tag)
            yield work.transport.transfer({}, {0: message}, work.tag + 1)
        else:
            received = {k: work.lease.take(self.n_bytes) for k in self.others}
            yield work.transport.transfer({}, received, work.tag)
            sums = work.table.copy()
            work.kernels.reduce(sums, [send, *received.values()], work.mode, message[: self.n_bytes])
            message[self.n_bytes :] = sums["exponent"].astype("<i2").view(np.uint8)
            yield work.transport.transfer(dict.fromkeys(self.others, message), {}, work.tag + 1)
        work.point_at_targets()
        work.table["exponent"] = message[self.n_bytes :].view("<i2")
        work.kernels.decode(work.table, [message[: self.n_bytes]])


# ---- what it gets for nothing -----------------------------------------------------------------------------


def stars(n_ranks: int, options: Options) -> list[Exchange]:
    """Exchanges that reduce every bucket that way."""
    return [
        Exchange(CpuKernels(), transport, options, choose_reduction=Star) for transport in LocalTransport.world(n_ranks)
    ]


@pytest.mark.parametrize("bucket_mb", [16.0, 0.002], ids=["one bucket", "several"])
@pytest.mark.parametrize("accumulate", ["float32", "kahan"])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_toy_reduction_equals_simulation(n_ranks: int, accumulate: str, bucket_mb: float) -> None:
    """Two ranks round twice here, where `Swap` rounds once; three and more give the bits of `ScatterGather`."""
    grads = make_gradients(SIZES, n_ranks)
    grads[1]["layer3"][2] = np.nan
    options = Options(4, 3, accumulate=accumulate, bucket_mb=bucket_mb)
    fmt = Format(4, 3)
    other = expected(grads, fmt, factor=1 / n_ranks, mode=accumulate, bucket_mb=bucket_mb)
    wanted = other
    if n_ranks == 2:
        wholes = [[reference.Piece(name, 0, x.size) for name, x in grads[0].items()]]
        wanted = reference.simulate_exchange(grads, fmt, mode=accumulate, phases=2, shards=wholes)
        same = all(np.array_equal(wanted[name], other[name], equal_nan=True) for name in wanted)
        assert same == (accumulate != "float32")  # a sum that was rounded to (e, m) stays as it is
    exchanges = stars(n_ranks, options)
    for _ in range(2):  # the second time with a plan that all ranks know
        for out in reduce_all(grads, exchanges):
            for name, x in out.items():
                assert_same_bits(x, wanted[name], name)
    n_bytes = [exchange.statistics.as_dict()["bytes_sent"] for exchange in exchanges]
    assert n_bytes[0] > n_bytes[-1] > 0 and len(set(n_bytes[1:])) == 1


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_toy_reduction_has_error_feedback(n_ranks: int) -> None:
    grads = make_gradients((9, 1025), n_ranks)
    exchanges = stars(n_ranks, Options(3, 1, error_feedback=True))
    reduce_all(grads, exchanges)
    for rank, exchange in enumerate(exchanges):
        for name, x in grads[rank].items():
            exponent = reference.shared_exponent([other[name] for other in grads], Format(3, 1))
            kept = reference.residual(x, exponent, Format(3, 1)).astype(np.float32)
            assert_same_bits(exchange.residuals[name], kept, name)
