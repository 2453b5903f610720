"""The study's answers in words: does low precision help here, which format, and until which bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from horovod_aps.tools.study.cells import BUILT_IN, Place, Record, bits_of, gbits
from horovod_aps.tools.study.predicted import HELPS

StopsHelping = Callable[[str, str, int, str], float | None]
"""Gbit/s by network, method, ranks and launcher."""


def by_place(records: Iterable[Record]) -> dict[Place, dict[str, Record]]:
    """The records of each place by method."""
    found: dict[Place, dict[str, Record]] = {}
    for record in records:
        found.setdefault(Place.of(record), {})[record["method"]] = record
    return found


def seconds(record: Record) -> float | None:
    """Of a step where it is known, else of a synchronisation, else of the whole run."""
    for name in ("step_s", "sync_s", "run_s"):
        if record.get(name) is not None:
            return float(record[name])
    return None


def speedup(cells: dict[str, Record], method: str) -> float | None:
    """Over fp32 in the same place."""
    times = [seconds(cells[name]) if name in cells else None for name in ("fp32", method)]
    return times[0] / times[1] if times[0] and times[1] else None


@dataclass(frozen=True)
class Safety:
    """Which methods ended as accurate as fp32, within a tolerance."""

    network: str
    fp32: float
    safe: dict[str, float]
    unsafe: dict[str, float]

    def __str__(self) -> str:
        def names(found: dict[str, float]) -> str:
            return ", ".join(f"{name} {100 * value:.1f}" for name, value in found.items()) or "none"

        return (
            f"Accuracy of {self.network} in %, measured: fp32 {100 * self.fp32:.1f}; "
            f"not below it by more than the tolerance: {names(self.safe)}; below: {names(self.unsafe)}."
        )


def safety(records: Sequence[Record], network: str, ranks: int, tolerance: float) -> Safety | None:
    """From trainings of the network or its small relative; None if there was none with fp32 in it."""
    relative = BUILT_IN[network].relative if network in BUILT_IN else network
    places = [place for place in by_place(records) if place.kind in ("trained", "script") and place.network == relative]
    for place in sorted(places, key=lambda place: (place.ranks != ranks, place.ranks)):
        cells = by_place(records)[place]
        found = {name: cell["accuracy"] for name, cell in cells.items() if cell.get("accuracy") is not None}
        if "fp32" not in found:
            continue
        fp32 = found.pop("fp32")
        safe = {name: value for name, value in found.items() if value >= fp32 - tolerance}
        unsafe = {name: value for name, value in found.items() if name not in safe}
        return Safety(f"{relative} on {place.ranks} ranks", fp32, safe, unsafe)
    return None


@dataclass(frozen=True)
class Answer:
    """What is said of one network, at a number of ranks and a launcher."""

    network: str
    ranks: int
    launcher: str
    helps: bool
    text: str


def _best(cells: dict[str, Record], allowed: Iterable[str]) -> tuple[str, float] | None:
    found = [(name, speedup(cells, name)) for name in allowed if name in cells]
    known = [(name, value) for name, value in found if value is not None]
    return max(known, key=lambda pair: pair[1]) if known else None


def _order(link: str) -> float:
    return gbits(link) or math.inf


def _at_links(places: dict[Place, dict[str, Record]], safe: Safety | None) -> tuple[list[str], bool, str]:
    """Sentences, whether any method helps, and the method that is best on the slowest link."""
    sentences, helps, chosen = [], False, ""
    for place, cells in sorted(places.items(), key=lambda pair: (pair[0].kind == "predicted", _order(pair[0].link))):
        allowed = [name for name in cells if name != "fp32" and (safe is None or name not in safe.unsafe)]
        best = _best(cells, allowed)
        if best is None:
            continue
        name, gain = best
        what = {"predicted": "predicted", "synchronised": "synchronisation alone, measured"}.get(place.kind, "measured")
        if gain > HELPS:
            helps, chosen = True, chosen or name
            sentences.append(f"at {place.link} {name} is {gain:.2f}x as fast as fp32 ({what})")
        else:
            sentences.append(f"at {place.link} nothing is {HELPS - 1:.0%} faster than fp32 ({what})")
    return sentences, helps, chosen


def answer(
    records: Sequence[Record], network: str, ranks: int, launcher: str, tolerance: float, stops: StopsHelping
) -> Answer | None:
    """The answer for one network; None if it has no cells."""
    mine = {
        place: cells
        for place, cells in by_place(records).items()
        if (place.network, place.ranks, place.launcher) == (network, ranks, launcher)
    }
    if not mine:
        return None
    safe = safety(records, network, ranks, tolerance)
    sentences, helps, chosen = _at_links(mine, safe)
    parts = ["Low precision helps: " if helps else "Low precision does not help: "]
    parts.append("; ".join(sentences) + ".")
    if chosen and safe:
        parts.append(f" Take {chosen} ({bits_of(chosen):.3g} bits) on the slowest link.")
    elif chosen:
        parts.append(f" {chosen} ({bits_of(chosen):.3g} bits) is fastest on the slowest link, its accuracy unknown.")
    if any(place.kind == "predicted" for place in mine) and helps:
        methods = sorted({name for cells in mine.values() for name in cells} - {"fp32"}, key=bits_of)
        ends: dict[str, list[str]] = {}
        for name in methods:
            ends.setdefault(_rate(stops(network, name, ranks, launcher)), []).append(name)
        shown = "; ".join(f"{rate}: {', '.join(names)}" for rate, names in ends.items())
        parts.append(f" It stops helping (predicted) from these rates on: {shown}.")
    parts.append(f" {safe}" if safe else " Accuracy was not measured: nothing like it was trained.")
    return Answer(network, ranks, launcher, helps, "".join(parts))


def _rate(value: float | None) -> str:
    if value is None:
        return "never helps"
    return "at no rate" if math.isinf(value) else f"{value:.3g} Gbit/s"
