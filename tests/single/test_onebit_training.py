"""1 bit trains as fp32 does if what rounding loses comes back, and clearly worse if not; benchmarks/onebit.py."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import onebit

from horovod_aps.formats import OneBit


def test_onebit_ends_within_a_point_of_fp32_and_below_it_without_feedback() -> None:
    assert onebit.METHODS["column"]["format"] == OneBit()  # the default is what is tested
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        accuracy = {}
        for method in ("fp32", "column", "column, no feedback"):
            runs = [onebit.train("perceptron", onebit.METHODS[method], seed, 2, 10) for seed in range(3)]
            accuracy[method] = statistics.fmean(runs)
    finally:
        torch.set_num_threads(threads)
    assert accuracy["fp32"] > 0.95
    assert accuracy["column"] > accuracy["fp32"] - 0.01
    assert accuracy["column, no feedback"] < accuracy["fp32"] - 0.03
