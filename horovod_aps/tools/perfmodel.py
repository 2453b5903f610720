"""Alpha-beta model of one gradient synchronisation: Horovod's all-reduce against our packed exchange.

It needs only layer sizes and a few rates, so it answers "what would APS buy on that cluster?" beforehand.
`calibrate.py` measures the rates, `predict.py` prints the answers. Units are seconds, bytes and bytes per
second.

What is modelled: messages cost `latency + bytes / rate` on a flat or two-level network; kernels and copies
cost bytes over a measured rate. A rank's own thread does backward, hooks, casts and our kernels one after the
other. Horovod's thread reduces in every cycle whatever is ready by then, fused; our buckets start when backward has
filled them, and their later stages run between layers. So all methods overlap with backward as far as they do.
What is not: congestion, stragglers, jitter, and the processor time that the network itself takes from the ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from horovod_aps.engine.layout import LayerSpec, lay_out_bucket, split_into_buckets
from horovod_aps.formats import FloatFormat, Format

GBIT = 1e9 / 8
SCHEMA = 2  # 1 had values that were out of bounds, or never measured, as if they were
SLOWEST, SLOWEST_LINK, FASTEST = 5e7, 1e5, 2e11  # bytes/s of one rank: a rate out of these bounds is noise
ALLREDUCES = ("ring", "openmpi")
# Of swaps that go in turn, the part that still does where several ranks share a host's link and fill each other's gaps:
# with 2 and 4 ranks on each of two hosts Open MPI took 1.5 to 1.75 times as long as both directions at once would.
SHARED_TURN = 0.6


@dataclass(frozen=True)
class Network:
    """The links between ranks; every link is full duplex and `ranks_per_host` ranks share one host's link."""

    bandwidth: float = GBIT
    latency: float = 50e-6
    ranks_per_host: int = 1
    intra_bandwidth: float = 8e9
    intra_latency: float = 2e-6
    # Horovod's own all-reduce: the ring of NCCL and Gloo, or what Open MPI 4.1 does with vectors over 256 kB.
    allreduce: str = "ring"
    # Two-level ring (HOROVOD_HIERARCHICAL_ALLREDUCE) for Horovod's own.
    hierarchical: bool = False
    # Payload share of the nominal rate (Ethernet, IP and TCP headers); 1500-byte frames leave about 0.94.
    efficiency: float = 0.94
    # What one rank pushes through its network stack, however fast the link; bounds the useful bandwidth.
    host_rate: float = math.inf

    def __post_init__(self) -> None:
        for name in ("bandwidth", "intra_bandwidth", "efficiency", "host_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Network: {name} must be positive, got {getattr(self, name)}")
        if self.allreduce not in ALLREDUCES:
            raise ValueError(f"Network: allreduce must be one of {', '.join(ALLREDUCES)}, got {self.allreduce!r}")
        if self.ranks_per_host < 1:
            raise ValueError(f"Network: ranks_per_host must be at least 1, got {self.ranks_per_host}")
        if self.latency < 0 or self.intra_latency < 0:
            raise ValueError(f"Network: latency must not be negative, got {self.latency}, {self.intra_latency}")

    @property
    def rate(self) -> float:
        """Payload bytes per second that one host's link carries in each direction."""
        return min(self.bandwidth * self.efficiency, self.host_rate)

    def _local(self, n_ranks: int) -> int:
        return min(self.ranks_per_host, n_ranks)

    def _step(self, nbytes: float, n_ranks: int) -> float:
        """One ring step: everybody sends `nbytes` to the right; one stream per host crosses its link."""
        local = self.intra_latency + nbytes / self.intra_bandwidth
        if n_ranks <= self.ranks_per_host:
            return local
        remote = self.latency + nbytes / self.rate
        return max(local, remote) if self.ranks_per_host > 1 else remote

    def ring(self, nbytes: float, n_ranks: int) -> float:
        """Ring all-reduce of `nbytes` per rank: reduce-scatter and all-gather, N - 1 steps each."""
        if n_ranks == 1:
            return 0.0
        local = self._local(n_ranks)
        if not self.hierarchical or local == 1 or n_ranks <= local:
            return 2 * (n_ranks - 1) * self._step(nbytes / n_ranks, n_ranks)
        # Two levels: each local rank reduces 1/local of the vector and all-reduces it with its peers on other
        # hosts; the `local` rings share one link, so together they move what a single ring of hosts would.
        hosts = math.ceil(n_ranks / local)
        inside = 2 * (local - 1) * (self.intra_latency + nbytes / local / self.intra_bandwidth)
        return inside + 2 * (hosts - 1) * (self.latency + nbytes / hosts / self.rate)

    def _swap(self, nbytes: float, distance: int, in_turn: bool = False) -> float:
        """Every rank swaps `nbytes` with the one `distance` away; all of a host's ranks share its link."""
        if distance < self.ranks_per_host:
            return self.intra_latency + nbytes / self.intra_bandwidth
        turn = in_turn * (SHARED_TURN if self.ranks_per_host > 1 else 1.0)
        return self.latency + self.ranks_per_host * nbytes * (1 + turn) / self.rate

    def openmpi(self, nbytes: float, n_ranks: int) -> float:
        """Rabenseifner's algorithm: reduce-scatter by halving, all-gather by doubling, log2(N) steps each.

        Ranks beyond a power of two first halve their vectors with a neighbour, hand over their half, and get the
        whole result in the end, while the others wait. All enter the first step together and swap at once. Later
        one comes first, and the answer that its partner's message waits for (over 64 kB, Open MPI asks before it
        sends) stands behind the data of the other direction: the two go in turn. Two ranks stay in step.
        """
        power = 1 << (n_ranks.bit_length() - 1)
        in_turn = n_ranks > 2
        seconds, distance = 0.0, 1
        if n_ranks > power:
            seconds += 2 * self._swap(nbytes / 2, 1) + self._swap(nbytes, 1)
        while distance < power:
            is_first = distance == 1 and n_ranks == power
            half = nbytes / (2 * distance)
            seconds += self._swap(half, distance, in_turn and not is_first) + self._swap(half, distance, in_turn)
            distance *= 2
        return seconds

    def own(self, nbytes: float, n_ranks: int) -> float:
        """Horovod's own all-reduce of `nbytes` per rank."""
        if self.allreduce == "ring" or self.hierarchical:
            return self.ring(nbytes, n_ranks)
        return self.openmpi(nbytes, n_ranks)

    def own_bytes(self, nbytes: float, n_ranks: int) -> float:
        """What a rank sends of it, on average."""
        power = 1 << (n_ranks.bit_length() - 1)
        if self.allreduce == "ring" or self.hierarchical:
            power = n_ranks
        return (2 * (power - 1) + 2.5 * (n_ranks - power)) / n_ranks * nbytes

    def own_host_bytes(self, nbytes: float, n_ranks: int) -> float:
        """What leaves one host of it; nothing if all ranks are on one."""
        local = self._local(n_ranks)
        hosts = math.ceil(n_ranks / local)
        if hosts == 1:
            return 0.0
        if self.allreduce == "ring" or self.hierarchical:  # one stream crosses each host's link
            n = hosts if self.hierarchical else n_ranks
            return 2 * (n - 1) / n * nbytes
        if local == 1:
            return self.own_bytes(nbytes, n_ranks)
        power, distance, crossing = 1 << (n_ranks.bit_length() - 1), 1, 0.0
        while distance < power:
            crossing += nbytes / distance if distance >= local else 0.0
            distance *= 2
        return local * crossing

    def direct_host_bytes(self, nbytes: float, n_ranks: int) -> float:
        """What leaves one host when everyone sends `nbytes` to everyone else: all of its ranks' messages."""
        local = self._local(n_ranks)
        return local * (n_ranks - local) * nbytes

    def direct(self, nbytes: float, n_ranks: int) -> float:
        """Everyone sends `nbytes` to everyone else at once: one phase of the exchange.

        One latency, as all messages are under way together, and a little cpu time per message. The remote
        messages of all local ranks share the host's link: unlike a ring, this costs more with more ranks per
        host.
        """
        if n_ranks == 1:
            return 0.0
        local = self._local(n_ranks)
        inside = (local - 1) * nbytes / self.intra_bandwidth
        if n_ranks == local:
            return (n_ranks - 1) * self.intra_latency + inside
        remote = self.latency + self.direct_host_bytes(nbytes, n_ranks) / self.rate
        return (n_ranks - 1) * self.intra_latency + max(inside, remote)

    def between_hosts(self, nbytes: float) -> float:
        """All ranks of a host together send `nbytes` to others, at once: one phase of a two-level exchange."""
        return self.latency + nbytes / self.rate

    def small(self, n_ranks: int) -> float:
        """All-reduce of a few bytes by recursive doubling: the exponents of one bucket."""
        local = self._local(n_ranks)
        hosts = math.ceil(n_ranks / local)
        return math.ceil(math.log2(local)) * self.intra_latency + math.ceil(math.log2(hosts)) * self.latency


@dataclass(frozen=True)
class KernelRates:
    """Bytes of fp32 gradient per second and input message that each kernel handles on one rank."""

    scan: float = 12e9
    encode: float = 8e9
    reduce: float = 6e9
    decode: float = 8e9


@dataclass(frozen=True)
class Machine:
    """What one rank's processor does to the bytes, and Horovod's habits; `calibrate` measures all of it."""

    kernels: dict[str, KernelRates] = field(default_factory=lambda: {"4,3": KernelRates()})
    copy_rate: float = 8e9  # into and out of Horovod's fusion buffer
    add_rate: float = 6e9  # fp32 sum inside the ring
    add16_rate: float = 2e9  # fp16 sum inside the ring, in bytes of fp16
    cast_rate: float = 6e9  # fp32 <-> fp16 in Compression.fp16, in bytes of fp32
    # 146 tiny tensors over shared memory take 7.3 ms and 6.3 ms (benchmarks/results/sync.md).
    tensor_overhead: float = 50e-6  # one tensor in Horovod: half of it in its hook, half in synchronize()
    layer_overhead: float = 50e-6  # the same for one tensor in our exchange
    cycle_time: float = 1e-3
    fusion_bytes: float = 128 * 2**20
    bucket_bytes: float = 16e6  # fp32 bytes per bucket of our exchange
    overlap: float = 0.5  # share of the possible overlap of wire and kernels that the transport achieves
    # Ranks that share these cores: with more ranks than cores every cpu stage is slowed down.
    cores: float = math.inf
    calibrated_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"Machine: overlap must be in 0..1, got {self.overlap}")
        if not self.kernels:
            raise ValueError("Machine: kernels must hold the rates of at least one format, got none")

    def kernel_rates(self, exp_bits: int, man_bits: int) -> KernelRates:
        """Rates of this format, or of the measured format whose width is nearest."""
        exact = self.kernels.get(f"{exp_bits},{man_bits}")
        if exact is not None:
            return exact
        return self._nearest(1 + exp_bits + man_bits)

    def rates_of(self, wire_format: Format) -> KernelRates:
        """Rates of any format: those under its text, else of the measured (e, m) whose width is nearest."""
        if isinstance(wire_format, FloatFormat):
            return self.kernel_rates(wire_format.exp_bits, wire_format.man_bits)
        return self.kernels.get(str(wire_format)) or self._nearest(wire_format.bits)

    def _nearest(self, bits: int) -> KernelRates:
        pairs = {key: 1 + sum(map(int, key.split(","))) for key in self.kernels if "," in key}
        if not pairs:
            raise ValueError(f"Machine: kernels must hold the rates of an (e, m), got {', '.join(self.kernels)}")
        return self.kernels[min(pairs, key=lambda key: abs(pairs[key] - bits))]

    def slowdown(self, n_ranks: int) -> float:
        """How much slower cpu stages are than when calibrated, if all ranks share the same cores."""
        return max(1.0, n_ranks / self.cores) / max(1.0, self.calibrated_ranks / self.cores)


@dataclass(frozen=True)
class Prediction:
    """Times of one synchronisation: `total` from the start of backward, `exposed` after its end.

    `bytes_sent` is what a rank sends on average, `host_bytes` what leaves its host.
    """

    total: float
    exposed: float
    wire: float
    cpu: float
    bytes_sent: float
    host_bytes: float = 0.0


@dataclass
class _Job:
    """One part of a bucket on its way: its stages (kind, seconds) in order, and when the next may start.

    A "cpu" stage needs the rank's thread, a "wire" stage the link; a "delay" is a small message, which does not queue.
    """

    at: float
    stages: list[tuple[str, float]]


class _Rank:
    """A rank's clock: its own thread, which computes, and the wire, one message after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self._wire_free = 0.0
        self._jobs: list[_Job] = []

    def start(self, stages: Sequence[tuple[str, float]]) -> None:
        """Put a job on its way; it takes the cpu when it is its turn."""
        self._jobs.append(_Job(self.now, list(stages)))

    def look(self) -> None:
        """Run all stages that can run now, earlier jobs first; what they send takes the wire in the same order."""
        moved = True
        while moved:
            moved = False
            for job in self._jobs:
                while job.stages and (job.stages[0][0] != "cpu" or job.at <= self.now):
                    kind, seconds = job.stages.pop(0)
                    if kind == "wire":
                        job.at = self._wire_free = max(job.at, self._wire_free) + seconds
                    elif kind == "delay":
                        job.at += seconds
                    else:
                        job.at = self.now = self.now + seconds
                    moved = True
            self._jobs = [job for job in self._jobs if job.stages or job.at > self.now]

    def finish(self) -> float:
        """Bring all jobs home."""
        self.look()
        while self._jobs:
            self.now = min(job.at for job in self._jobs)
            self.look()
        return self.now


def fused(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Cut layers, in the given order, into Horovod's fusion buffers of `limit` fp32 bytes."""
    out: list[list[int]] = []
    filled = 0.0
    for size in sizes:
        if not out or filled + 4 * size > limit:
            out.append([])
            filled = 0.0
        out[-1].append(size)
        filled += 4 * size
    return out


def _shared(network: Network, machine: Machine, n_ranks: int) -> Network:
    """The network as ranks see it that share cores: its stack runs on them too."""
    return replace(network, host_rate=network.host_rate / machine.slowdown(n_ranks))


def _check(sizes: Sequence[int], n_ranks: int, backward: float) -> None:
    if n_ranks < 1:
        raise ValueError(f"perfmodel: n_ranks must be at least 1, got {n_ranks}")
    if not sizes or min(sizes) < 0:
        raise ValueError("perfmodel: sizes must be a non-empty list of element counts")
    if not 0 <= backward < math.inf:
        raise ValueError(f"perfmodel: backward must be finite and not negative, got {backward}")


def _on_cores(total: float, computing: float, n_ranks: int, machine: Machine) -> float:
    """No less than all ranks' computing, backward and Horovod's own thread included, takes on cores that they share."""
    return max(total, computing * n_ranks / machine.cores)


def predict_ring(
    sizes: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    bits: int = 32,
    backward: float = 0.0,
) -> Prediction:
    """Horovod's own all-reduce, ring or not, in fp32 (`bits=32`) or with `Compression.fp16` (`bits=16`).

    Hooks, and casts to fp16, are part of backward. In every cycle Horovod's thread fuses and reduces what is ready by
    then, while backward goes on; `synchronize()` then takes the results in order, and casts them back. That thread
    needs a core beside backward's: where ranks have none to spare it gets nowhere before backward is over, as measured
    (benchmarks/results/step.md).
    """
    _check(sizes, n_ranks, backward)
    if bits not in (16, 32):
        raise ValueError(f"predict_ring: bits must be 16 or 32, got {bits}")
    if n_ranks == 1:
        return Prediction(backward, 0.0, 0.0, 0.0, 0.0)
    network, slow = _shared(network, machine, n_ranks), machine.slowdown(n_ranks)
    order = list(reversed(sizes))
    per_tensor = [
        slow * (machine.tensor_overhead / 2 + (4 * n / machine.cast_rate if bits == 16 else 0.0)) for n in order
    ]
    ready, now = [], 0.0
    for seconds in per_tensor:
        now += backward / len(order) + seconds
        ready.append(now)
    beside = _reduce_in_cycles(order, ready, n_ranks, network, machine, bits)
    after = _reduce_in_cycles(order, [now] * len(order), n_ranks, network, machine, bits)
    ends = []
    for work in (beside, after):
        end = now
        for at, seconds in zip(work.done, per_tensor):
            end = max(end, at) + seconds
        ends.append(end)
    spare = min(1.0, max(0.0, machine.cores / n_ranks - 1))
    cpu = beside.cpu + 2 * sum(per_tensor)
    total = _on_cores(spare * ends[0] + (1 - spare) * ends[1], (cpu / slow) + backward, n_ranks, machine)
    return Prediction(total, total - backward, beside.wire, cpu, beside.sent, beside.left_host)


@dataclass
class _ThreadWork:
    """What Horovod's thread did: when each tensor was done, and what that took."""

    done: list[float] = field(default_factory=list)
    wire: float = 0.0
    cpu: float = 0.0
    sent: float = 0.0
    left_host: float = 0.0


def _reduce_in_cycles(
    order: Sequence[int], ready: Sequence[float], n_ranks: int, network: Network, machine: Machine, bits: int
) -> _ThreadWork:
    """Horovod's thread: in every cycle it fuses and reduces the tensors that are ready by then."""
    work, now, slow = _ThreadWork(), 0.0, machine.slowdown(n_ranks)
    while len(work.done) < len(order):
        first = len(work.done)
        now = max(now, ready[first]) + machine.cycle_time + network.small(n_ranks)
        work.wire += network.small(n_ranks)
        batch = [n for n, at in zip(order[first:], ready[first:]) if at <= now - network.small(n_ranks)]
        for group in fused(batch, machine.fusion_bytes * 32 / bits):
            payload = sum(group) * bits / 8
            copies = 2 * payload / machine.copy_rate if len(group) > 1 else 0.0
            add = payload * (n_ranks - 1) / n_ranks / (machine.add16_rate if bits == 16 else machine.add_rate)
            moving, computing = network.own(payload, n_ranks), slow * (copies + add)
            # Copies and sums happen inside the collective: Open MPI waits for each step before adding.
            now, work.wire, work.cpu = now + moving + computing, work.wire + moving, work.cpu + computing
            work.sent += network.own_bytes(payload, n_ranks)
            work.left_host += network.own_host_bytes(payload, n_ranks)
            work.done += [now] * len(group)
    return work


def predict_exchange(
    sizes: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    exp_bits: int = 4,
    man_bits: int = 3,
    backward: float = 0.0,
    hierarchy: str = "auto",
    wire_format: Format | None = None,
) -> Prediction:
    """Our packed exchange: one all-gather for two ranks, all-to-all and all-gather for more.

    In (e, m), or in any other `wire_format`.

    Flat, a host with k ranks sends k times the bytes; in two levels, which "auto" takes where it can, those of one
    rank. Kernels run in the thread that runs backward, between layers; how much of the rest of the possible overlap
    there is, `machine.overlap` tells.
    """
    _check(sizes, n_ranks, backward)
    jobs_of = _two_level_jobs if has_two_levels(n_ranks, network, hierarchy) else _flat_jobs
    if n_ranks == 1:
        return Prediction(backward, 0.0, 0.0, 0.0, 0.0)
    slow = machine.slowdown(n_ranks)
    network, wire_format = _shared(network, machine, n_ranks), wire_format or FloatFormat(exp_bits, man_bits)
    specs = [LayerSpec("", (size,), 0, wire_format) for size in reversed(sizes)]
    rank, in_a_row = _Rank(), 0.0
    wire = cpu = sent = left_host = 0.0
    for group in split_into_buckets(specs, machine.bucket_bytes / 1e6):
        for _ in group:
            rank.now += backward / len(specs) + slow * machine.layer_overhead
            cpu += slow * machine.layer_overhead
            rank.look()
        jobs, of_rank, of_host = jobs_of(specs, group, n_ranks, network, machine, wire_format)
        for stages in jobs:
            rank.start(stages)
        rank.look()
        computing = sum(seconds for stages in jobs for kind, seconds in stages if kind == "cpu")
        moving = sum(seconds for stages in jobs for kind, seconds in stages if kind != "cpu")
        wire, cpu = wire + moving, cpu + computing
        own_hooks = slow * machine.layer_overhead * len(group)
        ready = (group[-1] + 1) * (backward / len(specs) + slow * machine.layer_overhead)
        in_a_row = max(in_a_row + own_hooks, ready) + moving + computing
        sent, left_host = sent + of_rank, left_host + of_host
    full = rank.finish()
    serial = max(full, in_a_row)
    total = serial - machine.overlap * (serial - full)
    total = _on_cores(total, (cpu / slow) + backward, n_ranks, machine)
    return Prediction(total, total - backward, wire, cpu, sent, left_host)


_Jobs = tuple[list[list[tuple[str, float]]], float, float]
"""The stages of a bucket's parts, and the bytes that leave a rank and its host."""


def _flat_jobs(
    specs: Sequence[LayerSpec],
    group: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    wire_format: Format,
) -> _Jobs:
    """One bucket of the flat exchange."""
    rates, slow = machine.rates_of(wire_format), machine.slowdown(n_ranks)
    n = sum(specs[layer].n_elements for layer in group)
    grad = slow * 4 * n
    stages = [("cpu", grad / rates.scan), ("delay", network.small(n_ranks))]
    if n_ranks > 2:
        message = n * wire_format.bits / 8 + wire_format.side_bytes(n)
        part = message / n_ranks
        phase = network.direct(part, n_ranks)
        stages += [("cpu", grad / rates.encode), ("wire", phase), ("cpu", grad / rates.reduce), ("wire", phase)]
        stages += [("cpu", grad / rates.decode)]
        return [stages], 2 * (n_ranks - 1) * part, 2 * network.direct_host_bytes(part, n_ranks)
    jobs, sent = [], 0.0
    layout = lay_out_bucket(specs, group, 1)
    for rows, span in layout.parts():  # part by part: one is on its way while the next is encoded
        grad, message = slow * 4 * float(layout.segments["n"][rows].sum()), span.stop - span.start
        stages += [("cpu", grad / rates.encode), ("wire", network.direct(message, 2)), ("cpu", 2 * grad / rates.decode)]
        jobs.append(stages)
        stages, sent = [], sent + message
    return jobs, sent, network.direct_host_bytes(sent, n_ranks)


def has_two_levels(n_ranks: int, network: Network, hierarchy: str = "auto") -> bool:
    """Whether the exchange sums inside hosts first; ValueError if it is to and cannot."""
    if hierarchy not in ("auto", "flat", "two-level"):
        raise ValueError(f"perfmodel: hierarchy must be auto, flat or two-level, got {hierarchy!r}")
    local = network.ranks_per_host
    possible = 1 < local < n_ranks and n_ranks % local == 0
    if hierarchy == "two-level" and not possible:
        raise ValueError(f"perfmodel: {n_ranks} ranks, {local} on a host, have no two levels")
    return possible and hierarchy != "flat"


def _two_level_jobs(
    specs: Sequence[LayerSpec],
    group: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    wire_format: Format,
) -> _Jobs:
    """One bucket in two levels."""
    rates, slow = machine.rates_of(wire_format), machine.slowdown(n_ranks)
    local = network.ranks_per_host
    hosts = n_ranks // local
    n = sum(specs[layer].n_elements for layer in group)
    grad, message = slow * 4 * n, n * wire_format.bits / 8 + wire_format.side_bytes(n)
    inside = math.ceil(math.log2(local)) * network.intra_latency
    stages = [
        ("delay", network.small(n_ranks)),
        ("cpu", grad / machine.copy_rate),  # into the memory that the ranks of a host share
        ("delay", inside),
        ("cpu", grad / machine.add_rate + grad / local / rates.scan),
        ("delay", network.small(n_ranks)),
        ("cpu", grad / local / rates.encode),
    ]
    if hosts == 2:
        left = message
        stages += [("wire", network.between_hosts(message)), ("delay", inside), ("cpu", 2 * grad / rates.decode)]
    else:
        left = 2 * (hosts - 1) / hosts * message
        phase = ("wire", network.between_hosts(left / 2))
        stages += [phase, ("cpu", grad / local / rates.reduce), phase]
        stages += [("delay", inside), ("cpu", grad / rates.decode)]
    return [stages], left / local, left


def scaling_efficiency(prediction: Prediction, forward: float, backward: float) -> float:
    """Time of a step on one rank over the time of the same step (same work per rank) with communication."""
    if forward + backward <= 0:
        raise ValueError("scaling_efficiency: forward + backward must be positive")
    return (forward + backward) / (forward + prediction.total)


def paying_bandwidths(
    sizes: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    exp_bits: int = 4,
    man_bits: int = 3,
    bits: int = 32,
    backward: float = 0.0,
    low: float = 1e5,
    high: float = 1e12,
    also: Sequence[float] = (),
    wire_format: Format | None = None,
) -> list[tuple[float, float]]:
    """The ranges of bandwidth (bytes/s) in which the exchange beats Horovod in `bits`.

    From 0 if it wins at `low`, to infinity if it wins at `high`. Looks at three bandwidths per decade and at those in
    `also`, so a narrower range may go unseen.
    """

    def gain(bandwidth: float) -> float:
        link = replace(network, bandwidth=bandwidth)
        ring = predict_ring(sizes, n_ranks, link, machine, bits, backward).total
        ours = predict_exchange(sizes, n_ranks, link, machine, exp_bits, man_bits, backward, wire_format=wire_format)
        return ring - ours.total

    n_points = 1 + math.ceil(3 * math.log10(high / low))
    points = sorted({low * (high / low) ** (k / (n_points - 1)) for k in range(n_points)} | set(also))
    pays = [gain(point) > 0 for point in points]
    ranges: list[tuple[float, float]] = []
    start: float | None = 0.0 if pays[0] else None
    for (left, before), (right, after) in zip(zip(points, pays), zip(points[1:], pays[1:])):
        if before == after:
            continue
        while right / left > 1.001:
            middle = math.sqrt(left * right)
            left, right = (middle, right) if (gain(middle) > 0) == before else (left, middle)
        if after:
            start = right
        elif start is not None:
            ranges.append((start, left))
            start = None
    return ranges + ([(start, math.inf)] if start is not None else [])


def break_even_bandwidth(
    sizes: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    exp_bits: int = 4,
    man_bits: int = 3,
    bits: int = 32,
    backward: float = 0.0,
    low: float = 1e5,
    high: float = 1e12,
) -> float:
    """Bandwidth (bytes/s) up to which the exchange beats Horovod in `bits` from `low` on; 0 if not even there."""
    ranges = paying_bandwidths(sizes, n_ranks, network, machine, exp_bits, man_bits, bits, backward, low, high)
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0.0


def is_plausible(name: str, rate: float) -> bool:
    """Whether a measured rate, bytes per second, can be one."""
    slowest = SLOWEST_LINK if name in ("bandwidth", "host_rate") else SLOWEST
    return slowest <= rate <= FASTEST


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: parameters, reasons why some are not measured, and remarks on how others were."""

    network: Network
    machine: Machine
    unmeasured: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def save_calibration(path: str | Path, found: Calibration, measured: dict[str, Any]) -> None:
    """Write the parameters and the measurements they come from as JSON; infinite and unmeasured values are null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        return None if isinstance(value, float) and math.isinf(value) else value

    document: dict[str, Any] = {
        "schema": SCHEMA,
        "network": asdict(found.network),
        "machine": asdict(found.machine),
        "unmeasured": found.unmeasured,
        "notes": found.notes,
        "measured": measured,
    }
    for part in ("network", "machine"):
        for name in found.unmeasured.keys() & document[part].keys():
            document[part][name] = None
    Path(path).write_text(json.dumps(finite(document), indent=2) + "\n")


def load_calibration(path: str | Path, assume_defaults: bool = False) -> Calibration:
    """Read what `save_calibration` wrote; values that no machine has are an error, whoever wrote them.

    Unmeasured parameters have their defaults here and are listed in `unmeasured`, unless `assume_defaults`.
    """
    document = json.loads(Path(path).read_text())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"load_calibration: {path} must have schema {SCHEMA}, got {found}; calibrate again")
    unmeasured = document["unmeasured"]

    def values(part: str) -> dict[str, Any]:
        return {
            name: math.inf if value is None else value
            for name, value in document[part].items()
            if name not in unmeasured
        }

    machine = values("machine")
    if "kernels" in machine:
        machine["kernels"] = {key: KernelRates(**rates) for key, rates in machine["kernels"].items()}
    network = values("network")
    rates = {name: value for name, value in (network | machine).items() if name.endswith(("_rate", "bandwidth"))}
    rates |= {
        f"kernels[{key}].{name}": value
        for key, one in machine.get("kernels", {}).items()
        for name, value in asdict(one).items()
    }
    for name, value in rates.items():
        if not is_plausible(name, value) and not (name == "host_rate" and value == math.inf):
            raise ValueError(
                f"load_calibration: {path} says that {name} is {value:.3g} bytes per second, which is no "
                f"measurement; calibrate again"
            )
    return Calibration(Network(**network), Machine(**machine), {} if assume_defaults else unmeasured, document["notes"])
