"""Helpers of the TensorFlow tests: digits, and comparing replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

N_TRAIN = 1400


def replicas_equal(variables: Sequence[Any]) -> bool:
    """Whether all ranks hold the same bits."""
    mine = np.concatenate([np.asarray(v, np.float32).ravel() for v in variables]).view(np.int32)
    everyone = hvd.allgather(tf.constant(mine[None])).numpy()
    return bool((everyone == everyone[0]).all())


def digits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """This rank's share of the training images and labels, and all test images and labels."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16.0).astype(np.float32), y.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:N_TRAIN], order[N_TRAIN:]
    mine = train[hvd.rank() :: hvd.size()][: N_TRAIN // hvd.size()]
    return x[mine], y[mine], x[test], y[test]


def initial_weights(seed: int, hidden: int = 32) -> list[np.ndarray]:
    """Weights of a 64-hidden-10 network, the same on all ranks."""
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((64, hidden)).astype(np.float32) / 8,
        np.zeros(hidden, np.float32),
        (rng.standard_normal((hidden, 10)) / hidden**0.5).astype(np.float32),
        np.zeros(10, np.float32),
    ]
