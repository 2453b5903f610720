"""One rank of tests/test_parallel.py: reduces gradients that are the same in every frontend; rank 0 saves the results.

`python tests/workers/frontend_worker.py torch|tensorflow <file.npz>`
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

OPTIONS: list[dict[str, Any]] = [
    {"e": 4, "m": 3},
    {"e": 5, "m": 2},
    {"e": 3, "m": 0},
    {"e": 3, "m": 2, "specials": False},
    {"e": 4, "m": 3, "rounding": "stochastic", "seed": 7},
    {"e": 3, "m": 0, "error_feedback": True},
    {"e": 4, "m": 3, "accumulate": "kahan"},
    {"e": 4, "m": 3, "min_elements": 100, "bucket_mb": 0.01},
    {"e": 4, "m": 3, "overrides": {"*.2": "float32", "*.[34]": (5, 10)}, "warmup_steps": 1},
    {"e": 4, "m": 3, "overrides": "auto", "auto_steps": 2, "auto_error": 0.1},
]
SIZES = (1, 3, 64, 1000, 4097, 20_000)
N_STEPS = 3


def gradients(step: int, rank: int) -> list[np.ndarray]:
    """Layers of different sizes and scales."""
    rng = np.random.default_rng([step, rank])
    return [(rng.standard_normal(n) * 10.0 ** (4 * i - 8)).astype(np.float32) for i, n in enumerate(SIZES)]


def main() -> None:
    framework, path = sys.argv[1:]
    results = {}
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        from horovod_aps.torch import APSCompressor

        def reduce(arrays: list[np.ndarray], compressor: Any) -> list[np.ndarray]:
            tensors = [torch.from_numpy(array) for array in arrays]
            return [t.numpy() for t in hvd.grouped_allreduce(tensors, name="g", compression=compressor)]
    else:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        from horovod_aps.tensorflow import APSCompressor

        def reduce(arrays: list[np.ndarray], compressor: Any) -> list[np.ndarray]:
            tensors = [tf.constant(array) for array in arrays]
            return [t.numpy() for t in hvd.grouped_allreduce(tensors, compression=compressor)]

    hvd.init()
    for i, options in enumerate(OPTIONS):
        compressor = APSCompressor(**options)
        for step in range(N_STEPS):
            for layer, array in enumerate(reduce(gradients(step, hvd.rank()), compressor)):
                results[f"{i}.{step}.{layer}"] = array
    if hvd.rank() == 0:
        np.savez(path, **results)


if __name__ == "__main__":
    main()
