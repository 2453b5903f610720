"""Images per second of a model of keras.applications on random data, for each way to send gradients.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_synthetic_benchmark.py --model ResNet50 --aps-allreduce

Compare with --fp16-allreduce and without either. On one machine without GPUs the network is not what takes
time; benchmarks/ measures the exchange over links of a given speed. Needs training.py beside it
and common.py one folder up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("TensorFlow synthetic benchmark with APS gradient compression")
    parser.add_argument("--model", default="ResNet50", help="name of a model of keras.applications")
    common.add_benchmark_flags(parser)
    common.add_compression_flags(parser)
    return common.parse(parser)


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import training

import horovod_aps.tensorflow as aps


def main(args: argparse.Namespace) -> None:
    make = getattr(keras.applications, args.model, None)
    if not callable(make):
        common.refuse(f"--model must be in keras.applications, such as ResNet50, got {args.model!r}")
    # Horovod: initialize library.
    hvd.init()
    training.pin_device(args)
    model = make(weights=None, input_shape=(args.image_size, args.image_size, 3))
    optimizer = training.with_loss_scale(keras.optimizers.SGD(0.01 * hvd.size()))
    compression = common.compression(args, hvd.Compression, aps.APSCompressor)
    images = tf.random.normal((args.batch_size, args.image_size, args.image_size, 3))
    labels = tf.random.uniform((args.batch_size,), maxval=1000, dtype=tf.int64)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def train_step() -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(cross_entropy(labels, model(images, training=True)))
        # Horovod: wrap the tape; this is where the gradients' format is chosen. One group shares its messages.
        tape = aps.DistributedGradientTape(tape, compression=compression, groups=1)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    # Horovod: start all ranks alike.
    aps.broadcast_variables(training.variables_of(model, optimizer), root_rank=0)

    def steps(n: int) -> float:
        """Seconds that n training steps take."""
        start = time.perf_counter()
        for _ in range(n):
            train_step()
        np.asarray(model.trainable_variables[0])  # waits for what still runs
        return time.perf_counter() - start

    steps(args.num_warmup_batches)
    rates = []
    with common.progress(args.num_iters, hvd.rank()) as bar:
        for _ in range(args.num_iters):
            rates.append(args.batch_size * args.num_batches_per_iter / steps(args.num_batches_per_iter))
            bar.update()
    # Horovod: every rank has its own clock; report the mean over ranks and measurements.
    all_rates = hvd.allgather(tf.constant(rates), name="rates").numpy()
    if hvd.rank() == 0:
        unit = "GPU" if tf.config.get_visible_devices("GPU") else "CPU rank"
        mean, spread = all_rates.mean(), 1.96 * all_rates.std()
        print(
            f"{args.model}, batch {args.batch_size}, {hvd.size()} ranks, {common.compression_name(args, compression)}\n"
            f"Images/s per {unit}: {mean:.1f} +- {spread:.1f}\n"
            f"Images/s in all: {hvd.size() * mean:.1f} +- {hvd.size() * spread:.1f}",
            flush=True,
        )
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
