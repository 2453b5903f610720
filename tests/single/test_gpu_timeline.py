"""A step of ResNet-50 by the clock of a device that does not exist: the exchange hides behind backward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_timeline  # noqa: E402


@pytest.mark.parametrize("n_ranks", [2, 8])
def test_the_exchange_hides_behind_backward(n_ranks: int) -> None:
    """A stream on which earlier buckets stand behind the scans of later ones sends most bytes after backward."""
    one = gpu_timeline.simulate(n_ranks, 25.0)
    n_bytes = 25_557_032 * (1 if n_ranks == 2 else 2 * 7 / 8)  # at a byte per parameter
    assert one.network == pytest.approx(n_bytes * 8 / 25e9 * 1e3, rel=0.02)
    assert one.overlapped > 0.9 * one.network and one.exposed < 1.5
    assert one.n_waits == 0
    assert gpu_timeline.table([one])[-1] in (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.slow
def test_the_figure_and_the_table_are_what_is_simulated() -> None:
    results = [gpu_timeline.simulate(*setting) for setting in gpu_timeline.SETTINGS]
    assert gpu_timeline.IMAGE.read_text() == gpu_timeline.draw(results)
    assert "\n".join(gpu_timeline.table(results)) in (ROOT / "docs" / "performance.md").read_text()
