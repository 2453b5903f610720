"""The HTML report: what it says is compared with the statistics that it was given."""

from __future__ import annotations

import argparse
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_aps.engine.exchange import local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.statistics import SAMPLE
from horovod_aps.kernels import EXP_ZERO, CpuKernels
from horovod_aps.options import Options, as_format
from horovod_aps.tools import report

VOID_TAGS = {"meta", "rect", "br"}


class Page(HTMLParser):
    """The text of a page; checks that tags are balanced and that nothing is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.n_tags: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.n_tags[tag] = self.n_tags.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.n_tags[tag] = self.n_tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def layer(error: float | None = 0.01, underflow: float | None = 0.1, fmt: str = "e4m3", **more: Any) -> dict[str, Any]:
    history = [] if error is None else [(i + 1, -5 + i % 3, underflow, error) for i in range(100)]
    return {
        "format": fmt,
        "n_elements": 1234,
        "exponent": -5,
        "n_exchanges": 100,
        "n_nonfinite": 0,
        "underflow": underflow,
        "relative_error": error,
        "history": history,
        **more,
    }


def stats(**layers: dict[str, Any]) -> dict[str, Any]:
    return {"bytes_sent": 25e6, "bytes_fp32": 100e6, "ratio": 0.25, "layers": layers}


def test_render_shows_the_figures_it_was_given() -> None:
    page = Page(report.render(stats(conv=layer(error=0.0234, underflow=0.456)), title="A run"))
    for text in (
        "A run",
        "25 MB sent by this rank",
        "75 MB saved against fp32",
        "0.250 of fp32's bytes",
        "conv",
        "1,234",
        "e4m3",
        "45.6%",
        "2.3%",
        "100 exchanges",
    ):
        assert text in page.text, text
    assert page.links == []
    assert page.n_tags["svg"] == 3


def test_render_escapes_names_and_title() -> None:
    text = report.render(stats(**{"<script>alert(1)</script>": layer(error=0.5)}), title="a<b & c")
    assert "<script>alert" not in text
    assert "a<b & c" in Page(text).text


def test_render_without_layers_and_without_measurements() -> None:
    assert "No layer has been exchanged yet" in Page(report.render(stats())).text
    page = Page(report.render(stats(conv=layer(error=None, underflow=None))))
    assert "stats=True" in page.text
    assert "svg" not in page.n_tags


def test_render_leaves_a_gap_for_zero_layers() -> None:
    history = [(i, EXP_ZERO if i < 50 else -3, 0.0, 0.0) for i in range(100)]
    strip = report.render(stats(conv=layer(history=history))).split("<svg")[1]
    first = re.search(r'<rect x="(\d+)"', strip)
    assert first is not None and int(first[1]) == report.N_COLUMNS // 2
    assert "zeros only" in report.render(stats(conv=layer(history=[(1, EXP_ZERO, 0.0, 0.0)])))


def test_render_survives_nonfinite_history() -> None:
    Page(report.render(stats(conv=layer(history=[(1, -3, float("nan"), float("inf")), (2, -3, 0.5, 0.5)]))))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 512])
def test_bins_keep_the_mean_whatever_the_length(n: int) -> None:
    values = np.random.default_rng(n).random(n)
    exponents, underflows, errors = report._bins([(i, -4, values[i], values[i] / 2) for i in range(n)])
    assert len(errors) == min(n, report.N_COLUMNS)
    assert set(exponents) == {-4}
    chunks = [values[[k for k in range(n) if k * len(errors) // n == i]].mean() for i in range(len(errors))]
    np.testing.assert_allclose(np.array(underflows, float), chunks)
    np.testing.assert_allclose(np.array(errors, float), np.array(chunks) / 2)


def measured(values: np.ndarray, fmt: tuple[int, int], overrides: Any = None, n_steps: int = 1) -> dict[str, Any]:
    """What the compressor measures of a layer "w" on two ranks."""
    exchanges = None
    for _ in range(n_steps):
        copies = [values.copy(), values.copy()]
        per_rank = [[Layer("w", x.shape, 0, x.ctypes.data, x.ctypes.data, 1.0, x)] for x in copies]
        options = Options(*fmt, stats=True, overrides=overrides or {})
        exchanges = local_allreduce(per_rank, options, CpuKernels(), exchanges)
    return exchanges[0].statistics.as_dict()["layers"]


def spread(n: int = 20_000, decades: float = 2.0, seed: int = 0) -> np.ndarray:
    """Values whose sizes differ by powers of ten."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * 10.0 ** rng.uniform(-decades, 0, n)).astype(np.float32)


@pytest.mark.parametrize("n, n_steps", [(1, 1), (7, 3), (20_000, 1), (300_000, 2)])
def test_histogram_counts_exponents(n: int, n_steps: int) -> None:
    """Oracle: every value's own exponent, by NumPy. A large layer gives a sample, another one in every step."""
    values = spread(n)
    found = np.array(measured(values, (4, 3), n_steps=n_steps)["w"]["histogram"])
    top = measured(values, (4, 3))["w"]["exponent"]
    x = np.abs(values[values != 0]) / 2.0**top
    # From 1.5 * 2^(E + 1) down, two per binade, each from the middle to the one below to the middle to the one above.
    centres = np.array([mantissa * 2.0 ** (1 - k) for k in range(62) for mantissa in (1.5, 1.0)])
    edges = np.concatenate([[np.inf], (centres[:-1] + centres[1:]) / 2, [0.0]])
    exact = np.array([np.sum((x < high) & (x >= low)) for high, low in zip(edges, edges[1:])])
    assert len(found) <= len(exact) and found[-1] > 0
    found = np.append(found, np.zeros(len(exact) - len(found)))
    if n <= SAMPLE:
        np.testing.assert_array_equal(found, n_steps * exact)
    else:
        assert n_steps * SAMPLE <= found.sum() <= n_steps * (SAMPLE + 8) + n_steps * 8
        assert np.abs(found / found.sum() - exact / exact.sum()).max() < 0.01


@pytest.mark.parametrize("decades", [0.0, 1.0, 3.0])
def test_expected_losses_are_those_of_the_compressor(decades: float) -> None:
    """For formats that lack mantissa bits, exponent bits, or neither, from the histogram of another format."""
    values = spread(16_000, decades)
    for seen in ((4, 3), (2, 3), (1, 4)):
        histogram = measured(values, seen)["w"]["histogram"]
        for fmt in ((4, 3), (5, 2), (3, 0), (2, 3), (2, 6), (1, 5), (3, 2), (4, 10)):
            layer = measured(values, fmt)["w"]
            error, underflow = report.expected_losses(histogram, *fmt)
            assert error == pytest.approx(layer["relative_error"], rel=0.06), (seen, fmt)
            # A format may seem to need another binade at the top, and then to lose one at the bottom.
            assert -0.01 <= underflow - layer["underflow"] <= 0.12, (seen, fmt)


def test_suggest_overrides_names_only_the_layers_above_the_bounds() -> None:
    histogram = measured(spread(), (4, 3))["w"]["histogram"]
    layers = {
        "good": layer(error=0.02, histogram=histogram),
        "noisy": layer(error=0.2, fmt="e4m0", histogram=histogram),
        "lost": layer(error=0.04, underflow=0.9, fmt="e2m2", histogram=histogram),
        "hopeless": layer(error=500.0, underflow=0.9, histogram=histogram),
        "exact": layer(error=0.9, fmt="float32", histogram=histogram),
        "unknown": layer(error=0.9),
    }
    found = report.suggest_overrides(layers)
    assert list(found) == ["noisy", "lost", "hopeless", "unknown"]
    assert found["hopeless"] == found["unknown"] == "float32"
    assert found["lost"][0] > 2  # exponent bits, which are what it lacks


def test_suggestion_is_the_cheapest_within_the_bound() -> None:
    """Oracle: the compressor with every format of fewer bits, and of as many. Exponent bits are missing here."""
    values = spread(16_000, 1.5)
    layers = measured(values, (2, 3))
    assert layers["w"]["relative_error"] > report.MAX_ERROR
    best = report.suggest_format(layers)
    assert report.suggest_overrides(layers) == {"w": best} and best[0] > 2

    def is_within(fmt: tuple[int, int], margin: float = 1.0) -> bool:
        after = measured(values, fmt)["w"]
        return after["relative_error"] <= report.MAX_ERROR / margin and after["underflow"] <= report.MAX_UNDERFLOW

    assert is_within(best)
    smaller = [fmt for fmt in report.CANDIDATES if sum(fmt) < sum(best)]
    assert len(smaller) > 5 and not [fmt for fmt in smaller if is_within(fmt, 1.1)]


def test_one_format_for_all_layers_comes_before_the_overrides() -> None:
    fine, coarse = measured(spread(), (5, 2))["w"], measured(spread(decades=4.0), (2, 2))["w"]
    layers = {f"w{k}": fine if k % 2 else coarse for k in range(40)}
    e, m = report.suggest_format(layers)
    text = Page(report.render(stats(**layers))).text
    first = text.index(
        f"e={e}, m={m} , {1 + e + m} bits, is the smallest in which no layer is above a relative error "
        f"of 8% or an underflow of 50%; now 6.5 bits"
    )
    assert first < text.index("20 of 40 layers are above a relative error of 8% or an underflow of 50%")
    assert report.render(stats(**layers)).count("<details>") == 1
    assert report.suggest_format({"x": layer(error=None, underflow=None)}) is None
    assert "No suggestion" in Page(report.render(stats(conv=layer()))).text


def test_suggested_overrides_are_accepted_and_match_only_their_layer() -> None:
    name = "blocks[0].conv*"
    overrides = report.suggest_overrides({name: measured(spread(), (2, 2))["w"]})
    options = Options(4, 3, overrides=overrides)
    (value,) = overrides.values()
    assert options.format_for(name, 1) == as_format(value, True, "test") != options.default_format
    assert options.format_for("blocks0.convX", 1) == options.default_format


@pytest.mark.parametrize("fmt", [(2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 1), (1, 2)])
def test_suggestion_brings_a_real_layer_under_the_bound(fmt: tuple[int, int]) -> None:
    """The oracle is the compressor itself: with what was suggested, it measures an error under the bound."""
    values = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    before = measured(values, fmt)
    assert before["w"]["relative_error"] > report.MAX_ERROR
    after = measured(values, fmt, report.suggest_overrides(before))
    assert after["w"]["relative_error"] <= report.MAX_ERROR


def test_columns_sort_and_explain_themselves() -> None:
    """Cells say the value to sort by where their text is not it; every title has a tooltip."""
    text = report.render(stats(a=layer(error=0.0234), b=layer(error=None, underflow=None, exponent=None)))
    assert text.count("<th ") == text.count(' title="') == 9 and text.count("data-sort") >= 6
    row = re.search(r'<tr><td class="name">a</td>(.*?)</tr>', text)
    assert row is not None
    assert re.findall(r'data-v="([^"]*)"', row[1]) == ["1234", "8", "0.1", "0.0234"]
    assert report.render(stats(a=layer())).count("<script>") == 1


@pytest.mark.parametrize("wrong", [{}, {"layers": 3}, [], None])
def test_render_refuses_what_is_not_statistics(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"report: stats must be what compressor.stats\(\) returns"):
        report.render(wrong)


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", *arguments])
    return args.run(args)


def test_command_writes_the_page_beside_the_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "run.json"
    source.write_text(json.dumps(stats(conv=layer())))
    assert run_command(str(source)) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run.html")
    assert "conv" in Page((tmp_path / "run.html").read_text()).text
    assert run_command(str(source), "-o", str(tmp_path / "new" / "page.html"), "--title", "Mine") == 0
    assert "Mine" in (tmp_path / "new" / "page.html").read_text()


def test_command_says_what_is_wrong_with_its_input(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a file; write one with json.dump"):
        run_command(str(tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        run_command(str(tmp_path / "bad.json"))
