"""TensorFlow frontend: `aps.DistributedGradientTape(tape, compression=aps.APSCompressor(e=4, m=3), groups=1)`.

The compressor goes with Horovod's own tape as well; ours, and our `broadcast_variables`, also take Keras 3's variables.
"""

from horovod_aps.frontends import idle
from horovod_aps.tensorflow.compressor import APSCompressor, PackedCompressor
from horovod_aps.tensorflow.tape import DistributedGradientTape, broadcast_variables

__all__ = ["APSCompressor", "DistributedGradientTape", "PackedCompressor", "broadcast_variables"]

idle.choose()  # before hvd.init() starts MPI
