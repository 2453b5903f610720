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

from horovod_aps.exchange import Layer, local_allreduce
from horovod_aps.kernels import EXP_ZERO, CpuKernels
from horovod_aps.options import Options, as_wire_format
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


def layer(
    error: float | None = 0.01, underflow: float | None = 0.1, fmt: str = "e4m3", **more: Any
) -> dict[str, Any]:
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
    assert "<script>" not in text
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
    assert first is not None and int(first[1]) == report.N_BINS // 2
    assert "zeros only" in report.render(stats(conv=layer(history=[(1, EXP_ZERO, 0.0, 0.0)])))


def test_render_survives_nonfinite_history() -> None:
    Page(report.render(stats(conv=layer(history=[(1, -3, float("nan"), float("inf")), (2, -3, 0.5, 0.5)]))))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 512])
def test_bins_keep_the_mean_whatever_the_length(n: int) -> None:
    values = np.random.default_rng(n).random(n)
    exponents, underflows, errors = report._bins([(i, -4, values[i], values[i] / 2) for i in range(n)])
    assert len(errors) == min(n, report.N_BINS)
    assert set(exponents) == {-4}
    chunks = [values[[k for k in range(n) if k * len(errors) // n == i]].mean() for i in range(len(errors))]
    np.testing.assert_allclose(np.array(underflows, float), chunks)
    np.testing.assert_allclose(np.array(errors, float), np.array(chunks) / 2)


def test_suggest_overrides_names_only_the_layers_above_the_bounds() -> None:
    layers = {
        "good": layer(error=0.02),
        "noisy": layer(error=0.2),
        "lost": layer(error=0.04, underflow=0.9),
        "hopeless": layer(error=1.0, underflow=0.9, fmt="e5m8"),
        "exact": layer(error=0.9, fmt="float32"),
    }
    # 0.2 is 2.5 times the bound of 0.08: two more mantissa bits bring it under.
    assert report.suggest_overrides(layers) == {"noisy": (4, 5), "lost": (5, 3), "hopeless": "float32"}


def test_suggested_overrides_are_accepted_and_match_only_their_layer() -> None:
    name = "blocks[0].conv*"
    overrides = report.suggest_overrides({name: layer(error=0.3)})
    options = Options(4, 3, overrides=overrides)
    (value,) = overrides.values()
    assert options.format_for(name, 1) == as_wire_format(value, True, "test")
    assert options.format_for("blocks0.convX", 1) == options.default_format


@pytest.mark.parametrize("fmt", [(2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 1)])
def test_suggestion_brings_a_real_layer_under_the_bound(fmt: tuple[int, int]) -> None:
    """The oracle is the compressor itself: with what was suggested, it measures an error under the bound."""
    values = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)

    def measured(options: Options) -> dict[str, Any]:
        copies = [values.copy(), values.copy()]
        per_rank = [[Layer("w", x.shape, 0, x.ctypes.data, x.ctypes.data, 1.0, x)] for x in copies]
        exchange, _ = local_allreduce(per_rank, options, CpuKernels())
        return exchange.statistics.as_dict()["layers"]

    before = measured(Options(*fmt, stats=True))
    assert before["w"]["relative_error"] > report.MAX_ERROR
    overrides = report.suggest_overrides(before)
    after = measured(Options(*fmt, stats=True, overrides=overrides))
    assert after["w"]["relative_error"] <= report.MAX_ERROR


@pytest.mark.parametrize("wrong", [{}, {"layers": 3}, [], None])
def test_render_refuses_what_is_not_statistics(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"report: stats must be what compressor.stats\(\) returns"):
        report.render(wrong)


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", *arguments])
    return args.run(args)


def test_command_writes_the_page_beside_the_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
