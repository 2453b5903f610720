"""Speed of quant_gemm, whose accumulator is rounded after every multiply-add, beside a Python loop over K.

    python benchmarks/gemm.py                          # square matrices of 64 and 256; (4,3), one thread
    python benchmarks/gemm.py --sizes 512 --threads 2

The loop does the same with torch's operations on whole matrices, K times; that both give the same bits is checked
before anything is timed. GFLOP/s count a multiply and an add, as for any GEMM; the fastest of several runs, in turn.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from horovod_aps.simulate import float_quantize, quant_gemm
from horovod_aps.tools.predict import parse_format, table


def loop_gemm(a: Tensor, b: Tensor, e: int, m: int, kahan: bool) -> Tensor:
    """quant_gemm's definition as one would write it in torch."""
    acc = torch.zeros(a.shape[0], b.shape[1])
    rest = torch.zeros_like(acc)
    for k in range(a.shape[1]):
        product = float_quantize(a[:, k, None] * b[k], e, m)
        if not kahan:
            acc = float_quantize(acc + product, e, m)
            continue
        y = float_quantize(product - rest, e, m)
        t = float_quantize(acc + y, e, m)
        rest = float_quantize(float_quantize(t - acc, e, m) - y, e, m)
        acc = t
    return acc


def measure(n: int, e: int, m: int, repetitions: int) -> dict[str, float]:
    """Seconds of every way to multiply two matrices of n x n."""
    a, b = torch.randn(n, n) / n**0.5, torch.randn(n, n)
    works: dict[str, Callable[[], Tensor]] = {"torch.matmul, float32": lambda: a @ b}
    for kahan, name in ((False, "plain"), (True, "Kahan")):
        works[f"quant_gemm, {name}"] = lambda kahan=kahan: quant_gemm(a, b, e, m, kahan=kahan)
        works[f"loop over K, {name}"] = lambda kahan=kahan: loop_gemm(a, b, e, m, kahan)
        if not torch.equal(works[f"quant_gemm, {name}"](), works[f"loop over K, {name}"]()):
            raise AssertionError(f"gemm.py: quant_gemm and the loop must agree bit for bit, {name}")
    seconds: dict[str, float] = {}
    for _ in range(repetitions):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - start)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256], help="rows, columns and depth")
    parser.add_argument("--format", type=parse_format, default=(4, 3), metavar="E,M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for n in arguments.sizes:
        seconds = measure(n, *arguments.format, arguments.repetitions)
        for name, one in seconds.items():
            mine = seconds[name.replace("loop over K", "quant_gemm")]
            over = f"{one / mine:.1f}x" if one is not mine else ""
            rows.append([str(n), name, f"{1e3 * one:.2f}", f"{2e-9 * n**3 / one:.2f}", over])
    print(table(["size", "", "ms", "GFLOP/s", "over quant_gemm"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
