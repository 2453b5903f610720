"""What the TensorFlow examples share: devices, mixed precision, sums over ranks, checkpoints, TensorBoard."""

from __future__ import annotations

import argparse
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import horovod_aps.keras as aps
from horovod_aps.tensorflow import APSCompressor, broadcast_variables

PROGRESS = "progress.json"  # in a .keras file, beside what Keras puts there


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


def seed_step(model: Any, args: argparse.Namespace, step: int) -> None:
    """Make dropout depend on seed, step and rank only, so that it is the same after --resume."""
    states = [variable for variable in model.variables if variable.name == "seed_generator_state"]
    for i, state in enumerate(states):
        state.assign(np.random.SeedSequence((args.seed, step, hvd.rank(), i)).generate_state(2).astype(state.dtype))


def variables_of(model: Any, optimizer: Any) -> list[keras.Variable]:
    """Everything that all ranks must start with."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*model.variables, *optimizer.variables]


def share_statistics(model: Any) -> None:
    """Horovod: batch normalisation's moving statistics differ between ranks; take rank 0's, which are saved.

    So what is validated is what is saved, and a run that goes on from there has the same on all ranks.
    """
    if model.non_trainable_weights:
        broadcast_variables(model.non_trainable_weights, root_rank=0)


class Checkpoints:
    """Saving on rank 0, and starting all ranks alike; every rank keeps what error feedback has kept for itself.

    A name that ends in .keras gets a file that `keras.models.load_model` loads; any other is TensorFlow's prefix.
    """

    def __init__(self, args: argparse.Namespace, model: Any, optimizer: Any, compression: Any) -> None:
        self.path: Path | None = args.checkpoint
        self.as_keras = self.path is not None and self.path.suffix == ".keras"
        self.compressor = compression if isinstance(compression, APSCompressor) else None
        self.step = tf.Variable(0, dtype=tf.int64)
        self.variables = variables_of(model, optimizer)
        self.state = tf.train.Checkpoint(model=model, optimizer=optimizer, step=self.step)
        self.args, self.model = args, model
        if self.as_keras and getattr(model, "optimizer", None) is None:
            model.compile(optimizer=optimizer)  # a model is saved with the optimizer that it was compiled with

    def restore(self) -> int:
        """Load rank 0's checkpoint, if asked for and there; returns the steps already done."""
        with common.checks(hvd):
            common.check_checkpoint(self.path)
            if hvd.rank() == 0:
                exists = os.path.exists(str(self.path) if self.as_keras else f"{self.path}.index")
                common.resume(self.args, exists, self._load)
        # Horovod: broadcast all variables from rank 0, the progress among them.
        broadcast_variables([*self.variables, self.step], root_rank=0)
        if self.compressor and self.step > 0 and os.path.exists(self._own_path):
            with np.load(self._own_path) as own:  # APS: of this very step, or not at all
                state = json.loads(str(own["state"]))
                if state.pop("step") == int(self.step):
                    residuals = {name[2:]: own[name] for name in own.files if name.startswith("r:")}
                    self.compressor.load_state_dict({**state, "residuals": residuals})
        return int(self.step)

    def _load(self) -> int:
        if not self.as_keras:
            self.state.read(str(self.path)).assert_existing_objects_matched()
            return int(self.step)
        with zipfile.ZipFile(str(self.path)) as file:
            step = json.loads(file.read(PROGRESS))["step"]
        saved = keras.models.load_model(self.path)
        for mine, theirs in zip(self.variables, [*saved.variables, *saved.optimizer.variables], strict=True):
            mine.assign(theirs)
        self.step.assign(step)
        return step

    def save(self, step: int) -> None:
        """Write what all ranks have in common, and this rank's residuals; a crash leaves the old files or new ones."""
        self.step.assign(step)
        if self.path and hvd.rank() == 0:
            if self.as_keras:
                unfinished = self.path.with_name(f"{self.path.stem}.unfinished.keras")
                self.model.save(unfinished)
                with zipfile.ZipFile(unfinished, "a") as file:
                    file.writestr(PROGRESS, json.dumps({"step": step}))
                unfinished.replace(self.path)
            else:
                self.state.write(str(self.path))
        if self.path and self.compressor:
            state = self.compressor.state_dict()
            residuals = {f"r:{name}": values for name, values in state.pop("residuals").items()}
            unfinished_state = f"{self._own_path}.unfinished"
            with open(unfinished_state, "wb") as file:
                np.savez(file, state=json.dumps({**state, "step": step}), **residuals)
            os.replace(unfinished_state, self._own_path)

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
        self,
        args: argparse.Namespace,
        n_batches: int,
        decay: str,
        checkpoints: Checkpoints,
        val: tf.data.Dataset,
        judged: str,
    ) -> None:
        super().__init__()
        self.args, self.n_batches, self.decay, self.step = args, n_batches, decay, int(checkpoints.step)
        self.last_step = min(args.epochs * n_batches, args.max_steps or sys.maxsize)
        self.checkpoints, self.val, self.judged, self.log = checkpoints, val, judged, Log(args.log_dir)

    def fit(self, model: Any, batches_from: Callable[[int, int], tf.data.Dataset]) -> None:
        """`model.fit` up to the last step, on batches from an epoch and a number of its batches on.

        An epoch in whose middle the checkpoint was made is finished first: for Keras an epoch with fewer steps.
        """
        while self.step < self.last_step:
            epoch, n_done = divmod(self.step, self.n_batches)
            model.fit(
                batches_from(epoch, n_done),
                shuffle=False,  # they come shuffled
                steps_per_epoch=self.n_batches - n_done,
                initial_epoch=epoch,
                epochs=epoch + 1 if n_done else -(-self.last_step // self.n_batches),
                callbacks=[aps.MetricAverageCallback(), self],
                verbose=0,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start a bar on rank 0."""
        self.bar = common.progress(self.n_batches, hvd.rank(), f"epoch {epoch + 1}", self.step % self.n_batches)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set this batch's learning rate and what dropout depends on."""
        seed_step(self.model, self.args, self.step)
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
                f"val loss {val_loss:.3f}, top-1 {accuracy:.2%} {self.judged}",
                flush=True,
            )


def evaluate(model: Any, batches: tf.data.Dataset) -> tuple[float, float]:
    """Loss and top-1 accuracy over the samples of all ranks; a rank may hold fewer than others, or none."""
    share_statistics(model)
    sums = np.zeros(3)
    for images, labels in batches:
        logits = model.predict_on_batch(images)
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        sums += [np.sum(losses), np.sum(logits.argmax(1) == labels), len(labels)]
    # Horovod: sums add up over the ranks; means of each rank's mean would be something else.
    loss, hits, n_samples = sum_over_ranks(sums, "evaluate")
    return loss / max(n_samples, 1), hits / max(n_samples, 1)


def epochs(
    n_samples: int,
    seed: int,
    first_epoch: int,
    n_done: int,
    make_batches: Callable[[tf.data.Dataset, tf.Tensor], tf.data.Dataset],
) -> tf.data.Dataset:
    """The batches of one epoch after the other; `make_batches` makes them of shuffled indices and the epoch.

    The order depends on seed and epoch only: it is the same on all ranks, and the same after --resume, for which the
    first n_done samples of the first epoch are left out.
    """

    def one(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(tf.range(n_samples), (seed, epoch))
        order = order[tf.where(epoch == first_epoch, n_done, 0) :]
        return make_batches(tf.data.Dataset.from_tensor_slices(order), epoch)

    return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(one).prefetch(2)


def sum_over_ranks(values: np.ndarray, name: str) -> np.ndarray:
    """Horovod: the sum of an array over all ranks; every rank must call it."""
    return hvd.allreduce(tf.constant(values), op=hvd.Sum, name=name).numpy()


def shares(n_samples: int, batch_size: int, seed: int, epoch: int, n_done: int) -> Iterator[np.ndarray]:
    """Horovod: indices of this rank's batches in an epoch; ranks share one shuffled order and get equally many.

    The first n_done batches are left out, after --resume.
    """
    order = np.random.default_rng((seed, epoch)).permutation(n_samples)
    mine = order[hvd.rank() :: hvd.size()]
    for i in range(n_done, n_samples // (batch_size * hvd.size())):
        yield mine[i * batch_size : (i + 1) * batch_size]
