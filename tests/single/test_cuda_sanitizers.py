"""The stand-in under g++'s sanitizers, one at a time.

- Undefined behaviour in the kernels: array bounds, shifts, overflow, conversions, alignment.
- Thread: two streams that touch the same memory, and no event orders them, whatever order they ran in.
- Address: what kernels and copies touch beyond an allocation on the device, or after it was given back.

What else a kernel reads and writes, and races between its threads, the stand-in looks at itself, through the calls that
g++ makes for its thread sanitizer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cuda_standin
import pytest
from cuda_standin import sanitizer

FLAGS = "-fsanitize=undefined,bounds-strict,float-cast-overflow -fsanitize-undefined-trap-on-error"
TESTS = Path(__file__).parent
WORKER = TESTS.parent / "workers" / "standin_worker.py"
FINDING = 66
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


def test_flags_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled without a sanitizer, or for a GPU, must not be found in the cache."""
    before = cuda_standin.nvrtc.getVersion()
    assert len(before) > 2, "a real NVRTC may have this version"
    monkeypatch.setenv("APS_STANDIN_FLAGS", FLAGS)
    assert cuda_standin.nvrtc.getVersion() != before


@pytest.mark.slow
def test_kernels_do_nothing_undefined() -> None:
    files = [str(TESTS / f"test_cuda_{name}.py") for name in ("kernels", "exchange")]
    assert run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files, timeout=900) == 0


@pytest.mark.parametrize(
    ("kind", "fault", "finding"),
    [
        ("thread", "front", "data race"),
        pytest.param("thread", "wait", "data race", marks=pytest.mark.slow),
        ("address", "length", "use-after-poison"),
    ],
)
def test_an_exchange_under_a_sanitizer(kind: str, fault: str, finding: str) -> None:
    """Two ranks, and four in two levels, with error feedback: first as it is, then with a fault, which is found.

    Addresses are not drawn at random, which g++'s thread sanitizer cannot always bear.
    """
    if not sanitizer.library(kind).is_file():
        pytest.skip(f"g++ has no library for -fsanitize={kind}")
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    environment = {**os.environ, **sanitizer.environment(kind), "OPENBLAS_NUM_THREADS": "1"}
    command = [*fixed, sys.executable, str(WORKER), "nothing", fault]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    before, reached, after = done.stderr.partition("done: nothing\n")
    assert reached and "ERROR" not in before and "data race" not in before, before[-3000:]
    assert finding in after and done.returncode == FINDING, after[-3000:]
