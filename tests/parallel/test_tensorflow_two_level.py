"""Two levels with TensorFlow and Keras 3, on 4 ranks that count to two hosts."""

from __future__ import annotations

import errno
import os

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_aps.keras as aps_keras
from horovod_aps.tensorflow import APSCompressor

hvd.init()


@pytest.fixture(autouse=True)
def two_hosts(monkeypatch) -> None:
    assert hvd.size() == 4
    monkeypatch.setenv("HOROVOD_APS_HOST", "aabb"[hvd.rank()])


@pytest.mark.parametrize("n_hosts", [2, 1])
@pytest.mark.parametrize("graph", [False, True])
def test_allreduce(graph: bool, n_hosts: int, monkeypatch) -> None:
    """Several tensors at one call site and at several; the sum of exact values is exact in both ways."""
    if n_hosts == 1:
        monkeypatch.setenv("HOROVOD_APS_HOST", "a")
    compressor = APSCompressor(4, 3)

    def reduce(x, y):
        return (
            hvd.allreduce(x, name=f"x{graph}{n_hosts}", compression=compressor, op=hvd.Sum),
            hvd.allreduce(y, name=f"y{graph}{n_hosts}", compression=compressor, op=hvd.Sum),
        )

    function = tf.function(reduce) if graph else reduce
    x, y = tf.fill([1000], float(hvd.rank() + 1)), tf.fill([3, 5], 0.5)
    for _ in range(3):
        first, second = function(x, y)
        np.testing.assert_array_equal(first, np.full(1000, 10.0, np.float32))
        np.testing.assert_array_equal(second, np.full((3, 5), 2.0, np.float32))
    assert ("two-level" if n_hosts == 2 else "flat") in compressor.stats()["hierarchy"]


@pytest.mark.parametrize("graph", [False, True])
def test_memory_that_cannot_grow_is_an_error_on_all_ranks(graph: bool, monkeypatch) -> None:
    """One after which elastic training does not try the same again: in a graph it looks for UnknownError."""
    compressor = APSCompressor(4, 3)

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def reduce(n: int):
        call = lambda x: hvd.allreduce(x, name=f"grow{n}{graph}", compression=compressor)  # noqa: E731
        return (tf.function(call) if graph else call)(tf.ones([n]))

    np.testing.assert_array_equal(reduce(10), np.ones(10))
    if hvd.rank() == 2:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    kind = tf.errors.ResourceExhaustedError if graph else MemoryError
    for n in (10_000, 10):  # and so does every later one
        with pytest.raises(kind, match=r"rank could not go on|rank 2 could not go on") as caught:
            reduce(n)
        assert "cannot grow to" in str(caught.value) and 'hierarchy="flat"' in str(caught.value)


def test_keras_training_keeps_replicas_equal() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(33, "tanh"), keras.layers.Dense(2)])
    compressor = aps_keras.APSCompressor(4, 3, error_feedback=True)
    model.compile(aps_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compressor), "mse")
    rng = np.random.default_rng(hvd.rank())
    model.fit(rng.standard_normal((32, 8)), rng.standard_normal((32, 2)), batch_size=8, epochs=2, verbose=0)
    raw = np.concatenate([w.ravel() for w in model.get_weights()])
    rows = hvd.allgather(tf.constant(raw[None]), name="replicas").numpy()
    assert (rows == rows[0]).all()
    assert "two-level" in compressor.stats()["hierarchy"]
