"""What the documentation shows, works: links lead somewhere, snippets run, commands and flags exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_aps import cli, config

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LAUNCHERS = ("horovodrun", "mpirun", "srun")


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, text) of all code blocks of a language."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append((f"{page.relative_to(ROOT)}:{line}", match[2]))
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(where, words) of all shell commands in the documentation."""
    found = []
    for where, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append((where, words))
    return found


def after_the_change(diff: str) -> str:
    """The script that a diff leads to."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        destination = page if not path else (page.parent / path)
        assert destination.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", destination.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


def test_pages_name_no_machine() -> None:
    results = [path for path in (ROOT / "benchmarks" / "results").iterdir() if path.suffix in (".json", ".md")]
    for page in [*PAGES, *results]:
        assert not re.search(r"/(work|root)/|/home/\w", page.read_text()), page


def test_snippets_run(tmp_path: Path) -> None:
    """All Python blocks, and the imports of all diffs, each in a namespace of its own, in one process."""
    programs = blocks("python")
    for where, diff in blocks("diff"):
        tree = ast.parse(after_the_change(diff), where)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports, where
        programs.append((where, "\n".join(map(ast.unparse, imports))))
    assert len(programs) > 8
    runner = (
        "import json, sys\n"
        "for where, text in json.load(sys.stdin):\n"
        "    print('running', where, flush=True)\n"
        "    exec(compile(text, where, 'exec'), {'__name__': '__main__'})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", runner],
        input=json.dumps(programs),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_diffs_add_what_they_use() -> None:
    """A name of ours that a diff uses is imported by it, or by an earlier one on the page."""
    imported: dict[str, set[str]] = {}
    for where, diff in blocks("diff"):
        tree = ast.parse(after_the_change(diff), where)
        on_page = imported.setdefault(where.partition(":")[0], set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                on_page |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used & {"APSCompressor", "aps"} <= on_page, where


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for _, words in commands() if words[0] == "make"}
    for page in PAGES:
        named |= set(re.findall(r"`make ([\w-]+)`", page.read_text()))
    assert {"demo", "test", "docs"} <= named
    assert named <= targets


def test_scripts_and_their_flags_exist() -> None:
    """Every `python script.py --flags` of this repository, under whatever launcher."""
    shared = "".join((ROOT / "examples" / name).read_text() for name in ("common.py", "segmentation_data.py"))
    n_checked = 0
    for where, words in commands():
        scripts = [i for i, word in enumerate(words) if re.match(r"(examples|benchmarks|tests)/.*\.py$", word)]
        for i, following in zip(scripts, [*scripts[1:], len(words)], strict=False):
            path = ROOT / words[i]
            assert path.is_file(), f"{where}: {words[i]}"
            source = path.read_text() + (shared if words[i].startswith("examples") else "")
            for word in words[i + 1 : following]:
                if word == "--":
                    break
                if word.startswith("--"):
                    assert f'"{word.partition("=")[0]}"' in source, f"{where}: {words[i]} has no {word}"
            n_checked += 1
    assert n_checked >= 4


def test_commands_of_horovod_aps_parse() -> None:
    parser = cli.build_parser()
    found = [(where, words[1:]) for where, words in commands() if words[0] == "horovod-aps"]
    assert {words[0] for _, words in found} >= {"predict", "report"}
    for _, words in found:
        parser.parse_args(words)  # exits with a message if it does not know them


def test_settings_exist() -> None:
    known = set(re.findall(r"HOROVOD_APS_\w+", Path(config.__file__).read_text()))
    known |= set(re.findall(r"HOROVOD_APS_\w+", (ROOT / "scripts" / "setup.sh").read_text()))
    for page in PAGES:
        for name in re.findall(r"HOROVOD_APS_[A-Z0-9_]+", page.read_text()):
            assert name in known, f"{page.name}: {name}"


def test_all_modules_are_in_the_list_of_modules() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    package = ROOT / "horovod_aps"
    listed = set(re.findall(r"`([\w*/]+)`", page[page.index("## The modules") :]))
    names = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")} - {"cli", "config", "world"}
    names |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert names <= {name.rstrip("/") for name in listed}


def test_documentation_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("APSCompressor", "error_feedback", "FloatFormat", "EmulatedOptimizer", "suggest_overrides"):
        assert name in api, name
