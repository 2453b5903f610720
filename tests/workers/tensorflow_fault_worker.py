"""One rank of tests/test_faults.py with TensorFlow: as fault_worker.py, in a graph; phases by their names APS_..."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf
from fault_worker import FATAL_STEP, set_trap

from horovod_aps.tensorflow import APSCompressor


def main(phase: str, victim: int, directory: Path, hosts: str) -> None:
    """Train; ends the process."""
    hvd.init()
    os.environ["HOROVOD_APS_HOST"] = hosts[hvd.rank()]
    compressor = APSCompressor(4, 3, bucket_mb=0.1)
    weights = [tf.Variable(tf.random.stateless_normal((200, n), [0, n])) for n in (200, 5)]

    @tf.function
    def train(x: tf.Tensor) -> None:
        with tf.GradientTape() as inner:
            loss = tf.reduce_mean((tf.tanh(x @ weights[0]) @ weights[1]) ** 2)
        tape = hvd.DistributedGradientTape(inner, compression=compressor, num_groups=1)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.01 * gradient)

    before: list[tf.Tensor] = []
    try:
        for step in range(10**9):
            before = [tf.identity(weight) for weight in weights]
            if step == FATAL_STEP and hvd.rank() == victim:
                set_trap(phase, directory, compressor)
            train(tf.random.stateless_normal((4, 200), [step, hvd.rank()]))
    except tf.errors.OpError as error:
        # What Horovod's elastic wrapper takes for a lost peer has the name of its own operation in the text.
        lost = "HorovodInternalError" if "HorovodAllreduce" in error.message else error.message
        unchanged = all(tf.reduce_all(a == b) for a, b in zip(before, weights))
        print(f"RAISED {lost}, parameters {'unchanged' if unchanged else 'CHANGED'}", flush=True)
        sys.exit(0)
