"""What happens to one bucket between agreed exponents and results: `base` says what a reduction is.

`reduction_for` chooses; a new reduction is a new module here and a line there. An `Exchange` can be given another way
to choose.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod_aps.engine.layout import BucketLayout
from horovod_aps.engine.reductions.base import Reduction
from horovod_aps.engine.reductions.scatter_gather import ScatterGather
from horovod_aps.engine.reductions.swap import Swap

ChooseReduction = Callable[[BucketLayout, int, int], Reduction]
"""A bucket, this rank and the number of ranks -> how the bucket is reduced; the same on all ranks."""


def reduction_for(bucket: BucketLayout, rank: int, size: int) -> Reduction:
    """The way a bucket takes: a bucket in one piece is swapped, one in shards is scattered and gathered."""
    return Swap(bucket, rank, size) if bucket.n_shards == 1 else ScatterGather(bucket, rank, size)
