"""A self-contained HTML page on a run: bytes saved, each layer's exponent, underflow and error over time.

Beside the flow of data: it reads what `compressor.stats()` returns, from a compressor
(`compressor.report(path)`) or from a JSON file of it (`horovod-aps report stats.json`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horovod_aps.engine.statistics import BINS, N_BINS
from horovod_aps.formats import FloatFormat, parse
from horovod_aps.kernels import EXP_NONFINITE, EXP_ZERO

N_COLUMNS = 64  # of a heat map
MANY = 1 << 20  # elements, beside which the end of the last block does not count
MAX_ERROR = 0.08  # above this a layer is said to profit from another format; (5, 2) gives 0.052 by itself
MARGIN = 1.05  # for what a histogram does not know: where in its bin a value lies
MAX_UNDERFLOW = 0.5
N_POINTS = 64  # values that stand for one bin of a histogram
N_SHOWN = 12  # overrides; more are folded away
LEVELS = 24  # shades; few, so that equal neighbours merge and the page stays small
SHADES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
# By bits; of formats with as many the one with more exponent bits comes first: gradients spread as training goes on.
CANDIDATES = sorted(
    ((e, m) for e in range(1, 7) for m in range(11) if (e, m) != (1, 0)), key=lambda bits: (sum(bits), -bits[0])
)

STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #888; --bad: #c0392b; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1.5em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 2em; }
.cards { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.2em 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .7em 1.1em; min-width: 8em; }
.card b { display: block; font-size: 1.6em; font-variant-numeric: tabular-nums; }
th[data-sort] { cursor: pointer; white-space: nowrap; } th[data-sort]:hover { text-decoration: underline; }
th.up::after { content: " \\25b4"; } th.down::after { content: " \\25be"; }
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

# A click on a column's title sorts by it, and back; cells say their value in data-v where their text is not it.
SCRIPT = """
document.querySelectorAll("th[data-sort]").forEach((head) => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex, down = !head.classList.contains("down");
  const value = (row) => { const cell = row.cells[column]; return cell.dataset.v ?? cell.textContent; };
  const order = (a, b) => head.dataset.sort === "number" ? Number(a) - Number(b) : a.localeCompare(b);
  const rows = Array.from(body.rows).sort((a, b) => (down ? -1 : 1) * order(value(a), value(b)));
  head.closest("tr").querySelectorAll("th").forEach((other) => other.classList.remove("up", "down"));
  head.classList.add(down ? "down" : "up");
  body.append(...rows);
}));
"""


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
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _cards(stats),
    ]
    if not layers:
        parts.append("<p>No layer has been exchanged yet.</p>")
    else:
        parts += [_suggestions(layers), _layer_table(layers)]
        parts.append(f"<script>{SCRIPT}</script>")
    return "\n".join([*parts, "</body></html>\n"])


@functools.cache
def _bin_points() -> np.ndarray:
    """[bin, point]: values that stand for each bin of a histogram, in units of 2^E."""
    codes = np.arange(N_BINS + 2, dtype=np.uint8)
    values = BINS.decode(codes[:-1]).astype(np.float64) * 2.0 ** (1 - BINS.top_exponent)
    values = np.append(values, 2 * values[-1] - values[-2])
    edges = (values[:-1] + values[1:]) / 2
    # Spread evenly, but at random within their share of the bin: round numbers would be exact in many a format.
    place = (np.arange(N_POINTS) + np.random.default_rng(0).random((N_BINS, N_POINTS))) / N_POINTS
    points = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * place
    return points[::-1]  # from the top down, as histograms are


@functools.cache
def _losses(exp_bits: int, man_bits: int, shift: int) -> tuple[np.ndarray, np.ndarray]:
    """What a format does to each bin if its top is at 2^(E + shift): mean squared error, share that becomes zero."""
    fmt, points = FloatFormat(exp_bits, man_bits), _bin_points()
    power = fmt.top_exponent - shift
    scaled = (points * 2.0**power).astype(np.float32)
    rounded = np.minimum(fmt.quantize(scaled), fmt.max).astype(np.float64)  # saturates, as the exchange does
    return ((rounded * 2.0**-power - points) ** 2).mean(axis=1), (rounded == 0).mean(axis=1)


def expected_losses(histogram: Sequence[int], exp_bits: int, man_bits: int) -> tuple[float, float]:
    """Relative error and underflow of a layer with this histogram of exponents if it travelled as (e, m)."""
    counts = np.zeros(N_BINS)
    counts[: len(histogram)] = histogram
    fmt, points = FloatFormat(exp_bits, man_bits), _bin_points()
    # A layer's exponent is the least at which its largest value, rounded, fits; here, the end of the highest bin.
    largest = float(points[np.flatnonzero(counts)[0]].max())
    fits = fmt.max * (1 + 2.0 ** -(man_bits + 2))
    shift = math.ceil(math.log2(largest * 2.0**fmt.top_exponent / fits))
    squared, lost = _losses(exp_bits, man_bits, shift)
    error = math.sqrt(float(counts @ squared / (counts @ (points**2).mean(axis=1))))
    return error, float(counts @ lost / counts.sum())


def _good_formats(layer: Mapping[str, Any], max_error: float, max_underflow: float) -> set[tuple[int, int]] | None:
    """The candidates that keep a layer within the bounds; None if its histogram was not measured.

    Where the layer has measured worse than its histogram says, so do all formats: gradients change in a run.
    """
    histogram, bits = layer.get("histogram"), _bits(layer["format"])
    if not histogram or bits is None or layer.get("relative_error") is None:
        return None
    error, underflow = expected_losses(histogram, *bits)
    worse = max(1.0, layer["relative_error"] / error) if error else 1.0
    more_lost = max(0.0, layer["underflow"] - underflow) if underflow else 0.0
    good = set()
    for candidate in CANDIDATES:
        error, underflow = expected_losses(histogram, *candidate)
        if MARGIN * worse * error <= max_error and underflow + (more_lost if underflow else 0.0) <= max_underflow:
            good.add(candidate)
    return good


def _is_above(layer: Mapping[str, Any], max_error: float, max_underflow: float) -> bool:
    error, underflow = layer.get("relative_error"), layer.get("underflow")
    if error is None or underflow is None or _bits(layer["format"]) is None:
        return False
    return bool(error > max_error or underflow > max_underflow)


def suggest_format(
    layers: Mapping[str, Mapping[str, Any]], max_error: float = MAX_ERROR, max_underflow: float = MAX_UNDERFLOW
) -> Any:
    """The (e, m) of the fewest bits that keeps every layer within the bounds, from their histograms of exponents.

    "float32" if none does, None if no layer was measured. Layers in float32 are left out.
    """
    good = [_good_formats(layer, max_error, max_underflow) for layer in layers.values()]
    known = [one for one in good if one is not None]
    if not known:
        return None
    return next((candidate for candidate in CANDIDATES if all(candidate in one for one in known)), "float32")


def suggest_overrides(
    layers: Mapping[str, Mapping[str, Any]],
    max_error: float = MAX_ERROR,
    max_underflow: float = MAX_UNDERFLOW,
) -> dict[str, Any]:
    """Formats for the layers whose error or underflow is above the bounds, ready for `overrides=`.

    Each is the one of the fewest bits that keeps the layer within both, from its histogram of exponents: mantissa bits
    where values are rounded too coarsely, exponent bits where small ones vanish. What needs more than 16 bits, and
    what was measured without a histogram, goes to float32.
    """
    overrides: dict[str, Any] = {}
    for name, layer in layers.items():
        if _is_above(layer, max_error, max_underflow):
            good = _good_formats(layer, max_error, max_underflow) or set()
            overrides[_exact_pattern(name)] = next((one for one in CANDIDATES if one in good), "float32")
    return overrides


def _exact_pattern(name: str) -> str:
    """A glob pattern that matches this name only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _bits(text: str) -> tuple[int, int] | None:
    """(e, m) of a format as statistics name it, such as "e4m3"; None for float32."""
    exp_bits, found, man_bits = text.removeprefix("e").partition("m")
    return (int(exp_bits), int(man_bits)) if found and text.startswith("e") else None


def _n_bits(text: str) -> float:
    """Bits per element of a format as statistics name it, scales of blocks included; 32 for one unknown here."""
    bits = _bits(text)
    if bits is not None:
        return 1 + sum(bits)
    with contextlib.suppress(ValueError):
        return parse(text).bytes_for(MANY) * 8 / MANY
    return 32


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
    bound = f"a relative error of {MAX_ERROR:.0%} or an underflow of {MAX_UNDERFLOW:.0%}"
    return _one_format(layers, bound) + _overrides(layers, bound)


def _one_format(layers: Mapping[str, Mapping[str, Any]], bound: str) -> str:
    """One suggestion for all layers."""
    best = suggest_format(layers)
    heading = "<h2>One format for all layers</h2>"
    if best is None:
        return f"{heading}<p>No suggestion: no histogram of exponents was measured.</p>"
    if best == "float32":
        return f"{heading}<p>No format of up to 16 bits keeps every layer within {bound}.</p>"
    sizes = {name: layer["n_elements"] for name, layer in layers.items()}
    sent = sum(sizes[name] * _n_bits(layer["format"]) for name, layer in layers.items()) / max(1, sum(sizes.values()))
    e, m = best
    return (
        f"{heading}<p><code>e={e}, m={m}</code>, {1 + e + m} bits, is the smallest in which no layer is above {bound}; "
        f"now {sent:.3g} bits per value are sent on average. It follows from how far each layer's values lie below its "
        f"largest one.</p>"
    )


def _overrides(layers: Mapping[str, Mapping[str, Any]], bound: str) -> str:
    overrides = suggest_overrides(layers)
    heading = "<h2>Layers that would profit from another format</h2>"
    if not overrides:
        return f"{heading}<p>None: no layer is above {bound}.</p>"
    lines = html.escape("\n".join(f"    {pattern!r}: {value!r}," for pattern, value in overrides.items()), False)
    block = f"<pre>overrides={{\n{lines}\n}}</pre>"
    if len(overrides) > N_SHOWN:
        block = f"<details><summary>{len(overrides)} overrides</summary>{block}</details>"
    return (
        f"{heading}<p>{len(overrides)} of {len(layers)} layers are above {bound}. That need not hurt "
        f"training; if it does, pass this to the compressor, the smallest format within both for each:</p>{block}"
    )


def _layer_table(layers: Mapping[str, Mapping[str, Any]]) -> str:
    histories = {name: _bins(layer["history"]) for name, layer in layers.items()}
    exponents = [value for bins in histories.values() for value in bins[0] if value is not None]
    low, high = min(exponents, default=0.0), max(exponents, default=0.0)
    worst = max([MAX_ERROR, *(value for bins in histories.values() for value in bins[2] if value is not None)])
    scales: list[Callable[[float], float]] = [
        lambda value: (value - low) / (high - low) if high > low else 0.5,
        lambda value: value,
        lambda value: value / worst,
    ]
    rows = []
    for name, layer in layers.items():
        strips = "".join(f"<td>{_strip(bins, scale)}</td>" for bins, scale in zip(histories[name], scales, strict=True))
        shares = _percent(layer["underflow"], MAX_UNDERFLOW) + _percent(layer["relative_error"], MAX_ERROR)
        rows.append(
            f'<tr><td class="name">{html.escape(name)}</td>'
            f'<td class="n" data-v="{layer["n_elements"]}">{layer["n_elements"]:,}</td>'
            f'<td data-v="{_n_bits(layer["format"])}">{html.escape(layer["format"])}</td>{_exponent(layer["exponent"])}'
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
    titles = [
        ("layer", "text", "Horovod's name of the tensor; overrides match it"),
        ("elements", "number", "values per exchange"),
        ("format", "number", "exponent and mantissa bits on the wire; sorts by bits"),
        ("exponent", "number", "power of two of the largest gradient of any rank, in the last exchange"),
        ("underflow", "number", f"share of values that became zero; red above {MAX_UNDERFLOW:.0%}"),
        ("error", "number", f"norm of what rounding changed here, over the gradient's; red above {MAX_ERROR:.0%}"),
    ]
    head = "".join(f'<th data-sort="{kind}" title="{html.escape(tip)}">{title}</th>' for title, kind, tip in titles)
    tip = "from the first exchange to the last"
    head += "".join(f'<th title="{tip}">{title} over time</th>' for title, *_ in titles[3:])
    return (
        "<h2>Layer by layer</h2><p>Time runs from left to right; a gap is a layer of zeros. A click on a "
        f"title sorts by it; titles and strips say more under the pointer.</p><p>{legend}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _bins(history: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Means of exponent, underflow and error in equal stretches of time; None where there is nothing."""
    n_bins = min(N_COLUMNS, len(history))
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
            cells.append(f'<rect x="{start}" width="{i - start}" height="1" fill="{_shade(level / LEVELS)}"/>')
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
        return '<td class="n quiet" data-v="-1">–</td>'
    return f'<td class="n{" bad" if value > bound else ""}" data-v="{value:.6g}">{value:.1%}</td>'


def _exponent(value: int | None) -> str:
    if value is None:
        return '<td class="n quiet" data-v="-9999">–</td>'
    return f'<td class="n">{value}</td>'


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
        raise FileNotFoundError(f"{args.stats} is not a file; write one with json.dump(compressor.stats(), file)")
    try:
        stats = json.loads(args.stats.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{args.stats} is not JSON: {error}") from None
    output = args.output or args.stats.with_suffix(".html")
    write(stats, output, args.title or args.stats.stem)
    print(output)
    return 0
