"""Gradients on a GPU, eagerly and in graphs.

A second logical CPU of TensorFlow plays the GPU, and the stand-in for CuPy runs the CUDA kernels: placement, DLPack and
launchers are the real ones, streams are not.

Oracle: the NumPy simulation of all ranks in `tests/reference.py`, bit for bit.
"""

from __future__ import annotations

import warnings

import cuda_standin
import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from exchange_oracle import SIZES, assert_same_bits, check, expected, make_gradients
from reference import Format

from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.kernels.memory import DeviceArray
from horovod_aps.tensorflow import APSCompressor, devices, engine, links

hvd.init()
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
HOST, GPU = "/job:localhost/replica:0/task:0/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:1"
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
AVERAGE = 1 / hvd.size()


class DeviceAddresses(devices.Addresses):
    """Memory of tensors on the second CPU is device memory; that of others is not."""

    def __init__(self, tensors) -> None:
        super().__init__(tensors)
        for tensor, address in zip(tensors, self.values):
            assert tensor.backing_device == GPU
            cuda_standin.register(address, tensor.shape.num_elements() * tensor.dtype.size)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """The second CPU is a GPU, and CuPy is there."""
    monkeypatch.setattr(devices, "gpus", lambda: [GPU])
    monkeypatch.setattr(devices, "array_module", lambda: cuda_standin)
    monkeypatch.setattr(devices, "Addresses", DeviceAddresses)
    monkeypatch.setattr(devices, "kernels", lambda: CudaKernels(cuda_standin, block=32))
    cuda_standin.reset(hvd.rank())
    links._renew_tickets(0)  # what this rank can do, graphs made earlier have in a variable


def run(step, tensors, graph: bool, device: str = GPU):
    """Call a function, inside tf.function if asked; eager operations prefer a GPU, which a second CPU must be told."""
    if graph:
        return tf.function(step)(*tensors)
    with tf.device(device):
        return step(*tensors)


def reduce(grads, compressor: APSCompressor, graph: bool, device: str = GPU, **keywords) -> dict[str, np.ndarray]:
    """Results by name of a grouped all-reduce of tensors on a device, which is where they must be."""
    with tf.device(device):
        tensors = [tf.identity(tf.constant(x)) for x in grads[hvd.rank()].values()]

    def step(*tensors):
        return hvd.grouped_allreduce(list(tensors), compression=compressor, name="g", **keywords)

    results = run(step, tensors, graph, device)
    if not graph:  # a function's results go where its caller wants them
        assert {result.backing_device for result in results} == {device}
    for tensor, x in zip(tensors, grads[hvd.rank()].values()):
        assert_same_bits(tensor.numpy(), x, "the input was overwritten")
    return {name: result.numpy() for name, result in zip(grads[0], results)}


@MODES
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_gradients_on_gpu_equal_simulation(dtype, graph):
    grads = make_gradients(SIZES, hvd.size(), dtype)
    check(reduce(grads, APSCompressor(4, 3), graph), expected(grads, Format(4, 3), factor=AVERAGE))
    assert cuda_standin.counts()["launches"], "no kernel was launched"


@MODES
def test_residuals_of_gradients_on_gpu_stay_there(graph):
    """Oracle: the same steps on the host."""
    here, there = APSCompressor(3, 0, error_feedback=True), APSCompressor(3, 0, error_feedback=True)
    for step in range(3):
        grads = make_gradients((100, 7, 0, 33), hvd.size(), seed=step)
        check(reduce(grads, there, graph), reduce(grads, here, False, HOST))
    (exchange,) = there._reducers.values()
    assert all(isinstance(values, DeviceArray) for values in exchange.residuals.values())
    wanted = here.state_dict()["residuals"]
    assert len(wanted) == 4
    for name, values in there.state_dict()["residuals"].items():
        np.testing.assert_array_equal(values, wanted[name])


@MODES
def test_ranks_have_different_gpus(graph, monkeypatch):
    """GPU:0 on one rank is GPU:1 on another, if the program does not hide all but one."""
    reducer = engine._reducer
    monkeypatch.setattr(
        engine, "_reducer", lambda call, ps, ticket, gpu: reducer(call, ps, ticket, gpu and f"{gpu}{hvd.rank()}")
    )
    grads = make_gradients((9,), hvd.size())
    check(reduce(grads, APSCompressor(4, 3), graph), expected(grads, Format(4, 3), factor=AVERAGE))


@MODES
def test_tensors_without_elements_are_on_the_right_gpu(graph, monkeypatch):
    """They have no address that would tell."""
    monkeypatch.setattr(cuda_standin._Attributes, "device", 3)
    cuda_standin.cuda.devices.clear()
    grads = make_gradients((0,), hvd.size())
    check(reduce(grads, APSCompressor(4, 3), graph), grads[0])
    assert set(cuda_standin.cuda.devices) == {3}


@MODES
def test_a_rank_that_cannot_pack_on_a_gpu(graph, monkeypatch):
    """Without CuPy, or without a GPU: then all pack on the host, for they would not find each other."""
    if hvd.rank() == 0:
        monkeypatch.setattr(devices, "array_module", lambda: None)
    links._renew_tickets(0)
    grads = make_gradients((9, 100), hvd.size())
    check(reduce(grads, APSCompressor(4, 3), graph), expected(grads, Format(4, 3), factor=AVERAGE))
    assert not cuda_standin.counts()["launches"]


@pytest.mark.skipif(hvd.size() != 4, reason="two hosts with two ranks each")
@MODES
def test_two_levels(graph, monkeypatch):
    """Oracle: the same steps on the host, in shared memory."""
    monkeypatch.setenv("HOROVOD_APS_HOST", "aabb"[hvd.rank()])
    here, there = APSCompressor(3, 0, error_feedback=True), APSCompressor(3, 0, error_feedback=True)
    for step in range(3):
        grads = make_gradients((100, 7, 0, 33), hvd.size(), seed=step)
        check(reduce(grads, there, graph), reduce(grads, here, False, HOST))
    assert here.stats()["hierarchy"] == "two-level (2 hosts with 2 ranks)"
    assert there.stats()["hierarchy"] == "two-level by messages (2 hosts with 2 ranks), through pinned host memory"


def test_the_exchange_of_a_graph_takes_no_int32():
    """TensorFlow has no GPU kernel of EagerPyFunc with an int32, and runs such an exchange on the CPU instead."""
    compressor = APSCompressor(4, 3)

    @tf.function
    def step(tensor):
        return hvd.allreduce(tensor, compression=compressor, name="g")

    graph = step.get_concrete_function(tf.TensorSpec([5], tf.float32)).graph
    ops = [op for one in [graph, *_inner_graphs(graph)] for op in one.get_operations() if op.type == "EagerPyFunc"]
    assert len(ops) == 1
    assert tf.int32 not in [*ops[0].get_attr("Tin"), *ops[0].get_attr("Tout")]


def _inner_graphs(graph):
    return [graph._get_function(name).graph for name in graph._functions if graph._get_function(name).graph]


def test_tensors_that_a_graph_puts_on_the_cpu_stay_there():
    grads = make_gradients(SIZES, hvd.size())
    compressor = APSCompressor(4, 3)

    @tf.function
    def step():
        with tf.device("/CPU:0"):
            tensors = [tf.identity(tf.constant(x)) for x in grads[hvd.rank()].values()]
        return hvd.grouped_allreduce(tensors, compression=compressor, name="g")

    results = {name: result.numpy() for name, result in zip(grads[0], step())}
    check(results, expected(grads, Format(4, 3), factor=AVERAGE))
    assert not cuda_standin.counts()["launches"]


@MODES
def test_tape_on_gpu(graph):
    """Oracle: the derivative of a sum of squares, which (5, 10) holds exactly."""
    compressor = APSCompressor(5, 10)
    with tf.device(GPU):
        weights = [tf.Variable([1.0, 2.0, 3.0]), tf.Variable([[4.0], [5.0]])]

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(weight * weight) for weight in weights]) * (hvd.rank() + 1)
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=1, op=hvd.Sum)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(gradient)

    run(step, [], graph)
    total = sum(range(1, hvd.size() + 1))
    assert weights[0].numpy().tolist() == [x - 2 * x * total for x in (1.0, 2.0, 3.0)]
    assert weights[1].numpy().tolist() == [[x - 2 * x * total] for x in (4.0, 5.0)]
    assert cuda_standin.counts()["launches"]


@MODES
def test_nan_on_gpu_reaches_every_rank(graph):
    grads = [{"a": np.ones(5, np.float32), "b": np.ones(9, np.float32)} for _ in range(hvd.size())]
    grads[-1]["a"][3] = np.nan
    results = reduce(grads, APSCompressor(4, 3), graph)
    assert np.isnan(results["a"]).all() and (results["b"] == 1).all()


@MODES
def test_float16_carrier_and_integers_on_gpu(graph):
    """What has no packed exchange goes over the host."""
    grads = [{"a": np.full(5, rank, np.float32)} for rank in range(hvd.size())]
    total = sum(range(hvd.size()))
    result = reduce_any(grads[hvd.rank()]["a"], APSCompressor(4, 3, transport="allreduce"), graph)
    assert result.numpy().tolist() == [total] * 5
    result = reduce_any(np.full(3, hvd.rank(), np.int32), APSCompressor(4, 3), graph)
    assert result.numpy().tolist() == [total] * 3
    assert not cuda_standin.counts()["launches"]


def reduce_any(x: np.ndarray, compressor: APSCompressor, graph: bool) -> tf.Tensor:
    with tf.device(GPU):
        tensor = tf.identity(tf.constant(x))

    def step(tensor):
        return hvd.allreduce(tensor, compression=compressor, op=hvd.Sum)

    return run(step, [tensor], graph)


@MODES
def test_without_cupy_gradients_are_copied_to_the_host(graph, monkeypatch):
    def no_module(name: str) -> None:
        raise ImportError(name)

    monkeypatch.undo()
    monkeypatch.setattr(devices, "gpus", lambda: [GPU])
    monkeypatch.setattr(devices, "import_module", no_module)
    devices.array_module.cache_clear()
    grads = make_gradients(SIZES, hvd.size())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tf.device(GPU):
            tensors = [tf.identity(tf.constant(x)) for x in grads[hvd.rank()].values()]
        compressor = APSCompressor(4, 3)

        def step(*tensors):
            return hvd.grouped_allreduce(list(tensors), compression=compressor)

        results = run(step, tensors, graph)
    devices.array_module.cache_clear()
    assert len([entry for entry in caught if "CuPy is not installed" in str(entry.message)]) == 1
    check(
        {name: result.numpy() for name, result in zip(grads[0], results)}, expected(grads, Format(4, 3), factor=AVERAGE)
    )
