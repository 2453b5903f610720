"""`make gpu-check`: everything that only a machine with a GPU can tell, in one text file to send back.

It compiles the kernels, compares each with the CPU bit for bit, times them against a copy on the device, and lets two
ranks share the device through PyTorch and TensorFlow. Without a GPU it says so and ends with code 3.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from horovod_aps import __version__, kernels
from horovod_aps.kernels import nvrtc

NO_GPU = 3
MODULE = "horovod_aps.tools.gpu_check"
FORMATS = [(4, 3), (3, 0), (5, 10), (3, 2), (8, 7), None]  # None: raw float32
SIZES = [1, 9, 1025, 5000]
REPEATS = 20
N_TIMED = 1 << 24  # elements


def n_devices() -> int:
    """How many GPUs CuPy sees; 0 without CuPy or a driver."""
    try:
        return int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, or one that is too old
        return 0


# ---- every kernel against the CPU -------------------------------------------------------------------------


def _values(dtype: int, n: int, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(n) * np.exp2(rng.integers(-20, 2, n)) * 1e-2
    if dtype == kernels.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype([np.float32, np.float64, np.float16][dtype])


def _bucket(dtype: int, fmt: tuple[int, int] | None) -> tuple[np.ndarray, list[np.ndarray], int]:
    rng = np.random.default_rng([dtype, *(fmt or (0, 0))])
    segs, arrays, offset = np.zeros(len(SIZES), kernels.SEGMENT), [], 0
    width = 32 if fmt is None else 1 + sum(fmt)
    for row, n in zip(segs, SIZES):
        arrays.append(_values(dtype, n, rng))
        row["n"], row["offset"], row["factor"], row["dtype"] = n, offset, 0.5, dtype
        row["family"] = kernels.FAMILY_RAW if fmt is None else kernels.FAMILY_FLOAT
        row["exp_bits"], row["man_bits"] = fmt or (0, 0)
        row["flags"] = kernels.SPECIALS
        offset += -(-n * width // 128) * 16
    return segs, arrays, offset


def _on_cpu(array: np.ndarray) -> tuple[int, np.ndarray]:
    copy = array.copy()
    return copy.ctypes.data, copy


def _operations(
    one: Any, put: Callable[[np.ndarray], tuple[int, Any]], get: Callable[[Any, np.ndarray], np.ndarray], bucket: Any
) -> dict[str, bytes]:
    """What each operation makes of a bucket, as bytes."""
    segs, arrays, length = bucket
    places = [put(array) for array in arrays]
    table = segs.copy()
    table["data"] = [address for address, _ in places]
    _finish(one.scan(table))
    found = {"scan": table["exponent"].tobytes()}
    messages = [one.alloc(length) for _ in range(3)]
    for message in messages[:2]:
        one.encode(table, message)
    found["encode"] = bytes(one.bytes_of(messages[0]))
    found["measure"] = one.measure(table, messages[0]).tobytes()
    kept = [put(np.ones(len(array), np.float32)) for array in arrays]
    one.add(table, np.array([address for address, _ in kept], np.uint64))
    found["add"] = b"".join(get(p, np.empty(len(a), np.float32)).tobytes() for (_, p), a in zip(kept, arrays))
    reduced = table.copy()
    _finish(one.reduce(reduced, messages[:2], 0, messages[2]))
    found["reduce"] = reduced["exponent"].tobytes() + bytes(one.bytes_of(messages[2]))
    one.decode(reduced, messages[2:])
    found["decode"] = b"".join(get(p, array).tobytes() for (_, p), array in zip(places, arrays))
    one.residual(table, messages[0])
    found["residual"] = b"".join(get(p, array).tobytes() for (_, p), array in zip(places, arrays))
    return found


def _finish(request: Any) -> None:
    while not request.done():
        time.sleep(0)


def compare(device: Any) -> Iterator[str]:
    """Lines: each operation of a device's kernels, in every format and dtype, against the CPU's."""

    def put(array: np.ndarray) -> tuple[int, Any]:
        raw = np.concatenate([array.view(np.uint8), np.zeros(-array.nbytes % 4, np.uint8)])
        place = device.from_host(raw.view(np.float32))
        return place.ptr, place

    def get(place: Any, like: np.ndarray) -> np.ndarray:
        return device.to_host(place).view(np.uint8)[: like.nbytes]

    wrong: dict[str, list[str]] = {}
    for dtype, name in enumerate(kernels.DTYPE_NAMES):
        for fmt in FORMATS:
            bucket = _bucket(dtype, fmt)
            expected = _operations(kernels.CpuKernels(), _on_cpu, lambda place, _: place, bucket)
            found = _operations(device, put, get, bucket)
            for operation, content in expected.items():
                wrong.setdefault(operation, [])
                if found[operation] != content:
                    wrong[operation].append(f"{name} in {fmt or 'float32'}")
    for operation, cases in wrong.items():
        yield f"{operation}: {'as on the CPU' if not cases else 'DIFFERS: ' + ', '.join(cases)}"


# ---- speed ------------------------------------------------------------------------------------------------


def speeds(device: Any, n: int = N_TIMED) -> Iterator[str]:
    """Lines: bytes per second of each kernel in (4,3), and its share of a copy's on the same device."""
    data, message, sums = device.zeros(n), device.alloc(n), device.alloc(n)
    segs = np.zeros(1, kernels.SEGMENT)
    segs["data"], segs["n"], segs["factor"], segs["exp_bits"], segs["man_bits"] = data.ptr, n, 1.0, 4, 3
    segs["flags"], segs["exponent"] = kernels.SPECIALS, 0
    runtime = device.device.cuda.runtime
    other = device.zeros(n)

    def copy() -> None:
        runtime.memcpyAsync(other.ptr, data.ptr, 4 * n, runtime.memcpyDeviceToDevice, device.stream.ptr)

    def clock(run: Callable[[], Any]) -> float:
        run()
        device.drain()
        start = time.perf_counter()
        for _ in range(REPEATS):
            run()
        device.drain()
        return (time.perf_counter() - start) / REPEATS

    rate = 8 * n / clock(copy)
    yield f"copy: {rate / 1e9:.0f} GB/s"
    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "scan": (4, lambda: device.scan(segs.copy())),
        "encode": (5, lambda: device.encode(segs, message)),
        "decode": (6, lambda: device.decode(segs, [message, message])),
        "reduce": (3, lambda: _finish(device.reduce(segs.copy(), [message, message], 0, sums))),
        "residual": (9, lambda: device.residual(segs, message)),
    }
    for name, (n_bytes, run) in works.items():
        mine = n_bytes * n / clock(run)
        yield f"{name}: {mine / 1e9:.0f} GB/s, {mine / rate:.0%} of the copy"


# ---- several ranks ----------------------------------------------------------------------------------------


def as_rank(framework: str) -> int:
    """One of several ranks: an all-reduce on the GPU must give the bits of one on the CPU. Four count to two hosts."""
    rank, size = (int(os.environ.get(f"OMPI_COMM_WORLD_{name}", "0")) for name in ("RANK", "SIZE"))
    if size == 4:
        os.environ["HOROVOD_APS_HOST"] = f"half{rank // 2}"
    x = np.random.default_rng(rank).standard_normal(100_003).astype(np.float32)
    if framework == "torch":
        torch, hvd = importlib.import_module("torch"), importlib.import_module("horovod.torch")
        aps = importlib.import_module("horovod_aps.torch")
        hvd.init()
        compressor = aps.APSCompressor(4, 3)
        expected = hvd.allreduce(torch.from_numpy(x), name="cpu", compression=aps.APSCompressor(4, 3)).numpy()
        on_gpu = torch.from_numpy(x).cuda(rank % n_devices())
        for _ in range(3):
            found = hvd.allreduce(on_gpu, name="gpu", compression=compressor).cpu().numpy()
    else:
        tf, hvd = importlib.import_module("tensorflow"), importlib.import_module("horovod.tensorflow")
        aps = importlib.import_module("horovod_aps.tensorflow")
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        hvd.init()
        compressor = aps.APSCompressor(4, 3)
        with tf.device("/CPU:0"):
            expected = hvd.allreduce(tf.constant(x), name="cpu", compression=aps.APSCompressor(4, 3)).numpy()
        gpus = importlib.import_module("horovod_aps.tensorflow.devices").gpus()
        with tf.device(gpus[rank % len(gpus)]):
            found = hvd.allreduce(tf.identity(tf.constant(x)), name="gpu", compression=compressor).numpy()
    same = found.tobytes() == expected.tobytes()
    way = compressor.stats()["hierarchy"]
    print(f"rank {hvd.rank()} of {hvd.size()}: {'as on the CPU' if same else 'DIFFERS'}; {way}")
    return 0 if same else 1


def ranks(framework: str, n_ranks: int) -> Iterator[str]:
    """Lines of several ranks; they share devices if there are not enough, which NCCL would refuse."""
    if importlib.util.find_spec(framework) is None or shutil.which("mpirun") is None:
        yield f"not run: no {framework} or no mpirun"
        return
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(n_ranks), sys.executable, "-m", MODULE]
    environment = os.environ.copy()
    if n_devices() < n_ranks:
        environment.setdefault("HOROVOD_APS_GPU_WAY", "mpi")
    try:
        done = subprocess.run(
            [*command, "--rank", framework], capture_output=True, text=True, timeout=300, env=environment
        )
    except subprocess.TimeoutExpired:
        yield "FAILED: no end after 300 s"
        return
    yield from done.stdout.splitlines()
    if done.returncode:
        yield f"FAILED with code {done.returncode}"
        yield from done.stderr.splitlines()[-30:]


# ---- the report -------------------------------------------------------------------------------------------


def sections(n_timed: int = N_TIMED) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """Everything that is looked at, in order."""
    from horovod_aps.kernels.cuda import CudaKernels

    device = CudaKernels(index=0)

    def machine() -> Iterator[str]:
        cupy = importlib.import_module("cupy")
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        compiler = nvrtc.binding_of(cupy).getVersion()
        yield f"horovod_aps {__version__}, Python {platform.python_version()}, CuPy {cupy.__version__}"
        yield f"{n_devices()} GPU(s), the first {properties['name'].decode()}, NVRTC {compiler[0]}.{compiler[1]}"
        yield f"driver {cupy.cuda.runtime.driverGetVersion()}, runtime {cupy.cuda.runtime.runtimeGetVersion()}"

    def compiled() -> Iterator[str]:
        start = time.perf_counter()
        with device.at_work():
            device.function("scan_kernel")
        yield f"compiled and loaded in {time.perf_counter() - start:.1f} s"

    yield "machine", machine
    yield "compiling", compiled
    yield "kernels against the CPU", lambda: compare(device)
    yield "speed", lambda: speeds(device, n_timed)
    yield "two ranks, PyTorch", lambda: ranks("torch", 2)
    yield "two ranks, TensorFlow", lambda: ranks("tensorflow", 2)
    yield "four ranks as two hosts, PyTorch", lambda: ranks("torch", 4)


def main(arguments: list[str] | None = None) -> int:
    """Write the report; 0 if all is well, 1 if not, 3 without a GPU."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--out", default="gpu-check.txt", help="the text file to send back")
    parser.add_argument(
        "--elements", type=int, default=N_TIMED, help="that kernels are timed with, default %(default)s"
    )
    parser.add_argument("--rank", choices=("torch", "tensorflow"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank:
        return as_rank(given.rank)
    if not n_devices():
        print("gpu-check: no CUDA device is visible here, so there is nothing to check")
        return NO_GPU
    lines = []
    for title, look in sections(given.elements):
        lines.append(f"\n{title}")
        try:
            lines += [f"  {line}" for line in look()]
        except Exception as error:  # the rest may still tell something
            lines.append(f"  FAILED: {type(error).__name__}: {error}")
        print("\n".join(lines[-12:]), flush=True)
    with open(given.out, "w") as file:
        file.write("\n".join(lines) + "\n")
    print(f"\ngpu-check: written to {given.out}; please send it back")
    return int(any("FAILED" in line or "DIFFERS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
