"""Foreign and truncated bytes at the two places that parse text from other ranks.

Oracle: whatever the bytes, the answer for a well-formed proposal or one ValueError that says which rank.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from horovod_aps.engine.agreement import most_advanced, parse_all, proposal, settle, spec_of
from horovod_aps.engine.auto import AutoChooser
from horovod_aps.engine.layer import Layer
from horovod_aps.options import Options

OPTIONS = Options(4, 3)
LAYERS = [Layer("w", (3, 4), 0, 0, 0, 0.5), Layer("b", (4,), 2, 0, 0, 0.5)]
GOOD = proposal([spec_of(layer, OPTIONS, False) for layer in LAYERS], [layer.factor for layer in LAYERS], OPTIONS)
PARTS = sorted(json.loads(GOOD))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
DEEP = b"[" * 200_000


def settles_or_explains(messages: list[bytes]) -> None:
    try:
        proposals = parse_all(messages)
        most_advanced(proposals)
        names = settle(proposals)
    except ValueError as error:
        assert str(error).startswith("APSCompressor: ") and "rank" in str(error)
    else:
        assert names == json.loads(messages[0])["order"]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
@example(b"", True)
@example(b"\xff\xfe", False)
@example(DEEP, True)
@example(b"9" * 5000, True)
def test_settle_any_bytes(raw, in_front):
    """The good message is on the other rank, which must not matter."""
    with pytest.raises(ValueError, match=f"message of rank {0 if in_front else 1} is truncated or not of"):
        parse_all([raw, GOOD] if in_front else [GOOD, raw])


@settings(max_examples=300, deadline=None)
@given(JSON, st.dictionaries(st.sampled_from(PARTS), JSON))
def test_settle_any_json(anything, some_parts):
    for entry in (anything, some_parts, dict.fromkeys(PARTS) | some_parts, json.loads(GOOD) | some_parts):
        message = json.dumps(entry).encode()
        settles_or_explains([message, GOOD])
        settles_or_explains([GOOD, message])
        settles_or_explains([message, message])


@pytest.mark.parametrize("path", [*PARTS, "layers.w", "layers.w.shape", "options.e", "factors.w"])
@settings(max_examples=60, deadline=None)
@given(value=JSON)
def test_settle_one_part_replaced(path, value):
    entry: dict[str, Any] = json.loads(GOOD)
    *way, last = path.split(".")
    holder = entry
    for part in way:
        holder = holder[part]
    holder[last] = value
    message = json.dumps(entry).encode()
    settles_or_explains([GOOD, message])
    settles_or_explains([message, message])


@pytest.mark.parametrize("path", [*PARTS, "layers.w", "layers.w.shape", "factors.w"])
def test_parse_notices_a_part_that_is_missing(path):
    entry: dict[str, Any] = json.loads(GOOD)
    *way, last = path.split(".")
    holder = entry
    for part in way:
        holder = holder[part]
    del holder[last]
    with pytest.raises(ValueError, match="message of rank 1 is truncated or not of"):
        parse_all([GOOD, json.dumps(entry).encode()])


def test_settle_every_truncation():
    for n in range(len(GOOD)):
        with pytest.raises(ValueError, match="message of rank 1 is truncated"):
            parse_all([GOOD, GOOD[:n]])


def test_settle_flipped_bytes():
    rng = random.Random(7)
    for _ in range(2000):
        raw = bytearray(GOOD)
        for _ in range(rng.choice([1, 1, 2, 8])):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        settles_or_explains([GOOD, bytes(raw)])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(DEEP)
@example(b'{"w": 6}')
@example(b'{"w": -1}')
@example(b'{"w": true}')
@example(b'{"w": 1e400}')
def test_auto_proposals_any_bytes(raw):
    """Six candidates, so only indices 0..5 are ours."""
    chooser = AutoChooser(Options(4, 3, overrides="auto"))
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    ours = isinstance(value, dict) and all(type(i) is int and 0 <= i <= 5 for i in value.values())
    if ours:
        assert set(chooser.settle([b"{}", raw])) == set(value)
    else:
        with pytest.raises(ValueError, match="the formats that rank 1 proposes are truncated"):
            chooser.settle([b"{}", raw])
