"""The whole exchange on the CUDA launchers, driven through the stand-in for the device; oracle: the CPU kernels.

Gradients are written by the framework's stream, late, and results are read in it: an order that events do not enforce
gives wrong numbers in some of the seeds.
"""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cuda_standin
import numpy as np
import pytest

from horovod_aps.engine import exchange, layout
from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.reductions.gather import Gather
from horovod_aps.engine.reductions.owners import Owners
from horovod_aps.kernels import CpuKernels
from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.options import Options
from horovod_aps.tools.shapes import MODELS
from horovod_aps.transports.hosts import HostedTransport
from horovod_aps.transports.local import LocalTransport

SHAPES = ((1,), (7,), (33, 5), (4099,))
FRAMEWORK = 77
OPTIONS = [
    Options(4, 3),
    Options(3, 0, error_feedback=True),
    Options(5, 2, rounding="stochastic", stats=True),
    Options(4, 3, accumulate="kahan", error_feedback=True),
    Options(4, 3, overrides={"l2": "qsgd4"}, error_feedback=True),  # random bits for one layer only
]


def gradients(n_ranks: int, step: int, shapes: Any = SHAPES) -> list[list[np.ndarray]]:
    rng = np.random.default_rng([5, step])
    return [[rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(n_ranks)]


class OnCpu:
    """Tensors where the CPU kernels work."""

    def __init__(self) -> None:
        self.kernels = CpuKernels()

    def tensors(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [array.copy() for array in arrays]

    def address(self, tensor: np.ndarray) -> int:
        return tensor.ctypes.data

    def backward(self, tensors: list[np.ndarray], arrays: list[np.ndarray]) -> None:
        for tensor, array in zip(tensors, arrays):
            tensor[...] = array

    def results(self, tensors: list[np.ndarray]) -> list[np.ndarray]:
        return [tensor.copy() for tensor in tensors]


class OnGpu:
    """Tensors in the memory of the stand-in, of a framework that queues its work on a stream."""

    def __init__(self) -> None:
        self.kernels = CudaKernels(cuda_standin, stream=FRAMEWORK, block=32)

    def tensors(self, arrays: list[np.ndarray]) -> list[Any]:
        """Every second one begins where no vector can be loaded."""
        with cuda_standin.cuda.ExternalStream(FRAMEWORK):
            return [
                (memory := cuda_standin.cuda.alloc(array.nbytes + 4), array, memory.ptr + 4 * (i % 2))
                for i, array in enumerate(arrays)
            ]

    def address(self, tensor: Any) -> int:
        return tensor[2]

    def backward(self, tensors: list[Any], arrays: list[np.ndarray]) -> None:
        for (_, _, address), array in zip(tensors, arrays):
            content = array.tobytes()
            cuda_standin.enqueue(FRAMEWORK, _write(address, content))

    def results(self, tensors: list[Any]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for _, array, address in tensors:
            cuda_standin.enqueue(FRAMEWORK, _read(address, array, found))
        cuda_standin.cuda.ExternalStream(FRAMEWORK).synchronize()
        return found


def _write(address: int, content: bytes) -> Callable[[], None]:
    return lambda: ctypes.memmove(address, content, len(content)) and None


def _read(address: int, like: np.ndarray, found: list[np.ndarray]) -> Callable[[], None]:
    return lambda: found.append(np.frombuffer(ctypes.string_at(address, like.nbytes), like.dtype).reshape(like.shape))


def run(
    side: Any,
    n_ranks: int,
    options: Options,
    n_steps: int,
    exchanges: list[Exchange] | None = None,
    shapes: Any = SHAPES,
) -> tuple[list[np.ndarray], list[Exchange]]:
    """Results of `n_steps` exchanges in place, and the exchanges."""
    if exchanges is None:
        exchanges = [Exchange(side.kernels, one, options) for one in LocalTransport.world(n_ranks)]
    for one in exchanges:
        one.self_driven = True  # they share their kernels, so no other thread may look at any of them
    tensors = [side.tensors(rank) for rank in gradients(n_ranks, 0, shapes)]
    results = []
    for step in range(n_steps):
        layers = []
        for mine, arrays in zip(tensors, gradients(n_ranks, step, shapes)):
            side.backward(mine, arrays)
            layers.append(
                [
                    Layer(f"l{i}", array.shape, 0, side.address(tensor), side.address(tensor), 1 / n_ranks, tensor)
                    for i, (tensor, array) in enumerate(zip(mine, arrays))
                ]
            )
        local_allreduce(layers, options, side.kernels, exchanges)
        results += [result for mine in tensors for result in side.results(mine)]
    return results, exchanges


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cuda_exchange_equals_cpu(n_ranks: int, options: Options, seed: int) -> None:
    cuda_standin.reset(seed)
    on_cpu, cpu = run(OnCpu(), n_ranks, options, 3)
    on_gpu, gpu = run(OnGpu(), n_ranks, options, 3)
    assert [one.statistics.as_dict() for one in cpu] == [one.statistics.as_dict() for one in gpu]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    moved = cuda_standin.kernel_bytes()
    assert moved["read_pinned"] == moved["written_pinned"] == 0, "packed bytes cross PCIe inside kernels"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shards_of_nothing(options: Options) -> None:
    """Buckets of fewer elements than ranks, or of none."""
    cuda_standin.reset(0)
    options = options.replace(bucket_mb=1e-6)
    shapes = ((1,), (0,), (2,), (0, 3))
    on_cpu, cpu = run(OnCpu(), 4, options, 2, None, shapes)
    on_gpu, gpu = run(OnGpu(), 4, options, 2, None, shapes)
    assert [one.statistics.as_dict() for one in cpu] == [one.statistics.as_dict() for one in gpu]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_cuda_exchange_keeps_its_state() -> None:
    cuda_standin.reset(1)
    options = Options(3, 0, error_feedback=True)
    _, cpu = run(OnCpu(), 2, options, 2)
    _, gpu = run(OnGpu(), 2, options, 2)
    state = gpu[1].state()
    assert set(state["residuals"]) == set(cpu[1].residuals)
    gpu[0].load_state(state)
    for name, values in cpu[1].residuals.items():
        np.testing.assert_array_equal(gpu[0].kernels.to_host(gpu[0].residuals[name]), values)


class CudaAware(LocalTransport):
    """A network that takes messages where they lie, at once, as an MPI that knows CUDA does."""

    memory = "any"

    def transfer(self, outgoing: Any, incoming: Any, tag: int) -> Any:
        if all(isinstance(array, np.ndarray) for array in [*outgoing.values(), *incoming.values()]):
            return super().transfer(outgoing, incoming, tag)
        state, sent = cuda_standin._state, {}
        for rank, array in outgoing.items():
            found: list[bytes] = []
            state.opened(lambda array=array, found=found: found.append(ctypes.string_at(array.ptr, len(array))))
            sent[rank] = np.frombuffer(found[0], np.uint8)
        filled = {rank: np.zeros(len(array), np.uint8) for rank, array in incoming.items()}
        request = super().transfer(sent, filled, tag)

        class Received:
            def done(self) -> bool:
                if not request.done():
                    return False
                for rank, array in incoming.items():
                    state.opened(_write(array.ptr, filled[rank].tobytes()))
                return True

        return Received()


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_messages_go_straight_from_device_memory(n_ranks: int) -> None:
    options = OPTIONS[1]
    expected, _ = run(OnCpu(), n_ranks, options, 2)
    for seed in range(3):
        cuda_standin.reset(seed)
        side = OnGpu()
        exchanges = [Exchange(side.kernels, transport, options) for transport in CudaAware.world(n_ranks)]
        assert exchanges[0].way == "from device memory by MPI"
        found, _ = run(side, n_ranks, options, 2, exchanges)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(expected, found))


# ---- what a step of ResNet-50 asks of the device ----------------------------------------------------------

SHRINK = 256  # all sizes, so that the stand-in is quick; the number of layers and buckets is that of the model


class Rank:
    """One rank with kernels of its own, whose backward hands in layers one after the other."""

    def __init__(self, transport: LocalTransport, shapes: list[int]) -> None:
        self.side = OnGpu()
        self.exchange = Exchange(self.side.kernels, transport, Options(4, 3, bucket_mb=16 / SHRINK), overlap=True)
        self.exchange.any_thread = False
        self.arrays = [np.ones(n, np.float32) for n in shapes]
        self.tensors = self.side.tensors(self.arrays)
        self.size = transport.size

    def layers(self) -> list[Layer]:
        return [
            Layer(f"l{i}", array.shape, 0, tensor[2], tensor[2], 1 / self.size, tensor)
            for i, (tensor, array) in enumerate(zip(self.tensors, self.arrays))
        ]

    def backward(self, layers: list[Layer]) -> None:
        for layer, tensor, array in zip(layers, self.tensors, self.arrays):
            self.side.backward([tensor], [array])
            self.exchange.submit(layer)


@pytest.mark.parametrize(("n_ranks", "exactly", "most"), [(2, (69, 149, 110), 90), (8, (45, 110, 74), 250)])
def test_a_step_of_resnet50_waits_for_nothing(
    n_ranks: int, exactly: tuple[int, int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per rank and step: no blocking wait, `exactly` so many launches, events and waits of streams, and few copies.

    Tables that change from step to step are copied, how many depends on which buffers are free.
    """
    monkeypatch.setattr(layout, "PIECE", layout.PIECE // SHRINK)
    monkeypatch.setattr(layout, "FIRST", layout.FIRST // SHRINK)
    monkeypatch.setattr(exchange, "LOOK_SECONDS", 0.0)  # else a fast machine may have no look in all of backward
    cuda_standin.reset(4)
    shapes = [max(1, math.prod(shape) // SHRINK) for _, shape in MODELS["resnet50"]()]
    ranks = [Rank(transport, shapes) for transport in LocalTransport.world(n_ranks)]
    for step in range(3):
        cuda_standin.counts().clear()
        layers = [rank.layers() for rank in ranks]
        for rank, mine in zip(ranks, layers):
            rank.backward(mine)
        in_backward = cuda_standin.counts()["launches"]
        running = [rank.exchange.steps(mine) for rank, mine in zip(ranks, layers)]
        while running:
            running = [steps for steps in running if next(steps, None) is not None]
        for rank in ranks:
            rank.exchange.kernels.end()
        counts = cuda_standin.counts()
        if step:
            assert in_backward > 0, "nothing has begun in backward"
    assert counts["waits"] == 0
    assert tuple(counts[name] / n_ranks for name in ("launches", "events", "stream waits")) == exactly, counts
    assert counts["copies"] / n_ranks <= most, counts
    names = {name for name in counts if name.endswith("_wide_kernel")}
    assert not names
    results = ranks[0].side.results(ranks[0].tensors)
    assert all((result == 1).all() for result in results)


# ---- all-gather and reduce-scatter ----


def by_owner(side: Any, n_ranks: int, options: Options, kind: type[Owners]) -> list[list[np.ndarray]]:
    """What every rank gets of layers that have owners, in place."""
    exchanges = [Exchange(side.kernels, one, options, choose_reduction=kind) for one in LocalTransport.world(n_ranks)]
    for one in exchanges:
        one.self_driven = True
    grads = gradients(n_ranks, 1)
    tensors = [side.tensors(rank) for rank in grads]
    layers = []
    for mine, arrays in zip(tensors, grads):
        side.backward(mine, arrays)
        layers.append(
            [
                Layer(f"l{i}", array.shape, 0, side.address(tensor), side.address(tensor), 0.5, tensor)
                for i, (tensor, array) in enumerate(zip(mine, arrays))
            ]
        )
    local_allreduce(layers, options, side.kernels, exchanges)
    return [side.results(mine) for mine in tensors]


@pytest.mark.parametrize("kind", [Gather, Owners])
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize(
    "options", [Options(4, 3), Options(5, 2, rounding="stochastic")], ids=["nearest", "stochastic"]
)
def test_layers_with_owners(options: Options, n_ranks: int, kind: type[Owners]) -> None:
    """The stand-in has the bits of the CPU; a gathered layer is its owner's on all ranks, a scattered one the sum."""
    cuda_standin.reset(3)
    ours, theirs = (by_owner(side(), n_ranks, options, kind) for side in (OnGpu, OnCpu))
    grads = gradients(n_ranks, 1)
    for layer in range(len(SHAPES)):
        owner = layer % n_ranks
        exact = grads[owner][layer] if kind is Gather else sum(rank[layer] for rank in grads)
        for rank in range(n_ranks):
            if kind is Gather or rank == owner:
                assert np.array_equal(ours[rank][layer], theirs[rank][layer])
                assert np.array_equal(ours[rank][layer], ours[owner][layer])
                np.testing.assert_allclose(ours[rank][layer], 0.5 * exact, atol=0.6)


def test_memory_of_a_bucket_that_ranks_give_up_is_not_used_again_too_early(monkeypatch) -> None:
    """One rank takes another branch while backward goes on: gradients are still to be copied into that memory."""
    seen: list[bool] = []
    end_flight = Exchange._end_flight

    def watched(self: Exchange) -> None:
        for work in self._flight.works[self._flight.n_agreed :] if self._flight is not None else ():
            if not work.scanned._over:
                work.lease.end = lambda work=work: seen.append(work.scanned.done())
        end_flight(self)

    def goes_on(steps: Any) -> bool:
        try:
            return next(steps, None) is not None
        except ValueError:  # which tensors rank 3 has, and others have not
            return False

    monkeypatch.setattr(Exchange, "_end_flight", watched)
    cuda_standin.reset(0)
    options, shapes = Options(4, 3, bucket_mb=0.002), ((600,),) * 6
    sides = [OnGpu() for _ in range(4)]
    ranks = [
        Exchange(side.kernels, HostedTransport(one, "", host, by_messages=True), options, overlap=True)
        for side, one, host in zip(sides, LocalTransport.world(4), "aabb")
    ]
    tensors = [side.tensors(arrays) for side, arrays in zip(sides, gradients(4, 0, shapes))]
    for step in range(3):
        for i in range(6):
            if step == 2 and i == 5:
                for _ in range(3000):
                    cuda_standin.enqueue(FRAMEWORK, lambda: None)
            for number, (rank, side, mine, arrays) in enumerate(zip(ranks, sides, tensors, gradients(4, step, shapes))):
                rank.self_driven = True
                side.backward([mine[i]], [arrays[i]])
                name = "other" if (step, number, i) == (2, 3, 4) else f"l{i}"
                address = side.address(mine[i])
                rank.submit(Layer(name, arrays[i].shape, 0, address, address, 0.25, mine[i]))
                if step:
                    rank.look()
        running = [rank.steps(list(rank._pending.values()) if step == 2 else None) for rank in ranks]
        for _ in range(4000):
            running = [steps for steps in running if goes_on(steps)]
    assert seen and all(seen), "there was none, or one was given back too early"
    cuda_standin.drain_quietly()


def test_pinned_memory_of_transfers_outlives_the_exchange() -> None:
    """Somebody has dropped it in the middle of a step, and MPI has been told where to receive."""
    cuda_standin.reset(1)
    posted: list[weakref.ref[np.ndarray]] = []

    class Stuck(LocalTransport):
        def transfer(self, outgoing: Any, incoming: Any, tag: int) -> Any:
            posted.extend(weakref.ref(array) for array in incoming.values())
            return SimpleNamespace(done=lambda: False)

    sides = [OnGpu(), OnGpu()]
    ranks = [Exchange(side.kernels, one, Options(4, 3)) for side, one in zip(sides, Stuck.world(2))]
    held = []
    for rank, side, arrays in zip(ranks, sides, gradients(2, 0)):
        rank.self_driven = True
        held.append(side.tensors(arrays))
        side.backward(held[-1], arrays)
        places = [side.address(tensor) for tensor in held[-1]]
        rank.submit(*(Layer(f"l{i}", x.shape, 0, at, at, 0.5) for i, (x, at) in enumerate(zip(arrays, places))))
    running = [rank.steps() for rank in ranks]
    while len(posted) < 2:
        for steps in running:
            next(steps)
    for rank in ranks:
        rank.close()
    del ranks, rank, running, steps, sides, side
    gc.collect()
    assert all(array() is not None for array in posted)
