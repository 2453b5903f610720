"""Predicted cells, by the performance model, and the bandwidth at which low precision stops helping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from horovod_aps.bench.cases import parse_link
from horovod_aps.tools import perfmodel
from horovod_aps.tools.perfmodel import GBIT, Machine
from horovod_aps.tools.predict import nominal
from horovod_aps.tools.study.cells import LOCAL, Network, Place, Record, format_of, gbits

HELPS = 1.05  # a step that is less than 5 % faster is not worth a change
LOW, HIGH = 1e6, 1e12  # bytes/s


@dataclass(frozen=True)
class Setting:
    """What predictions are made for."""

    network: perfmodel.Network
    machine: Machine
    batch: int = 32
    """Samples of one rank and step."""
    tflops: float = 5.0
    """What a rank computes per second, in 10^12 floating-point operations."""

    def compute(self, network: Network) -> tuple[float, float]:
        """Seconds of forward and backward: two operations per multiply-add, and backward twice forward."""
        forward = 2 * network.macs * self.batch / (self.tflops * 1e12)
        return forward, 2 * forward


def link_of(setting: Setting, link: str, ranks: int, launcher: str) -> perfmodel.Network:
    """The model's network for a link's text; shared memory is one host that has all ranks."""
    allreduce = "openmpi" if launcher == "mpi" else "ring"
    base = replace(setting.network, allreduce=allreduce)
    rate, delay_ms = parse_link(link)
    if rate == LOCAL:
        return replace(base, ranks_per_host=ranks)
    bandwidth = gbits(link)
    assert bandwidth is not None
    return replace(nominal(base, bandwidth * GBIT), latency=base.latency + delay_ms / 1e3)


def _synchronisation(
    network: Network, method: str, ranks: int, link: perfmodel.Network, setting: Setting, backward: float
) -> perfmodel.Prediction:
    if method in ("fp32", "fp16"):
        bits = 32 if method == "fp32" else 16
        return perfmodel.predict_ring(network.sizes, ranks, link, setting.machine, bits, backward)
    return perfmodel.predict_exchange(
        network.sizes, ranks, link, setting.machine, backward=backward, wire_format=format_of(method)
    )


def predicted_cells(
    network: Network, links: Sequence[str], ranks: int, launcher: str, methods: Sequence[str], setting: Setting
) -> Iterator[Record]:
    """One cell per link and method: synchronisation alone, and a step in which it overlaps with backward."""
    forward, backward = setting.compute(network)
    for link in links:
        where = link_of(setting, link, ranks, launcher)
        for method in methods:
            alone = _synchronisation(network, method, ranks, where, setting, 0.0)
            with_backward = _synchronisation(network, method, ranks, where, setting, backward)
            step = forward + with_backward.total
            yield {
                **vars(Place("predicted", network.name, link, ranks, launcher)),
                "method": method,
                "settings": {"batch": setting.batch, "tflops": setting.tflops},
                "sync_s": alone.total,
                "step_s": step if backward else None,
                "compute_s": forward + backward if backward else None,
                "epoch_s": step * math.ceil(network.n_samples / (setting.batch * ranks)) if backward else None,
                "bytes": alone.bytes_sent,
            }


def stops_helping(network: Network, method: str, ranks: int, launcher: str, setting: Setting) -> float | None:
    """Gbit/s from which on a step is less than 5 % faster than fp32's; infinite if never, None if it never helps."""
    forward, backward = setting.compute(network)

    def helps(bandwidth: float) -> bool:
        link = replace(link_of(setting, "1gbit", ranks, launcher), bandwidth=bandwidth)
        times = [
            forward + _synchronisation(network, one, ranks, link, setting, backward).total for one in ("fp32", method)
        ]
        return times[0] > HELPS * times[1]

    points = [LOW * (HIGH / LOW) ** (k / 12) for k in range(13)]
    known = [helps(point) for point in points]
    if not any(known):
        return None
    last = max(k for k, one in enumerate(known) if one)
    if last == len(points) - 1:
        return math.inf
    low, high = points[last], points[last + 1]
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if helps(middle) else (low, middle)
    return low / GBIT
