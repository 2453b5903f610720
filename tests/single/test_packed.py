"""Any format as a compressor's own: options, state, and the exchange of every exported format among emulated ranks.

Oracles: the same exchange of one format at a time, NumPy where a format has an arithmetic of its own here, and
APSCompressor for FloatFormat.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import numpy as np
import pytest
from all_formats import every_format, options_for
from exchange_oracle import SIZES, check, hosted_exchanges, make_gradients, reduce_all

from horovod_aps import formats
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.formats import FloatFormat, Format, HostFormat
from horovod_aps.kernels import EXP_ZERO, NEAREST, SEGMENT, CpuKernels, codecs
from horovod_aps.options import Options
from horovod_aps.tools import report
from horovod_aps.torch import APSCompressor, PackedCompressor
from horovod_aps.transports.local import LocalTransport


# ---- formats that round in one way only -------------------------------------------------------------------
@dataclass(frozen=True)
class Coin(HostFormat):
    """Multiples of a 7th of the largest, drawn at random."""

    bits = 8
    rounding = "stochastic"
    text = "coin"

    def side_bytes(self, n_elements: int) -> int:
        return 4

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Format:
        if text != cls.text:
            raise ValueError(text)
        return cls()

    def encode_segment(self, values, exponent, random):
        top = np.float32(np.abs(values).max())
        draw = 0.5 if random is None else random / 2.0**31
        codes = np.clip(np.floor(values / float(top or 1) * 7 + draw), -7, 7).astype(np.int8)
        return np.concatenate([top.reshape(1).view(np.uint8), codes.view(np.uint8)])

    def decode_segment(self, data, n_elements, exponent):
        return float(data[:4].view(np.float32)[0]) / 7 * data[4:].view(np.int8)


@dataclass(frozen=True)
class Still(Coin):
    """The same, always to nearest."""

    rounding = "nearest"
    text = "still"


@dataclass(frozen=True)
class Rows(Coin):
    """Knows the length of a layer's rows, and cannot do without error feedback."""

    rounding = "option"
    text = "rows"
    needs_error_feedback = True
    width: int = 0

    def for_shape(self, shape):
        return Rows(shape[-1] if len(shape) > 1 else 1)

    def __str__(self) -> str:
        return f"rows{self.width or ''}"

    @classmethod
    def parse(cls, text: str) -> Format:
        if not text.startswith("rows"):
            raise ValueError(text)
        return cls(int(text[4:] or 0))


def exchanges_of(n_ranks: int, options: Options) -> list[Exchange]:
    return [Exchange(CpuKernels(), transport, options) for transport in LocalTransport.world(n_ranks)]


def steps(grads, options: Options, n_steps: int = 2) -> list[dict[str, np.ndarray]]:
    """Rank 0's results of each step; all ranks have the same bits."""
    exchanges, results = exchanges_of(len(grads), options), []
    for _ in range(n_steps):
        outs = reduce_all(grads, exchanges)
        for other in outs[1:]:
            check(other, outs[0])
        results.append(outs[0])
    return results


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_stochastic_format_draws_although_the_others_round_to_nearest(n_ranks: int) -> None:
    """Oracle for the others: the same batch in which the layer is float32 of as many bytes per shard, or absent."""
    grads = make_gradients((64, 40), n_ranks)
    mixed = Options(4, 3, overrides={"layer1": Coin()}, seed=3)
    first, second = steps(grads, mixed)
    assert not np.array_equal(first["layer1"], second["layer1"]), "no new draw"
    if n_ranks == 2:  # in one shard: layers are cut as without the other
        alone = steps([{"layer0": rank["layer0"]} for rank in grads], Options(4, 3))
        check({"layer0": first["layer0"]}, alone[0])
    check({"layer0": first["layer0"]}, {"layer0": second["layer0"]})
    for ours, again in zip(steps(grads, mixed), (first, second), strict=True):
        check(ours, again)
    other = steps(grads, mixed.replace(seed=4))[0]
    assert not np.array_equal(other["layer1"], first["layer1"])


def test_a_stochastic_format_is_unbiased_beside_rounding_to_nearest() -> None:
    grads = [{"w": np.linspace(-1, 1, 33, dtype=np.float32)} for _ in range(2)]
    total = np.mean([out["w"] for out in steps(grads, Options(format=Coin()), 400)], axis=0)
    assert np.abs(total - grads[0]["w"]).max() < 6 * 0.5 / 7 / np.sqrt(800)  # six standard errors at most


def test_a_format_that_rounds_to_nearest_does_so_beside_stochastic_ones() -> None:
    grads = make_gradients((64, 40), 2)
    options = Options(4, 3, rounding="stochastic", overrides={"layer1": Still()})
    first, second = steps(grads, options)
    assert not np.array_equal(first["layer0"], second["layer0"])
    check({"layer1": first["layer1"]}, {"layer1": second["layer1"]})
    wanted = steps([{"layer1": rank["layer1"]} for rank in grads], Options(format=Still()))[0]
    check({"layer1": first["layer1"]}, wanted)


@pytest.mark.parametrize("fmt", [(4, 3), (3, 0), (8, 23), (2, 12)], ids=str)
def test_kernels_round_marked_segments_to_nearest(fmt: tuple[int, int]) -> None:
    """Oracle: the same calls without a seed, which existing tests check."""
    rng = np.random.default_rng(fmt)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (9, 5000, 1, 0)]
    found = []
    for seed, flag in ((None, 0), (None, NEAREST), (17, NEAREST), (17, 0)):
        segs, offset = np.zeros(len(arrays), SEGMENT), 0
        FloatFormat(*fmt).describe(segs)
        segs["flags"] |= flag
        for row, array in zip(segs, arrays):
            row["data"], row["n"], row["offset"], row["factor"] = array.ctypes.data, array.size, offset, 1
            offset += FloatFormat(*fmt).bytes_for(array.size)
        kernels, message, out = CpuKernels(), np.zeros(offset, np.uint8), np.zeros(offset, np.uint8)
        kernels.scan(segs, stochastic=seed is not None)
        exponents = segs["exponent"].copy()
        kernels.encode(segs, message, seed)
        kernels.reduce(segs, [message, message, message], 0, out, seed)
        found.append([exponents.tolist(), message.tobytes(), segs["exponent"].tolist(), out.tobytes()])
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0]


def test_python_codecs_round_marked_segments_to_nearest() -> None:
    x = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    segs, messages = np.zeros(1, SEGMENT), []
    Coin().describe(segs)
    segs["data"], segs["n"] = x.ctypes.data, 50
    for seed, flag in ((None, 0), (5, NEAREST), (5, 0)):
        segs["flags"] = flag
        messages.append(np.zeros(54, np.uint8))
        CpuKernels().encode(segs, messages[-1], seed)
    assert np.array_equal(messages[0], messages[1]) and not np.array_equal(messages[0], messages[2])


# ---- every exported format --------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_every_format_is_read_from_its_text(fmt: Format) -> None:
    assert formats.parse(str(fmt)) == fmt and hash(formats.parse(str(fmt))) == hash(fmt)
    wanted = fmt if not isinstance(fmt, FloatFormat) else None
    assert Options(format=str(fmt), **options_for(fmt)).format == wanted


@pytest.mark.parametrize("n_ranks, hosts", [(2, 1), (3, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_every_format_keeps_replicas_equal_and_repeats(fmt: Format, n_ranks: int, hosts: int) -> None:
    """Sizes that break things, feedback and statistics on, flat and in two levels; two runs have the same bits."""
    shapes = {"empty": (0, 3), "one": (1,), "row": (7,), "matrix": (33, 65), "conv": (8, 3, 3, 3)}
    rng = np.random.default_rng(n_ranks)
    grads = [
        {name: (rng.standard_normal(shape) * 0.01).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(n_ranks)
    ]
    names = [f"h{rank * hosts // n_ranks}" for rank in range(n_ranks)]
    options = Options(format=fmt, error_feedback=True, stats=True, bucket_mb=0.005)
    runs = []
    for _ in range(2):
        exchanges = hosted_exchanges(names, options) if hosts > 1 else exchanges_of(n_ranks, options)
        for _ in range(3):
            outs = reduce_all(grads, exchanges)
            for other in outs[1:]:
                check(other, outs[0])
        runs.append(outs[0])
    check(*runs)
    for name in ("row", "matrix"):
        mean = np.mean([rank[name] for rank in grads], axis=0)
        assert np.linalg.norm(runs[0][name] - mean) < 2 * np.linalg.norm(mean), name
    figures = exchanges[0].statistics.as_dict()
    assert json.dumps(figures) and figures["layers"]["matrix"]["relative_error"] is not None
    n_elements = sum(x.size for x in grads[0].values())
    ours = figures["bytes_sent"] / figures["bytes_fp32"]
    assert ours < (fmt.bytes_for(1 << 16) / (4 << 16)) + 0.6 * hosts + 1000 / n_elements


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_every_format_keeps_zeros_nan_inf_and_their_neighbours(fmt: Format, n_ranks: int) -> None:
    ones = {name: np.ones(40, np.float32) for name in ("zeros", "nan", "inf", "fine", "one")} | {
        "single": np.full(1, 2.0, np.float32),
        "empty": np.zeros(0, np.float32),
    }
    grads = [copy.deepcopy(ones) for _ in range(n_ranks)]
    for rank in grads:
        rank["zeros"][:] = 0
    grads[1]["nan"][7], grads[0]["inf"][39] = np.nan, -np.inf
    for out in steps(grads, Options(format=fmt, **options_for(fmt)), 1):
        assert not out["zeros"].any() and out["empty"].size == 0
        if fmt.scale == "none":
            assert np.isnan(out["nan"][7]) and out["inf"][39] == -np.inf
        else:
            assert np.isnan(out["nan"]).all() and np.isnan(out["inf"]).all()
        np.testing.assert_allclose(out["fine"], 1, rtol=0.34)  # e3m0 has no 3
        np.testing.assert_allclose(out["single"], 2, rtol=0.34)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_every_format_takes_every_dtype(fmt: Format, dtype: str) -> None:
    """Oracle: the same values in float32, as far as the dtype holds the result."""
    grads = make_gradients(SIZES, 2, "float16")
    grads = [{name: x.astype(np.float32) for name, x in rank.items()} for rank in grads]
    if dtype == "bfloat16":
        grads = [{name: x.astype(dtype).astype(np.float32) for name, x in rank.items()} for rank in grads]
    options = Options(format=fmt, **options_for(fmt))
    wanted = steps(grads, options, 1)[0]
    found = steps([{name: x.astype(dtype) for name, x in rank.items()} for rank in grads], options, 1)[0]
    for name, x in wanted.items():
        scale = np.abs(x).max(initial=0)
        atol = float(scale) * {"float64": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        np.testing.assert_allclose(found[name].astype(np.float64), x, rtol=8e-3, atol=atol)


# ---- options, state, messages -----------------------------------------------------------------------------


def test_a_float_format_is_what_e_and_m_say() -> None:
    ours, theirs = Options(format=FloatFormat(5, 2, specials=False)), Options(5, 2, specials=False)
    assert ours == theirs and ours.fingerprint() == theirs.fingerprint()
    assert "format" not in theirs.fingerprint() and "who" not in theirs.fingerprint()
    assert Options(format="e4m3").default_format == FloatFormat(4, 3)
    other = Options(format=Coin())
    assert other.fingerprint()["format"] == "coin" and "e" not in other.fingerprint()
    assert other.default_format == Coin() and other.replace(e=4, m=3, format=None) == Options(4, 3)


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        ((None,), {}, TypeError, "PackedCompressor: format must be"),
        ((7,), {}, TypeError, "PackedCompressor: format must be a format of horovod_aps.formats or its text"),
        (("e9m9",), {}, ValueError, "PackedCompressor: format must be .* got 'e9m9'"),
        (("e4m3",), {"e": 4}, TypeError, "PackedCompressor: no option is called e; there are accumulate"),
        (("e4m3",), {"rounding": "up"}, ValueError, "PackedCompressor: rounding must be one of"),
        (("coin",), {"accumulate": "kahan"}, ValueError, "PackedCompressor: format is coin, for which accumulate must"),
        (("coin",), {"transport": "allreduce"}, ValueError, 'PackedCompressor: transport="allreduce" .* use transport'),
        (("rows",), {}, ValueError, "PackedCompressor: format is rows.*pass error_feedback=True"),
        (("e4m3",), {"overrides": {"w": Rows()}}, ValueError, "overrides\\['w'\\] is rows.*pass error_feedback=True"),
        (("e4m3",), {"auto_candidates": ["rows"]}, ValueError, "auto_candidates entry is rows.*error_feedback=True"),
    ],
)
def test_packed_compressor_refuses(arguments, options, error, words) -> None:
    with pytest.raises(error, match=words):
        PackedCompressor(*arguments, **options)


def test_compressors_show_their_format() -> None:
    assert repr(PackedCompressor("e4m3")) == "PackedCompressor('e4m3')"
    assert repr(PackedCompressor(Coin())) == "PackedCompressor('coin')"
    changed = APSCompressor(4, 3)
    assert repr(changed) == "APSCompressor(e=4, m=3)" and isinstance(changed, PackedCompressor)
    changed.set_format(format=Coin())
    assert repr(changed) == "APSCompressor('coin')"


def test_set_format_takes_any_format_and_comes_back_from_a_checkpoint() -> None:
    first = PackedCompressor("coin", seed=3)
    first.set_format(format=FloatFormat(3, 2, specials=False), overrides={"a": Still(), "b": (5, 2), "c": "float32"})
    state = json.loads(json.dumps(first.state_dict()))
    again = PackedCompressor("coin", seed=3)
    again.load_state_dict(state)
    assert again._options == first._options
    assert again._options.default_format == FloatFormat(3, 2, specials=False)
    assert again._options.format_for("a", 1) == Still()
    first.set_format(format="still")
    assert first._options.default_format == Still() and first._options.e == 0
    first.set_format(4, 3)
    assert (first._options.e, first._options.m, first._options.format) == (4, 3, None)
    with pytest.raises(ValueError, match="e and m, or format"):
        first.set_format(4, 3, format="e4m3")
    fresh = PackedCompressor("coin")
    with pytest.raises(ValueError, match="PackedCompressor: m must"):
        fresh.set_format(e=1)


def test_set_format_reaches_the_exchange_between_steps() -> None:
    grads = make_gradients((64,), 2)
    exchanges = exchanges_of(2, Options(4, 3))
    reduce_all(grads, exchanges)
    for exchange in exchanges:
        exchange.change({"format": Still(), "e": 0, "m": 0})
    check(reduce_all(grads, exchanges)[0], steps(grads, Options(format=Still()), 1)[0])


def test_copies_keep_the_format() -> None:
    again = copy.deepcopy(PackedCompressor("coin", seed=9))
    assert isinstance(again, PackedCompressor) and again._options == Options(format=Coin(), seed=9)


def test_formats_see_the_shape_of_a_layer() -> None:
    grads = [{"w": np.ones((3, 5), np.float32), "b": np.ones(4, np.float32)} for _ in range(2)]
    exchanges = exchanges_of(2, Options(format=Rows(), error_feedback=True))
    reduce_all(grads, exchanges)
    layers = exchanges[0].statistics.as_dict()["layers"]
    assert {name: layer["format"] for name, layer in layers.items()} == {"w": "rows5", "b": "rows1"}


def test_ranks_with_different_formats_all_raise() -> None:
    grads = make_gradients((64,), 2)
    exchanges = [
        Exchange(CpuKernels(), transport, Options(format=fmt, who="PackedCompressor"))
        for transport, fmt in zip(LocalTransport.world(2), (Coin(), Still()))
    ]
    layers = [
        Layer(name, x.shape, 0, x.ctypes.data, x.ctypes.data, 1.0, x) for rank in grads for name, x in rank.items()
    ]
    running = []
    for exchange, layer in zip(exchanges, layers):
        exchange.submit(layer)
        running.append(exchange.steps([layer]))
    failures = []
    for _ in range(100):
        for one in list(running):
            try:
                next(one)
            except ValueError as error:
                failures.append(str(error))
                running.remove(one)
    assert len(failures) == 2 and failures[0] == failures[1]
    assert failures[0].startswith("PackedCompressor: option format is 'coin' on rank 0 and 'still' on rank 1")


def test_auto_chooses_among_all_families() -> None:
    """With candidates of every family the smallest that keeps the bound wins; layers of zeros are left alone."""
    rng = np.random.default_rng(0)
    grads = [{"w": rng.standard_normal((40, 50)).astype(np.float32), "zero": np.zeros(9, np.float32)} for _ in range(2)]
    candidates = [*every_format(), Coin()]
    options = Options(
        4, 3, overrides="auto", auto_steps=2, auto_error=0.1, auto_candidates=candidates, error_feedback=True
    )
    exchanges = exchanges_of(2, options)
    for _ in range(2):
        reduce_all(grads, exchanges)
    chosen = exchanges[0].chosen
    assert chosen is not None and chosen == exchanges[1].chosen and set(chosen) == {"w"}
    fmt = exchanges[0].options.format_for("w", 2000)
    error = exchanges[0].statistics
    reduce_all(grads, exchanges)
    assert error.as_dict()["layers"]["w"]["format"] == fmt.for_shape((40, 50)).name
    assert fmt.bytes_for(1 << 16) <= FloatFormat(4, 3).bytes_for(1 << 16)


@pytest.mark.parametrize("fmt", every_format(), ids=str)
def test_every_format_is_counted_in_the_report(fmt: Format) -> None:
    assert report._n_bits(fmt.name) == pytest.approx(fmt.bytes_for(1 << 20) / (1 << 17), rel=1e-4)


def test_the_segment_of_an_empty_layer_is_left_alone() -> None:
    assert codecs.number_of(Coin()) == codecs.number_of(Coin())
    segs = np.zeros(1, SEGMENT)
    Coin().describe(segs)
    segs["flags"] = NEAREST
    CpuKernels().scan(segs)
    assert segs["exponent"][0] == EXP_ZERO
