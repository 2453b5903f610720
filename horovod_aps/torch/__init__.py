"""PyTorch frontend: `hvd.DistributedOptimizer(..., compression=APSCompressor(e=4, m=3))`."""

from horovod_aps.frontends import idle
from horovod_aps.torch.collectives import allgather, collective_bytes, reduce_scatter
from horovod_aps.torch.compressor import APSCompressor, PackedCompressor

__all__ = ["APSCompressor", "PackedCompressor", "allgather", "collective_bytes", "reduce_scatter"]

idle.choose()  # before hvd.init() starts MPI
