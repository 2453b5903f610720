"""PyTorch frontend: `hvd.DistributedOptimizer(..., compression=APSCompressor(e=4, m=3))`."""

from horovod_aps.torch.compressor import APSCompressor

__all__ = ["APSCompressor"]
