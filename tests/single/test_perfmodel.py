"""The performance model against closed forms, exact two-machine schedules and the limits it must respect."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from horovod_aps import perfmodel
from horovod_aps.formats import FloatFormat
from horovod_aps.layout import LayerSpec, plan_buckets
from horovod_aps.perfmodel import (
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


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 7, 1024])
def test_ring_wire_time_is_textbook_ring(n_ranks):
    prediction = predict_ring([1000, 9000], n_ranks, LINK, WIRE_ONLY)
    assert prediction.total == pytest.approx(2 * (n_ranks - 1) / n_ranks * 40000 / 1e8)
    assert prediction.bytes_sent == pytest.approx(2 * (n_ranks - 1) / n_ranks * 40000)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 7, 1024])
@pytest.mark.parametrize("e,m", [(4, 3), (3, 0), (5, 10)])
def test_exchange_sends_what_a_ring_of_such_values_would(n_ranks, e, m):
    """Oracle: the formula of design section 3, 2(N-1)/N * n * (1+e+m)/8 bytes; N=2 the same in one phase."""
    prediction = predict_exchange([1000, 9000], n_ranks, LINK, WIRE_ONLY, e, m)
    expected = 2 * (n_ranks - 1) / n_ranks * 10000 * (1 + e + m) / 8
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


def test_schedule_is_the_flow_shop_recurrence():
    random.seed(1)
    for _ in range(50):
        jobs = [(random.random(), random.random()) for _ in range(random.randint(1, 12))]
        built = [perfmodel._Job(0.0, [("cpu", a), ("wire", b)]) for a, b in jobs]
        assert perfmodel._schedule(built) == pytest.approx(brute_force_two_stage(jobs))


def test_schedule_bounds():
    """Never shorter than the busiest resource or the longest job, never longer than everything in a row."""
    random.seed(2)
    for _ in range(50):
        jobs = [
            perfmodel._Job(
                random.random(), [(random.choice(("cpu", "wire")), random.random()) for _ in range(5)]
            )
            for _ in range(random.randint(1, 20))
        ]
        end = perfmodel._schedule(jobs)
        stages = list(itertools.chain.from_iterable(job.stages for job in jobs))
        for resource in ("cpu", "wire"):
            assert end >= sum(seconds for name, seconds in stages if name == resource) - 1e-12
        assert end >= max(job.ready + sum(seconds for _, seconds in job.stages) for job in jobs) - 1e-12
        assert end <= max(job.ready for job in jobs) + sum(seconds for _, seconds in stages) + 1e-12


def test_overlap_interpolates_between_serial_and_pipelined():
    sizes = [10**6] * 20
    machine = Machine(bucket_bytes=4e6)
    serial, half, full = (
        predict_exchange(sizes, 4, LINK, replace(machine, overlap=overlap)).total
        for overlap in (0.0, 0.5, 1.0)
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
    # Communication of all but the last bucket fits into a backward that is twice as long as it.
    hidden = predict_exchange(sizes, 4, LINK, machine, backward=2 * exposed)
    assert hidden.exposed == pytest.approx(exposed / 50)
    assert hidden.total == pytest.approx(2 * exposed + exposed / 50)
    assert perfmodel.scaling_efficiency(hidden, exposed, 2 * exposed) == pytest.approx(3 / (3 + 1 / 50))


def test_fusion_buffers_cover_layers_backwards():
    assert perfmodel.fused([1, 2, 3, 100, 4], 24) == [[4], [100], [3, 2, 1]]
    assert perfmodel.fused([6], 4) == [[6]]


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
    """By hand, 2 hosts of 4: halves and quarters stay inside, 4 ranks' eighths cross the link, in turn."""
    link = replace(LINK, ranks_per_host=4, intra_bandwidth=1e9, allreduce="openmpi")
    assert link.own(8e6, 8) == pytest.approx(2 * (4e6 / 1e9 + 2e6 / 1e9 + 2 * 4 * 1e6 / 1e8))


def test_exchange_takes_the_buckets_of_the_real_one():
    """Oracle: plan_buckets of horovod_aps.layout, whose first bucket is small; one exponent message each."""
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
    # Backward hides all but the last of its ten buckets, but nothing of Horovod's one: by hand as above.
    hidden = replace(machine, overlap=1.0, bucket_bytes=4e6)
    got = break_even_bandwidth(sizes, 4, LINK, hidden, backward=100.0)
    assert got == pytest.approx(1.5 * (4e7 - 1e6) / (4 * 4e6 / 1e9), rel=2e-3)
    slow = replace(machine, kernels={"4,3": KernelRates(1, 1, 1, 1)})
    assert break_even_bandwidth(sizes, 4, LINK, slow) == 0.0


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
    perfmodel.save_calibration(tmp_path / "c.json", network, machine, {"note": 1})
    assert perfmodel.load_calibration(tmp_path / "c.json") == (network, machine)
    (tmp_path / "bad.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema must|must have schema 1, got 0"):
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
        (
            lambda: perfmodel.scaling_efficiency(predict_ring([1], 2, LINK, Machine()), 0, 0),
            "must be positive",
        ),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
