"""DistributedOptimizer for Keras 3: the gradients of a step are all-reduced in one group, then applied."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_aps.frontends.checks import NO_INSTANCE
from horovod_aps.tensorflow import PackedCompressor
from horovod_aps.tensorflow.seam import allreduce_group, refuse_xla

MARK = "_horovod_aps_distributed"


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    compression: Any = None,
    *,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make a Keras 3 optimizer all-reduce its gradients before it applies them; it is changed in place and returned.

    Works in `model.fit` and with `apply` or `apply_gradients`. Gradients are reduced before clipping and, in a
    LossScaleOptimizer, before the check for NaN and Inf, so that all ranks skip the same steps. With
    `gradient_accumulation_steps` only the accumulated gradients are reduced; inside a LossScaleOptimizer those of every
    batch, each of which must be finite on all ranks.

    Args:
        optimizer: any Keras optimizer; put a LossScaleOptimizer inside, never around.
        compression: None, `hvd.Compression.fp16`, a `PackedCompressor` or an `APSCompressor`.
        name: of the operations; by default it has the optimizer's.
        device_dense: must be empty: gradients are reduced where they are.
        device_sparse: must be empty.
        sparse_as_dense: all-reduce the gradients of embeddings as dense tensors; else Horovod gathers them.
        gradient_predivide_factor: divides before the sum, and multiplies after it, as in Horovod.
        op: `hvd.Average` or `hvd.Sum`.
        backward_passes_per_step: batches whose gradients are accumulated before they are reduced and applied; as
            Keras's `gradient_accumulation_steps`, which it sets.
        average_aggregated_gradients: divide what was accumulated by their number, as Keras does; else it is their sum.
        num_groups: Horovod's old name of `groups`.
        groups: taken as Horovod takes it, and of no effect: the gradients of a step are always one group, of which an
            APSCompressor makes messages by its `bucket_mb`.
        process_set: the ranks that train together.
        scale_local_gradients: must be True: there are no local variables here.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(f"DistributedOptimizer: Keras must use the TensorFlow backend, got {backend!r}")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer: optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}; "
            f"for one of tf-keras use horovod.tensorflow.keras.DistributedOptimizer"
        )
    _check_compression(compression)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"DistributedOptimizer: name must be a string, got {type(name).__name__}")
    if device_dense or device_sparse:
        raise ValueError(
            f"DistributedOptimizer: device_dense and device_sparse must be empty, since gradients are "
            f"reduced where they are, got {device_dense!r} and {device_sparse!r}"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"DistributedOptimizer: op must be Average or Sum, got {op}")
    if not isinstance(gradient_predivide_factor, Real) or not gradient_predivide_factor > 0:
        raise ValueError(
            f"DistributedOptimizer: gradient_predivide_factor must be a positive number, got "
            f"{gradient_predivide_factor!r}"
        )
    if not isinstance(process_set, hvd.ProcessSet):
        raise TypeError(f"DistributedOptimizer: process_set must be one of Horovod's, got {process_set!r}")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ValueError("DistributedOptimizer: gradient_predivide_factor needs op=Average")
    if num_groups:
        warnings.warn("DistributedOptimizer: num_groups is now called groups", DeprecationWarning, stacklevel=2)
    _check_groups(num_groups if groups is None else groups)
    if not scale_local_gradients:
        raise ValueError(
            "DistributedOptimizer: scale_local_gradients must be True, since there are no local variables "
            "here: all gradients are reduced"
        )
    for part in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if getattr(part, MARK, False):
            raise ValueError("DistributedOptimizer: optimizer is distributed already; wrap the outermost one, once")
    _accumulate(optimizer, backward_passes_per_step)
    n_summed = 1 if average_aggregated_gradients else backward_passes_per_step
    reducer = _Reducer(
        compression or hvd.Compression.none, op, gradient_predivide_factor, sparse_as_dense, process_set, name, n_summed
    )
    optimizer.__class__ = _distributed_class(type(optimizer), reducer)
    return optimizer


def _check_compression(compression: Any) -> None:
    if isinstance(compression, type) and issubclass(compression, PackedCompressor):
        raise TypeError(NO_INSTANCE.replace("APSCompressor:", "DistributedOptimizer:", 1))
    if compression is not None and not hasattr(compression, "compress"):
        raise TypeError(
            f"DistributedOptimizer: compression must be None, one of hvd.Compression or an APSCompressor, "
            f"got {compression!r}"
        )


def _check_groups(groups: Any) -> None:
    """As Horovod: a number, or lists of variables."""
    if not isinstance(groups, list) and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 0):
        raise ValueError(
            f"DistributedOptimizer: groups must be a non-negative integer or a list of lists of "
            f"variables, got {groups!r}"
        )


def _accumulate(optimizer: Any, n_batches: int) -> None:
    """Have Keras accumulate the gradients of several batches, Horovod's backward_passes_per_step."""
    if isinstance(n_batches, bool) or not isinstance(n_batches, int) or n_batches < 1:
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step must be a positive integer, got {n_batches!r}"
        )
    if n_batches == 1:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step={n_batches} does not go with a "
            f"LossScaleOptimizer, which needs finite gradients of every batch; give "
            f"gradient_accumulation_steps to the optimizer in it"
        )
    present = optimizer.gradient_accumulation_steps
    if present not in (None, n_batches):
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step={n_batches}, but the optimizer has "
            f"gradient_accumulation_steps={present}; they are the same thing, so give one of them"
        )
    if present is None and optimizer.built:
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step={n_batches} comes too late for an optimizer "
            f"that is built; make it with gradient_accumulation_steps={n_batches}"
        )
    optimizer.gradient_accumulation_steps = n_batches


def load_model(
    filepath: Any, compression: Any = None, *, custom_objects: dict[str, Any] | None = None, **options: Any
) -> keras.Model:
    """Load a saved model and make its optimizer distributed again; `options` are DistributedOptimizer's."""
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is None:
        raise ValueError(f"load_model: {str(filepath)!r} was saved without an optimizer")
    DistributedOptimizer(model.optimizer, compression, **options)
    return model


class _Reducer:
    """All-reduces the gradients of one step."""

    def __init__(
        self,
        compression: Any,
        op: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: Any,
        name: str | None,
        n_summed: int,
    ) -> None:
        self.compression, self.op, self.process_set, self.name = compression, op, process_set, name
        # Keras hands us the mean of n_summed batches where their sum is wanted.
        self.prescale, self.postscale = 1.0 / predivide, predivide * n_summed
        self.sparse_as_dense = sparse_as_dense or n_summed > 1
        self.n_calls = 0

    def __call__(self, grads: Sequence[Any], optimizer: Any, variables: Any) -> list[Any]:
        """The reduced gradients in the same places; None stays None."""
        refuse_xla("DistributedOptimizer")
        self.n_calls += 1
        results = list(grads)
        label = self.name or f"DistributedOptimizer.{optimizer.name}"
        if not self.process_set.included():
            return results
        dense: dict[Any, list[int]] = {}
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            if isinstance(grad, tf.IndexedSlices):
                if not self.sparse_as_dense:
                    results[i] = hvd.allreduce(
                        grad, op=self.op, process_set=self.process_set, name=f"{label}.sparse.{i}"
                    )
                    continue
                results[i] = tf.convert_to_tensor(grad)
            # Horovod's own groups hold one dtype each; ours share their buckets among all.
            kind = None if isinstance(self.compression, PackedCompressor) else results[i].dtype
            dense.setdefault(kind, []).append(i)
        for kind, positions in dense.items():
            tensors = [results[i] for i in positions]
            if kind is None:
                known = len(variables or ()) == len(grads)  # as they are unless Keras has left some out
                paths = [getattr(variables[i], "path", variables[i].name) for i in positions] if known else []
                reduced = allreduce_group(
                    self.compression,
                    tensors,
                    paths,
                    label,
                    self.op,
                    self.prescale * self.postscale,
                    self.process_set.process_set_id,
                )
            else:
                reduced = hvd.grouped_allreduce(
                    tensors,
                    op=self.op,
                    compression=self.compression,
                    prescale_factor=self.prescale,
                    postscale_factor=self.postscale,
                    process_set=self.process_set,
                    name=f"{label}.{kind.name}" if len(dense) > 1 else label,
                )
            for i, grad in zip(positions, reduced):
                results[i] = grad
        return results


def _distributed_class(base: type, reducer: _Reducer) -> type:
    """A subclass that reduces; it goes by the name of its base, so that saved models load without us."""

    class Distributed(base):
        def build(self, variables: Any) -> None:
            _refuse_inside_loss_scaling(self)
            super().build(variables)

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            if not self.gradient_accumulation_steps:
                if trainable_variables is not None:
                    trainable_variables = list(trainable_variables)
                reduced = reducer(list(grads), self, trainable_variables or self._trainable_variables)
                return super().apply(reduced, trainable_variables)
            eager = tf.executing_eagerly()
            n_calls, n_updates = reducer.n_calls, int(self.iterations) if eager else -1
            super().apply(list(grads), trainable_variables)
            due = not eager or int(self.iterations) > n_updates
            if due and reducer.n_calls == n_calls:
                raise RuntimeError(
                    f"DistributedOptimizer: Keras {keras.__version__} has applied accumulated gradients "
                    f"that were not all-reduced; please report this"
                )
            return None

        def _clip_gradients(self, grads: Any) -> Any:
            # Keras clips what it is about to apply: with accumulation, the accumulated gradients.
            if self.gradient_accumulation_steps:
                grads = reducer(list(grads), self, self._trainable_variables)
            return super()._clip_gradients(grads)

    setattr(Distributed, MARK, True)
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:  # saved under the name of its base, which is also what loads it
        for one in (Distributed, base):
            keras.saving.register_keras_serializable(package, name)(one)
    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(Distributed, attribute, getattr(base, attribute))
    return Distributed


def _refuse_inside_loss_scaling(optimizer: Any) -> None:
    """Raise if a LossScaleOptimizer is around us: each rank would decide alone whether to take part.

    It builds the optimizer in it when it is built itself, once and before the first step; that is when to look.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, keras.optimizers.LossScaleOptimizer) and scaler is not optimizer:
            raise ValueError(
                "DistributedOptimizer: a LossScaleOptimizer around it (Keras adds one to mixed_float16 "
                "models) skips steps on some ranks only; compile with "
                "DistributedOptimizer(LossScaleOptimizer(optimizer), ...)"
            )
        frame = frame.f_back
