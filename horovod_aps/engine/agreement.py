"""How ranks make sure that they mean the same batch before any packed byte is read.

A batch is described by its layers and the compressor's options. Ranks compare full descriptions (JSON, parsed
and never executed) in a talk, when a batch is new or when digests differ; what all of them hold is reduced next, and
all raise the same error if they disagree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from horovod_aps import __version__
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import LayerSpec
from horovod_aps.formats import FLOAT32
from horovod_aps.kernels import DTYPE_NAMES
from horovod_aps.options import Options

LAYER_KEYS = {"shape", "dtype", "format", "specials", "group_size"}
MAX_NAMED = 4  # tensors in one message
REFUSED = "\0refused "  # before what a rank says instead of the name of a tensor that it cannot hand in
MAX_PROPOSAL = 1 << 28  # bytes; half a million layers need less


def spec_of(layer: Layer, options: Options, warm: bool) -> LayerSpec:
    """What ranks compare about a layer; during warm-up all layers travel as float32."""
    shape = tuple(layer.shape)
    fmt = FLOAT32 if warm else options.format_for(layer.shown, math.prod(shape)).for_shape(shape)
    draws = options.is_stochastic(fmt)
    return LayerSpec(layer.name, shape, layer.dtype_code, fmt, layer.label, layer.group_size, draws)


def _plain(spec: LayerSpec) -> dict[str, Any]:
    return {
        "shape": list(spec.shape),
        "dtype": DTYPE_NAMES[spec.dtype],
        "format": spec.format.name,
        "specials": spec.format.specials,
        "group_size": spec.group_size,
    }


def describe(specs: Iterable[LayerSpec], options: Options) -> str:
    """A text that is equal on two ranks exactly if they mean the same batch."""
    layers = {spec.name: _plain(spec) for spec in specs}
    return json.dumps({"version": __version__, "options": options.fingerprint(), "layers": layers}, sort_keys=True)


def digest(description: str) -> bytes:
    """Sixteen bytes that stand for a description in a header."""
    return hashlib.sha256(description.encode()).digest()[:16]


def digest_words(description: str) -> tuple[int, int]:
    """Two non-negative 31-bit words that stand for a description."""
    raw = hashlib.sha256(description.encode()).digest()
    return int.from_bytes(raw[:4], "little") >> 1, int.from_bytes(raw[4:8], "little") >> 1


@dataclass(frozen=True)
class Proposal:
    """What a rank says in a talk: what it holds, in its own order, and where it stands."""

    version: str
    options: dict[str, Any]
    layers: dict[str, dict[str, Any]]
    order: list[str]
    factors: dict[str, float]
    step_number: int
    chosen: dict[str, Any] | None
    """What overrides="auto" has settled on, if it has."""
    waits: bool
    """Whether the rank waits for this: it hands in nothing more until it has its results."""
    whole: bool
    """Whether this is a whole batch: no other rank may hold more or less."""

    def encode(self) -> bytes:
        return json.dumps(vars(self), sort_keys=True).encode()


def proposal(
    specs: Sequence[LayerSpec],
    factors: Sequence[float],
    options: Options,
    *,
    step_number: int = 0,
    chosen: Mapping[str, Any] | None = None,
    waits: bool = True,
    whole: bool = True,
) -> bytes:
    """This rank's part in a talk, as bytes; `specs` are in its own order of arrival."""
    names = [spec.name for spec in specs]
    return Proposal(
        __version__,
        options.fingerprint(),
        {spec.name: _plain(spec) for spec in specs},
        names,
        dict(zip(names, factors)),
        step_number,
        None if chosen is None else dict(chosen),
        waits,
        whole,
    ).encode()


def parse_all(messages: Sequence[bytes]) -> list[Proposal]:
    """The proposals of all ranks; ValueError, with the same text on all ranks, names one that cannot be read."""
    known: dict[bytes, Proposal] = {}  # most are equal, and reading takes long
    for rank, raw in enumerate(messages):
        if raw not in known:
            known[raw] = _parse(raw, rank)
    return [known[raw] for raw in messages]


def most_advanced(proposals: Sequence[Proposal]) -> tuple[int, dict[str, Any] | None] | None:
    """The position that all ranks should go on from, None if they already are at the same one.

    A worker that joins an elastic job knows nothing of the steps before it.
    """
    first = proposals[0]
    if all((other.step_number, other.chosen) == (first.step_number, first.chosen) for other in proposals):
        return None
    best = max(proposals, key=lambda one: (one.chosen is not None, one.step_number))
    return max(one.step_number for one in proposals), best.chosen


def settle(proposals: Sequence[Proposal]) -> list[str]:
    """The layers to reduce next, in rank 0's order: those that every rank holds.

    Raises ValueError, with the same text on all ranks, that names the ranks and both values if they do not mean the
    same, or if all wait for something that not all hold.
    """
    first = proposals[0]
    for rank, other in enumerate(proposals):
        for name in other.layers:
            if name.startswith(REFUSED):
                raise ValueError(f"APSCompressor: rank {rank} refuses its arguments: {name.removeprefix(REFUSED)}")
    for rank, other in enumerate(proposals):
        if other is not first and (difference := _difference(first, other, rank)):
            raise ValueError(f"APSCompressor: {difference}")
    if first.version != __version__:
        raise _foreign(0, f"version {first.version!r}")
    common = set(first.layers).intersection(*(other.layers for other in proposals))
    stuck = not common and all(one.waits for one in proposals)
    if stuck or any(one.whole for one in proposals):
        for rank, other in enumerate(proposals):
            if odd := sorted(set(first.layers) ^ set(other.layers)):
                raise ValueError("APSCompressor: " + "; ".join(_lack(name, first, rank) for name in odd[:MAX_NAMED]))
    return [name for name in first.order if name in common]


def _lack(name: str, first: Proposal, rank: int) -> str:
    has, has_not = (0, rank) if name in first.layers else (rank, 0)
    return f"tensor {name!r} was submitted on rank {has} but not on rank {has_not}"


def _parse(raw: bytes, rank: int) -> Proposal:
    """The proposal in a message; ValueError says what is wrong with anything else."""
    if len(raw) > MAX_PROPOSAL:
        raise _foreign(rank, f"{len(raw)} bytes, more than {MAX_PROPOSAL}")
    try:
        entry = json.loads(raw)
        version = entry["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # bytes of any kind can be here
        raise _foreign(rank, f"{type(error).__name__}, {len(raw)} bytes") from None
    if not isinstance(version, str):
        raise _foreign(rank, "version must be a text")
    if version != __version__:  # another version may describe its layers as it likes
        return Proposal(version, {}, {}, [], {}, 0, None, True, True)
    if set(entry) != {field.name for field in fields(Proposal)}:
        raise _foreign(rank, f"must have {', '.join(field.name for field in fields(Proposal))}")
    one = Proposal(**entry)
    for wrong, what in (
        (
            not isinstance(one.options, dict) or not isinstance(one.layers, dict),
            "options or layers have the wrong type",
        ),
        (
            not isinstance(one.layers, dict)
            or not all(isinstance(layer, dict) and set(layer) == LAYER_KEYS for layer in one.layers.values()),
            f"layers must have {', '.join(sorted(LAYER_KEYS))}",
        ),
        (
            not isinstance(one.order, list) or not all(isinstance(name, str) for name in one.order),
            "order must be a list of names",
        ),
        (not _is_position(one), "position must be a step number and formats"),
    ):
        if wrong:
            raise _foreign(rank, what)
    if sorted(one.order) != sorted(one.layers) or not _are_factors(one):
        raise _foreign(rank, "order, factors and layers must name the same tensors")
    return one


def _is_position(one: Proposal) -> bool:
    return (
        type(one.step_number) is int
        and one.step_number >= 0
        and isinstance(one.waits, bool)
        and isinstance(one.whole, bool)
        and (one.chosen is None or isinstance(one.chosen, dict))
    )


def _are_factors(one: Proposal) -> bool:
    return (
        isinstance(one.factors, dict)
        and set(one.factors) == set(one.layers)
        and all(type(value) in (int, float) for value in one.factors.values())
    )


def _foreign(rank: int, what: str) -> ValueError:
    return ValueError(
        f"APSCompressor: the message of rank {rank} is truncated or not of horovod_aps ({what}); check "
        f"that all ranks run the same program and horovod_aps {__version__}"
    )


def _difference(first: Proposal, other: Proposal, rank: int) -> str | None:
    """One sentence on the first thing in which rank `rank` differs from rank 0."""
    if first.version != other.version:
        return (
            f"rank 0 runs horovod_aps {first.version}, rank {rank} runs {other.version}; "
            f"install the same version everywhere"
        )
    for name in sorted(set(first.options) | set(other.options)):
        value, theirs = first.options.get(name), other.options.get(name)
        if theirs != value:
            return (
                f"option {name} is {value!r} on rank 0 and {theirs!r} on rank {rank}; "
                f"all ranks must use the same options"
            )
    for name in sorted(set(first.layers) & set(other.layers)):
        mine, theirs = first.layers[name], other.layers[name]
        mine, theirs = mine | {"factor": first.factors[name]}, theirs | {"factor": other.factors[name]}
        for key, value in mine.items():
            if theirs[key] != value:
                return f"tensor {name!r} has {key} {value!r} on rank 0 and {theirs[key]!r} on rank {rank}"
    return None
