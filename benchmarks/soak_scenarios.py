"""What `soak.py` does over and over on every rank: random scenarios, drawn alike on all ranks from one seed.

Every rank knows every rank's inputs, so each checks its own results bit for bit. Oracle: the same exchange among
emulated ranks in this process, tensor by tensor. Inputs span few binades, so that a result does not depend on how a
batch is cut into buckets and shards, and the oracle need not know what travelled together. Where it would matter anyway
(error feedback on more than two ranks, float16 sums in Horovod's order) inputs are -1, 0 and 1, which are exact.
"""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops

from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.torch import APSCompressor
from horovod_aps.transports.hosts import HostedTransport
from horovod_aps.transports.local import LocalTransport

POOL: list[dict[str, Any]] = [
    {"e": 4, "m": 3},
    {"e": 5, "m": 2, "bucket_mb": 0.01},
    {"e": 3, "m": 0},
    {"e": 4, "m": 3, "accumulate": "kahan", "bucket_mb": 0.01},
    {"e": 4, "m": 3, "transport": "allreduce"},
    {"e": 5, "m": 2, "error_feedback": True, "bucket_mb": 0.01},
]
SIZES = (1, 7, 8, 9, 64, 1000, 1023, 1025, 4096, 10_000, 65_537)
PRESCALES = (1.0, 0.5, 0.3, 2.0, 1e-3, 7.0, 1.25)
DELAYS = (0.0, 0.0, 0.0, 0.0, 0.001, 0.01, 0.05)  # seconds
N_STEPS = 4


class Difference(AssertionError):
    """A result that is not what it must be."""


class Model:
    """Parameters whose gradients are whatever the scenario says, under a `DistributedOptimizer`."""

    def __init__(self, prefix: str, sizes: Sequence[int], compression: Any) -> None:
        self.names = [f"{prefix}.{i}" for i in range(len(sizes))]
        self.parameters = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
        self.wanted: dict[str, np.ndarray] = {}
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=0.0),
            compression=compression,
            named_parameters=list(zip(self.names, self.parameters)),
        )

    def backward(self, i: int, gradient: np.ndarray) -> None:
        """Let parameter i's gradient become ready."""
        (self.parameters[i] * torch.from_numpy(gradient)).sum().backward()


class Soak:
    """The compressors, random numbers and oracles of one launch."""

    def __init__(self, seed: int, stock: bool = False) -> None:
        self.seed, self.stock = seed, stock
        self.compressors = [hvd.Compression.none if stock else APSCompressor(**options) for options in POOL]
        self.rank, self.size = hvd.rank(), hvd.size()
        self.n_results = 0
        self.pairs: set[tuple[str, int]] = set()  # of scenario and compressor, that have occurred
        self.alone: list[Any] = []  # a process set for each rank, if process sets are used
        self.hosts = ""  # a letter for each rank's host, in scenarios where there are several
        self.hosted: dict[int, Any] = {}  # the compressors of such scenarios
        self._kernels = CpuKernels()
        self._residuals: dict[tuple[int, str], Any] = {}
        self._draws, self._name = 0, ""

    def run(self, name: str, index: int) -> None:
        """One scenario, the `index`th of this launch."""
        shared = random.Random(f"{self.seed}/{index}")
        self.key = f"{self.seed}/{index}"
        self.own = random.Random(f"{self.key}/{self.rank}")
        self._draws, self._name = 0, name
        SCENARIOS[name](self, shared)
        if mpi_ops._handle_map:
            raise Difference(f"{len(mpi_ops._handle_map)} Horovod handles are left")

    # ---- inputs and oracles -------------------------------------------------------------------------------

    def pause(self) -> None:
        """Let other ranks get ahead."""
        time.sleep(self.own.choice(DELAYS))

    def sizes(self, scenario: str, which: int) -> tuple[str, list[int]]:
        """A compressor's batch in this scenario: its name, and the sizes of its tensors; as in training, always one."""
        draw = random.Random(f"{scenario}/{which}")
        return f"{scenario}.{which}", [draw.choice(SIZES) for _ in range(draw.randint(2, 9))]

    def inputs(self, which: int, n: int, ranks: Sequence[int], missing: Sequence[int] = ()) -> list[np.ndarray]:
        """A tensor of each of the ranks, zero on some; call it in the same order on all ranks."""
        options = POOL[which]
        self.pairs.add((self._name, which))
        self._draws += 1
        exact = options.get("transport") == "allreduce" or ("error_feedback" in options and len(ranks) != 2)
        found = []
        for rank in ranks:
            rng = np.random.default_rng([zlib.crc32(f"{self.key}/{rank}".encode()), self._draws])
            if exact:
                values = rng.integers(-1, 2, n).astype(np.float32)
            else:
                values = np.float32(rng.uniform(0.25, 1, n)) * np.float32(rng.choice([-1, 1], n))
            values *= np.float32(2.0 ** (self._draws % 40 - 20))
            found.append(np.zeros_like(values) if rank in missing else values)
        return found

    def reduced(self, which: int, name: str, inputs: list[np.ndarray], factor: float) -> np.ndarray:
        """What all ranks must get."""
        options = POOL[which]
        if self.stock or options.get("transport") == "allreduce":
            return (np.sum(inputs, axis=0, dtype=np.float64) * factor).astype(np.float32)
        if len(inputs) == 1:
            return inputs[0] * np.float32(factor)
        outputs = [np.empty_like(x) for x in inputs]
        layers = [
            [Layer(name, x.shape, 0, x.ctypes.data, out.ctypes.data, factor, x)] for x, out in zip(inputs, outputs)
        ]
        exchanges = self._residuals.get((which, name)) or self._emulated_hosts(Options(**options))
        exchanges = local_allreduce(layers, Options(**options), self._kernels, exchanges)
        if "error_feedback" in options:
            self._residuals[which, name] = exchanges
        return outputs[0]

    def _emulated_hosts(self, options: Options) -> list[Exchange] | None:
        """Emulated ranks on the scenario's hosts, if it has some."""
        worlds = zip(LocalTransport.world(len(self.hosts)), self.hosts) if self.hosts else ()
        return [Exchange(self._kernels, HostedTransport(one, "", host), options) for one, host in worlds] or None

    def residuals(self) -> dict[Any, list[dict[str, Any]]]:
        """The states of all oracles with error feedback."""
        return {key: [exchange.state() for exchange in exchanges] for key, exchanges in self._residuals.items()}

    def load_residuals(self, states: dict[Any, list[dict[str, Any]]]) -> None:
        """Go on from `residuals()`; an oracle that is newer forgets."""
        self._residuals = {key: self._residuals[key] for key in states}
        for key, per_rank in states.items():
            for exchange, state in zip(self._residuals[key], per_rank):
                exchange.load_state(state)

    def check(self, result: torch.Tensor, wanted: np.ndarray, what: str) -> None:
        """Compare bit for bit; stock Horovod, which adds in its own order, to float32's precision."""
        got = result.detach().numpy()
        if self.stock:
            good = np.allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max(initial=0)))
        else:
            good = got.shape == wanted.shape and np.array_equal(got.view(np.int32), wanted.view(np.int32))
        self.n_results += 1
        if not good:
            wrong = np.flatnonzero(got != wanted)
            at = int(wrong[0]) if wrong.size else -1
            raise Difference(
                f"{what}: {wrong.size} of {wanted.size} elements differ, the first at {at}: "
                f"{got.flat[at]!r} instead of {wanted.flat[at]!r}"
            )

    def level(self) -> None:
        """Let all ranks have made the same number of calls.

        Horovod, stock as well, names a tensor without a name after their number, which process sets change on some.
        """
        handle = hvd.allreduce_async_(torch.zeros(1), name="soak.level")
        hvd.synchronize(handle)
        for _ in range(max(hvd.allgather_object(handle, name="soak.levels")) - handle):
            hvd.synchronize(hvd.allreduce_async_(torch.zeros(1), name="soak.pad", process_set=self.alone[self.rank]))

    # ---- parts of scenarios -------------------------------------------------------------------------------

    def start(self, model: Model, which: int, shared: random.Random, lacking: str) -> list[Callable[[], None]]:
        """Draw a step's gradients; returns this rank's backward calls, and keeps what must come out of them.

        `lacking`: "" no rank lacks a gradient, "some" ranks lack some, "one" rank may lack all.
        """
        everyone = range(self.size)
        calls = []
        idle = shared.randrange(self.size) if lacking == "one" and shared.random() < 0.5 else -1
        for i, name in enumerate(model.names):
            missing = [rank for rank in everyone if lacking and shared.random() < 0.15] + [idle]
            given = self.inputs(which, model.parameters[i].numel(), everyone, missing)
            model.wanted[name] = self.reduced(which, name, given, 1.0 / self.size)
            if self.rank not in missing:
                calls.append(lambda i=i, x=given[self.rank]: model.backward(i, x))
        self.own.shuffle(calls)
        return calls

    def finish(self, model: Model) -> None:
        """Step, and compare the gradients that the optimizer saw."""
        model.optimizer.step()
        for name, parameter in zip(model.names, model.parameters):
            assert parameter.grad is not None
            self.check(parameter.grad, model.wanted[name], name)
        model.optimizer.zero_grad()

    def call(self, calls: Sequence[Callable[[], None]]) -> None:
        """One after the other, with pauses."""
        for call in calls:
            self.pause()
            call()


# ---- scenarios --------------------------------------------------------------------------------------------


def groups(soak: Soak, shared: random.Random) -> None:
    """Grouped all-reduces of floats and integers, with scale factors that change in every step."""
    for _ in range(N_STEPS):
        which = shared.randrange(len(POOL))
        prefix, sizes = soak.sizes("groups", which)
        scale, op = shared.choice(PRESCALES), shared.choice([hvd.Average, hvd.Sum])
        factor = scale / (soak.size if op == hvd.Average else 1)
        tensors: list[torch.Tensor] = []
        wanted: list[np.ndarray] = []
        draw = random.Random(f"{prefix}/kinds")
        for i, n in enumerate(sizes):
            if draw.random() < 0.3 and op == hvd.Sum and scale == 1.0:  # integers only where Horovod is exact, too
                values = [np.arange(n, dtype=np.int64) % 97 + rank * i for rank in range(soak.size)]
                tensors.append(torch.from_numpy(values[soak.rank]))
                wanted.append(np.sum(values, axis=0))
                continue
            given = soak.inputs(which, n, range(soak.size))
            tensors.append(torch.from_numpy(given[soak.rank].copy()))
            wanted.append(soak.reduced(which, f"{prefix}.{op}.{i}", given, factor))
        soak.pause()
        results = hvd.grouped_allreduce(
            tensors, name=f"{prefix}.{op}", op=op, prescale_factor=scale, compression=soak.compressors[which]
        )
        for i, (result, values) in enumerate(zip(results, wanted)):
            if values.dtype == np.int64:
                if result.tolist() != values.tolist():
                    raise Difference(f"{prefix}.{i}: integers differ")
            else:
                soak.check(result, values, f"{prefix}.{i} of {POOL[which]}, op {op}, factor {factor}")


def orders(soak: Soak, shared: random.Random) -> None:
    """Gradients that become ready in another order on every rank, late, or not at all."""
    which = shared.randrange(len(POOL))
    prefix, sizes = soak.sizes("orders", which)
    model = Model(prefix, sizes, soak.compressors[which])
    for _ in range(N_STEPS):
        soak.call(soak.start(model, which, shared, "some"))
        soak.finish(model)


def idle(soak: Soak, shared: random.Random) -> None:
    """A rank without any gradient, which meets the others in a named all-reduce of the loss before its step."""
    which = shared.randrange(len(POOL))
    prefix, sizes = soak.sizes("idle", which)
    model = Model(prefix, sizes, soak.compressors[which])
    for _ in range(N_STEPS):
        soak.call(soak.start(model, which, shared, "one"))
        loss = hvd.allreduce(torch.full((3,), float(soak.rank)), op=hvd.Sum, name="soak.loss")
        soak.check(loss, np.full(3, sum(range(soak.size)), np.float32), "loss")
        soak.finish(model)


def two_optimizers(soak: Soak, shared: random.Random) -> None:
    """Backward passes of two models interleaved at random, their steps in another order on every rank.

    Or ranks lack gradients, and steps are in one order: what is missing comes with the step, so that stock Horovod
    itself would wait for ever otherwise.
    """
    pair = shared.sample(range(len(POOL)), 2)
    models = []
    for k, which in enumerate(pair):
        prefix, sizes = soak.sizes(f"two.{k}", which)
        models.append(Model(prefix, sizes, soak.compressors[which]))
    for _ in range(N_STEPS):
        lacking, order = shared.choice(["", "some"]), shared.sample(models, 2)
        calls = [call for model, which in zip(models, pair) for call in soak.start(model, which, shared, lacking)]
        soak.own.shuffle(calls)
        soak.call(calls)
        for model in order if lacking else soak.own.sample(models, 2):
            soak.pause()
            soak.finish(model)


def one_compressor(soak: Soak, shared: random.Random) -> None:
    """As `two_optimizers`, but with one compressor for both models; no rank lacks a gradient."""
    which = shared.randrange(len(POOL))
    models = [
        Model(prefix, sizes, soak.compressors[which])
        for prefix, sizes in (soak.sizes(f"same.{k}", which) for k in range(2))
    ]
    for _ in range(N_STEPS):
        calls = [call for model in models for call in soak.start(model, which, shared, "")]
        soak.own.shuffle(calls)
        soak.call(calls)
        for model in soak.own.sample(models, 2):
            soak.pause()
            soak.finish(model)


def state(soak: Soak, shared: random.Random) -> None:
    """A state that is loaded between backward and step counts from the next step on, and overwrites nobody's memory."""
    which = len(POOL) - 1
    prefix, sizes = soak.sizes("state", which)
    compressor = soak.compressors[which]
    model = Model(prefix, sizes, compressor)
    for _ in range(N_STEPS):
        saved = None if soak.stock else compressor.state_dict()
        oracles = soak.residuals()
        soak.call(soak.start(model, which, shared, ""))
        strangers: list[np.ndarray] = []
        if saved is not None:
            compressor.load_state_dict(saved)
            # Arrays that may get the memory of the residuals that were replaced.
            strangers = [np.full(n, 7, np.float32) for n in sizes for _ in range(3)]
        soak.pause()
        soak.finish(model)
        if any((stranger != 7).any() for stranger in strangers):
            raise Difference(f"{prefix}: memory that is not the compressor's was overwritten")
        soak.load_residuals(oracles)


def metric(soak: Soak, shared: random.Random) -> None:
    """A metric goes through the same compressor between backward and step, while a rank lacks a gradient."""
    # Not through Horovod's own all-reduce, which waits for what is not begun (docs/sharp-bits.md).
    which = shared.choice([i for i, options in enumerate(POOL) if options.get("transport") != "allreduce"])
    prefix, sizes = soak.sizes("metric", which)
    model = Model(prefix, sizes, soak.compressors[which])
    for _ in range(N_STEPS):
        calls = soak.start(model, which, shared, "some")
        given = soak.inputs(which, 5, range(soak.size))
        wanted = soak.reduced(which, "soak.metric", given, 1.0 / soak.size)
        soak.call(calls)
        result = hvd.allreduce(
            torch.from_numpy(given[soak.rank].copy()), name="soak.metric", compression=soak.compressors[which]
        )
        soak.check(result, wanted, "metric")
        soak.finish(model)


def unnamed(soak: Soak, shared: random.Random) -> None:
    """All-reduces without a name, stock and compressed, between backward and step."""
    which = shared.randrange(len(POOL) - 1)  # error feedback wants names
    prefix, sizes = soak.sizes("unnamed", which)
    model = Model(prefix, sizes, soak.compressors[which])
    for _ in range(N_STEPS):
        calls = soak.start(model, which, shared, "")
        given = soak.inputs(which, 5, range(soak.size))
        wanted = soak.reduced(which, "unnamed", given, 1.0)
        soak.call(calls)
        ranks = hvd.allreduce(torch.full((3,), float(soak.rank)), op=hvd.Sum)
        soak.check(ranks, np.full(3, sum(range(soak.size)), np.float32), "without a name")
        if shared.random() < 0.5:
            result = hvd.allreduce(
                torch.from_numpy(given[soak.rank].copy()), op=hvd.Sum, compression=soak.compressors[which]
            )
            soak.check(result, wanted, "without a name, compressed")
        soak.finish(model)


def _process_sets(soak: Soak, shared: random.Random, in_turn: bool) -> None:
    """Overlapping process sets come and go; their results are taken set by set, or in any order."""
    which = shared.randrange(len(POOL) - 1)
    if not soak.alone:
        soak.alone = [hvd.add_process_set([rank]) for rank in range(soak.size)]
    chosen: list[list[int]] = []
    for _ in range(shared.randint(1, 3)):
        members = sorted(shared.sample(range(soak.size), shared.randint(1, soak.size - 1)))
        if members not in chosen:
            chosen.append(members)
    sets = [hvd.add_process_set(members) if len(members) > 1 else soak.alone[members[0]] for members in chosen]
    compressor = soak.compressors[which]
    for _ in range(N_STEPS):
        waiting: list[tuple[int, Any, np.ndarray, str]] = []
        for members, process_set in zip(chosen, sets):
            for i in range(shared.randint(1, 3)):
                given = soak.inputs(which, SIZES[i + 4], members)
                name = f"soak.set.{'-'.join(map(str, members))}.{i}"
                if soak.rank not in members:
                    continue
                wanted = soak.reduced(which, name, given, 1.0 / len(members))
                tensor, context = compressor.compress(torch.from_numpy(given[members.index(soak.rank)].copy()))
                soak.pause()
                handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Average, process_set=process_set)
                waiting.append((handle, (tensor, context), wanted, name))
            if in_turn:
                _take(soak, compressor, waiting)
        soak.own.shuffle(waiting)
        _take(soak, compressor, waiting)
    for members, process_set in zip(chosen, sets):
        if len(members) > 1:
            hvd.remove_process_set(process_set)
    soak.level()


def _take(soak: Soak, compressor: Any, waiting: list[tuple[int, Any, np.ndarray, str]]) -> None:
    for handle, (tensor, context), wanted, name in waiting:
        output = hvd.synchronize(handle)
        soak.check(compressor.decompress(tensor if output is None else output, context), wanted, name)
    waiting.clear()


def process_sets(soak: Soak, shared: random.Random) -> None:
    """Overlapping process sets come and go; each one's results are taken before the next one starts."""
    _process_sets(soak, shared, in_turn=True)


def crossed_sets(soak: Soak, shared: random.Random) -> None:
    """Everything is submitted to all process sets, then taken in another order on every rank."""
    _process_sets(soak, shared, in_turn=False)


def two_levels(soak: Soak, shared: random.Random) -> None:
    """As `orders`, with ranks that count to two hosts: in two levels on 4 ranks, flat where hosts have unequal numbers.

    A metric comes in between. Compressors ask for their host when they first meet, and keep it.
    """
    which = shared.choice([i for i, options in enumerate(POOL) if options.get("transport") != "allreduce"])
    ranks = range(soak.size)
    soak.hosts = "".join("ab"[rank % 2 if which % 2 else 2 * rank // soak.size] for rank in ranks)
    os.environ["HOROVOD_APS_HOST"] = soak.hosts[soak.rank]
    try:
        if which not in soak.hosted:
            soak.hosted[which] = hvd.Compression.none if soak.stock else APSCompressor(**POOL[which])
        compressor = soak.hosted[which]
        prefix, sizes = soak.sizes("two_levels", which)
        model = Model(prefix, sizes, compressor)
        for _ in range(N_STEPS):
            calls = soak.start(model, which, shared, "some")
            given = soak.inputs(which, 1025, ranks)
            wanted = soak.reduced(which, "soak.hosted", given, 1.0 / soak.size)
            soak.call(calls)
            result = hvd.allreduce(
                torch.from_numpy(given[soak.rank].copy()), name="soak.hosted", compression=compressor
            )
            soak.check(result, wanted, "metric")
            soak.finish(model)
        even = soak.size > 2 and soak.hosts.count("a") == soak.hosts.count("b")
        if not soak.stock and even != compressor.stats()["hierarchy"].startswith("two-level"):
            raise Difference(f"hosts {soak.hosts}: the way is {compressor.stats()['hierarchy']}")
    finally:
        soak.hosts = ""
        del os.environ["HOROVOD_APS_HOST"]


SCENARIOS: dict[str, Callable[[Soak, random.Random], None]] = {
    scenario.__name__: scenario
    for scenario in (
        groups,
        orders,
        idle,
        two_optimizers,
        one_compressor,
        state,
        metric,
        unnamed,
        process_sets,
        crossed_sets,
        two_levels,
    )
}
