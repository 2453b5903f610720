"""DistributedOptimizer for Keras 3: the gradients of a step are all-reduced in one group, then applied."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_aps.tensorflow import APSCompressor
from horovod_aps.tensorflow.seam import allreduce_group, refuse_xla

MARK = "_horovod_aps_distributed"


def DistributedOptimizer(  # noqa: N802 - Horovod's name
        optimizer: keras.optimizers.Optimizer, compression: Any = None, *, op: int = hvd.Average,
        gradient_predivide_factor: float = 1.0, sparse_as_dense: bool = False,
        process_set: Any = hvd.global_process_set) -> keras.optimizers.Optimizer:
    """Make a Keras 3 optimizer all-reduce its gradients before it applies them; it is changed in place and returned.

    Works in `model.fit` and with `apply` or `apply_gradients`. Gradients are reduced before clipping and, in a
    LossScaleOptimizer, before the check for NaN and Inf, so that all ranks skip the same steps. With
    `gradient_accumulation_steps` only the accumulated gradients are reduced; inside a LossScaleOptimizer those of every
    batch, each of which must be finite on all ranks.

    Args:
        optimizer: any Keras optimizer; put a LossScaleOptimizer inside, never around.
        compression: None, `hvd.Compression.fp16` or an `APSCompressor`.
        op: `hvd.Average` or `hvd.Sum`.
        gradient_predivide_factor: divides before the sum, and multiplies after it, as in Horovod.
        sparse_as_dense: all-reduce the gradients of embeddings as dense tensors; else Horovod gathers them.
        process_set: the ranks that train together.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(f"DistributedOptimizer: Keras must use the TensorFlow backend, got {backend!r}")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer: optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}; "
                        f"for one of tf-keras use horovod.tensorflow.keras.DistributedOptimizer")
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"DistributedOptimizer: op must be Average or Sum, got {op}")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ValueError("DistributedOptimizer: gradient_predivide_factor needs op=Average")
    for part in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if getattr(part, MARK, False):
            raise ValueError("DistributedOptimizer: optimizer is distributed already; wrap the outermost one, once")
    reducer = _Reducer(compression or hvd.Compression.none, op, gradient_predivide_factor, sparse_as_dense, process_set)
    optimizer.__class__ = _distributed_class(type(optimizer), reducer)
    return optimizer


def load_model(filepath: Any, compression: Any = None, *, custom_objects: dict[str, Any] | None = None,
               **options: Any) -> keras.Model:
    """Load a saved model and make its optimizer distributed again; `options` are DistributedOptimizer's."""
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is None:
        raise ValueError(f"load_model: {str(filepath)!r} was saved without an optimizer")
    DistributedOptimizer(model.optimizer, compression, **options)
    return model


class _Reducer:
    """All-reduces the gradients of one step."""

    def __init__(self, compression: Any, op: int, predivide: float, sparse_as_dense: bool, process_set: Any) -> None:
        self.compression, self.op, self.process_set = compression, op, process_set
        self.prescale, self.postscale = 1.0 / predivide, predivide
        self.sparse_as_dense = sparse_as_dense
        self.n_calls = 0

    def __call__(self, grads: Sequence[Any], optimizer: Any, variables: Any) -> list[Any]:
        """The reduced gradients in the same places; None stays None."""
        refuse_xla("DistributedOptimizer")
        self.n_calls += 1
        results = list(grads)
        label = f"DistributedOptimizer.{optimizer.name}"
        if not self.process_set.included():
            return results
        dense: dict[Any, list[int]] = {}
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            if isinstance(grad, tf.IndexedSlices):
                if not self.sparse_as_dense:
                    results[i] = hvd.allreduce(grad, op=self.op, process_set=self.process_set,
                                               name=f"{label}.sparse.{i}")
                    continue
                results[i] = tf.convert_to_tensor(grad)
            # Horovod's own groups hold one dtype each; ours share their buckets among all.
            kind = None if isinstance(self.compression, APSCompressor) else results[i].dtype
            dense.setdefault(kind, []).append(i)
        for kind, positions in dense.items():
            tensors = [results[i] for i in positions]
            if kind is None:
                known = len(variables or ()) == len(grads)  # as they are unless Keras has left some out
                paths = [getattr(variables[i], "path", variables[i].name) for i in positions] if known else []
                reduced = allreduce_group(self.compression, tensors, paths, label, self.op,
                                          self.prescale * self.postscale, self.process_set.process_set_id)
            else:
                reduced = hvd.grouped_allreduce(tensors, op=self.op, compression=self.compression,
                                                prescale_factor=self.prescale, postscale_factor=self.postscale,
                                                process_set=self.process_set, name=f"{label}.{kind.name}")
            for i, grad in zip(positions, reduced):
                results[i] = grad
        return results


def _distributed_class(base: type, reducer: _Reducer) -> type:
    """A subclass that reduces; it goes by the name of its base, so that saved models load without us."""

    class Distributed(base):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            _refuse_inside_loss_scaling()
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
                raise RuntimeError(f"DistributedOptimizer: Keras {keras.__version__} has applied accumulated gradients "
                                   f"that were not all-reduced; please report this")
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


def _refuse_inside_loss_scaling() -> None:
    """Raise if a LossScaleOptimizer is around us: each rank would decide alone whether to take part."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        scaler = frame.f_locals.get("self")
        if (frame.f_code.co_name == "_stateful_handle_finite_grads"
                and isinstance(scaler, keras.optimizers.LossScaleOptimizer)):
            raise ValueError("DistributedOptimizer: a LossScaleOptimizer around it (Keras adds one to mixed_float16 "
                             "models) skips steps on some ranks only; compile with "
                             "DistributedOptimizer(LossScaleOptimizer(optimizer), ...)")
        frame = frame.f_back
