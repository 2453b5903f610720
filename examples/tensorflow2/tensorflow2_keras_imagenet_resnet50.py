"""ResNet-50 (or another model of keras.applications) on ImageNet with Keras 3's `model.fit`.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_keras_imagenet_resnet50.py \\
        --train-dir imagenet/train --val-dir imagenet/val --aps-allreduce --aps-exp-bits 4 --aps-man-bits 3

Any folder of images sorted into classes will do. Needs training.py beside it and common.py one folder up.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("Keras ImageNet example with APS gradient compression")
    parser.add_argument("--train-dir", type=Path, default=Path("imagenet/train"), help="images by class")
    parser.add_argument("--val-dir", type=Path, default=Path("imagenet/val"), help="images by class")
    parser.add_argument("--model", default="ResNet50", help="name of a model of keras.applications")
    parser.add_argument("--image-size", type=common.integer(32), default=224, help="side of the crops")
    parser.add_argument("--momentum", type=float, default=0.9)
    common.add_training_flags(parser, epochs=90, batch_size=32, base_lr=0.0125, warmup_epochs=5)
    common.add_compression_flags(parser)
    return common.parse(parser)


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
import training

import horovod_aps.keras as aps


def files_of(folder: Path, classes: list[str]) -> tuple[tf.Tensor, tf.Tensor]:
    """Paths and labels of all images, in an order that all ranks share."""
    found = [
        (str(path), label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in common.IMAGE_ENDINGS
    ]
    return tf.constant([path for path, _ in found]), tf.constant([label for _, label in found])


def crop_at_random(image: tf.Tensor, side: int, seed: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    """A crop of 8 to 100 % of the image, resized, flipped at random."""
    boxes, seeds = tf.zeros((1, 0, 4)), tf.random.experimental.stateless_split(seed, 2)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image), boxes, seeds[0], area_range=(0.08, 1.0), use_image_if_no_bounding_boxes=True
    )
    image = tf.image.resize(tf.slice(image, begin, size), (side, side))
    return tf.image.stateless_random_flip_left_right(image, seeds[1])


def crop_middle(image: tf.Tensor, side: int) -> tf.Tensor:
    """The middle of the image, resized."""
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    scaled = tf.cast(tf.round(shape * (side / 0.875) / tf.reduce_min(shape)), tf.int32)
    return tf.image.resize_with_crop_or_pad(tf.image.resize(image, scaled), side, side)


def make_dataset(
    order: tf.data.Dataset, epoch: tf.Tensor | None, paths: tf.Tensor, labels: tf.Tensor, args: argparse.Namespace
) -> tf.data.Dataset:
    """This rank's batches from the indices of all images; with an epoch for training, else for validation."""
    train = epoch is not None

    def load(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        file = tf.io.read_file(tf.gather(paths, i))
        image = tf.io.decode_image(file, channels=3, expand_animations=False)
        image = tf.cast(image, tf.float32) / 255
        if train:
            image = crop_at_random(image, args.image_size, (args.seed + epoch, tf.cast(i, tf.int64)))
        else:
            image = crop_middle(image, args.image_size)
        image = tf.ensure_shape(image, (args.image_size, args.image_size, 3))
        return (image - common.MEAN) / common.STD, tf.gather(labels, i)

    # Horovod: every rank takes its share.
    data = order.shard(hvd.size(), hvd.rank()).map(load, num_parallel_calls=tf.data.AUTOTUNE)
    return data.batch(args.batch_size, drop_remainder=train)


def make_synthetic(args: argparse.Namespace) -> tf.data.Dataset:
    """One batch of random images and labels, again and again."""
    image = tf.random.stateless_normal((args.batch_size, args.image_size, args.image_size, 3), (args.seed, hvd.rank()))
    label = tf.random.stateless_uniform(
        (args.batch_size,), (args.seed, hvd.rank()), minval=0, maxval=1000, dtype=tf.int64
    )
    return tf.data.Dataset.from_tensors((image, label)).repeat()


def main(args: argparse.Namespace) -> None:
    if not callable(getattr(keras.applications, args.model, None)):
        common.refuse(f"--model must be in keras.applications, such as ResNet50, got {args.model!r}")
    # Horovod: initialize library.
    hvd.init()
    training.pin_device(args)
    if args.synthetic:
        n_classes, n_batches, n_tested = 1000, 64, 8 * args.batch_size * hvd.size()
        val, judged = make_synthetic(args).take(8), common.judged_on(n_tested, n_tested, made_up=True)
    else:
        with common.checks(hvd):
            classes = common.check_image_folder(args.train_dir, "--train-dir")
            common.check_same_classes(classes, common.check_image_folder(args.val_dir, "--val-dir"))
            paths, labels = files_of(args.train_dir, classes)
            # Ranks may differ by one image; all take the same number of batches.
            n_classes, n_batches = len(classes), len(paths) // hvd.size() // args.batch_size
            common.check_batches(n_batches, len(paths), args.batch_size, hvd.size())
        val_paths, val_labels = files_of(args.val_dir, classes)
        n_wanted = args.max_steps and args.max_steps * args.batch_size * hvd.size()
        tested = common.validation_sample(len(val_paths), n_wanted, args.seed)
        val = make_dataset(tf.data.Dataset.from_tensor_slices(tested), None, val_paths, val_labels, args)
        judged = common.judged_on(len(tested), len(val_paths), made_up=False)
    backbone = getattr(keras.applications, args.model)(
        weights=None, include_top=False, pooling="avg", input_shape=(args.image_size, args.image_size, 3)
    )
    classifier = keras.layers.Dense(n_classes, dtype="float32")
    model = training.follow_quickly(keras.Model(backbone.input, classifier(backbone.output)))
    optimizer = training.with_loss_scale(keras.optimizers.SGD(args.base_lr, momentum=args.momentum))
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
    progress = training.Progress(args, n_batches, "step", checkpoints, val, judged)

    def batches(order: tf.data.Dataset, epoch: tf.Tensor) -> tf.data.Dataset:
        return make_dataset(order, epoch, paths, labels, args).take(n_batches)

    def batches_from(epoch: int, n_done: int) -> tf.data.Dataset:
        if args.synthetic:
            return make_synthetic(args)
        return training.epochs(len(paths), args.seed, epoch, n_done * args.batch_size * hvd.size(), batches)

    progress.fit(model, batches_from)
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
