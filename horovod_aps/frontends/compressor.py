"""What the compressors of all frameworks share: options, what reduces their tensors, state and statistics."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from horovod_aps import cleanup
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.feedback import Lender
from horovod_aps.formats import Format, parse
from horovod_aps.frontends import saved
from horovod_aps.frontends.reducer import Reducer, ReducerKey
from horovod_aps.frontends.saved import Saved
from horovod_aps.log import logger
from horovod_aps.options import AUTO_CANDIDATES, Options

FORMAT_OPTIONS = ("e", "m", "specials", "format")  # what says the format of most layers
OPTIONS = {field.name for field in fields(Options)} - {*FORMAT_OPTIONS, "who"}
_ids = itertools.count()
R = TypeVar("R", bound=Reducer)


class BaseCompressor:
    """Options, reducers and their state; frontends add `compress`, `decompress` and their transport.

    Pass an instance as `compression=` to Horovod. With two ranks every value is rounded once, with more of them
    twice; in two levels (`hierarchy`) hosts count instead of ranks. The sum is formed in float32. All ranks get the
    same bits. A layer in which any rank has NaN or Inf becomes NaN as a whole, on all ranks. Compressors are told apart
    by the order in which they are made, so make them in the same order on all ranks.
    """

    _who = "PackedCompressor"
    """What messages call it."""

    def __init__(self, format: Format | str, **options: Any) -> None:
        """Any format for all layers that no override names.

        Args:
            format: one of `horovod_aps.formats`, or its text, such as "e4m3". `QSGD` is always stochastic, seeded by
                `seed`. `OneBit` needs error_feedback=True.
            options: those of `APSCompressor`, without e, m and specials, which belong to a FloatFormat. Pairs (e, m)
                in overrides and auto_candidates have specials if `format` is no FloatFormat without.
        """
        if format is None:
            raise TypeError(f"{self._who}: format must be one of horovod_aps.formats or its text, got None")
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise TypeError(
                f"{self._who}: no option is called {', '.join(unknown)}; there are {', '.join(sorted(OPTIONS))}"
            )
        if options.get("overrides", 0) is None:
            del options["overrides"]
        self._options = Options(format=format, who=self._who, **options)
        self._start()

    def _start(self) -> None:
        self._number = next(_ids)
        self._name = f"horovod_aps.{self._number}"
        self._reducers: dict[ReducerKey, Reducer] = {}
        self._retired: dict[ReducerKey, Reducer] = {}
        self._saved: Saved | None = None  # loaded, and not taken over by a reducer
        self._made_with = self._options
        self._changes: dict[str, Any] = {}  # by set_format, since then
        self._looked = False

    def __repr__(self) -> str:
        options = self._options
        if options.format is None and self._who != BaseCompressor._who:
            return f"{type(self).__name__}(e={options.e}, m={options.m})"
        return f"{type(self).__name__}({str(options.default_format)!r})"

    def _keep(self, key: ReducerKey, reducer: R) -> R:
        """Remember what reduces the tensors of one process set, with the state that was loaded, if any.

        A reducer of another world hands its residuals and position on; a state that was loaded before that world began
        is older than these.
        """
        if not self._reducers:
            cleanup.after(self, partial(_close, self._reducers))  # those that it has then, not those of earlier worlds
        self._reducers[key] = reducer
        for old_key, old in list(self._retired.items()):
            if old_key.process_set_id == key.process_set_id and old_key.place == key.place:
                reducer.load_state(old.state(), self._lender(key))
                reducer.statistics = old.statistics
                del self._retired[old_key]
                return reducer
        if self._saved is not None:
            reducer.load_state(self._saved.take_part(key), self._lender(key))
        return reducer

    def _lender(self, key: ReducerKey) -> Lender | None:
        """Where a reducer finds residuals of an earlier run; it must not know the compressor."""
        return None if self._saved is None else partial(self._saved.take_residuals, key)

    def _look_for_idle_overrides(self, reducer: Reducer) -> None:
        """Warn, once, of patterns that no tensor's name matches, after steps in which all should have been there."""
        if self._looked or not isinstance(reducer, Exchange) or reducer.step_number < 2:
            return
        self._looked = True
        overrides = self._options.overrides
        if isinstance(overrides, str) or reducer.transport is None or reducer.transport.rank != 0:
            return
        exchanges = [one for one in self._reducers.values() if isinstance(one, Exchange)]
        names = sorted({name for exchange in exchanges for name in exchange.names()})
        idle = [pattern for pattern in overrides if not fnmatch.filter(names, pattern)]
        if idle:
            logger.warning(
                "overrides %s match none of the %d tensors, which are called %s%s",
                idle,
                len(names),
                ", ".join(names[:5]),
                ", ..." if len(names) > 5 else "",
            )

    def _retire_all(self) -> None:
        """The world has changed, even if rank and size have not: every rank makes its reducers anew."""
        for key in list(self._reducers):
            self._retire(key)

    def _retire(self, key: ReducerKey) -> None:
        self._retired[key] = self._reducers.pop(key)
        self._retired[key].forget()
        self._retired[key].close()

    # ---- For people ---------------------------------------------------------------------------------------

    def set_format(
        self,
        e: int | None = None,
        m: int | None = None,
        *,
        format: Format | str | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Change the format between steps; call it at the same point on all ranks, which is checked.

        A rank that was left behind makes the next exchange raise ValueError on all of them. `e` and `m`, or any
        `format`, are for the layers that no override names; new `overrides` replace all former ones, those that "auto"
        has chosen among them.
        """
        changes: dict[str, Any] = {key: value for key, value in (("e", e), ("m", m)) if value is not None}
        if format is not None:
            if changes:
                raise ValueError(f"{self._who}: set_format takes e and m, or format, got both")
            changes["format"] = format
        elif changes and self._options.format is not None:
            changes["format"] = None
        if overrides is not None:
            if not isinstance(overrides, Mapping):
                raise TypeError(f"{self._who}: set_format takes overrides as a dict, got {overrides!r}")
            changes["overrides"] = dict(overrides)
        options = self._options.replace(**changes)
        if "format" in changes:
            changes |= {name: getattr(options, name) for name in FORMAT_OPTIONS}
        for reducer in self._reducers.values():
            reducer.change(changes)
        self._options = options
        self._changes |= {name: getattr(options, name) for name in changes}

    def chosen_overrides(self) -> dict[str, Any] | None:
        """What overrides="auto" has chosen, as a dict to paste back; None while it still measures, and without it."""
        return self._merge(reducer.chosen for reducer in self._reducers.values())

    @staticmethod
    def _merge(parts: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
        """One dict of all that are there."""
        known = [part for part in parts if part is not None]
        return {name: value for part in known for name, value in part.items()} if known else None

    def stats(self) -> dict[str, Any]:
        """Bytes sent against fp32, their ratio, the way taken, and per layer the exponent and, if asked for, errors.

        `bytes_sent` are this rank's. Where the ranks of a host send for each other (`hierarchy`), `bytes_fp32` is this
        rank's share of what a ring all-reduce would send from the host.
        """
        merged: dict[str, Any] = {"bytes_sent": 0.0, "bytes_fp32": 0.0, "ratio": None, "hierarchy": None, "layers": {}}
        for reducer in self._reducers.values():
            part = reducer.statistics.as_dict()
            merged["bytes_sent"] += part["bytes_sent"]
            merged["bytes_fp32"] += part["bytes_fp32"]
            merged["layers"].update(part["layers"])
        ways = {reducer.way for reducer in self._reducers.values()} - {""}
        merged["hierarchy"] = ", ".join(sorted(ways)) or None
        if merged["bytes_fp32"]:
            merged["ratio"] = merged["bytes_sent"] / merged["bytes_fp32"]
        return merged

    def report(self, path: str | Path, title: str = "APS run") -> None:
        """Write an HTML page on `stats()`, with errors if the compressor was made with stats=True."""
        from horovod_aps.tools import report

        report.write(self.stats(), path, title)

    def state_dict(self) -> dict[str, Any]:
        """Residuals, schedule position and what `set_format` has set; each rank saves its own, for residuals differ."""
        changes = {"set_format": {name: _plain(value) for name, value in self._changes.items()}}
        parts = {} if self._saved is None else self._saved.rest()
        parts |= {saved.label_of(key): reducer.state() for key, reducer in (self._retired | self._reducers).items()}
        parts = parts or {saved.ANYBODY: saved.EMPTY}
        residuals, named = saved.together(parts)
        return {
            "step_number": max(part["step_number"] for part in parts.values()),
            **changes,
            "residuals": residuals,
            **{key: self._merge(part[key] for part in parts.values()) for key in ("overrides", "auto")},
            **({"parts": named} if len(parts) > 1 else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; a resumed run equals an uninterrupted one bit for bit.

        What `set_format` had set comes back; all other options stay as this compressor was made with.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"{self._who}: state must be what state_dict() returns, got {type(state).__name__}")
        missing = {"step_number", "residuals", "overrides"} - set(state)
        if missing:
            raise ValueError(f"{self._who}: state has no {', '.join(sorted(missing))}")
        try:
            parts = {
                label: saved.read(part, {name: state["residuals"][key] for name, key in part["residuals"].items()})
                for label, part in state.get("parts", {}).items()
            }
            whole = saved.read(state, state["residuals"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._who}: state must be what state_dict() returns, got one with {error}") from None
        self._saved = Saved(whole, parts)
        self._retired = {}
        if "set_format" in state:  # older states do not know
            self._changes = {name: _unplain(value) for name, value in state["set_format"].items()}
            self._options = self._made_with.replace(**self._changes)
        for key, reducer in self._reducers.items():
            if "set_format" in state:
                reducer.change({name: getattr(self._options, name) for name in (*FORMAT_OPTIONS, "overrides")})
            reducer.load_state(self._saved.take_part(key), self._lender(key))

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes along options and state, never communicators."""
        return {"options": self._made_with, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options = state["options"]
        self._start()
        self.load_state_dict(state["state"])


class ByBits(BaseCompressor):
    """A compressor whose format is given by its bits."""

    _who = "APSCompressor"

    def __init__(
        self,
        e: int,
        m: int,
        *,
        specials: bool = True,
        rounding: str = "nearest",
        seed: int = 0,
        accumulate: str = "float32",
        error_feedback: bool = False,
        min_elements: int = 0,
        bucket_mb: float = 16.0,
        overrides: Mapping[str, Any] | str | None = None,
        warmup_steps: int = 0,
        auto_steps: int = 10,
        auto_error: float = 0.05,
        auto_candidates: Any = AUTO_CANDIDATES,
        transport: str = "packed",
        hierarchy: str = "auto",
        scaling: bool = True,
        stats: bool = False,
    ) -> None:
        """Options by their effect; `e` and `m` are all that most people need.

        Args:
            e: exponent bits, 1..8. One more doubles the range of magnitudes within a layer that survives.
            m: mantissa bits, 0..23. One more halves the rounding error. 1+e+m bits per element are sent.
            specials: keep the top exponent for Inf/NaN as IEEE does; False uses it for numbers, one more binade.
            rounding: "nearest" (ties to even), or "stochastic": unbiased, noisier, the same in every run.
            seed: of stochastic rounding.
            accumulate: "float32" sums exactly enough; "format" and "kahan" re-round every partial sum to (e, m)
                in rank order, as the paper's simulator does: less accurate, for studies.
            error_feedback: add what rounding lost in this step to the next gradient. Worth its memory (a float32
                copy of the gradients) at 4 bits, hardly at 8.
            min_elements: smaller tensors travel as float32.
            bucket_mb: MB of fp32 gradient that travel together. Smaller overlaps better, larger has less overhead.
            overrides: {name pattern: (e, m) or "float32"}; the first that matches a tensor's Horovod name wins.
                "auto" sends the first `auto_steps` steps in float32, measures, and chooses for every layer.
            warmup_steps: send the first steps in float32.
            auto_steps: how many steps "auto" measures.
            auto_error: the relative error that rounding may bring to a layer in a format that "auto" chooses. Where
                the ranks' gradients cancel, the error of their sum is larger.
            auto_candidates: the formats that "auto" chooses from.
            transport: "packed" is the APS exchange; "allreduce" sends rounded values as float16 through Horovod's
                own all-reduce, twice the bytes, for `hvd.join()`; over Gloo as float32 if e is 5.
            hierarchy: "two-level" adds up the gradients of a host's ranks in float32 first, through memory that they
                share, so that a host sends what one rank would; "flat" has every rank talk to every other. "auto" takes
                two levels where there are several hosts with the same number, more than one, of ranks. Where
                "two-level" cannot be, on a single rank too, it is a ValueError on all ranks.
            scaling: False leaves out APS, a fixed scale of 1: to see what it is good for.
            stats: measure underflow, error and exponents of every layer (one more pass over the gradients).
        """
        self._options = Options(
            e,
            m,
            specials=specials,
            rounding=rounding,
            seed=seed,
            accumulate=accumulate,
            error_feedback=error_feedback,
            min_elements=min_elements,
            bucket_mb=bucket_mb,
            overrides={} if overrides is None else overrides,
            warmup_steps=warmup_steps,
            auto_steps=auto_steps,
            auto_error=auto_error,
            auto_candidates=auto_candidates,
            transport=transport,
            hierarchy=hierarchy,
            scaling=scaling,
            stats=stats,
            who=self._who,
        )
        self._start()


def _close(reducers: dict[ReducerKey, Reducer]) -> None:
    for reducer in list(reducers.values()):
        reducer.close()


def _plain(value: Any) -> Any:
    """A number, or overrides with every format as text or numbers, which all kinds of checkpoints can hold."""
    if isinstance(value, Mapping):
        return {pattern: _plain(fmt) for pattern, fmt in value.items()}
    return str(value) if isinstance(value, Format) else value


def _unplain(value: Any) -> Any:
    """What `_plain` was given; JSON has made lists of pairs."""
    if isinstance(value, Mapping):
        return {pattern: _unplain(fmt) for pattern, fmt in value.items()}
    if isinstance(value, str) and value != "float32":
        return parse(value)
    return tuple(value) if isinstance(value, list) else value
