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
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("Keras 3 model.fit example with APS gradient compression")
    common.add_training_flags(parser, epochs=10, batch_size=32, base_lr=0.025, warmup_epochs=1)
    common.add_compression_flags(parser)
    return common.parse(parser)


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import training
from sklearn.datasets import load_digits

import horovod_aps.keras as aps


def make_data(args: argparse.Namespace) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], int]:
    """This rank's share of (images, labels) for training and testing, and the number of test images on all ranks.

    Every fifth digit is for testing; --synthetic takes ten random patterns under noise instead.
    """
    if args.synthetic:
        random = np.random.default_rng(args.seed)
        labels = random.integers(10, size=1000)
        images = (3 * (random.random((10, 8, 8, 1)) > 0.7)[labels] + random.random((1000, 8, 8, 1))) / 4
    else:
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8, 1) / 16
    is_test = np.arange(len(images)) % 5 == 0
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    # Horovod: every rank takes its own samples, equally many for training.
    train = train[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    mine = test[hvd.rank() :: hvd.size()]
    images = images.astype(np.float32)
    return (images[train], labels[train]), (images[mine], labels[mine]), len(test)


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


def main(args: argparse.Namespace) -> None:
    # Horovod: initialize library.
    hvd.init()
    training.pin_device(args)
    (images, labels), test, n_test = make_data(args)
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
    checkpoints.restore()
    test_batches = tf.data.Dataset.from_tensor_slices(test).batch(args.batch_size)
    judged = common.judged_on(n_test, n_test, made_up=False)
    progress = training.Progress(args, n_batches, "poly", checkpoints, test_batches, judged)

    def batches(order: tf.data.Dataset, epoch: tf.Tensor) -> tf.data.Dataset:
        indices = order.batch(args.batch_size, drop_remainder=True)
        return indices.map(lambda i: (tf.gather(images, i), tf.gather(labels, i)))

    progress.fit(
        model,
        lambda epoch, n_done: training.epochs(len(images), args.seed, epoch, n_done * args.batch_size, batches),
    )
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
