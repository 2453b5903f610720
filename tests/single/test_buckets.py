"""QSGD and OneBit on plain arrays: what their definitions say, in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from horovod_aps import formats
from horovod_aps.formats import QSGD, OneBit
from horovod_aps.formats.buckets import bucket_sums
from horovod_aps.kernels import EXP_NONFINITE, EXP_ZERO

N_DRAWS = 10_000


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_unbiased_and_its_variance_below_the_bound(bits: int, norm: str) -> None:
    """10^4 draws of a bucket at once: as many buckets, each with random bits of its own."""
    d = 32
    v = np.random.default_rng([bits]).standard_normal(d).astype(np.float32)
    fmt = QSGD(bits, bucket=d, norm=norm)  # type: ignore[arg-type]
    draws = fmt.quantize(np.tile(v, (N_DRAWS, 1)), seed=bits).astype(np.float64)
    step = np.float64(np.abs(v).max() if norm == "max" else np.linalg.norm(v)) / fmt.levels
    part = np.abs(v) / step % 1
    error = np.maximum(step * np.sqrt(part * (1 - part) / N_DRAWS), 1e-7 * step)  # of the mean
    assert np.all(np.abs(draws.mean(axis=0) - v) < 4 * error)
    variance = ((draws - v) ** 2).sum(axis=1).mean()
    assert variance == pytest.approx((step**2 * part * (1 - part)).sum(), rel=0.05)
    if norm == "l2":
        assert variance < min(d / fmt.levels**2, np.sqrt(d) / fmt.levels) * (v.astype(np.float64) ** 2).sum()


@pytest.mark.parametrize("bits", range(2, 9))
def test_qsgd_levels_are_multiples_of_the_scale_and_neighbours_of_the_value(bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal(1500).astype(np.float32)
    fmt = QSGD(bits, bucket=100)
    codes, scales = fmt.encode(x, seed=1)
    assert np.array_equal(scales, np.abs(x).reshape(-1, 100).max(axis=1))
    steps = np.repeat(scales / np.float64(fmt.levels), 100)
    signed = np.where(codes >> (bits - 1), -1.0, 1.0) * (codes & fmt.levels)
    assert np.all(np.abs(signed - x / steps) <= 1 + 1e-4) and np.all((signed == 0) | (np.sign(signed) == np.sign(x)))
    decoded = fmt.decode(codes, scales)
    assert np.allclose(decoded, signed * steps, rtol=2e-7, atol=0)
    top = np.abs(x) == np.repeat(scales, 100)
    assert top.sum() >= 15 and np.array_equal(decoded[top], x[top])
    assert np.array_equal(decoded, fmt.quantize(x, seed=1)) and not np.array_equal(decoded, fmt.quantize(x, seed=2))


def test_onebit_sends_the_means_of_both_sides() -> None:
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    x[1, 0], x[2] = -0.0, np.abs(x[2])
    for fmt, rows in (
        (OneBit(40), x),
        (OneBit("column"), x),
        (OneBit("tensor"), x.reshape(1, -1)),
        (OneBit(10), x.reshape(12, 10)),
    ):
        codes, scales = fmt.encode(x)
        assert np.array_equal(codes, x < 0)
        wide = rows.astype(np.float64)
        for row, (from_zero, below) in zip(wide, scales, strict=True):
            assert np.isclose(from_zero, row[row >= 0].mean(), rtol=1e-7)
            assert np.isclose(below, row[row < 0].mean() if (row < 0).any() else 0, rtol=1e-7)
        wanted = np.where(rows < 0, scales[:, 1:], scales[:, :1]).reshape(x.shape)
        assert np.array_equal(fmt.quantize(x), wanted) and np.array_equal(fmt.decode(codes, scales), wanted)
    assert OneBit(40).quantize(x).sum() == pytest.approx(x.sum(), rel=1e-5)  # the mean stays


def test_onebit_columns_share_the_first_index() -> None:
    column = OneBit("column")
    assert [column.for_shape(s).bucket for s in ((64, 3, 3, 3), (10,), (), (5, 0), (0,))] == [27, 10, 1, 1, 1]
    assert column.for_shape((64, 3, 3, 3)).unit == 216
    assert OneBit(64).for_shape((3, 3)) == OneBit(64)


def test_bucket_sums_keep_their_order() -> None:
    """By hand, with numbers of which the order of addition decides what is left."""
    terms = np.random.default_rng(3).standard_normal((2, 700)) * 2.0 ** np.random.default_rng(4).integers(0, 90, 700)
    for row, found in zip(terms, bucket_sums(terms), strict=True):
        total = 0.0
        for start in range(0, 700, 256):
            p = [0.0] * 8
            for j, term in enumerate(row[start : start + 256]):
                p[j % 8] += term
            total += ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))
        assert found == total


FORMATS = [QSGD(2, 128), QSGD(4), QSGD(7, 24, "l2"), QSGD(8), OneBit(64), OneBit(27), OneBit("tensor"), OneBit()]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 511, 513, 1025])
def test_packed_sizes_and_round_trips(fmt: formats.Format, n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    mine = fmt.for_shape(x.shape)
    seed = {"seed": 5} if isinstance(fmt, QSGD) else {}
    codes, scales = fmt.encode(x, **seed)  # type: ignore[attr-defined]
    packed = fmt.pack(codes, scales)  # type: ignore[attr-defined]
    assert len(packed) == mine.bytes_for(n) and (n or not len(packed))
    again = mine.unpack(bytes(packed) + b"more", n)  # type: ignore[attr-defined]
    assert np.array_equal(again[0], codes) and np.array_equal(again[1], scales)
    if n == 1:
        assert fmt.decode(codes, scales)[0] == x[0]  # type: ignore[attr-defined]
    assert mine.unit % 8 == 0 and mine.unit % (mine.block or 1) == 0  # type: ignore[attr-defined]
    assert mine.bytes_for(3 * mine.unit) == 3 * mine.bytes_for(mine.unit) or not mine.block  # type: ignore[attr-defined]


@pytest.mark.parametrize("fmt", [QSGD(8), QSGD(2, 3, "l2"), OneBit(3)], ids=str)
@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-30, 1.0, 1e30, 3.4e38])
def test_one_element_per_bucket_is_exact_at_every_size(fmt: formats.Format, value: float) -> None:
    x = np.array([0, 0, value, -0.0, 0, -value, 0, 0, 0], np.float32)
    if isinstance(fmt, OneBit):
        x = x[2::3]
        fmt = OneBit(1)
    else:
        fmt = QSGD(fmt.bits, 3, fmt.norm)  # type: ignore[attr-defined]
    assert np.array_equal(fmt.quantize(x, **({"seed": 1} if isinstance(fmt, QSGD) else {})), x)  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bucket_with_nan_or_inf_decodes_to_nan(bad: float) -> None:
    x = np.ones(24, np.float32)
    x[9] = bad
    for fmt in (QSGD(4, 8), QSGD(4, 8, "l2"), OneBit(8)):
        found = fmt.quantize(x)
        assert np.isnan(found[8:16]).all() and np.isfinite(found[:8]).all() and np.isfinite(found[16:]).all()
        assert fmt.exponent_of(np.array([1e39]), True) == EXP_NONFINITE
        assert fmt.exponent_of(np.array([1e-60]), True) == EXP_ZERO
        assert fmt.exponent_of(np.array([1e-45, 1e38]), True) == 0


def test_the_l2_norm_of_large_numbers_does_not_overflow() -> None:
    x = np.full(512, 3e38, np.float32)
    codes, scales = QSGD(8, norm="l2").encode(x, seed=0)
    assert scales[0] == np.finfo(np.float32).max
    assert QSGD(8, norm="l2").decode(codes, scales).astype(np.float64).mean() == pytest.approx(3e38, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_arrays_and_tensors_keep_their_dtype(dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 50)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    for fmt, seed in ((QSGD(4, 16), {"seed": 1}), (OneBit(16), {}), (OneBit("column"), {})):
        found = fmt.quantize(x, **seed)  # type: ignore[operator]
        assert found.dtype == x.dtype and found.shape == x.shape
        wanted = fmt.quantize(x.astype(np.float32), **seed)  # type: ignore[operator]
        assert np.array_equal(found, wanted.astype(x.dtype))
        tensor = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))
        again = fmt.quantize(tensor, **seed)  # type: ignore[operator]
        assert again.dtype == tensor.dtype and np.array_equal(again.float().numpy(), found.astype(np.float32))


@pytest.mark.parametrize("fmt", [*FORMATS, QSGD(4, 512, "l2"), QSGD(4, 8, "l2")], ids=str)
def test_text_names_the_format(fmt: formats.Format) -> None:
    assert formats.parse(str(fmt)) == fmt and eval(repr(fmt)) == fmt


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: QSGD(0), "QSGD: bits must be in 2..8, got 0.*such as bits=4"),
        (lambda: QSGD(9), "QSGD: bits must be in 2..8, got 9"),
        (lambda: QSGD(4, 0), "QSGD: bucket must be in 1.., got 0.*such as bucket=512"),
        (lambda: QSGD(4, norm="l1"), "QSGD: norm must be 'max'.*or 'l2', got 'l1'"),  # type: ignore[arg-type]
        (lambda: OneBit(0), "OneBit: bucket must be in 1.., got 0.*'column', or 'tensor'"),
        (lambda: formats.parse("qsgd1"), "no format is called 'qsgd1'"),
        (lambda: QSGD(4).decode([16], np.ones(1, np.float32)), "codes must be in 0..15"),
        (lambda: QSGD(4).decode([1], np.ones(2, np.float32)), "scales must be float32 of shape \\(1,\\) for 1 codes"),
        (lambda: OneBit(64).unpack(b"123", 1), "at least 9 bytes for n=1, got 3"),
    ],
)
def test_bad_arguments_say_what_to_do(make, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("..,", r"\.\.\d+,")):
        make()


def test_wrong_types_are_refused() -> None:
    for make in (lambda: QSGD(4.0), lambda: OneBit("row"), lambda: OneBit().encode([1, 2]), lambda: QSGD(True)):
        with pytest.raises(TypeError, match="must be"):
            make()
