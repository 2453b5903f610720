"""Memory: what forward saves for backward, compressed within a bound that training does not notice.

`ActivationCompressor` wraps a model's forward pass; `compress` and `decompress` are its codec for single tensors.
Beside the flow of gradients: it needs torch only, no Horovod.
"""

from horovod_aps.activations.codec import compress, decompress
from horovod_aps.activations.saver import ActivationCompressor

__all__ = ["ActivationCompressor", "compress", "decompress"]
