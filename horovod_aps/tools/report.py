"""A self-contained HTML page on a run: bytes saved, each layer's exponent, underflow and error over time.

Beside the flow of data: it reads what `compressor.stats()` returns, from a compressor
(`compressor.report(path)`) or from a JSON file of it (`horovod-aps report stats.json`).
"""

from __future__ import annotations

import argparse
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_aps.kernels import EXP_NONFINITE, EXP_ZERO

N_BINS = 64  # columns of a heat map
MAX_ERROR = 0.08  # above this a layer is said to profit from a wider format; (5, 2) gives 0.052 by itself
MARGIN = 1.1  # a mantissa bit more leaves a little over half of the error
MAX_UNDERFLOW = 0.5
LEVELS = 24  # shades; few, so that equal neighbours merge and the page stays small
SHADES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
WIDEST = (5, 10)

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #888; --bad: #c0392b; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1.5em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 2em; }
.cards { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.2em 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .7em 1.1em; min-width: 8em; }
.card b { display: block; font-size: 1.6em; font-variant-numeric: tabular-nums; }
.quiet { color: var(--quiet); } .bad { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: .86em; }
th { text-align: left; font-weight: 600; padding: .3em .6em; border-bottom: 1px solid var(--line); }
td { padding: 1px .6em; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.n { text-align: right; } td.name { font-family: ui-monospace, monospace; }
svg.strip { display: block; width: 100%; min-width: 170px; height: 1.5em; }
pre { border: 1px solid var(--line); border-radius: 8px; padding: 1em; overflow-x: auto; }
.legend { display: inline-block; white-space: nowrap; margin-right: 2.5em; }
.scale { display: inline-block; width: 9em; height: .8em; vertical-align: middle; margin: 0 .5em;
  background: linear-gradient(90deg, SHADES); }
""".replace("SHADES", ", ".join(f"rgb{shade}" for shade in SHADES))


def write(stats: Mapping[str, Any], path: str | Path, title: str = "APS run") -> None:
    """Write the page on `stats`, what `compressor.stats()` returned, to `path`; folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(stats, title), encoding="utf-8")


def render(stats: Mapping[str, Any], title: str = "APS run") -> str:
    """The page as text; it loads nothing from anywhere."""
    if not isinstance(stats, Mapping) or not isinstance(stats.get("layers"), Mapping):
        raise ValueError("report: stats must be what compressor.stats() returns, with the key 'layers'")
    layers: Mapping[str, Mapping[str, Any]] = stats["layers"]
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _cards(stats),
    ]
    if not layers:
        parts.append("<p>No layer has been exchanged yet.</p>")
    else:
        parts += [_suggestions(layers), _layer_table(layers)]
    return "\n".join([*parts, "</body></html>\n"])


def suggest_overrides(
    layers: Mapping[str, Mapping[str, Any]],
    max_error: float = MAX_ERROR,
    max_underflow: float = MAX_UNDERFLOW,
) -> dict[str, Any]:
    """Formats for the layers whose error or underflow is above the bounds, ready for `overrides=`.

    Rounding error halves with every mantissa bit, so as many are added as the error asks for; underflow asks
    for another exponent bit. What does not fit in half a float goes to float32.
    """
    overrides: dict[str, Any] = {}
    for name, layer in layers.items():
        error, underflow = layer.get("relative_error"), layer.get("underflow")
        bits = _bits(layer["format"])
        if error is None or underflow is None or bits is None:
            continue
        if error <= max_error and underflow <= max_underflow:
            continue
        exp_bits, man_bits = bits
        if underflow > max_underflow:
            exp_bits += 1
        if error > max_error:
            man_bits += max(1, math.ceil(math.log2(MARGIN * error / max_error)))
        fits = exp_bits <= WIDEST[0] and man_bits <= WIDEST[1]
        overrides[_exact_pattern(name)] = (exp_bits, man_bits) if fits else "float32"
    return overrides


def _exact_pattern(name: str) -> str:
    """A glob pattern that matches this name only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _bits(text: str) -> tuple[int, int] | None:
    """(e, m) of a format as statistics name it, such as "e4m3"; None for float32."""
    exp_bits, found, man_bits = text.removeprefix("e").partition("m")
    return (int(exp_bits), int(man_bits)) if found and text.startswith("e") else None


def _cards(stats: Mapping[str, Any]) -> str:
    layers = stats["layers"].values()
    sent, fp32 = stats.get("bytes_sent", 0.0), stats.get("bytes_fp32", 0.0)
    n_nonfinite = sum(layer["n_nonfinite"] for layer in layers)
    cards = [
        (_size(sent), "sent by this rank"),
        (_size(fp32 - sent), "saved against fp32"),
        (f"{sent / fp32:.3f}" if fp32 else "–", "of fp32's bytes"),
        (str(len(layers)), "layers"),
        (f"{max((layer['n_exchanges'] for layer in layers), default=0):,}", "exchanges"),
        (str(n_nonfinite), "layer steps with NaN or Inf"),
    ]
    card = '<div class="card"><b>{}</b><span class="quiet">{}</span></div>'
    return f'<div class="cards">{"".join(card.format(*pair) for pair in cards)}</div>'


def _suggestions(layers: Mapping[str, Mapping[str, Any]]) -> str:
    if all(layer["relative_error"] is None for layer in layers.values()):
        return (
            "<p>Errors and underflow were not measured: make the compressor with <code>stats=True</code> to "
            "see them here.</p>"
        )
    overrides = suggest_overrides(layers)
    heading = "<h2>Layers that would profit from a higher precision</h2>"
    bound = f"a relative error of {MAX_ERROR:.0%} and an underflow of {MAX_UNDERFLOW:.0%}"
    if not overrides:
        return f"{heading}<p>None: every layer is within {bound}.</p>"
    lines = html.escape(
        "\n".join(f"    {pattern!r}: {value!r}," for pattern, value in overrides.items()), False
    )
    return (
        f"{heading}<p>{len(overrides)} of {len(layers)} layers are above {bound}. That need not hurt "
        f"training; if it does, pass this to the compressor:</p><pre>overrides={{\n{lines}\n}}</pre>"
    )


def _layer_table(layers: Mapping[str, Mapping[str, Any]]) -> str:
    histories = {name: _bins(layer["history"]) for name, layer in layers.items()}
    exponents = [value for bins in histories.values() for value in bins[0] if value is not None]
    low, high = min(exponents, default=0.0), max(exponents, default=0.0)
    worst = max(
        [MAX_ERROR, *(value for bins in histories.values() for value in bins[2] if value is not None)]
    )
    scales: list[Callable[[float], float]] = [
        lambda value: (value - low) / (high - low) if high > low else 0.5,
        lambda value: value,
        lambda value: value / worst,
    ]
    rows = []
    for name, layer in layers.items():
        strips = "".join(
            f"<td>{_strip(bins, scale)}</td>" for bins, scale in zip(histories[name], scales, strict=True)
        )
        shares = _percent(layer["underflow"], MAX_UNDERFLOW) + _percent(layer["relative_error"], MAX_ERROR)
        rows.append(
            f'<tr><td class="name">{html.escape(name)}</td><td class="n">{layer["n_elements"]:,}</td>'
            f'<td>{html.escape(layer["format"])}</td><td class="n">{_exponent(layer["exponent"])}</td>'
            f"{shares}{strips}</tr>"
        )
    legend = "".join(
        f'<span class="legend">{label}: {left}<span class="scale"></span>{right}</span>'
        for label, left, right in (
            ("exponent", f"2<sup>{low:.0f}</sup>", f"2<sup>{high:.0f}</sup>"),
            ("underflow", "0 %", "100 %"),
            ("error", "0 %", f"{worst:.1%}"),
        )
    )
    titles: tuple[str, ...] = ("layer", "elements", "format", "exponent", "underflow", "error")
    titles += tuple(f"{title} over time" for title in titles[3:])
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        "<h2>Layer by layer</h2><p>Time runs from left to right; a gap is a layer of zeros. The exponent is "
        f"that of the largest gradient of any rank.</p><p>{legend}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _bins(history: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Means of exponent, underflow and error in equal stretches of time; None where there is nothing."""
    n_bins = min(N_BINS, len(history))
    sums = [[[0.0, 0] for _ in range(n_bins)] for _ in range(3)]
    for i, (_, exponent, underflow, error) in enumerate(history):
        for kind, value in enumerate((exponent, underflow, error)):
            if exponent in (EXP_ZERO, EXP_NONFINITE) or not math.isfinite(value):
                continue
            cell = sums[kind][i * n_bins // len(history)]
            cell[0] += value
            cell[1] += 1
    return [[total / n if n else None for total, n in cells] for cells in sums]


def _strip(values: Sequence[float | None], scale: Callable[[float], float]) -> str:
    """One row of a heat map as SVG, with equal neighbours as one rectangle."""
    if not values:
        return ""
    levels = [None if value is None else round(min(max(scale(value), 0.0), 1.0) * LEVELS) for value in values]
    cells, start = [], 0
    for i in range(1, len(levels) + 1):
        if i < len(levels) and levels[i] == levels[start]:
            continue
        level = levels[start]
        if level is not None:
            cells.append(
                f'<rect x="{start}" width="{i - start}" height="1" fill="{_shade(level / LEVELS)}"/>'
            )
        start = i
    known = [value for value in values if value is not None]
    text = f"{min(known):.3g} to {max(known):.3g}" if known else "zeros only"
    return (
        f'<svg class="strip" viewBox="0 0 {len(values)} 1" preserveAspectRatio="none" '
        f'shape-rendering="crispEdges"><title>{text}</title>{"".join(cells)}</svg>'
    )


def _shade(position: float) -> str:
    """The colour at 0..1 of the scale."""
    place = position * (len(SHADES) - 1)
    i = min(int(place), len(SHADES) - 2)
    mixed = (round(a + (b - a) * (place - i)) for a, b in zip(SHADES[i], SHADES[i + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _percent(value: float | None, bound: float) -> str:
    if value is None:
        return '<td class="n quiet">–</td>'
    return f'<td class="n{" bad" if value > bound else ""}">{value:.1%}</td>'


def _exponent(value: int | None) -> str:
    return '<span class="quiet">–</span>' if value is None else str(value)


def _size(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def add_parser(subparsers: Any) -> None:
    """Add the `report` subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="make an HTML page of a run's statistics",
        description="Make a self-contained HTML page of json.dump(compressor.stats()).",
    )
    parser.add_argument("stats", type=Path, help="JSON file of what compressor.stats() returned")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: the same name with .html)")
    parser.add_argument("--title", help="heading of the page (default: the file's name)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if not args.stats.is_file():
        raise FileNotFoundError(
            f"{args.stats} is not a file; write one with json.dump(compressor.stats(), file)"
        )
    try:
        stats = json.loads(args.stats.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{args.stats} is not JSON: {error}") from None
    output = args.output or args.stats.with_suffix(".html")
    write(stats, output, args.title or args.stats.stem)
    print(output)
    return 0
