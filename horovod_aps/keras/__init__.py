"""Keras 3 on TensorFlow with Horovod: a DistributedOptimizer that does all-reduce, and its callbacks.

Horovod's own wrapper builds without error on Keras 3 and then never all-reduces. With tf-keras
(`TF_USE_LEGACY_KERAS=1`) Horovod's works, also with our compressor.
"""

from horovod_aps.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from horovod_aps.keras.optimizer import DistributedOptimizer, load_model
from horovod_aps.tensorflow import APSCompressor, PackedCompressor

__all__ = [
    "APSCompressor",
    "BroadcastGlobalVariablesCallback",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "PackedCompressor",
    "load_model",
]
