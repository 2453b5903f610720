"""One rank of tests/test_mixed.py: the last rank is late, or reduces its gradients without APSCompressor.

    mixed_worker.py torch | order | tape | group | keras

With PyTorch it is only late at first, which must do no harm, and then has another compressor, or has made one more.
Prints what it saw.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

LATE_SECONDS = 3.0  # of the last rank, with suspicions after a fraction of it


def with_torch(kind: str) -> None:
    """Every operation without a name has the same number on all ranks after the late step, or these would wait."""
    import horovod.torch as hvd
    import torch

    from horovod_aps.torch import APSCompressor, suspicion

    suspicion.WARN_SECONDS = suspicion.ASK_SECONDS = LATE_SECONDS / 6
    suspicion.LOOK_SECONDS = 0.05 if kind == "torch" else 0.5
    hvd.init()
    is_last = hvd.rank() == hvd.size() - 1
    if kind == "order":
        compressors = [APSCompressor(4, 3) for _ in range(1 + is_last)]
        model = torch.nn.Linear(20, 30)
        train(model, make(hvd, model, "order", compressors[-1], None))
        return
    for kind, groups in (("single", None), ("group", 1)):
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 2))
        optimizer = make(hvd, model, kind, APSCompressor(4, 3), groups)
        for step in range(3):
            if is_last and step == 0:
                time.sleep(LATE_SECONDS)
            train(model, optimizer)
            assert torch.all(hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size())
        time.sleep(0.2)
        same = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
        assert torch.equal(same[0], same[-1])
    print(f"rank {hvd.rank()}: late, and no harm done", flush=True)
    other = hvd.Compression.none if is_last else APSCompressor(4, 3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 2))
    train(model, make(hvd, model, "mixed", other, None))


def make(hvd: Any, model: Any, prefix: str, compression: Any, groups: int | None) -> Any:
    """A distributed optimizer, and the same model on all ranks."""
    import torch

    hvd.broadcast_parameters(model.state_dict(), 0)
    named = [(f"{prefix}.{name}", p) for name, p in model.named_parameters()]
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named, compression, groups=groups)


def train(model: Any, optimizer: Any) -> None:
    """One step."""
    import torch

    optimizer.zero_grad()
    model(torch.ones(8, 20)).square().mean().backward()
    optimizer.step()


def with_tensorflow(kind: str) -> None:
    """A step of a tape, or of Keras."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import horovod_aps.tensorflow as aps

    hvd.init()
    compression = hvd.Compression.none if hvd.rank() == hvd.size() - 1 else aps.APSCompressor(4, 3)
    if kind == "keras":
        import keras

        from horovod_aps.keras import DistributedOptimizer

        model = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(2)])
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        model.fit(tf.ones((64, 20)), tf.zeros((64, 2)), verbose=0)
        return
    weights = [tf.Variable(tf.ones((20, 3))), tf.Variable(tf.ones(3))]

    @tf.function
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights[0] + weights[1]) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression, groups=1 if kind == "group" else None)
        return tape.gradient(loss, weights)

    step(tf.ones((8, 20)))


if __name__ == "__main__":
    if sys.argv[1] in ("torch", "order"):
        with_torch(sys.argv[1])
    else:
        with_tensorflow(sys.argv[1])
    print("reduced, as if nothing were wrong", flush=True)
