"""A step of ResNet-50 on GPUs by the clock of a device that does not exist; nothing here is measured.

    python benchmarks/gpu_timeline.py      the table of docs/performance.md, and docs/images/gpu-timeline.svg

The exchange, its launchers and its messages through pinned memory are the real code, of all ranks in one process. Only
the clock is simulated: what a launch, a wait, a copy over PCIe, a kernel and a message take (`Costs`).
Kernels compute nothing; every scan finds the same exponent.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from horovod_aps.engine import exchange as exchange_module
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.kernels.memory import NOT_READY
from horovod_aps.options import Options
from horovod_aps.tools.shapes import MODELS

FRAMEWORK = 77  # the address of the framework's stream
SMALL = 1 << 16  # bytes: exponents and tables, whose contents are real
TOP_GRADIENT, TOP_SUM = 0x3F800000, 0x3FF0000000000000  # what every scan finds: 1.0, as float32 and as float64
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "gpu-timeline.svg"
SETTINGS = [(2, 1.0), (2, 25.0), (8, 1.0), (8, 25.0)]  # ranks, each on a host of its own, and Gbit/s


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes per second."""

    launch: float = 5e-6  # of the host, for a kernel or a copy
    wait: float = 50e-6  # of the host, to wait for the device
    call: float = 1e-6  # of the host, for an event or a question
    pcie: float = 12e9
    kernels: float = 0.7 * 1.5e12
    gbit: float = 25.0
    latency: float = 20e-6  # of a message
    look: float = 20e-6  # of the host, for one look at all that moves
    poll: float = 50e-6  # asleep between looks that find nothing
    backward: float = 60e-3  # of the device, every layer the same
    queueing: float = 20e-3  # of the host, to queue backward

    @property
    def network(self) -> float:
        return self.gbit * 1e9 / 8


@dataclass
class Span:
    """Something that took time on one rank."""

    row: str
    begin: float
    end: float


@dataclass
class Machine:
    """The clock of one rank: its host and its streams."""

    costs: Costs
    now: float = 0.0
    streams: dict[int, float] = field(default_factory=dict)  # when all that is queued is over
    spans: list[Span] = field(default_factory=list)
    kernel_bytes: float = 0.0  # of the next launch
    top: int = 0  # what the next scan finds
    n_waits: int = 0

    def queue(self, stream: int, row: str, seconds: float) -> None:
        begin = max(self.streams.get(stream, 0.0), self.now)
        self.streams[stream] = begin + seconds
        self.spans.append(Span(row, begin, begin + seconds))


def device(machine: Machine) -> Any:
    """What the launchers ask of CuPy, by the clock of a machine."""
    addresses = iter(range(1 << 40, 1 << 62, 1 << 34))
    numbers = iter(range(1, 1 << 20))

    class Nothing:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    class Device(Nothing):
        def __init__(self, index: int = 0) -> None:
            self.id = index

    class Stream(Nothing):
        def __init__(self, ptr: int | None = None, non_blocking: bool = True, priority: int | None = None) -> None:
            self.ptr = next(numbers) if ptr is None else ptr

        def wait_event(self, event: Any) -> None:
            machine.now += machine.costs.call
            machine.streams[self.ptr] = max(machine.streams.get(self.ptr, 0.0), event.time)

        def synchronize(self) -> None:
            machine.n_waits += 1
            machine.now = max(machine.now + machine.costs.wait, machine.streams.get(self.ptr, 0.0))

    class Event:
        def __init__(self, disable_timing: bool = True) -> None:
            self.time = 0.0
            self.ptr = self

        def record(self, stream: Any) -> None:
            machine.now += machine.costs.call
            self.time = max(machine.streams.get(stream.ptr, 0.0), machine.now)

        def synchronize(self) -> None:
            machine.n_waits += 1
            machine.now = max(machine.now + machine.costs.wait, self.time)

    class PinnedMemory:
        def __init__(self, size: int) -> None:
            self._array = np.zeros(max(size, 1), np.uint8)
            self.ptr = self._array.ctypes.data

    class Runtime:
        memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N815 (CuPy's names)

        @staticmethod
        def eventQuery(event: Any) -> int:  # noqa: N802
            machine.now += machine.costs.call
            return 0 if machine.now >= event.time else NOT_READY

        @staticmethod
        def eventRecord(event: Any, stream: int) -> None:  # noqa: N802
            event.record(Stream(stream))

        @staticmethod
        def streamWaitEvent(stream: int, event: Any) -> None:  # noqa: N802
            Stream(stream).wait_event(event)

        @staticmethod
        def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
            machine.now += machine.costs.launch
            seconds = size / machine.costs.pcie
            row = "copies" if size > SMALL else ""
            machine.queue(stream, row, seconds)  # all large ones are on one stream
            if kind == 2 and size <= SMALL and size % 8 == 0:
                np.frombuffer((ctypes.c_uint8 * size).from_address(dst), np.uint64)[:] = machine.top

        @staticmethod
        def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
            machine.now += machine.costs.launch
            machine.queue(stream, "", size / machine.costs.kernels)

    def alloc(size: int) -> Any:
        return SimpleNamespace(ptr=next(addresses))

    cuda = SimpleNamespace(
        Device=Device, Stream=Stream, Event=Event, PinnedMemory=PinnedMemory,
        runtime=Runtime, alloc=alloc, memory=SimpleNamespace(OutOfMemoryError=MemoryError),
    )  # fmt: skip
    return SimpleNamespace(cuda=cuda)


class ClockedKernels(CudaKernels):
    """The launchers as they are; kernels only take time, which backward loses."""

    machine: Machine

    def _run(self, name: str, segs: Any, exponents: Any, common: Any, rows: Any, *rest: Any) -> None:
        n_in = int(rest[1]) if name in ("reduce", "reduce_scan", "decode") else 0
        per_element = {"scan": 4, "encode": 5, "decode": 4 + n_in, "reduce_scan": n_in, "reduce": n_in + 1}[name]
        self.machine.kernel_bytes = per_element * float(segs["n"][rows].sum())
        self.machine.top = TOP_GRADIENT if name == "scan" else TOP_SUM
        super()._run(name, segs, exponents, common, rows, *rest)

    def _launch(self, name: str, n_work: int, *arguments: np.integer) -> None:
        assert "_wide" not in name
        machine = self.machine
        machine.now += machine.costs.launch
        seconds = machine.kernel_bytes / machine.costs.kernels
        machine.queue(self._active.ptr, "kernels", seconds)
        machine.streams[FRAMEWORK] = machine.streams.get(FRAMEWORK, 0.0) + seconds
        self._is_dirty = True


class Network:
    """Between machines, each of which sends and receives at the full rate at the same time, in order."""

    def __init__(self, machines: list[Machine]) -> None:
        n = len(machines)
        self.machines, self.send_free, self.receive_free = machines, [0.0] * n, [0.0] * n
        self.mail: list[deque[tuple[float, int, bytes]]] = [deque() for _ in range(n)]
        self.parcels: dict[tuple[int, int, int], deque[tuple[float, np.ndarray]]] = {}

    def send(self, source: int, sizes: Mapping[int, int]) -> dict[int, float]:
        """When the last byte is there, by target; messages that are sent together share the way out."""
        machine, n_bytes = self.machines[source], sum(sizes.values())
        begin = max(machine.now, self.send_free[source])
        self.send_free[source] = end = begin + n_bytes / machine.costs.network
        if n_bytes > SMALL:
            machine.spans.append(Span("network", begin, end))
        for target, size in sizes.items():
            self.receive_free[target] = max(begin, self.receive_free[target]) + size / machine.costs.network
        return {target: max(end, self.receive_free[target]) + machine.costs.latency for target in sizes}


class ClockedTransport:
    """One rank's end of the network."""

    memory, hosts = "host", None

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self.rank, self.size = network, rank, len(network.machines)
        self._machine = network.machines[rank]

    def ready(self) -> bool:
        return True

    def post(self, message: bytes) -> None:
        others = {rank: len(message) for rank in range(self.size) if rank != self.rank}
        for rank, arrival in self._network.send(self.rank, others).items():
            self._network.mail[rank].append((arrival, self.rank, message))

    def heard(self) -> list[tuple[int, bytes]]:
        box = self._network.mail[self.rank]
        late, found, behind = deque(), [], set()
        for arrival, rank, message in box:
            if arrival <= self._machine.now and rank not in behind:
                found.append((rank, message))
            else:
                behind.add(rank)
                late.append((arrival, rank, message))
        self._network.mail[self.rank] = late
        return found

    def gone(self) -> set[int]:
        return set()

    def transfer(self, outgoing: Mapping[int, np.ndarray], incoming: Mapping[int, np.ndarray], tag: int) -> Any:
        arrivals = self._network.send(self.rank, {rank: len(array) for rank, array in outgoing.items()})
        for rank, array in outgoing.items():
            arrival, content = arrivals[rank], array.copy() if len(array) <= SMALL else array[:0]
            self._network.parcels.setdefault((self.rank, rank, tag), deque()).append((arrival, content))
        wanted, machine, parcels = dict(incoming), self._machine, self._network.parcels

        class Request:
            def done(_self) -> bool:  # noqa: N805
                for rank, array in list(wanted.items()):
                    waiting = parcels.get((rank, self.rank, tag))
                    if not waiting or waiting[0][0] > machine.now:
                        return False
                    content = waiting.popleft()[1]
                    array[: len(content)] = content
                    del wanted[rank]
                return True

        return Request()

    def close(self) -> None:
        pass


class Rank:
    """One rank's program: backward, whose hooks hand in gradients, then the wait for all results."""

    def __init__(self, network: Network, rank: int, shapes: list[tuple[int, ...]]) -> None:
        self.machine = network.machines[rank]
        self.kernels = ClockedKernels(device(self.machine), stream=FRAMEWORK, index=0)
        self.kernels.machine = self.machine
        self.exchange = Exchange(self.kernels, ClockedTransport(network, rank), Options(4, 3), overlap=True)
        self.exchange.any_thread = False
        self._shapes, self._size = shapes, len(network.machines)

    def step(self) -> Generator[None, None, None]:
        machine, costs = self.machine, self.machine.costs
        layers = [
            Layer(f"l{i}", shape, 0, at := (i + 1) << 32, at, 1 / self._size, None)
            for i, shape in enumerate(self._shapes)
        ]
        for layer in reversed(layers):
            machine.now += costs.queueing / len(layers)
            machine.queue(FRAMEWORK, "backward", costs.backward / len(layers))
            self.exchange.submit(layer)
            yield
        for moved in self.exchange.steps(layers):
            machine.now += costs.look + (0 if moved else costs.poll)
            yield
        self.kernels.end()
        machine.now = max(machine.now, machine.streams[FRAMEWORK])


@dataclass
class Result:
    """One step, in milliseconds from its beginning."""

    n_ranks: int
    gbit: float
    spans: list[Span]
    backward: float
    step: float
    n_waits: int

    @property
    def exposed(self) -> float:
        """What the exchange adds to backward."""
        return self.step - self.backward

    @property
    def network(self) -> float:
        """While bytes leave this rank."""
        return sum(span.end - span.begin for span in self.spans if span.row == "network")

    @property
    def overlapped(self) -> float:
        """Of that, while backward runs."""
        return sum(max(0.0, min(s.end, self.backward) - s.begin) for s in self.spans if s.row == "network")


def simulate(n_ranks: int, gbit: float, model: str = "resnet50", n_steps: int = 3) -> Result:
    """The last of some steps, as rank 0 sees it; the first is talked about, and brings tables to the device."""
    machines = [Machine(Costs(gbit=gbit)) for _ in range(n_ranks)]
    network = Network(machines)
    ranks = [Rank(network, rank, [tuple(shape) for _, shape in MODELS[model]()]) for rank in range(n_ranks)]
    current = machines[0]
    clock = SimpleNamespace(perf_counter=lambda: current.now, monotonic=lambda: current.now)
    with mock.patch.object(exchange_module, "time", clock), mock.patch.object(exchange_module.progress, "add"):
        for _ in range(n_steps):
            start = max(machine.now for machine in machines)
            for machine in machines:
                machine.now, machine.spans, machine.n_waits = start, [], 0
                machine.streams = dict.fromkeys(machine.streams, start)
            running = {rank: ranks[rank].step() for rank in range(n_ranks)}
            while running:  # whoever is furthest behind: then nobody is told of anything too late
                rank = min(running, key=lambda rank: machines[rank].now)
                current = machines[rank]
                if next(running[rank], 0) == 0:
                    del running[rank]
    first = machines[0]
    spans = [Span(s.row, 1e3 * (s.begin - start), 1e3 * (s.end - start)) for s in first.spans if s.row]
    backward = max(span.end for span in spans if span.row == "backward")
    return Result(n_ranks, gbit, spans, backward, 1e3 * (first.now - start), first.n_waits)


# ---- for people -------------------------------------------------------------------------------------------

ROWS = {"backward": "#9aa5b1", "kernels": "#d95f02", "copies": "#1b9e77", "network": "#386cb0"}
WIDTH, LEFT, ROW, PANEL = 860, 90, 18, 118


def table(results: list[Result]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| ranks | network | bytes leave for | of that in backward | step ends after backward | backward |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in results:
        lines.append(
            f"| {one.n_ranks} | {one.gbit:g} Gbit/s | {one.network:.1f} ms | {one.overlapped:.1f} ms | "
            f"{one.exposed:.1f} ms | {one.backward:.1f} ms |"
        )
    return lines


def _joined(spans: list[Span], gap: float) -> list[Span]:
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if joined and span.begin - joined[-1].end <= gap:
            joined[-1] = Span(span.row, joined[-1].begin, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def draw(results: list[Result]) -> str:
    """The timelines as SVG, one above the other."""
    height = PANEL * len(results) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, one in enumerate(results):
        top, scale = PANEL * number + 22, (WIDTH - LEFT - 20) / one.step
        title = f"{one.n_ranks} ranks, {one.gbit:g} Gbit/s: {one.exposed:.1f} ms after backward (simulated)"
        parts.append(f'<text x="{LEFT}" y="{top - 6}" font-weight="bold">{title}</text>')
        for line, (row, colour) in enumerate(ROWS.items()):
            y = top + line * ROW
            parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{row}</text>')
            for span in _joined([s for s in one.spans if s.row == row], one.step / 2000):
                x, width = LEFT + span.begin * scale, max((span.end - span.begin) * scale, 0.4)
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 5}" fill="{colour}"/>')
        end = LEFT + one.backward * scale
        bottom = top + len(ROWS) * ROW
        parts.append(f'<path d="M{end:.1f} {top}V{bottom}" stroke="#444" stroke-dasharray="3 2"/>')
        unit = 10 ** math.floor(math.log10(one.step))
        unit = unit / 2 if one.step / unit < 3 else unit
        for tick in range(int(one.step / unit) + 1):
            x = LEFT + tick * unit * scale
            parts.append(f'<path d="M{x:.1f} {bottom}v3" stroke="#444"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">{tick * unit:g} ms</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    results = [simulate(*setting) for setting in SETTINGS]
    print("\n".join(table(results)))
    IMAGE.write_text(draw(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
