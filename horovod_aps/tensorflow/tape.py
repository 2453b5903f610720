"""Horovod's gradient tape and broadcast for models of Keras 3.

Keras 3's variables hold TensorFlow's instead of being some, and Horovod 0.28.1 asks them for what only TensorFlow's
have (`ref()`). Here they are unwrapped on the way in; everything else is Horovod's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def variable_of(source: Any) -> Any:
    """The TensorFlow variable in one of Keras 3; anything else as it is."""
    keras_variable = getattr(sys.modules.get("keras"), "Variable", None)
    return source.value if keras_variable is not None and isinstance(source, keras_variable) else source


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> Any:
    """`hvd.broadcast_variables`, which also takes variables of Keras 3: copies those of one rank to all others."""
    return hvd.broadcast_variables([variable_of(variable) for variable in variables], root_rank, process_set, inplace)


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """`hvd.DistributedGradientTape`, whose `gradient` also takes variables of Keras 3, in any nested structure.

    The arguments are Horovod's; pass `groups=1` with an `APSCompressor`, so that gradients share their messages.
    """
    if isinstance(groups, list):
        groups = [[variable_of(variable) for variable in group] for group in groups]
    tape = hvd.DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    if isinstance(groups, int):
        tape._allreduce_grads = functools.partial(_sparse_first, tape._allreduce_grads)
    # Horovod's methods call super(self.__class__, self), so this is a sibling of its class and not a child.
    tape.__class__ = _unwrapping(type(gradtape), type(tape))
    return tape


def _sparse_first(reduce: Any, grads: list[Any], variables: list[Any], use_generic_names: bool = False) -> list[Any]:
    """Reduce with sparse gradients ahead of dense ones: in any other order Horovod 0.28.1 fails on groups of both."""
    order = sorted(range(len(grads)), key=lambda i: not isinstance(grads[i], tf.IndexedSlices))
    reduced = reduce([grads[i] for i in order], [variables[i] for i in order], use_generic_names)
    return [grad for _, grad in sorted(zip(order, reduced), key=lambda pair: pair[0])]


_classes: dict[type, type] = {}


def _unwrapping(base: type, stock: type) -> type:
    """Horovod's class `stock` on top of the user's `base`, with methods that unwrap their sources."""
    if base not in _classes:
        _classes[base] = type(base.__name__, (base,), {**vars(stock), **_methods(stock)})
    return _classes[base]


def _methods(stock: Any) -> dict[str, Any]:
    @functools.wraps(stock.gradient)
    def gradient(
        self: Any, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> Any:
        flat = [variable_of(source) for source in tf.nest.flatten(sources)]
        return tf.nest.pack_sequence_as(
            sources, stock.gradient(self, target, flat, output_gradients, use_generic_names)
        )

    @functools.wraps(stock.register_local_source)
    def register_local_source(self: Any, source: Any) -> None:
        stock.register_local_source(self, variable_of(source))

    @functools.wraps(stock.get_local_and_global_gradients)
    def get_local_and_global_gradients(
        self: Any, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> Any:
        given = {variable_of(source).ref(): source for source in sources}
        flat = [variable_of(source) for source in sources]
        pairs = stock.get_local_and_global_gradients(self, target, flat, output_gradients, use_generic_names)
        return tuple([(given[variable.ref()], grad) for variable, grad in part] for part in pairs)

    return {
        function.__name__: function for function in (gradient, register_local_source, get_local_and_global_gradients)
    }
