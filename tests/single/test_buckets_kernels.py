"""The CPU kernels of QSGD and OneBit against the formats' own NumPy, bit for bit.

Oracle: `encode_segment` and `decode_segment`, and sums in float32 in the order of the inputs. As formats in Python they
also go through the exchange, beside the native ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from test_cuda_kernels import bits_of

from horovod_aps import kernels as K
from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.formats import QSGD, FloatFormat, HostFormat, OneBit
from horovod_aps.formats.buckets import BucketFormat
from horovod_aps.kernels.segments import seed_argument
from horovod_aps.options import Options

SIZES = [0, 1, 7, 8, 9, 63, 100, 1023, 1025, 2048, 2049, 5000]
FORMATS: list[BucketFormat] = [
    *(QSGD(bits, bucket, norm) for bits, bucket, norm in (
        (8, 512, "max"), (4, 512, "max"), (2, 128, "l2"), (3, 27, "max"), (8, 1, "l2"), (5, 600, "l2"), (7, 4096, "l2"),
        (6, 5, "max"), (8, 2**30, "l2")
    )),
    *(OneBit(bucket) for bucket in (64, 27, 1, 300, 4096, 5000, "tensor")),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.fixture(params=["baseline", "AVX2, 3 threads", "AVX-512"])
def variant(request) -> Iterator[str]:
    lib = K.library()
    vectors = ["baseline", "AVX2", "AVX-512"].index(request.param.split(",")[0])
    if lib.aps_use_vectors(vectors) != vectors:
        pytest.skip(f"no {request.param} here")
    K.set_num_threads(3 if "threads" in request.param else 1)
    yield request.param
    K.set_num_threads(1)
    lib.aps_use_vectors(2)


def values_of(array: np.ndarray, dtype: int) -> np.ndarray:
    """The elements as float64."""
    if dtype == K.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def stored(values: np.ndarray, dtype: int) -> np.ndarray:
    """Rounded once to the dtype."""
    if dtype == K.BFLOAT16:
        wide = np.asarray(FloatFormat(8, 7).quantize(values.astype(np.float64)))
        return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype([np.float32, np.float64, np.float16][dtype])


class Bucket:
    """A table of segments of one format each, and what NumPy makes of it."""

    def __init__(self, rng: np.random.Generator, formats: list[BucketFormat], sizes: list[int], special: bool) -> None:
        self.formats, self.offset = formats, 0
        self.segs = np.zeros(len(formats), K.SEGMENT)
        self.arrays = []
        for row, (fmt, n) in enumerate(zip(formats, sizes, strict=True)):
            segment, dtype = self.segs[row : row + 1], int(rng.integers(4))
            scale = 10.0 ** (rng.choice([-44, -39, -20, 0, 30, 37]) if special else 0)
            values = rng.standard_normal(n) * np.exp2(rng.integers(-20, 2, n)) * scale
            values[rng.random(n) < 0.05] *= 0.0  # of both signs
            if special and n and rng.random() < 0.15:
                values[rng.integers(n)] = rng.choice([np.nan, np.inf])
            if special and rng.random() < 0.1:
                values[:] = -0.0
            array = bits_of(values, dtype)
            fmt.describe(segment)
            segment["data"], segment["n"], segment["offset"], segment["dtype"] = (
                array.ctypes.data,
                n,
                self.offset,
                dtype,
            )
            segment["factor"] = rng.choice([1.0, 0.5, 1 / 3, -2.0, 1e-30])
            segment["uid"], segment["first"] = rng.integers(2**32), rng.choice([0, 8, 2**32 - 1024, 2**40])
            self.offset += fmt.bytes_for(n) + int(rng.integers(4))
            self.arrays.append(array)

    def exponents(self) -> list[int]:
        found = []
        for fmt, array, segment in zip(self.formats, self.arrays, self.segs, strict=True):
            values = values_of(array, int(segment["dtype"]))
            if not np.isfinite(values).all():
                found.append(K.EXP_NONFINITE)
            else:
                found.append(fmt.exponent_of(values, True) if values.any() else K.EXP_ZERO)
        return found

    def random(self, row: int, seed: int | None) -> np.ndarray | None:
        segment = self.segs[row]
        return self.formats[row].random_bits(int(segment["n"]), seed, int(segment["uid"]), int(segment["first"]))

    def encoded(self, row: int, values: np.ndarray, exponent: int, seed: int | None) -> np.ndarray:
        fmt = self.formats[row]
        if exponent:
            return np.zeros(fmt.bytes_for(len(values)), np.uint8)
        return fmt.encode_segment(values, exponent, self.random(row, seed))

    def decoded(self, row: int, message: np.ndarray) -> np.ndarray:
        """float32."""
        segment, fmt = self.segs[row], self.formats[row]
        n = int(segment["n"])
        if segment["exponent"] or not n:
            return np.full(n, 0.0 if segment["exponent"] == K.EXP_ZERO else np.nan, np.float32)
        data = message[int(segment["offset"]) :][: fmt.bytes_for(n)]
        return fmt.decode_segment(data, n, 0).astype(np.float32)

    def summed(self, row: int, messages: list[np.ndarray]) -> np.ndarray:
        total = self.decoded(row, messages[0])
        for message in messages[1:]:
            with np.errstate(over="ignore", invalid="ignore"):
                total = total + self.decoded(row, message)
        return total

    def filled(self, parts: list[np.ndarray]) -> np.ndarray:
        """A message; what lies between segments must stay."""
        message = np.full(self.offset + 3, 0xA5, np.uint8)
        for segment, part in zip(self.segs, parts, strict=True):
            message[int(segment["offset"]) :][: len(part)] = part
        return message


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    is_nan = np.zeros(found.shape, bool) if found.dtype.kind == "u" else np.isnan(found)
    if found.dtype.kind != "u":
        assert np.array_equal(is_nan, np.isnan(wanted))
    view = np.dtype(f"u{found.itemsize}")
    assert np.array_equal(found.view(view)[~is_nan], wanted.view(view)[~is_nan])


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("case", range(6))
def test_kernels_give_the_bits_of_numpy(case: int, seed: int | None, variant: str) -> None:
    rng = np.random.default_rng([case, 5])
    many = list(rng.permutation(np.repeat(np.arange(len(FORMATS)), 2)))
    bucket = Bucket(rng, [FORMATS[k] for k in many], [int(rng.choice(SIZES)) for _ in many], special=case % 2 == 0)
    cpu, segs, rows = K.CpuKernels(), bucket.segs, range(len(many))
    cpu.scan(segs, stochastic=seed is not None)
    assert segs["exponent"].tolist() == bucket.exponents()

    messages = []
    for k in range(3):
        message = np.full(bucket.offset + 3, 0xA5, np.uint8)
        own = None if seed is None else seed + k
        cpu.encode(segs, message, own)
        values = [values_of(bucket.arrays[row], int(segs[row]["dtype"])) for row in rows]
        parts = [bucket.encoded(row, values[row], int(segs[row]["exponent"]), own) for row in rows]
        assert np.array_equal(message, bucket.filled(parts))
        messages.append(message)
        for array in bucket.arrays:
            array[:] = array[::-1].copy()
    for array in bucket.arrays:
        array[:] = array[::-1].copy()  # as in the first message

    measured = cpu.measure(segs, messages[0])
    for row in rows:
        x, d = (
            values_of(bucket.arrays[row], int(segs[row]["dtype"])),
            bucket.decoded(row, messages[0]).astype(np.float64),
        )
        if segs[row]["exponent"] != K.EXP_NONFINITE:
            assert measured[row, 0] == np.count_nonzero((x != 0) & (d == 0))
            assert measured[row, 3] == np.abs(x).max(initial=0)
            assert measured[row, 1:3] == pytest.approx([((x - d) ** 2).sum(), (x**2).sum()], rel=1e-9)

    out = np.full(bucket.offset + 3, 0xA5, np.uint8)
    sums = segs.copy()
    cpu.reduce(sums, messages, 0, out, seed)
    parts = []
    for row in rows:
        total = bucket.summed(row, messages)
        exponent = int(segs[row]["exponent"])
        if not exponent:
            top = np.abs(total).max()
            exponent = K.EXP_NONFINITE if not np.isfinite(top) else 0 if top else K.EXP_ZERO
        assert sums[row]["exponent"] == exponent
        parts.append(
            bucket.encoded(
                row, total.astype(np.float64), exponent, seed_argument(seed, reduce=True)[1] if seed else None
            )
        )
    assert np.array_equal(out, bucket.filled(parts))

    left = [array.copy() for array in bucket.arrays]
    table = segs.copy()
    table["data"] = [array.ctypes.data for array in left]
    cpu.residual(table, messages[0])
    for row in rows:
        dtype = int(segs[row]["dtype"])
        wanted = stored(values_of(bucket.arrays[row], dtype) - bucket.decoded(row, messages[0]), dtype)
        same(left[row], np.zeros_like(wanted) if segs[row]["exponent"] == K.EXP_NONFINITE else wanted)

    cpu.decode(table, messages)
    for row in rows:
        dtype, factor = int(segs[row]["dtype"]), segs[row]["factor"]
        total = bucket.summed(row, messages)
        with np.errstate(over="ignore", invalid="ignore"):
            wide = total.astype(np.float64) * np.float64(factor)
            wanted = stored(wide if dtype == K.FLOAT64 else (total * factor).astype(np.float64), dtype)
        if segs[row]["exponent"] == K.EXP_ZERO:
            wanted = np.zeros_like(wanted)
        elif dtype == K.BFLOAT16 and segs[row]["exponent"]:
            wanted = np.full_like(wanted, 0x7FC0)
        same(left[row], wanted)


@pytest.mark.parametrize("fmt", FORMATS[:2] + FORMATS[2:3] + [OneBit(64), OneBit("tensor")], ids=str)
def test_large_segments_are_the_same_on_any_number_of_threads(fmt: BucketFormat) -> None:
    """Long enough for threads, and for stores past the cache, which begin where memory is aligned."""
    n = (1 << 21) + 999
    x = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    cpu, results = K.CpuKernels(), []
    for threads in (1, 2, 5):
        K.set_num_threads(threads)
        segs, out = np.zeros(1, K.SEGMENT), np.empty(n + 20, np.float32)
        fmt.describe(segs)
        segs["data"], segs["n"], segs["factor"] = x.ctypes.data, n, 0.5
        message = np.zeros(fmt.bytes_for(n), np.uint8)
        cpu.scan(segs)
        cpu.encode(segs, message, 3)
        first = -out.ctypes.data % 64 // 4 + threads - 1
        segs["data"] = out[first:].ctypes.data
        total = message.copy()
        cpu.reduce(segs, [message, message], 0, total, 3)
        cpu.decode(segs, [message, total])
        results.append((message, total, out[first:][:n].copy()))
    K.set_num_threads(1)
    for found in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found, results[0], strict=True))
    one = fmt.decode_segment(results[0][0], n, 0).astype(np.float32)
    two = fmt.decode_segment(results[0][1], n, 0).astype(np.float32)
    assert np.array_equal(results[0][2], (one + two) * np.float32(0.5))


def test_malformed_segments_are_refused() -> None:
    x, message = np.ones(40, np.float32), np.full(44, 0xA5, np.uint8)
    for field, value, words in (
        ("man_bits", 0, "bits"), ("man_bits", 8, "bits"), ("block", 0, "bits"), ("codec", 2, "bits"),
        ("n", 41, "inside"), ("exponent", 5000, "exponent"),
    ):  # fmt: skip
        segs = np.zeros(1, K.SEGMENT)
        QSGD(8).describe(segs)
        segs["data"], segs["n"] = x.ctypes.data, 40
        segs[field] = value
        with pytest.raises(ValueError, match=words):
            K.CpuKernels().encode(segs, message)
    assert np.all(message == 0xA5)


# ---- through the exchange ---------------------------------------------------------------------------------


class PythonQSGD(QSGD):
    """QSGD without its kernels."""

    describe = HostFormat.describe


class PythonOneBit(OneBit):
    """OneBit without its kernels."""

    describe = HostFormat.describe


def exchanged(grads: list[list[np.ndarray]], fmt, exchanges: list[Exchange] | None):
    outs = [[np.empty_like(x) for x in rank] for rank in grads]
    layers = [
        [
            Layer(f"l{i}", x.shape, K.FLOAT32, x.ctypes.data, out.ctypes.data, 1.0, (x, out))
            for i, (x, out) in enumerate(zip(*pair, strict=True))
        ]
        for pair in zip(grads, outs, strict=True)
    ]
    options = Options(4, 3, overrides={"*": fmt}, rounding="stochastic", error_feedback=True, seed=9)
    return outs, local_allreduce(layers, options, K.CpuKernels(), exchanges)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize(
    "native, python",
    [(QSGD(4, 24), PythonQSGD(4, 24)), (QSGD(8, 64, "l2"), PythonQSGD(8, 64, "l2")), (OneBit(27), PythonOneBit(27)),
     (OneBit("tensor"), PythonOneBit("tensor"))],
    ids=["qsgd4", "qsgd8-l2", "onebit", "onebit-tensor"],
)  # fmt: skip
def test_exchange_is_the_same_with_kernels_and_in_python(native, python, n_ranks: int) -> None:
    """Values of few bits, whose sums float32 holds exactly, so that Python's sums in double are the same."""
    rng = np.random.default_rng(n_ranks)
    grads = [[rng.integers(-3, 4, n).astype(np.float32) for n in (1, 9, 1000)] for _ in range(n_ranks)]
    results = []
    for fmt in (native, python):
        outs, exchanges = exchanged(grads, fmt, None)
        results.append((outs, exchanges))
        assert all(np.array_equal(a, b) for a, b in zip(outs[0], outs[1], strict=True))
    for ours, theirs in zip(sum(results[0][0], []), sum(results[1][0], []), strict=True):
        assert np.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_nan_of_one_rank_reaches_all_and_zeros_stay() -> None:
    for fmt in (QSGD(4), OneBit()):
        grads = [[np.zeros(40, np.float32), np.ones(40, np.float32), np.ones(40, np.float32)] for _ in range(3)]
        grads[1][1][7] = np.inf
        outs, _ = exchanged(grads, fmt, None)
        for rank in outs:
            assert not rank[0].any() and np.isnan(rank[1]).all() and np.all(rank[2] == 3)
