"""What happens to one bucket between agreed exponents and results: `base` says what a reduction is.

`reduction_for` chooses; a new reduction is a new module here and a line there. An `Exchange` can be given another way
to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod_aps.engine.layout import BucketLayout, LayerSpec, plan_buckets
from horovod_aps.engine.reductions.base import Reduction
from horovod_aps.engine.reductions.scatter_gather import ScatterGather
from horovod_aps.engine.reductions.swap import Swap
from horovod_aps.engine.reductions.two_level import in_two_levels
from horovod_aps.engine.reductions.two_level_messages import in_two_levels_by_messages
from horovod_aps.transports.base import Transport

ChooseReduction = Callable[[BucketLayout, int, int], Reduction]
"""A bucket, this rank and the number of ranks -> how the bucket is reduced; the same on all ranks."""


def reduction_for(bucket: BucketLayout, rank: int, size: int) -> Reduction:
    """The way a bucket takes: a bucket in one piece is swapped, one in shards is scattered and gathered."""
    return Swap(bucket, rank, size) if bucket.n_shards == 1 else ScatterGather(bucket, rank, size)


def plan_reductions(
    specs: Sequence[LayerSpec], bucket_mb: float, transport: Transport, choose: ChooseReduction | None = None
) -> tuple[list[BucketLayout], list[Reduction]]:
    """The buckets of a batch and how each is reduced: in two levels where ranks share hosts, else as `choose` says."""
    hosts = transport.hosts
    if choose is None and hosts is not None and not hosts.why_flat:
        plan = in_two_levels_by_messages if hosts.room is None else in_two_levels
        return plan(specs, bucket_mb, hosts)
    buckets = plan_buckets(specs, transport.size, bucket_mb)
    choose = choose or reduction_for
    return buckets, [choose(bucket, transport.rank, transport.size) for bucket in buckets]
