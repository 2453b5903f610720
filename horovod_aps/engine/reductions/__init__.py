"""What happens to one bucket between agreed exponents and results: `base` says what a reduction is.

`reduction_for` chooses; a new reduction is a new module here and a line there.
"""

from __future__ import annotations

from horovod_aps.engine.reductions.base import Reduction
from horovod_aps.engine.reductions.scatter_gather import ScatterGather
from horovod_aps.engine.reductions.swap import Swap
from horovod_aps.layout import BucketLayout


def reduction_for(bucket: BucketLayout, rank: int, size: int) -> Reduction:
    """The way a bucket takes: a bucket in one piece is swapped, one in shards is scattered and gathered."""
    return Swap(bucket, rank, size) if bucket.n_shards == 1 else ScatterGather(bucket, rank, size)
