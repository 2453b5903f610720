"""The seam for formats: a toy format, blocks of int8 with a scale each, made here and used by everything unchanged.

Oracle: the same blocks rounded by NumPy, rank by rank, straight from the definition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import cuda_standin
import numpy as np
import pytest
from exchange_oracle import CODES, assert_same_bits

from horovod_aps import formats
from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.formats import FloatFormat, HostFormat
from horovod_aps.kernels import EXP_NONFINITE, EXP_ZERO, SEGMENT, CpuKernels
from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.options import Options


# ---- the toy format: all of it ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Int8Blocks(HostFormat):
    """Blocks of `block` values, rounded to multiples of a 127th of the largest; one float32 scale per block."""

    block: int = 32
    bits = 8

    @property
    def unit(self) -> int:
        return self.block

    def side_bytes(self, n_elements: int) -> int:
        return 4 * -(-n_elements // self.block)

    def __str__(self) -> str:
        return f"int8x{self.block}"

    @classmethod
    def parse(cls, text: str) -> Int8Blocks:
        match = re.fullmatch(r"int8x(\d+)", text)
        if match is None:
            raise ValueError(f"Int8Blocks: text must look like 'int8x32', got {text!r}")
        return cls(int(match[1]))

    def encode_segment(self, values, exponent, random):
        scales, codes = quantized(values, self.block, random)
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])

    def decode_segment(self, data, n_elements, exponent):
        scales = data[: self.side_bytes(n_elements)].view(np.float32)
        codes = data[self.side_bytes(n_elements) :].view(np.int8)
        return np.repeat(scales.astype(np.float64), self.block)[:n_elements] * codes


def quantized(values, block, random=None):
    """Scales of the blocks, and codes."""
    padded = np.pad(values, (0, -len(values) % block)).reshape(-1, block)
    scales = (np.abs(padded).max(axis=1) / 127).astype(np.float32)
    ratio = values / np.repeat(np.where(scales, scales, 1).astype(np.float64), block)[: len(values)]
    steps = np.rint(ratio) if random is None else np.floor(ratio + random / 2.0**31)
    return scales, np.clip(steps, -127, 127).astype(np.int8)


# ---- what it gets for nothing -----------------------------------------------------------------------------


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """What a rank's blocks stand for."""
    scales, codes = quantized(x.astype(np.float64).ravel(), block)
    return (np.repeat(scales.astype(np.float64), block)[: x.size] * codes).reshape(x.shape)


def run(grads: list[list[np.ndarray]], options: Options, exchanges: list[Exchange] | None = None):
    """Results of every rank, and the exchanges."""
    size = len(grads)
    outs = [[np.empty_like(x) for x in rank] for rank in grads]
    layers = [
        [
            Layer(f"l{i}", x.shape, CODES[x.dtype], x.ctypes.data, out.ctypes.data, 1 / size, (x, out))
            for i, (x, out) in enumerate(zip(*pair, strict=True))
        ]
        for pair in zip(grads, outs, strict=True)
    ]
    return outs, local_allreduce(layers, options, CpuKernels(), exchanges)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [1, 31, 33, 1025])
def test_toy_format_is_exchanged_by_two_ranks_in_every_dtype(n: int, dtype: str) -> None:
    rng = np.random.default_rng([n])
    kind = np.dtype(dtype)
    grads = [[rng.standard_normal(n).astype(kind), rng.standard_normal(9).astype(kind)] for _ in range(2)]
    outs, exchanges = run(grads, Options(4, 3, overrides={"l0": Int8Blocks(32)}, stats=True))
    wanted = (rounded(grads[0][0], 32) + rounded(grads[1][0], 32)) * 0.5
    assert_same_bits(outs[0][0], wanted.astype(np.float32).astype(kind) if dtype == "bfloat16" else wanted.astype(kind))
    for ours, theirs in zip(*outs, strict=True):
        assert_same_bits(ours, theirs)
    figures = exchanges[0].statistics.as_dict()["layers"]
    assert [figures[name]["format"] for name in ("l0", "l1")] == ["int8x32", "e4m3"]
    assert 0 < figures["l0"]["relative_error"] < 0.01 or n == 1


@dataclass(frozen=True)
class SlowFloat(HostFormat):
    """`FloatFormat(e, m)` by its own array functions, with the exponent of the layer."""

    e: int
    m: int
    scale = "layer"

    @property
    def fmt(self) -> FloatFormat:
        return FloatFormat(self.e, self.m)

    @property
    def bits(self) -> int:
        return self.fmt.bits

    def __str__(self) -> str:
        return f"slow-{self.fmt}"

    @classmethod
    def parse(cls, text: str) -> SlowFloat:
        if not text.startswith("slow-"):
            raise ValueError(text)
        fmt = FloatFormat.parse(text[5:])
        return cls(fmt.exp_bits, fmt.man_bits)

    def exponent_of(self, values, stochastic):
        top, exponent = np.abs(values).max(), int(np.frexp(np.abs(values).max())[1]) - 1
        while not np.isfinite(self.fmt.quantize(np.ldexp(top, self.fmt.top_exponent - exponent))):
            exponent += 1
        return exponent

    def encode_segment(self, values, exponent, random):
        return self.fmt.pack(self.fmt.encode(np.ldexp(values, self.fmt.top_exponent - exponent)))

    def decode_segment(self, data, n_elements, exponent):
        values = self.fmt.decode(self.fmt.unpack(data, n_elements)).astype(np.float64)
        return np.ldexp(values, exponent - self.fmt.top_exponent)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("fmt", [(4, 3), (3, 0), (5, 2)], ids=str)
def test_floats_in_python_give_the_bits_of_the_native_family(fmt: tuple[int, int], n_ranks: int) -> None:
    """Oracle: the native family, over steps with error feedback; both sum exactly here, so no rounding hides."""
    rng = np.random.default_rng([*fmt, n_ranks])
    grads = [
        [(rng.standard_normal(n) * 10.0**i).astype(np.float32) for i, n in enumerate((1, 9, 1025))]
        for _ in range(n_ranks)
    ]
    results = []
    for value in (fmt, SlowFloat(*fmt)):
        exchanges = None
        for _ in range(3):
            outs, exchanges = run(
                grads, Options(4, 3, overrides={"*": value}, error_feedback=True, stats=True), exchanges
            )
        results.append((outs, exchanges))
    (native, one), (python, other) = results
    for ours, theirs in zip(sum(native, []), sum(python, []), strict=True):
        assert_same_bits(theirs, ours)
    for ours, theirs in zip(one, other, strict=True):
        assert all(np.array_equal(theirs.residuals[name], kept) for name, kept in ours.residuals.items())
        for name, figures in ours.statistics.as_dict()["layers"].items():
            mine = theirs.statistics.as_dict()["layers"][name]
            assert [mine[key] for key in ("exponent", "underflow")] == [
                figures[key] for key in ("exponent", "underflow")
            ]
            assert mine["relative_error"] == pytest.approx(figures["relative_error"], rel=1e-12)


def test_formats_in_python_are_refused_by_cuda_kernels() -> None:
    segs = np.zeros(1, SEGMENT)
    Int8Blocks().describe(segs)
    with pytest.raises(ValueError, match="scan: the family of the segment's format has no kernels here"):
        CudaKernels(cuda_standin).scan(segs)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_toy_format_on_three_ranks_beside_native_formats(rounding: str, error_feedback: bool) -> None:
    """The mean over steps comes close to the true one with feedback; replicas agree; the others are untouched."""
    rng = np.random.default_rng(3)
    grads = [[rng.standard_normal(n).astype(np.float32) for n in (1000, 64, 5)] for _ in range(3)]
    common = {"rounding": rounding, "error_feedback": error_feedback}
    with_toy = Options(4, 3, overrides={"l1": Int8Blocks(16), "l2": "float32"}, **common)
    without = Options(4, 3, overrides={"l1": (5, 10), "l2": "float32"}, **common)
    exact = np.mean([rank[1] for rank in grads], axis=0)
    exchanges, total = None, np.zeros(64)
    for _ in range(8):
        outs, exchanges = run(grads, with_toy, exchanges)
        total += outs[0][1]
        for other in outs[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(outs[0], other, strict=True))
    assert np.abs(outs[0][1] - exact).max() < 0.1
    assert np.abs(total / 8 - exact).max() < (0.005 if error_feedback else 0.05)
    if not error_feedback:  # l0's shards are cut elsewhere beside a layer of another size
        assert np.array_equal(outs[0][2], run(grads, without)[0][0][2])


def test_toy_format_keeps_zeros_nan_and_its_neighbours() -> None:
    grads = [[np.zeros(40, np.float32), np.ones(40, np.float32), np.ones(40, np.float32)] for _ in range(2)]
    grads[1][1][7] = np.inf
    outs, _ = run(grads, Options(4, 3, overrides={"*": Int8Blocks()}))
    assert not outs[0][0].any() and np.isnan(outs[0][1]).all() and np.all(outs[0][2] == 1)


@pytest.mark.parametrize("value, wanted", [(0.0, EXP_ZERO), (np.nan, EXP_NONFINITE), (2.0, 0)])
def test_toy_format_marks_zeros_and_nan_for_all_ranks(value: float, wanted: int) -> None:
    x, segs = np.full(9, value, np.float32), np.zeros(1, SEGMENT)
    Int8Blocks().describe(segs)
    segs["data"], segs["n"], segs["exponent"] = x.ctypes.data, 9, 77
    CpuKernels().scan(segs)
    assert segs["exponent"][0] == wanted


def test_toy_format_is_read_from_text_and_chosen_by_auto() -> None:
    assert formats.parse("int8x8") == Int8Blocks(8)
    assert Options(4, 3, overrides={"w": "int8x8"}).format_for("w", 1) == Int8Blocks(8)
    rng = np.random.default_rng(1)
    grads = [[rng.standard_normal(999).astype(np.float32)] for _ in range(2)]
    options = Options(4, 3, overrides="auto", auto_steps=1, auto_error=0.02, auto_candidates=((3, 0), Int8Blocks()))
    _, exchanges = run(grads, options)
    assert exchanges[0].chosen == {"l0": "int8x32"}
    outs, _ = run(grads, options, exchanges)
    assert_same_bits(outs[0][0], ((rounded(grads[0][0], 32) + rounded(grads[1][0], 32)) / 2).astype(np.float32))


def test_formats_without_an_arithmetic_refuse_sums_in_it() -> None:
    with pytest.raises(ValueError, match="overrides\\['w'\\].*int8x32.*accumulate must be 'float32'"):
        Options(4, 3, accumulate="kahan", overrides={"w": Int8Blocks()})


@pytest.mark.parametrize(
    "field, value, words",
    [("n", 41, "inside its message"), ("offset", -1, "inside"), ("codec", 9999, "no kernels"), ("dtype", 4, "dtype")],
)
def test_malformed_segments_of_python_codecs_are_refused_before_anything_is_written(field, value, words) -> None:
    x, fmt = np.ones(40, np.float32), Int8Blocks()
    segs = np.zeros(2, SEGMENT)
    FloatFormat(4, 3).describe(segs[:1])
    fmt.describe(segs[1:])
    segs["data"], segs["n"], segs["offset"] = x.ctypes.data, 40, [0, 40]
    message = np.full(40 + fmt.bytes_for(40), 0xA5, np.uint8)
    segs[1][field] = value
    with pytest.raises(ValueError, match=words):
        CpuKernels().encode(segs, message)
    assert np.all(message == 0xA5)
