"""Stock `hvd.DistributedOptimizer` with compression on tf-keras (`TF_USE_LEGACY_KERAS=1`), on real ranks."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import horovod.tensorflow.keras as hvd  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402
from horovod.tensorflow import Adasum  # noqa: E402
from tf_common import digits, initial_weights, replicas_equal  # noqa: E402

from horovod_aps.tensorflow import APSCompressor  # noqa: E402

hvd.init()


def make_model(seed: int = 0) -> tf.keras.Model:
    layers = [tf.keras.layers.Dense(32, activation="relu", input_shape=(64,)), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential(layers)
    model.set_weights(initial_weights(seed))
    return model


def compile_model(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> None:
    model.compile(optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def fit(model: tf.keras.Model, epochs: int = 1, seed: int = 0, callbacks=(), batch_size: int = 32) -> None:
    x, y, _, _ = digits(seed)
    model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def test_this_is_tf_keras():
    assert tf.keras.Model.__module__.startswith("tf_keras.")


@pytest.mark.parametrize("groups", [None, 1])
def test_fit_keeps_replicas_identical(groups):
    """Ranks start differently; Horovod's callback makes them equal, compressed gradients keep them so."""
    compressor = APSCompressor(4, 3)
    model = make_model(seed=hvd.rank())
    adam = tf.keras.optimizers.Adam(0.01)
    compile_model(model, hvd.DistributedOptimizer(adam, compression=compressor, groups=groups))
    fit(model, epochs=2, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert replicas_equal(model.weights)
    assert {layer["format"] for layer in compressor.stats()["layers"].values()} == {"e4m3"}
    assert len(compressor.stats()["layers"]) == 4


def test_backward_passes_per_step():
    """Local aggregation: every second batch is exchanged. Oracle: the compressor's own count."""
    compressor = APSCompressor(4, 3)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.1),
        compression=compressor,
        groups=1,
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )
    compile_model(model, optimizer)
    x, y, _, _ = digits(0)
    model.fit(x[:256], y[:256], batch_size=32, verbose=0)
    assert replicas_equal(model.weights)
    assert {layer["n_exchanges"] for layer in compressor.stats()["layers"].values()} == {4}


def test_adasum_is_refused():
    with pytest.raises(ValueError, match="only supports Average and Sum"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), compression=APSCompressor(4, 3), op=Adasum)


def test_digits_accuracy():
    """Oracle: the same without compression; within one point over 5 seeds."""
    scores = []
    for compression in (hvd.Compression.none, APSCompressor(4, 3)):
        model = make_model()
        compile_model(model, hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.5), compression=compression, groups=1))
        row = []
        for seed in range(5):
            model.set_weights(initial_weights(seed))
            fit(model, epochs=8, seed=seed, batch_size=64)
            _, _, x, y = digits(seed)
            row.append(100 * float((model.predict_on_batch(x).argmax(1) == y).mean()))
        scores.append(row)
    fp32, aps = np.mean(scores, axis=1)
    assert fp32 > 90 and abs(fp32 - aps) <= 1.0, scores
