"""The codec of activations: the bound holds to the last bit, whatever the values; one source, the same bytes."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_aps import config
from horovod_aps.activations import codec, compress, decompress

DTYPES = list(codec.DTYPES)
SIZES = [0, 1, 7, 63, 64, 65, 1023, 4095, 4096, 4097, 20000]


@pytest.fixture
def baseline():
    """Calls a function with the AVX2 code switched off."""
    lib = codec.library()

    def call(function):
        lib.aps_use_vectors(0)
        try:
            return function()
        finally:
            lib.aps_use_vectors(config.vectors())

    return call


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(
        np.frombuffer(
            tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16).numpy().tobytes(),
            np.uint8,
        ).copy()
    )


def check(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Oracle: float64, which holds the difference of any two values here exactly, or rounds it to nearest."""
    y = decompress(compress(x, bound))
    a, b = x.double(), y.double()
    finite = torch.isfinite(a)
    assert torch.equal(bits(x)[~finite.repeat_interleave(x.element_size())],
                       bits(y)[~finite.repeat_interleave(x.element_size())])  # fmt: skip
    errors = (a - b)[finite].abs()
    assert bool((errors <= bound).all()), (x.dtype, bound, float(errors.max()))
    assert torch.equal(a[finite].sign(), b[finite].sign())  # so zero stays zero and a ReLU's mask stays
    return y


def values(kind: str, n: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    if kind == "relu":
        x = np.maximum(x, 0)
    elif kind == "smooth":
        x = np.cumsum(x, dtype=np.float32) / 8
    elif kind == "sparse":
        x *= rng.random(n) < 0.2
    elif kind == "bits":
        x = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    elif kind == "hostile":
        odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0], np.float32)
        x = np.where(rng.random(n) < 0.02, odd[rng.integers(0, len(odd), n)], x)
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "relu", "smooth", "sparse", "bits", "hostile"])
def test_bound_holds_and_all_paths_give_the_same_bytes(dtype, kind, baseline):
    for n in SIZES:
        x = values(kind, n, n).to(dtype)
        for bound in (0.0, 1e-45, 1e-12, 1e-4, 0.013, 0.1, 0.25, 1.0, 77.7, 1e30, 3e38):
            check(x, bound)
            stream = codec.encode(x, bound)
            assert torch.equal(baseline(lambda x=x, bound=bound: codec.encode(x, bound)), stream)
            decoded = codec.decode(stream, n, dtype)
            again = baseline(lambda stream=stream, n=n: codec.decode(stream, n, dtype))
            assert torch.equal(bits(again), bits(decoded))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=200),
    st.floats(min_value=0, max_value=1e38),
    st.integers(1, 3),
)
def test_bound_holds_for_any_values(dtype, numbers, bound, repeats):
    check(torch.tensor(numbers * repeats).to(dtype), bound)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 2**31), st.floats(1e-6, 10), st.floats(0, 1), st.integers(0, 3))
def test_bound_holds_at_the_edges_of_bins(dtype, seed, bound, spread, ulps):
    """Values at multiples of the bound, and a few units in the last place beside them."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(-300, 300, 256) * bound * (1 + spread * rng.integers(0, 2, 256))).astype(np.float32)
    for _ in range(ulps):
        x = np.nextafter(x, np.float32(rng.choice([-np.inf, np.inf])))
    check(torch.from_numpy(x).to(dtype), bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bound_holds_for_every_half(dtype):
    """All 65536 values, in the order of their magnitude so that blocks compress, and bounds of all sizes."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    strided = every.view(256, 256).t().reshape(-1)
    for exponent in range(-26, 17):
        for factor in (1.0, 1.3, 1.99):
            check(every, factor * 2.0**exponent)
    check(strided, 0.01)


def test_threads_do_not_change_the_stream():
    x = values("hostile", 300_000, 5)
    lib = codec.library()
    streams = []
    for n_threads in (1, 2, 5):
        size = lib.aps_act_encode(x.data_ptr(), x.numel(), 0, 0.02, None, 0, n_threads)
        stream = torch.empty(size, dtype=torch.uint8)
        assert lib.aps_act_fetch(stream.data_ptr(), size) == 0
        streams.append(stream)
        out = torch.empty_like(x)
        assert lib.aps_act_decode(stream.data_ptr(), size, out.data_ptr(), x.numel(), 0, None, n_threads) == 0
        assert torch.equal(bits(out), bits(codec.decode(streams[0], x.numel(), x.dtype)))
    assert all(torch.equal(stream, streams[0]) for stream in streams)


def test_calls_from_many_threads_do_not_mix():
    """Scratch memory belongs to the calling thread."""
    failures = []

    def work(seed: int) -> None:
        try:
            for k in range(20):
                check(values("relu", 5000 + seed, 100 * seed + k), 0.05)
        except BaseException as error:  # to be shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_flush_to_zero_changes_nothing():
    x = values("bits", 5000, 3) * 1e-30
    expected = codec.encode(x, 1e-29)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(codec.encode(x, 1e-29), expected)
    finally:
        torch.set_flush_denormal(False)


def test_sizes_are_what_the_format_says():
    n = 1 << 16
    zeros = compress(torch.zeros(n), 0.1).stream.numel()
    assert zeros == 32 + n // 4096 * 4 + n // 64 * 2  # two bytes per block of 64
    assert compress(torch.full((n,), 3.0), 0.1).stream.numel() == zeros
    # Neighbours differ by five bins, or six where the width of a bin, a little below 0.2, makes up for it.
    assert compress(torch.arange(2048, dtype=torch.float32), 0.1).stream.numel() <= 32 + 4 + 32 * (2 + 2 + 8)
    normal = values("normal", n, 1)
    assert normal.nbytes / compress(normal, 0.1).stream.numel() > 5.5
    assert normal.nbytes / compress(normal.relu(), 0.1).stream.numel() > 9
    noise = values("bits", n, 2)
    assert compress(noise, 1e-30).stream.numel() < noise.nbytes * 1.01


def test_shapes_and_strides_of_single_tensors():
    x = torch.randn(3, 5, 7).transpose(0, 2)
    y = decompress(compress(x, 1e-3))
    assert y.shape == x.shape and bool(((x - y).abs() <= 1e-3).all())
    assert decompress(compress(torch.zeros(2, 0, 3), 0.1)).shape == (2, 0, 3)
    assert decompress(compress(torch.tensor(1.5), 0.1)).shape == ()


def test_wrong_arguments_are_named():
    for bound in (-1.0, float("nan"), float("inf"), "auto"):
        with pytest.raises(ValueError, match="error_bound must be"):
            compress(torch.ones(3), bound)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        compress(torch.ones(3, dtype=torch.float64), 0.1)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.booleans())
def test_malformed_streams_are_refused_or_decoded_alike(seed, n_changes, cut):
    """The fuzz target of tests/fuzz does this under sanitizers; here, for the Python side: an error, never a crash."""
    rng = np.random.default_rng(seed)
    x = values("relu", int(rng.integers(1, 9000)), seed)
    good = compress(x, 0.05)
    stream = good.stream.clone()
    for _ in range(n_changes):
        stream[int(rng.integers(0, len(stream)))] = int(rng.integers(0, 256))
    if cut:
        stream = stream[: int(rng.integers(0, len(stream)))].clone()
    try:
        assert decompress(codec.Compressed(stream, good.shape, good.dtype)).shape == x.shape
    except ValueError as error:
        assert "malformed" in str(error)


# ---- masks and indices


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 63, 64, 65, 1023, 1025])
def test_masks_take_one_bit(dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).relu().to(dtype)
    packed = codec.pack_mask(x, positive=dtype != torch.bool)
    assert packed.numel() == -(-n // 8)
    assert torch.equal(codec.unpack_mask(packed, n, dtype), (x > 0).to(dtype))
    with pytest.raises(ValueError, match="bytes"):
        codec.unpack_mask(packed, n + 64, dtype)


def test_masks_treat_nan_as_threshold_backward_does():
    x = torch.tensor([float("nan"), -float("nan"), -1.0, 0.0, -0.0, float("inf"), -float("inf"), 1e-45])
    for dtype in DTYPES:
        y = x.to(dtype)
        passes = torch.ops.aten.threshold_backward(torch.ones_like(y), y, 0) != 0
        assert torch.equal(codec.unpack_mask(codec.pack_mask(y, True), 8, dtype) != 0, passes)


def test_two_valued_tensors_are_found():
    mask = torch.nn.functional.dropout(torch.ones(10000), 0.3)
    assert codec.other_value(mask) == int(mask[mask != 0][0].view(torch.int32))
    other = codec.other_value(mask)
    assert torch.equal(codec.unpack_mask(codec.pack_mask(mask, False), 10000, mask.dtype, other), mask)
    mask[9999] = 7
    assert codec.other_value(mask) is None
    assert codec.other_value(torch.zeros(100)) == 0
    assert codec.other_value(torch.ones(100, dtype=torch.float16)) == 0x3C00


@pytest.mark.parametrize(
    "kernel,stride,padding,bits", [(2, 2, 0, 2), (3, 2, 1, 4), (3, 2, 0, 4), (3, 1, 1, 4), (2, 1, 0, 2), (5, 3, 2, 5)]
)
def test_pooling_indices_take_the_bits_of_a_window(kernel, stride, padding, bits):
    x = torch.randn(3, 4, 23, 31, generator=torch.Generator().manual_seed(kernel))
    _, indices = torch.nn.functional.max_pool2d(x, kernel, stride, padding, return_indices=True)
    packed = codec.pack_pool(indices, x.shape)
    assert packed is not None
    assert torch.equal(codec.unpack_pool(*packed), indices.view(-1))
    assert packed[0].numel() <= -(-indices.numel() * (bits + 1) // 8)


def test_other_integers_are_no_pooling_indices():
    assert codec.pack_pool(torch.randint(0, 400, (2, 3, 10, 10)), torch.Size((2, 3, 20, 20))) is None
    assert codec.pack_pool(torch.full((2, 3, 10, 10), -1), torch.Size((2, 3, 20, 20))) is None
    assert codec.pack_pool(torch.zeros(2, 3, 10, 10, dtype=torch.int64), torch.Size((2, 4, 20, 20))) is None


def test_malformed_pooling_bits_are_refused():
    x = torch.randn(1, 1, 8, 8)
    _, indices = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    bits_, pool = codec.pack_pool(indices, x.shape)  # type: ignore[misc]
    with pytest.raises(ValueError, match="malformed"):
        codec.unpack_pool(torch.full_like(bits_, 0xFF), pool)
    with pytest.raises(ValueError, match="do not fit"):
        codec.unpack_pool(bits_[:-1], pool)
    assert ctypes.sizeof(codec.Pool) == 48
