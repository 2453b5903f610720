"""`horovod_aps.keras` on Keras 3, on every rank of a real job. Oracles are named by each test."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from types import SimpleNamespace

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from all_formats import every_format, options_for
from exchange_oracle import Emulation, assert_same_bits, expected, make_gradients
from horovod._keras import callbacks as stock_callbacks
from reference import Format
from tf_common import digits, initial_weights, replicas_equal

from horovod_aps.keras import (
    APSCompressor,
    BroadcastGlobalVariablesCallback,
    DistributedOptimizer,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    PackedCompressor,
    load_model,
)
from horovod_aps.keras import optimizer as optimizer_module
from horovod_aps.options import Options
from horovod_aps.tensorflow import DistributedGradientTape, broadcast_variables
from horovod_aps.tensorflow.compressor import _warn_of_idle_compressors

hvd.init()
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(seed: int = 0) -> keras.Model:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
    model.set_weights(initial_weights(seed))
    return model


def fit(model: keras.Model, epochs: int = 1, seed: int = 0, callbacks=(), batch_size: int = 32) -> dict:
    x, y, _, _ = digits(seed)
    return model.fit(
        x, y, batch_size=batch_size, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    ).history


@pytest.mark.parametrize("wrap", [hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer], ids=["hvd", "hvd.keras"])
def test_stock_optimizer_is_refused(wrap):
    with pytest.raises(ValueError, match="use horovod_aps.keras.DistributedOptimizer"):
        wrap(keras.optimizers.Adam(), compression=APSCompressor(4, 3))


def test_apply_looks_at_no_stack_frames(monkeypatch):
    """Building looks, once, for a LossScaleOptimizer around it; steps do not."""
    callers = []
    real = sys._getframe

    def noted(depth: int = 0):
        callers.append(real(1).f_globals["__name__"])
        return real(depth + 1)

    monkeypatch.setattr(sys, "_getframe", noted)
    weight = keras.Variable(np.zeros(3, np.float32))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), APSCompressor(4, 3))
    optimizer.build([weight])
    assert "horovod_aps.keras.optimizer" in callers
    callers.clear()
    for _ in range(2):
        optimizer.apply([tf.ones(3)], [weight])
    assert not [name for name in callers if name.startswith("horovod_aps")]
    np.testing.assert_array_equal(weight.numpy(), [-2.0] * 3)


def test_apply_equals_simulation():
    """Oracle: the NumPy simulation of all ranks, and w - g by hand; gradients that are None stay out."""
    grads = make_gradients((63, 8, 1025), hvd.size())
    variables = [keras.Variable(np.zeros(x.shape, np.float32)) for x in grads[0].values()]
    idle = keras.Variable(np.ones(3, np.float32))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), APSCompressor(4, 3))
    optimizer.apply([*map(tf.constant, grads[hvd.rank()].values()), None], [*variables, idle])
    wanted = expected(grads, Format(4, 3), factor=1 / hvd.size())
    for variable, g in zip(variables, wanted.values()):
        assert_same_bits(variable.numpy(), np.float32(0) - g)
    assert (idle.numpy() == 1).all()


@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_apply_in_every_format_equals_emulation(fmt):
    grads, options = make_gradients((63, 8, 1025), hvd.size()), options_for(fmt, seed=3)
    variables = [keras.Variable(np.zeros(x.shape, np.float32)) for x in grads[0].values()]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), PackedCompressor(fmt, **options))
    optimizer.apply([*map(tf.constant, grads[hvd.rank()].values())], variables)
    wanted = Emulation(hvd.size(), Options(format=fmt, **options)).step(grads)
    for variable, g in zip(variables, wanted.values()):
        assert_same_bits(variable.numpy(), np.float32(0) - g)
    assert replicas_equal(variables)


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("accumulation", [None, 2])
def test_overrides_know_variables_by_their_paths(run_eagerly, accumulation):
    x = keras.Input((64,))
    model = keras.Model(x, keras.layers.Dense(10, name="fc")(keras.layers.Dense(32, name="stem")(x)))
    compressor = APSCompressor(4, 3, overrides={"fc/*": "float32", "*/bias": (5, 10)})
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
    model.compile(DistributedOptimizer(inner, compressor), loss=LOSS, run_eagerly=run_eagerly)
    x, y, _, _ = digits(0)
    model.fit(x[:64], y[:64], batch_size=16, verbose=0)
    assert {name: row["format"] for name, row in compressor.stats()["layers"].items()} == {
        "stem/kernel": "e4m3",
        "stem/bias": "e5m10",
        "fc/kernel": "float32",
        "fc/bias": "float32",
    }


def test_overrides_in_a_sequential_model():
    """Its variables' paths begin with the model's name, so that docs/choosing.md's pattern has a star in front."""
    layers = [keras.layers.Dense(32, name="stem"), keras.layers.Dense(10, name="fc")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    compressor = APSCompressor(4, 3, overrides={"*fc/*": "float32"})
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), compressor), loss=LOSS)
    x, y, _, _ = digits(0)
    model.fit(x[:16], y[:16], batch_size=16, verbose=0)
    formats = {name: row["format"] for name, row in compressor.stats()["layers"].items()}
    assert formats == {
        f"{model.name}/{name}": fmt
        for name, fmt in (
            ("stem/kernel", "e4m3"),
            ("stem/bias", "e4m3"),
            ("fc/kernel", "float32"),
            ("fc/bias", "float32"),
        )
    }


@pytest.mark.parametrize("compression", [None, hvd.Compression.fp16, APSCompressor(4, 3)], ids=["none", "fp16", "aps"])
def test_fit_reduces_and_keeps_replicas_identical(compression):
    """Oracle: one rank alone on the data of all ranks, which is what averaging gradients amounts to."""
    model = make_model()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression), loss=LOSS)
    fit(model, epochs=2)
    assert replicas_equal(model.weights)
    x, y, _, _ = digits(0)
    everyone = [hvd.allgather(tf.constant(part[None])).numpy() for part in (x, y)]
    alone = make_model()
    alone.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
    n = len(x) // 32 * 32
    for _ in range(2):
        for start in range(0, n, 32):
            alone.train_on_batch(*(part[:, start : start + 32].reshape(-1, *part.shape[2:]) for part in everyone))
        if n < len(x):
            alone.train_on_batch(*(part[:, n:].reshape(-1, *part.shape[2:]) for part in everyone))
    distance = [np.abs(a.numpy() - b.numpy()).max() for a, b in zip(model.weights, alone.weights)]
    assert max(distance) < (1e-4 if compression is None else 0.05), distance


def test_gradient_accumulation_reduces_once_per_update():
    """Oracle: the count of exchanges, and one rank alone with the batches of all ranks and steps at once."""
    compressor = APSCompressor(5, 10)
    model = make_model()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4, clipnorm=1.0), compressor)
    model.compile(optimizer, loss=LOSS)
    x, y, _, _ = digits(0)
    model.fit(x[:256], y[:256], batch_size=32, verbose=0, shuffle=False)
    layers = compressor.stats()["layers"].values()
    assert {layer["n_exchanges"] for layer in layers} == {2} and replicas_equal(model.weights)
    alone = make_model()
    alone.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), loss=LOSS)
    everyone = [hvd.allgather(tf.constant(part[None, :256])).numpy() for part in (x, y)]
    for start in (0, 128):
        alone.train_on_batch(*(part[:, start : start + 128].reshape(-1, *part.shape[2:]) for part in everyone))
    for weight, wanted in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(weight, wanted, atol=1e-4)


def test_gradient_accumulation_eagerly():
    model = make_model()
    model.compile(
        DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), APSCompressor(4, 3)),
        loss=LOSS,
        run_eagerly=True,
    )
    x, y, _, _ = digits(0)
    model.fit(x[:128], y[:128], batch_size=32, verbose=0)
    assert replicas_equal(model.weights)


def test_loss_scaling_skips_the_step_on_all_ranks():
    """One rank has a NaN: no rank moves its weights, all halve their scale. Oracle: the weights before."""
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer = DistributedOptimizer(inner, APSCompressor(4, 3))
    variable = keras.Variable(np.ones(5, np.float32))
    optimizer.build([variable])
    scale = float(optimizer.dynamic_scale)
    bad = np.full(5, np.nan if hvd.rank() == hvd.size() - 1 else scale, np.float32)

    @tf.function
    def step(g):
        optimizer.apply([g], [variable])

    step(tf.constant(bad))
    assert (variable.numpy() == 1).all() and float(optimizer.dynamic_scale) == scale / 2
    step(tf.fill([5], scale / 2))
    np.testing.assert_allclose(variable.numpy(), 0.9, rtol=1e-6)


def test_loss_scaling_around_is_refused():
    """Each rank would decide alone whether to take part, and hang the others."""
    outer = keras.optimizers.LossScaleOptimizer(DistributedOptimizer(keras.optimizers.SGD(0.1), APSCompressor(4, 3)))
    variable = keras.Variable(np.ones(5, np.float32))
    with pytest.raises(ValueError, match=r"DistributedOptimizer\(LossScaleOptimizer\(optimizer\)"):
        outer.apply([tf.ones(5)], [variable])


@pytest.mark.parametrize("built", [False, True])
def test_no_step_looks_at_the_stack(monkeypatch, built):
    """Where a LossScaleOptimizer is around is found out when it is built, also if the one in it was before."""
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), APSCompressor(4, 3))
    variable = keras.Variable(np.ones(5, np.float32))
    if built:
        optimizer.build([variable])
        monkeypatch.setattr(optimizer_module, "sys", None)
        optimizer.apply([tf.ones(5)], [variable])
        monkeypatch.undo()
    with pytest.raises(ValueError, match="LossScaleOptimizer around it"):
        keras.optimizers.LossScaleOptimizer(optimizer).apply([tf.ones(5)], [variable])


# What the stock optimizer takes, and ours with it; None: refused, with a reason.
TAKEN = {
    "name": "mine",
    "compression": hvd.Compression.fp16,
    "sparse_as_dense": True,
    "op": hvd.Sum,
    "gradient_predivide_factor": 2.0,
    "backward_passes_per_step": 2,
    "average_aggregated_gradients": True,
    "num_groups": 2,
    "groups": 1,
    "process_set": hvd.global_process_set,
}
REFUSED = {
    "device_dense": ("/CPU:0", "where they are"),
    "device_sparse": ("/CPU:0", "where they are"),
    "scale_local_gradients": (False, "no local variables"),
}


@pytest.mark.filterwarnings("ignore:DistributedOptimizer. num_groups:DeprecationWarning")
def test_optimizer_takes_what_the_stock_one_takes():
    stock = inspect.signature(hvd_keras.DistributedOptimizer).parameters
    assert set(stock) - {"optimizer"} == set(TAKEN) | set(REFUSED)
    defaults = {name: parameter.default for name, parameter in stock.items() if name != "optimizer"}
    DistributedOptimizer(keras.optimizers.SGD(), **defaults)
    for name, value in TAKEN.items():
        DistributedOptimizer(keras.optimizers.SGD(), **{name: value})
    DistributedOptimizer(keras.optimizers.SGD(), groups=[[keras.Variable([1.0])]])
    for name, (value, reason) in REFUSED.items():
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            DistributedOptimizer(keras.optimizers.SGD(), **{name: value})


@pytest.mark.parametrize("compression", [None, APSCompressor(5, 10)], ids=["none", "aps"])
@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_per_step(average, compression):
    """Two batches make a step. Oracle: Horovod's definition by hand, their sum or mean, averaged over ranks."""
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression, backward_passes_per_step=2, average_aggregated_gradients=average
    )
    variable = keras.Variable(np.zeros(3, np.float32))
    moves = []
    for batch in range(4):
        optimizer.apply([tf.fill([3], float((batch + 1) * (hvd.rank() + 1)))], [variable])
        moves.append(float(variable.numpy()[0]))
    rank_mean = (hvd.size() + 1) / 2
    first = -(1 + 2) * rank_mean / (2 if average else 1)
    second = -(3 + 4) * rank_mean / (2 if average else 1)
    np.testing.assert_allclose(moves, [0, first, first, first + second], rtol=1e-3)


def test_backward_passes_per_step_that_cannot_be():
    def wrap(inner, n=2):
        return DistributedOptimizer(inner, backward_passes_per_step=n)

    wrap(keras.optimizers.SGD(gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3; they are the same thing"):
        wrap(keras.optimizers.SGD(gradient_accumulation_steps=3))
    with pytest.raises(ValueError, match="does not go with a LossScaleOptimizer"):
        wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    built = keras.optimizers.SGD()
    built.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="too late for an optimizer that is built"):
        wrap(built)
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        wrap(keras.optimizers.SGD(), 0)


def test_wrong_use_is_refused():
    with pytest.raises(TypeError, match=r"not the class; write compression=APSCompressor\(e=4, m=3\)"):
        DistributedOptimizer(keras.optimizers.SGD(), APSCompressor)
    with pytest.raises(TypeError, match="compression must be None, one of .* or an APSCompressor, got 'x'"):
        DistributedOptimizer(keras.optimizers.SGD(), "x")
    with pytest.raises(ValueError, match="groups must be a non-negative integer or a list"):
        DistributedOptimizer(keras.optimizers.SGD(), groups=-1)
    with pytest.raises(ValueError, match="gradient_predivide_factor must be a positive number, got 0"):
        DistributedOptimizer(keras.optimizers.SGD(), gradient_predivide_factor=0)
    with pytest.raises(TypeError, match="process_set must be one of Horovod's, got 3"):
        DistributedOptimizer(keras.optimizers.SGD(), process_set=3)
    with pytest.raises(ValueError, match="op must be Average or Sum"):
        DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum)
    with pytest.raises(TypeError, match="must be a Keras 3 optimizer, got str"):
        DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="distributed already"):
        DistributedOptimizer(DistributedOptimizer(keras.optimizers.SGD()))


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_embedding(sparse_as_dense):
    """Sparse gradients are gathered by Horovod, or reduced densely. Oracle: equal replicas that moved."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(
        DistributedOptimizer(keras.optimizers.SGD(0.1), APSCompressor(4, 3), sparse_as_dense=sparse_as_dense),
        loss="mse",
    )
    x = np.random.default_rng(hvd.rank()).integers(0, 20, (32, 3))
    model.build(x.shape)
    before = model.get_weights()
    model.fit(x, x.sum(1, keepdims=True).astype(np.float32), batch_size=16, verbose=0)
    assert replicas_equal(model.weights)
    assert all((weight != old).any() for weight, old in zip(model.get_weights(), before))


def test_broadcast_comes_before_ranks_part():
    """Rank 0 has restored its optimizer in the middle of an accumulation: the others must join it there."""
    model = make_model(seed=hvd.rank())
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    model.compile(DistributedOptimizer(optimizer, APSCompressor(4, 3)), loss=LOSS)
    optimizer.build(model.trainable_variables)
    if hvd.rank() == 0:
        optimizer._iterations.assign(3)
    x, y, _, _ = digits(0)
    model.fit(x[:64], y[:64], batch_size=16, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(0)])
    assert int(optimizer._iterations.value) == 7 and replicas_equal(model.weights)


def test_warmup_must_know_the_length_of_an_epoch():
    """Oracle: the line from initial_lr / size to initial_lr, by hand."""
    model = make_model()
    model.compile(keras.optimizers.SGD(9.0), loss=LOSS)
    callback = LearningRateWarmupCallback(0.4, warmup_epochs=2)
    callback.set_model(model)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="give steps_per_epoch"):
        callback.on_train_batch_begin(0)
    callback.steps_per_epoch = 4
    rates = []
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        for batch in range(6):  # more than was said
            callback.on_train_batch_begin(batch)
            rates.append(float(model.optimizer.learning_rate))
    first = 0.4 / hvd.size()
    line = [first + (0.4 - first) * min(1.0, (4 * epoch + batch + 1) / 8) for epoch in range(2) for batch in range(6)]
    np.testing.assert_allclose(rates, line, rtol=1e-6)


def rates_of(callback, optimizer, n_epochs: int = 6, n_batches: int = 4) -> list[float]:
    callback.set_model(SimpleNamespace(optimizer=optimizer))
    callback.set_params({"steps": n_batches})
    rates = []
    for epoch in range(n_epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(n_batches):
            callback.on_train_batch_begin(batch)
            rates.append(float(optimizer.learning_rate))
        logs: dict = {}
        callback.on_epoch_end(epoch, logs)
        assert logs["lr"] == rates[-1]
    return rates


class Stock(stock_callbacks.LearningRateScheduleCallbackImpl):
    """Horovod's own schedule, on a float instead of a Keras model."""

    def __init__(self, *arguments, **options):
        self.backend = SimpleNamespace(get_value=lambda rate: rate, set_value=self.keep)
        super().__init__(self.backend, *arguments, **options)

    def keep(self, old: float, new: float) -> None:
        self.model.optimizer.lr = self.model.optimizer.learning_rate = new

    def set_model(self, model) -> None:
        self.model = model

    def set_params(self, params: dict) -> None:
        self.params = params
        self.on_train_begin()

    def on_train_batch_begin(self, batch: int) -> None:
        self.on_batch_begin(batch)


@pytest.mark.parametrize(
    "options",
    [
        {"multiplier": 0.5},
        {"multiplier": 0.5, "start_epoch": 2, "end_epoch": 4},
        {"multiplier": lambda epoch: 1 / (1 + epoch), "end_epoch": 3},
        {"multiplier": lambda epoch: 1 / (1 + epoch), "staircase": False, "start_epoch": 1},
        {"multiplier": 0.9, "staircase": False, "steps_per_epoch": 8},
    ],
    ids=str,
)
def test_schedule_equals_horovods(options):
    """Oracle: Horovod's callback, which Keras 3 does not get along with."""
    wanted = rates_of(Stock(0.4, **options), SimpleNamespace(lr=0.1, learning_rate=0.1))
    assert rates_of(LearningRateScheduleCallback(0.4, **options), SimpleNamespace(learning_rate=0.1)) == wanted


def test_callbacks_say_what_they_do(capsys):
    warmup = LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    schedule = LearningRateScheduleCallback(0.4, 0.5, start_epoch=4, verbose=1)
    rates_of(warmup, SimpleNamespace(learning_rate=0.1))
    rates_of(schedule, SimpleNamespace(learning_rate=0.1))
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == (
        []
        if hvd.rank()
        else [
            "Epoch 2: finished gradual learning rate warmup to 0.4.",
            "Epoch 5: learning rate set to 0.4.",
            "Epoch 6: learning rate set to 0.2.",
        ]
    )
    for one in (LearningRateWarmupCallback, LearningRateScheduleCallback):
        stock = inspect.signature(getattr(hvd_keras.callbacks, one.__name__)).parameters
        ours = inspect.signature(one).parameters
        assert [*ours][: len(stock)] == [*stock] and "verbose" in ours
    with pytest.raises(ValueError, match="momentum_correction must be False"):
        LearningRateWarmupCallback(0.4, momentum_correction=True)


def test_broadcast_leaves_local_variables_alone():
    model = make_model(seed=hvd.rank())
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=LOSS)
    model.optimizer.build(model.trainable_variables)
    kernel, bias, *rest = model.weights
    bias.assign(np.full(32, hvd.rank(), np.float32))
    callback = BroadcastGlobalVariablesCallback(0, local_variables=[bias])
    callback.set_model(model)
    callback.on_train_begin()
    assert (bias.numpy() == hvd.rank()).all() and replicas_equal([kernel, *rest])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("groups", [None, 1])
def test_tape_takes_keras_variables(graph, groups):
    """Oracle: Horovod's tape with TensorFlow's variables; sources may be a list, a dict or one variable."""
    model = make_model(seed=hvd.rank())
    broadcast_variables(model.variables, root_rank=0)
    assert replicas_equal(model.weights)
    x, y = (tf.constant(part[:16]) for part in digits(0)[:2])
    ours, stock = (APSCompressor(4, 3) for _ in range(2))
    variables = model.trainable_variables
    by_name = {str(i): variable for i, variable in enumerate(variables)}

    def gradients(make_tape, compressor, sources):
        def run():
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x))
            return make_tape(tape, compression=compressor, groups=groups).gradient(loss, sources)

        return (tf.function(run) if graph else run)()

    wanted = gradients(hvd.DistributedGradientTape, stock, [variable.value for variable in variables])
    for got, grad in zip(gradients(DistributedGradientTape, ours, variables), wanted):
        assert_same_bits(got.numpy(), grad.numpy())
    nested = gradients(DistributedGradientTape, hvd.Compression.none, by_name)
    assert list(nested) == list(by_name)
    alone = gradients(DistributedGradientTape, hvd.Compression.none, variables[0])
    np.testing.assert_allclose(alone.numpy(), nested["0"].numpy(), rtol=1e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("groups", [1, 2])
def test_tape_takes_sparse_gradients_in_groups_in_any_order(graph, groups):
    """Dense, unused, sparse, dense. Oracle: gradients by hand; Horovod's own tape fails on that order."""
    dense, idle, table, last = (keras.Variable(np.ones(shape, np.float32)) for shape in ((3,), (2,), (5, 2), (4,)))

    def gradients(compression):
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value, [hvd.rank(), 4])
            loss = (tf.reduce_sum(dense) + tf.reduce_sum(rows) + 2 * tf.reduce_sum(last)) * (hvd.rank() + 1.0)
        tape = DistributedGradientTape(tape, compression=compression, groups=groups)
        return tape.gradient(loss, [dense, idle, table, last])

    for compression in (APSCompressor(5, 10), hvd.Compression.none):
        first, none, sparse, second = (tf.function(gradients) if graph else gradients)(compression)
        mean = (hvd.size() + 1) / 2
        assert none is None and isinstance(sparse, tf.IndexedSlices)
        np.testing.assert_allclose(first.numpy(), np.full(3, mean), rtol=1e-3)
        np.testing.assert_allclose(second.numpy(), np.full(4, 2 * mean), rtol=1e-3)
        wanted = np.zeros((5, 2), np.float32)
        for rank in range(hvd.size()):
            wanted[[rank, 4]] += (rank + 1) / hvd.size()
        np.testing.assert_allclose(tf.convert_to_tensor(sparse).numpy(), wanted, rtol=1e-6)


def test_tape_knows_local_sources_and_groups_of_keras_variables():
    """Oracle: the gradient of v * (rank + 1) by hand; local ones are scaled by 1 / size, as Horovod does it."""
    shared, local = keras.Variable(1.0, name="shared"), keras.Variable(1.0, name="local")
    with tf.GradientTape() as tape:
        loss = (shared + local) * (hvd.rank() + 1.0)
    tape = DistributedGradientTape(tape, groups=[[shared]])
    assert isinstance(tape, tf.GradientTape)
    tape.register_local_source(local)
    ((one, local_gradient),), ((other, gradient),) = tape.get_local_and_global_gradients(loss, [shared, local])
    assert one is local and other is shared
    assert float(gradient) == (hvd.size() + 1) / 2 and float(local_gradient) == (hvd.rank() + 1) / hvd.size()


@pytest.mark.parametrize("compression", [None, APSCompressor(4, 3)], ids=["none", "aps"])
def test_xla_is_refused(compression):
    model = make_model()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), compression), loss=LOSS, jit_compile=True)
    with pytest.raises(ValueError, match="XLA cannot compile an all-reduce.*jit_compile=False"):
        fit(model)


def test_unused_compressor_is_named_at_exit(caplog, monkeypatch):
    """As after Horovod's own load_model on Keras 3, which builds an optimizer that reduces nothing."""
    monkeypatch.setattr(logging.getLogger("horovod_aps"), "propagate", True)
    idle, busy = APSCompressor(2, 1), APSCompressor(2, 2)
    hvd.allreduce(tf.ones(3), compression=busy)
    _warn_of_idle_compressors()
    text = "".join(record.getMessage() for record in caplog.records)
    assert (f"{idle!r} was never used" in text) == (hvd.rank() == 0) and f"{busy!r}" not in text


def test_registered_optimizer_is_saved_under_its_own_name():
    @keras.saving.register_keras_serializable("mine")
    class Slow(keras.optimizers.SGD):
        pass

    optimizer = DistributedOptimizer(Slow(0.1), APSCompressor(4, 3))
    saved = keras.saving.serialize_keras_object(optimizer)
    assert saved["registered_name"] == "mine>Slow"
    assert type(keras.saving.deserialize_keras_object(saved)) is Slow


def test_broadcast_metrics_and_warmup_callbacks():
    """Ranks start differently and end equal; metrics are averages; the learning rate ends where it should."""
    model = make_model(seed=hvd.rank())
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01), APSCompressor(4, 3)), loss=LOSS)
    history = fit(
        model,
        epochs=2,
        callbacks=[
            BroadcastGlobalVariablesCallback(0),
            MetricAverageCallback(),
            LearningRateWarmupCallback(0.01, warmup_epochs=1),
        ],
    )
    assert replicas_equal(model.weights) and replicas_equal([np.array(history["loss"])])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    assert history["loss"][1] < history["loss"][0]


def test_save_and_load(tmp_path):
    """A saved model loads without us, and `load_model` makes it distributed again, with the optimizer's state."""
    model = make_model()
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01), APSCompressor(4, 3)), loss=LOSS)
    fit(model)
    path = tmp_path / f"model{hvd.rank()}.keras"
    model.save(path)
    assert type(keras.models.load_model(path).optimizer) is keras.optimizers.Adam
    loaded = load_model(path, APSCompressor(4, 3))
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) > 0
    fit(loaded)
    assert replicas_equal(loaded.weights)


def test_digits_accuracy():
    """Oracle: the same without compression; within one point over 5 seeds."""
    scores = []
    for compression in (None, APSCompressor(4, 3)):
        model = make_model()
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.5), compression), loss=LOSS)
        row = []
        for seed in range(5):
            model.set_weights(initial_weights(seed))
            fit(model, epochs=8, seed=seed, batch_size=64)
            _, _, x, y = digits(seed)
            row.append(100 * float((model.predict_on_batch(x).argmax(1) == y).mean()))
        scores.append(row)
    fp32, aps = np.mean(scores, axis=1)
    assert fp32 > 90 and abs(fp32 - aps) <= 1.0, scores


def test_two_models_in_two_threads():
    """Oracle: the same trainings one after the other. Over MPI ranks start the threads in opposite orders; over Gloo,
    where the order must be the same on all ranks, the threads take turns."""
    models = [make_model(seed) for seed in range(2)]
    errors = []
    turn = threading.Condition()
    turns = [0] * 2

    def train(which: int, compressor: APSCompressor) -> None:
        x, y, _, _ = digits(which)
        variables = [variable.value for variable in models[which].trainable_variables]

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = LOSS(y, models[which](x))
            tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=1)
            for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                variable.assign_sub(0.1 * gradient)

        for start in range(0, 320, 32):
            if not hvd.mpi_enabled():
                with turn:
                    assert turn.wait_for(lambda: turns[which] <= turns[1 - which] - which, 60)
            step(x[start : start + 32], y[start : start + 32])
            with turn:
                turns[which] += 1
                turn.notify_all()

    def guarded(which: int, compressor: APSCompressor) -> None:
        try:
            train(which, compressor)
        except BaseException as error:
            errors.append(error)
            raise

    together = [APSCompressor(4, 3, error_feedback=True) for _ in range(2)]
    threads = [threading.Thread(target=guarded, args=(which, together[which])) for which in range(2)]
    for thread in threads[:: 1 if hvd.rank() == 0 else -1]:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    results = [model.get_weights() for model in models]
    for which in range(2):
        models[which].set_weights(initial_weights(which))
        turns[:] = [0, 100] if which == 0 else [100, 0]
        train(which, APSCompressor(4, 3, error_feedback=True))
        for result, wanted in zip(results[which], models[which].get_weights()):
            assert_same_bits(result, wanted)
        assert replicas_equal(models[which].get_weights())
