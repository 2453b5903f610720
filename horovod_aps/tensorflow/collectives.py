"""Horovod's own all-reduce of an array, started and finished at once.

TensorFlow gives all eager operations of one kind the same name, and a function called from inside a graph may need the
very thread that waits for it. So operations run eagerly, one after the other, in the order that is the same on all
ranks; each is over when it returns. `eager_mode` is for programs that have switched eager execution off.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.python.eager.context import eager_mode


def allreduce(values: np.ndarray, op: int, process_set_id: int) -> np.ndarray:
    """Horovod's own all-reduce of an array."""
    with eager_mode(), tf.device("/CPU:0"):
        return np.asarray(
            mpi_ops.MPI_LIB.horovod_allreduce(
                tf.convert_to_tensor(values),
                reduce_op=op,
                prescale_factor=1.0,
                postscale_factor=1.0,
                ignore_name_scope=True,
                process_set_id=process_set_id,
            )
        )
