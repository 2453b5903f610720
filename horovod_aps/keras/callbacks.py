"""Keras 3 callbacks for Horovod: equal starts, averaged metrics, warm-up and schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies weights and optimizer state of one rank to all others before the first batch.

    After it, if Keras makes some of them only then. States of random number generators stay as they are: dropout
    should differ.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Iterable[keras.Variable] | None = None,
        *,
        process_set: Any = hvd.global_process_set,
    ) -> None:
        """As Horovod's: `device` is where to broadcast, and `local_variables` stay as they are on each rank."""
        super().__init__()
        self.root_rank, self.device, self.process_set = root_rank, device, process_set
        alone = isinstance(local_variables, keras.Variable)
        self._local = {id(v) for v in ([local_variables] if alone else local_variables or ())}
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
        with tf.device(self.device):
            for variable in [*self.model.weights, *self.model.optimizer.variables]:
                if id(variable) not in self._local:
                    value = tf.convert_to_tensor(variable.value)
                    variable.assign(hvd.broadcast(value, self.root_rank, process_set=self.process_set))


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks; put it before callbacks that use them."""

    def __init__(self, device: str = "", *, process_set: Any = hvd.global_process_set) -> None:
        """As Horovod's: `device` is where to average."""
        super().__init__()
        self.device, self.process_set = device, process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the values in `logs`."""
        if logs:
            names = sorted(logs)
            with tf.device(self.device):
                values = hvd.allreduce(
                    tf.constant([float(logs[name]) for name in names], tf.float64), process_set=self.process_set
                )
            logs.update(zip(names, values.numpy().tolist()))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr * multiplier(epoch), from `start_epoch` up to but not at `end_epoch`.

    A number as `multiplier` m stands for exponential decay, m ** (epoch - start_epoch). With `staircase` the rate
    changes at the start of an epoch; else at every batch, and `epoch` is a fraction.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """As Horovod's.

        `steps_per_epoch` is needed only without `staircase`, for data whose length Keras does not know, such as a
        generator. `momentum_correction` must be False: Keras 3 compiles the momentum into the training step.
        `verbose=1` prints, on rank 0, what happened to the rate.
        """
        super().__init__()
        who = type(self).__name__
        if initial_lr is None:
            raise ValueError(f"{who}: initial_lr must be given")
        if momentum_correction:
            raise ValueError(
                f"{who}: momentum_correction must be False, got {momentum_correction!r}: Keras 3 compiles "
                f"the momentum into the training step, so that it cannot be corrected at a batch"
            )
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.initial_lr, self.staircase, self.verbose = initial_lr, staircase, verbose
        self.start_epoch, self.end_epoch, self.steps_per_epoch = start_epoch, end_epoch, steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch; outside of the schedule the learning rate is the user's."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set_rate(self._epoch + batch / self._n_batches())
        elif batch == 0:
            self._set_rate(self._epoch)
            if self.verbose and hvd.rank() == 0:
                print(f"\nEpoch {self._epoch + 1}: learning rate set to {self._rate():g}.", flush=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell later callbacks the learning rate, as `lr`."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _set_rate(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def _n_batches(self) -> int:
        n_batches = self.steps_per_epoch or self.params.get("steps")
        if not n_batches:
            raise ValueError(
                f"{type(self).__name__}: Keras does not know how many batches an epoch has; give steps_per_epoch"
            )
        return n_batches


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate linearly from initial_lr / size to initial_lr in the first epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """As Horovod's; see `LearningRateScheduleCallback`."""
        if warmup_epochs < 1:
            raise ValueError(f"LearningRateWarmupCallback: warmup_epochs must be at least 1, got {warmup_epochs}")

        def multiplier(epoch: float) -> float:
            done = min(1.0, (epoch + 1 / self._n_batches()) / warmup_epochs)  # of this batch, when it is over
            return 1 / hvd.size() * (1 - done) + done

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch, verbose)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Say, if asked, that the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.", flush=True)
