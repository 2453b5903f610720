"""Laws of the layout: every element travels exactly once, nothing overlaps, shards are balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_aps.engine.layout import (
    MAX_LAYERS,
    PIECE,
    WORD,
    BucketLayout,
    LayerSpec,
    lay_out_bucket,
    plan_buckets,
    split_into_buckets,
)
from horovod_aps.formats import FLOAT32, FloatFormat, Format
from horovod_aps.kernels import SEGMENT, UNIT

E4M3 = FloatFormat(4, 3)
DESCRIBED = ("family", "codec", "exp_bits", "man_bits", "flags")


def spec(i: int, n: int, fmt: Format = E4M3) -> LayerSpec:
    return LayerSpec(f"layer{i}", (n,), i % 4, fmt)


def check(specs: list[LayerSpec], bucket: BucketLayout) -> None:
    """All laws that one bucket must obey; the oracle is counting element by element and byte by byte."""
    seen = {layer: np.zeros(specs[layer].n_elements, int) for layer in bucket.layers}
    used = np.zeros(int(bucket.shard_bytes[-1]), int)
    for shard in range(bucket.n_shards):
        for row in range(bucket.shard_segments[shard], bucket.shard_segments[shard + 1]):
            segment = bucket.segments[row]
            layer = bucket.layers[bucket.layer_of_segment[row]]
            fmt = specs[layer].format
            seen[layer][segment["first"] : segment["first"] + segment["n"]] += 1
            start, stop = segment["offset"], segment["offset"] + fmt.bytes_for(int(segment["n"]))
            used[start:stop] += 1
            assert bucket.shard_bytes[shard] <= start and stop <= bucket.shard_bytes[shard + 1]
            assert segment["first"] % UNIT == 0, "a segment must start on a whole byte of the codes"
            assert segment["n"] > 0 and segment["uid"] == layer
            described = np.zeros(1, SEGMENT)
            fmt.describe(described)
            assert all(segment[field] == described[field] for field in DESCRIBED)
            assert segment["dtype"] == specs[layer].dtype
    assert all(np.all(counts == 1) for counts in seen.values())
    assert np.all(used <= 1), "segments overlap"
    assert np.all(bucket.shard_bytes % WORD == 0), "a shard must start where a GPU can load whole words"
    assert np.sum(used == 0) < WORD * len(bucket.segments) or used.size == 0
    assert np.all(bucket.segments["offset"] % WORD == 0) and used.size % WORD == 0


@pytest.mark.parametrize("sizes", [(5,), (PIECE,), (PIECE + 1, 7), (3 * PIECE + 9, 10, PIECE - 20, 11)], ids=str)
def test_parts_cover_the_bucket_in_order(sizes):
    specs = [spec(i, n) for i, n in enumerate(sizes)]
    bucket = plan_buckets(specs, 2, 1000.0)[0]
    rows, spans = zip(*bucket.parts())
    for slices, end in ((rows, len(bucket.segments)), (spans, bucket.shard_bytes[-1])):
        assert [s.start for s in slices] == [0, *[s.stop for s in slices[:-1]]] and slices[-1].stop == end
    filled = [int(bucket.segments["n"][r].sum()) for r in rows]
    assert all(PIECE <= n < 3 * PIECE for n in filled[:-1]) and sum(filled) == sum(sizes)


formats = st.sampled_from(
    [FloatFormat(4, 3), FloatFormat(3, 0), FloatFormat(2, 2), FloatFormat(5, 10), FloatFormat(4, 3, False), FLOAT32]
)


@given(st.lists(st.tuples(st.integers(0, 300), formats), min_size=1, max_size=12), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_lay_out_bucket_sends_every_element_once(layers, n_shards):
    specs = [spec(i, n, fmt) for i, (n, fmt) in enumerate(layers)]
    check(specs, lay_out_bucket(specs, range(len(specs)), n_shards))


@pytest.mark.parametrize("n_shards", [2, 3, 4, 8])
@pytest.mark.parametrize("fmt", [FloatFormat(4, 3), FloatFormat(3, 0), FloatFormat(2, 2), FLOAT32], ids=str)
def test_lay_out_bucket_balances_shards(n_shards, fmt):
    """No shard is more than one unit of each of its two border segments away from an equal share."""
    specs = [spec(i, n, fmt) for i, n in enumerate((1000, 7, 250, 3, 1, 64, 9999))]
    bucket = lay_out_bucket(specs, range(len(specs)), n_shards)
    share = bucket.shard_bytes[-1] / n_shards
    assert np.all(np.abs(np.diff(bucket.shard_bytes) - share) <= 2 * fmt.bits + n_shards + WORD * len(specs))


def test_lay_out_bucket_three_elements_over_four_ranks():
    specs = [spec(0, 3)]
    bucket = lay_out_bucket(specs, [0], 4)
    check(specs, bucket)
    assert len(bucket.segments) == 1 and bucket.shard_bytes[-1] == WORD


def test_lay_out_bucket_of_nothing():
    bucket = lay_out_bucket([spec(0, 0)], [0], 3)
    assert len(bucket.segments) == 0 and np.all(bucket.shard_bytes == 0)


def test_shard_tables_count_from_their_own_message():
    specs = [spec(i, n) for i, n in enumerate((100, 3, 50))]
    bucket = lay_out_bucket(specs, range(3), 3)
    for shard in range(3):
        rows = slice(bucket.shard_segments[shard], bucket.shard_segments[shard + 1])
        table = bucket.shard_table(shard)
        assert table["offset"][0] == 0
        assert np.array_equal(table["offset"] + bucket.shard_bytes[shard], bucket.segments["offset"][rows])


@given(st.lists(st.integers(0, 1000), max_size=40), st.floats(0.0001, 0.01))
@settings(max_examples=100, deadline=None)
def test_split_into_buckets_keeps_order_and_limits(sizes, bucket_mb):
    specs = [spec(i, n) for i, n in enumerate(sizes)]
    buckets = split_into_buckets(specs, bucket_mb)
    assert [i for bucket in buckets for i in bucket] == list(range(len(specs)))
    for bucket in buckets:
        n_elements = sum(specs[i].n_elements for i in bucket)
        assert n_elements * 4 <= bucket_mb * 1e6 or len([i for i in bucket if sizes[i]]) == 1


def test_split_into_buckets_respects_the_exponent_message():
    buckets = split_into_buckets([spec(i, 1) for i in range(3 * MAX_LAYERS + 1)], 16.0)
    assert [len(bucket) for bucket in buckets] == [MAX_LAYERS] * 3 + [1]


@pytest.mark.parametrize("n_ranks, n_shards", [(1, 1), (2, 1), (3, 3), (4, 4), (8, 8)])
def test_plan_buckets_swaps_wholes_between_two_ranks_only(n_ranks, n_shards):
    assert plan_buckets([spec(0, 100)], n_ranks, 16.0)[0].n_shards == n_shards


def test_plan_buckets_handles_large_layers_without_their_memory():
    """10^10 elements: offsets must not wrap at 2^31 or 2^32."""
    bucket = plan_buckets([spec(0, 10**10)], 4, 16.0)[0]
    assert bucket.shard_bytes[-1] == 10**10 and np.all(np.diff(bucket.shard_bytes) > 2.4e9)


@pytest.mark.parametrize(
    "n, fmt, wanted",
    [(0, (4, 3), 0), (1, (1, 1), 1), (8, (1, 1), 3), (9, (1, 1), 4), (7, (4, 3), 7), (3, (3, 1), 2), (3, None, 12)],
)
def test_bytes_for_rounds_up_to_whole_bytes(n, fmt, wanted):
    assert (FLOAT32 if fmt is None else FloatFormat(*fmt)).bytes_for(n) == wanted
