"""A single rank with TensorFlow and Keras 3: a no-op, unless the compressor is told to have two levels."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from horovod_aps.keras import DistributedOptimizer
from horovod_aps.tensorflow import APSCompressor

hvd.init()
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def reduce(compressor: APSCompressor, graph: bool) -> list[float]:
    """A tensor after an all-reduce, and a weight after a step of Keras."""
    x, weight = tf.constant([1.0, 3.14159]), keras.Variable([1.0])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.5), compression=compressor)
    optimizer.build([weight])

    def step():
        optimizer.apply([tf.constant([1.0])])
        return hvd.allreduce(x, compression=compressor)

    result = (tf.function(step) if graph else step)().numpy()
    return [*result.tolist(), *weight.numpy().tolist()]


@MODES
@pytest.mark.parametrize("hierarchy", ["auto", "flat"])
def test_one_rank_gets_its_gradients_back(hierarchy, graph):
    assert hvd.size() == 1
    compressor = APSCompressor(4, 3, hierarchy=hierarchy)
    assert reduce(compressor, graph) == [1.0, pytest.approx(3.14159), 0.5]
    assert compressor.stats()["bytes_sent"] == 0


@MODES
def test_two_levels_of_one_rank_are_refused(graph, monkeypatch):
    with pytest.raises(ValueError, match='hierarchy="two-level" cannot be: there is only one rank'):
        APSCompressor(4, 3, hierarchy="two-level")
    with monkeypatch.context() as before:
        before.setattr(mpi_ops, "is_initialized", lambda: False)
        early = APSCompressor(4, 3, hierarchy="two-level")
    with pytest.raises(ValueError, match="there is only one rank"):
        reduce(early, graph)
