"""What the TensorFlow examples share: devices, mixed precision, sums over ranks, checkpoints, TensorBoard."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from horovod_aps.tensorflow import APSCompressor


def pin_device(args: argparse.Namespace) -> None:
    """Give this rank its GPU, if there is one and --no-cuda is not given; set seeds and mixed precision."""
    gpus = tf.config.list_physical_devices("GPU")
    if args.no_cuda or not gpus:
        tf.config.set_visible_devices([], "GPU")
        gpus = []
    else:
        # Horovod: pin GPU to local rank.
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    keras.utils.set_random_seed(args.seed)
    if args.mixed_precision:
        keras.mixed_precision.set_global_policy("mixed_float16" if gpus else "mixed_bfloat16")


def with_loss_scale(optimizer: Any) -> Any:
    """The optimizer, with dynamic loss scaling where the policy computes in float16."""
    if keras.mixed_precision.global_policy().compute_dtype == "float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def follow_quickly(model: Any) -> Any:
    """The model, whose batch normalisation now follows the data with momentum 0.9, as in Horovod's examples.

    With Keras's 0.99 what evaluation normalises with is hundreds of steps behind the weights.
    """
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9
    return model


def variables_of(model: Any, optimizer: Any) -> list[tf.Variable]:
    """Everything that all ranks must start with, as TensorFlow's variables rather than Keras's."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [variable.value for variable in [*model.variables, *optimizer.variables]]


class Checkpoints:
    """Saving on rank 0, and starting all ranks alike; every rank keeps what error feedback has kept for itself."""

    def __init__(self, args: argparse.Namespace, model: Any, optimizer: Any, compression: Any) -> None:
        self.path = str(args.checkpoint) if args.checkpoint else None
        self.compressor = compression if isinstance(compression, APSCompressor) else None
        self.step = tf.Variable(0, dtype=tf.int64)
        self.variables = [*variables_of(model, optimizer), self.step]
        self.state = tf.train.Checkpoint(model=model, optimizer=optimizer, step=self.step)
        self.args = args

    def restore(self) -> int:
        """Load rank 0's checkpoint, if asked for and there; returns the steps already done."""
        with common.checks(hvd):
            common.check_checkpoint(self.args.checkpoint)
            if hvd.rank() == 0:
                common.resume(self.args, Path(f"{self.path}.index").exists(), self._load)
        # Horovod: broadcast all variables from rank 0, the progress among them.
        hvd.broadcast_variables(self.variables, root_rank=0)
        if self.compressor and self.step > 0 and os.path.exists(self._own_path):
            with np.load(self._own_path) as own:  # APS: of this very step, or not at all
                state = json.loads(str(own["state"]))
                if state.pop("step") == int(self.step):
                    residuals = {name[2:]: own[name] for name in own.files if name.startswith("r:")}
                    self.compressor.load_state_dict({**state, "residuals": residuals})
        return int(self.step)

    def _load(self) -> int:
        self.state.read(self.path).assert_existing_objects_matched()
        return int(self.step)

    def save(self, step: int) -> None:
        """Write what all ranks have in common, and this rank's residuals."""
        self.step.assign(step)
        if self.path and hvd.rank() == 0:
            self.state.write(self.path)
        if self.path and self.compressor:
            state = self.compressor.state_dict()
            residuals = {f"r:{name}": values for name, values in state.pop("residuals").items()}
            unfinished = f"{self._own_path}.unfinished"
            with open(unfinished, "wb") as file:
                np.savez(file, state=json.dumps({**state, "step": step}), **residuals)
            os.replace(unfinished, self._own_path)

    @property
    def _own_path(self) -> str:
        """This rank's own file beside the checkpoint."""
        return f"{self.path}.rank{hvd.rank()}"


class Log:
    """TensorBoard on rank 0 if --log-dir is given, else nothing."""

    def __init__(self, folder: str | None) -> None:
        self.writer = tf.summary.create_file_writer(folder) if folder and hvd.rank() == 0 else None

    def add(self, step: int, **values: float) -> None:
        """Write scalars, with the first underscore of a name as the folder: train_loss is train/loss."""
        if self.writer is None:
            return
        with self.writer.as_default():
            for name, value in values.items():
                tf.summary.scalar(name.replace("_", "/", 1), value, step=step)
        self.writer.flush()


class Progress(keras.callbacks.Callback):
    """For `model.fit`: learning rate, progress bar, --max-steps, and after an epoch evaluation, log and checkpoint."""

    def __init__(
        self, args: argparse.Namespace, n_batches: int, decay: str, checkpoints: Checkpoints, val: tf.data.Dataset
    ) -> None:
        super().__init__()
        self.args, self.n_batches, self.decay, self.step = args, n_batches, decay, int(checkpoints.step)
        self.last_step = min(args.epochs * n_batches, args.max_steps or sys.maxsize)
        self.checkpoints, self.val, self.log = checkpoints, val, Log(args.log_dir)

    @property
    def n_epochs(self) -> int:
        """How far `model.fit` is to go."""
        return -(-self.last_step // self.n_batches)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start a bar on rank 0."""
        self.bar = tqdm(total=self.n_batches, desc=f"epoch {epoch + 1}", disable=hvd.rank() != 0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set this batch's learning rate."""
        rate = common.learning_rate(self.args, self.step / self.n_batches, hvd.size(), self.decay)
        self.model.optimizer.learning_rate = rate

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step; all ranks stop at the same one."""
        self.step += 1
        self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
        self.bar.update()
        if self.step >= self.last_step:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log, save and print on rank 0; `logs` holds means over ranks, if MetricAverageCallback comes first."""
        self.bar.close()
        val_loss, accuracy = evaluate(self.model, self.val)
        self.log.add(
            self.step,
            train_loss=logs["loss"],
            train_rate=float(self.model.optimizer.learning_rate),
            val_loss=val_loss,
            val_accuracy=accuracy,
        )
        self.checkpoints.save(self.step)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}: step {self.step}, train loss {logs['loss']:.3f}, "
                f"val loss {val_loss:.3f}, top-1 {accuracy:.2%}",
                flush=True,
            )


def evaluate(model: Any, batches: tf.data.Dataset) -> tuple[float, float]:
    """Loss and top-1 accuracy over the samples of all ranks; a rank may hold fewer than others, or none."""
    sums = np.zeros(3)
    for images, labels in batches:
        logits = model.predict_on_batch(images)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        sums += [np.sum(losses), np.sum(logits.argmax(1) == labels), len(labels)]
    # Horovod: sums add up over the ranks; means of each rank's mean would be something else.
    loss, hits, n_samples = sum_over_ranks(sums, "evaluate")
    return loss / max(n_samples, 1), hits / max(n_samples, 1)


def epochs(
    n_samples: int, seed: int, first_epoch: int, make_batches: Callable[[tf.data.Dataset, tf.Tensor], tf.data.Dataset]
) -> tf.data.Dataset:
    """The batches of one epoch after the other; `make_batches` makes them of shuffled indices and the epoch.

    The order depends on seed and epoch only: it is the same on all ranks, and the same after --resume.
    """

    def one(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(tf.range(n_samples), (seed, epoch))
        return make_batches(tf.data.Dataset.from_tensor_slices(order), epoch)

    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(one).prefetch(2)


def sum_over_ranks(values: np.ndarray, name: str) -> np.ndarray:
    """Horovod: the sum of an array over all ranks; every rank must call it."""
    return hvd.allreduce(tf.constant(values), op=hvd.Sum, name=name).numpy()


def shares(n_samples: int, batch_size: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Horovod: indices of this rank's batches in an epoch; ranks share one shuffled order and get equally many."""
    order = np.random.default_rng((seed, epoch)).permutation(n_samples)
    mine = order[hvd.rank() :: hvd.size()]
    for i in range(n_samples // (batch_size * hvd.size())):
        yield mine[i * batch_size : (i + 1) * batch_size]
