"""The options: what is accepted, what each wrong value raises, and which format a layer gets."""

from __future__ import annotations

import json
import re

import pytest

from horovod_aps.formats import FLOAT32, FloatFormat
from horovod_aps.options import Options, as_format


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"e": 0}, ValueError, "must be in 1..8, got 0"),
        ({"e": 9}, ValueError, "must be in 1..8, got 9"),
        ({"m": -1}, ValueError, "must be in 0..23, got -1"),
        ({"m": 24}, ValueError, "must be in 0..23, got 24"),
        ({"e": 4.5}, TypeError, "must be an int"),
        ({"m": "3"}, TypeError, "must be an int"),
        ({"e": True}, TypeError, "must be an int"),
        ({"rounding": "up"}, ValueError, "rounding must be one of 'nearest', 'stochastic', got 'up'"),
        ({"accumulate": "double"}, ValueError, "accumulate must be one of 'float32', 'format', 'kahan', got 'double'"),
        ({"transport": "tcp"}, ValueError, "transport must be one of 'packed', 'allreduce', got 'tcp'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 1.5}, TypeError, "seed must be an int, got float"),
        ({"min_elements": -1}, ValueError, "min_elements must be at least 0, got -1"),
        ({"warmup_steps": -3}, ValueError, "warmup_steps must be at least 0, got -3"),
        ({"error_feedback": 1}, TypeError, "error_feedback must be True or False, got 1"),
        ({"scaling": "no"}, TypeError, "scaling must be True or False, got 'no'"),
        ({"stats": None}, TypeError, "stats must be True or False, got None"),
        ({"bucket_mb": 0}, ValueError, "bucket_mb must be in (0, 4096], got 0"),
        ({"bucket_mb": 5000}, ValueError, "bucket_mb must be in (0, 4096], got 5000"),
        ({"bucket_mb": float("nan")}, ValueError, "bucket_mb must be in (0, 4096], got nan"),
        ({"bucket_mb": "16"}, TypeError, "bucket_mb must be a number, got str"),
        ({"overrides": "all"}, ValueError, "overrides must be a dict or \"auto\", got 'all'"),
        ({"overrides": [("a", (4, 3))]}, TypeError, 'overrides must be a dict or "auto", got list'),
        ({"overrides": {3: (4, 3)}}, TypeError, "overrides keys must be name patterns, got 3"),
        ({"overrides": {"w": "fp8"}}, ValueError, "overrides['w'] must be an (e, m) pair or \"float32\", got 'fp8'"),
        ({"overrides": {"w": (0, 3)}}, ValueError, "must be in 1..8, got 0"),
        ({"auto_candidates": None}, TypeError, "auto_candidates must be a sequence of formats, got None"),
        ({"auto_candidates": "e4m3"}, TypeError, "auto_candidates must be a sequence of formats, got 'e4m3'"),
        ({"transport": "allreduce", "e": 6}, ValueError, "carries values in float16"),
        ({"transport": "allreduce", "m": 11}, ValueError, "carries values in float16"),
        ({"transport": "allreduce", "error_feedback": True}, ValueError, "does not support error_feedback=True"),
        ({"transport": "allreduce", "hierarchy": "two-level"}, ValueError, 'hierarchy must be "auto" or "flat"'),
        ({"hierarchy": "three-level"}, ValueError, "hierarchy must be one of 'auto', 'flat', 'two-level'"),
        ({"transport": "allreduce", "accumulate": "kahan"}, ValueError, "does not support accumulate='kahan'"),
    ],
    ids=str,
)
def test_options_refuse_wrong_values(changes, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Options(**({"e": 4, "m": 3} | changes))


def test_options_refuse_a_format_without_numbers():
    with pytest.raises(ValueError):
        Options(1, 0)
    assert Options(1, 0, specials=False).default_format == FloatFormat(1, 0, False)


def test_options_accept_numpy_integers():
    import numpy as np

    options = Options(np.int64(4), np.int32(3))
    assert type(options.e) is int and json.dumps(options.fingerprint())


@pytest.mark.parametrize(
    "name, n, wanted",
    [
        ("conv1.weight", 1000, FloatFormat(4, 3)),
        ("conv1.bias", 1000, FLOAT32),
        ("fc.weight", 1000, FloatFormat(5, 2)),
        ("fc.bias", 1000, FLOAT32),  # the first match wins
        ("conv1.weight", 99, FLOAT32),  # by size
        ("fc.weight", 99, FloatFormat(5, 2)),  # an override beats min_elements
    ],
)
def test_format_for_takes_first_override_then_size(name, n, wanted):
    options = Options(4, 3, min_elements=100, overrides={"*.bias": "float32", "fc.*": (5, 2)})
    assert options.format_for(name, n) == wanted


def test_overrides_inherit_specials():
    assert Options(4, 3, specials=False, overrides={"w": (5, 2)}).format_for("w", 1) == FloatFormat(5, 2, False)
    assert as_format(FloatFormat(5, 2), False, "x") == FloatFormat(5, 2, True)


@pytest.mark.parametrize("fmt", [FLOAT32, FloatFormat(4, 3), FloatFormat(2, 1, specials=False)], ids=str)
def test_overrides_take_a_format_as_text_and_as_itself(fmt):
    ours = [Options(4, 3, overrides={"w": value}) for value in (fmt, str(fmt))]
    assert [options.format_for("w", 1) for options in ours] == [fmt, fmt]
    assert ours[0].fingerprint() == ours[1].fingerprint()


def test_replace_checks_again():
    assert Options(4, 3).replace(m=2).m == 2
    with pytest.raises(ValueError, match=r"1\.\.8"):
        Options(4, 3).replace(e=0)


def test_fingerprint_is_plain_json_and_leaves_out_what_ranks_may_differ_in():
    ours = Options(4, 3, overrides={"w": (5, 2)}, stats=True).fingerprint()
    assert json.loads(json.dumps(ours)) == ours
    assert ours == Options(4, 3, overrides={"w": [5, 2]}).fingerprint()
    assert "stats" not in ours
