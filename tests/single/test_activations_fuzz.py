"""A bounded run of the fuzz target over the activations' codec, and proof that it finds what it is there to find."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fuzz"))
import fuzz  # noqa: E402

SOURCE = "fuzz_activations.cpp"


def test_decoder_survives_any_bytes(tmp_path):
    report = fuzz.run(fuzz.build(tmp_path, False, source=SOURCE), False, 5, tmp_path / "corpus")
    assert not report.finding, report.finding
    assert report.n_inputs > 1000


@pytest.mark.parametrize(
    "file, before, after",
    [
        pytest.param("aps_activations_chunks.inc", "p.size > size - used", "p.size > size - used + 1"),
        pytest.param("aps_activations.h", "eb * (1.0 - 0.00390625)", "eb * (1.0 + 0.00390625)", marks=pytest.mark.slow),
        pytest.param(
            "aps_activations_avx2.inc", "!= p.n_kept) return false", "< 0) return false", marks=pytest.mark.slow
        ),
    ],
)
def test_planted_fault_is_found(file, before, after, tmp_path):
    planted = tmp_path / "cuda"
    shutil.copytree(fuzz.KERNELS, planted)
    source = (planted / file).read_text()
    assert before in source
    (planted / file).write_text(source.replace(before, after))
    report = fuzz.run(fuzz.build(tmp_path, False, planted, SOURCE), False, 20, tmp_path / "corpus")
    assert report.finding, f"{report.n_inputs} inputs and no finding"
