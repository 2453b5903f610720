"""One rank with APSCompressor, another with Horovod's own: both would wait for ever; they get errors that say why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_parallel import launcher, run

WORKER = Path(__file__).parent / "workers" / "mixed_worker.py"
REASON = "another rank reduces the same tensor without APSCompressor"


@pytest.mark.parametrize("kind", ["mpirun", pytest.param("gloo", marks=pytest.mark.slow)])
def test_torch_ranks_with_another_compression_fail_and_late_ones_do_not(kind):
    code, output = run([*launcher(kind, 2), sys.executable, str(WORKER), "torch"], 240, {})
    assert output.count("late, and no harm done") == 2, output
    assert code and REASON in output and "as if nothing were wrong" not in output, output
    assert "no answer from all other ranks" in output, output


@pytest.mark.parametrize("kind", ["mpirun", pytest.param("gloo", marks=pytest.mark.slow)])
def test_torch_ranks_that_have_made_more_compressors_fail(kind):
    """What was an endless wait: the first compressor of one rank and the second of the other."""
    code, output = run([*launcher(kind, 2), sys.executable, str(WORKER), "order"], 240, {})
    assert code and "OtherOrder: APSCompressor: all ranks wait" in output, output
    assert "as if nothing were wrong" not in output, output


@pytest.mark.parametrize(
    "kind, what",
    [
        ("mpirun", "group"),
        pytest.param("mpirun", "tape", marks=pytest.mark.slow),
        pytest.param("mpirun", "keras", marks=pytest.mark.slow),
        pytest.param("gloo", "group", marks=pytest.mark.slow),
    ],
)
def test_tensorflow_ranks_with_another_compression_fail(kind, what):
    code, output = run([*launcher(kind, 2), sys.executable, str(WORKER), what], 240, {})
    assert code and "Mismatched data types" in output and "as if nothing were wrong" not in output, output
    assert REASON in output, output
