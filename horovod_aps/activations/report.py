"""A self-contained HTML page on what a pass saved: reads what `saver.stats()` returns."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_aps.tools.report import SCRIPT, STYLE, _size


def write(stats: Mapping[str, Any], path: str | Path, title: str = "Activations") -> None:
    """Write the page to `path`; folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(stats, title), encoding="utf-8")


def render(stats: Mapping[str, Any], title: str = "Activations") -> str:
    """The page as text; it loads nothing from anywhere."""
    if not isinstance(stats, Mapping) or not isinstance(stats.get("layers"), Mapping):
        raise ValueError("report: stats must be what saver.stats() returns, with the key 'layers'")
    cards = [
        ("saved by plain training", _size(stats["saved_bytes"])),
        ("stored", _size(stats["stored_bytes"])),
        ("smaller", f"{stats['ratio']:.1f}x" if stats["ratio"] else "-"),
        ("compressing and decompressing", f"{1e3 * sum(x['seconds'] for x in stats['layers'].values()):.0f} ms a pass"),
    ]
    rows = []
    for name, layer in stats["layers"].items():
        ratio = layer["ratio"] or 0.0
        rows.append(
            f'<tr><td class="name">{html.escape(name)}</td>'
            + _cell(layer["bound"], "" if layer["bound"] is None else f"{layer['bound']:.3g}")
            + _cell(layer["share"], "" if layer["share"] is None else f"{100 * layer['share']:.2f} %")
            + _cell(layer["saved_bytes"], _size(layer["saved_bytes"]))
            + _cell(layer["stored_bytes"], _size(layer["stored_bytes"]))
            + _cell(ratio, f"{ratio:.1f}x", bad=layer["bound"] is not None and ratio < 1.5)
            + _cell(layer["seconds"], f"{1e3 * layer['seconds']:.2f}")
            + "</tr>"
        )
    heads = ("layer", "bound", "error of gradient", "saved", "stored", "smaller", "ms")
    head = "".join(f'<th data-sort="{"number" if i else "text"}">{name}</th>' for i, name in enumerate(heads))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
            '<div class="cards">',
            *[f'<div class="card"><b>{value}</b>{name}</div>' for name, value in cards],
            "</div>",
            f"<table><thead><tr>{head}</tr></thead><tbody>",
            *rows,
            f"</tbody></table><script>{SCRIPT}</script>",
            "</body></html>\n",
        ]
    )


def _cell(value: float | None, text: str, bad: bool = False) -> str:
    return f'<td class="n{" bad" if bad else ""}" data-v="{value or 0}">{text}</td>'
