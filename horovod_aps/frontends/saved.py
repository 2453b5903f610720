"""What was loaded from a checkpoint, until the reducers that it is for have come.

A state has a part for each reducer, by its label. The next run may have reducers with other labels: on another device,
for call sites with other names. So a reducer takes over its own part if there is one, and residuals that it lacks are
given to it by their layers' names, each only once: what is saved next time holds no copy.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from horovod_aps.engine.feedback import layer_of
from horovod_aps.frontends.reducer import ReducerKey

EMPTY: dict[str, Any] = {"step_number": 0, "residuals": {}, "overrides": None, "auto": None}
ANYBODY = ""  # label of a state that has no parts


def label_of(key: ReducerKey) -> str:
    """What a reducer is called in a state; the next run may have other ranks."""
    return f"{key.process_set_id} {key.place}"


class Saved:
    """Parts of a loaded state that no reducer has taken over; for all threads."""

    def __init__(self, whole: dict[str, Any], parts: dict[str, dict[str, Any]]) -> None:
        """`whole` is all of the state in one; without parts it is for anybody."""
        self._numbers = whole | {"residuals": {}}
        self._step_numbers = {label: part["step_number"] for label, part in parts.items()}
        self._parts = dict(parts) or {ANYBODY: whole}
        self._has_strangers = False
        self._lock = threading.Lock()

    def take_part(self, key: ReducerKey) -> dict[str, Any]:
        """The part of one reducer; one that was not there begins where those of its process set were."""
        label = label_of(key)
        with self._lock:
            found = self._parts.pop(label, None)
            self._has_strangers |= label not in self._step_numbers
        near = [number for other, number in self._step_numbers.items() if _is_for(other, key)]
        return found or self._numbers | {"step_number": max(near, default=self._numbers["step_number"])}

    def take_residuals(self, key: ReducerKey, names: set[str]) -> dict[str, np.ndarray]:
        """Those of some layers, whole or in pieces, that nobody has taken over; nobody gets them again."""
        taken: dict[str, np.ndarray] = {}
        with self._lock:
            for residuals in [part["residuals"] for label, part in self._parts.items() if _is_for(label, key)]:
                mine = [one for one in residuals if one not in taken and layer_of(one) in names]
                taken.update((name, residuals.pop(name)) for name in mine)
        return taken

    def rest(self) -> dict[str, dict[str, Any]]:
        """What is to be saved again: parts whose reducers may come yet, and residuals that nobody has taken."""
        with self._lock:
            return {
                label: part | {"residuals": dict(part["residuals"])}
                for label, part in self._parts.items()
                if part["residuals"] or not self._has_strangers
            }


def together(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The residuals of all reducers, and the parts of a state, which say the names of theirs among these."""
    residuals: dict[str, Any] = {}
    named = {}
    for label, part in parts.items():
        keys = {name: name if name not in residuals else f"{name} of {label}" for name in part["residuals"]}
        residuals |= {keys[name]: values for name, values in part["residuals"].items()}
        named[label] = part | {"residuals": keys}
    return residuals, named


def read(state: Mapping[str, Any], residuals: Mapping[str, Any]) -> dict[str, Any]:
    """A state of one reducer, or of all in one."""
    return {
        "step_number": int(state["step_number"]),
        "residuals": {name: np.asarray(value, np.float32).flatten() for name, value in residuals.items()},
        "overrides": state["overrides"],
        "auto": state.get("auto"),
    }


def _is_for(label: str, key: ReducerKey) -> bool:
    return label == ANYBODY or label.startswith(f"{key.process_set_id} ")
