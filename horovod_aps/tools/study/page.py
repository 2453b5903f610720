"""The study as one HTML page and as Markdown: answers, tables, plots; measured and predicted told apart."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from horovod_aps.tools import report
from horovod_aps.tools.predict import table
from horovod_aps.tools.study.answers import Answer, by_place, speedup
from horovod_aps.tools.study.cells import Place, Record, bits_of, gbits, seconds_to

COLOURS = ("#555", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#ff7f0e")
WIDTH, HEIGHT, LEFT, BOTTOM = 460, 260, 56, 36
HEADERS = (
    "method", "bits", "sync ms", "step ms", "epoch s", "over fp32", "MB per rank", "error", "accuracy %", "to target s"
)  # fmt: skip
_STYLE = """
.measured { background: #2ca02c33; } .predicted { background: #1f77b433; }
.measured, .predicted { border-radius: 4px; padding: 0 .5em; font-size: .8em; }
.plots { display: flex; flex-wrap: wrap; gap: 1.5em; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
"""


def _number(value: float | None, pattern: str, factor: float = 1.0) -> str:
    return "" if value is None else format(factor * value, pattern)


def row(cells: Mapping[str, Record], method: str, target: float) -> list[str]:
    """The cells of a table's row; empty where a number was neither measured nor predicted."""
    one = cells[method]
    sent = one.get("bytes")
    to_target = seconds_to(one, target)
    never = "never" if "curve" in one and to_target is None else ""
    gain = speedup(dict(cells), method)
    return [
        method,
        f"{bits_of(method):.3g}",
        _number(one.get("sync_s"), ".1f", 1e3),
        _number(one.get("step_s"), ".1f", 1e3),
        _number(one.get("epoch_s"), ".4g"),
        _number(gain, ".2f"),
        _number(sent, ".3g", 1e-6),
        _number(one.get("error"), ".1e"),
        _number(one.get("accuracy"), ".1f", 100),
        never or _number(to_target, ".3g"),
    ]


def is_measured(place: Place) -> bool:
    """Whether its numbers come from a launch."""
    return place.kind != "predicted"


def _title(place: Place) -> str:
    return f"{place.network}, {place.link}, {place.ranks} ranks, {place.launcher}"


def _ordered(records: Sequence[Record]) -> dict[Place, dict[str, Record]]:
    found = by_place(records)

    def key(place: Place) -> tuple[Any, ...]:
        return (
            not is_measured(place),
            place.kind,
            place.network,
            place.launcher,
            place.ranks,
            gbits(place.link) or 1e9,
        )

    return {place: found[place] for place in sorted(found, key=key)}


def markdown(records: Sequence[Record], answers: Sequence[Answer], notes: Sequence[str], target: float) -> str:
    """The study for a terminal."""
    lines = ["## Answers", ""]
    lines += [f"- **{one.network}**, {one.ranks} ranks, {one.launcher}: {one.text}" for one in answers]
    lines += ["", *(f"- {note}" for note in notes), ""]
    for place, cells in _ordered(records).items():
        mark = f"measured, {place.kind}" if is_measured(place) else "predicted"
        lines += [f"### {_title(place)}: {mark}", ""]
        lines += [table(HEADERS, [row(cells, name, target) for name in cells]), ""]
    return "\n".join(lines)


def _html_table(place: Place, cells: Mapping[str, Record], target: float) -> str:
    kind = "measured" if is_measured(place) else "predicted"
    head = "".join(
        f'<th data-sort="{"text" if name == "method" else "number"}">{html.escape(name)}</th>' for name in HEADERS
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{"name" if k == 0 else "n"}">{html.escape(text)}</td>'
                         for k, text in enumerate(row(cells, name, target))) + "</tr>"
        for name in cells
    )  # fmt: skip
    how = f" ({place.kind})" if kind == "measured" else ""
    return (
        f'<h3>{html.escape(_title(place))} <span class="{kind}">{kind}{how}</span></h3>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


Line = tuple[str, list[tuple[float, float]], bool]
"""Label, points, and whether they are joined."""


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], logarithmic: bool) -> str:
    """An SVG chart; joined points are a line, others dots."""
    points = [point for _, one, _ in lines for point in one]
    if not points:
        return ""

    def scale(value: float) -> float:
        return math.log10(value) if logarithmic else value

    spans = [(min(scale(p[k]) for p in points), max(scale(p[k]) for p in points)) for k in (0, 1)]
    spans = [(low, high) if high > low else (low - 0.5, high + 0.5) for low, high in spans]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = ((scale(point[k]) - spans[k][0]) / (spans[k][1] - spans[k][0]) for k in (0, 1))
        return LEFT + x * (WIDTH - LEFT - 10), HEIGHT - BOTTOM - y * (HEIGHT - BOTTOM - 10)

    shapes = []
    labels = list(dict.fromkeys(label for label, _, _ in lines))
    for label, one, joined in lines:
        colour = COLOURS[labels.index(label) % len(COLOURS)]
        placed = [place(point) for point in sorted(one)]
        if joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        else:
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in placed]
    for k, share in ((0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0)):
        value = spans[k][0] + share * (spans[k][1] - spans[k][0])
        text = f"{10**value if logarithmic else value:.3g}"
        x = LEFT + share * (WIDTH - LEFT - 30) if k == 0 else 4
        y = HEIGHT - BOTTOM + 14 if k == 0 else HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - 20)
        shapes.append(f'<text x="{x:.0f}" y="{y:.0f}">{text}</text>')
    shapes.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    key = " ".join(
        f'<span style="color:{COLOURS[k % len(COLOURS)]}">&#9632;</span> {html.escape(label)}'
        for k, label in enumerate(labels)
    )
    return (
        f'<figure style="width:{WIDTH}px;margin:0"><b>{html.escape(title)}</b>, {html.escape(y_label)}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<rect x="{LEFT}" y="10" width="{WIDTH - LEFT - 10}" height="{HEIGHT - BOTTOM - 10}" fill="none" '
        f'stroke="#8884"/>{"".join(shapes)}</svg><figcaption class="quiet">{key}</figcaption></figure>'
    )


def _by_bandwidth(records: Sequence[Record]) -> list[str]:
    """Per network, ranks and launcher: predictions as lines, measured synchronisations as dots."""
    groups: dict[tuple[str, int, str], dict[tuple[str, bool], list[tuple[float, float]]]] = {}
    for record in records:
        rate, value = gbits(record["link"]), record.get("sync_s")
        if rate is None or value is None:
            continue
        key = (record["network"], record["ranks"], record["launcher"])
        line = groups.setdefault(key, {}).setdefault((record["method"], record["kind"] == "predicted"), [])
        line.append((rate, 1e3 * value))
    return [
        chart(
            f"{network}, {ranks} ranks, {launcher}",
            "Gbit/s",
            "ms per synchronisation: lines predicted, dots measured",
            [(method, points, joined) for (method, joined), points in lines.items()],
            True,
        )
        for (network, ranks, launcher), lines in groups.items()
    ]


def _curves(records: Sequence[Record]) -> list[str]:
    """Per training: accuracy against time."""
    out = []
    for place, cells in _ordered(records).items():
        lines: list[Line] = [
            (name, [(point["seconds"], 100 * point["accuracy"]) for point in cell["curve"]], True)
            for name, cell in cells.items()
            if cell.get("curve")
        ]
        out.append(chart(_title(place), "seconds of training", "test accuracy in %, measured", lines, False))
    return [one for one in out if one]


def render(
    records: Sequence[Record], answers: Sequence[Answer], notes: Sequence[str], target: float, command: str
) -> str:
    """The page as text; it loads nothing from anywhere."""
    said = "".join(
        f'<div class="card"><b>{html.escape(one.network)}: {"yes" if one.helps else "no"}</b>'
        f'<span class="quiet">{one.ranks} ranks, {one.launcher}</span><p>{html.escape(one.text)}</p></div>'
        for one in answers
    )
    remarks = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    tables = "".join(_html_table(place, cells, target) for place, cells in _ordered(records).items())
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"><title>Does low precision help?</title>',
            f"<style>{report.STYLE}{_STYLE}</style></head><body><h1>Does low precision help?</h1>",
            f"<p><code>{html.escape(command)}</code></p><ul>{remarks}</ul>{said}",
            f'<h2>Time against bandwidth</h2><div class="plots">{"".join(_by_bandwidth(records))}</div>',
            f'<h2>Accuracy against time</h2><div class="plots">{"".join(_curves(records))}</div>',
            f"<h2>Tables</h2><p>Accuracy is in %; the target is {100 * target:g} %.</p>{tables}",
            f"<script>{report.SCRIPT}</script></body></html>\n",
        ]
    )
