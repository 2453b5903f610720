"""TensorFlow frontend: `hvd.DistributedGradientTape(tape, compression=APSCompressor(e=4, m=3), groups=1)`."""

from horovod_aps.tensorflow.compressor import APSCompressor

__all__ = ["APSCompressor"]
