"""A TensorFlow program that never used its compressor is told so when it ends, unless an exception has ended it."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, sys
from horovod_aps.tensorflow import APSCompressor
compressor = APSCompressor(e=4, m=3)
child = os.fork()
if not child:
    raise KeyError("the user's own error")
os.waitpid(child, 0)
print("the end", file=sys.stderr)
"""


def test_idle_compressor_is_named_only_if_the_program_came_to_its_end():
    env = {**os.environ, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    crashed, _, ended = done.stderr.partition("the end\n")
    assert "KeyError" in crashed and "was never used" not in crashed, done.stderr
    assert "APSCompressor(e=4, m=3) was never used" in ended, done.stderr
