"""The transport over Horovod's own operations, for Gloo and wherever MPI cannot be called directly.

TensorFlow gives all eager operations of one kind the same name, and a function called from inside a graph may need the
very thread that waits for it. So operations run eagerly, one after the other, in the order that is the same on all
ranks; each is over when it returns. `eager_mode` is for programs that have switched eager execution off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.eager.context import eager_mode

from horovod_aps.transport import both_of_sum, may_swap


def allreduce(values: np.ndarray, op: int, process_set_id: int) -> np.ndarray:
    """Horovod's own all-reduce of an array."""
    with eager_mode(), tf.device("/CPU:0"):
        return np.asarray(mpi_ops.MPI_LIB.horovod_allreduce(
            tf.convert_to_tensor(values), reduce_op=op, prescale_factor=1.0, postscale_factor=1.0,
            ignore_name_scope=True, process_set_id=process_set_id))


class _Finished:
    """A request that was over when it was made."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result


class HorovodTransport:
    """Blocking all-reduce, all-to-all and all-gather on CPU tensors."""

    overlaps = False

    def __init__(self, process_set: mpi_ops.ProcessSet) -> None:
        self._id = process_set.process_set_id
        self.rank, self.size = process_set.rank(), process_set.size()

    def max(self, values: np.ndarray, slot: int) -> _Finished:
        return _Finished(allreduce(values, mpi_ops.Max, self._id))

    def alltoall(self, send: np.ndarray, bounds: np.ndarray, recv: np.ndarray, slot: int) -> _Finished:
        n = int(bounds[self.rank + 1] - bounds[self.rank])
        with eager_mode(), tf.device("/CPU:0"):
            output, _ = mpi_ops.MPI_LIB.horovod_alltoall(
                tf.convert_to_tensor(send), splits=tf.convert_to_tensor(np.diff(bounds).astype(np.int32)),
                ignore_name_scope=True, process_set_id=self._id)
        return _Finished(_split(np.asarray(output), [n] * self.size))

    def allgather(self, message: np.ndarray, sizes: Sequence[int], recv: np.ndarray, slot: int) -> _Finished:
        if may_swap(sizes):
            total = allreduce(message.view(np.int32), mpi_ops.Sum, self._id)
            return _Finished(both_of_sum(total, message, recv, self.rank))
        return _Finished(_split(self._allgather(message), sizes))

    def gather_bytes(self, payload: bytes, slot: int) -> _Finished:
        sizes = self._allgather(np.array([len(payload)], np.int64)).tolist()
        gathered = self._allgather(np.frombuffer(payload, np.uint8))
        return _Finished([part.tobytes() for part in _split(gathered, sizes)])

    def _allgather(self, array: np.ndarray) -> np.ndarray:
        with eager_mode(), tf.device("/CPU:0"):
            return np.asarray(mpi_ops.MPI_LIB.horovod_allgather(tf.convert_to_tensor(array), ignore_name_scope=True,
                                                                process_set_id=self._id))


def _split(array: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    ends = np.cumsum(sizes)
    return [array[end - size:end] for end, size in zip(ends, sizes)]
