"""`horovod-aps calibrate`: measure on this machine what perfmodel needs, under mpirun or horovodrun.

Every number is the median over repetitions of the slowest rank. Synchronisations are timed as users see them:
from backward, whose hooks hand prepared gradients to `hvd.DistributedOptimizer`, to the end of
`synchronize()`. From those times the model's own terms are subtracted one by one; what is left is the next
parameter.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from horovod_aps.tools import perfmodel
from horovod_aps.tools.perfmodel import KernelRates, Machine, Network
from horovod_aps.tools.predict import parse_format, table

FORMATS = ((4, 3), (5, 2), (3, 2), (3, 0))
N_TENSORS = 64
SLOWEST, FASTEST = 1e6, 1e12  # bytes/s: a rate out of these bounds is noise, not a measurement


def add_parser(subparsers: Any) -> None:
    """Add the `calibrate` subcommand."""
    parser = subparsers.add_parser(
        "calibrate", help="measure latency, bandwidth and kernel rates; run under mpirun or horovodrun"
    )
    parser.add_argument("--out", type=Path, default=Path("calibration.json"), help="(default: %(default)s)")
    parser.add_argument(
        "--elements", type=int, default=4_000_000, help="of the large gradients (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--format", type=parse_format, nargs="+", default=list(FORMATS), metavar="E,M")
    parser.add_argument(
        "--shared-cores",
        action="store_true",
        help="all ranks run on this one machine, even if they look like several hosts",
    )
    parser.set_defaults(run=run)


class Clock:
    """Times functions that all ranks call together."""

    def __init__(self, repetitions: int) -> None:
        self.repetitions = repetitions

    def __call__(self, function: Callable[[], Any], warm_up: int = 2) -> float:
        import horovod.torch as hvd
        import torch

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
    """Seconds of the exchange's own pattern, everyone to everyone, for 64 bytes and `n_bytes` per peer."""
    import horovod.torch as hvd
    import torch
    from horovod.torch import mpi_ops

    from horovod_aps.world import mpi_usable

    size, rank = hvd.size(), hvd.rank()
    seconds = {}
    over_mpi = int(
        hvd.allreduce(torch.tensor([int(mpi_usable(mpi_ops._basics))]), op=hvd.Min, name="calibrate.mpi")
    )
    for label, n in (("small", 64), ("large", n_bytes)):
        if over_mpi:
            from mpi4py import MPI

            send, recv = np.zeros(n, np.uint8), np.zeros((size, n), np.uint8)
            peers = [peer for peer in range(size) if peer != rank]

            def exchange(send: Any = send, recv: Any = recv, peers: Any = peers) -> None:
                requests = [MPI.COMM_WORLD.Irecv(recv[peer], peer) for peer in peers]
                requests += [MPI.COMM_WORLD.Isend(send, peer) for peer in peers]
                MPI.Request.Waitall(requests)

        else:
            data = torch.zeros(size * n, dtype=torch.uint8)

            def exchange(data: Any = data, label: str = label) -> None:  # type: ignore[misc]
                hvd.alltoall(data, name=f"calibrate.links.{label}")

        seconds[label] = clock(exchange)
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
        scan = clock(lambda: kernels.scan(segs))
        encode = clock(lambda: kernels.encode(segs, message))
        shard = segs.copy()
        shard["n"] = n // n_ranks
        reduce = clock(lambda: kernels.reduce(shard.copy(), [message] * n_ranks, 0, out))
        segs["data"] = result.ctypes.data
        decode = clock(lambda: kernels.decode(segs, [message]))
        return {"scan": scan, "encode": encode, "reduce": reduce, "decode": decode}

    return {f"{e},{m}": one_format(e, m) for e, m in formats}


def _rate(n_bytes: float, seconds: float) -> float:
    """Bytes per second, kept within reason: a difference of two times may come out negative."""
    return min(max(n_bytes / seconds, SLOWEST), FASTEST) if seconds > 0 else FASTEST


def derive(
    measured: dict[str, Any], n_ranks: int, ranks_per_host: int, cores: float
) -> tuple[Network, Machine]:
    """The model's parameters from the measured seconds; see the keys that `run` fills in."""
    n, n_tensors = measured["elements"], measured["tensors"]
    links, sync = measured["links"], measured["synchronise"]
    n_bytes = 4.0 * n

    # Links: one message's latency, and what one host's link carries of the all-to-all.
    latency = links["small"]
    rate = _rate((n_ranks - 1) * links["bytes"], links["large"] - links["small"])
    if ranks_per_host >= n_ranks:
        network = Network(
            ranks_per_host=ranks_per_host, intra_latency=latency, intra_bandwidth=rate, efficiency=1.0,
            allreduce=measured["allreduce"],
        )  # fmt: skip
    else:
        local = ranks_per_host
        rate = _rate(local * (n_ranks - local) * links["bytes"], links["large"] - links["small"])
        network = Network(
            bandwidth=rate, latency=latency, ranks_per_host=local, efficiency=1.0, allreduce=measured["allreduce"]
        )

    # Horovod: a lone small tensor is a cycle; more of them add their own overhead; large ones what is left.
    small = network.small(n_ranks) + network.own(32, n_ranks)
    overhead = max(0.0, (sync["fp32 tiny"] - sync["fp32 small"]) / (n_tensors - 1))
    cycle = max(0.0, sync["fp32 small"] - small - overhead)

    def beyond(key: str, payload: float) -> float:
        return float(
            sync[key] - sync["fp32 small"] - network.own(payload, n_ranks) + network.own(32, n_ranks)
        )

    share = (n_ranks - 1) / n_ranks
    cast_rate = _rate(8 * n, measured["casts"])
    machine = Machine(
        kernels={
            key: KernelRates(**{name: _rate(n_bytes, seconds) for name, seconds in one.items()})
            for key, one in measured["kernels"].items()
        },
        add_rate=_rate(share * n_bytes, beyond("fp32 flat", n_bytes)),
        add16_rate=_rate(share * n_bytes / 2, beyond("fp16 flat", n_bytes / 2) - measured["casts"]),
        copy_rate=_rate(2 * n_bytes, sync["fp32 many"] - sync["fp32 flat"] - overhead * (n_tensors - 1)),
        cast_rate=cast_rate,
        tensor_overhead=overhead,
        cycle_time=cycle,
        layer_overhead=0.0,
        bucket_bytes=measured["bucket_bytes"],
        cores=cores,
        calibrated_ranks=n_ranks,
    )

    # Our exchange: overhead per layer from tiny ones, then how much of the possible overlap is achieved.
    e, m = (int(bits) for bits in measured["format"].split(","))
    tiny = perfmodel.predict_exchange([8] * n_tensors, n_ranks, network, machine, e, m).total
    machine = replace(machine, layer_overhead=max(0.0, (sync["aps tiny"] - tiny) / n_tensors))
    sizes = [n // n_tensors] * n_tensors
    serial, full = (
        perfmodel.predict_exchange(sizes, n_ranks, network, replace(machine, overlap=x), e, m).total
        for x in (0.0, 1.0)
    )
    overlap = (serial - sync["aps many"]) / (serial - full) if serial > full else 1.0
    return network, replace(machine, overlap=min(1.0, max(0.0, overlap)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All seconds that `derive` needs, the same on every rank."""
    import horovod.torch as hvd
    import torch

    from horovod_aps.torch import APSCompressor

    clock, n = Clock(args.repetitions), args.elements // N_TENSORS * N_TENSORS
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
    x = torch.randn(n)
    stack = torch.tensor(statistics.median(measure_stack() for _ in range(args.repetitions)))
    return {
        "elements": n,
        "tensors": N_TENSORS,
        "format": f"{e},{m}",
        "bucket_bytes": bucket_mb * 1e6,
        "allreduce": "openmpi" if hvd.mpi_enabled() else "ring",
        "links": {"bytes": link_bytes, **measure_links(clock, link_bytes)},
        "synchronise": {
            key: clock(_synchroniser(sizes, how, f"calibrate.{key}")) for key, (sizes, how) in cases.items()
        },
        "kernels": measure_kernels(clock, n, args.format, hvd.size()),
        "casts": clock(lambda: x.half().float()),
        "stack": float(hvd.allreduce(stack, op=hvd.Min, name="calibrate.stack")),
    }


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
    network, machine = derive(measured, hvd.size(), hvd.local_size(), cores)
    # The bucket of the measurement was chosen to show overlap; predictions use the default one.
    network = replace(network, host_rate=max(measured["stack"], network.rate))
    machine = replace(machine, bucket_bytes=Machine().bucket_bytes)
    if hvd.rank() == 0:
        perfmodel.save_calibration(args.out, network, machine, measured)
        print_parameters(network, machine)
        print(f"\nwritten: {args.out}")
    hvd.barrier()
    hvd.shutdown()
    return 0


def print_parameters(network: Network, machine: Machine) -> None:
    """What was found, as a table."""
    rows = [
        ["latency", f"{1e6 * network.latency:.0f} us"],
        ["link", f"{network.bandwidth * 8 / 1e9:.2f} Gbit/s"],
        ["within a host", f"{network.intra_latency * 1e6:.0f} us, {network.intra_bandwidth / 1e9:.2f} GB/s"],
        ["network stack", f"{network.host_rate / 1e9:.2f} GB/s"],
        ["Horovod's cycle", f"{1e3 * machine.cycle_time:.2f} ms"],
        ["Horovod per tensor", f"{1e6 * machine.tensor_overhead:.0f} us"],
        ["ours per layer", f"{1e6 * machine.layer_overhead:.0f} us"],
        [
            "copies, sum, fp16 sum, casts",
            ", ".join(
                f"{rate / 1e9:.1f}"
                for rate in (machine.copy_rate, machine.add_rate, machine.add16_rate, machine.cast_rate)
            )
            + " GB/s",
        ],
        ["overlap", f"{machine.overlap:.2f}"],
    ]
    for key, rates in machine.kernels.items():
        values = (rates.scan, rates.encode, rates.reduce, rates.decode)
        rows.append(
            [f"({key}) scan, encode, reduce, decode", ", ".join(f"{r / 1e9:.1f}" for r in values) + " GB/s"]
        )
    print(table(["parameter", "value"], rows))
