"""Where APS enters an unpatched Horovod: an ExtensionType, and TensorFlow's public dispatch for Horovod's ops.

`compress` returns a `WireTensor`. When Horovod hands it to its all-reduce op, TensorFlow calls the functions below
instead, which know what the Compressor interface withholds: name, op, scale factors and process set. Eagerly they
exchange at once; in a graph they add one Python op that does it in every step (`engine`).
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, List  # noqa: UP035 - TensorFlow's dispatch only knows typing.List

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.ops import control_flow_util

from horovod_aps import config
from horovod_aps.frontends import checks
from horovod_aps.frontends.world import process_set_of
from horovod_aps.tensorflow import devices, engine, links, order

if TYPE_CHECKING:
    from horovod_aps.tensorflow.compressor import PackedCompressor

_compressors: weakref.WeakValueDictionary[int, PackedCompressor] = weakref.WeakValueDictionary()
MANY_SINGLE = 16
VALID_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
do_not_convert: Callable[..., Any] = tf.autograph.experimental.do_not_convert


class WireTensor(tf.experimental.ExtensionType):
    """A gradient on its way to the exchange, with the number of its compressor."""

    value: tf.Tensor
    compressor: int

    @property
    def name(self) -> str:
        """The tensor's name, after which Horovod names the operation.

        TensorFlow calls an eager tensor that a graph captures by a number that differs between ranks; Horovod would
        wait for ever for the same one.
        """
        name = str(self.value.name)
        return "captured" if name[0].isdigit() else name

    @property
    def dtype(self) -> tf.DType:
        """As Horovod asks it of what it reduces."""
        return self.value.dtype


def register(compressor: PackedCompressor) -> None:
    """Give a compressor the number by which wire tensors refer to it."""
    compressor._key = max(_compressors, default=-1) + 1
    _compressors[compressor._key] = compressor


def compressors() -> list[PackedCompressor]:
    """All that are alive."""
    return list(_compressors.values())


@tf.experimental.dispatch_for_api(mpi_ops.MPI_LIB.horovod_allreduce, {"tensor": WireTensor})
@do_not_convert
def _allreduce(
    tensor: WireTensor,
    reduce_op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set_id: int = 0,
    name: Any = None,
) -> tf.Tensor:
    if name is None and _owner([tensor])._options.error_feedback:
        raise checks.no_name()
    _advise_groups(_owner([tensor]))
    call = engine.Call(
        _owner([tensor]),
        (name or engine.UNNAMED,),
        name or engine.UNNAMED,
        reduce_op,
        prescale_factor * postscale_factor,
        process_set_id,
    )
    return _reduce(call, [tensor.value])[0]


@tf.experimental.dispatch_for_api(mpi_ops.MPI_LIB.horovod_grouped_allreduce, {"tensors": List[WireTensor]})  # noqa: UP006
@do_not_convert
def _grouped_allreduce(
    tensors: Sequence[WireTensor],
    reduce_op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set_id: int = 0,
    name: Any = None,
) -> list[tf.Tensor]:
    stem = name or engine.UNNAMED
    values = [tensor.value for tensor in tensors]
    return allreduce_group(
        _owner(tensors),
        values,
        _labels(tensors, stem),
        stem,
        reduce_op,
        prescale_factor * postscale_factor,
        process_set_id,
    )


def allreduce_group(
    compressor: PackedCompressor,
    values: list[tf.Tensor],
    labels: Sequence[str],
    stem: str,
    op: int,
    factor: float,
    process_set_id: int,
) -> list[tf.Tensor]:
    """All-reduce tensors together; overrides and statistics know them by `labels`, all ranks by `stem`."""
    times = Counter(labels)
    unique = tuple(label if times[label] == 1 else f"{label}.{i}" for i, label in enumerate(labels))
    names = tuple(f"{stem}.{i}" for i in range(len(values)))
    return _reduce(engine.Call(compressor, names, stem, op, factor, process_set_id, unique), values)


def _labels(tensors: Sequence[WireTensor], stem: str) -> list[str]:
    """What people call the tensors of a group that Horovod has made up: what each would be called alone.

    Horovod makes up a group's name from its first and last tensor's, so that a pattern would match all of them or none.
    """
    if not stem.startswith("HorovodGroupedAllreduce_"):
        return []
    return [f"HorovodAllreduce_{mpi_ops._normalize_name(tensor.name)}" for tensor in tensors]


@tf.experimental.dispatch_for_api(mpi_ops.MPI_LIB.horovod_reducescatter, {"tensor": WireTensor})
@do_not_convert
def _reducescatter(
    tensor: WireTensor,
    reduce_op: int,
    ignore_name_scope: bool = False,
    process_set_id: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Any = None,
) -> Any:
    raise _no_reducescatter("reducescatter")


@tf.experimental.dispatch_for_api(mpi_ops.MPI_LIB.horovod_grouped_reducescatter, {"tensors": List[WireTensor]})  # noqa: UP006
@do_not_convert
def _grouped_reducescatter(
    tensors: Sequence[WireTensor],
    reduce_op: int,
    ignore_name_scope: bool = False,
    process_set_id: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Any = None,
) -> Any:
    raise _no_reducescatter("grouped_reducescatter")


def _no_reducescatter(name: str) -> ValueError:
    return ValueError(f"APSCompressor: hvd.{name} is not supported; use hvd.Compression.none for it")


def _advise_groups(compressor: PackedCompressor) -> None:
    """Warn, once, about graphs that exchange many tensors one by one."""
    if tf.executing_eagerly():
        return
    compressor._n_single += 1
    if compressor._n_single == MANY_SINGLE:
        warnings.warn(
            f"APSCompressor: {MANY_SINGLE} tensors are exchanged one by one; groups=1 in "
            f"DistributedGradientTape or DistributedOptimizer exchanges them all together, and much faster",
            stacklevel=2,
        )


def _owner(tensors: Sequence[WireTensor]) -> PackedCompressor:
    return _compressors[tensors[0].compressor]


def _reduce(call: engine.Call, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Exchange the floating-point tensors of a call; the others take Horovod's own way."""
    if call.op not in (mpi_ops.Average, mpi_ops.Sum):
        raise checks.wrong_op(call.op, mpi_ops)
    call.compressor._used = True
    alone = mpi_ops.size() == 1 and not config.is_elastic()
    if process_set_of(mpi_ops._basics, call.process_set_id).ranks == [mpi_ops.rank()]:
        checks.refuse_alone(call.compressor._options)  # here it is a ValueError in graphs too
    results: list[Any] = [None] * len(values)
    ours = []
    for i, value in enumerate(values):
        if alone or not value.dtype.is_floating:
            results[i] = mpi_ops.MPI_LIB.horovod_allreduce(
                value,
                reduce_op=call.op,
                prescale_factor=call.factor,
                postscale_factor=1.0,
                ignore_name_scope=False,
                process_set_id=call.process_set_id,
                name=_op_label(call.names[i]),
            )
        elif value.dtype.name not in engine.DTYPE_CODES:
            raise checks.wrong_dtype(value.dtype.name)
        else:
            ours.append(i)
    if ours:
        part = call.select(ours)
        for i, result in zip(ours, _differentiable(part, [values[i] for i in ours])):
            results[i] = result
    return results


def _differentiable(call: engine.Call, values: list[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The exchange with Horovod's gradient: the same reduction of the incoming gradients."""

    @tf.custom_gradient
    def exchange(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            return list(_differentiable(call.gradient(), list(upstream)))

        return _exchange(call, list(inputs)), gradient

    return exchange(*values)


def _exchange(call: engine.Call, values: list[tf.Tensor]) -> list[tf.Tensor]:
    if tf.executing_eagerly():
        return engine.run_eagerly(call, values)
    refuse_xla("APSCompressor")
    with tf.device("/CPU:0"):
        # Horovod's own op, which blocks no thread: nobody enters the exchange before all ranks are here, and ranks in
        # hvd.join() show.
        ticket = mpi_ops.MPI_LIB.horovod_allreduce(
            links.ticket(call.process_set_id, call.packed),
            reduce_op=mpi_ops.Sum,
            prescale_factor=1.0,
            postscale_factor=1.0,
            ignore_name_scope=False,
            process_set_id=call.process_set_id,
            name=_op_label(call.stock_name),
        )
    gpu = devices.gpu_for_graph(values)
    dtypes = [value.dtype for value in values]
    with tf.device(gpu or "/CPU:0"), order.in_sequence() as sequence:
        with tf.control_dependencies(sequence.before):
            if gpu:
                results = tf.py_function(
                    lambda ticket, *tensors: engine.run_on_gpu(call, gpu, ticket, tensors),
                    [tf.cast(ticket, tf.int64), *values],  # with an int32, TensorFlow would run it on the CPU
                    dtypes,
                    name="APSExchange",
                )
            else:
                results = tf.numpy_function(
                    lambda ticket, *arrays: engine.run(call, ticket, arrays),
                    [ticket, *values],
                    dtypes,
                    stateful=True,
                    name="APSExchange",
                )
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        sequence.after(results[0].op)
    for result, value in zip(results, values):
        result.set_shape(value.shape)
    return results


def refuse_xla(who: str) -> None:
    """Raise if the current graph is to be compiled by XLA."""
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            f"{who}: XLA cannot compile an all-reduce; use jit_compile=False around the training step "
            f"(with a GPU, Keras compiles it unless told not to: model.compile(..., jit_compile=False))"
        )


def _op_label(name: str) -> str:
    """A name that TensorFlow accepts for an op: this one, if it does."""
    return name if VALID_NAME.fullmatch(name) else mpi_ops._normalize_name(name).lstrip("_")
