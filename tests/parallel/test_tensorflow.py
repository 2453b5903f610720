"""Horovod's TensorFlow interface with compression, eagerly and in graphs, on every rank of a real job.

Oracle: the NumPy simulation of all ranks in `tests/reference.py`, bit for bit, unless a test says otherwise; the torch
tests have the same one, so that both frontends give the same bits. One inter-op thread for the whole file: an exchange
that needed a second one would hang.
"""

from __future__ import annotations

import pickle
import time

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from all_formats import every_format, options_for
from exchange_oracle import SIZES, Emulation, assert_same_bits, carrier_pairs, check, expected, make_gradients
from reference import Format
from tf_common import digits, initial_weights, replicas_equal

from horovod_aps.options import Options
from horovod_aps.tensorflow import APSCompressor, PackedCompressor
from horovod_aps.tensorflow.compressor import MANY

hvd.init()
tf.config.threading.set_inter_op_parallelism_threads(1)
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
AVERAGE = 1 / hvd.size()


def run(function, graph: bool):
    """Call a function of no arguments, inside tf.function if asked."""
    return (tf.function(function) if graph else function)()


def grouped(grads: list[dict[str, np.ndarray]], compressor: APSCompressor, graph: bool, **keywords) -> dict:
    tensors = [tf.constant(x) for x in grads[hvd.rank()].values()]
    results = run(lambda: hvd.grouped_allreduce(tensors, compression=compressor, name="g", **keywords), graph)
    for tensor, x in zip(tensors, grads[hvd.rank()].values()):
        assert_same_bits(tensor.numpy(), x, "the input was overwritten")
    return {name: result.numpy() for name, result in zip(grads[0], results)}


@MODES
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_grouped_allreduce_equals_simulation(dtype, graph):
    grads = make_gradients(SIZES, hvd.size(), dtype)
    check(grouped(grads, APSCompressor(4, 3), graph), expected(grads, Format(4, 3), factor=AVERAGE))


@pytest.mark.parametrize("op, divisor", [(hvd.Average, hvd.size()), (hvd.Sum, 1)], ids=["average", "sum"])
def test_grouped_allreduce_op_and_scale_factors(op, divisor):
    grads = make_gradients((100, 7), hvd.size())
    actual = grouped(grads, APSCompressor(5, 2), True, op=op, prescale_factor=0.5, postscale_factor=3.0)
    check(actual, expected(grads, Format(5, 2), factor=1.5 / divisor))


def test_grouped_allreduce_many_buckets_in_graph():
    grads = make_gradients((900, 90, 9, 5000, 0, 1, 1, 1000, 1001, 0), hvd.size())
    compressor = APSCompressor(4, 3, bucket_mb=0.004)
    wanted = expected(grads, Format(4, 3), factor=AVERAGE, bucket_mb=0.004)
    for _ in range(2):
        check(grouped(grads, compressor, True), wanted)


@MODES
def test_grouped_allreduce_mixed_dtypes_and_integers(graph):
    """Horovod's own groups hold one dtype each, ours any; integers are summed exactly."""
    grads = {**make_gradients((9,), hvd.size(), "float32")[hvd.rank()]}
    half = make_gradients((5,), hvd.size(), "float16")
    tensors = [tf.constant(grads["layer0"]), tf.constant([hvd.rank(), 7]), tf.constant(half[hvd.rank()]["layer0"])]
    compressor = APSCompressor(4, 3)
    first, integers, last = run(lambda: hvd.grouped_allreduce(tensors, compression=compressor, op=hvd.Sum), graph)
    full = make_gradients((9,), hvd.size(), "float32")
    assert_same_bits(first.numpy(), expected(full, Format(4, 3))["layer0"])
    assert_same_bits(last.numpy(), expected(half, Format(4, 3))["layer0"])
    assert integers.numpy().tolist() == [sum(range(hvd.size())), 7 * hvd.size()]


@MODES
@pytest.mark.parametrize("n", [0, 1, 9])
def test_allreduce_tiny_tensors(n, graph):
    grads = make_gradients((n,), hvd.size())
    tensor = tf.constant(grads[hvd.rank()]["layer0"])
    result = run(lambda: hvd.allreduce(tensor, compression=APSCompressor(4, 3)), graph)
    assert_same_bits(result.numpy(), expected(grads, Format(4, 3), factor=AVERAGE)["layer0"])


@MODES
def test_allreduce_scalar_variable_and_unknown_shape(graph):
    compressor = APSCompressor(5, 10)
    variable = tf.Variable(float(hvd.rank() + 1))
    result = run(lambda: hvd.allreduce(variable, compression=compressor, op=hvd.Sum), graph)
    assert result.shape == () and result.numpy() == sum(range(1, hvd.size() + 1))

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def reduce(x):
        return hvd.allreduce(x, compression=compressor)

    for rows in (2, 0, 5):
        assert (reduce(tf.ones([rows, 3])).numpy() == np.ones((rows, 3))).all()


@MODES
def test_allreduce_gradient(graph):
    """Oracle: Horovod's own gradient of an all-reduce, the all-reduce of the gradient."""
    x = tf.fill([3, 5], 1.0 + hvd.rank())

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, compression=APSCompressor(5, 10), op=hvd.Sum)
            loss = tf.reduce_sum(y * 2)
        return tape.gradient(loss, x)

    assert (run(gradient, graph).numpy() == 2 * hvd.size()).all()


@MODES
@pytest.mark.parametrize("groups", [None, 1, 2])
def test_tape_equals_simulation(groups, graph):
    """Dense gradients by simulation; embeddings as Horovod gathers them; None for a variable without gradient."""
    grads = make_gradients((63, 8, 1025), hvd.size())
    variables = [tf.Variable(tf.zeros(x.shape)) for x in grads[0].values()]
    idle = tf.Variable(tf.zeros([3]))
    table = tf.Variable(tf.ones([4, 2]))
    mine = [tf.constant(x) for x in grads[hvd.rank()].values()]
    compressor = APSCompressor(4, 3)

    def step():
        sources = [*variables, idle] if groups else [*variables, idle, table]
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * g) for v, g in zip(variables, mine))
            loss += tf.reduce_sum(tf.gather(table, [hvd.rank()]))
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
        return tape.gradient(loss, sources)

    results = run(step, graph)
    wanted = expected(grads, Format(4, 3), factor=AVERAGE)
    check({name: result.numpy() for name, result in zip(wanted, results)}, wanted)
    assert results[3] is None
    if not groups:
        dense = tf.convert_to_tensor(results[4]).numpy()
        assert (dense[: hvd.size()] == AVERAGE).all() and not dense[hvd.size() :].any()


@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_tape_in_every_format_equals_emulation(fmt):
    """Bit for bit what all ranks in one process get, over steps."""
    grads, options = make_gradients((63, 8, 1025), hvd.size()), options_for(fmt, seed=3)
    variables = [tf.Variable(tf.zeros(x.shape)) for x in grads[0].values()]
    compressor, emulation = PackedCompressor(fmt, **options), Emulation(hvd.size(), Options(format=fmt, **options))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * g) for v, g in zip(variables, grads[hvd.rank()].values()))
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=1)
        for v, g in zip(variables, tape.gradient(loss, variables)):
            v.assign_sub(g)

    total = {name: np.zeros_like(x) for name, x in grads[0].items()}
    for _ in range(3):
        step()
        total = {name: total[name] - x for name, x in emulation.step(grads).items()}
    check({name: v.numpy() for name, v in zip(total, variables)}, total)
    assert replicas_equal(variables)


def test_tape_predivide_factor():
    grads = make_gradients((63, 8), hvd.size())
    variables = [tf.Variable(tf.zeros(x.shape)) for x in grads[0].values()]
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(v * tf.constant(g)) for v, g in zip(variables, grads[hvd.rank()].values()))
    tape = hvd.DistributedGradientTape(tape, compression=APSCompressor(4, 3), gradient_predivide_factor=4.0, groups=1)
    wanted = expected(grads, Format(4, 3), factor=AVERAGE)
    check({name: g.numpy() for name, g in zip(wanted, tape.gradient(loss, variables))}, wanted)


def train(compressor, groups, graph: bool, n_steps: int, seed: int = 0, batch: int = 32) -> list[tf.Variable]:
    """A custom loop on digits with SGD and momentum; returns the variables."""
    x, y, _, _ = digits(seed)
    w = [tf.Variable(v) for v in initial_weights(seed)]
    velocity = [tf.Variable(tf.zeros_like(v)) for v in w]

    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = tf.nn.relu(images @ w[0] + w[1]) @ w[2] + w[3]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
        for v, m, g in zip(w, velocity, tape.gradient(loss, w)):
            m.assign(0.9 * m + g)
            v.assign_sub(0.1 * m)

    step = tf.function(step, reduce_retracing=True) if graph else step
    for i in range(n_steps):
        start = i * batch % (len(x) - batch)
        step(tf.constant(x[start : start + batch]), tf.constant(y[start : start + batch]))
    return w


@MODES
@pytest.mark.parametrize("groups, n_steps", [(None, 30), (1, 200)])
def test_tape_many_steps_keep_replicas_identical(groups, n_steps, graph):
    w = train(APSCompressor(4, 3), groups, graph, n_steps)
    assert np.isfinite(w[0].numpy()).all() and replicas_equal(w)


def test_tape_digits_accuracy():
    """Oracle: the same loop without compression; within one point over 5 seeds."""

    def accuracy(compressor, seed):
        w = train(compressor, 1, True, 150, seed)
        _, _, x, y = digits(seed)
        logits = np.maximum(x @ w[0].numpy() + w[1].numpy(), 0) @ w[2].numpy() + w[3].numpy()
        return 100 * float((logits.argmax(1) == y).mean())

    compressor = APSCompressor(4, 3)
    scores = np.array([[accuracy(c, seed) for c in (hvd.Compression.none, compressor)] for seed in range(5)])
    assert scores.mean(0)[0] > 90
    assert abs(scores.mean(0)[0] - scores.mean(0)[1]) <= 1.0, scores


@MODES
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_reaches_all_ranks(bad, graph):
    x = np.ones(100, np.float32)
    if hvd.rank() == hvd.size() - 1:
        x[7] = bad
    tensors = [tf.constant(x), tf.ones(5)]
    first, second = run(lambda: hvd.grouped_allreduce(tensors, compression=APSCompressor(4, 3)), graph)
    assert np.isnan(first.numpy()).all() and (second.numpy() == 1).all()


def test_bytes_on_the_wire():
    compressor = APSCompressor(4, 3)
    hvd.allreduce(tf.random.normal([1_000_000]), compression=compressor)
    assert 0.25 <= compressor.stats()["ratio"] <= 0.27


def test_warmup_counts_steps_and_not_tensors():
    """Without groups every tensor is an exchange of its own; the first step must still be float32 for all."""
    variables = [tf.Variable(tf.zeros([50 + i])) for i in range(3)]
    rng = np.random.default_rng(hvd.rank())
    mine = [tf.constant(rng.standard_normal(v.shape).astype(np.float32)) for v in variables]
    exact = [hvd.allreduce(g, name=f"exact{i}").numpy() for i, g in enumerate(mine)]
    compressor = APSCompressor(3, 1, warmup_steps=1)

    def step():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v * g) for v, g in zip(variables, mine))
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return [g.numpy() for g in tape.gradient(loss, variables)]

    for g, wanted in zip(step(), exact):
        np.testing.assert_allclose(g, wanted, rtol=1e-6, atol=1e-7)
    for g, wanted in zip(step(), exact):
        assert np.abs(g - wanted).max() > 1e-3


def test_error_feedback_averages_out():
    """Oracle: with a constant gradient the mean of what is applied tends to the exact average."""
    x = np.random.default_rng(hvd.rank()).standard_normal(300).astype(np.float32)
    exact = hvd.allreduce(tf.constant(x), name="exact").numpy()

    def error(**options):
        compressor = APSCompressor(3, 1, **options)
        reduce = tf.function(lambda: hvd.allreduce(tf.constant(x), compression=compressor))
        return np.abs(np.mean([reduce().numpy() for _ in range(30)], 0) - exact).max()

    assert error(error_feedback=True) < 0.2 * error()


def test_ten_steps_trace_once_and_a_hundred_leak_nothing():
    """Oracle: a counter in the traced function, and the process's resident memory."""
    compressor = APSCompressor(4, 3)
    n_traces = 0

    @tf.function
    def reduce(x):
        nonlocal n_traces
        n_traces += 1
        return hvd.grouped_allreduce([x, x * 2], compression=compressor)

    def resident_mb():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096 / 2**20

    x = tf.random.normal([250_000])
    for _ in range(10):
        reduce(x)
    before = resident_mb()
    for _ in range(100):
        reduce(x)
    assert n_traces == 1 and len(compressor._reducers) == 1
    assert resident_mb() - before < 30  # each step makes 4 MB of results


def test_retracing_on_one_rank_only():
    """A rank may meet a new shape elsewhere and trace anew; names must not depend on how often it has."""
    compressor = APSCompressor(4, 3)

    @tf.function
    def reduce(x, other):
        return hvd.allreduce(x + 0 * tf.reduce_sum(other), compression=compressor)

    for n in (1, 2, 3):
        assert (reduce(tf.ones([4]), tf.ones([n if hvd.rank() == 0 else 1])).numpy() == 1).all()


@MODES
def test_different_formats_raise_everywhere(graph):
    x = tf.ones([10])
    for _ in range(2):
        wrong = APSCompressor(4, 3 if hvd.rank() == 0 else 2)
        said = "option m is 3 on rank 0 and 2 on rank 1"
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=said):
            run(lambda: hvd.allreduce(x, compression=wrong), graph)  # noqa: B023
        assert (run(lambda: hvd.allreduce(x, compression=APSCompressor(4, 3)), graph).numpy() == 1).all()


@MODES
def test_different_shapes_raise_everywhere(graph):
    x = tf.ones([10 + hvd.rank()])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"has shape \[10\] on rank 0 and \[11\]"):
        run(lambda: hvd.allreduce(x, compression=APSCompressor(4, 3), name="s"), graph)


@MODES
def test_wrong_use_is_refused(graph):
    compressor, x = APSCompressor(4, 3), tf.ones([10])
    with pytest.raises(ValueError, match="op must be Average or Sum, got Adasum"):
        run(lambda: hvd.allreduce(x, compression=compressor, op=hvd.Adasum), graph)
    with pytest.raises(ValueError, match="op must be Average or Sum, got Max"):
        run(lambda: hvd.grouped_allreduce([x], compression=compressor, op=hvd.Max), graph)
    with pytest.raises(ValueError, match="reducescatter is not supported"):
        run(lambda: hvd.reducescatter(x, compression=compressor), graph)
    with pytest.raises(ValueError, match="e must be in 1..8, got 0"):
        APSCompressor(0, 3)


def test_xla_is_refused():
    @tf.function(jit_compile=True)
    def reduce(x):
        return hvd.allreduce(x, compression=APSCompressor(4, 3))

    with pytest.raises(ValueError, match="XLA cannot compile an all-reduce; use jit_compile=False"):
        reduce(tf.ones([4]))


def test_process_sets():
    """A set of one rank keeps its values; another set has its own exchange."""
    ranks = [0] if hvd.size() == 2 else [0, hvd.size() - 1]
    some = hvd.add_process_set(ranks)
    if some.included():
        x = tf.fill([6], float(hvd.rank() + 1))
        result = run(lambda: hvd.allreduce(x, compression=APSCompressor(5, 10), process_set=some, op=hvd.Sum), True)
        assert (result.numpy() == sum(r + 1 for r in ranks)).all()
        for graph in (False, True) if len(ranks) == 1 else ():
            demanding = APSCompressor(4, 3, hierarchy="two-level")
            with pytest.raises(ValueError, match="there is only one rank"):
                run(lambda one=demanding: hvd.allreduce(x, compression=one, process_set=some, op=hvd.Sum), graph)
    hvd.remove_process_set(some)
    assert (hvd.allreduce(tf.ones(3), compression=APSCompressor(4, 3)).numpy() == 1).all()


@MODES
def test_carrier_transport(graph):
    """transport="allreduce". Oracle: small integers are exact in (4, 3) and in float16."""
    x = tf.constant([0.0, 1, 2, 3, -4], tf.float32) * (hvd.rank() + 1)
    compressor = APSCompressor(4, 3, transport="allreduce", stats=True)
    result = run(lambda: hvd.allreduce(x, compression=compressor, op=hvd.Sum), graph)
    (layer,) = compressor.stats()["layers"].values()
    assert layer["n_elements"] == 5 and layer["relative_error"] == 0 and sum(layer["histogram"]) == 4
    assert result.numpy().tolist() == [n * sum(range(1, hvd.size() + 1)) for n in (0, 1, 2, 3, -4)]


@pytest.mark.parametrize("fmt", [(4, 3), (5, 2)], ids=str)
def test_carrier_equals_simulation(fmt):
    """transport="allreduce": every value meets every other; 1 and 0.8125 made 0.5 of 0.90625 over Gloo."""
    grads, wanted = carrier_pairs(*fmt, hvd.size(), hvd.gloo_enabled())
    compressor = APSCompressor(*fmt, transport="allreduce")
    result = run(lambda: hvd.allreduce(tf.constant(grads[hvd.rank()]), compression=compressor, op=hvd.Sum), True)
    assert_same_bits(result.numpy(), wanted)


@MODES
@pytest.mark.parametrize("groups", [None, 1])
def test_resumed_run_equals_uninterrupted_run(groups, graph):
    """The compressor's state through a pickle. Oracle: the run that went on; without the state the runs part."""
    grads = [make_gradients((300, 40), hvd.size(), seed=step)[hvd.rank()] for step in range(6)]

    def start(state=None):
        compressor = APSCompressor(3, 0, error_feedback=True, rounding="stochastic", seed=5, warmup_steps=2)
        if state is not None:
            compressor.load_state_dict(pickle.loads(state))
        variables = [tf.Variable(tf.zeros(x.shape)) for x in grads[0].values()]

        def gradients(*arrays):
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(variable * x) for variable, x in zip(variables, arrays))
            tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
            return tape.gradient(loss, variables)

        return compressor, tf.function(gradients) if graph else gradients

    def run_steps(gradients, steps):
        return [x.numpy() for step in steps for x in gradients(*map(tf.constant, grads[step].values()))]

    compressor, gradients = start()
    run_steps(gradients, range(4))
    state = pickle.dumps(compressor.state_dict())
    wanted = run_steps(gradients, range(4, 6))
    resumed = run_steps(start(state)[1], range(4, 6))
    for x, y in zip(resumed, wanted):
        assert_same_bits(x, y)
    forgetful = run_steps(start()[1], range(4, 6))
    assert any((x != y).any() for x, y in zip(forgetful, wanted))


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_overrides_know_layers_of_a_graph_by_their_names(groups):
    """Hybrid precision in the usual training step. Oracle: the simulation with the same formats."""
    names = ("stem", "fc", "head")
    grads = make_gradients((40, 300, 7), hvd.size())
    variables = [tf.Variable(tf.zeros(x.shape)) for x in grads[0].values()]
    compressor = APSCompressor(4, 3, overrides={"*fc*": "float32", "*head*": (5, 10)})

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = 0.0
            for name, variable, x in zip(names, variables, grads[hvd.rank()].values()):
                with tf.name_scope(name):
                    loss += tf.reduce_sum(variable * x)
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
        return tape.gradient(loss, variables)

    wanted = expected(grads, {"layer0": Format(4, 3), "layer1": None, "layer2": Format(5, 10)}, factor=AVERAGE)
    for _ in range(2):
        check(dict(zip(grads[0], [x.numpy() for x in gradients()])), wanted)
    found = {layer: row["format"] for layer, row in compressor.stats()["layers"].items()}
    assert sorted(found.values()) == ["e4m3", "e5m10", "float32"]
    assert all(
        fmt == {"stem": "e4m3", "fc": "float32", "head": "e5m10"}[name]
        for layer, fmt in found.items()
        for name in names
        if name in layer
    )


@MODES
@pytest.mark.parametrize("what", ["transport", "op"])
def test_disagreement_with_the_allreduce_transport(what, graph):
    """Where Horovod's own all-reduce adds, which would not notice, or would wait for ever."""
    odd = hvd.rank() == hvd.size() - 1
    compressor = APSCompressor(4, 3, transport="packed" if odd and what == "transport" else "allreduce")
    op = hvd.Sum if odd and what == "op" else hvd.Average
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="all ranks must use the same"):
        run(lambda: hvd.allreduce(tf.ones([5]), compression=compressor, op=op), graph)
    assert (hvd.allreduce(tf.ones([7]), compression=APSCompressor(4, 3)).numpy() == 1).all()


@MODES
def test_class_instead_of_instance_is_named(graph):
    """As one writes compression=hvd.Compression.fp16."""
    with pytest.raises(TypeError, match=r"not the class; write compression=APSCompressor\(e=4, m=3\)"):
        run(lambda: hvd.allreduce(tf.ones([5]), compression=APSCompressor), graph)


def test_error_feedback_wants_names():
    """Two tensors without a name would get each other's residuals."""
    with pytest.raises(ValueError, match="error_feedback must know"):
        hvd.allreduce(tf.ones([5]), compression=APSCompressor(3, 0, error_feedback=True))


@pytest.mark.parametrize("transport", ["packed", "allreduce"])
def test_set_format_between_steps(transport):
    """Oracle: a compressor that had the new format from the start; a rank that is left behind is an error on all."""
    compressor, other = APSCompressor(4, 3, transport=transport), APSCompressor(3, 0, transport=transport)
    x = tf.random.stateless_normal([50], (hvd.rank(), 1))
    hvd.allreduce(x, compression=compressor)
    compressor.set_format(e=3, m=0)
    result = hvd.allreduce(x, compression=compressor).numpy()
    assert_same_bits(result, hvd.allreduce(x, compression=other).numpy())
    if hvd.rank() != 0:
        compressor.set_format(m=2)
    with pytest.raises(ValueError, match="all ranks must use the same"):
        hvd.allreduce(x, compression=compressor)
    if hvd.rank() == 0:
        compressor.set_format(m=2)
    assert (hvd.allreduce(x, compression=compressor).numpy() != result).any()


@MODES
def test_failure_of_one_rank_is_an_error_on_all(graph, monkeypatch):
    """At this call site and, since they share tags, at all others of the compressor. Never a sum of both."""
    compressor = APSCompressor(4, 3)

    def reduce(name: str, value: float) -> float:
        tensor = tf.fill([8], value)
        result = run(lambda: hvd.allreduce(tensor, op=hvd.Sum, name=f"{name}{graph}", compression=compressor), graph)
        return float(result[0])

    def fail(*_, **__):
        time.sleep(0.2)  # the others have sent theirs
        raise MemoryError("encode has failed")

    for name in "ab":
        assert reduce(name, 1.0) == hvd.size()
    if hvd.rank() == 0:
        (exchange,) = (one for key, one in compressor._reducers.items() if key.place.startswith("a"))
        monkeypatch.setattr(exchange.kernels, "encode", fail)
    for name in "abb":
        with pytest.raises(Exception, match="encode has failed"):
            reduce(name, 64.0)
    monkeypatch.undo()
    if not hvd.mpi_enabled():  # an elastic job, in which nobody was replaced
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
        with pytest.raises(Exception, match="encode has failed"):
            reduce("a", 1.0)
        for name in "ab":
            assert reduce(name, 1.0) == hvd.size()
    compressor = APSCompressor(4, 3)
    assert reduce("b", 1.0) == hvd.size()


def test_join():
    """Ranks that have finished: an error with the packed transport, zeros with transport="allreduce"."""
    x = tf.ones([4])
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"in hvd.join\(\)"):
            hvd.allreduce(x, compression=APSCompressor(4, 3))
        carried = APSCompressor(4, 3, transport="allreduce")
        assert (hvd.allreduce(x, compression=carried, op=hvd.Sum).numpy() == 1).all()
    else:
        APSCompressor(4, 3), APSCompressor(4, 3, transport="allreduce")
    hvd.join()


@pytest.mark.parametrize("groups, passes", [(None, 1), (2, 1), (None, 2), (1, 2)])
def test_v1_optimizer_in_a_session(groups, passes):
    """Oracle: gradient descent on w^2 by hand; (5, 10) is exact to 0.1 %."""
    with tf.Graph().as_default() as graph:
        start = [np.random.default_rng(i).standard_normal(5 + i).astype(np.float32) for i in range(4)]
        w = [tf.compat.v1.get_variable(f"w{i}", initializer=v) for i, v in enumerate(start)]
        loss = sum(tf.reduce_sum(v * v * (hvd.rank() + 1.0)) for v in w)
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.01),
            groups=groups,
            compression=APSCompressor(5, 10),
            op=hvd.Sum,
            backward_passes_per_step=passes,
        )
        step = optimizer.minimize(loss)
        conds = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
        ordered = conds if passes == 1 else []  # the order is in the graph, not left to the scheduler
        for earlier, later in zip(ordered, ordered[1:]):
            assert any(tensor.op is earlier for tensor in later.inputs)
        with tf.compat.v1.Session() as session:
            session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
            for _ in range(10):
                session.run(step)
            rate = 1 - 0.02 * passes * sum(range(1, hvd.size() + 1))
            for v, first in zip(session.run(w), start):
                np.testing.assert_allclose(v, first * rate ** (10 // passes), rtol=2e-2, atol=1e-3)


def test_many_tensors_without_groups_are_warned_about():
    tensors = [tf.ones([4]) for _ in range(20)]
    compressor = APSCompressor(4, 3)
    with pytest.warns(UserWarning, match="groups=1"):
        results = tf.function(lambda: [hvd.allreduce(x * 1, compression=compressor) for x in tensors])()
    assert all((result.numpy() == 1).all() for result in results)


def test_many_compressors_are_warned_about():
    with pytest.warns(UserWarning, match="make one before the training loop"):
        for _ in range(MANY):
            APSCompressor(4, 3)
