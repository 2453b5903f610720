"""What the user asks for: the options of a compressor, checked once, and the format each layer gets.

First stop of the flow gradient -> scale -> pack -> exchange -> reduce -> unpack: frontends build an `Options`,
the layout asks it for every layer's `Format`, and all ranks compare its `fingerprint()`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from horovod_aps.formats import FLOAT32, FloatFormat, Format, parse

ROUNDINGS = ("nearest", "stochastic")
ACCUMULATIONS = ("float32", "format", "kahan")
TRANSPORTS = ("packed", "allreduce")
HIERARCHIES = ("auto", "flat", "two-level")
AUTO_CANDIDATES = ((3, 0), (3, 2), (4, 3), (5, 2), (5, 10), "float32")


def as_format(value: Any, specials: bool, where: str) -> Format:
    """The format that `value` stands for: an (e, m) pair, a `Format`, or its text, such as "float32" or "e4m3"."""
    if isinstance(value, Format):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return _parse(value)
    elif isinstance(value, Sequence) and len(value) == 2:
        return _check_format(value[0], value[1], specials, f"{where}:")
    raise ValueError(f'{where} must be an (e, m) pair or "float32", got {value!r}')


def read_format(value: Any, *, who: str) -> Format:
    """The format that the argument `format` of `who` stands for: a `Format` or its text."""
    if isinstance(value, Format):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{who}: format must be a format of horovod_aps.formats or its text, such as "
            f"FloatFormat(4, 3) or 'e4m3', got {value!r}"
        )
    try:
        return _parse(value)
    except ValueError:
        raise ValueError(
            f"{who}: format must be one of horovod_aps.formats or its text, such as 'e4m3', got {value!r}"
        ) from None


_parse = functools.lru_cache(maxsize=256)(parse)
_float_format = functools.lru_cache(maxsize=256)(FloatFormat)  # every layer of every step asks


def _check_format(e: Any, m: Any, specials: Any, where: str) -> FloatFormat:
    """The format (e, m), with errors that name the place where the user wrote it."""
    try:
        return FloatFormat(e, m, specials=specials)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("FloatFormat:", where, 1)) from None


def _check_choice(who: str, name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{who}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_int(who: str, name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{who}: {name} must be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{who}: {name} must be at least {low}, got {value}")


@dataclass(frozen=True)
class Options:
    """All options of a compressor; see `horovod_aps.torch.APSCompressor` for what each one does.

    The format of layers that no override names is (e, m), or `format` if it is another: a FloatFormat that is given as
    `format` becomes e, m and specials, and any other leaves e and m at 0.
    """

    e: int = 0
    m: int = 0
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
    format: Any = None
    who: str = field(default="APSCompressor", compare=False)
    """Whose options these are, for messages."""

    def __post_init__(self) -> None:
        who = self.who
        self._settle_format()
        _check_choice(who, "rounding", self.rounding, ROUNDINGS)
        _check_choice(who, "accumulate", self.accumulate, ACCUMULATIONS)
        _check_choice(who, "transport", self.transport, TRANSPORTS)
        _check_choice(who, "hierarchy", self.hierarchy, HIERARCHIES)
        for name, low in (("seed", 0), ("min_elements", 0), ("warmup_steps", 0), ("auto_steps", 1)):
            _check_int(who, name, getattr(self, name), low)
        for name in ("error_feedback", "scaling", "stats"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{self.who}: {name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, (int, float)):
            raise TypeError(f"{self.who}: bucket_mb must be a number, got {type(self.bucket_mb).__name__}")
        if not 0 < self.bucket_mb <= 4096:
            raise ValueError(f"{self.who}: bucket_mb must be in (0, 4096], got {self.bucket_mb}")
        if isinstance(self.auto_error, bool) or not isinstance(self.auto_error, (int, float)):
            raise TypeError(f"{self.who}: auto_error must be a number, got {type(self.auto_error).__name__}")
        if not 0 < self.auto_error:
            raise ValueError(f"{self.who}: auto_error must be positive, got {self.auto_error}")
        if isinstance(self.overrides, str):
            if self.overrides != "auto":
                raise ValueError(f'{self.who}: overrides must be a dict or "auto", got {self.overrides!r}')
        elif not isinstance(self.overrides, Mapping):
            raise TypeError(f'{self.who}: overrides must be a dict or "auto", got {type(self.overrides).__name__}')
        else:
            for pattern, value in self.overrides.items():
                if not isinstance(pattern, str):
                    raise TypeError(f"{self.who}: overrides keys must be name patterns, got {pattern!r}")
                where = f"{self.who}: overrides[{pattern!r}]"
                self._check_use(as_format(value, self.specials, where), where)
        if isinstance(self.auto_candidates, str) or not isinstance(self.auto_candidates, Iterable):
            raise TypeError(f"{who}: auto_candidates must be a sequence of formats, got {self.auto_candidates!r}")
        object.__setattr__(self, "auto_candidates", tuple(map(self._check_candidate, self.auto_candidates)))
        if self.overrides == "auto" and not self.auto_candidates:
            raise ValueError(f'{who}: overrides="auto" needs at least one of auto_candidates, got none')
        if self.transport == "allreduce":
            self._check_carrier()
        self._check_use(self.default_format, f"{who}: format")

    def _settle_format(self) -> None:
        """Have the default format in `format`, or in e, m and specials if it is a FloatFormat."""
        if self.format is None:
            _check_format(self.e, self.m, self.specials, f"{self.who}:")
            e, m = int(self.e), int(self.m)
        else:
            fmt = read_format(self.format, who=self.who)
            e = m = 0
            if isinstance(fmt, FloatFormat):
                e, m = fmt.exp_bits, fmt.man_bits
                object.__setattr__(self, "specials", fmt.specials)
            object.__setattr__(self, "format", None if isinstance(fmt, FloatFormat) else fmt)
        object.__setattr__(self, "e", e)
        object.__setattr__(self, "m", m)

    def _check_candidate(self, value: Any) -> Any:
        """A candidate as an (e, m) pair or the text of a format, so that the choice can be sent, saved and pasted."""
        where = f"{self.who}: auto_candidates entry"
        fmt = as_format(value, self.specials, where)
        self._check_use(fmt, where)
        if not isinstance(fmt, FloatFormat):
            return str(fmt)
        if fmt.specials != self.specials:
            raise ValueError(
                f"{self.who}: auto_candidates entry {value!r} must have specials={self.specials} like the compressor"
            )
        return fmt.exp_bits, fmt.man_bits

    def _check_use(self, fmt: Format, where: str) -> None:
        """Raise ValueError if the other options do not go with a format."""
        if fmt.needs_error_feedback and not self.error_feedback:
            raise ValueError(
                f"{where} is {fmt}, which goes wrong without what it loses in each step; pass error_feedback=True"
            )
        if self.accumulate != "float32" and not fmt.rounds_sums:
            raise ValueError(f"{where} is {fmt}, for which accumulate must be 'float32', got {self.accumulate!r}")

    def _check_carrier(self) -> None:
        """float16 carries the rounded values of transport="allreduce"; they must be exact in it."""
        if self.format is not None:
            raise ValueError(
                f'{self.who}: transport="allreduce" carries a FloatFormat in float16, and format is {self.format}; '
                f'use transport="packed", or a format such as "e4m3"'
            )
        if self.e > 5 or self.m > 10:
            raise ValueError(
                f'{self.who}: transport="allreduce" carries values in float16, so e must be in 1..5 and m in '
                f"0..10, got e={self.e}, m={self.m}"
            )
        if self.hierarchy == "two-level":
            raise ValueError(
                f'{self.who}: transport="allreduce" leaves the way between hosts to Horovod, so hierarchy must be '
                f'"auto" or "flat", got "two-level"; use transport="packed"'
            )
        for name, default in (
            ("accumulate", "float32"),
            ("error_feedback", False),
            ("overrides", {}),
            ("warmup_steps", 0),
        ):
            if getattr(self, name) != default:
                raise ValueError(
                    f'{self.who}: transport="allreduce" does not support {name}='
                    f'{getattr(self, name)!r}; use transport="packed"'
                )

    @property
    def default_format(self) -> Format:
        """The format of every layer that no override names."""
        return self.format if self.format is not None else self.float_format

    @property
    def float_format(self) -> FloatFormat:
        """The default format, where it is known to be a FloatFormat."""
        return _float_format(self.e, self.m, self.specials)

    def is_stochastic(self, fmt: Format) -> bool:
        """Whether layers in this format are rounded with random bits."""
        return (self.rounding if fmt.rounding == "option" else fmt.rounding) == "stochastic"

    def format_for(self, name: str, n_elements: int) -> Format:
        """The wire format of the layer `name`: the first matching override, else by size, else (e, m)."""
        if not isinstance(self.overrides, str):
            for pattern, value in self.overrides.items():
                if fnmatch.fnmatchcase(name, pattern):
                    return as_format(value, self.specials, f"{self.who}: overrides")
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
        left_out = {"stats", "who"} | ({"format"} if self.format is None else {"e", "m"})
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return json.loads(json.dumps(values, default=str))
