"""One rank of tests/test_bytes.py: trains with each compression in turn and counts what its host sends.

`python tests/workers/bytes_worker.py torch|tensorflow [compression ...]`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from cluster import interface_bytes

N_STEPS = 3
WIDTHS = (1000, 1000, 1000, 1000, 10)  # three million parameters, in layers of 10 to a million


def count(step: Callable[[int], None], barrier: Callable[[], None]) -> int:
    """Bytes that this host sends in some steps; the first one, which agrees on the batch, does not count."""
    step(0)
    barrier()
    start = interface_bytes()
    barrier()  # other ranks of the host must not send before this one has looked
    for number in range(1, N_STEPS + 1):
        step(number)
    barrier()
    return interface_bytes() - start


def torch_steps(hvd: Any, compression: Any) -> Callable[[int], None]:
    import torch

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for width, next_width in zip(WIDTHS, WIDTHS[1:], strict=False):
        layers += [torch.nn.Linear(width, next_width), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters(), compression=compression
    )

    def step(number: int) -> None:
        x = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(100 * number + hvd.rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def tensorflow_steps(hvd: Any, compression: Any) -> Callable[[int], None]:
    import tensorflow as tf

    variables = []
    for width, next_width in zip(WIDTHS, WIDTHS[1:], strict=False):
        variables.append(tf.Variable(tf.random.stateless_normal((width, next_width), [0, 1]) / width**0.5))
        variables.append(tf.Variable(tf.zeros(next_width)))

    @tf.function
    def train(x: tf.Tensor) -> None:
        with tf.GradientTape() as inner:
            for weight, bias in zip(variables[::2], variables[1::2], strict=True):
                x = tf.tanh(x @ weight + bias)
            loss = tf.reduce_mean(x**2)
        tape = hvd.DistributedGradientTape(inner, compression=compression, num_groups=1)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)

    return lambda number: train(tf.random.stateless_normal((4, WIDTHS[0]), [number, hvd.rank()]))


def main() -> None:
    framework, *chosen = sys.argv[1:]
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        from horovod_aps.torch import APSCompressor

        steps, barrier = torch_steps, hvd.barrier
        gather = lambda n: hvd.allgather(torch.tensor([n]), name="sent").tolist()  # noqa: E731
    else:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        from horovod_aps.tensorflow import APSCompressor

        steps = tensorflow_steps
        barrier = lambda: hvd.allreduce(tf.zeros(1), name="barrier")  # noqa: E731
        gather = lambda n: hvd.allgather(tf.constant([n]), name="sent").numpy().tolist()  # noqa: E731
    hvd.init()
    compressions = {
        "fp32": hvd.Compression.none,
        "fp16": hvd.Compression.fp16,
        "(4,3)": APSCompressor(4, 3),
        "(3,0)": APSCompressor(3, 0),
    }
    sent = {}
    for name in chosen or compressions:
        # The better of two: on a busy machine TCP sends some segments twice, which is nobody's compression.
        sent[name] = gather(min(count(steps(hvd, compressions[name]), barrier) for _ in range(2)))
    if hvd.rank() == 0:
        print("SENT " + json.dumps(sent), flush=True)


if __name__ == "__main__":
    main()
