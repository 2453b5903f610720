"""What the user asks for: the options of a compressor, checked once, and the format each layer gets.

First stop of the flow gradient -> scale -> pack -> exchange -> reduce -> unpack: frontends build an `Options`,
the layout asks it for every layer's `Format`, and all ranks compare its `fingerprint()`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from horovod_aps.formats import FLOAT32, FloatFormat, Format, parse

ROUNDINGS = ("nearest", "stochastic")
ACCUMULATIONS = ("float32", "format", "kahan")
TRANSPORTS = ("packed", "allreduce")
HIERARCHIES = ("auto", "flat", "two-level")
AUTO_CANDIDATES = ((3, 0), (3, 2), (4, 3), (5, 2), (5, 10), "float32")


def as_format(value: Any, specials: bool, where: str) -> Format:
    """The format that `value` stands for: an (e, m) pair, a `Format`, or its text, such as "float32"."""
    if isinstance(value, Format):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return parse(value)
    elif isinstance(value, Sequence) and len(value) == 2:
        return _check_format(value[0], value[1], specials, f"{where}:")
    raise ValueError(f'{where} must be an (e, m) pair or "float32", got {value!r}')


_float_format = functools.lru_cache(maxsize=256)(FloatFormat)  # every layer of every step asks


def _check_format(e: Any, m: Any, specials: Any, where: str) -> FloatFormat:
    """The format (e, m), with errors that name the place where the user wrote it."""
    try:
        return FloatFormat(e, m, specials=specials)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("FloatFormat:", where, 1)) from None


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"APSCompressor: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_int(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"APSCompressor: {name} must be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"APSCompressor: {name} must be at least {low}, got {value}")


@dataclass(frozen=True)
class Options:
    """All options of an APSCompressor; see `horovod_aps.torch.APSCompressor` for what each one does."""

    e: int
    m: int
    specials: bool = True
    rounding: str = "nearest"
    seed: int = 0
    accumulate: str = "float32"
    error_feedback: bool = False
    min_elements: int = 0
    bucket_mb: float = 16.0
    overrides: Mapping[str, Any] | str = field(default_factory=dict)
    warmup_steps: int = 0
    auto_steps: int = 10
    auto_error: float = 0.05
    auto_candidates: tuple[Any, ...] = AUTO_CANDIDATES
    transport: str = "packed"
    hierarchy: str = "auto"
    scaling: bool = True
    stats: bool = False

    def __post_init__(self) -> None:
        _check_format(self.e, self.m, self.specials, "APSCompressor:")
        object.__setattr__(self, "e", int(self.e))
        object.__setattr__(self, "m", int(self.m))
        _check_choice("rounding", self.rounding, ROUNDINGS)
        _check_choice("accumulate", self.accumulate, ACCUMULATIONS)
        _check_choice("transport", self.transport, TRANSPORTS)
        _check_choice("hierarchy", self.hierarchy, HIERARCHIES)
        for name, low in (("seed", 0), ("min_elements", 0), ("warmup_steps", 0), ("auto_steps", 1)):
            _check_int(name, getattr(self, name), low)
        for name in ("error_feedback", "scaling", "stats"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"APSCompressor: {name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, (int, float)):
            raise TypeError(f"APSCompressor: bucket_mb must be a number, got {type(self.bucket_mb).__name__}")
        if not 0 < self.bucket_mb <= 4096:
            raise ValueError(f"APSCompressor: bucket_mb must be in (0, 4096], got {self.bucket_mb}")
        if isinstance(self.auto_error, bool) or not isinstance(self.auto_error, (int, float)):
            raise TypeError(f"APSCompressor: auto_error must be a number, got {type(self.auto_error).__name__}")
        if not 0 < self.auto_error:
            raise ValueError(f"APSCompressor: auto_error must be positive, got {self.auto_error}")
        if isinstance(self.overrides, str):
            if self.overrides != "auto":
                raise ValueError(f'APSCompressor: overrides must be a dict or "auto", got {self.overrides!r}')
        elif not isinstance(self.overrides, Mapping):
            raise TypeError(f'APSCompressor: overrides must be a dict or "auto", got {type(self.overrides).__name__}')
        else:
            for pattern, value in self.overrides.items():
                if not isinstance(pattern, str):
                    raise TypeError(f"APSCompressor: overrides keys must be name patterns, got {pattern!r}")
                where = f"APSCompressor: overrides[{pattern!r}]"
                self._check_sums(as_format(value, self.specials, where), where)
        object.__setattr__(self, "auto_candidates", tuple(map(self._check_candidate, self.auto_candidates)))
        if self.overrides == "auto" and not self.auto_candidates:
            raise ValueError('APSCompressor: overrides="auto" needs at least one of auto_candidates, got none')
        if self.transport == "allreduce":
            self._check_carrier()

    def _check_candidate(self, value: Any) -> Any:
        """A candidate as an (e, m) pair or the text of a format, so that the choice can be sent, saved and pasted."""
        where = "APSCompressor: auto_candidates entry"
        fmt = as_format(value, self.specials, where)
        self._check_sums(fmt, where)
        if not isinstance(fmt, FloatFormat):
            return str(fmt)
        if fmt.specials != self.specials:
            raise ValueError(
                f"APSCompressor: auto_candidates entry {value!r} must have specials={self.specials} like the compressor"
            )
        return fmt.exp_bits, fmt.man_bits

    def _check_sums(self, fmt: Format, where: str) -> None:
        if self.accumulate != "float32" and not fmt.rounds_sums:
            raise ValueError(f"{where} is {fmt}, for which accumulate must be 'float32', got {self.accumulate!r}")

    def _check_carrier(self) -> None:
        """float16 carries the rounded values of transport="allreduce"; they must be exact in it."""
        if self.e > 5 or self.m > 10:
            raise ValueError(
                f'APSCompressor: transport="allreduce" carries values in float16, so e must be in 1..5 and m in '
                f"0..10, got e={self.e}, m={self.m}"
            )
        for name, default in (
            ("accumulate", "float32"),
            ("error_feedback", False),
            ("overrides", {}),
            ("warmup_steps", 0),
        ):
            if getattr(self, name) != default:
                raise ValueError(
                    f'APSCompressor: transport="allreduce" does not support {name}='
                    f'{getattr(self, name)!r}; use transport="packed"'
                )

    @property
    def default_format(self) -> FloatFormat:
        """The format of every layer that no override names."""
        return _float_format(self.e, self.m, self.specials)

    def format_for(self, name: str, n_elements: int) -> Format:
        """The wire format of the layer `name`: the first matching override, else by size, else (e, m)."""
        if not isinstance(self.overrides, str):
            for pattern, value in self.overrides.items():
                if fnmatch.fnmatchcase(name, pattern):
                    return as_format(value, self.specials, "APSCompressor: overrides")
        return FLOAT32 if n_elements < self.min_elements else self.default_format

    @property
    def why_flat(self) -> str:
        """Why no rank should look for others on its host; empty if it should."""
        return 'hierarchy is "flat"' if self.hierarchy == "flat" else ""

    def replace(self, **changes: Any) -> Options:
        """A checked copy with some options changed."""
        return replace(self, **changes)

    @functools.cached_property
    def fingerprint_text(self) -> str:
        """`fingerprint()` as text, made once: it is compared in every step."""
        return json.dumps(self.fingerprint(), sort_keys=True)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that all ranks must agree on, as plain JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stats"}
        return json.loads(json.dumps(values, default=str))
