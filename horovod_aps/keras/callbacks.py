"""Keras 3 callbacks for Horovod: equal starts, averaged metrics, warm-up of the learning rate."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies weights and optimizer state of one rank to all others before the first batch.

    After it, if Keras makes some of them only then. States of random number generators stay as they are: dropout
    should differ.
    """

    def __init__(self, root_rank: int = 0, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.root_rank, self.process_set = root_rank, process_set
        self.done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if everything exists on all ranks."""
        if self.done:
            return
        built = int(self.model.built and self.model.optimizer.built)
        if hvd.allreduce(tf.constant(built), op=hvd.Min, process_set=self.process_set):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast now, if it was too early before."""
        if not self.done:
            self._broadcast()

    def _broadcast(self) -> None:
        self.done = True
        for variable in [*self.model.weights, *self.model.optimizer.variables]:
            value = hvd.broadcast(tf.convert_to_tensor(variable.value), self.root_rank, process_set=self.process_set)
            variable.assign(value)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks; put it before callbacks that use them."""

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the values in `logs`."""
        if logs:
            names = sorted(logs)
            values = hvd.allreduce(tf.constant([float(logs[name]) for name in names], tf.float64),
                                   process_set=self.process_set)
            logs.update(zip(names, values.numpy().tolist()))


class LearningRateWarmupCallback(keras.callbacks.Callback):
    """Raises the learning rate linearly from initial_lr / size to initial_lr in the first epochs.

    `steps_per_epoch` is needed only for data whose length Keras does not know, such as a generator.
    """

    def __init__(self, initial_lr: float, warmup_epochs: int = 5, steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if warmup_epochs < 1:
            raise ValueError(f"LearningRateWarmupCallback: warmup_epochs must be at least 1, got {warmup_epochs}")
        self.initial_lr, self.warmup_epochs, self.steps_per_epoch = initial_lr, warmup_epochs, steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch; after the warm-up the learning rate is the user's again."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        if self._epoch >= self.warmup_epochs:
            return
        n_batches = self.steps_per_epoch or self.params.get("steps")
        if not n_batches:
            raise ValueError("LearningRateWarmupCallback: Keras does not know how many batches an epoch has; give "
                             "steps_per_epoch")
        done = min(1.0, (self._epoch * n_batches + batch + 1) / (self.warmup_epochs * n_batches))
        self.model.optimizer.learning_rate = self.initial_lr * (1 / hvd.size() * (1 - done) + done)
