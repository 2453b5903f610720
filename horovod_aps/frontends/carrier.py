"""APS-rounded values in float16, for transport="allreduce": Horovod's own ring adds them.

Stands in for pack, exchange and unpack: the exponent is shared by one MAX all-reduce per tensor, the values are
rounded to (e, m) and placed in float16 so that the sum of all ranks cannot overflow, and Horovod does the rest. The
sum is Horovod's, in float16. A rank in `hvd.join()` contributes zeros, which is also the neutral exponent word.

Gloo, as Horovod 0.28.1 ships it, loses sums in float16: its assignment compares the new value with the old one's *bit
pattern read as an integer*, and keeps the old one if they are equal. No integer but 0 is below 1, and 0 has the pattern
of +0: as long as every partial sum stays below 1 in magnitude, nothing is lost (tests/single/test_carrier.py has the
proof). That leaves 24 of float16's 40 binades.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_aps import __version__
from horovod_aps.engine.agreement import digest_words
from horovod_aps.engine.feedback import Lender
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.statistics import Statistics
from horovod_aps.kernels import (
    EXP_NONFINITE,
    EXP_ZERO,
    FLOAT16,
    FLOAT32,
    ITEM_SIZES,
    SEGMENT,
    Bytes,
    CpuKernels,
    Kernels,
    Table,
)
from horovod_aps.options import Options

WORD_OFFSET = 1 << 14  # exponent words are positive; 0 is a layer of zeros, or a rank that has joined
WORD_NONFINITE = 1 << 16
DIGEST_TOP = 1 << 30
FLOAT16_TOP, FLOAT16_BOTTOM = 15, -24  # exponents of the largest and of the smallest positive float16
BELOW_ONE = -1  # exponent of the largest float16 that Gloo adds correctly, whatever it is added to


@dataclass(frozen=True)
class Place:
    """How a layer's values travel: as which type, and with what exponent the largest of them."""

    dtype: int
    top: int


def carrier_place(options: Options, size: int, over_gloo: bool) -> Place:
    """Where (e, m) values are exact, and no sum of up to `size` of them overflows or is lost by Gloo, in any order.

    float16 below 1 where they fit; else MPI takes the whole of float16, and Gloo float32. Raises ValueError if all of
    float16 is too small.
    """
    room = int(np.ceil(np.log2(size)))
    fmt = options.float_format
    below = fmt.top_exponent - 2 + 2 ** (fmt.exp_bits - 1) + fmt.man_bits  # from the top to the least subnormal
    if FLOAT16_TOP - room - below < FLOAT16_BOTTOM:
        raise ValueError(
            f'APSCompressor: transport="allreduce" cannot carry e={options.e}, m={options.m} for {size} '
            f'ranks in float16; use fewer exponent bits, or transport="packed"'
        )
    if BELOW_ONE - room - below >= FLOAT16_BOTTOM:
        return Place(FLOAT16, BELOW_ONE - room)
    return Place(FLOAT32, BELOW_ONE - room) if over_gloo else Place(FLOAT16, FLOAT16_TOP - room)


def _segment(data: int, n: int, dtype: int, options: Options) -> Table:
    segment = np.zeros(1, SEGMENT)
    segment["data"], segment["n"], segment["dtype"], segment["factor"] = data, n, dtype, 1.0
    options.default_format.describe(segment)
    return segment


def exponent_word(kernels: Kernels, data: int, n: int, dtype: int, options: Options) -> int:
    """This rank's contribution to the MAX all-reduce of a layer's exponent."""
    segment = _segment(data, n, dtype, options)
    kernels.scan(segment, stochastic=options.rounding == "stochastic")
    exponent = int(segment["exponent"][0])
    if exponent == EXP_ZERO:
        return 0
    return WORD_NONFINITE if exponent == EXP_NONFINITE else exponent + WORD_OFFSET


def option_words(options: Options, factors: Sequence[float]) -> list[int]:
    """Two words to send along with the exponents: their MAX shows whether all ranks have the same options."""
    digest = digest_words(f"{__version__} {options.fingerprint_text} {list(factors)}")[0] >> 1
    return [1 + digest, DIGEST_TOP - digest]


def check_option_words(shared: Sequence[int], options: Options) -> None:
    """Raise ValueError, on all ranks, if the MAX of all ranks' option words is that of different options."""
    if sum(shared) != 1 + DIGEST_TOP:
        raise ValueError(
            f"APSCompressor: another rank has other options, op, scale factors or version than this one "
            f"(e={options.e}, m={options.m}, horovod_aps {__version__}); all ranks must use the same"
        )


def fill_carrier(
    kernels: Kernels,
    data: int,
    n: int,
    dtype: int,
    carrier: int,
    word: int,
    place: Place,
    options: Options,
    seed: int | None,
    account: Callable[[Table, Bytes, int], None] | None = None,
) -> None:
    """Round the layer at `data` and write it to the array at `carrier`, as `place` says.

    `account` is called with the segment, its message and its shared exponent.
    """
    segment = _segment(data, n, dtype, options)
    usual = 0 < word < WORD_NONFINITE
    segment["exponent"] = word - WORD_OFFSET if usual else EXP_ZERO
    message = kernels.alloc(options.default_format.bytes_for(n))
    kernels.encode(segment, message, seed)
    if account is not None:
        account(segment, message, int(segment["exponent"][0]) if word < WORD_NONFINITE else EXP_NONFINITE)
    segment["data"], segment["dtype"] = carrier, place.dtype
    segment["exponent"] = place.top if usual else EXP_ZERO
    kernels.decode(segment, [message])


def back_scale(word: int, place: Place) -> tuple[int, bool]:
    """Power of two that undoes the carrier's scale, and whether the layer is finite."""
    return (word - WORD_OFFSET - place.top if 0 < word < WORD_NONFINITE else 0), word < WORD_NONFINITE


@dataclass(frozen=True)
class Terms:
    """What a layer keeps from its exponent to its result, even if options change on the way."""

    options: Options
    place: Place


class Carrier:
    """A `Reducer` for transport="allreduce", but for `wait`, which every framework has its own of."""

    chosen: dict[str, Any] | None = None

    def __init__(self, options: Options, size: int, over_gloo: bool) -> None:
        self._size, self._over_gloo = size, over_gloo
        self.terms = Terms(options, carrier_place(options, size, over_gloo))
        self.kernels = CpuKernels()
        self.statistics = Statistics()
        self.step_number = 0
        self._waiting: list[Sequence[Any]] = []  # what was handed in, by group

    def submit(self, *layers: Layer) -> None:
        """Note one tensor or group; nothing is sent before somebody waits."""
        self._waiting.append(layers)

    def forget(self) -> None:
        """Drop what was submitted: not all ranks are there, or they mean something else."""
        self._waiting = []

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change options between steps."""
        options = self.terms.options.replace(**changes)
        self.terms = Terms(options, carrier_place(options, self._size, self._over_gloo))

    @property
    def way(self) -> str:
        """Horovod's own."""
        return "all-reduce"

    def state(self) -> dict[str, Any]:
        """Nothing but the position, from which stochastic rounding goes on."""
        return {"step_number": self.step_number, "residuals": {}, "overrides": None, "auto": None}

    def load_state(self, state: dict[str, Any], lender: Lender | None = None) -> None:
        """Go on from a `state()`; there are no residuals."""
        self.step_number = state["step_number"]

    def close(self) -> None:
        """Nobody will use it again."""

    def words(self, layers: Sequence[Layer], sources: Sequence[int]) -> list[int]:
        """What this rank contributes to the MAX all-reduce for the layers at `sources`."""
        options = self.terms.options
        words = [
            exponent_word(self.kernels, source, layer.n_elements, layer.dtype_code, options)
            for layer, source in zip(layers, sources)
        ]
        return words + option_words(options, [layer.factor for layer in layers])

    def fill(
        self, terms: Terms, layer: Layer, source: int, values: int, word: int, seed: int | None, step_number: int
    ) -> None:
        """Round the layer at `source` into the array at `values`, and count it."""
        options, place = terms.options, terms.place

        def account(segment: Table, message: Bytes, exponent: int) -> None:
            item_size = ITEM_SIZES[place.dtype]
            self.statistics.add_carried(
                layer.shown, self.kernels, segment, message, exponent, item_size, options, self._size, step_number
            )

        n = layer.n_elements
        fill_carrier(self.kernels, source, n, layer.dtype_code, values, word, place, options, seed, account)
