"""Semantic segmentation with a fully convolutional ResNet-50 and a custom training loop.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_segmentation.py --data-dir camvid --layout folder \\
        --crop 176 240 --aps-allreduce --aps-exp-bits 4 --aps-man-bits 3

Reads Cityscapes, VOC, or folders of images and label maps. Needs training.py beside it, and common.py and
segmentation_data.py one folder up.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import segmentation_data

BACKBONES = ("ResNet50", "ResNet101", "MobileNetV2")


def parse() -> argparse.Namespace:
    parser = common.Parser("TensorFlow segmentation example with APS gradient compression")
    segmentation_data.add_flags(parser)
    parser.add_argument("--backbone", choices=BACKBONES, default="ResNet50", help="from keras.applications")
    common.add_training_flags(parser, epochs=60, batch_size=4, base_lr=0.01, warmup_epochs=1)
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


def make_model(args: argparse.Namespace, n_classes: int) -> Any:
    """A backbone without its classifier and a 3x3 head, for images of any size."""
    backbone = getattr(keras.applications, args.backbone)(include_top=False, weights=None, input_shape=(None, None, 3))
    x = keras.layers.Conv2D(256, 3, padding="same", use_bias=False)(backbone.output)
    x = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(x))
    x = keras.layers.Dropout(0.1)(x)
    x = keras.layers.Conv2D(n_classes, 1)(x)
    return keras.Model(backbone.input, keras.layers.Activation("linear", dtype="float32")(x))


def pixel_logits(model: Any, images: tf.Tensor, training: bool) -> tf.Tensor:
    """The model's output, resized to that of the images."""
    return tf.image.resize(model(images, training=training), tf.shape(images)[1:3])


def pixel_loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Mean cross-entropy over the pixels that have a class; zero if none has."""
    known = labels != segmentation_data.VOID
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(known, labels, 0), logits)
    weights = tf.cast(known, losses.dtype)
    return tf.reduce_sum(losses * weights) / tf.maximum(tf.reduce_sum(weights), 1)


def batch_of(data: segmentation_data.SegmentationData, indices: Iterable[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Samples stacked into tensors."""
    images, labels = zip(*(data[int(i)] for i in indices), strict=True)
    return tf.constant(np.stack(images)), tf.constant(np.stack(labels))


def evaluate(
    predict: Callable[[tf.Tensor], tf.Tensor], data: segmentation_data.SegmentationData, tested: list[int]
) -> float:
    """Mean IoU over all pixels of the validation images of all ranks."""
    matrix = np.zeros((data.n_classes, data.n_classes), np.int64)
    for i in tested[hvd.rank() :: hvd.size()]:
        images, labels = batch_of(data, [i])  # whole images, of any size
        matrix += segmentation_data.confusion(labels.numpy(), predict(images).numpy(), data.n_classes)
    # Horovod: counts add up over the ranks; means of each rank's mean IoU would be something else.
    return segmentation_data.mean_iou(training.sum_over_ranks(matrix, "confusion"))


def main(args: argparse.Namespace) -> None:
    # Horovod: initialize library.
    hvd.init()
    training.pin_device(args)
    with common.checks(hvd):
        train_data = segmentation_data.SegmentationData(args, "train")
        val_data = segmentation_data.SegmentationData(args, "val")
        n_batches = len(train_data) // (args.batch_size * hvd.size())
        common.check_batches(n_batches, len(train_data), args.batch_size, hvd.size())
    model = training.follow_quickly(make_model(args, train_data.n_classes))
    optimizer = training.with_loss_scale(keras.optimizers.SGD(args.base_lr, momentum=0.9))
    rate = tf.Variable(args.base_lr)
    compression = common.compression(args, hvd.Compression, aps.APSCompressor)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = pixel_loss(labels, pixel_logits(model, images, training=True))
            scaled = optimizer.scale_loss(loss)
        # Horovod: wrap the tape; this is where the gradients' format is chosen. One group shares its messages.
        tape = aps.DistributedGradientTape(tape, compression=compression, groups=1)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.learning_rate.assign(rate)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function(input_signature=[tf.TensorSpec((None, None, None, 3))])
    def predict(images: tf.Tensor) -> tf.Tensor:
        return tf.argmax(pixel_logits(model, images, training=False), -1)

    checkpoints = training.Checkpoints(args, model, optimizer, compression)
    step = checkpoints.restore()
    log = training.Log(args.log_dir)
    last_step = min(args.epochs * n_batches, args.max_steps or sys.maxsize)
    tested = common.validation_sample(len(val_data), args.max_steps and args.max_steps * hvd.size(), args.seed)
    judged = common.judged_on(len(tested), len(val_data), args.synthetic)
    while step < last_step:
        epoch, n_done = divmod(step, n_batches)
        train_data.epoch = epoch
        losses = []
        with common.progress(n_batches, hvd.rank(), f"epoch {epoch + 1}", n_done) as bar:
            for indices in training.shares(len(train_data), args.batch_size, args.seed, epoch, n_done):
                training.seed_step(model, args, step)
                rate.assign(common.learning_rate(args, step / n_batches, hvd.size(), "poly"))
                losses.append(float(train_step(*batch_of(train_data, indices))))
                step += 1
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update()
                if step >= last_step:
                    break
        loss = float(training.sum_over_ranks(np.float64(np.mean(losses)), "loss")) / hvd.size()
        training.share_statistics(model)
        iou = evaluate(predict, val_data, tested)
        log.add(step, train_loss=loss, train_rate=float(rate), val_iou=iou)
        checkpoints.save(step)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: step {step}, train loss {loss:.3f}, mean IoU {iou:.3f} {judged}", flush=True)
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
