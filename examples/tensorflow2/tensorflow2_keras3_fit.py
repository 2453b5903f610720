"""The smallest complete Keras 3 example: `model.fit` on scikit-learn's handwritten digits.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_keras3_fit.py --aps-allreduce

Horovod's own Keras wrapper silently trains without all-reduce on Keras 3; horovod_aps.keras has one that does.
Needs training.py beside it and common.py one folder up.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common  # noqa: E402
import training  # noqa: E402

import horovod_aps.keras as aps  # noqa: E402


def make_data(args: argparse.Namespace) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """This rank's share of (images, labels) for training and testing; every fifth digit is for testing."""
    if args.synthetic:
        images, labels = np.random.default_rng(args.seed).random((1000, 8, 8, 1)), np.arange(1000) % 10
    else:
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8, 1) / 16
    is_test = np.arange(len(images)) % 5 == 0
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    # Horovod: every rank takes its own samples, equally many for training.
    train = train[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    test = test[hvd.rank() :: hvd.size()]
    images = images.astype(np.float32)
    return (images[train], labels[train]), (images[test], labels[test])


def make_model() -> Any:
    """Two convolutions and two dense layers for 8x8 images."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def main() -> None:
    parser = common.Parser("Keras 3 model.fit example with APS gradient compression")
    common.add_training_flags(parser, epochs=10, batch_size=32, base_lr=0.025, warmup_epochs=1)
    common.add_compression_flags(parser)
    args = common.parse(parser)
    # Horovod: initialize library.
    hvd.init()
    training.pin_device(args)
    (images, labels), test = make_data(args)
    n_batches = len(images) // args.batch_size
    with common.checks(hvd):
        common.check_batches(n_batches, len(images) * hvd.size(), args.batch_size, hvd.size())
    model = make_model()
    optimizer = training.with_loss_scale(keras.optimizers.SGD(args.base_lr, momentum=0.9))
    # Horovod: make the optimizer distributed; this is where the gradients' format is chosen.
    compression = common.compression(args, hvd.Compression, aps.APSCompressor)
    optimizer = aps.DistributedOptimizer(optimizer, compression=compression)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA cannot compile an all-reduce
    )
    # Horovod: start all ranks alike. Without checkpoints, aps.BroadcastGlobalVariablesCallback(0) does it.
    checkpoints = training.Checkpoints(args, model, optimizer, compression)
    step = checkpoints.restore()
    test_batches = tf.data.Dataset.from_tensor_slices(test).batch(args.batch_size)
    progress = training.Progress(args, n_batches, "poly", checkpoints, test_batches)

    def batches(order: tf.data.Dataset, epoch: tf.Tensor) -> tf.data.Dataset:
        indices = order.batch(args.batch_size, drop_remainder=True)
        return indices.map(lambda i: (tf.gather(images, i), tf.gather(labels, i)))

    first_epoch = step // n_batches
    model.fit(
        training.epochs(len(images), args.seed, first_epoch, batches),
        shuffle=False,  # they come shuffled
        steps_per_epoch=n_batches,
        epochs=progress.n_epochs,
        initial_epoch=first_epoch,
        callbacks=[aps.MetricAverageCallback(), progress],
        verbose=0,
    )
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main()
