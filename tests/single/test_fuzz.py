"""A bounded run of the fuzz target in tests/fuzz, and proof that it finds what it is there to find.

Oracles: the address and undefined-behaviour sanitizers, and the demands in fuzz_kernels.cpp. `make fuzz` runs it
for longer.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fuzz"))
import fuzz  # noqa: E402

SECONDS = 10


def test_kernels_survive_any_table_and_any_bytes(tmp_path):
    guided = fuzz.guided_possible()
    report = fuzz.run(fuzz.build(tmp_path, guided), guided, SECONDS, tmp_path / "corpus")
    assert not report.finding, report.finding
    assert report.n_inputs > 1000
    if guided:
        assert report.n_edges > 1000  # it got past the checks and into the loops


@pytest.mark.parametrize(
    "file, before, after",
    [
        ("aps_cpu.cpp", "> length - g.offset", "> length - g.offset + 1"),  # one byte behind the message
        pytest.param(
            "aps_cpu_float.inc",
            "while (filled < width)",
            "while (filled <= width)",  # the decoder reads on
            marks=pytest.mark.slow,
        ),
    ],
)
def test_planted_fault_is_found(file, before, after, tmp_path):
    """The random driver, which every machine has, against kernels with one check broken."""
    planted = tmp_path / "cuda"
    shutil.copytree(fuzz.KERNELS, planted)
    source = (planted / file).read_text()
    assert before in source
    (planted / file).write_text(source.replace(before, after))
    target = fuzz.build(tmp_path, False, planted, fuzz.SOURCES[0], "-DAPS_NO_AVX512")
    report = fuzz.run(target, False, 20, tmp_path / "corpus")
    assert report.finding, f"{report.n_inputs} inputs and no finding"
