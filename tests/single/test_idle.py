"""A TensorFlow program that never used its compressor is told so when it ends, unless it has ended itself before."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, sys
from horovod_aps.tensorflow import APSCompressor
compressor = APSCompressor(e=4, m=3)


def in_child(program):
    sys.stderr.flush()
    child = os.fork()
    if not child:
        program()
    if child:
        os.waitpid(child, 0)
    return not child


def crash():
    raise KeyError("the user's own error")


def leave():
    sys.exit("no data")


def train():
    import keras
    import tensorflow as tf

    variable = tf.Variable(1.0)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.apply_gradients([(tf.constant(1.0), variable)])
    sys.modules["kept"] = optimizer
    sys.exit(0)


for program in (crash, leave, train):
    in_child(program)
    print(f"after {program.__name__}", file=sys.stderr)
"""
NEVER_USED = "APSCompressor(e=4, m=3) was never used"


def test_idle_compressor_is_named_only_if_the_program_came_to_its_end(tmp_path):
    """Nor if it left by sys.exit, unless it has trained: many programs end so."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {**os.environ, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    crashed, rest = done.stderr.split("after crash\n")
    left, rest = rest.split("after leave\n")
    trained, ended = rest.split("after train\n")
    assert "KeyError" in crashed and NEVER_USED not in crashed, done.stderr
    assert "no data" in left and NEVER_USED not in left, done.stderr
    assert NEVER_USED in trained and NEVER_USED in ended, done.stderr
