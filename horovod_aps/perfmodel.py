"""Alpha-beta model of one gradient synchronisation: Horovod's all-reduce against our packed exchange.

It needs only layer sizes and a few rates, so it answers "what would APS buy on that cluster?" beforehand.
`calibrate.py` measures the rates, `predict.py` prints the answers. Units are seconds, bytes and bytes per
second.

What is modelled: messages cost `latency + bytes / rate` on a flat or two-level network; kernels and copies
cost bytes over a measured rate; tensors are cut into buckets that travel through "cpu" and "wire" stages like
jobs through two machines; a bucket can start when backward has produced its gradients. What is not:
congestion, stragglers, jitter, and the processor time that the network itself takes from the ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from horovod_aps.formats import FloatFormat
from horovod_aps.layout import LayerSpec, lay_out_bucket, split_into_buckets

GBIT = 1e9 / 8
SCHEMA = 1
ALLREDUCES = ("ring", "openmpi")


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
    # Two-level ring (HOROVOD_HIERARCHICAL_ALLREDUCE) for Horovod's own; our exchange is always flat.
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
            raise ValueError(
                f"Network: latency must not be negative, got {self.latency}, {self.intra_latency}"
            )

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
        return self.latency + self.ranks_per_host * nbytes * (1 + in_turn) / self.rate

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
        remote = self.latency + local * (n_ranks - local) * nbytes / self.rate
        return (n_ranks - 1) * self.intra_latency + max(inside, remote)

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
    # 146 tiny tensors over shared memory take 8.2 ms and 10.2 ms (benchmarks/results/sync.md).
    tensor_overhead: float = 50e-6  # hook, enqueue and negotiation of one tensor in Horovod
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
        width = exp_bits + man_bits
        return self.kernels[min(self.kernels, key=lambda key: abs(sum(map(int, key.split(","))) - width))]

    def slowdown(self, n_ranks: int) -> float:
        """How much slower cpu stages are than when calibrated, if all ranks share the same cores."""
        return max(1.0, n_ranks / self.cores) / max(1.0, self.calibrated_ranks / self.cores)


@dataclass(frozen=True)
class Prediction:
    """Times of one synchronisation: `total` from the start of backward, `exposed` after its end."""

    total: float
    exposed: float
    wire: float
    cpu: float
    bytes_sent: float


@dataclass(frozen=True)
class _Job:
    """One bucket: when its gradients are ready, and its stages (resource, seconds) in order."""

    ready: float
    stages: list[tuple[str, float]]


def _schedule(jobs: Sequence[_Job]) -> float:
    """End of the last stage when each resource serves one stage at a time, first come first served."""
    free: dict[str, float] = {}
    position, earliest = [0] * len(jobs), [job.ready for job in jobs]
    pending = [index for index, job in enumerate(jobs) if job.stages]
    while pending:

        def start(index: int) -> float:
            return max(earliest[index], free.get(jobs[index].stages[position[index]][0], 0.0))

        # A later bucket's first stage rarely beats an earlier bucket's next one: buckets enter in order.
        index = min(pending[:8], key=lambda i: (start(i), i))
        resource, seconds = jobs[index].stages[position[index]]
        earliest[index] = free[resource] = start(index) + seconds
        position[index] += 1
        if position[index] == len(jobs[index].stages):
            pending.remove(index)
    return max(earliest, default=0.0)


def _finish(jobs: Sequence[_Job], overlap: float) -> float:
    """End time between no overlap of cpu and wire (one resource) and full overlap (two)."""
    serial = _schedule([_Job(job.ready, [("cpu", seconds) for _, seconds in job.stages]) for job in jobs])
    return serial - overlap * (serial - _schedule(jobs))


def fused(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Cut the layers, last first as backward produces them, into Horovod's fusion buffers of `limit` fp32 bytes."""
    out: list[list[int]] = []
    filled = 0.0
    for size in reversed(sizes):
        if not out or filled + 4 * size > limit:
            out.append([])
            filled = 0.0
        out[-1].append(size)
        filled += 4 * size
    return out


def _ready_times(groups: Sequence[Sequence[int]], backward: float) -> list[float]:
    """When each bucket is complete if every layer takes the same share of backward."""
    n_layers = sum(len(group) for group in groups)
    done, times = 0, []
    for group in groups:
        done += len(group)
        times.append(backward * done / n_layers)
    return times


def _shared(network: Network, machine: Machine, n_ranks: int) -> Network:
    """The network as ranks see it that share cores: its stack runs on them too."""
    return replace(network, host_rate=network.host_rate / machine.slowdown(n_ranks))


def _check(sizes: Sequence[int], n_ranks: int) -> None:
    if n_ranks < 1:
        raise ValueError(f"perfmodel: n_ranks must be at least 1, got {n_ranks}")
    if not sizes or min(sizes) < 0:
        raise ValueError("perfmodel: sizes must be a non-empty list of element counts")


def _prediction(jobs: list[_Job], machine: Machine, backward: float, sent: float) -> Prediction:
    total = max(backward, _finish(jobs, machine.overlap))
    spent = {"cpu": 0.0, "wire": 0.0}
    for job in jobs:
        for resource, seconds in job.stages:
            spent[resource] += seconds
    return Prediction(total, total - backward, spent["wire"], spent["cpu"], sent)


def predict_ring(
    sizes: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    bits: int = 32,
    backward: float = 0.0,
) -> Prediction:
    """Horovod's own all-reduce, ring or not, in fp32 (`bits=32`) or with `Compression.fp16` (`bits=16`)."""
    _check(sizes, n_ranks)
    if bits not in (16, 32):
        raise ValueError(f"predict_ring: bits must be 16 or 32, got {bits}")
    if n_ranks == 1:
        return Prediction(backward, 0.0, 0.0, 0.0, 0.0)
    network = _shared(network, machine, n_ranks)
    groups = fused(sizes, machine.fusion_bytes * 32 / bits)
    jobs, slow, sent = [], machine.slowdown(n_ranks), 0.0
    for group, ready in zip(groups, _ready_times(groups, backward), strict=True):
        n = sum(group)
        payload = n * bits / 8
        copies = 2 * payload / machine.copy_rate if len(group) > 1 else 0.0
        casts = 2 * 4 * n / machine.cast_rate if bits == 16 else 0.0
        add = payload * (n_ranks - 1) / n_ranks / (machine.add16_rate if bits == 16 else machine.add_rate)
        hooks = machine.tensor_overhead * len(group)
        # Copies and sums happen inside the collective: Open MPI waits for each step before adding.
        jobs.append(
            _Job(
                ready,
                [
                    ("cpu", slow * (hooks + (casts + copies) / 2)),
                    (
                        "wire",
                        machine.cycle_time
                        + network.small(n_ranks)
                        + network.own(payload, n_ranks)
                        + slow * add,
                    ),
                    ("cpu", slow * (casts + copies) / 2),
                ],
            )
        )
        sent += network.own_bytes(payload, n_ranks)
    return _prediction(jobs, machine, backward, sent)


def predict_exchange(
    sizes: Sequence[int],
    n_ranks: int,
    network: Network,
    machine: Machine,
    exp_bits: int = 4,
    man_bits: int = 3,
    backward: float = 0.0,
) -> Prediction:
    """Our packed exchange: one all-gather for two ranks, all-to-all and all-gather for more."""
    _check(sizes, n_ranks)
    if n_ranks == 1:
        return Prediction(backward, 0.0, 0.0, 0.0, 0.0)
    rates, slow, sent = machine.kernel_rates(exp_bits, man_bits), machine.slowdown(n_ranks), 0.0
    network, wire_format = _shared(network, machine, n_ranks), FloatFormat(exp_bits, man_bits)
    specs = [LayerSpec("", (size,), 0, wire_format) for size in reversed(sizes)]
    groups = split_into_buckets(specs, machine.bucket_bytes / 1e6)
    jobs = []
    for group, ready in zip(groups, _ready_times(groups, backward), strict=True):
        n = sum(specs[layer].n_elements for layer in group)
        grad = slow * 4 * n
        stages = [
            ("cpu", slow * machine.layer_overhead * len(group) + grad / rates.scan),
            ("wire", network.small(n_ranks)),
        ]
        if n_ranks == 2:  # part by part: one is on its way while the next is encoded
            layout = lay_out_bucket(specs, group, 1)
            for rows, span in layout.parts():
                grad, message = slow * 4 * float(layout.segments["n"][rows].sum()), span.stop - span.start
                stages += [
                    ("cpu", grad / rates.encode),
                    ("wire", network.direct(message, 2)),
                    ("cpu", 2 * grad / rates.decode),
                ]
                jobs.append(_Job(ready, stages))
                stages = []
                sent += message
            continue
        message = n * wire_format.bits / 8
        phase = network.direct(message / n_ranks, n_ranks)
        stages += [
            ("cpu", grad / rates.encode),
            ("wire", phase),
            ("cpu", grad / rates.reduce),
            ("wire", phase),
            ("cpu", grad / rates.decode),
        ]
        sent += 2 * (n_ranks - 1) / n_ranks * message
        jobs.append(_Job(ready, stages))
    return _prediction(jobs, machine, backward, sent)


def scaling_efficiency(prediction: Prediction, forward: float, backward: float) -> float:
    """Time of a step on one rank over the time of the same step (same work per rank) with communication."""
    if forward + backward <= 0:
        raise ValueError("scaling_efficiency: forward + backward must be positive")
    return (forward + backward) / (forward + prediction.total)


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
    """Bandwidth (bytes/s) below which the exchange beats Horovod in `bits`; 0 if never, inf if always."""

    def gain(bandwidth: float) -> float:
        link = replace(network, bandwidth=bandwidth)
        ring = predict_ring(sizes, n_ranks, link, machine, bits, backward).total
        return ring - predict_exchange(sizes, n_ranks, link, machine, exp_bits, man_bits, backward).total

    if gain(high) > 0:
        return math.inf
    if gain(low) <= 0:
        return 0.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def save_calibration(path: str | Path, network: Network, machine: Machine, measured: dict[str, Any]) -> None:
    """Write the parameters and the measurements they come from as JSON (infinite values as null)."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        return None if isinstance(value, float) and math.isinf(value) else value

    document = {
        "schema": SCHEMA,
        "network": asdict(network),
        "machine": asdict(machine),
        "measured": measured,
    }
    Path(path).write_text(json.dumps(finite(document), indent=2) + "\n")


def load_calibration(path: str | Path) -> tuple[Network, Machine]:
    """Read what `save_calibration` wrote."""
    document = json.loads(Path(path).read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"load_calibration: {path} must have schema {SCHEMA}, got {document.get('schema')}")

    def infinite(values: dict[str, Any]) -> dict[str, Any]:
        return {key: math.inf if value is None else value for key, value in values.items()}

    machine = infinite(document["machine"])
    machine["kernels"] = {key: KernelRates(**rates) for key, rates in machine["kernels"].items()}
    return Network(**infinite(document["network"])), Machine(**machine)
