"""The two-level reduction among emulated ranks: the real exchange and real shared memory, hosts by name only.

Oracle: float32 sums of each host in the order of its ranks, then the NumPy simulation of an exchange among the hosts.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from exchange_oracle import SIZES, assert_same_bits, check, make_gradients, reduce_all
from exchange_oracle import expected as expected_among
from exchange_oracle import hosted_exchanges as exchanges
from reference import Format

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import shards_among
from horovod_aps.engine.reductions import two_level
from horovod_aps.errors import LostPeer
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports import hosts as hosts_module
from horovod_aps.transports.hosts import HostedTransport, group, why_not
from horovod_aps.transports.local import LocalTransport
from horovod_aps.transports.memory import WRITTEN, HostMemory, Need, Room

LAYOUTS = [(2, 2), (2, 4), (2, 3), (3, 2), (4, 2)]


def names_of(n_hosts: int, n_places: int) -> list[str]:
    return [f"host{i}" for i in range(n_hosts) for _ in range(n_places)]


def host_sums(grads, names: list[str]) -> list[dict[str, np.ndarray]]:
    sums = []
    for ranks in group(names):
        sums.append({})
        for name in grads[0]:
            total = grads[ranks[0]][name].astype(np.float32)
            for rank in ranks[1:]:
                total = total + grads[rank][name].astype(np.float32)
            sums[-1][name] = total
    return sums


def expected(grads, names: list[str], fmt, mode: str, bucket_mb: float) -> dict[str, np.ndarray]:
    """What every rank gets of an average."""
    n_hosts = len(set(names))
    n_shards = len(names) // n_hosts * shards_among(n_hosts)
    sums = host_sums(grads, names)
    results = expected_among(sums, fmt, factor=1 / len(names), mode=mode, bucket_mb=bucket_mb, n_shards=n_shards)
    return {name: x.astype(grads[0][name].dtype) for name, x in results.items()}


@pytest.fixture(params=[1 << 20, 64], ids=["one piece", "many pieces"])
def piece(request, monkeypatch) -> None:
    """Long segments of the own shard, which are not copied, are those of 32 elements here."""
    monkeypatch.setattr(two_level, "PIECE", request.param)
    monkeypatch.setattr(two_level, "DIRECT", 32)


@pytest.mark.parametrize("bucket_mb", [16.0, 0.002], ids=["one bucket", "several"])
@pytest.mark.parametrize("accumulate", ["float32", "format", "kahan"])
@pytest.mark.parametrize("n_hosts, n_places", LAYOUTS)
def test_equals_simulation(n_hosts: int, n_places: int, accumulate: str, bucket_mb: float, piece: None) -> None:
    names = names_of(n_hosts, n_places)
    grads = make_gradients(SIZES, len(names))
    grads[1]["layer3"][2] = np.nan
    grads[-1]["layer4"][0] = np.inf
    ranks = exchanges(names, Options(4, 3, accumulate=accumulate, bucket_mb=bucket_mb))
    wanted = expected(grads, names, Format(4, 3), accumulate, bucket_mb)
    for _ in range(3):
        for out in reduce_all(grads, ranks):
            for name, x in out.items():
                assert_same_bits(x, wanted[name], name)
    assert all(rank.transport.hosts.room is not None for rank in ranks)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients(dtype: str) -> None:
    names = names_of(2, 2)
    grads = make_gradients((5, 1000), 4, dtype)
    wanted = expected(grads, names, Format(4, 3), "float32", 16.0)
    for out in reduce_all(grads, exchanges(names, Options(4, 3))):
        for name, x in out.items():
            assert x.dtype == grads[0][name].dtype
            assert_same_bits(x, wanted[name], name)


def test_hybrid_precision_and_interleaved_hosts() -> None:
    """Ranks of a host need not be neighbours."""
    names = ["a", "b", "b", "a"]
    grads = make_gradients((64, 1000, 3), 4)
    options = Options(4, 3, overrides={"layer0": "float32", "layer2": (3, 0)})
    formats = {"layer0": None, "layer1": Format(4, 3), "layer2": Format(3, 0)}
    wanted = expected(grads, names, formats, "float32", 16.0)
    for out in reduce_all(grads, exchanges(names, options)):
        for name, x in out.items():
            assert_same_bits(x, wanted[name], name)


@pytest.mark.parametrize("accumulate", ["float32", "kahan"])
@pytest.mark.parametrize("n_hosts, n_places", [(2, 2), (3, 2)])
def test_error_feedback_returns_everything(n_hosts: int, n_places: int, accumulate: str) -> None:
    """What was sent and what is kept add up to what was handed in, after every number of steps."""
    names = names_of(n_hosts, n_places)
    grads = make_gradients((9, 1025), len(names))
    ranks = exchanges(names, Options(3, 1, error_feedback=True, accumulate=accumulate))
    total = {name: np.zeros(x.shape) for name, x in grads[0].items()}
    for step in range(1, 5):
        for name, x in reduce_all(grads, ranks, factor=1.0)[0].items():
            total[name] += x
        for name, x in grads[0].items():
            kept = np.zeros(x.shape)
            for rank in ranks:
                for key, values in rank.residuals.items():
                    if key.startswith(f"{name}["):
                        first, last = map(int, key[len(name) + 1 : -1].split(":"))
                        kept[first:last] += values
            handed_in = step * np.sum([one[name].astype(np.float64) for one in grads], axis=0)
            np.testing.assert_allclose(total[name] + kept, handed_in, rtol=1e-5, atol=1e-6 * np.abs(handed_in).max())
    per_rank = [sum(values.size for values in rank.residuals.values()) for rank in ranks]
    assert sum(per_rank) == n_hosts * (9 + 1025) and max(per_rank) <= (9 + 1025) / n_places + 8


def test_residuals_survive_another_cut_and_a_checkpoint() -> None:
    grads = make_gradients((1025,), 6)
    ranks = exchanges(names_of(3, 2), Options(3, 1, error_feedback=True))
    reduce_all(grads, ranks)
    states = [rank.state() for rank in ranks]
    assert all(states[0]["residuals"])
    same = exchanges(names_of(3, 2), Options(3, 1, error_feedback=True))
    other = exchanges(names_of(2, 2), Options(3, 1, error_feedback=True))
    for rank, state in zip([*same, *other], states + states):
        rank.load_state(state)
    for mine, theirs in zip(reduce_all(grads, ranks), reduce_all(grads, same)):
        assert_same_bits(mine["layer0"], theirs["layer0"])
    reduce_all(grads[:4], other)
    assert sum(values.size for values in other[0].residuals.values()) < 1025


def by_hand(state: dict, wanted: Sequence[str], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Residuals under other keys, whole ("w") or parts ("w[2:5]"), with what a state has of them, else zeros."""
    dense = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    for key, values in state["residuals"].items():
        name, _, span = key.partition("[")
        first, last = map(int, span[:-1].split(":")) if span else (0, sizes[name])
        dense[name][first:last] = values
    cut = {}
    for key in wanted:
        name, _, span = key.partition("[")
        first, last = map(int, span[:-1].split(":")) if span else (0, sizes[name])
        cut[key] = dense[name][first:last].copy()
    return cut


@pytest.mark.parametrize("sizes", [(3, 1025), (1, 70, 9)], ids=str)
def test_residuals_go_along_when_the_layout_of_hosts_changes(sizes: tuple[int, ...]) -> None:
    """As an elastic job hands them on. Oracle: ranks that have never seen another layout, given what is right by hand:
    each its own parts, zeros elsewhere; nothing of an older layout."""
    options = Options(3, 1, error_feedback=True)
    grads = make_gradients(sizes, 6)
    n_elements = {name: x.size for name, x in grads[0].items()}
    ranks, ways = exchanges("aaaaaa", options), []
    for layout in ("aaabbb", "aaaaaa", "aabbcc", "aaabbb", "aaaaaa", "aaaaaa"):
        for seed in (1, 2):
            reduce_all(make_gradients(sizes, 6, seed=seed), ranks)
        states = [rank.state() for rank in ranks]
        fresh, ranks, oracle = (exchanges(layout, options) for _ in range(3))
        reduce_all(grads, fresh)
        for one, rank, other, state in zip(fresh, ranks, oracle, states):
            rank.load_state(state)
            other.load_state(state | {"residuals": by_hand(state, list(one.residuals), n_elements)})
        for out, wanted in zip(reduce_all(grads, ranks), reduce_all(grads, oracle)):
            check(out, wanted)
        for rank, other in zip(ranks, oracle):
            check(rank.state()["residuals"], other.state()["residuals"])
        ways.append(ranks[0].way.split()[0])
    assert ways == ["two-level", "flat", "two-level", "two-level", "flat", "flat"]


def test_stochastic_rounding_has_the_same_bits_in_every_run() -> None:
    grads = make_gradients((1025, 64), 4)
    options = Options(2, 1, rounding="stochastic", seed=7)
    first, second = (reduce_all(grads, exchanges(names_of(2, 2), options)) for _ in range(2))
    other = reduce_all(grads, exchanges(names_of(2, 2), options.replace(seed=8)))
    for rank in range(4):
        for name in grads[0]:
            assert_same_bits(first[rank][name], first[0][name])
            assert_same_bits(first[rank][name], second[rank][name])
    assert any(not np.array_equal(first[0][name], other[0][name]) for name in grads[0])


def test_measures_are_those_of_the_host() -> None:
    """Ranks of a host measure one part each, and know the whole."""
    names = names_of(2, 2)
    grads = make_gradients((1024, 33), 4)
    ranks = exchanges(names, Options(3, 2, stats=True))
    reduce_all(grads, ranks)
    sums = host_sums(grads, names)
    for number, rank in enumerate(ranks):
        for name, layer in rank.statistics.as_dict()["layers"].items():
            values = sums[number // 2][name]
            exponent = reference.shared_exponent([host[name] for host in sums], Format(3, 2))
            lost = reference.residual(values, exponent, Format(3, 2))
            error = np.sqrt(np.sum(lost**2) / np.sum(values.astype(np.float64) ** 2))
            assert layer["exponent"] == exponent
            np.testing.assert_allclose(layer["relative_error"], error, rtol=1e-6)
            assert sum(layer["histogram"]) == np.count_nonzero(values)


@pytest.mark.parametrize("n_hosts, n_places", [(2, 4), (3, 2)])
def test_a_host_sends_what_one_rank_would(n_hosts: int, n_places: int) -> None:
    n = 100_000
    grads = make_gradients((n,), n_hosts * n_places)
    ranks = exchanges(names_of(n_hosts, n_places), Options(4, 3))
    reduce_all(grads, ranks)
    sent = [rank.statistics.as_dict()["bytes_sent"] for rank in ranks]
    per_host = 2 * (n_hosts - 1) / n_hosts * n
    for host in range(n_hosts):
        assert per_host <= sum(sent[host * n_places : (host + 1) * n_places]) <= 1.02 * per_host


@pytest.mark.parametrize("n_hosts, n_places, wanted", [(2, 2, (4, 3)), (3, 2, (5, 10))])
def test_auto_knows_how_often_values_are_rounded(n_hosts: int, n_places: int, wanted: tuple[int, int]) -> None:
    """Between two hosts once, among more twice. To (4, 3) a rounding of normal values loses about 0.026 of them.

    Oracle: the flat exchange of as many ranks as there are hosts, with the gradients that one rank of each has.
    """
    auto = Options(4, 3, overrides="auto", auto_steps=2, auto_error=0.032)
    in_two_levels = exchanges(names_of(n_hosts, n_places), auto)
    flat = exchanges([f"host{i}" for i in range(n_hosts)], auto)
    for step in range(3):
        assert in_two_levels[0].chosen is None or step == 2
        grads = make_gradients((4000, 4000, 300), n_hosts, seed=step)
        reduce_all(grads, flat)
        grads = [grad for grad in grads for _ in range(n_places)]
        outs = reduce_all(grads, in_two_levels)
        sums = [sum(grad[name].astype(np.float64) for grad in grads) / len(grads) for name in grads[0]]
        for out in outs:
            for x, exact, first in zip(out.values(), sums, outs[0].values()):
                assert_same_bits(x, first)
                assert np.linalg.norm(x - exact) <= (auto.auto_error if step == 2 else 1e-6) * np.linalg.norm(exact)
    assert flat[0].chosen == dict.fromkeys(grads[0], wanted)
    assert [rank.chosen for rank in in_two_levels] == [flat[0].chosen] * len(in_two_levels)


@pytest.mark.parametrize("hierarchy", ["auto", "flat"])
@pytest.mark.parametrize("names", ["aabb", "abcabc", "aaabbb", "aab", "abc", "aaa"])
def test_the_way_that_is_told_is_the_way_that_is_taken(names: str, hierarchy: str) -> None:
    """On every rank: in words, by the reductions of its plans, and by the bytes that leave its host."""
    ranks = exchanges(names, Options(4, 3, hierarchy=hierarchy))
    assert {rank.way for rank in ranks} == {""}  # nobody has met anybody
    n = 10_000
    reduce_all(make_gradients((n,), len(names)), ranks)
    hosts = group(names)
    two_levels = hierarchy == "auto" and not why_not(hosts)
    why = 'hierarchy is "flat"' if hierarchy == "flat" else why_not(hosts)
    way = f"two-level ({len(hosts)} hosts with {len(hosts[0])} ranks)" if two_levels else f"flat ({why})"
    for rank in ranks:
        kinds = {isinstance(one, two_level.TwoLevel) for plan in rank._plans.values() for one in plan.reductions}
        assert rank.way == way and kinds == {two_levels}
    sent = [rank.statistics.as_dict()["bytes_sent"] for rank in ranks]
    total = 2 * ((len(hosts) if two_levels else len(names)) - 1) * n
    assert total <= sum(sent) <= 1.05 * total


# ---- who shares a host ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, why",
    [
        (["a", "a"], "one host"),
        (["a", "b"], "to itself"),
        (["a", "a", "b"], "2, 1"),
    ],
)
def test_flat_where_two_levels_make_no_sense(names: list[str], why: str) -> None:
    assert why in why_not(group(names))
    grads = make_gradients((100,), len(names))
    ranks = exchanges(names, Options(4, 3))
    reduce_all(grads, ranks)
    assert all(rank.transport.hosts.room is None and why in rank.transport.hosts.why_flat for rank in ranks)
    forced = exchanges(names, Options(4, 3, hierarchy="two-level"))
    for rank, layers in zip(forced, grads):
        rank.submit(Layer("x", (100,), 0, layers["layer0"].ctypes.data, layers["layer0"].ctypes.data, 1.0))
    errors = drive(forced)
    assert len(errors) == len(names) and all(why in str(error) for error in errors)


def drive(ranks) -> list[ValueError]:
    """The errors of all ranks that wait at the same time."""
    errors, running = [], [rank.steps() for rank in ranks]
    while running:
        for steps in list(running):
            try:
                next(steps)
            except StopIteration:
                running.remove(steps)
            except ValueError as error:
                errors.append(error)
                running.remove(steps)
    return errors


def test_flat_by_choice_or_for_lack_of_memory(monkeypatch, caplog) -> None:
    grads = make_gradients((100,), 4)
    ranks = exchanges(names_of(2, 2), Options(4, 3, hierarchy="flat"))
    flat = reduce_all(grads, ranks)
    assert ranks[0].transport.hosts.room is None

    def refuse(name: str) -> HostMemory:
        raise OSError(0, "it is something else here")

    monkeypatch.setattr(hosts_module.HostMemory, "open", refuse)
    ranks = exchanges(names_of(2, 2), Options(4, 3))
    for mine, theirs in zip(reduce_all(grads, ranks), flat):
        assert_same_bits(mine["layer0"], theirs["layer0"])
    assert "rank 1 cannot share" in ranks[3].transport.hosts.why_flat
    assert "something else" in caplog.text


def test_memory_of_others_is_not_opened(tmp_path) -> None:
    memory = HostMemory.make()
    assert HostMemory.open(memory.name).array(0, 16).tobytes() == memory.array(0, 16).tobytes()
    path, mark = memory.name.split()
    with open(tmp_path / "file", "wb") as file:
        wrong = [
            f"/proc/{os.getpid()}/fd/{file.fileno()} {mark}",
            f"{path} {'0' * 32}",
            f"{tmp_path}/file {mark}",
            "none: no memory",
            "",
        ]
        for name in wrong:
            with pytest.raises(OSError):
                HostMemory.open(name)


def test_nothing_is_left_in_the_system() -> None:
    """The memory has no name in a file system, so that nothing can stay behind."""
    before = set(os.listdir("/dev/shm"))
    ranks = exchanges(names_of(2, 2), Options(4, 3))
    reduce_all(make_gradients((1000,), 4), ranks)
    assert set(os.listdir("/dev/shm")) == before


# ---- the room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_ranks_at_any_speed_never_meet_wrong_content(seed: int) -> None:
    """Random buckets, ranks that move on in random order, memory that grows: everyone reads what was written for it."""
    draw = random.Random(seed)
    n_places = draw.choice([2, 3])
    memory = HostMemory.make()
    rooms = [Room(memory if place == 0 else HostMemory.open(memory.name), place, n_places) for place in range(n_places)]
    needs = [Need(draw.randint(1, 3), 64 * draw.randint(1, 4), 64 * draw.randint(1, 4)) for _ in range(30)]

    def bucket(room: Room, number: int, need: Need):
        visit = room.visit(need)
        yield visit.turn()
        for piece in range(need.n_pieces):
            yield visit.free(piece)
            visit.part(piece, room.place)[: need.part] = (number * 7 + piece * 3 + room.place) % 251
            visit.wrote(piece)
            yield visit.written(piece)
            for other in range(n_places):
                assert (visit.part(piece, other)[: need.part] == (number * 7 + piece * 3 + other) % 251).all()
            visit.summed(piece)
        visit.content[room.place] = (number + room.place) % 251
        visit.tell(two_level.SCANNED)
        yield visit.all_told(two_level.SCANNED)
        visit.content[32 + room.place] = (number + room.place) % 250
        visit.tell(two_level.FILLED)
        yield visit.all_told(two_level.FILLED)
        for other in range(n_places):
            assert (
                visit.content[other] == (number + other) % 251 and visit.content[32 + other] == (number + other) % 250
            )
        visit.tell(two_level.READ)

    running = []  # of each rank: generators and what they wait for, in order
    for room in rooms:
        steps = [bucket(room, number, need) for number, need in enumerate(needs)]
        running.append([[one, next(one)] for one in steps])
    idle = 0
    while any(running):
        jobs = draw.choice([jobs for jobs in running if jobs])
        job = draw.choice(jobs)
        idle = 0 if job[1].done() else idle + 1
        assert idle < 100_000, "the ranks wait for each other"
        if job[1].done():
            job[1] = next(job[0], None)
            if job[1] is None:
                jobs.remove(job)


def test_a_resting_rank_wakes_when_all_have_come() -> None:
    memory = HostMemory.make()
    rooms = [Room(memory if place == 0 else HostMemory.open(memory.name), place, 2) for place in range(2)]
    heard = rooms[0].heard()
    rooms[0].set(WRITTEN, 0, 1)
    assert rooms[0].heard() == heard  # the other is not there yet
    sleeper = threading.Thread(target=rooms[0].rest, args=(heard, 600.0), daemon=True)
    sleeper.start()
    rooms[1].set(WRITTEN, 0, 1)
    sleeper.join(60.0)
    assert not sleeper.is_alive() and rooms[0].heard() == heard + 1
    rooms[0].rest(heard, 600.0)  # it has rung since


class _Leaving(LocalTransport):
    """Of whose ranks some say farewell."""

    left: set[int] = set()

    def gone(self) -> set[int]:
        return self.left - {self.rank}


def _end_of_rank_0(n_looks: int) -> str:
    """What rank 0 has in the end if the other rank of its host moves on so often, and then leaves."""
    transports = [HostedTransport(one, "", host) for one, host in zip(_Leaving.world(4), names_of(2, 2))]
    ranks = [Exchange(CpuKernels(), one, Options(4, 3)) for one in transports]
    reduce_all(make_gradients((300,), 4), ranks)
    x, outs = np.ones(300, np.float32), np.zeros((4, 300), np.float32)
    layers = [Layer("layer0", x.shape, 0, x.ctypes.data, out.ctypes.data, 1.0) for out in outs]
    for rank, layer in zip(ranks, layers):
        rank.submit(layer)
    running = [rank.steps([layer]) for rank, layer in zip(ranks, layers)]
    while not ranks[1]._jobs:
        next(running[1])
        for rank, steps in zip(ranks, running):
            if not rank._jobs:
                next(steps)
    for look in range(1000):
        if look < n_looks:
            ranks[1].look()
        else:
            _Leaving.left = {1}
        for rank in ranks[2:]:
            rank.look()
        try:
            ranks[0].look()
        except LostPeer as error:
            return str(error)
        if layers[0].done:
            np.testing.assert_array_equal(outs[0], 4 * x)
            return "result"
    return "waits"


def test_rank_that_leaves_in_the_middle_is_missed_by_those_of_its_host(monkeypatch) -> None:
    """They wait for its flags, not for a message. One that has done its part is not missed."""
    monkeypatch.setattr(two_level, "PIECE", 64)
    ends = []
    for n_looks in range(30):
        monkeypatch.setattr(_Leaving, "left", set())
        ends.append(_end_of_rank_0(n_looks))
    lost = "rank 1 has ended while this rank waits for it"
    assert ends == sorted(ends, key=[lost, "result"].index) and set(ends) == {lost, "result"}, ends


def test_closed_exchange_keeps_the_shared_memory_that_the_network_writes_into() -> None:
    """Bytes of other hosts arrive right there."""
    posted: list[weakref.ref[np.ndarray]] = []

    class Slow(LocalTransport):
        def transfer(self, outgoing, incoming, tag):
            if sum(map(len, incoming.values())) < 100:  # exponents
                return super().transfer(outgoing, incoming, tag)
            posted.extend(map(weakref.ref, incoming.values()))
            return SimpleNamespace(done=lambda: False, kept=incoming)

    x = np.ones(3000, np.float32)
    transports = [HostedTransport(one, "", host) for one, host in zip(Slow.world(4), names_of(2, 2))]
    ranks = [Exchange(CpuKernels(), one, Options(4, 3)) for one in transports]
    for rank in ranks:
        rank.self_driven = True
        rank.submit(Layer("x", x.shape, 0, x.ctypes.data, x.ctypes.data, 1.0, x))
    running = [rank.steps() for rank in ranks]
    while len(posted) < 4:
        for steps in running:
            next(steps)
    for rank in ranks:
        rank.close()
    del ranks, rank, running, steps, transports
    gc.collect()
    assert all(one() is not None and one().max() >= 0 for one in posted)
