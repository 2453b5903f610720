"""What a frontend sees of whatever reduces its layers: the packed exchange, or the float16 carrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from horovod_aps.engine.feedback import Lender
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.statistics import Statistics


class ReducerKey(NamedTuple):
    """What tells the reducers of one compressor apart."""

    process_set_id: int
    place: str
    """The device, or the call site, that it is for."""
    members: tuple[int, ...]
    """Horovod uses the id of a removed process set again, for other ranks."""


class Reducer(Protocol):
    """Layers in, the same layers reduced over the ranks of a process set; frontends keep one per `ReducerKey`."""

    statistics: Statistics

    def submit(self, *layers: Layer) -> None:
        """Hand in one gradient, or a group of them. Never blocks."""

    def wait(self, layers: Sequence[Layer] | None = None) -> None:
        """Until these layers have their results; all that was submitted if None."""

    def forget(self) -> None:
        """Drop what was submitted and has not begun, and all that was learned from the present ranks."""

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change options between steps, in the same way on all ranks."""

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The formats that overrides="auto" has chosen, if it has."""

    @property
    def way(self) -> str:
        """How gradients travel between hosts, for people; empty while that is not known."""

    def state(self) -> dict[str, Any]:
        """`step_number`, `residuals`, `overrides` and `auto`, as plain arrays and numbers."""

    def load_state(self, state: dict[str, Any], lender: Lender | None = None) -> None:
        """Go on from a `state()`; residuals that it lacks are asked of the lender when their layers come."""

    def close(self) -> None:
        """Nobody will use it again."""
