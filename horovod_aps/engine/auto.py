"""Choosing a format per layer from what the first gradients look like: overrides="auto".

Beside the encode step of the flow: while it watches, gradients travel in float32; then every rank proposes the
smallest candidate that keeps a layer's error under the bound, and the widest proposal of any rank wins. A layer in
which no rank has seen anything but zeros, NaN and Inf is left alone.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_aps.engine.layout import WORD
from horovod_aps.formats import Format, Raw32
from horovod_aps.kernels import Kernels, Table
from horovod_aps.options import Options, as_format

TYPICAL = 1 << 16  # elements of a layer, for which candidates are put in order of their bytes
SEED = 0x5EED  # what a format that is always stochastic loses does not depend on the draw


class AutoChooser:
    """Collects every candidate's rounding error per layer."""

    def __init__(self, options: Options) -> None:
        self._bound, self._min_elements = options.auto_error, options.min_elements
        formats = [(as_format(value, options.specials, "auto_candidates"), value) for value in options.auto_candidates]
        self._candidates: list[tuple[Format, Any]] = sorted(formats, key=lambda pair: pair[0].bytes_for(TYPICAL))
        self._first = next((i for i, (fmt, _) in enumerate(self._candidates) if not isinstance(fmt, Raw32)), None)
        self._errors: dict[str, np.ndarray] = {}
        self._norms: dict[str, float] = {}

    def observe(
        self,
        kernels: Kernels,
        names: Sequence[str],
        table: Table,
        layer_of_segment: np.ndarray,
        shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Round the values that `table` points at to every candidate and add up the squared errors."""
        sizes = np.bincount(layer_of_segment, table["n"], len(names))
        measured = [(i, name) for i, name in enumerate(names) if sizes[i] >= self._min_elements]
        for _, name in measured:
            self._errors.setdefault(name, np.zeros(len(self._candidates)))
        for position, (fmt, _) in enumerate(self._candidates):
            if isinstance(fmt, Raw32):
                continue
            trial = table.copy()
            of_layers = [fmt] * len(names) if shapes is None else [fmt.for_shape(shape) for shape in shapes]
            lengths = []
            for row, layer in enumerate(layer_of_segment.tolist()):
                of_layers[layer].describe(trial[row : row + 1])
                n_bytes = of_layers[layer].bytes_for(int(trial["n"][row]))
                lengths.append(n_bytes + -n_bytes % WORD)
            trial["offset"] = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if lengths else []
            message = kernels.alloc(sum(lengths))
            seed = SEED if fmt.rounding == "stochastic" else None
            scanned = kernels.scan(trial, stochastic=seed is not None)
            while not scanned.done():
                pass
            shared = np.full(len(names), np.iinfo(np.int32).min, np.int32)
            np.maximum.at(shared, layer_of_segment, trial["exponent"])
            trial["exponent"] = shared[layer_of_segment]
            kernels.encode(trial, message, seed)
            sums = np.zeros((len(names), 4))
            np.add.at(sums, layer_of_segment, kernels.measure(trial, message))
            for i, name in measured:
                if np.isfinite(sums[i]).all():
                    self._errors[name][position] += sums[i, 1]
                    if position == self._first:
                        self._norms[name] = self._norms.get(name, 0.0) + float(sums[i, 2])

    def state(self) -> dict[str, Any]:
        """What was measured so far, as plain numbers."""
        return {name: [self._norms.get(name, 0.0), *map(float, errors)] for name, errors in self._errors.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state()` of the same candidates."""
        if any(len(values) != len(self._candidates) + 1 for values in state.values()):
            raise ValueError("APSCompressor: the state was measured with other auto_candidates")
        self._norms = {name: float(values[0]) for name, values in state.items()}
        self._errors = {name: np.array(values[1:], np.float64) for name, values in state.items()}

    def proposal(self, n_ranks: int) -> bytes:
        """This rank's choice: the index of the smallest sufficient candidate per layer.

        More than two ranks round twice, and the squares of the two errors add up. In two levels hosts round, not ranks.
        """
        choice = {}
        for name, errors in self._errors.items():
            norm = self._norms.get(name, 0.0)
            if not norm and self._first is not None:
                continue
            limit = self._bound**2 * norm / (2 if n_ranks > 2 else 1)
            good = [i for i, (fmt, _) in enumerate(self._candidates) if isinstance(fmt, Raw32) or errors[i] <= limit]
            choice[name] = good[0] if good else len(self._candidates) - 1
        return json.dumps(choice).encode()

    def settle(self, proposals: Sequence[bytes]) -> dict[str, Any]:
        """The overrides that follow from all ranks' proposals, equal on all of them; each is for one layer."""
        merged: dict[str, int] = {}
        for rank, raw in enumerate(proposals):
            for name, index in self._parse(raw, rank).items():
                merged[name] = max(merged.get(name, 0), index)
        return {glob.escape(name): self._candidates[index][1] for name, index in sorted(merged.items())}

    def _parse(self, raw: bytes, rank: int) -> dict[str, int]:
        """A rank's proposal; ValueError for bytes that are truncated or not ours."""
        try:
            choice = json.loads(raw)
        except (ValueError, RecursionError):
            choice = None
        if not isinstance(choice, dict) or not all(
            type(index) is int and 0 <= index < len(self._candidates) for index in choice.values()
        ):
            raise ValueError(
                f"APSCompressor: the formats that rank {rank} proposes are truncated or not of "
                f"horovod_aps ({len(raw)} bytes); check that all ranks run the same program"
            )
        return choice


def format_table(overrides: dict[str, Any]) -> str:
    """The choice as text that can be pasted back as the `overrides` argument."""
    lines = [f"    {name!r}: {value!r}," for name, value in overrides.items()]
    return "overrides={\n" + "\n".join(lines) + "\n}"
