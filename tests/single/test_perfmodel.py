"""The performance model against closed forms, exact two-machine schedules and the limits it must respect."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from horovod_aps.engine.layout import LayerSpec, plan_buckets
from horovod_aps.formats import FloatFormat
from horovod_aps.tools import perfmodel
from horovod_aps.tools.perfmodel import (
    KernelRates,
    Machine,
    Network,
    break_even_bandwidth,
    predict_exchange,
    predict_ring,
)

FREE = KernelRates(math.inf, math.inf, math.inf, math.inf)
# A machine whose processor costs nothing: only the wire is left, and closed forms are exact.
WIRE_ONLY = Machine(
    kernels={"4,3": FREE},
    copy_rate=math.inf,
    add_rate=math.inf,
    add16_rate=math.inf,
    cast_rate=math.inf,
    tensor_overhead=0,
    layer_overhead=0,
    cycle_time=0,
    bucket_bytes=math.inf,
    fusion_bytes=math.inf,
)
LINK = Network(bandwidth=1e8, latency=0, intra_latency=0, efficiency=1)
PERFORMANCE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 7, 1024])
def test_ring_wire_time_is_textbook_ring(n_ranks):
    prediction = predict_ring([1000, 9000], n_ranks, LINK, WIRE_ONLY)
    assert prediction.total == pytest.approx(2 * (n_ranks - 1) / n_ranks * 40000 / 1e8)
    assert prediction.bytes_sent == pytest.approx(2 * (n_ranks - 1) / n_ranks * 40000)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 7, 1024])
@pytest.mark.parametrize("e,m", [(4, 3), (3, 0), (5, 10)])
def test_exchange_sends_what_a_ring_of_such_values_would(n_ranks, e, m):
    """Oracle: the formula of design section 3, 2(N-1)/N * n * (1+e+m)/8 bytes; N=2 the same in one phase."""
    sizes = [1024, 8992]  # whose bytes end where the next layer's may begin
    prediction = predict_exchange(sizes, n_ranks, LINK, WIRE_ONLY, e, m)
    expected = 2 * (n_ranks - 1) / n_ranks * sum(sizes) * (1 + e + m) / 8
    assert prediction.bytes_sent == pytest.approx(expected)
    assert prediction.total == pytest.approx(expected / 1e8)


def test_latency_counts_steps():
    """Ring: 2(N-1) messages in a row plus the negotiation's log2(N); exchange: exponents and one latency per
    phase.
    """
    link = replace(LINK, bandwidth=1e30, latency=1.0)
    assert predict_ring([8], 8, link, WIRE_ONLY).total == pytest.approx(14 + 3)
    assert predict_exchange([8], 8, link, WIRE_ONLY).total == pytest.approx(3 + 1 + 1)
    assert predict_exchange([8], 2, link, WIRE_ONLY).total == pytest.approx(1 + 1)


def test_kernels_are_charged_once_per_input():
    rates = KernelRates(scan=4e9, encode=2e9, reduce=1e9, decode=8e9)
    machine = replace(WIRE_ONLY, kernels={"4,3": rates})
    link = replace(LINK, bandwidth=1e30)
    one = 4e6  # fp32 bytes of a million elements
    two_ranks = one / 4e9 + one / 2e9 + 2 * one / 8e9
    assert predict_exchange([10**6], 2, link, machine).cpu == pytest.approx(two_ranks)
    four_ranks = one / 4e9 + one / 2e9 + one / 1e9 + one / 8e9
    assert predict_exchange([10**6], 4, link, machine).cpu == pytest.approx(four_ranks)


def test_two_level_network_closed_forms():
    """4 hosts of 8 ranks; counted by hand: bytes that cross one host's link."""
    link = replace(LINK, ranks_per_host=8, intra_bandwidth=1e30)
    nbytes = 3.2e6
    assert link.ring(nbytes, 32) == pytest.approx(2 * 31 / 32 * nbytes / 1e8)
    assert replace(link, hierarchical=True).ring(nbytes, 32) == pytest.approx(2 * 3 / 4 * nbytes / 1e8)
    assert link.direct(nbytes / 32, 32) == pytest.approx(8 * 24 / 32 * nbytes / 1e8)
    inside = replace(link, intra_bandwidth=1e9)
    assert inside.ring(nbytes, 8) == pytest.approx(2 * 7 / 8 * nbytes / 1e9)
    assert inside.direct(nbytes / 8, 8) == pytest.approx(7 / 8 * nbytes / 1e9)


def test_host_rate_bounds_bandwidth():
    fast = replace(LINK, bandwidth=1e12, host_rate=5e8)
    assert fast.rate == 5e8
    assert replace(LINK, host_rate=5e8, efficiency=0.5).rate == pytest.approx(5e7)


def brute_force_two_stage(jobs):
    """Johnson's problem in the given order: cpu then wire, each job once, by the recurrence of flow shops."""
    cpu = wire = 0.0
    for first, second in jobs:
        cpu += first
        wire = max(cpu, wire) + second
    return wire


def finished(jobs):
    """When a rank is done with jobs that all start at once."""
    rank = perfmodel._Rank()
    for stages in jobs:
        rank.start(stages)
    return rank.finish()


def test_rank_is_the_flow_shop_recurrence():
    random.seed(1)
    for _ in range(50):
        jobs = [(random.random(), random.random()) for _ in range(random.randint(1, 12))]
        built = [[("cpu", a), ("wire", b)] for a, b in jobs]
        assert finished(built) == pytest.approx(brute_force_two_stage(jobs))


def test_rank_bounds():
    """Never shorter than the busiest resource or the longest job, never longer than everything in a row."""
    random.seed(2)
    for _ in range(50):
        jobs = [
            [(kind, random.random()) for kind in ("cpu", "wire") * 3][random.randint(0, 1) :]
            for _ in range(random.randint(1, 20))
        ]
        end = finished(jobs)
        stages = list(itertools.chain.from_iterable(jobs))
        for resource in ("cpu", "wire"):
            assert end >= sum(seconds for name, seconds in stages if name == resource) - 1e-12
        assert end >= max(sum(seconds for _, seconds in job) for job in jobs) - 1e-12
        assert end <= sum(seconds for _, seconds in stages) + 1e-12


def test_overlap_interpolates_between_serial_and_pipelined():
    sizes = [10**6] * 20
    machine = Machine(bucket_bytes=4e6)
    serial, half, full = (
        predict_exchange(sizes, 4, LINK, replace(machine, overlap=overlap)).total for overlap in (0.0, 0.5, 1.0)
    )
    reference = predict_exchange(sizes, 4, LINK, machine)
    assert serial == pytest.approx(reference.wire + reference.cpu)
    assert full < half < serial
    assert half == pytest.approx((serial + full) / 2)
    assert full >= max(reference.wire, reference.cpu)


def test_backward_hides_communication():
    sizes = [10**5] * 50
    machine = replace(WIRE_ONLY, bucket_bytes=4e5, overlap=1.0)
    exposed = predict_exchange(sizes, 4, LINK, machine).total
    # Communication of all but the last bucket fits into a backward that is twice as long as it, but for the second
    # phase of the last bucket but one, which starts with the last hook, ahead of the last bucket.
    hidden = predict_exchange(sizes, 4, LINK, machine, backward=2 * exposed)
    assert hidden.exposed == pytest.approx(1.5 * exposed / 50)
    assert hidden.total == pytest.approx(2 * exposed + 1.5 * exposed / 50)
    assert perfmodel.scaling_efficiency(hidden, exposed, 2 * exposed) == pytest.approx(3 / (3 + 1.5 / 50))


def test_backward_hides_horovods_communication_too():
    """Every cycle reduces what is ready: only the last layer is left when backward, twice as long, is over."""
    sizes = [10**5] * 50
    alone = predict_ring(sizes, 4, LINK, WIRE_ONLY).total
    for bits in (32, 16):
        one = predict_ring([10**5], 4, LINK, WIRE_ONLY, bits).total
        assert predict_ring(sizes, 4, LINK, WIRE_ONLY, bits, 2 * alone).exposed == pytest.approx(one)


def test_a_cycle_takes_what_is_ready_by_then():
    """By hand: ten layers, one per second; the wire takes 2.5 s a layer, whatever is fused; a cycle of 0.25 s."""
    machine = replace(WIRE_ONLY, cycle_time=0.25)
    link = replace(LINK, bandwidth=4.0 / 2.5)  # two ranks send every element once
    got = predict_ring([1] * 10, 2, link, machine, backward=10.0)
    # 1.25: layer 1 until 3.75; 4.0: layers 2 to 4 until 11.5; 11.75: the other six until 26.75
    assert got.total == pytest.approx(26.75) and got.exposed == pytest.approx(16.75)
    fusing = replace(machine, fusion_bytes=8)  # the same bytes in buffers of two layers
    assert predict_ring([1] * 10, 2, link, fusing, backward=10.0).total == pytest.approx(26.75)


def test_kernels_and_casts_lengthen_backward():
    """They run in its thread, so a free network does not hide them."""
    link = replace(LINK, bandwidth=1e30)
    machine = replace(WIRE_ONLY, kernels={"4,3": KernelRates(1e9, 1e9, 1e9, 1e9)}, cast_rate=1e9, overlap=1.0)
    assert predict_exchange([10**6] * 8, 4, link, machine, backward=1.0).exposed == pytest.approx(4 * 8 * 4e6 / 1e9)
    assert predict_ring([10**6] * 8, 4, link, machine, 16, backward=1.0).exposed == pytest.approx(2 * 8 * 4e6 / 1e9)


def test_horovods_thread_needs_a_core():
    """Two ranks on two cores: backward and the sums of Horovod's thread cannot take less than both together."""
    machine = replace(WIRE_ONLY, add_rate=1e8, cores=2, calibrated_ranks=2)
    link = replace(LINK, bandwidth=1e30)
    sums = 10**6 * 4 / 2 / 1e8
    assert predict_ring([10**5] * 10, 2, link, machine, backward=1.0).total == pytest.approx(1.0 + sums)
    assert predict_ring([10**5] * 10, 2, link, replace(machine, cores=4), backward=1.0).total == pytest.approx(
        1.0 + sums / 10
    )


def test_horovods_thread_moves_after_backward_where_no_core_is_left():
    """By hand: the ring's whole time after backward with a core per rank, half of what can be hidden with 1.5."""
    sizes = [10**5] * 50
    alone = predict_ring(sizes, 4, LINK, WIRE_ONLY).total
    one = predict_ring([10**5], 4, LINK, WIRE_ONLY).total
    for cores, exposed in ((4, alone), (6, (alone + one) / 2), (8, one)):
        got = predict_ring(sizes, 4, LINK, replace(WIRE_ONLY, cores=cores), backward=2 * alone)
        assert got.exposed == pytest.approx(exposed), cores


def test_fusion_buffers_take_layers_in_order():
    assert perfmodel.fused([4, 100, 3, 2, 1], 24) == [[4], [100], [3, 2, 1]]
    assert perfmodel.fused([6], 4) == [[6]]


def test_ranks_of_a_host_share_its_link():
    """Oracle: bytes that left a host and milliseconds, measured on two hosts at 1 Gbit/s that shared two cores.

    6.4 million gradients in fp32, fp16 and (4, 3), by ranks per host.
    """
    n = 6_400_000
    measured = {
        1: ((25.7e6, 12.8e6, 6.4e6), (282, 162, 69)),
        2: ((25.7e6, 12.9e6, 12.9e6), (378, 190, 144)),
        4: ((25.7e6, 12.9e6, 25.7e6), (425, 228, 293)),
    }
    for local, (n_bytes, milliseconds) in measured.items():
        link = Network(bandwidth=1.25e8, ranks_per_host=local, allreduce="openmpi")
        machine = Machine(cores=2, calibrated_ranks=2)
        found = [predict_ring([n], 2 * local, link, machine, bits) for bits in (32, 16)]
        found.append(predict_exchange([n], 2 * local, link, machine, hierarchy="flat"))
        assert [one.host_bytes for one in found] == pytest.approx(n_bytes, rel=0.02), local
        assert [1e3 * one.total for one in found] == pytest.approx(milliseconds, rel=0.27), local
        assert (found[2].total < found[1].total) == (local < 4)  # slower than fp16 with four, as measured
        row = " | ".join(f"{ms} ({1e3 * one.total:.0f}) ms" for ms, one in zip(milliseconds, found))
        assert f"| {row} |" in PERFORMANCE.read_text()
        two_levels = predict_exchange([n], 2 * local, link, machine)
        assert two_levels.host_bytes == pytest.approx(n, rel=0.01)  # as measured: 6.4 MB whatever the ranks
        assert two_levels.total <= found[2].total


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 6, 7, 16])
def test_openmpi_equals_the_steps_of_every_rank(n_ranks):
    """Oracle: every rank's clock and bytes, message by message, as in Open MPI's coll_base_allreduce.c.

    Two directions go at once between two ranks and in everybody's first step, else in turn.
    """
    nbytes, link = 1e6, replace(LINK, latency=0.25, allreduce="openmpi")
    clock, sent = [0.0] * n_ranks, [0.0] * n_ranks

    def swap(a: int, b: int, forth: float, back: float) -> None:
        at_once = n_ranks == 2 or clock[a] == clock[b] == 0
        wire = max(forth, back) if at_once else forth + back
        clock[a] = clock[b] = max(clock[a], clock[b]) + 0.25 + wire / 1e8
        sent[a], sent[b] = sent[a] + forth, sent[b] + back

    power = 2 ** int(math.log2(n_ranks))
    extra = n_ranks - power
    for rank in range(0, 2 * extra, 2):
        swap(rank, rank + 1, nbytes / 2, nbytes / 2)
        swap(rank, rank + 1, 0, nbytes / 2)
    members = [*range(0, 2 * extra, 2), *range(2 * extra, n_ranks)]
    distances = [2**k for k in range(int(math.log2(power)))]
    sizes = [nbytes / 2 ** (k + 1) for k in range(len(distances))]
    steps = list(zip(distances, sizes, strict=True))
    for distance, size in steps + steps[::-1]:
        for i in range(power):
            if i < i ^ distance:
                swap(members[i], members[i ^ distance], size, size)
    for rank in range(0, 2 * extra, 2):
        swap(rank, rank + 1, nbytes, 0)
    assert link.own(nbytes, n_ranks) == pytest.approx(max(clock))
    prediction = predict_ring([250_000], n_ranks, replace(link, latency=0), WIRE_ONLY)
    assert prediction.bytes_sent == pytest.approx(sum(sent) / n_ranks)


def test_openmpi_on_hosts_of_several_ranks():
    """By hand, 2 hosts of 4: halves and quarters stay inside, 4 ranks' eighths cross the link, mostly in turn."""
    link = replace(LINK, ranks_per_host=4, intra_bandwidth=1e9, allreduce="openmpi")
    assert link.own(8e6, 8) == pytest.approx(2 * (4e6 / 1e9 + 2e6 / 1e9 + 1.6 * 4 * 1e6 / 1e8))


def test_exchange_takes_the_buckets_of_the_real_one():
    """Oracle: plan_buckets of horovod_aps.engine.layout, whose first bucket is small; one exponent message each."""
    sizes = [300_000, 200_000, 4_000_000, 900_000, 10, 100_000]
    machine = replace(WIRE_ONLY, bucket_bytes=16e6)
    specs = [LayerSpec(str(i), (n,), 0, FloatFormat(4, 3)) for i, n in enumerate(reversed(sizes))]
    link = replace(LINK, bandwidth=1e30, latency=1.0)
    for n_ranks, per_bucket in ((2, 1), (4, 4)):
        plan = plan_buckets(specs, n_ranks, 16.0)
        assert len(plan) == 4 and len(plan[0].layers) == 2
        n_messages = sum(per_bucket + (len(bucket.parts()) if n_ranks == 2 else 0) for bucket in plan)
        assert predict_exchange(sizes, n_ranks, link, machine).wire == pytest.approx(n_messages)


def test_network_stack_shares_the_cores():
    machine = replace(WIRE_ONLY, cores=2, calibrated_ranks=2)
    link = replace(LINK, bandwidth=1e30, host_rate=1e8)
    # By hand: 4 ranks on 2 cores have half of 1e8 bytes/s each.
    assert predict_ring([10**6], 4, link, machine).total == pytest.approx(1.5 * 4e6 / 5e7)
    assert predict_exchange([10**6], 4, link, machine).total == pytest.approx(1.5 * 1e6 / 5e7)


def test_break_even_is_where_both_cost_the_same():
    sizes = [10**6] * 10
    # The exchange must lose on a fast network: its kernels are slow here, Horovod's processor work is free.
    machine = replace(WIRE_ONLY, kernels={"4,3": KernelRates(1e9, 1e9, 1e9, 1e9)}, overlap=0.0)
    bandwidth = break_even_bandwidth(sizes, 4, LINK, machine)
    # By hand: 1.5 * 4e7/b = 1.5 * 1e7/b + 4 kernels * 4e7/1e9
    assert bandwidth == pytest.approx(1.5 * 3e7 / (4 * 4e7 / 1e9), rel=2e-3)
    assert break_even_bandwidth(sizes, 4, LINK, WIRE_ONLY) == math.inf
    # A stack of 2e8 bytes/s: no faster link helps Horovod, so the exchange stays ahead.
    assert break_even_bandwidth(sizes, 4, replace(LINK, host_rate=2e8), machine) == math.inf
    # With backward, too, the two cost the same there: the definition.
    hidden = replace(machine, overlap=1.0, bucket_bytes=4e6)
    got = replace(LINK, bandwidth=break_even_bandwidth(sizes, 4, LINK, hidden, backward=100.0))
    ring = predict_ring(sizes, 4, got, hidden, backward=100.0).exposed
    assert 0 < ring == pytest.approx(predict_exchange(sizes, 4, got, hidden, backward=100.0).exposed, rel=5e-3)
    slow = replace(machine, kernels={"4,3": KernelRates(1, 1, 1, 1)})
    assert break_even_bandwidth(sizes, 4, LINK, slow) == 0.0


def test_paying_bandwidths_say_where_the_exchange_wins():
    """Flat, with up to eight ranks per host, it loses to fp16 on slow links and wins, by the casts, on fast ones."""
    sizes = [10**6] * 10
    machine = replace(WIRE_ONLY, cast_rate=1e9)
    link = replace(LINK, ranks_per_host=8, intra_bandwidth=1e12)
    ((low, high),) = perfmodel.paying_bandwidths(sizes, 12, link, machine, bits=16)
    assert 1e5 < low < 1e12 and high == math.inf
    for bandwidth, wins in ((low * 1.01, True), (low / 1.01, False)):
        at = replace(link, bandwidth=bandwidth)
        assert (predict_exchange(sizes, 12, at, machine).total < predict_ring(sizes, 12, at, machine, 16).total) == wins
    assert break_even_bandwidth(sizes, 12, link, machine, bits=16) == 0.0
    assert perfmodel.paying_bandwidths(sizes, 4, LINK, WIRE_ONLY) == [(0.0, math.inf)]
    slow = replace(WIRE_ONLY, kernels={"4,3": KernelRates(1, 1, 1, 1)})
    assert perfmodel.paying_bandwidths(sizes, 4, LINK, slow) == []


def test_one_rank_costs_nothing():
    assert predict_ring([5], 1, LINK, Machine()).total == 0
    assert predict_exchange([5], 1, LINK, Machine(), backward=0.25).total == 0.25


def test_slowdown_when_ranks_share_cores():
    machine = Machine(cores=2, calibrated_ranks=2)
    assert [machine.slowdown(n) for n in (1, 2, 4)] == [1, 1, 2]
    assert Machine(cores=2, calibrated_ranks=4).slowdown(2) == pytest.approx(0.5)
    assert Machine().slowdown(1024) == 1


def test_kernel_rates_fall_back_to_nearest_width():
    a, b = KernelRates(scan=1), KernelRates(scan=2)
    machine = Machine(kernels={"4,3": a, "3,0": b})
    assert machine.kernel_rates(4, 3) is a
    assert machine.kernel_rates(5, 2) is a
    assert machine.kernel_rates(2, 1) is b


def test_calibration_round_trip(tmp_path):
    network = Network(bandwidth=3e7, latency=1e-5, ranks_per_host=4)
    machine = Machine(kernels={"4,3": KernelRates(1, 2, 3, 4), "3,0": KernelRates()}, cores=2)
    rates = KernelRates(1e9, 2e9, 3e9, 4e9)
    machine = replace(machine, kernels={"4,3": rates, "3,0": KernelRates()})
    found = perfmodel.Calibration(network, machine, {"latency": "why"}, {"overlap": "how"})
    perfmodel.save_calibration(tmp_path / "c.json", found, {"note": 1})
    assert perfmodel.load_calibration(tmp_path / "c.json") == replace(
        found, network=replace(network, latency=Network().latency)
    )
    assert perfmodel.load_calibration(tmp_path / "c.json", assume_defaults=True).unmeasured == {}
    (tmp_path / "bad.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema must|must have schema 2, got 0"):
        perfmodel.load_calibration(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: Network(bandwidth=0), "bandwidth must be positive, got 0"),
        (lambda: Network(latency=-1), "latency must not be negative"),
        (lambda: Network(allreduce="tree"), "allreduce must be one of ring, openmpi, got 'tree'"),
        (lambda: Network(ranks_per_host=0), "ranks_per_host must be at least 1, got 0"),
        (lambda: Machine(overlap=2), r"overlap must be in 0..1, got 2"),
        (lambda: Machine(kernels={}), "at least one format"),
        (lambda: predict_ring([1], 2, LINK, Machine(), bits=8), "bits must be 16 or 32, got 8"),
        (lambda: predict_ring([1], 0, LINK, Machine()), "n_ranks must be at least 1, got 0"),
        (lambda: predict_exchange([], 2, LINK, Machine()), "sizes must be"),
        (lambda: predict_exchange([1], 2, LINK, Machine(), backward=math.nan), "backward must be finite"),
        (lambda: predict_ring([1], 2, LINK, Machine(), backward=-1), "not negative, got -1"),
        (
            lambda: perfmodel.scaling_efficiency(predict_ring([1], 2, LINK, Machine()), 0, 0),
            "must be positive",
        ),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
