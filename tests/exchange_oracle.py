"""Expected results of whole batches: `reference.simulate_exchange` fed with the cuts that the layout makes.

The arithmetic is the reference's alone; from `horovod_aps.engine.layout` come only the positions where layers are cut,
which `test_layout` checks on their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (makes NumPy know bfloat16)
import numpy as np
import reference

from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import LayerSpec, plan_buckets
from horovod_aps.formats import FLOAT32, FloatFormat
from horovod_aps.frontends.carrier import carrier_place
from horovod_aps.kernels import DTYPE_CODES, CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.hosts import HostedTransport
from horovod_aps.transports.local import LocalTransport

DTYPES = {name: np.dtype(name) for name in DTYPE_CODES}
CODES = {dtype: DTYPE_CODES[name] for name, dtype in DTYPES.items()}
SIZES = (0, 1, 3, 7, 8, 9, 1023, 1025)


def expected(
    grads_per_rank: Sequence[Mapping[str, np.ndarray]],
    formats: reference.Format | Mapping[str, reference.Format | None],
    *,
    factor: float = 1.0,
    mode: str = "float32",
    bucket_mb: float = 16.0,
    n_shards: int | None = None,
) -> dict[str, np.ndarray]:
    """What every rank gets for a batch whose layers rank 0 submitted in this order; `factor` includes 1/N.

    `n_shards` is into how many shards a bucket is cut, if not as for so many ranks.
    """
    first = grads_per_rank[0]
    by_name = dict(formats) if isinstance(formats, Mapping) else dict.fromkeys(first, formats)
    specs = [
        LayerSpec(name, x.shape, CODES[x.dtype], FLOAT32 if by_name[name] is None else FloatFormat(*by_name[name]))
        for name, x in first.items()
    ]
    results: dict[str, np.ndarray] = {}
    for bucket in plan_buckets(specs, len(grads_per_rank), bucket_mb, n_shards):
        names = [specs[layer].name for layer in bucket.layers]
        shards = [
            [
                reference.Piece(
                    names[bucket.layer_of_segment[row]], int(segment["first"]), int(segment["first"] + segment["n"])
                )
                for row, segment in enumerate(bucket.segments)
                if bucket.shard_segments[k] <= row < bucket.shard_segments[k + 1]
            ]
            for k in range(bucket.n_shards)
        ]
        part = [{name: grads[name] for name in names} for grads in grads_per_rank]
        results |= reference.simulate_exchange(part, by_name, op="sum", mode=mode, scale=factor, shards=shards)
    return results


def reduce_all(
    grads: Sequence[Mapping[str, np.ndarray]], exchanges: Sequence[Exchange], factor: float | None = None
) -> list[dict[str, np.ndarray]]:
    """Results of every emulated rank, an average unless there is a factor."""
    outs = [{name: np.full_like(x, 77) for name, x in rank.items()} for rank in grads]
    factor = 1 / len(grads) if factor is None else factor
    layers = [
        [
            Layer(name, x.shape, CODES[x.dtype], x.ctypes.data, out[name].ctypes.data, factor, (x, out))
            for name, x in rank.items()
        ]
        for rank, out in zip(grads, outs)
    ]
    local_allreduce(layers, exchanges[0].options, exchanges[0].kernels, exchanges)
    return outs


class Emulation:
    """All ranks of a job in this process, through the real exchange: the oracle of launched jobs in any format.

    What the exchange itself does is checked by the tests of the engine.
    """

    def __init__(self, n_ranks: int, options: Options) -> None:
        self._exchanges = [Exchange(CpuKernels(), one, options) for one in LocalTransport.world(n_ranks)]

    def step(self, grads: Sequence[Mapping[str, np.ndarray]], factor: float | None = None) -> dict[str, np.ndarray]:
        """What every rank gets of gradients that rank 0 hands in in this order."""
        outs = reduce_all(grads, self._exchanges, factor)
        for other in outs[1:]:
            check(other, outs[0])
        return outs[0]


def hosted_worlds(hosts: Sequence[str], why_flat: str = "") -> list[HostedTransport]:
    """One emulated rank for each name, which is that of its host."""
    return [HostedTransport(one, why_flat, host) for one, host in zip(LocalTransport.world(len(hosts)), hosts)]


def hosted_exchanges(hosts: Sequence[str], options: Options) -> list[Exchange]:
    """The exchanges of such ranks."""
    return [Exchange(CpuKernels(), world, options) for world in hosted_worlds(hosts, options.why_flat)]


def assert_same_bits(actual: Any, wanted: Any, what: str = "") -> None:
    """Equal dtype, shape and bits; any NaN equals any NaN."""
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, what
    nan = np.isnan(wanted.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float64)), nan, err_msg=what)
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    np.testing.assert_array_equal(actual[~nan].view(unsigned), wanted[~nan].view(unsigned), err_msg=what)


def check(actual: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """The same names, and the same bits under each."""
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert_same_bits(actual[name], wanted[name], name)


def make_gradients(
    sizes: Sequence[int], n_ranks: int, dtype: str = "float32", seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Per rank one gradient of each size; neighbouring layers differ in scale by powers of ten."""
    grads: list[dict[str, np.ndarray]] = []
    low = {"float16": -3, "bfloat16": -30, "float32": -30, "float64": -30}[dtype]
    for rank in range(n_ranks):
        rng = np.random.default_rng([seed, rank])
        grads.append({})
        for i, size in enumerate(sizes):
            scale = 10.0 ** (low + (i * 13) % (-2 * low))
            with np.errstate(over="ignore"):
                grads[-1][f"layer{i}"] = (rng.standard_normal(size) * scale).astype(DTYPES[dtype])
    return grads


def carrier_pairs(e: int, m: int, size: int, over_gloo: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Gradients of all ranks in which every (e, m) value meets every other, and what transport="allreduce" sums to.

    Only two ranks have values, so that the order of additions, which is Horovod's, does not matter.
    """
    fmt = FloatFormat(e, m)
    values = fmt.decode(np.arange(2**fmt.bits, dtype=fmt.code_dtype))
    values = values[np.isfinite(values)] + np.float32(0)  # -0 is left out: the zeros of more ranks change its sign
    grads = [np.repeat(values, values.size), np.tile(values, values.size)]
    grads += [np.zeros_like(grads[0])] * (size - 2)
    place = carrier_place(Options(e, m), size, over_gloo)
    shift = place.top - fmt.max_exponent
    total = np.ldexp(np.sum(grads, axis=0, dtype=np.float64), shift)
    total = total.astype(DTYPES["float16" if place.dtype else "float32"])
    return grads, np.ldexp(total.astype(np.float64), -shift).astype(np.float32)
