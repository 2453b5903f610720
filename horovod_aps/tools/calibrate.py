"""`horovod-aps calibrate`: measure on this machine what perfmodel needs, under mpirun or horovodrun.

Every number is the median over repetitions of the slowest rank. Synchronisations are timed as users see them:
from backward, whose hooks hand prepared gradients to `hvd.DistributedOptimizer`, to the end of
`synchronize()`. Each parameter in turn is the one with which the model takes as long as was measured. Where that
is out of all bounds, since a difference of two times may be noise, a plain loop's rate stands in, with a note;
what nothing here measures, such as links between hosts on a single one, is null, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from horovod_aps.tools import perfmodel
from horovod_aps.tools.perfmodel import SLOWEST, Calibration, KernelRates, Machine, Network
from horovod_aps.tools.predict import parse_format, table

FORMATS = ((4, 3), (5, 2), (3, 2), (3, 0))
N_TENSORS = 64
QUIET_SECONDS = 2.0  # between lines of progress where there is no terminal


def add_parser(subparsers: Any) -> None:
    """Add the `calibrate` subcommand."""
    parser = subparsers.add_parser(
        "calibrate", help="measure latency, bandwidth and kernel rates; run under mpirun or horovodrun"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("calibration.json"),
        help="the file for predict --calibration (default: %(default)s)",
    )
    parser.add_argument(
        "--elements", type=int, default=4_000_000, help="values of the large gradients (default: %(default)s)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="of every measurement, whose median counts (default: %(default)s)"
    )
    parser.add_argument(
        "--format",
        type=parse_format,
        nargs="+",
        default=list(FORMATS),
        metavar="E,M",
        help=f"formats whose kernels are timed (default: {' '.join(f'{e},{m}' for e, m in FORMATS)})",
    )
    parser.add_argument(
        "--shared-cores",
        action="store_true",
        help="all ranks run on this one machine, even if they look like several hosts",
    )
    parser.set_defaults(run=run)


class Progress:
    """Says on stderr how far rank 0 is: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int, show: bool) -> None:
        self._total, self._n, self._show, self._last = total, 0, show, 0.0
        self._bar: Any = None
        if show and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc="calibrate", unit="measurement")

    def __call__(self, label: str) -> None:
        """One measurement is about to start."""
        self._n += 1
        if self._bar is not None:
            self._bar.set_postfix_str(label)
            self._bar.update()
        elif self._show and (self._n == 1 or time.monotonic() - self._last >= QUIET_SECONDS):
            self._last = time.monotonic()
            print(f"calibrate: {self._n} of {self._total}, {label}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


class Clock:
    """Times functions that all ranks call together."""

    def __init__(self, repetitions: int, progress: Callable[[str], None]) -> None:
        self.repetitions, self.progress = repetitions, progress

    def __call__(self, label: str, function: Callable[[], Any], warm_up: int = 2) -> float:
        import horovod.torch as hvd
        import torch

        self.progress(label)
        seconds = []
        for repetition in range(warm_up + self.repetitions):
            hvd.barrier()
            start = time.perf_counter()
            function()
            if repetition >= warm_up:
                seconds.append(time.perf_counter() - start)
        slowest = hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="calibrate.slowest")
        return float(statistics.median(slowest.tolist()))


def _synchroniser(sizes: Sequence[int], compression: Any, label: str) -> Callable[[], None]:
    """A function that synchronises ready gradients of these sizes through hvd.DistributedOptimizer."""
    import horovod.torch as hvd
    import torch

    class HandOut(torch.autograd.Function):
        """A loss whose backward gives every parameter its prepared gradient."""

        @staticmethod
        def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(gradients)

    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    gradients = [torch.randn(size) for size in sizes]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, 0.0),
        named_parameters=[(f"{label}.{i}", p) for i, p in enumerate(parameters)],
        compression=compression,
    )

    def synchronise() -> None:
        optimizer.zero_grad()
        HandOut.apply(*parameters).backward()
        optimizer.synchronize()

    return synchronise


def measure_links(clock: Clock, n_bytes: int) -> dict[str, float]:
    """Seconds of the exchange's own pattern, everyone to everyone, for 64 bytes and `n_bytes` per peer.

    With several ranks on several hosts also among the ranks of each host alone.
    """
    import horovod.torch as hvd
    import torch
    from horovod.torch import mpi_ops

    from horovod_aps.frontends.world import mpi_usable

    size, rank = hvd.size(), hvd.rank()
    over_mpi = int(hvd.allreduce(torch.tensor([int(mpi_usable(mpi_ops._basics))]), op=hvd.Min, name="calibrate.mpi"))
    hosts = hvd.allgather(torch.tensor([hvd.cross_rank()]), name="calibrate.hosts").tolist()
    everyone = [peer for peer in range(size) if peer != rank]
    circles = {"": everyone}
    if 1 < hvd.local_size() < size:
        circles["local "] = [peer for peer in everyone if hosts[peer] == hosts[rank]]
    seconds = {}
    for (circle, peers), (label, n) in itertools.product(circles.items(), (("small", 64), ("large", n_bytes))):
        if over_mpi:
            from mpi4py import MPI

            send, recv = np.zeros(n, np.uint8), np.zeros((size, n), np.uint8)

            def exchange(send: Any = send, recv: Any = recv, peers: Any = peers) -> None:
                requests = [MPI.COMM_WORLD.Irecv(recv[peer], peer) for peer in peers]
                requests += [MPI.COMM_WORLD.Isend(send, peer) for peer in peers]
                MPI.Request.Waitall(requests)

        else:
            data = torch.zeros(len(peers) * n, dtype=torch.uint8)
            splits = torch.tensor([n if peer in peers else 0 for peer in range(size)], dtype=torch.int32)

            def exchange(data: Any = data, splits: Any = splits, name: str = circle + label) -> None:  # type: ignore[misc]
                hvd.alltoall(data, splits, name=f"calibrate.links.{name}")

        seconds[circle + label] = clock(f"links, {circle}{label} messages", exchange)
    return seconds


def measure_stack(n_bytes: int = 32 << 20) -> float:
    """Bytes per second that this rank moves through its own TCP stack, all ranks at once; inf if it
    cannot.
    """
    chunk = memoryview(bytearray(1 << 18))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            out = socket.create_connection(server.getsockname(), timeout=10)
            into, _ = server.accept()
    except OSError:
        return math.inf

    def send() -> None:
        for _ in range(n_bytes // len(chunk)):
            out.sendall(chunk)
        out.close()

    buffer = bytearray(1 << 18)
    start = time.perf_counter()
    sender = threading.Thread(target=send)
    sender.start()
    while into.recv_into(buffer):
        pass
    sender.join()
    into.close()
    return n_bytes / (time.perf_counter() - start)


def measure_kernels(clock: Clock, n: int, formats: Sequence[tuple[int, int]], n_ranks: int) -> dict[str, Any]:
    """Seconds of every kernel on `n` elements, for each format; reduce sums a shard of every rank."""
    from horovod_aps.kernels import SEGMENT, SPECIALS, CpuKernels

    kernels = CpuKernels()
    gradient = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    result = np.empty_like(gradient)

    def one_format(e: int, m: int) -> dict[str, float]:
        segs = np.zeros(1, SEGMENT)
        segs["data"], segs["n"], segs["factor"] = gradient.ctypes.data, n, 1.0
        segs["exp_bits"], segs["man_bits"], segs["flags"] = e, m, SPECIALS
        message = kernels.alloc((n * (1 + e + m) + 7) // 8)
        out = np.zeros_like(message)
        scan = clock(f"scan in ({e}, {m})", lambda: kernels.scan(segs))
        encode = clock(f"encode in ({e}, {m})", lambda: kernels.encode(segs, message))
        shard = segs.copy()
        shard["n"] = n // n_ranks
        reduce = clock(f"reduce in ({e}, {m})", lambda: kernels.reduce(shard.copy(), [message] * n_ranks, 0, out))
        segs["data"] = result.ctypes.data
        decode = clock(f"decode in ({e}, {m})", lambda: kernels.decode(segs, [message]))
        return {"scan": scan, "encode": encode, "reduce": reduce, "decode": decode}

    return {f"{e},{m}": one_format(e, m) for e, m in formats}


def measure_loops(clock: Clock, n: int) -> dict[str, float]:
    """Seconds of what Horovod's thread does to `n` elements, in loops of torch: copies, sums, casts."""
    import torch

    x, y = torch.randn(n), torch.randn(n)
    x16, y16 = x.half(), y.half()
    return {
        "copy": clock("copy", lambda: y.copy_(x)),
        "add": clock("sum", lambda: y.add_(x)),
        "add16": clock("fp16 sum", lambda: y16.add_(x16)),
        "casts": clock("casts", lambda: x.half().float()),
    }


def _solve(time_with: Callable[[float], float], wanted: float, high: float) -> float | None:
    """x in 0..high at which a time that grows with x is as wanted; None if it is not in reach."""
    if not time_with(0.0) <= wanted <= time_with(high):
        return None
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if time_with(middle) < wanted else (low, middle)
    return low


class _Findings:
    """Parameters as they are found, with reasons for what is not and notes on what is otherwise."""

    def __init__(self) -> None:
        self.unmeasured: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def rate(self, name: str, n_bytes: float, seconds: float, loop: float | None = None) -> float | None:
        """Bytes per second from what Horovod's time leaves over, else from a loop's time; None if neither can be."""
        for time_spent in (seconds, loop):
            if time_spent is not None and time_spent > 0 and perfmodel.is_plausible(name, n_bytes / time_spent):
                if time_spent is loop and loop != seconds:
                    self.notes[name] = "of a plain loop: in Horovod's own times it is lost in noise"
                return n_bytes / time_spent
        self.unmeasured[name] = f"{n_bytes:.3g} bytes in {1e3 * seconds:.3g} ms is noise; try more --elements"
        return None


def _links(found: _Findings, measured: dict[str, Any], n_ranks: int, local: int) -> Network:
    """One message's latency, and what one host's link, or a rank within a host, carries of the all-to-all."""
    links, values = measured["links"], {}
    one_host, several = local >= n_ranks, 1 < local < n_ranks

    def both(prefix: str, bandwidth: str, latency: str, n_bytes: float) -> None:
        values[latency] = links[prefix + "small"]
        values[bandwidth] = found.rate(bandwidth, n_bytes, links[prefix + "large"] - links[prefix + "small"])

    if one_host:
        both("", "intra_bandwidth", "intra_latency", (n_ranks - 1) * links["bytes"])
        found.unmeasured |= dict.fromkeys(("bandwidth", "latency"), "all ranks were on one host")
    else:
        both("", "bandwidth", "latency", local * (n_ranks - local) * links["bytes"])
        if several:
            both("local ", "intra_bandwidth", "intra_latency", (local - 1) * links["bytes"])
        else:
            found.unmeasured |= dict.fromkeys(("intra_bandwidth", "intra_latency"), "there was one rank per host")
    known = {name: value for name, value in values.items() if value is not None}
    return Network(ranks_per_host=local, efficiency=1.0, allreduce=measured["allreduce"], **known)


def derive(measured: dict[str, Any], n_ranks: int, ranks_per_host: int, cores: float) -> Calibration:
    """The model's parameters from the measured seconds; see the keys that `measure` fills in."""
    found, n, n_tensors, sync = _Findings(), measured["elements"], measured["tensors"], measured["synchronise"]
    loops, n_bytes = measured["loops"], 4.0 * n
    network = _links(found, measured, n_ranks, ranks_per_host)
    many, tiny = [n // n_tensors] * n_tensors, [8] * n_tensors
    kernels = {}
    for key, one in measured["kernels"].items():
        per_kernel = {name: found.rate("kernels", n_bytes, seconds) for name, seconds in one.items()}
        kernels[key] = KernelRates(**{name: value for name, value in per_kernel.items() if value is not None})
    machine = Machine(
        kernels=kernels,
        layer_overhead=0.0,
        bucket_bytes=measured["bucket_bytes"],
        cores=cores,
        calibrated_ranks=n_ranks,
    )

    # Horovod: a lone small tensor is a cycle; more of them add their own overhead; large ones what is left.
    small = sync["fp32 small"] - network.small(n_ranks) - network.own(32, n_ranks)

    def of_tensors(overhead: float) -> Machine:
        return replace(machine, tensor_overhead=overhead, cycle_time=max(0.0, small - overhead))

    overhead = _solve(
        lambda x: perfmodel.predict_ring(tiny, n_ranks, network, of_tensors(x)).total, sync["fp32 tiny"], 0.01
    )
    if overhead is None:
        found.unmeasured["tensor_overhead"] = (
            f"{n_tensors} tensors took {1e3 * sync['fp32 tiny']:.3g} ms, one {1e3 * sync['fp32 small']:.3g} ms"
        )
    if small <= 0:
        found.unmeasured["cycle_time"] = "the links alone take longer than Horovod with them"
    machine = of_tensors(machine.tensor_overhead if overhead is None else overhead)

    def beyond(key: str, payload: float) -> float:
        return float(sync[key] - sync["fp32 small"] - network.own(payload, n_ranks) + network.own(32, n_ranks))

    share = (n_ranks - 1) / n_ranks
    rates: dict[str, Any] = {
        "cast_rate": found.rate("cast_rate", 8 * n, loops["casts"]),
        "add_rate": found.rate("add_rate", share * n_bytes, beyond("fp32 flat", n_bytes), share * loops["add"]),
        "add16_rate": found.rate(
            "add16_rate", share * n_bytes / 2, beyond("fp16 flat", n_bytes / 2) - loops["casts"], share * loops["add16"]
        ),
    }
    machine = replace(machine, **{name: value for name, value in rates.items() if value is not None})
    copying = _solve(
        lambda x: perfmodel.predict_ring(many, n_ranks, network, replace(machine, copy_rate=1 / max(x, 1e-15))).total,
        sync["fp32 many"],
        1 / SLOWEST,
    )
    copy_rate = found.rate("copy_rate", 1.0, copying or 0.0, loops["copy"] / n_bytes)
    machine = machine if copy_rate is None else replace(machine, copy_rate=copy_rate)

    # Our exchange: overhead per layer from tiny ones, then how much of the possible overlap is achieved.
    e, m = (int(bits) for bits in measured["format"].split(","))

    def ours(sizes: Sequence[int], **changes: Any) -> float:
        return perfmodel.predict_exchange(sizes, n_ranks, network, replace(machine, **changes), e, m).total

    layer_overhead = _solve(lambda x: ours(tiny, layer_overhead=x), sync["aps tiny"], 0.01)
    if layer_overhead is None:
        found.unmeasured["layer_overhead"] = f"{n_tensors} tiny layers took {1e3 * sync['aps tiny']:.3g} ms"
    machine = replace(machine, layer_overhead=Machine().layer_overhead if layer_overhead is None else layer_overhead)
    serial, full = ours(many, overlap=0.0), ours(many, overlap=1.0)
    if serial > full:
        overlap = (serial - sync["aps many"]) / (serial - full)
        machine = replace(machine, overlap=min(1.0, max(0.0, overlap)))
        if not 0 <= overlap <= 1:
            found.notes["overlap"] = (
                f"{1e3 * sync['aps many']:.3g} ms, the model says {1e3 * full:.3g} to {1e3 * serial:.3g}"
            )
    else:
        found.unmeasured["overlap"] = "there was nothing to overlap"
    return Calibration(network, machine, found.unmeasured, found.notes)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All seconds that `derive` needs, the same on every rank."""
    import horovod.torch as hvd
    import torch

    from horovod_aps.torch import APSCompressor

    n_links = 4 if 1 < hvd.local_size() < hvd.size() else 2
    progress = Progress(n_links + 7 + 4 * len(args.format) + 4 + 1, hvd.rank() == 0)
    clock, n = Clock(args.repetitions, progress), args.elements // N_TENSORS * N_TENSORS
    e, m = args.format[0]
    many, tiny = [n // N_TENSORS] * N_TENSORS, [8] * N_TENSORS
    bucket_mb = 4 * n / 4 / 1e6  # four buckets, so that overlap can show

    def aps() -> Any:
        return APSCompressor(e=e, m=m, bucket_mb=bucket_mb)

    plain, half = hvd.Compression.none, hvd.Compression.fp16
    cases = {
        "fp32 small": ([8], plain),
        "fp32 tiny": (tiny, plain),
        "fp32 flat": ([n], plain),
        "fp32 many": (many, plain),
        "fp16 flat": ([n], half),
        "aps tiny": (tiny, aps()),
        "aps many": (many, aps()),
    }
    link_bytes = max(1 << 16, n // hvd.size())
    progress("network stack")
    stack = torch.tensor(statistics.median(measure_stack() for _ in range(args.repetitions)))
    found = {
        "elements": n,
        "tensors": N_TENSORS,
        "format": f"{e},{m}",
        "bucket_bytes": bucket_mb * 1e6,
        "allreduce": "openmpi" if hvd.mpi_enabled() else "ring",
        "links": {"bytes": link_bytes, **measure_links(clock, link_bytes)},
        "synchronise": {
            key: clock(key, _synchroniser(sizes, how, f"calibrate.{key}")) for key, (sizes, how) in cases.items()
        },
        "kernels": measure_kernels(clock, n, args.format, hvd.size()),
        "loops": measure_loops(clock, n),
        "stack": float(hvd.allreduce(stack, op=hvd.Min, name="calibrate.stack")),
    }
    progress.close()
    return found


def run(args: argparse.Namespace) -> int:
    """Measure on all ranks; rank 0 prints and writes the file."""
    import horovod.torch as hvd

    if args.elements < N_TENSORS or args.repetitions < 1:
        raise ValueError(
            f"--elements must be at least {N_TENSORS} and --repetitions at least 1, got {args.elements} and "
            f"{args.repetitions}"
        )
    hvd.init()
    if hvd.size() < 2:
        raise ValueError("needs at least 2 ranks, got 1; start it as: mpirun -np 2 horovod-aps calibrate")
    measured = measure(args)
    cores = float(os.cpu_count() or 1) if args.shared_cores or hvd.local_size() == hvd.size() else math.inf
    found = derive(measured, hvd.size(), hvd.local_size(), cores)
    # The bucket of the measurement was chosen to show overlap; predictions use the default one.
    measured_rate = 0.0 if "bandwidth" in found.unmeasured else found.network.rate
    found = replace(
        found,
        network=replace(found.network, host_rate=max(measured["stack"], measured_rate)),
        machine=replace(found.machine, bucket_bytes=Machine().bucket_bytes),
    )
    if hvd.rank() == 0:
        perfmodel.save_calibration(args.out, found, measured)
        print_parameters(found)
        print(f"\nwritten: {args.out}")
    hvd.barrier()
    hvd.shutdown()
    return 0


def print_parameters(found: Calibration) -> None:
    """What was found, as a table, and why the rest was not."""
    network, machine = found.network, found.machine

    def show(name: str, text: str) -> str:
        return "not measured" if name in found.unmeasured else text + (" *" if name in found.notes else "")

    rows = [
        ["latency between hosts", show("latency", f"{1e6 * network.latency:.0f} us")],
        ["link between hosts", show("bandwidth", f"{network.bandwidth * 8 / 1e9:.3g} Gbit/s")],
        ["latency within a host", show("intra_latency", f"{network.intra_latency * 1e6:.0f} us")],
        ["bandwidth within a host", show("intra_bandwidth", f"{network.intra_bandwidth / 1e9:.3g} GB/s")],
        ["network stack", f"{network.host_rate / 1e9:.3g} GB/s"],
        ["Horovod's cycle", show("cycle_time", f"{1e3 * machine.cycle_time:.2f} ms")],
        ["Horovod per tensor", show("tensor_overhead", f"{1e6 * machine.tensor_overhead:.0f} us")],
        ["ours per layer", show("layer_overhead", f"{1e6 * machine.layer_overhead:.0f} us")],
        ["overlap", show("overlap", f"{machine.overlap:.2f}")],
    ]
    rates_shown = {"copies": "copy_rate", "sum": "add_rate", "fp16 sum": "add16_rate", "casts": "cast_rate"}
    for label, name in rates_shown.items():
        rows.append([label, show(name, f"{getattr(machine, name) / 1e9:.3g} GB/s")])
    for key, rates in machine.kernels.items():
        values = (rates.scan, rates.encode, rates.reduce, rates.decode)
        text = ", ".join(f"{rate / 1e9:.3g}" for rate in values) + " GB/s"
        rows.append([f"({key}) scan, encode, reduce, decode", show("kernels", text)])
    print(table(["parameter", "value"], rows))
    for name, text in found.unmeasured.items():
        print(f"not measured: {name}: {text}")
    for name, text in found.notes.items():
        print(f"* {name}: {text}")
