"""The CPU kernels of tables and MX against the formats' own NumPy, bit for bit; see test_buckets_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import test_buckets_kernels as buckets
import test_cuda_kernels
from test_buckets_kernels import variant as variant

from horovod_aps import kernels as K
from horovod_aps.formats import MX, DynamicTree, Linear, MantissaTree, StaticTree, TableFormat
from horovod_aps.formats.buckets import BucketFormat

CROWDED = np.sort(np.concatenate([-(2.0 ** -np.arange(20)), 1 - np.arange(200) * 2.0**-20]))  # many to a lookup
FORMATS: list[BucketFormat] = [
    DynamicTree(),
    DynamicTree("bitsandbytes"),
    Linear(),
    StaticTree(),
    MantissaTree(),
    TableFormat([-1, 1]),
    TableFormat([-3, -0.5, 0.25, 0.5, 2]),
    TableFormat(CROWDED),
    *(
        MX(e, m, block, saturate)
        for e, m, block, saturate in (
            (4, 3, 32, False), (4, 3, 32, True), (5, 2, 32, False), (5, 2, 64, True), (3, 2, 32, False),
            (2, 3, 8, True), (2, 1, 32, False), (2, 1, 16, True), (3, 0, 2048, False), (1, 6, 32, False),
            (6, 1, 256, False), (7, 0, 32, False), (1, 0, 8, False), (1, 0, 8, True),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("case", range(4))
def test_kernels_give_the_bits_of_numpy(case: int, seed: int | None, variant: str, monkeypatch) -> None:
    monkeypatch.setattr(buckets, "FORMATS", FORMATS)
    buckets.test_kernels_give_the_bits_of_numpy(case, seed, variant)


@pytest.mark.parametrize("fmt", [DynamicTree(), TableFormat([-1, 0, 1]), MX(4, 3), MX(2, 1)], ids=str)
def test_large_segments_are_the_same_on_any_number_of_threads(fmt: BucketFormat) -> None:
    buckets.test_large_segments_are_the_same_on_any_number_of_threads(fmt)


@pytest.mark.parametrize("fmt", FORMATS[:8], ids=str)
def test_large_segments_have_the_codes_of_numpy_around_every_boundary(fmt: TableFormat, variant: str) -> None:
    """What is large is looked up by its own bits, not by its share of the scale: at scales that under- and overflow."""
    n, rng = 1 << 17, np.random.default_rng(3)
    for scale in np.float32([1, 0.3, 1.999, 3.4e38, 1e-38, 7e-45]):
        values = fmt.values.astype(np.float64)
        edges = np.append((values[1:] + values[:-1]) / 2, values) * float(scale)
        edges = edges[np.abs(edges) <= scale].astype(np.float32)
        near = [np.nextafter(edges, np.float32(side)) for side in (-np.inf, np.inf)]
        x = np.concatenate([edges, *near, [-0.0, 1e-45, -1e-45, scale, -scale]]).astype(np.float32)
        rest = rng.standard_normal(n - len(x)) * 10 ** rng.uniform(-8, 0, n - len(x)) * float(scale)
        x = np.append(x, np.clip(rest, -scale, scale).astype(np.float32))
        segs, message = np.zeros(1, K.SEGMENT), np.zeros(fmt.bytes_for(n), np.uint8)
        fmt.describe(segs)
        segs["data"], segs["n"] = x.ctypes.data, n
        K.CpuKernels().scan(segs)
        K.CpuKernels().encode(segs, message)
        assert np.array_equal(message, fmt.encode_segment(x.astype(np.float64), 0, None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fmt, scale",
    [(DynamicTree(), 1.37e-3), (DynamicTree("bitsandbytes"), 3.3333), (Linear(), 1.9999), (StaticTree(), 0.7)],
    ids=str,
)
def test_every_number_has_the_same_code_with_all_instructions(fmt: TableFormat, scale: float) -> None:
    """All float32 up to the scale, of both signs; beside some that are the scale, so that every piece has it."""
    lib, most = K.library(), np.full(1 << 17, scale, np.float32)
    best, end, piece = lib.aps_use_vectors(2), int(most.view(np.uint32)[0]) + 1, 1 << 24
    if not best:
        pytest.skip("no AVX2 here")
    for sign in (0, 1 << 31):
        for begin in range(0, end, piece):
            numbers = np.arange(begin, min(begin + piece, end), dtype=np.uint32) | np.uint32(sign)
            x = np.append(numbers.view(np.float32), most)
            segs, messages = np.zeros(1, K.SEGMENT), np.zeros((best + 1, fmt.bytes_for(x.size)), np.uint8)
            fmt.describe(segs)
            segs["data"], segs["n"] = x.ctypes.data, x.size
            for vectors in range(1, best + 1):
                lib.aps_use_vectors(vectors)
                K.CpuKernels().encode(segs, messages[vectors])
            at = np.arange(0, numbers.size, 1009)  # the baseline is slow: some
            codes = fmt.encode_segment(x[np.append(at, -1)].astype(np.float64), 0, None)
            assert np.array_equal(messages[best], messages[1])
            assert np.array_equal(messages[best][4:][at], codes[4:-1])


@pytest.mark.parametrize(
    "fmt, field, value, words",
    [
        (Linear(), "codec", 65535, "bits"),
        (Linear(), "block", 8, "bits"),
        (Linear(), "n", 41, "inside"),
        (MX(4, 3), "block", 0, "bits"),
        (MX(4, 3), "block", 48, "bits"),
        (MX(4, 3), "block", 4096, "bits"),
        (MX(4, 3), "man_bits", 4, "bits"),
        (MX(4, 3), "exp_bits", 0, "bits"),
        (MX(4, 3), "codec", 2, "bits"),
        (MX(4, 3), "n", 43, "inside"),
        (MX(4, 3), "exponent", 5000, "exponent"),
    ],
)
def test_malformed_segments_are_refused(fmt: BucketFormat, field: str, value: int, words: str) -> None:
    x, message = np.ones(40, np.float32), np.full(44, 0xA5, np.uint8)
    segs = np.zeros(1, K.SEGMENT)
    fmt.describe(segs)
    segs["data"], segs["n"] = x.ctypes.data, 40
    segs[field] = value
    with pytest.raises(ValueError, match=words):
        K.CpuKernels().encode(segs, message)
    assert np.all(message == 0xA5)


@pytest.mark.parametrize("fmt", [Linear(), TableFormat([-1, 1]), MX(4, 3), MX(2, 1)], ids=str)
@pytest.mark.parametrize("value, wanted", [(0.0, 0.0), (np.inf, np.nan)])
def test_sums_that_keep_their_exponent_tell_zero_and_nan_by_the_scale(fmt, value: float, wanted: float) -> None:
    """Nothing but the message says so then."""
    x = np.full(70, 3e38 if np.isinf(value) else 0, np.float32)
    segs = np.zeros(1, K.SEGMENT)
    fmt.describe(segs)
    segs["data"], segs["n"], segs["factor"] = x.ctypes.data, 70, 1
    one, total = (np.zeros(fmt.bytes_for(70), np.uint8) for _ in range(2))
    one[:] = fmt.encode_segment(x.astype(np.float64), 0, None)
    K.CpuKernels().reduce(segs, [one, one], 0, total, keep_exponent=True)
    with np.errstate(over="ignore"):
        doubled = 2 * fmt.decode_segment(one, 70, 0).astype(np.float32)
    assert np.array_equal(total, fmt.encode_segment(doubled.astype(np.float64), 0, None)) and segs["exponent"] == 0
    K.CpuKernels().decode(segs, [total])
    assert np.isnan(x).all() if np.isnan(wanted) else not x.any()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("keep", [False, True])
def test_cuda_kernels_give_the_bits_of_the_cpu(seed: int | None, keep: bool, monkeypatch) -> None:
    """On the stand-in, with segments of all dtypes, sizes and scales of every format here."""
    monkeypatch.setattr(test_cuda_kernels, "BUCKETS", FORMATS)
    rng = np.random.default_rng([3, keep])
    for _ in range(2):
        segs, arrays, length = test_cuda_kernels.make_bucket(rng, 40, share=0.9)
        arguments = (segs, arrays, length, seed, 0, keep)
        expected = test_cuda_kernels.run_all(test_cuda_kernels.Cpu(), *arguments)
        got = test_cuda_kernels.run_all(test_cuda_kernels.Gpu(96, 3), *arguments)
        for index, (wanted, found) in enumerate(zip(expected, got, strict=True)):
            same = np.array_equal(wanted, found, equal_nan=True) if index == 5 else wanted.tobytes() == found.tobytes()
            assert same, f"result {index}"
