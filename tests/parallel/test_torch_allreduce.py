"""`hvd.allreduce` and `hvd.grouped_allreduce` with compression, on every rank of a real job.

Oracle: the NumPy simulation of all ranks in `tests/reference.py`, bit for bit, unless a test says otherwise.
"""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from exchange_oracle import SIZES, assert_same_bits, carrier_pairs, expected, make_gradients
from horovod.torch import mpi_ops
from reference import Format
from torch_common import to_numpy, to_torch

from horovod_aps.torch import APSCompressor
from horovod_aps.torch.gradient import Gradient

hvd.init()


def grouped(grads: list[dict[str, np.ndarray]], compressor: APSCompressor, **keywords) -> dict[str, np.ndarray]:
    """This rank's results of one grouped all-reduce of its gradients."""
    tensors = [to_torch(x) for x in grads[hvd.rank()].values()]
    results = hvd.grouped_allreduce(tensors, compression=compressor, name="g", **keywords)
    for tensor, x in zip(tensors, grads[hvd.rank()].values()):
        assert_same_bits(to_numpy(tensor), x, "the input was overwritten")
    return {name: to_numpy(result) for name, result in zip(grads[0], results)}


def check(actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert_same_bits(actual[name], wanted[name], name)


@pytest.mark.parametrize("accumulate", ["float32", "format", "kahan"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_grouped_allreduce_equals_simulation(dtype, accumulate):
    grads = make_gradients(SIZES, hvd.size(), dtype)
    compressor = APSCompressor(4, 3, accumulate=accumulate)
    wanted = expected(grads, Format(4, 3), factor=1 / hvd.size(), mode=accumulate)
    for _ in range(2):  # agreed on, then remembered
        check(grouped(grads, compressor), wanted)


@pytest.mark.parametrize("fmt", [(5, 2), (3, 0), (2, 2), (5, 10)], ids=str)
def test_grouped_allreduce_formats(fmt):
    grads = make_gradients(SIZES, hvd.size())
    check(grouped(grads, APSCompressor(*fmt)), expected(grads, Format(*fmt), factor=1 / hvd.size()))


@pytest.mark.parametrize("op, divisor", [(hvd.Average, hvd.size()), (hvd.Sum, 1)], ids=["average", "sum"])
@pytest.mark.parametrize("prescale, postscale", [(1.0, 1.0), (0.5, 3.0), (1e-3, 1e5)])
def test_grouped_allreduce_op_and_scale_factors(op, divisor, prescale, postscale):
    grads = make_gradients((100, 7), hvd.size())
    actual = grouped(grads, APSCompressor(4, 3), op=op, prescale_factor=prescale, postscale_factor=postscale)
    check(actual, expected(grads, Format(4, 3), factor=prescale * postscale / divisor))


def test_grouped_allreduce_many_buckets():
    sizes = (900, 90, 9, 5000, 0, 1, 1, 1000, 1001, 0)
    grads = make_gradients(sizes, hvd.size())
    compressor = APSCompressor(4, 3, bucket_mb=0.004)
    wanted = expected(grads, Format(4, 3), factor=1 / hvd.size(), bucket_mb=0.004)
    for _ in range(3):
        check(grouped(grads, compressor), wanted)


def test_grouped_allreduce_mixed_formats():
    grads = make_gradients((50, 60, 70), hvd.size())
    compressor = APSCompressor(4, 3, overrides={"*.1": "float32", "*.2": (5, 2)})
    formats = {"layer0": Format(4, 3), "layer1": None, "layer2": Format(5, 2)}
    check(grouped(grads, compressor), expected(grads, formats, factor=1 / hvd.size()))


@pytest.mark.parametrize("n", [0, 1, 3, 9])
def test_allreduce_tiny_tensors(n):
    grads = make_gradients((n,), hvd.size())
    result = hvd.allreduce(to_torch(grads[hvd.rank()]["layer0"]), name="tiny", compression=APSCompressor(4, 3))
    assert_same_bits(to_numpy(result), expected(grads, Format(4, 3), factor=1 / hvd.size())["layer0"])


def test_allreduce_scalar():
    """A tensor without dimensions, as losses are."""
    result = hvd.allreduce(torch.tensor(float(hvd.rank() + 1)), compression=APSCompressor(4, 3))
    assert result.shape == () and result.item() == pytest.approx((hvd.size() + 1) / 2, rel=0.07)


def test_allreduce_keeps_shape_dtype_and_autograd():
    """Oracle: Horovod's own gradient of an all-reduce, the all-reduce of the gradient."""
    x = torch.full((3, 5), 1.0 + hvd.rank(), requires_grad=True)
    result = hvd.allreduce(x, name="auto", compression=APSCompressor(5, 10), op=hvd.Sum)
    assert type(result) is torch.Tensor and result.shape == (3, 5) and result.dtype == torch.float32
    assert torch.all(result == sum(range(1, hvd.size() + 1)))
    (result * 2).sum().backward()
    assert torch.all(x.grad == 2 * hvd.size())


@pytest.mark.parametrize("layout", ["transposed", "strided", "channels_last", "expanded", "negative"])
def test_allreduce_tensors_that_are_not_contiguous(layout):
    rng = np.random.default_rng(hvd.rank())
    base = torch.from_numpy(rng.standard_normal((2, 6, 4, 8)).astype(np.float32))
    tensor = {
        "transposed": lambda: base.transpose(1, 3),
        "strided": lambda: base[:, ::2, :, 1::3],
        "channels_last": lambda: base.contiguous(memory_format=torch.channels_last),
        "expanded": lambda: base[:, :1].expand(2, 6, 4, 8),
        "negative": lambda: torch._neg_view(base),
    }[layout]()
    assert tensor.is_neg() or not tensor.is_contiguous()
    result = hvd.allreduce(tensor, name=layout, compression=APSCompressor(4, 3))
    copy = tensor.clone(memory_format=torch.contiguous_format)
    plain = hvd.allreduce(copy, name=layout, compression=APSCompressor(4, 3))
    assert result.shape == tensor.shape and torch.equal(result, plain)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_allreduce_integers_pass_through(dtype):
    """As with Horovod's own compressors. Oracle: exact integer sums; uint8 has no all-reduce in Horovod at all."""
    tensor = torch.arange(5, dtype=dtype) + hvd.rank()
    if dtype == torch.uint8:
        with pytest.raises(ValueError, match="not supported"):
            hvd.allreduce(tensor, op=hvd.Sum, name="int", compression=hvd.Compression.none)
        return
    result = hvd.allreduce(tensor, op=hvd.Sum, name="int", compression=APSCompressor(4, 3))
    assert torch.equal(result, torch.arange(5, dtype=dtype) * hvd.size() + sum(range(hvd.size())))


@pytest.mark.parametrize("name", ["Min", "Max", "Product"])
def test_allreduce_refuses_other_operations(name):
    with pytest.raises(ValueError, match=f"op must be Average or Sum, got {name}"):
        hvd.allreduce(torch.ones(4), op=getattr(hvd, name), compression=APSCompressor(4, 3))
    assert torch.all(hvd.allreduce(torch.ones(4), compression=APSCompressor(4, 3)) == 1)


def test_allreduce_refuses_adasum():
    error = ValueError if hvd.size() in (2, 4, 8) else NotImplementedError  # Horovod itself wants a power of two
    with pytest.raises(error):
        hvd.allreduce(torch.ones(4), op=hvd.Adasum, compression=APSCompressor(4, 3))
    assert torch.all(hvd.allreduce(torch.ones(4), compression=APSCompressor(4, 3)) == 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulate", ["float32", "kahan"])
def test_allreduce_nonfinite_on_one_rank_reaches_all_ranks(bad, accumulate):
    grads = make_gradients((50, 60, 70), hvd.size())
    compressor = APSCompressor(4, 3, accumulate=accumulate)
    wanted = expected(grads, Format(4, 3), factor=1 / hvd.size(), mode=accumulate)
    spoilt = [{name: x.copy() for name, x in rank.items()} for rank in grads]
    spoilt[-1]["layer1"][59] = bad
    actual = grouped(spoilt, compressor)
    assert np.all(np.isnan(actual["layer1"]))
    check(grouped(grads, compressor), wanted)  # the next step is clean
    del actual["layer1"], wanted["layer1"]
    check(actual, wanted)


def test_allreduce_zeros_give_zeros():
    result = hvd.allreduce(torch.zeros(100), compression=APSCompressor(4, 3))
    assert torch.equal(result, torch.zeros(100))


@pytest.mark.parametrize("fmt, bound", [((4, 3), 0.04), ((5, 2), 0.08)], ids=str)
def test_allreduce_relative_error_at_any_scale(fmt, bound):
    """Oracle: the exact average in float64; scales from 1e-30 to 1e+30 in one batch."""
    scales = [10.0**k for k in range(-30, 31, 6)]
    per_rank = [
        {
            f"{i}": (np.random.default_rng([rank, i]).standard_normal(3000) * s).astype(np.float32)
            for i, s in enumerate(scales)
        }
        for rank in range(hvd.size())
    ]
    actual = grouped(per_rank, APSCompressor(*fmt))
    for name, result in actual.items():
        mean = np.mean([rank[name].astype(np.float64) for rank in per_rank], axis=0)
        assert np.linalg.norm(result - mean) < bound * np.linalg.norm(mean), scales[int(name)]


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"e": 0, "m": 3}, ValueError),
        ({"e": 4, "m": 30}, ValueError),
        ({"e": "4", "m": 3}, TypeError),
        ({"e": 4, "m": 3, "accumulate": "double"}, ValueError),
        ({"e": 4, "m": 3, "bucket_mb": -1}, ValueError),
        ({"e": 4, "m": 3, "colour": 1}, TypeError),
    ],
    ids=str,
)
def test_compressor_refuses_wrong_arguments(arguments, error):
    with pytest.raises(error):
        APSCompressor(**arguments)


@pytest.mark.parametrize("what", ["format", "accumulate", "shape", "dtype", "scale", "missing tensor"])
def test_disagreement_raises_on_every_rank_and_the_process_goes_on(what):
    """The last rank differs; every rank must get a ValueError that names it, and the next exchange works."""
    odd = hvd.rank() == hvd.size() - 1
    compressor = APSCompressor(
        5 if odd and what == "format" else 4,
        2 if odd and what == "format" else 3,
        accumulate="kahan" if odd and what == "accumulate" else "float32",
    )
    shape = (5, 2) if odd and what == "shape" else (2, 5)
    dtype = torch.float64 if odd and what == "dtype" else torch.float32
    scale = 2.0 if odd and what == "scale" else 1.0
    tensors = [torch.ones(shape, dtype=dtype)] * (2 if odd and what == "missing tensor" else 1)
    with pytest.raises(ValueError, match=f"rank {hvd.size() - 1}"):
        hvd.grouped_allreduce(tensors, name="odd", compression=compressor, postscale_factor=scale)
    fresh = APSCompressor(4, 3)
    assert torch.all(hvd.allreduce(torch.ones(7), name="fresh", compression=fresh) == 1)
    if what not in ("format", "accumulate"):
        assert torch.all(hvd.allreduce(torch.ones(7), name="same", compression=compressor) == 1)


def test_disagreement_after_agreement():
    """A batch that all ranks know, and then one rank brings another: ValueError everywhere, then it works again."""
    compressor = APSCompressor(4, 3)
    for _ in range(2):
        hvd.grouped_allreduce([torch.ones(10), torch.ones(20)], name="known", compression=compressor)
    n = 21 if hvd.rank() == 0 else 20
    with pytest.raises(ValueError, match=r"has shape \[21\] on rank 0 and \[20\] on rank 1"):
        hvd.grouped_allreduce([torch.ones(10), torch.ones(n)], name="known", compression=compressor)
    for _ in range(2):
        results = hvd.grouped_allreduce([torch.ones(10), torch.ones(20)], name="known", compression=compressor)
        assert all(torch.all(x == 1) for x in results)


@pytest.mark.parametrize("what", ["transport", "op"])
def test_disagreement_with_the_allreduce_transport(what):
    """As above, where Horovod's own all-reduce adds, which would not notice, or would wait for ever."""
    odd = hvd.rank() == hvd.size() - 1
    compressor = APSCompressor(4, 3, transport="packed" if odd and what == "transport" else "allreduce")
    with pytest.raises(ValueError, match="all ranks must use the same"):
        hvd.allreduce(
            torch.ones(5), name="odd", compression=compressor, op=hvd.Sum if odd and what == "op" else hvd.Average
        )
    assert torch.all(hvd.allreduce(torch.ones(7), name="fresh", compression=APSCompressor(4, 3)) == 1)


@pytest.mark.parametrize(
    "name, op, in_place",
    [("mixed", hvd.Average, False), (None, hvd.Sum, False), ("mixed", hvd.Sum, True), (None, hvd.Average, True)],
)
@pytest.mark.parametrize("order", ["ifif", "fiif", "ii"])
@pytest.mark.parametrize("transport", ["packed", "allreduce"])
def test_group_of_integers_and_floats(transport, order, name, op, in_place):
    """Oracles: integers by stock Horovod, floats in a group of their own by a compressor with the same options."""
    random = torch.Generator().manual_seed(hvd.rank())
    tensors = [
        torch.randn(50 + i, generator=random)
        if kind == "f"
        else torch.randint(-1000, 1000, (40 + i,), generator=random, dtype=(torch.int32, torch.int64)[i % 2])
        for i, kind in enumerate(order)
    ]
    floats = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
    wanted = [hvd.allreduce(tensor, op=op, name=f"oracle.{i}") for i, tensor in enumerate(tensors)]
    if floats:
        alone = hvd.grouped_allreduce(
            [tensors[i] for i in floats], name="alone", op=op, compression=APSCompressor(4, 3, transport=transport)
        )
        for i, result in zip(floats, alone):
            wanted[i] = result
    n_handles = len(mpi_ops._handle_map)
    compressor = APSCompressor(4, 3, transport=transport)
    for _ in range(2):
        given = [tensor.clone() for tensor in tensors]
        if in_place:
            compressed, contexts = zip(*map(compressor.compress, given))
            outputs = hvd.synchronize(hvd.grouped_allreduce_async_(compressed, name=name, op=op))
            results = [compressor.decompress(output, context) for output, context in zip(outputs, contexts)]
        else:
            results = hvd.grouped_allreduce(given, name=name, op=op, compression=compressor)
        for i, result in enumerate(results):
            assert type(result) is torch.Tensor and torch.equal(result, wanted[i]), i
            assert torch.equal(given[i], wanted[i] if in_place else tensors[i]), i
    assert len(mpi_ops._handle_map) == n_handles
    if name and transport == "packed":
        assert compressor.stats()["layers"].keys() == {f"mixed.{i}" for i in floats}


@pytest.mark.parametrize("fmt", [(4, 3), (5, 2)], ids=str)
def test_carrier_equals_simulation(fmt):
    """transport="allreduce": every value meets every other; 1 and 0.8125 made 0.5 of 0.90625 over Gloo."""
    grads, wanted = carrier_pairs(*fmt, hvd.size(), hvd.gloo_enabled())
    compressor = APSCompressor(*fmt, transport="allreduce")
    result = hvd.allreduce(to_torch(grads[hvd.rank()]), name="pairs", op=hvd.Sum, compression=compressor)
    assert_same_bits(to_numpy(result), wanted)


def test_sparse_tensors_are_refused():
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        with pytest.raises(TypeError, match=r"must be dense.*got torch.sparse_c.*sparse_as_dense=True"):
            hvd.allreduce(tensor, name="sparse", compression=APSCompressor(4, 3))


def test_class_instead_of_instance_is_named():
    """As one writes compression=hvd.Compression.fp16; in a hook of an optimizer it is the same call."""
    with pytest.raises(TypeError, match=r"not the class; write compression=APSCompressor\(e=4, m=3\)"):
        hvd.allreduce(torch.ones(5), name="class", compression=APSCompressor)


def test_error_feedback_wants_names():
    """Two tensors without a name would get each other's residuals."""
    with pytest.raises(ValueError, match=r"error_feedback must know.*give hvd.allreduce a name"):
        hvd.allreduce(torch.ones(5), compression=APSCompressor(3, 0, error_feedback=True))
    assert torch.all(hvd.allreduce(torch.ones(7), compression=APSCompressor(4, 3)) == 1)


def test_compressed_once_and_allreduced_again():
    """One after the other works; both at once would have one result stand for both."""
    compressor = APSCompressor(4, 3)
    wired, context = compressor.compress(torch.ones(5))
    for name in ("once.a", "once.b"):
        output = hvd.synchronize(hvd.allreduce_async(wired, op=hvd.Sum, name=name))
        assert compressor.decompress(output, context).tolist() == [hvd.size()] * 5
    handle = hvd.allreduce_async(wired, op=hvd.Sum, name="once.c")
    with pytest.raises(ValueError, match="compressed once and all-reduced twice"):
        hvd.allreduce_async(wired, op=hvd.Sum, name="once.d")
    assert compressor.decompress(hvd.synchronize(handle), context).tolist() == [hvd.size()] * 5


def test_compressed_tensor_looks_like_one():
    """Whoever is between `compress` and Horovod may ask it what one asks of a tensor."""
    compressor, x = APSCompressor(4, 3), torch.ones(3, 4)
    with torch.no_grad():
        wired, context = compressor.compress(x)
    assert type(wired) is Gradient
    assert (wired.shape, wired.numel(), wired.dtype, wired.device) == (x.shape, 12, x.dtype, x.device)
    assert wired.is_contiguous() and not wired.requires_grad and wired.new(2).shape == (2,)
    with pytest.raises(AttributeError, match="no_such_thing"):
        wired.no_such_thing  # noqa: B018
    result = compressor.decompress(hvd.allreduce_(wired, op=hvd.Sum, name="looks"), context)
    assert result is x and torch.all(x == hvd.size())
    mixed = [torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int32)]
    results = hvd.grouped_allreduce(mixed, op=hvd.Sum, name="looks.group", compression=compressor)
    assert all(type(one) is torch.Tensor and one.tolist() == [hvd.size()] * 2 for one in results)
    assert results[1].requires_grad
    (results[0] * results[1]).sum().backward()
    assert mixed[1].grad is not None and mixed[1].grad.tolist() == [hvd.size() ** 2] * 2


@pytest.mark.parametrize("transport", ["packed", "allreduce"])
def test_set_format_between_steps(transport):
    """Oracle: a compressor that had the new format from the start; a rank that is left behind is an error on all."""
    compressor, other = APSCompressor(4, 3, transport=transport), APSCompressor(3, 0, transport=transport)
    x = torch.randn(50, generator=torch.Generator().manual_seed(hvd.rank()))
    hvd.allreduce(x, name="x", compression=compressor)
    compressor.set_format(e=3, m=0)
    result = hvd.allreduce(x, name="x", compression=compressor)
    assert torch.equal(result, hvd.allreduce(x, name="y", compression=other))
    if hvd.rank() != 0:
        compressor.set_format(m=2)
    with pytest.raises(ValueError, match="all ranks must use the same"):
        hvd.allreduce(x, name="x", compression=compressor)
    if hvd.rank() == 0:
        compressor.set_format(m=2)
    assert not torch.equal(hvd.allreduce(x, name="x", compression=compressor), result)


@pytest.mark.parametrize("transport, ratio", [("packed", 0.25), ("allreduce", 0.5)])
def test_stats_report_what_was_sent(transport, ratio, tmp_path):
    compressor = APSCompressor(4, 3, stats=True, transport=transport)
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(hvd.rank()))
    hvd.allreduce(x, name="s", compression=compressor)
    stats = compressor.stats()
    assert ratio <= stats["ratio"] < ratio + 0.01
    assert 0.0 < stats["layers"]["s"]["relative_error"] < 0.04
    assert stats["layers"]["s"]["n_exchanges"] == 1 and stats["layers"]["s"]["exponent"] == 2
    assert 16_000 < sum(stats["layers"]["s"]["histogram"]) <= 16_392
    x[7] = torch.nan
    hvd.allreduce(x, name="s", compression=compressor)
    assert compressor.stats()["layers"]["s"]["n_nonfinite"] == 1
    compressor.report(tmp_path / "run.html")
    assert "<code>e=3, m=2</code>" in (tmp_path / "run.html").read_text()


@pytest.mark.slow
def test_allreduce_hundred_million_elements():
    """NaN in one element of 10^8 reaches every rank; without it the average is within the format's error."""
    compressor = APSCompressor(4, 3)
    x = torch.full((100_000_000,), 1.0 + hvd.rank())
    x[77_777_777] = 1e-3
    result = hvd.allreduce(x, name="huge", compression=compressor)
    mean = (hvd.size() + 1) / 2
    assert result[0] == pytest.approx(mean, rel=0.07) and torch.equal(result[:77_777_777].unique(), result[:1])
    assert torch.equal(result[77_777_778:].unique(), result[:1])
    if hvd.rank() == 0:
        x[99_999_999] = float("nan")
    assert torch.all(torch.isnan(hvd.allreduce(x, name="huge", compression=compressor)))
