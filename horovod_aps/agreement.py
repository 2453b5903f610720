"""How ranks make sure that they mean the same batch before any packed byte is read.

A batch is described by its layers and the compressor's options. Ranks compare full descriptions (JSON, parsed
and never executed) when a batch is new or when digests differ, and all raise the same error if they disagree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from horovod_aps import __version__
from horovod_aps.formats import FLOAT32
from horovod_aps.kernels import DTYPE_NAMES
from horovod_aps.layout import LayerSpec
from horovod_aps.options import Options

LAYER_KEYS = {"shape", "dtype", "factor", "format", "specials"}
MAX_PROPOSAL = 1 << 28  # bytes; half a million layers need less


class _LayerLike(Protocol):
    name: str
    shape: tuple[int, ...]
    dtype: int
    factor: float
    label: str

    @property
    def shown(self) -> str: ...


def spec_of(layer: _LayerLike, options: Options, warm: bool) -> LayerSpec:
    """What ranks compare about a layer; during warm-up all layers travel as float32."""
    fmt = FLOAT32 if warm else options.format_for(layer.shown, math.prod(layer.shape))
    return LayerSpec(layer.name, layer.shape, layer.dtype, layer.factor, fmt, layer.label)


def _plain(spec: LayerSpec) -> dict[str, Any]:
    return {"shape": list(spec.shape), "dtype": DTYPE_NAMES[spec.dtype], "factor": spec.factor,
            "format": spec.format.name, "specials": spec.format.specials}


def describe(specs: Iterable[LayerSpec], options: Options) -> str:
    """A text that is equal on two ranks exactly if they mean the same batch."""
    layers = {spec.name: _plain(spec) for spec in specs}
    return json.dumps({"version": __version__, "options": options.fingerprint(), "layers": layers},
                      sort_keys=True)


def digest_words(description: str) -> tuple[int, int]:
    """Two non-negative 31-bit words that stand for a description in a header."""
    raw = hashlib.sha256(description.encode()).digest()
    return int.from_bytes(raw[:4], "little") >> 1, int.from_bytes(raw[4:8], "little") >> 1


def proposal(specs: Sequence[LayerSpec], options: Options, step_number: int = 0,
             chosen: Mapping[str, Any] | None = None) -> bytes:
    """This rank's description of the batch, with its own order of arrival and its position in the schedule.

    `chosen` is what overrides="auto" has settled on, if it has.
    """
    order = [spec.name for spec in specs]
    position = {"step_number": step_number, "chosen": chosen}
    return json.dumps({"description": describe(specs, options), "order": order, "position": position}).encode()


def most_advanced(proposals: Sequence[bytes]) -> tuple[int, dict[str, Any] | None] | None:
    """The position that all ranks should go on from, None if they already are at the same one.

    A worker that joins an elastic job knows nothing of the steps before it.
    """
    positions = [_parse(raw, rank)[2] for rank, raw in enumerate(proposals)]
    if all(position == positions[0] for position in positions):
        return None
    best = max(positions, key=lambda position: (position["chosen"] is not None, position["step_number"]))
    return max(position["step_number"] for position in positions), best["chosen"]


def settle(proposals: Sequence[bytes]) -> dict[str, int]:
    """Position of every layer in rank 0's order, if all ranks proposed the same batch.

    Raises ValueError, with the same text on all ranks, that names the ranks and both values otherwise, or the
    rank whose message is truncated or not ours.
    """
    parsed = [_parse(raw, rank) for rank, raw in enumerate(proposals)]
    first, order, _ = parsed[0]
    for rank, (other, _, _) in enumerate(parsed):
        difference = _difference(first, other, rank)
        if difference:
            raise ValueError(f"APSCompressor: {difference}")
    if first["version"] != __version__:
        raise _foreign(0, f"version {first['version']!r}")
    return {name: position for position, name in enumerate(order)}


def _parse(raw: bytes, rank: int) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Description, order and position in a proposal; ValueError says what is wrong with anything else."""
    if len(raw) > MAX_PROPOSAL:
        raise _foreign(rank, f"{len(raw)} bytes, more than {MAX_PROPOSAL}")
    try:
        entry = json.loads(raw)
        description = json.loads(entry["description"])
        order, position = entry["order"], entry.get("position")
        version = description["version"]
        options, layers = description["options"], description["layers"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # bytes of any kind can be here
        raise _foreign(rank, f"{type(error).__name__}, {len(raw)} bytes") from None
    if not isinstance(version, str) or not isinstance(options, dict) or not isinstance(layers, dict):
        raise _foreign(rank, "version, options or layers have the wrong type")
    if version != __version__:  # another version may describe its layers as it likes
        return description, [], {"step_number": 0, "chosen": None}
    if not all(isinstance(layer, dict) and set(layer) == LAYER_KEYS for layer in layers.values()):
        raise _foreign(rank, f"layers must have {', '.join(sorted(LAYER_KEYS))}")
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise _foreign(rank, "order must be a list of names")
    if sorted(order) != sorted(layers):
        raise _foreign(rank, "order and layers must name the same tensors")
    if not _is_position(position):
        raise _foreign(rank, "position must be a step number and formats")
    return description, order, position


def _is_position(value: Any) -> bool:
    return (isinstance(value, dict) and set(value) == {"step_number", "chosen"}
            and type(value["step_number"]) is int and value["step_number"] >= 0
            and (value["chosen"] is None or isinstance(value["chosen"], dict)))


def _foreign(rank: int, what: str) -> ValueError:
    return ValueError(
        f"APSCompressor: the message of rank {rank} is truncated or not of horovod_aps ({what}); check "
        f"that all ranks run the same program and horovod_aps {__version__}")


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str | None:
    """One sentence on the first thing in which rank `rank` differs from rank 0."""
    if first["version"] != other["version"]:
        return (f"rank 0 runs horovod_aps {first['version']}, rank {rank} runs {other['version']}; "
                f"install the same version everywhere")
    for name in sorted(set(first["options"]) | set(other["options"])):
        value, theirs = first["options"].get(name), other["options"].get(name)
        if theirs != value:
            return (f"option {name} is {value!r} on rank 0 and {theirs!r} on rank {rank}; "
                    f"all ranks must use the same options")
    for name in sorted(set(first["layers"]) | set(other["layers"])):
        mine, theirs = first["layers"].get(name), other["layers"].get(name)
        if mine is None or theirs is None:
            has, has_not = (rank, 0) if mine is None else (0, rank)
            return f"tensor {name!r} was submitted on rank {has} but not on rank {has_not}"
        for key, value in mine.items():
            if theirs[key] != value:
                return f"tensor {name!r} has {key} {value!r} on rank 0 and {theirs[key]!r} on rank {rank}"
    return None
