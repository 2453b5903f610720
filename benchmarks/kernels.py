"""Speed of every CPU kernel beside memcpy, measured in the same run.

Bytes are those that the operation must read and write (each once), counted the same way for memcpy; every
time is the best of several rounds, interleaved so that a slow phase of the machine hits all alike.

    python benchmarks/kernels.py --elements 25600000 --threads 1 --json out.json

With --against LIBRARY, a build of other sources (`_cpu*.so` of another checkout), every kernel runs from both libraries
in turn, and the last column is this one's time over the other's:

    python benchmarks/kernels.py --against ../before/horovod_aps/_cpu.cpython-311-x86_64-linux-gnu.so
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable

import numpy as np

from horovod_aps import config
from horovod_aps import kernels as K
from horovod_aps.formats import MX, QSGD, DynamicTree, FloatFormat, Format, Linear, OneBit
from horovod_aps.kernels import native

FORMATS = [(4, 3), (5, 2), (3, 0), (3, 2), (5, 10)]
OTHERS = [QSGD(8), QSGD(8, norm="l2"), QSGD(4), QSGD(2, 128), OneBit(64), DynamicTree(), Linear(), MX(4, 3), MX(2, 1)]

Case = tuple[str, float, Callable[[], object]]


def bucket(x: np.ndarray, fmt: Format) -> np.ndarray:
    """One segment over x."""
    segs = np.zeros(1, dtype=K.SEGMENT)
    segs["data"], segs["n"], segs["factor"] = x.ctypes.data, x.size, 0.5
    fmt.describe(segs)
    return segs


def cases(n: int) -> list[Case]:
    """(name, bytes moved, call) of memcpy and of every kernel in every format."""
    rng = np.random.default_rng(0)
    cpu = K.CpuKernels()
    x, y = rng.standard_normal(n, dtype=np.float32), np.ones(n, dtype=np.float32)
    kept = x.copy()
    memcpy = ctypes.memmove
    result: list[Case] = [("memcpy", 8.0 * n, lambda: memcpy(y.ctypes.data, x.ctypes.data, 4 * n))]
    result.append(("scan", 4.0 * n, lambda: cpu.scan(bucket(x, FloatFormat(4, 3)))))
    result.append(
        ("add", 12.0 * n, lambda: cpu.add(bucket(x, FloatFormat(4, 3)), np.array([kept.ctypes.data], np.uint64)))
    )
    for fmt in (*(FloatFormat(*bits) for bits in FORMATS), *OTHERS):
        packed = fmt.bytes_for(n)
        one, two = (cpu.alloc(packed + 8) for _ in range(2))
        out = cpu.alloc(packed + 8)
        segs = bucket(x, fmt)
        cpu.scan(segs)
        cpu.encode(segs, one)
        x[:] = x[::-1].copy()
        cpu.encode(segs, two)
        target = segs.copy()
        target["data"] = y.ctypes.data
        loss = segs.copy()
        loss["data"] = kept.ctypes.data
        name = f"({fmt.exp_bits},{fmt.man_bits})" if isinstance(fmt, FloatFormat) else str(fmt)
        draws = fmt.rounding == "stochastic"
        result += [
            (f"encode {name}", 4.0 * n + packed, lambda s=segs, m=one, d=draws: cpu.encode(s, m, 1 if d else None)),
            (f"residual {name}", 8.0 * n + packed, lambda s=loss, a=one, alive=kept: cpu.residual(s, a)),
            (f"decode 1 {name}", 4.0 * n + packed, lambda s=target, a=one: cpu.decode(s, [a])),
            (f"decode 2 {name}", 4.0 * n + 2 * packed, lambda s=target, a=one, b=two: cpu.decode(s, [a, b])),
            (
                f"reduce 2 {name}",
                3 * packed,
                lambda s=segs, a=one, b=two, o=out, d=draws: cpu.reduce(s.copy(), [a, b], 0, o, 1 if d else None),
            ),
            (
                f"reduce 4 {name}",
                5 * packed,
                lambda s=segs, a=one, b=two, o=out, d=draws: cpu.reduce(s.copy(), [a, b, b, a], 0, o, 1 if d else None),
            ),
        ]
        if fmt.rounding == "option":
            result.append((f"encode stochastic {name}", 4.0 * n + packed, lambda s=segs, m=out: cpu.encode(s, m, 1)))
    return result


def other_library(path: str, threads: int) -> ctypes.CDLL:
    """Another build of the library, which need not have every function of this one."""
    lib = ctypes.CDLL(path)
    for name, arguments in native.SIGNATURES.items():
        if hasattr(lib, name):
            getattr(lib, name).argtypes, getattr(lib, name).restype = arguments, ctypes.c_int64
    if hasattr(lib, "aps_use_vectors"):
        lib.aps_use_vectors(config.vectors())
    lib.aps_set_num_threads(threads)
    return lib


def best_times(work: list[Case], rounds: int, libraries: list[ctypes.CDLL]) -> list[dict[str, float]]:
    """The best time of every case, per library; the libraries take turns, and who is first does too."""
    best = [{name: float("inf") for name, _, _ in work} for _ in libraries]
    for turn in range(rounds):
        for name, _, call in work:
            for which in range(len(libraries)) if turn % 2 == 0 else reversed(range(len(libraries))):
                native._library = libraries[which]
                start = time.perf_counter()
                call()
                best[which][name] = min(best[which][name], time.perf_counter() - start)
    native._library = libraries[0]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_600_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="names to run, by substring")
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument(
        "--against", metavar="LIBRARY", help="another build of the library, to run in turn with this one"
    )
    arguments = parser.parse_args()
    K.set_num_threads(arguments.threads)
    work = [c for c in cases(arguments.elements) if c[0] in ("memcpy", "scan") or arguments.only in c[0]]
    libraries = [K.library()]
    if arguments.against:
        libraries.append(other_library(arguments.against, arguments.threads))
    best, *other = best_times(work, arguments.rounds, libraries)
    rates = {name: size / best[name] / 1e9 for name, size, _ in work}
    print(f"{arguments.elements} elements, {arguments.threads} thread(s)")
    print(
        f"{'kernel':<28}{'ms':>8}{'GB/s':>8}{'of memcpy':>11}" + "".join(f"{'other ms':>10}{'ratio':>7}" for _ in other)
    )
    for name, rate in rates.items():
        line = f"{name:<28}{best[name] * 1e3:8.2f}{rate:8.1f}{rate / rates['memcpy']:11.2f}"
        print(line + "".join(f"{times[name] * 1e3:10.2f}{best[name] / times[name]:7.3f}" for times in other))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"elements": arguments.elements, "threads": arguments.threads, "gb_per_s": rates},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
