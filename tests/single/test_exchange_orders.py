"""Ranks that submit and wait in any order, over emulated ranks. Oracle: the simulation of the reference.

Several exchanges, as several compressors or process sets have them, live on the same ranks. A rank does what a program
does: hand in layers, wait for results; whoever waits drives its other exchanges, as `progress.run` does. Which rank
moves next is drawn at random. The progress thread is kept out, so that a failure can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from exchange_oracle import assert_same_bits, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Format

from horovod_aps.engine import progress
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport

MAX_MOVES = 3_000  # far more than any of these needs
BUCKET_MB = 0.0001  # several buckets of few layers


@pytest.fixture(autouse=True)
def no_progress_thread(monkeypatch):
    monkeypatch.setattr(progress, "add", lambda exchange: None)


class World:
    """Some exchanges on some ranks, and everything that was submitted to them."""

    def __init__(self, size: int, n_exchanges: int, rng: random.Random, overlap: bool = True) -> None:
        self.size, self.rng = size, rng
        options = Options(4, 3, bucket_mb=BUCKET_MB)
        by_exchange = [
            [Exchange(CpuKernels(), transport, options, overlap=overlap) for transport in LocalTransport.world(size)]
            for _ in range(n_exchanges)
        ]
        self.of_rank = [[exchanges[rank] for exchanges in by_exchange] for rank in range(size)]
        self.inputs: dict[tuple[int, str], dict[int, np.ndarray]] = {}  # by exchange and name, then by rank
        self.outputs: dict[tuple[int, str], dict[int, np.ndarray]] = {}
        self.layers: dict[tuple[int, str], dict[int, Layer]] = {}

    def submit(self, rank: int, number: int, name: str, n: int) -> Layer:
        draw = np.random.default_rng(self.rng.randrange(2**32))
        x, out = draw.standard_normal(n).astype(np.float32), np.full(n, 77, np.float32)
        layer = Layer(name, x.shape, 0, x.ctypes.data, out.ctypes.data, 0.5, (x, out))
        for table, entry in ((self.inputs, x), (self.outputs, out), (self.layers, layer)):
            table.setdefault((number, name), {})[rank] = entry  # type: ignore[attr-defined]
        self.of_rank[rank][number].submit(layer)
        return layer

    def wait(self, rank: int, number: int, layers: list[Layer] | None) -> Iterator[None]:
        """`Exchange.wait` by hand: every other exchange of the rank is driven in between."""
        idle = 0
        for moved in self.of_rank[rank][number].steps(layers):
            for other, exchange in enumerate(self.of_rank[rank]):
                if not moved and other != number:
                    moved |= exchange.drive(impatient=idle > 20)
            idle = 0 if moved else idle + 1
            yield

    def run(self, programs: dict[int, Iterator[None]]) -> None:
        """Move ranks in random order until all programs have ended; those that have are driven, as by the thread."""
        running = dict(programs)
        for _ in range(MAX_MOVES):
            if not running:
                return
            rank = self.rng.randrange(self.size)
            for _ in range(self.rng.choice([1, 1, 1, 2, 30])):
                if rank not in running:
                    for exchange in self.of_rank[rank]:
                        exchange.drive(impatient=self.rng.random() < 0.1)
                elif next(running[rank], "end") == "end":
                    del running[rank]
        raise AssertionError(f"ranks {sorted(running)} wait for ever")

    def check(self) -> None:
        """What all ranks have submitted is as simulated, the rest is untouched."""
        for key, layers in self.layers.items():
            done = [layer.done for layer in layers.values()]
            if len(layers) < self.size:
                assert not any(done), f"{key} was submitted on {sorted(layers)} only"
                continue
            assert all(done), key
            grads = [{key[1]: self.inputs[key][rank]} for rank in range(self.size)]
            wanted = expected(grads, Format(4, 3), factor=0.5)[key[1]]
            for rank in range(self.size):
                assert_same_bits(self.outputs[key][rank], wanted, f"{key} on rank {rank}")
        for table in (self.inputs, self.outputs, self.layers):
            table.clear()  # type: ignore[attr-defined]


SEEDS = st.integers(0, 2**32)


@given(st.integers(2, 4), st.lists(st.sampled_from([1, 7, 16, 30]), min_size=1, max_size=8), st.booleans(), SEEDS)
@settings(max_examples=60, deadline=None)
def test_one_exchange_any_order_of_submission(size, sizes, overlap, seed):
    """Several steps of the same batch, each in another order; sometimes a rank waits for a part in between."""
    rng = random.Random(seed)
    world = World(size, 1, rng, overlap)
    batch = {f"layer{i}": n for i, n in enumerate(sizes)}

    def program(rank: int) -> Iterator[None]:
        for _ in range(4):
            names = list(batch)
            rng.shuffle(names)
            for name in names:
                world.submit(rank, 0, name, batch[name])
                if rng.random() < 0.3:
                    yield
            yield from world.wait(rank, 0, None)
            yield "step"  # type: ignore[misc]

    programs = {rank: program(rank) for rank in range(size)}
    for _ in range(4):
        world.run({rank: until_step(one) for rank, one in programs.items()})
        world.check()
    for exchange in (exchanges[0] for exchanges in world.of_rank):
        assert exchange.is_idle and exchange.step_number == world.of_rank[0][0].step_number


def until_step(program: Iterator[None]) -> Iterator[None]:
    """A program up to its next mark."""
    for mark in program:
        if mark == "step":
            return
        yield


@given(st.integers(2, 4), st.integers(1, 3), st.lists(st.sampled_from([1, 5, 20]), min_size=2, max_size=6), SEEDS)
@settings(max_examples=60, deadline=None)
def test_several_exchanges_waited_for_in_any_order(size, n_exchanges, sizes, seed):
    """Ranks wait for single layers of any exchange, in orders of their own."""
    rng = random.Random(seed)
    world = World(size, n_exchanges, rng)
    places = {f"layer{i}": rng.randrange(n_exchanges) for i in range(len(sizes))}

    def program(rank: int) -> Iterator[None]:
        for _ in range(3):
            names = list(places)
            rng.shuffle(names)
            held = []
            for name in names:
                held.append((places[name], world.submit(rank, places[name], name, sizes[int(name[5:])])))
                if rng.random() < 0.3:
                    yield
            rng.shuffle(held)
            for number, layer in held:
                yield from world.wait(rank, number, [layer])
            yield "step"  # type: ignore[misc]

    programs = {rank: program(rank) for rank in range(size)}
    for _ in range(3):
        world.run({rank: until_step(one) for rank, one in programs.items()})
        world.check()


@given(st.integers(2, 4), st.lists(st.sampled_from([1, 5, 20]), min_size=2, max_size=6), st.booleans(), SEEDS)
@settings(max_examples=60, deadline=None)
def test_layers_that_a_rank_lacks_stay_pending_and_come_later(size, sizes, known, seed):
    """Each rank waits for what all hold; what some rank lacks is pending, and finishes once it has come.

    With `known`, whole batches have been seen before, so that ranks guess what will come, and are wrong.
    """
    rng = random.Random(seed)
    world = World(size, 1, rng)
    batch = {f"layer{i}": n for i, n in enumerate(sizes)}
    if known:
        for rank in range(size):
            for name, n in batch.items():
                world.submit(rank, 0, name, n)
        world.run({rank: world.wait(rank, 0, None) for rank in range(size)})
        world.check()
    holders = {name: {rank for rank in range(size) if rng.random() < 0.7} for name in batch}
    common = {name for name in batch if len(holders[name]) == size}
    late = [(rank, name) for name in batch for rank in range(size) if rank not in holders[name]]

    def first(rank: int) -> Iterator[None]:
        names = [name for name in batch if rank in holders[name]]
        rng.shuffle(names)
        for name in names:
            world.submit(rank, 0, name, batch[name])
            if rng.random() < 0.3:
                yield
        wanted = [world.layers[0, name][rank] for name in names if name in common]
        if wanted:
            yield from world.wait(rank, 0, wanted)

    world.run({rank: first(rank) for rank in range(size)})
    for name in batch:
        layers = world.layers.get((0, name), {})
        assert all(layer.done == (name in common) and layer.error is None for layer in layers.values())

    def second(rank: int) -> Iterator[None]:
        for where, name in late:
            if where == rank:
                world.submit(rank, 0, name, batch[name])
                if rng.random() < 0.3:
                    yield
        yield from world.wait(rank, 0, None)

    world.run({rank: second(rank) for rank in range(size)})
    world.check()
    assert all(exchanges[0].is_idle for exchanges in world.of_rank)


class Counter:
    """Tickets of one rank, as far as others must open them too; nobody is ever late enough for a nudge."""

    def __init__(self) -> None:
        self.number = 0

    def open_until(self, number: int) -> None:
        self.number = max(self.number, number)

    def overdue(self, asked: bool) -> bool:
        return False


@given(st.integers(2, 4), st.integers(1, 4), SEEDS)
@settings(max_examples=60, deadline=None)
def test_ticket_of_a_late_layer_is_open_everywhere_when_the_layer_is_reduced(size, n_layers, seed):
    """Horovod waits for it on the rank that was late, where the others may never hand in anything again."""
    rng = random.Random(seed)
    world = World(size, 1, rng)
    counters = [Counter() for _ in range(size)]
    for rank, counter in enumerate(counters):
        world.of_rank[rank][0].tickets = counter
    names = [f"layer{i}" for i in range(n_layers)]

    def program(rank: int) -> Iterator[None]:
        for _ in range(3):
            counters[rank].number += 1
            layers = [world.submit(rank, 0, name, 7) for name in ["first", *names] if rank > 0 or name != "layer0"]
            yield from world.wait(rank, 0, layers[:1])
            if rank == 0:
                counters[rank].number += 1
                layers.append(world.submit(rank, 0, "layer0", 7))
            yield from world.wait(rank, 0, layers)
            assert all(counter.number >= counters[0].number for counter in counters) or rank > 0
            yield "step"  # type: ignore[misc]

    programs = {rank: program(rank) for rank in range(size)}
    for step in range(3):
        world.run({rank: until_step(one) for rank, one in programs.items()})
        world.check()
        assert {counter.number for counter in counters} == {2 * step + 2}
