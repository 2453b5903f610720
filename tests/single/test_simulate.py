"""horovod_aps.simulate against exact rational arithmetic, ml_dtypes, and a NumPy simulation of all ranks."""

import copy
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_aps import FloatFormat, simulate
from horovod_aps.kernels import CpuKernels
from horovod_aps.simulate import (
    EmulatedOptimizer,
    Quantizer,
    float_quantize,
    quant_gemm,
    quantizer,
    sum_gradients,
)

FORMATS = [(5, 2), (4, 3), (3, 4), (3, 2), (3, 0), (2, 1), (1, 3), (8, 7), (8, 0), (5, 10), (7, 21)]


def exact_cast(x: float, e: int, m: int) -> float:
    """Oracle: IEEE 754 rounding by rational arithmetic; the even neighbour, or the larger if there is
    none.
    """
    if math.isnan(x) or math.isinf(x) or x == 0:
        return x
    bias = 2 ** (e - 1) - 1
    magnitude = Fraction(abs(x))
    exponent = math.frexp(abs(x))[1] - 1
    quantum = Fraction(2) ** (max(exponent, 1 - bias) - m)
    lower = math.floor(magnitude / quantum)
    rest = magnitude / quantum - lower
    # lower counts quanta, so its parity is the significand's; with m = 0 a normal significand is 1, odd.
    count = lower + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and lower % 2 == 1))
    value = count * quantum
    limit = Fraction(2) ** (2**e - 1 - bias) if e > 1 else 2 * (1 - Fraction(1, 2**m)) + Fraction(2, 2**m)
    return math.copysign(math.inf if value >= limit else float(value), x)


def interesting_floats(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 3000, dtype=np.uint32)
    ties = rng.integers(0, 2**13, 3000, dtype=np.uint32) << 19
    special = np.array(
        [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            1e-45,
            -1e-45,
            2.0**-126,
            2.0**-127,
            3.4e38,
            1.5,
            3.0,
            6.0,
            240.0,
            247.9,
            248.0,
            57344.0,
            61440.0,
        ],
        np.float32,
    )
    normal = rng.standard_normal(2000).astype(np.float32)
    return np.concatenate([bits.view(np.float32), ties.view(np.float32), special, normal])


@pytest.mark.parametrize("e,m", FORMATS)
def test_float_quantize_equals_exact_rounding(e, m):
    x = interesting_floats()
    got = float_quantize(torch.from_numpy(x), e, m).numpy()
    expected = np.array([exact_cast(float(v), e, m) for v in x], np.float32)
    np.testing.assert_array_equal(got, expected)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize(
    "dtype,e,m",
    [
        (ml_dtypes.float8_e5m2, 5, 2),
        (ml_dtypes.float8_e4m3, 4, 3),
        (ml_dtypes.float8_e3m4, 3, 4),
        (ml_dtypes.bfloat16, 8, 7),
        (np.float16, 5, 10),
    ],
)
def test_float_quantize_equals_ml_dtypes(dtype, e, m):
    x = interesting_floats(1)
    with np.errstate(all="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(float_quantize(torch.from_numpy(x), e, m).numpy(), expected)


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32), st.integers(1, 8), st.integers(0, 23))
def test_float_quantize_any_float_any_format(x, e, m):
    got = float(float_quantize(torch.tensor([x], dtype=torch.float32), e, m)[0])
    np.testing.assert_array_equal(got, exact_cast(x, e, m))


def test_float_quantize_full_precision_is_identity():
    x = torch.from_numpy(interesting_floats())
    got = float_quantize(x, 8, 23)
    assert torch.equal(got.view(torch.int32), x.view(torch.int32)) and got.data_ptr() != x.data_ptr()


def test_float_quantize_leaves_input_and_shape_alone():
    x = torch.randn(4, 6).t()[::2]
    before = x.clone()
    out = float_quantize(x, 3, 2)
    assert out.shape == x.shape and torch.equal(x, before)
    np.testing.assert_array_equal(out.numpy(), np.vectorize(lambda v: exact_cast(float(v), 3, 2))(x.numpy()))
    half = torch.tensor([1.06, 300.0], dtype=torch.bfloat16)
    assert float_quantize(half, 4, 3).tolist() == [1.0, math.inf] and float_quantize(half, 4, 3).dtype == half.dtype
    assert float_quantize(torch.empty(0), 4, 3).shape == (0,)


def negative_view(*shape: int) -> torch.Tensor:
    """A contiguous tensor whose memory holds the opposite of what it says: torch's negative bit is set."""
    view = torch._neg_view(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    assert view.is_neg() and view.is_contiguous() and torch.equal(view, view.clone()) and not view.clone().is_neg()
    return view


def test_tensors_with_the_negative_bit():
    """Oracle: the same values without the bit. The imaginary part of a conjugate has it, contiguous if it is one."""
    one = torch.tensor([1 + 2.3j]).conj().imag
    assert one.is_neg() and float_quantize(one, 4, 3).tolist() == [-2.25]
    x, a, b = negative_view(9), negative_view(3, 4), negative_view(4, 70)
    assert torch.equal(float_quantize(x, 4, 3), float_quantize(x.clone(), 4, 3))
    assert torch.equal(quant_gemm(a, b, 4, 3), quant_gemm(a.clone(), b.clone(), 4, 3))
    assert torch.equal(quant_gemm(b.t(), a.t(), 4, 3), quant_gemm(a, b, 4, 3).t())
    assert torch.equal(sum_gradients([[x], [x]], 4, 3)[0], sum_gradients([[x.clone()]] * 2, 4, 3)[0])
    assert torch.equal(FloatFormat(4, 3).quantize(x), FloatFormat(4, 3).quantize(x.clone()))
    parameter = torch.nn.Parameter(torch.zeros(9))
    optimizer = EmulatedOptimizer(torch.optim.SGD([parameter], 1.0), 2, {"e": 4, "m": 3})
    for grad in (x, x.clone()):
        parameter.grad = grad
        optimizer.collect()
    optimizer.step()
    torch.testing.assert_close(parameter.grad, x.clone(), rtol=0.1, atol=0)


def cpd_cast(bits: int, e: int, m: int) -> tuple[float, bool]:
    """CPD's cast_precision restated on the float32's bits, defects included; whether it dropped bits unseen."""
    field, man, sign = bits >> 23 & 0xFF, bits & 0x7FFFFF, -1.0 if bits >> 31 else 1.0
    if field == 0xFF or (field == 0 and man == 0):
        return float(np.uint32(bits).view(np.float32)), False
    if field == 0:
        return 0.0, False
    man, bias, dropped = man | 1 << 23, 2 ** (e - 1) - 1, False
    exponent = field - 127
    if exponent + bias >= 2**e - 1:
        return sign * math.inf, False
    if exponent + bias <= 0:
        shift = 1 - exponent - bias
        man, dropped, exponent = man >> shift, man % 2**shift != 0, 1 - bias
    quantum = 1 << (23 - m)
    half, rest = quantum // 2, man % quantum
    man -= rest
    if rest > half or (rest == half and half and man & quantum):
        man += quantum
    return sign * math.ldexp(man, exponent - 23), dropped


@pytest.mark.parametrize("e,m", FORMATS)
def test_float_quantize_equals_cpd_where_cpd_is_right(e, m):
    """Bit for bit, and where it is not, for one of the reasons that the docstring names."""
    x = interesting_floats(3)[::3]
    got = float_quantize(torch.from_numpy(x), e, m).numpy()
    top = 2.0 ** (2 ** (e - 1) - 1)
    n_equal = 0
    for value, ours in zip(x, got, strict=True):
        theirs, dropped = cpd_cast(int(value.view(np.uint32)), e, m)
        with np.errstate(over="ignore"):
            same = np.float32(theirs).tobytes() == ours.tobytes() or (math.isnan(theirs) and np.isnan(ours))
        if same:
            n_equal += 1
        elif abs(value) < 2.0**-126:  # float32's own subnormals
            assert theirs == 0 and math.copysign(1, theirs) == 1
        elif np.isinf(ours):
            assert math.isfinite(theirs) and abs(theirs) == 2 * top
        else:
            assert dropped and abs(value) < 2.0 ** (2 - 2 ** (e - 1))
    assert n_equal > 0.95 * len(x)


def test_float_quantize_where_cpd_errs():
    """By hand, (4, 3): 248 rounds to 256; just above half a quantum of 2^-9; -1e-45."""
    x = np.float32([248, np.nextafter(np.float32(2**-10), np.float32(1)), -1e-45])
    theirs = [cpd_cast(int(value.view(np.uint32)), 4, 3)[0] for value in x]
    assert theirs == [256, 0, 0] and math.copysign(1, theirs[2]) == 1
    ours = float_quantize(torch.from_numpy(x), 4, 3).tolist()
    assert ours == [math.inf, 2**-9, 0] and math.copysign(1, ours[2]) == -1


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda: float_quantize(torch.ones(1), 0, 3), ValueError, "float_quantize: e must be in 1..8, got 0"),
        (
            lambda: float_quantize(torch.ones(1), 4, 24),
            ValueError,
            "float_quantize: m must be in 0..23, got 24",
        ),
        (lambda: float_quantize(torch.ones(1), 4.0, 3), TypeError, "e must be an int, got float"),
        (lambda: float_quantize([1.0], 4, 3), TypeError, "x must be a torch.Tensor, got list"),
        (lambda: float_quantize(torch.ones(1).double(), 4, 3), TypeError, "x must be float32"),
        (lambda: float_quantize(torch.ones(1), True, 3), TypeError, "e must be an int, got bool"),
        (
            lambda: float_quantize(torch.ones(1, device="meta"), 4, 3),
            TypeError,
            "float_quantize: x must be on a CPU or a CUDA device, got meta",
        ),
        (
            lambda: quant_gemm(torch.ones(1, 1, device="meta"), torch.ones(1, 1, device="meta"), 4, 3),
            TypeError,
            "quant_gemm: a must be on a CPU or a CUDA device, got meta",
        ),
        (lambda: quantizer(torch.ones(1), (9, 1)), ValueError, "e must be in 1..8, got 9"),
        (lambda: Quantizer(4), TypeError, r"Quantizer: forward must be an \(e, m\) pair, got 4"),
        (lambda: Quantizer((4, 3), (4,)), TypeError, r"Quantizer: backward must be an \(e, m\) pair, got \(4,\)"),
        (lambda: quantizer(torch.ones(1), "43"), TypeError, r"quantizer: forward must be an \(e, m\) pair"),
        (lambda: quant_gemm(torch.ones(2, 3), torch.ones(2, 3), 4, 3), ValueError, "inner sizes must agree"),
        (
            lambda: quant_gemm(torch.ones(2), torch.ones(2, 3), 4, 3),
            ValueError,
            "a must have 2 dimensions, got 1",
        ),
        (
            lambda: quant_gemm(torch.ones(2, 2), torch.ones(2, 2).int(), 4, 3),
            TypeError,
            "b must be a float32 tensor",
        ),
        (lambda: sum_gradients([], 4, 3), ValueError, "at least one rank"),
        (
            lambda: sum_gradients([[np.ones(1)]], 4, 3),
            TypeError,
            "sum_gradients: gradients must be floating-point torch tensors or None, got float64 ndarray",
        ),
        (lambda: sum_gradients([[torch.ones(1).int()]], 4, 3), TypeError, "got torch.int32 Tensor"),
        (lambda: sum_gradients([[torch.ones(1)]] * 2, 4, 3, groups=2.0), TypeError, "groups must be an int, got float"),
        (lambda: sum_gradients([[torch.ones(1)]], 4, 3, groups=True), TypeError, "groups must be an int, got bool"),
        (
            lambda: sum_gradients([[torch.ones(1)]], 4, 3, groups=2),
            ValueError,
            "groups must be in 1..1, got 2",
        ),
        (lambda: sum_gradients([[torch.ones(1)], []], 4, 3), ValueError, "every rank must have 1 layers"),
        (lambda: sum_gradients([[torch.ones(1)], [torch.ones(2)]], 4, 3), ValueError, "shapes must agree"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numpy_ints_are_ints():
    e, m, x = np.int64(4), np.uint8(3), torch.randn(4, 4)
    assert torch.equal(float_quantize(x, e, m), float_quantize(x, 4, 3))
    assert torch.equal(quantizer(x, (e, m)), quantizer(x, (4, 3)))
    assert torch.equal(quant_gemm(x, x, e, m), quant_gemm(x, x, 4, 3))
    ours, plain = (sum_gradients([[x]] * 4, *format, groups=n)[0] for format, n in (((e, m), np.int32(2)), ((4, 3), 2)))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("layer", [Quantizer((4, 3), (4, 3)), simulate.QuantLinear(2, 2, 4, 3)])
def test_second_derivatives_are_refused(layer):
    """They would be silently wrong: rounding happens outside autograd."""
    x = torch.ones(2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_quantizer_rounds_forward_and_straight_through_backward():
    x = torch.tensor([0.3, -1.7, 5.1], requires_grad=True)
    grad = torch.tensor([0.26, 1.9, -0.013])
    y = quantizer(x, forward=(4, 3), backward=(3, 0))
    y.backward(grad)
    np.testing.assert_array_equal(y.detach().numpy(), [exact_cast(v, 4, 3) for v in x.tolist()])
    np.testing.assert_array_equal(x.grad.numpy(), np.float32([exact_cast(v, 3, 0) for v in grad.tolist()]))


def test_quantizer_module_default_is_identity():
    x = torch.randn(5, requires_grad=True)
    module = Quantizer()
    module(x).backward(torch.full((5,), 0.123))
    assert torch.equal(module(x), x) and torch.equal(x.grad, torch.full((5,), 0.123))
    assert "forward=(4, 3), backward=(5, 2)" in repr(Quantizer((4, 3), (5, 2)))


def numpy_gemm(a: np.ndarray, b: np.ndarray, e: int, m: int, kahan: bool) -> np.ndarray:
    """Oracle: the definition, one element at a time; float32 operations, rational rounding."""

    def q(x: np.float32) -> np.float32:
        return np.float32(exact_cast(float(x), e, m))

    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i, j in np.ndindex(out.shape):
        acc = rest = np.float32(0)
        for k in range(a.shape[1]):
            product = q(a[i, k] * b[k, j])
            if not kahan:
                acc = q(acc + product)
                continue
            y = q(product - rest)
            t = q(acc + y)
            rest = q(q(t - acc) - y)
            rest = rest if np.isfinite(rest) else np.float32(0)
            acc = t
        out[i, j] = acc
    return out


@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("e,m", [(5, 2), (4, 3), (5, 10), (8, 7)])
@pytest.mark.parametrize("rows,depth,cols", [(1, 1, 1), (3, 7, 5), (2, 17, 65), (9, 8, 2)])
def test_quant_gemm_equals_definition(rows, depth, cols, e, m, kahan):
    rng = np.random.default_rng(rows * 100 + cols)
    a = rng.standard_normal((rows, depth)).astype(np.float32)
    b = rng.standard_normal((depth, cols)).astype(np.float32)
    got = quant_gemm(torch.from_numpy(a), torch.from_numpy(b), e, m, kahan=kahan).numpy()
    np.testing.assert_array_equal(got, numpy_gemm(a, b, e, m, kahan))


def test_quant_gemm_empty_and_strided():
    assert quant_gemm(torch.ones(0, 3), torch.ones(3, 2), 4, 3).shape == (0, 2)
    assert torch.equal(quant_gemm(torch.ones(2, 0), torch.ones(0, 2), 4, 3), torch.zeros(2, 2))
    a, b = torch.randn(6, 4).t(), torch.randn(3, 6).t()
    expected = numpy_gemm(a.numpy(), b.numpy(), 5, 2, True)
    np.testing.assert_array_equal(quant_gemm(a, b, 5, 2).numpy(), expected)


def test_quant_gemm_kahan_loses_less_than_plain():
    """A long sum of ones stalls at 2^(m+1) in a plain low-precision accumulator; Kahan carries the rest."""
    ones = torch.ones(1, 200)
    assert quant_gemm(ones, ones.t(), 8, 3, kahan=False).item() == 16
    assert quant_gemm(ones, ones.t(), 8, 3, kahan=True).item() == pytest.approx(200, rel=0.07)


@pytest.mark.parametrize("kahan", [False, True])
def test_quant_gemm_overflow_is_inf(kahan):
    """Oracle: IEEE sums; (4, 3) ends at 240. The last column meets an Inf of the other sign."""
    a = torch.full((1, 40), 10.0)
    b = torch.ones(40, 3)
    b[:, 1] = -1
    b[35:, 2] = -math.inf
    got = quant_gemm(a, b, 4, 3, kahan=kahan)
    assert got[0, :2].tolist() == [math.inf, -math.inf] and torch.isnan(got[0, 2])
    with np.errstate(invalid="ignore"):
        expected = numpy_gemm(a.numpy(), b.numpy(), 4, 3, kahan)
    np.testing.assert_array_equal(got.numpy(), expected)


def test_quant_gemm_threads_do_not_change_bits():
    a, b = torch.randn(37, 50), torch.randn(50, 70)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(quant_gemm(a, b, 4, 3))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_quant_linear_forward_and_gradients():
    layer = simulate.QuantLinear(6, 3, e=5, m=4)
    x = torch.randn(2, 4, 6, requires_grad=True)
    out = layer(x)
    rows, weight = x.detach().reshape(-1, 6).numpy(), layer.weight.detach().numpy()
    expected = numpy_gemm(rows, weight.T.copy(), 5, 4, True).reshape(2, 4, 3) + layer.bias.detach().numpy()
    np.testing.assert_array_equal(out.detach().numpy(), expected)
    grad = torch.randn_like(out)
    out.backward(grad)
    flat = grad.reshape(-1, 3).numpy()
    np.testing.assert_array_equal(x.grad.reshape(-1, 6).numpy(), numpy_gemm(flat, weight, 5, 4, True))
    np.testing.assert_array_equal(layer.weight.grad.numpy(), numpy_gemm(flat.T.copy(), rows, 5, 4, True))


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"stride": 2, "padding": 1}, {"groups": 2, "bias": False}, {"dilation": 2, "padding": (2, 1)}],
)
def test_quant_conv2d_in_wide_format_equals_torch(kwargs):
    """Oracle: torch's own convolution in float64; (8, 23) with Kahan is at least as good as float32."""
    torch.manual_seed(0)
    layer = simulate.QuantConv2d(4, 6, 3, e=8, m=23, **kwargs)
    plain = torch.nn.Conv2d(4, 6, 3, **kwargs).double()
    plain.load_state_dict({key: value.double() for key, value in layer.state_dict().items()})
    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    out, reference = layer(x), plain(wide)
    torch.testing.assert_close(out.double(), reference, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(out)
    out.backward(grad)
    reference.backward(grad.double())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad.double(), plain.weight.grad, rtol=1e-5, atol=1e-5)


def test_quant_conv2d_accumulates_in_the_format():
    layer = simulate.QuantConv2d(2, 3, 2, e=4, m=2, kahan=False, bias=False)
    x = torch.randn(1, 2, 3, 3)
    out = layer(x).detach().numpy()
    weight = layer.weight.detach().reshape(3, -1).numpy()
    for row, col in np.ndindex(2, 2):
        window = x[0, :, row : row + 2, col : col + 2].reshape(1, -1).numpy()
        np.testing.assert_array_equal(out[0, :, row, col], numpy_gemm(window, weight.T.copy(), 4, 2, False)[0])
    with pytest.raises(ValueError, match="padding must be a number of zeros"):
        simulate.QuantConv2d(2, 3, 2, e=4, m=2, padding="same")


def paper_sum(grads: list[np.ndarray], e: int, m: int, aps: bool, kahan: bool, groups: int) -> np.ndarray:
    """Oracle: the paper's steps in rational arithmetic, one element at a time."""
    n = len(grads)
    largest = max(Fraction(float(np.abs(g).max())) for g in grads)
    shift = 0
    if aps and largest:
        exponent = 0
        while Fraction(2) ** exponent < largest * n:
            exponent += 1
        while Fraction(2) ** (exponent - 1) >= largest * n:
            exponent -= 1
        shift = 2 ** (e - 1) - 1 - exponent

    def add(values: list[float]) -> float:
        total = rest = 0.0
        for value in values:
            if not kahan:
                total = exact_cast(total + value, e, m)
                continue
            y = exact_cast(value - rest, e, m)
            t = exact_cast(total + y, e, m)
            rest = exact_cast(exact_cast(t - total, e, m) - y, e, m)
            total = t
        return total

    out = np.zeros(grads[0].shape, np.float32)
    bounds = [n * k // groups for k in range(groups + 1)]
    for index in np.ndindex(out.shape):
        values = [exact_cast(math.ldexp(float(g[index]), shift), e, m) for g in grads]
        partial = [add(values[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        total = add(partial) if groups > 1 else partial[0]
        out[index] = np.float32(math.ldexp(total, -shift))
    return out


@pytest.mark.parametrize(
    "aps,kahan,groups",
    [(True, False, 1), (True, True, 1), (True, False, 3), (False, False, 1), (False, True, 2)],
)
@pytest.mark.parametrize("e,m", [(5, 2), (4, 3), (3, 0)])
@pytest.mark.parametrize("n_ranks", [1, 3, 8])
def test_sum_gradients_equals_paper(n_ranks, e, m, aps, kahan, groups):
    rng = np.random.default_rng(n_ranks)
    # Scales from far below every format to beyond what float32 can scale by in one multiplication.
    layers = [
        [
            (rng.standard_normal(shape) * scale).astype(np.float32)
            for shape, scale in [((7,), 1.0), ((2, 3), 1e-6), ((5,), 1e30), ((4,), 1e-40)]
        ]
        for _ in range(n_ranks)
    ]
    groups = min(groups, n_ranks)
    before = [[layer.copy() for layer in rank] for rank in layers]
    tensors = [[torch.from_numpy(layer) for layer in rank] for rank in layers]
    got = sum_gradients(tensors, e, m, aps=aps, kahan=kahan, groups=groups)
    for index, result in enumerate(got):
        expected = paper_sum([rank[index] for rank in layers], e, m, aps, kahan, groups)
        np.testing.assert_array_equal(result.numpy(), expected)
    for rank, old in zip(layers, before, strict=True):
        for layer, kept in zip(rank, old, strict=True):
            np.testing.assert_array_equal(layer, kept)


def test_sum_gradients_zero_none_and_nonfinite():
    zero, one = torch.zeros(3), torch.ones(3)
    assert torch.equal(sum_gradients([[zero], [zero]], 4, 3)[0], zero)
    got = sum_gradients([[None, one, None], [one, one, None]], 4, 3)
    assert torch.equal(got[0], one) and torch.equal(got[1], 2 * one) and got[2] is None
    bad = torch.tensor([1.0, math.nan, math.inf])
    result = sum_gradients([[bad], [one]], 5, 2)[0]
    assert result[0] == 2 and torch.isnan(result[1]) and result[2] == math.inf
    assert sum_gradients([[torch.empty(0)], [torch.empty(0)]], 4, 3)[0].shape == (0,)


@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_sum_gradients_of_inf_is_the_ieee_sum(kahan, groups):
    """Oracle: NumPy's own sum of small integers and specials, which (5, 4) holds; wherever they come in order."""
    ranks = np.float32([[1, 2, 3], [math.inf, 2, 1], [1, -math.inf, math.nan], [2, math.inf, 1]])
    with np.errstate(invalid="ignore"):
        expected = ranks.sum(0)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0]):
        got = sum_gradients([[torch.from_numpy(ranks[rank])] for rank in order], 5, 4, kahan=kahan, groups=groups)[0]
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("exponent", [-1060, -500, 0, 500, 1019])
def test_sum_gradients_of_float64_has_its_range(exponent):
    """Oracle: the same sum near one, times a power of two; all values are exact in (4, 3)."""
    x = torch.tensor([1.0, -0.875, 0.25], dtype=torch.float64)
    near_one = sum_gradients([[x], [x], [-x], [x]], 4, 3)[0]
    scaled = torch.from_numpy(np.ldexp(x.numpy(), exponent))
    got = sum_gradients([[scaled], [scaled], [-scaled], [scaled]], 4, 3)[0]
    assert got.dtype == torch.float64 and near_one.abs().max() == 2
    np.testing.assert_array_equal(got.numpy(), np.ldexp(near_one.numpy(), exponent))


def test_sum_gradients_without_mantissa_can_outgrow_the_format_in_groups():
    """As the docstring says; by hand: ties round up, 1+1 = 2, 1+1+1 = 4 twice, and 2+4 = 8, 8+4 = 16 > 8."""
    ones = [[torch.ones(1)] for _ in range(8)]
    assert sum_gradients(ones, 3, 0, groups=3)[0].item() == math.inf
    assert sum_gradients(ones, 3, 0)[0].item() == 4 and sum_gradients(ones, 3, 1, groups=3)[0].item() == 8


def test_sum_gradients_groups_and_kahan_reduce_round_off():
    """Against float64: with 128 ranks a plain (4, 3) sum stalls, grouping and Kahan do not."""
    torch.manual_seed(0)
    grads = [[torch.rand(200) + 0.5] for _ in range(128)]
    exact = sum(rank[0].double() for rank in grads)

    def error(**kwargs):
        return float((sum_gradients(grads, 5, 2, **kwargs)[0].double() - exact).norm() / exact.norm())

    plain, grouped, kahan = error(), error(groups=11), error(kahan=True)
    assert plain > 0.5 and grouped < plain / 2 and kahan < plain / 4


def rounded_exponent(value: float, m: int) -> int:
    """Exponent of a positive value once it is rounded to m mantissa bits."""
    k = math.frexp(value)[1] - 1
    limit = (2 - Fraction(1, 2**m)) * Fraction(2) ** k
    rounded = Fraction(exact_cast(math.ldexp(value, -k), 8, m)) * Fraction(2) ** k
    return k + (rounded > limit)


def reference_allreduce(grads: list[np.ndarray], e: int, m: int) -> np.ndarray:
    """Oracle for two ranks: one rounding each at the shared exponent, sum and average in float64 (exact
    here).
    """

    exponent = max(rounded_exponent(float(np.abs(g).max()), m) for g in grads)
    shift = 2 ** (e - 1) - 1 - exponent
    rounded = [[math.ldexp(exact_cast(math.ldexp(float(v), shift), e, m), -shift) for v in g.ravel()] for g in grads]
    return np.float32(np.sum(rounded, axis=0) / len(grads)).reshape(grads[0].shape)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def rank_grads(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def test_emulated_optimizer_two_ranks_equals_oracle():
    model = make_model()
    x = torch.randn(2, 4, 5)
    grads = [rank_grads(model, x[rank]) for rank in range(2)]
    optimizer = EmulatedOptimizer(
        torch.optim.SGD(model.parameters(), 0.5), 2, {"e": 4, "m": 3}, model.named_parameters()
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = optimizer.step(lambda rank: model(x[rank]).square().mean())
    for index, parameter in enumerate(model.parameters()):
        expected = reference_allreduce([rank[index].numpy() for rank in grads], 4, 3)
        np.testing.assert_array_equal(parameter.grad.numpy(), expected)
        torch.testing.assert_close(parameter.detach(), before[index] - 0.5 * parameter.grad, rtol=0, atol=0)
    assert torch.isfinite(loss)
    # A second step must not see the first one's gradient, which is still in `.grad`.
    grads = [rank_grads(model, x[rank]) for rank in range(2)]
    optimizer.step(lambda rank: model(x[rank]).square().mean())
    for index, parameter in enumerate(model.parameters()):
        expected = reference_allreduce([rank[index].numpy() for rank in grads], 4, 3)
        np.testing.assert_array_equal(parameter.grad.numpy(), expected)


@pytest.mark.parametrize("n_ranks", [1, 3, 4, 9])
def test_emulated_optimizer_float32_is_plain_average(n_ranks):
    """Oracle: the mean of the ranks' gradients in float64."""
    model = make_model()
    x = torch.randn(n_ranks, 4, 5)
    grads = [rank_grads(model, x[rank]) for rank in range(n_ranks)]
    optimizer = EmulatedOptimizer(
        torch.optim.SGD(model.parameters(), 0.5), n_ranks, {"e": 4, "m": 3, "overrides": {"*": "float32"}}
    )
    for rank in range(n_ranks):
        model(x[rank]).square().mean().backward()
        optimizer.collect()
    optimizer.reduce()
    for index, parameter in enumerate(model.parameters()):
        expected = torch.stack([rank[index].double() for rank in grads]).mean(0)
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"e": 4, "m": 3},
        {"e": 5, "m": 2, "accumulate": "kahan"},
        {"e": 3, "m": 0, "error_feedback": True},
        {"e": 3, "m": 2, "rounding": "stochastic", "seed": 3},
        {"e": 4, "m": 3, "scaling": False},
    ],
)
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_emulated_optimizer_stays_close_to_the_mean(n_ranks, options):
    """Error against the exact mean within two roundings of each value at the layer's scale (the first
    step).
    """
    model = make_model()
    x = torch.randn(n_ranks, 4, 5)
    grads = [rank_grads(model, x[rank]) for rank in range(n_ranks)]
    optimizer = EmulatedOptimizer(torch.optim.SGD(model.parameters(), 0.1), n_ranks, options, model.named_parameters())
    optimizer.step(lambda rank: model(x[rank]).square().mean())
    for index, parameter in enumerate(model.parameters()):
        exact = torch.stack([rank[index].double() for rank in grads])
        bound = 3 * 2.0 ** -options["m"] * exact.abs().max() * (1 if options.get("scaling", True) else 8)
        assert (parameter.grad.double() - exact.mean(0)).abs().max() <= bound


def test_emulated_optimizer_is_reproducible_and_keeps_residuals():
    def train() -> list[torch.Tensor]:
        model = make_model()
        torch.manual_seed(5)
        x = torch.randn(4, 6, 5)
        optimizer = EmulatedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            4,
            {"e": 3, "m": 0, "error_feedback": True, "rounding": "stochastic"},
        )
        for _ in range(5):
            optimizer.step(lambda rank: model(x[rank]).square().mean())
        assert all(np.any(array != 0) for array in optimizer.exchanges[0].residuals.values())
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(), train(), strict=True))


def test_emulated_optimizer_treats_missing_gradient_as_zero():
    model = make_model()
    unused = torch.nn.Parameter(torch.ones(3))
    optimizer = EmulatedOptimizer(torch.optim.SGD([*model.parameters(), unused], 0.1), 2, {"e": 4, "m": 3})
    optimizer.step(lambda rank: model(torch.ones(1, 5)).sum())
    assert torch.equal(unused.grad, torch.zeros(3)) and torch.equal(unused.detach(), torch.ones(3))


@pytest.mark.parametrize("n_ranks", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_emulated_optimizer_of_many_ranks_equals_oracle(n_ranks):
    """Oracle: the exchange's two roundings by ml_dtypes, at the ranks' shared exponent and at that of each sum."""
    torch.manual_seed(2)
    grads = torch.randn(n_ranks, 2 * n_ranks)
    parameter = torch.nn.Parameter(torch.zeros(2 * n_ranks))
    optimizer = EmulatedOptimizer(torch.optim.SGD([parameter], 1.0), n_ranks, {"e": 4, "m": 3})
    optimizer.step(lambda rank: (parameter * grads[rank]).sum())

    def at_scale(values: np.ndarray) -> np.ndarray:
        """Rounded with the largest value, once it is rounded, in the top binade of (4, 3)."""
        shift = 7 - rounded_exponent(float(np.abs(values).max()), 3)
        return np.ldexp(np.ldexp(values, shift).astype(ml_dtypes.float8_e4m3).astype(np.float64), -shift)

    sums = at_scale(grads.numpy()).sum(0)
    assert np.array_equal(np.float32(sums), sums)  # exact in float32, in which the exchange adds
    # 512 bytes over 256 shards: 8 elements, the smallest segment, for every fourth, with an exponent of their own.
    shards = [at_scale(np.float32(part)) for part in np.split(sums, n_ranks // 4)]
    np.testing.assert_array_equal(parameter.grad.numpy(), np.float32(np.concatenate(shards) / n_ranks))
    assert torch.equal(parameter.detach(), -parameter.grad)


def test_emulated_optimizer_delegates_and_rejects():
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = EmulatedOptimizer(inner, 2, {"e": 4, "m": 3})
    assert optimizer.param_groups is inner.param_groups
    with pytest.raises(ValueError, match="collect must be called 2 times per step, got 0"):
        optimizer.step()
    with pytest.raises(TypeError, match="loss must be a function of the rank, got .*lambda"):
        optimizer.step(lambda: model(torch.ones(1, 5)).sum())
    with pytest.raises(TypeError, match="EmulatedOptimizer: cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="n_ranks must be in 1..256, got 0"):
        EmulatedOptimizer(inner, 0, {"e": 4, "m": 3})
    with pytest.raises(TypeError, match="compressor_options must be a dict"):
        EmulatedOptimizer(inner, 2, (4, 3))
    with pytest.raises(ValueError, match="must have e and m, lacks m"):
        EmulatedOptimizer(inner, 2, {"e": 4})
    with pytest.raises(ValueError, match="transport must be 'packed', .* got 'allreduce'"):
        EmulatedOptimizer(inner, 2, {"e": 4, "m": 3, "transport": "allreduce"})
    with pytest.raises(ValueError, match="must name all 4 parameters"):
        EmulatedOptimizer(inner, 2, {"e": 4, "m": 3}, list(model.named_parameters())[:2])
    frozen = torch.optim.SGD([torch.nn.Parameter(torch.ones(1), requires_grad=False)], 0.1)
    with pytest.raises(ValueError, match="a parameter that requires a gradient, got none"):
        EmulatedOptimizer(frozen, 2, {"e": 4, "m": 3})


def test_emulated_optimizer_refuses_what_it_cannot_reduce():
    late = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    first = torch.nn.Parameter(torch.ones(2))
    optimizer = EmulatedOptimizer(torch.optim.SGD([first, late], 0.1), 2, {"e": 4, "m": 3})
    optimizer.step(lambda rank: first.sum())
    late.requires_grad_()
    with pytest.raises(ValueError, match="all 1 trainable parameters must be there from the start, got more"):
        optimizer.step(lambda rank: (first + late).sum())
    optimizer = EmulatedOptimizer(torch.optim.SGD([first], 0.1), 2, {"e": 4, "m": 3})
    optimizer.optimizer.add_param_group({"params": [late]})
    with pytest.raises(ValueError, match="added or unfrozen since"):
        optimizer.step(lambda rank: (first + late).sum())
    table = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = EmulatedOptimizer(torch.optim.SGD(table.parameters(), 0.1), 2, {"e": 4, "m": 3})
    with pytest.raises(TypeError, match="gradient of 'allreduce.noname.0.0' must be dense, got torch.sparse_coo"):
        optimizer.step(lambda rank: table(torch.tensor([rank])).sum())
    both = [first, torch.nn.Parameter(torch.ones(1, device="meta"))]
    optimizer = EmulatedOptimizer(torch.optim.SGD(both, 0.1), 2, {"e": 4, "m": 3})
    with pytest.raises(TypeError, match="must be on one CPU or CUDA device, got cpu, meta"):
        optimizer.step(lambda rank: first.sum())


def test_emulated_optimizer_goes_on_after_a_loss_that_failed():
    """Oracle: a run in which nothing failed."""
    results = []
    for fails in (False, True):
        model = make_model()
        optimizer = EmulatedOptimizer(torch.optim.SGD(model.parameters(), 0.1), 3, {"e": 4, "m": 3})
        if fails:

            def loss(rank: int, model: torch.nn.Module = model) -> torch.Tensor:
                if rank == 1:
                    raise ZeroDivisionError
                return model(torch.ones(1, 5)).sum()

            with pytest.raises(ZeroDivisionError):
                optimizer.step(loss)
        optimizer.step(lambda rank, model=model: model(torch.full((1, 5), rank + 1.0)).sum())
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_emulated_optimizer_keeps_channels_last_in_order():
    """Oracle: the mean; rank 0 has no gradient, so that its zeros take the result."""
    values = torch.arange(1.0, 25.0).reshape(1, 2, 3, 4)
    parameter = torch.nn.Parameter(torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last))
    other = torch.nn.Parameter(torch.zeros(1))
    options = {"e": 4, "m": 3, "overrides": {"*": "float32"}}
    optimizer = EmulatedOptimizer(torch.optim.SGD([parameter, other], 0.1), 2, options)
    optimizer.step(lambda rank: (parameter * values).sum() if rank else other.sum())
    assert torch.equal(parameter.grad, values / 2)


def test_simulate_and_wire_round_alike():
    """The exchange's own cast, in a layer whose exponent is the format's top: the same values, bit for
    bit.
    """
    from horovod_aps.kernels import SEGMENT, SPECIALS

    for e, m in [(4, 3), (3, 0), (5, 2), (3, 2), (2, 1)]:
        top = 2 ** (e - 1) - 1
        limit = (2 - 2.0**-m) * 2.0**top
        x = np.clip(interesting_floats(7), -limit, limit)
        x = np.ascontiguousarray(x[np.isfinite(x)])
        out = np.zeros_like(x)
        segs = np.zeros(1, SEGMENT)
        segs["n"], segs["exp_bits"], segs["man_bits"], segs["flags"], segs["factor"] = (
            x.size,
            e,
            m,
            SPECIALS,
            1.0,
        )
        segs["data"], segs["exponent"] = x.ctypes.data, top
        kernels = CpuKernels()
        message = kernels.alloc((x.size * (1 + e + m) + 7) // 8)
        kernels.encode(segs, message)
        segs["data"] = out.ctypes.data
        kernels.decode(segs, [message])
        np.testing.assert_array_equal(out, float_quantize(torch.from_numpy(x), e, m).numpy())
