"""One worker of the elastic tests: trains, kills one worker, has another one added, and writes down what it saw.

`python tests/elastic_worker.py torch|tensorflow <folder>`; the folder has `hosts`, which the discovery script prints.
The workers on the host (or the one of the rank) `victim` kill themselves with SIGKILL at step KILL_AT; rank 0 adds the
host `late` with its `slots` at ADD_AT. Names of this machine count as hosts, so that layouts with several come and go.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

KILL_AT, ADD_AT, STEPS_AFTER = 4, 8, 4
FRAMEWORK, FOLDER = sys.argv[1], Path(sys.argv[2])
PLAN = json.loads((FOLDER / "plan.json").read_text())
HOST = os.environ["HOROVOD_APS_HOST"] = os.environ["HOROVOD_HOSTNAME"]


def record(hvd: Any, state: Any, total: float, weights: bytes, compressor: Any) -> None:
    """A line in this worker's own log."""
    exchanges = sorted({(len(key.members), hvd.rank()) for key in compressor._reducers})
    residuals = compressor.state_dict()["residuals"]
    line = {
        "step": state.step,
        "size": hvd.size(),
        "rank": hvd.rank(),
        "host": HOST,
        "total": total,
        "checksum": zlib.crc32(weights),
        "exchanges": exchanges,
        "residuals": sum(math.prod(values.shape) for values in residuals.values()),
        "way": compressor.stats()["hierarchy"],
        "bytes": compressor.stats()["bytes_sent"],
        "pid": os.getpid(),
        "time": time.time(),
    }
    with open(FOLDER / f"{HOST}.{os.getpid()}.jsonl", "a") as log:
        log.write(json.dumps(line) + "\n")


def events(hvd: Any, state: Any) -> None:
    """What happens to the job, at steps that all workers count alike."""
    is_victim = PLAN["victim"] == HOST or (PLAN["victim"] == hvd.rank() and not (FOLDER / "killed").exists())
    if state.step == KILL_AT and is_victim:
        (FOLDER / "killed").write_text(HOST)
        os.kill(os.getpid(), signal.SIGKILL)
    if state.step == ADD_AT and hvd.rank() == 0:
        hosts = (FOLDER / "hosts").read_text()
        if PLAN["late"] not in hosts:
            (FOLDER / "hosts.new").write_text(hosts + f"{PLAN['late']}:{PLAN['slots']}\n")
            (FOLDER / "hosts.new").rename(FOLDER / "hosts")


def finished(hvd: Any, state: Any) -> bool:
    """Some steps after the new worker came."""
    if state.step > ADD_AT and hvd.size() == PLAN["size"]:
        state.after += 1
    return state.after > STEPS_AFTER


def main_torch() -> None:
    """PyTorch: DistributedOptimizer with error feedback, and a sum whose value tells the world size."""
    import horovod.torch as hvd
    import torch

    from horovod_aps.torch import APSCompressor

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    compressor = APSCompressor(4, 3, error_feedback=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compressor,
    )

    @hvd.elastic.run
    def train(state: Any) -> None:
        while not finished(hvd, state):
            generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
            x = torch.randn(16, 20, generator=generator)
            optimizer.zero_grad()
            ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
            events(hvd, state)
            optimizer.step()
            total = hvd.allreduce(torch.ones(1000), op=hvd.Sum, name="total", compression=compressor)
            state.step += 1
            raw = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
            record(hvd, state, float(total.mean()), raw, compressor)
            time.sleep(0.05)
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, after=0))


def main_tensorflow() -> None:
    """TensorFlow: DistributedGradientTape on a tf-keras model, whose optimizer Horovod's TensorFlowKerasState knows."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_aps.tensorflow import APSCompressor

    hvd.init()
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(50, activation="tanh", use_bias=False, input_shape=(20,)),
            tf.keras.layers.Dense(1, use_bias=False),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    compressor = APSCompressor(4, 3, error_feedback=True)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while not finished(hvd, state):
            x = tf.random.stateless_normal((16, 20), [state.step, hvd.rank()])
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean((model(x) - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
            tape = hvd.DistributedGradientTape(inner, compression=compressor)
            events(hvd, state)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            total = hvd.allreduce(tf.ones(1000), op=hvd.Sum, name="total", compression=compressor)
            state.step += 1
            raw = b"".join(weight.numpy().tobytes() for weight in model.weights + list(optimizer.variables))
            record(hvd, state, float(tf.reduce_mean(total)), raw, compressor)
            time.sleep(0.05)
            state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, step=0, after=0))


if __name__ == "__main__":
    main_torch() if FRAMEWORK == "torch" else main_tensorflow()
