"""The CPU kernels against a NumPy oracle in float64 that rounds by dividing by the spacing.

The oracle shares nothing with the library: np.frexp, np.ldexp and np.rint in double, which holds every format
value, and sums in float32 where the contract says float32.
"""

import subprocess
import sys

import numpy as np
import pytest
import reference

from horovod_aps import config
from horovod_aps import kernels as K
from horovod_aps.formats import FloatFormat
from horovod_aps.kernels import native

FORMATS = [
    (4, 3, 1), (5, 2, 1), (5, 2, 0), (3, 0, 1), (3, 0, 0), (3, 2, 0), (2, 1, 0), (1, 2, 1), (1, 6, 0),
    (6, 1, 1), (4, 2, 1), (5, 1, 1), (5, 10, 1), (8, 7, 1), (2, 12, 0), (7, 16, 1), (8, 23, 1),
]  # fmt: skip
SIZES = [0, 1, 7, 8, 9, 1023, 1025]
CPU = K.CpuKernels()


# ---------------------------------------------------------------------------------------------------- oracle


def limits(exp_bits: int, man_bits: int, specials: int) -> tuple[int, int, float]:
    """(emin, emax, largest finite value)."""
    bias = 2 ** (exp_bits - 1) - 1
    top = 2**exp_bits - 1 - specials
    largest = (2 - 2.0**-man_bits) * 2.0 ** (top - bias) if top else (1 - 2.0**-man_bits) * 2.0 ** (1 - bias)
    return 1 - bias, max(top, 1) - bias, largest


def oracle_round(x: np.ndarray, fmt: tuple[int, int, int]) -> np.ndarray:
    """Nearest even, saturating; x in the format's own domain, float64."""
    emin, _, largest = limits(*fmt)
    exponent = np.maximum(np.frexp(x)[1] - 1, emin)
    spacing = np.ldexp(1.0, exponent - fmt[1])
    return np.clip(np.rint(x / spacing) * spacing, -largest, largest)


def oracle_exponent(x: np.ndarray, fmt: tuple[int, int, int], stochastic: bool = False) -> int:
    """Least E at which max |x| * 2^(emax - E), rounded unless stochastic, is within the format."""
    emin, emax, largest = limits(*fmt)
    if not np.isfinite(x).all():
        return K.EXP_NONFINITE
    top = np.abs(x).max(initial=0.0)
    if top == 0:
        return K.EXP_ZERO
    exponent = int(np.frexp(top)[1]) - 1
    while True:
        scaled = np.ldexp(top, emax - exponent)
        spacing = np.ldexp(1.0, max(int(np.frexp(scaled)[1]) - 1, emin) - fmt[1])
        if (scaled if stochastic else np.rint(scaled / spacing) * spacing) <= largest:
            return exponent
        exponent += 1


def oracle_value(codes: np.ndarray, fmt: tuple[int, int, int]) -> np.ndarray:
    """Values of finite codes."""
    exp_bits, man_bits, _ = fmt
    emin = limits(*fmt)[0]
    codes = codes.astype(np.int64)
    field, man = (codes >> man_bits) & (2**exp_bits - 1), codes & (2**man_bits - 1)
    value = np.where(field, np.ldexp(1 + man / 2.0**man_bits, field - 1 + emin), np.ldexp(man / 2.0**man_bits, emin))
    return np.where((codes >> (exp_bits + man_bits)) & 1, -value, value)


def oracle_codes(message: np.ndarray, offset: int, n: int, width: int) -> np.ndarray:
    """Codes of a packed segment, bit by bit."""
    n_bytes = (n * width + 7) // 8
    bits = np.unpackbits(message[offset : offset + n_bytes], bitorder="little")
    assert not bits[n * width :].any(), "the last byte must be zero padded"
    return (bits[: n * width].reshape(n, width).astype(np.int64) << np.arange(width)).sum(axis=1)


# ---------------------------------------------------------------------------------------------------- helpers


def table_of(arrays: list[np.ndarray], fmt: tuple[int, int, int], factor: float = 1.0, dtype: int = 0) -> np.ndarray:
    """Segments over arrays, each a byte apart from the next in the message."""
    segs = np.zeros(len(arrays), dtype=K.SEGMENT)
    segs["data"], segs["n"] = [a.ctypes.data for a in arrays], [a.size for a in arrays]
    sizes = (segs["n"] * (1 + fmt[0] + fmt[1]) + 7) // 8 + 1
    segs["offset"] = np.cumsum(sizes) - sizes
    segs["exp_bits"], segs["man_bits"], segs["flags"] = fmt
    segs["factor"], segs["dtype"], segs["uid"] = factor, dtype, np.arange(len(arrays))
    return segs


def message_of(segs: np.ndarray) -> np.ndarray:
    message = CPU.alloc(int((segs["n"] * 32).sum()) // 8 + 2 * len(segs) + 8)
    message.fill(0xA5)
    return message


def gradients(rng: np.random.Generator, scale: float) -> list[np.ndarray]:
    """float32 layers of every size with many binades; halfway cases and zeros among them."""
    layers = []
    for n in SIZES:
        x = rng.standard_normal(n) * np.exp2(rng.integers(-18, 1, n))
        x[rng.random(n) < 0.3] *= 0
        coarse = rng.random(n) < 0.3  # few significant bits: ties
        x[coarse] = np.rint(x[coarse] * 64) / 64
        layers.append((x * scale).astype(np.float32))
    return layers


@pytest.fixture(params=["avx2", "baseline"])
def instruction_set(request: pytest.FixtureRequest):
    """Both builds of the loops of packed floats; on a machine without AVX2 both are the baseline."""
    K.library().aps_use_vectors(int(request.param == "avx2"))
    yield request.param
    K.library().aps_use_vectors(config.vectors())


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    K.set_num_threads(request.param)
    yield request.param
    K.set_num_threads(1)


# ---------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 1e-30, 1e-38, 2.0**-149])
def test_kernels_scan_encode_decode_match_the_oracle(
    fmt: tuple[int, int, int], scale: float, instruction_set: str
) -> None:
    rng = np.random.default_rng(1)
    arrays = gradients(rng, scale)
    segs = table_of(arrays, fmt)
    CPU.scan(segs)
    message = message_of(segs)
    CPU.encode(segs, message)
    outs = [np.full_like(a, 7) for a in arrays]
    target = segs.copy()
    target["data"] = [a.ctypes.data for a in outs]
    CPU.decode(target, [message])
    emax = limits(*fmt)[1]
    width = 1 + fmt[0] + fmt[1]
    for x, out, seg in zip(arrays, outs, segs, strict=True):
        exponent = oracle_exponent(x.astype(np.float64), fmt)
        assert seg["exponent"] == exponent
        codes = oracle_codes(message, int(seg["offset"]), x.size, width)
        assert message[int(seg["offset"]) + (x.size * width + 7) // 8] == 0xA5, "wrote past its segment"
        if exponent == K.EXP_ZERO:
            assert not codes.any() and not out.any()
            continue
        expected = oracle_round(np.ldexp(x.astype(np.float64), emax - exponent), fmt)
        value = oracle_value(codes, fmt)
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(np.signbit(value), np.signbit(x))
        np.testing.assert_array_equal(out, np.ldexp(expected, exponent - emax).astype(np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n_in", [1, 2, 3, 5])
def test_kernels_reduce_sums_in_float32_in_input_order(
    fmt: tuple[int, int, int], n_in: int, instruction_set: str
) -> None:
    rng = np.random.default_rng(2)
    per_rank = [gradients(rng, 0.01) for _ in range(n_in)]
    tables = [table_of(arrays, fmt) for arrays in per_rank]
    for table in tables:
        CPU.scan(table)
    shared = np.max([table["exponent"] for table in tables], axis=0)
    messages = []
    for table in tables:
        table["exponent"] = shared
        messages.append(message_of(table))
        CPU.encode(table, messages[-1])
    out, segs = message_of(tables[0]), tables[0].copy()
    CPU.reduce(segs, messages, K.SUM_FLOAT, out)
    width, emax = 1 + fmt[0] + fmt[1], limits(*fmt)[1]
    kind = np.float64 if fmt[0] == 8 else np.float32
    for seg, old in zip(segs, shared, strict=True):
        if old == K.EXP_ZERO:
            assert seg["exponent"] == K.EXP_ZERO
            continue
        offset, n = int(seg["offset"]), int(seg["n"])
        total = None
        for message in messages:
            value = oracle_value(oracle_codes(message, offset, n, width), fmt).astype(kind)
            total = value if total is None else total + value
        assert total is not None
        exponent = oracle_exponent(total.astype(np.float64), fmt)
        if exponent == K.EXP_ZERO:
            assert seg["exponent"] == K.EXP_ZERO
            continue
        assert seg["exponent"] == exponent + old - emax
        expected = oracle_round(np.ldexp(total.astype(np.float64), emax - exponent), fmt)
        np.testing.assert_array_equal(oracle_value(oracle_codes(out, offset, n, width), fmt), expected)


@pytest.mark.parametrize("fmt", [(4, 3, 1), (5, 2, 0), (3, 2, 0), (5, 10, 1), (8, 7, 1), (2, 12, 0)])
@pytest.mark.parametrize("accumulate", [K.SUM_FORMAT, K.SUM_KAHAN])
def test_kernels_paper_sums_round_after_every_addition(fmt: tuple[int, int, int], accumulate: int) -> None:
    rng = np.random.default_rng(3)
    x = [rng.standard_normal(1025).astype(np.float32) for _ in range(4)]
    messages, codes = [], []
    for array in x:
        segs = table_of([array], fmt)
        segs["exponent"] = 4
        messages.append(message_of(segs))
        CPU.encode(segs, messages[-1])
        codes.append(oracle_value(oracle_codes(messages[-1], 0, 1025, 1 + fmt[0] + fmt[1]), fmt))
    acc, lost = codes[0], np.zeros(1025)
    for value in codes[1:]:
        if accumulate == K.SUM_FORMAT:
            acc = oracle_round(acc + value, fmt)
        else:
            y = oracle_round(value - lost, fmt)
            t = oracle_round(acc + y, fmt)
            lost = oracle_round(oracle_round(t - acc, fmt) - y, fmt)
            acc = t
    out = message_of(segs)
    CPU.reduce(segs, messages, accumulate, out)
    assert segs["exponent"][0] == 4
    np.testing.assert_array_equal(oracle_value(oracle_codes(out, 0, 1025, 1 + fmt[0] + fmt[1]), fmt), acc)
    result = np.empty(1025, dtype=np.float32)
    segs["data"] = result.ctypes.data
    CPU.decode(segs, messages, accumulate)
    np.testing.assert_array_equal(result, np.ldexp(acc, 4 - limits(*fmt)[1]).astype(np.float32))


@pytest.mark.parametrize("fmt", [(4, 3, 1), (5, 2, 1), (3, 0, 1), (5, 10, 1)])
@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, -0.25, 3e38])
@pytest.mark.parametrize("exponent", [-140, -120, -20, 0, 60, 127])
def test_kernels_decode_scales_with_one_rounding(
    fmt: tuple[int, int, int], dtype: int, factor: float, exponent: int, instruction_set: str
) -> None:
    """Oracle: exact product in float64, rounded to 24 bits by ldexp around float32, then cast by NumPy."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal(1025).astype(np.float32)
    segs = table_of([x], fmt, factor)
    CPU.scan(segs)
    message = message_of(segs)
    CPU.encode(segs, message)
    value = oracle_value(oracle_codes(message, 0, 1025, 1 + fmt[0] + fmt[1]), fmt)
    kind = [np.float32, np.float64, np.float16][dtype]
    out = np.empty(1025, dtype=kind)
    segs["data"], segs["dtype"], segs["exponent"] = out.ctypes.data, dtype, exponent
    CPU.decode(segs, [message])
    product = value * np.float64(np.float32(factor))
    if dtype != K.FLOAT64:
        fraction, power = np.frexp(product)
        product = np.ldexp(fraction.astype(np.float32).astype(np.float64), power)
    with np.errstate(over="ignore"):
        expected = np.ldexp(product, exponent - limits(*fmt)[1]).astype(kind)
    assert expected.tobytes() == out.tobytes()


@pytest.mark.parametrize("fmt", [(4, 3, 1), (3, 2, 0), (5, 10, 1)])
def test_kernels_threads_give_the_bits_of_one_thread(fmt: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (50_001, 7, 0, 33_333, 100_003)]
    arrays[4][99_990] = 1000  # the exponent rises late, so most blocks are encoded twice
    results = []
    for n_threads in (1, 2, 3):
        K.set_num_threads(n_threads)
        segs = table_of(arrays, fmt)
        CPU.scan(segs)
        message, out = message_of(segs), message_of(segs)
        CPU.encode(segs, message, 9)
        reduced = segs.copy()
        CPU.reduce(reduced, [message, message, message], K.SUM_FLOAT, out, 9)
        outs = [np.zeros_like(a) for a in arrays]
        target = reduced.copy()
        target["data"] = [a.ctypes.data for a in outs]
        CPU.decode(target, [out, out])
        results.append(b"".join(a.tobytes() for a in [segs["exponent"], reduced["exponent"], message, out, *outs]))
    K.set_num_threads(1)
    assert results[0] == results[1] == results[2]


FORK = """
import os, signal, sys
import numpy as np, torch
from horovod_aps import FloatFormat, kernels
from horovod_aps.simulate import quant_gemm

kernels.set_num_threads(2)
torch.set_num_threads(2)
x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
matrix = torch.from_numpy(x[:10_000].reshape(100, 100))
run = lambda: FloatFormat(4, 3).quantize(x).tobytes() + quant_gemm(matrix, matrix, 4, 3).numpy().tobytes()
before = run()
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that hangs
    os._exit(run() != before)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_kernels_with_threads_work_in_a_forked_child() -> None:
    """As in a DataLoader's worker, where OpenMP's threads are missing."""
    assert subprocess.run([sys.executable, "-c", FORK]).returncode == 0


@pytest.mark.parametrize("flush", [0, 1])
@pytest.mark.parametrize("fmt", [(4, 3, 1), (8, 7, 1)])
def test_kernels_do_not_depend_on_flush_to_zero(fmt: tuple[int, int, int], flush: int, threads: int) -> None:
    x = (np.arange(1, 70_001, dtype=np.uint32)).view(np.float32)  # subnormal, every one
    segs = table_of([x], fmt)
    before = K.library().aps_set_flush_to_zero(flush)
    try:
        CPU.scan(segs)
        message = message_of(segs)
        CPU.encode(segs, message)
        out = np.zeros_like(x)
        target = segs.copy()
        target["data"] = out.ctypes.data
        CPU.decode(target, [message])
        still = K.library().aps_set_flush_to_zero(before)
    finally:
        K.library().aps_set_flush_to_zero(before)
    assert still == flush, "the caller's setting must come back"
    steps = x.view(np.uint32).astype(np.float64)  # in units of the least subnormal
    exponent = oracle_exponent(steps, fmt)
    assert segs["exponent"][0] == exponent - 149
    emax = limits(*fmt)[1]
    expected = np.ldexp(oracle_round(np.ldexp(steps, emax - exponent), fmt), exponent - emax)
    np.testing.assert_array_equal(out.view(np.uint32), np.rint(expected).astype(np.uint32))


@pytest.mark.parametrize("scale", [1.0, 1e-36])
@pytest.mark.parametrize("fmt", [(4, 3, 1), (3, 0, 1), (5, 2, 0)])
def test_kernels_stochastic_rounding_is_unbiased_and_repeatable(fmt: tuple[int, int, int], scale: float) -> None:
    """Oracle: the mean over elements is x within 5 standard errors, the values are its two neighbours."""
    n = 200_000
    for fraction in (0.1, 0.37, 0.9):
        x = np.full(n, np.float32((1 + fraction * 2.0 ** -fmt[1]) * scale))
        x[0] = np.float32(1.9 * scale)
        segs = table_of([x], fmt)
        CPU.scan(segs, stochastic=True)
        assert segs["exponent"][0] == oracle_exponent(x.astype(np.float64), fmt, stochastic=True)
        one, two, other = message_of(segs), message_of(segs), message_of(segs)
        CPU.encode(segs, one, 1)
        CPU.encode(segs, two, 1)
        CPU.encode(segs, other, 2)
        assert one.tobytes() == two.tobytes() != other.tobytes()
        scaled = np.ldexp(x[1:].astype(np.float64), limits(*fmt)[1] - int(segs["exponent"][0]))
        value = oracle_value(oracle_codes(one, 0, n, 1 + fmt[0] + fmt[1])[1:], fmt)
        spacing = np.diff(np.unique(value))
        assert len(spacing) == 1
        assert np.unique(value)[0] <= scaled[0] <= np.unique(value)[1]
        assert abs(value.mean() - scaled[0]) < 5 * spacing[0] * 0.5 / np.sqrt(n)


def test_kernels_stochastic_stream_depends_on_the_index_in_the_layer_alone() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal(4096).astype(np.float32)
    whole = table_of([x], (4, 3, 1))
    CPU.scan(whole)
    message = message_of(whole)
    CPU.encode(whole, message, 5)
    parts = table_of([x[:1024], x[1024:]], (4, 3, 1))
    parts["exponent"], parts["uid"], parts["first"] = whole["exponent"][0], 0, [0, 1024]
    split = message_of(parts)
    CPU.encode(parts, split, 5)
    start = int(parts["offset"][1])
    np.testing.assert_array_equal(np.concatenate([split[:1024], split[start : start + 3072]]), message[:4096])


def test_kernels_nonfinite_layers_send_zeros_and_come_back_as_nan() -> None:
    x = [np.array([1, np.nan, 3], np.float32), np.array([np.inf, 1], np.float32), np.ones(5, np.float32)]
    segs = table_of(x, (4, 3, 1))
    CPU.scan(segs)
    assert list(segs["exponent"]) == [K.EXP_NONFINITE, K.EXP_NONFINITE, 0]
    message, out = message_of(segs), message_of(segs)
    CPU.encode(segs, message)
    assert not message[:3].any()
    CPU.reduce(segs, [message, message], K.SUM_FLOAT, out)
    assert list(segs["exponent"]) == [K.EXP_NONFINITE, K.EXP_NONFINITE, 1]
    CPU.decode(segs, [out])
    assert np.isnan(x[0]).all() and np.isnan(x[1]).all() and (x[2] == 2).all()


def test_kernels_reduce_can_keep_the_exponent_and_saturate(instruction_set: str) -> None:
    x = np.linspace(-15, 15, 1025).astype(np.float32)
    segs = table_of([x], (4, 3, 1))
    segs["exponent"] = 7  # the format's own scale: sums up to 45 are within 240, at exponent 4 they are not
    for exponent, largest in [(7, 240.0), (4, 30.0)]:
        segs["exponent"] = exponent
        message, out = message_of(segs), message_of(segs)
        CPU.encode(segs, message)
        CPU.reduce(segs, [message] * 3, K.SUM_FLOAT, out, keep_exponent=True)
        assert segs["exponent"][0] == exponent
        scale = 2.0 ** (7 - exponent)
        one = oracle_round(x.astype(np.float64) * scale, (4, 3, 1))
        expected = oracle_round(3 * one, (4, 3, 1))
        assert np.abs(expected).max() <= largest * scale
        np.testing.assert_array_equal(oracle_value(oracle_codes(out, 0, 1025, 8), (4, 3, 1)), expected)


def test_kernels_raw_segments_carry_float32_bits() -> None:
    x = np.array([1.5, -0.0, np.nan, np.inf, 1e-42, 3.0], np.float32)
    segs = table_of([x], (8, 23, 0))
    segs["family"] = K.FAMILY_RAW
    CPU.scan(segs)
    assert segs["exponent"][0] == 0
    message, out = message_of(segs), message_of(segs)
    CPU.encode(segs, message)
    assert message[:24].tobytes() == x.tobytes()
    CPU.reduce(segs, [message, message], K.SUM_FLOAT, out)
    assert out[:24].tobytes() == (x + x).tobytes()
    result = np.empty_like(x)
    segs["data"], segs["factor"] = result.ctypes.data, 0.5
    CPU.decode(segs, [out])
    np.testing.assert_array_equal(result, x)


def test_kernels_residual_add_and_measure_close_the_loop() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal(1025).astype(np.float32) * np.exp2(rng.integers(-30, 1, 1025)).astype(np.float32)
    segs = table_of([x], (4, 3, 1))
    CPU.scan(segs)
    message = message_of(segs)
    CPU.encode(segs, message)
    decoded = np.empty_like(x)
    target = segs.copy()
    target["data"] = decoded.ctypes.data
    CPU.decode(target, [message])
    exact, d = x.astype(np.float64), decoded.astype(np.float64)
    lost, error, square, top = CPU.measure(segs, message)[0]
    assert lost == np.count_nonzero((exact != 0) & (d == 0)) > 0
    np.testing.assert_allclose([error, square], [((exact - d) ** 2).sum(), (exact**2).sum()], rtol=1e-12)
    assert top == np.abs(exact).max()
    before = x.copy()
    CPU.residual(segs, message)
    np.testing.assert_array_equal(x, before - decoded)
    kept = CPU.zeros(1025)
    kept += 1
    CPU.add(segs, np.array([CPU.address(kept)], dtype=np.uint64))
    np.testing.assert_array_equal(kept, 1 + x)


@pytest.mark.parametrize("fmt", [(4, 3, 1), (3, 0, 1), (5, 10, 0), (2, 2, 0), (1, 0, 0), (8, 7, 1)], ids=str)
def test_kernels_residual_and_add_round_once_at_any_scale(fmt: tuple[int, int, int]) -> None:
    """From subnormal to the largest floats, also where float32 does not hold what was sent. Oracle: float64."""
    rng = np.random.default_rng(8)
    wanted_format = FloatFormat(fmt[0], fmt[1], specials=bool(fmt[2]))
    for power in (-149, -140, -127, -126, -100, -20, 0, 60, 100, 126, 127):
        with np.errstate(over="ignore", under="ignore"):
            x = np.ldexp(rng.uniform(-1.99, 1.99, 3001), power + rng.integers(-12, 1, 3001)).astype(np.float32)
        x[:4] = (0.0, -0.0, np.float32(2.0) ** max(power, -149), -np.finfo(np.float32).smallest_subnormal)
        segs, before = table_of([x], fmt), x.copy()
        CPU.scan(segs)
        exponent = int(segs["exponent"][0])
        message = message_of(segs)
        CPU.encode(segs, message)
        sent = reference.true_value(reference.quantize_scaled(x, exponent, wanted_format), exponent, wanted_format)
        CPU.residual(segs, message)
        with np.errstate(over="ignore", under="ignore"):
            wanted = (before.astype(np.float64) - sent + 0.0).astype(np.float32)
        np.testing.assert_array_equal(x.view(np.uint32), wanted.view(np.uint32), f"2^{power}")
        kept = CPU.zeros(x.size)
        kept[:] = before
        CPU.add(segs, np.array([CPU.address(kept)], dtype=np.uint64))
        with np.errstate(over="ignore", under="ignore"):
            wanted = (before.astype(np.float64) + x).astype(np.float32)
        np.testing.assert_array_equal(kept.view(np.uint32), wanted.view(np.uint32), f"2^{power}")


def test_kernels_alloc_is_aligned_and_zero() -> None:
    for n in SIZES:
        memory = CPU.alloc(n)
        assert memory.size == n and not memory.any()
        assert n == 0 or memory.ctypes.data % 64 == 0
    with pytest.raises(ValueError, match="n_bytes must not be negative, got -1"):
        CPU.alloc(-1)


def test_kernels_num_threads_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_aps import config

    with pytest.raises(ValueError, match="n must be in 1..1024, got 0"):
        K.set_num_threads(0)
    monkeypatch.setenv("HOROVOD_APS_NUM_THREADS", "many")
    with pytest.raises(ValueError, match="HOROVOD_APS_NUM_THREADS must be an integer in 1..1024, got 'many'"):
        config.num_threads()
    monkeypatch.setenv("HOROVOD_APS_NUM_THREADS", "3")
    assert config.num_threads() == 3


@pytest.mark.parametrize("fmt", [(5, 0, 1), (5, 2, 1), (5, 10, 1), (4, 3, 1)])
@pytest.mark.parametrize("seed", [None, 7])
def test_kernels_take_any_bytes_for_the_same_numbers(fmt: tuple[int, int, int], seed: int | None) -> None:
    """Codes with the reserved exponent, which only malformed messages have; both instruction sets agree on them."""
    n = 5000
    rng = np.random.default_rng(3)
    inputs = [rng.integers(0, 256, n * sum(fmt[:2]) // 8 + n, np.uint8) for _ in range(3)]
    results = []
    for vectors in (0, 2):
        K.library().aps_use_vectors(vectors)
        out = np.zeros(n, np.float32)
        segs = table_of([out], fmt)
        segs["exponent"], segs["factor"] = 3, 0.5
        sums = message_of(segs)
        CPU.decode(segs, inputs)
        reduced = segs.copy()
        CPU.reduce(reduced, inputs, K.SUM_FLOAT, sums, seed)
        results.append((out, sums, reduced["exponent"]))
    assert np.isfinite(results[0][0]).all() and results[0][2][0] < 20
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("exponent", [-4097, 4097, 2**31 - 1, -(2**31)])
def test_kernels_refuse_exponents_that_no_layer_has(exponent: int) -> None:
    segs = table_of([np.ones(10, np.float32)], (4, 3, 1))
    message = message_of(segs)
    CPU.scan(segs)
    CPU.encode(segs, message)
    segs["exponent"] = exponent
    for call in (
        lambda: CPU.encode(segs, message),
        lambda: CPU.decode(segs, [message]),
        lambda: CPU.reduce(segs, [message], K.SUM_FLOAT, message.copy()),
        lambda: CPU.residual(segs, message),
    ):
        with pytest.raises(ValueError, match=r"the exponent must be in -4096\.\.4096.* \(segment 0\)"):
            call()


def test_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    """An old one could give other numbers, or read another record."""
    for path in native.source_folder().iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(native, "source_folder", lambda: tmp_path)
    native._check_age(native.library())
    with open(tmp_path / "aps_scalar.h", "a") as file:
        file.write("// changed\n")
    with pytest.raises(ImportError, match="built from other sources.*make setup"):
        native._check_age(native.library())
    for path in tmp_path.glob("*.cpp"):  # as installed without them
        path.unlink()
    native._check_age(native.library())
