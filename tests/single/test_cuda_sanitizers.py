"""The kernels' sources under the sanitizer of undefined behaviour, on the stand-in: a kernel that does that dies.

Array bounds, shifts, overflow, conversions, alignment. What a kernel reads and writes, and races between its threads,
the stand-in looks at itself, through the calls that g++ makes for its thread sanitizer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = "-fsanitize=undefined,bounds-strict,float-cast-overflow -fsanitize-undefined-trap-on-error"
TESTS = Path(__file__).parent
PROBE = """
import cuda_standin as c, numpy as np
code = 'extern "C" __global__ void probe(int64_t by) {{ volatile int one = 1; volatile int x = one << by; (void)x; }}'
module = c.Module()
module.load(c.compile_for_host(code, ("--fmad=false",)))
module.get_function("probe")((1,), (32,), (np.int64({by}),), 0, None)
c.drain()
"""


def run(*command: str, timeout: int = 300) -> int:
    paths = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "APS_STANDIN_FLAGS": FLAGS, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, *command], env=environment, timeout=timeout).returncode


@pytest.mark.parametrize(("by", "code"), [(3, 0), (40, -signal.SIGILL)])
def test_undefined_behaviour_of_a_kernel_ends_the_process(by: int, code: int) -> None:
    assert run("-c", PROBE.format(by=by)) == code


@pytest.mark.slow
def test_kernels_do_nothing_undefined() -> None:
    files = [str(TESTS / f"test_cuda_{name}.py") for name in ("kernels", "exchange")]
    assert run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files, timeout=900) == 0
