"""What the documentation shows, works: links lead somewhere, snippets and diffs run, commands and flags exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_aps import config
from horovod_aps.bench.ports import free_port
from horovod_aps.tools import cli

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
# Their commands count, but not their snippets, which show parts of programs.
MORE_PAGES = [ROOT / "benchmarks" / "README.md", *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
LAUNCHERS = ("horovodrun", "mpirun", "srun", "torchrun")
COMMANDS = (*LAUNCHERS, "horovod-aps", "make", "python", "sudo", ".venv/bin/python")
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-np", "2"]
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
               "TF_CPP_MIN_LOG_LEVEL": "2"}  # fmt: skip


def blocks(language: str, pages: list[Path] = PAGES) -> list[tuple[str, str]]:
    """(where, text) of all code blocks of a language."""
    found = []
    for page in pages:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append((f"{page.relative_to(ROOT)}:{line}", match[2]))
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(where, words) of all shell commands in the documentation, in blocks and within lines."""
    found = []
    for where, text in blocks("sh", PAGES + MORE_PAGES):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append((where, words))
    for page in PAGES + MORE_PAGES:
        for paragraph in BLOCK.sub("", page.read_text()).split("\n\n"):
            for text in INLINE.findall(paragraph):
                if text.split()[:1] and text.split()[0] in COMMANDS:
                    found.append((str(page.relative_to(ROOT)), shlex.split(text)))
    return found


def without_launcher(words: list[str]) -> list[str]:
    """The program of ours that a launcher starts, with its arguments; other commands as they are."""
    if words[0] in LAUNCHERS:
        starts = [i for i, word in enumerate(words) if word in ("horovod-aps", "python")]
        return words[starts[0] :] if starts else words
    return words


def after_the_change(diff: str) -> str:
    """The script that a diff leads to."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def before_the_change(diff: str) -> str:
    """The script that a diff starts from."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("+"))


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


# What README's diffs leave out: a model and data before, one step after; `result` must be the same on all ranks, whose
# data, and for Keras whose models, are not.
AROUND = {
    "torch.distributed": (
        "import torch\ntorch.manual_seed(rank)\nmodel = torch.nn.Linear(3, 2)\n",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.full((4, 3), 1.0 + rank)).sum().backward()\n"
        "optimizer.step()\n"
        "result = model.module.weight.detach().numpy()\n",
    ),
    "horovod.torch": (
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        "model(torch.full((4, 3), 1.0 + rank)).sum().backward()\n"
        "optimizer.step()\n"
        "result = model.weight.detach().numpy()\n",
    ),
    "horovod.tensorflow": (
        "import keras, numpy\n"
        "import tensorflow as tf\n"
        "keras.utils.set_random_seed(rank)\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "images, labels = tf.fill((4, 2), 1.0 + rank), tf.zeros((4, 1))\n"
        "loss_of = lambda x, y: tf.reduce_mean((x - y) ** 2)\n",
        "assert all(numpy.any(part) for part in gradients)\n"
        "result = numpy.concatenate([numpy.ravel(part) for part in [*gradients, *model.get_weights()]])\n",
    ),
    "horovod.tensorflow.keras": (
        "import keras, numpy\n"
        "keras.utils.set_random_seed(rank)\n"
        "model = keras.Sequential([keras.layers.Dense(3, activation='softmax')])\n"
        "images = numpy.random.default_rng(rank).random((8, 5), dtype=numpy.float32)\n"
        "labels = numpy.arange(8) % 3\n",
        "result = model.get_weights()[0]\n",
    ),
}
RUNNER = """
import importlib, json, os, sys
from horovod_aps.tools import doctor
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
for where, text, module in json.load(open(sys.argv[1])):
    print("running", where, flush=True)
    names = {"__name__": "__main__", "rank": rank}
    exec(compile(text, where, "exec"), names)
    if module == "torch.distributed":
        dist, everyone = names["dist"], [None, None]
        dist.all_gather_object(everyone, names["result"].tobytes())
        assert len(set(everyone)) == 1, (where, everyone)
        dist.destroy_process_group()
    elif module:
        hvd = importlib.import_module(module.removesuffix(".keras"))
        hvd.init()
        everyone = doctor.gather_lines(hvd, names["result"].tobytes().hex(), where)
        assert len(everyone) == 2 and len(set(everyone)) == 1, (where, everyone)
"""


def names_of(script: str, where: str) -> tuple[str, str]:
    """A program of the script's imports and all attributes of what they bind, and the module that it calls hvd."""
    tree = ast.parse(script, where)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = [text for text in attributes if re.fullmatch(r"[\w.]+", text) and text.partition(".")[0] in bound]
    return "\n".join([*map(ast.unparse, imports), *used]), bound.get("hvd") or bound.get("dist", "")


def test_snippets_and_diffs_run(tmp_path: Path) -> None:
    """All Python blocks and README's scripts after the change; of all diffs, the names that both sides use.

    On two ranks, each in a namespace of its own, in one launch.
    """
    programs = [(where, text, "") for where, text in blocks("python")]
    n_run = 0
    for where, diff in blocks("diff"):
        after = after_the_change(diff)
        program, module = names_of(after, where)
        assert program, where
        programs += [(where, program, ""), (where, names_of(before_the_change(diff), where)[0], "")]
        if where.startswith("README.md"):
            programs.append((where, AROUND[module][0] + after + AROUND[module][1], module))
            n_run += 1
    assert len(programs) > 8 and n_run == len(AROUND)
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [*MPIRUN, sys.executable, "-c", RUNNER, "programs.json"],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT | {"MASTER_PORT": str(free_port())},
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
    named = {words[1] for _, words in commands() if words[0] == "make" and words[1:]}
    assert {"demo", "test", "docs", "soak"} <= named
    assert named <= targets


def test_scripts_and_their_flags_exist() -> None:
    """Every `python script.py --flags` and `python -m module --flags` of this repository, under whatever launcher."""
    files = {
        "examples": ("common.py", "segmentation_data.py"),
        "benchmarks": ("studies.py", "../horovod_aps/bench/cluster.py"),
        "tests": (),
        "horovod_aps": (),
    }
    shared = {folder: "".join((ROOT / folder / name).read_text() for name in names) for folder, names in files.items()}
    checked = set()
    for where, given in commands():
        words = [word.replace(".", "/") + ".py" if re.match(r"horovod_aps\.\w+\.", word) else word for word in given]
        scripts = [i for i, word in enumerate(words) if re.match(rf"({'|'.join(files)})/.*\.py$", word)]
        for i, following in zip(scripts, [*scripts[1:], len(words)], strict=False):
            path = ROOT / words[i]
            assert path.is_file(), f"{where}: {words[i]}"
            source = path.read_text() + shared[words[i].partition("/")[0]]
            for word in words[i + 1 : following]:
                if word == "--":
                    break
                if word.startswith("--"):
                    assert f'"{word.partition("=")[0]}"' in source, f"{where}: {words[i]} has no {word}"
            checked.add(path.name)
    assert {"accuracy.py", "feedback.py", "kernels.py", "cluster.py", "pytorch_digits.py"} <= checked


def test_commands_of_horovod_aps_parse() -> None:
    """With a command's name alone, the command exists; with arguments, it takes them."""
    parser = cli.build_parser()
    programs = [(where, without_launcher(words)) for where, words in commands()]
    found = [(where, words[1:]) for where, words in programs if words[0] == "horovod-aps" and words[1:]]
    assert {words[0] for _, words in found} >= {"predict", "report", "timeline", "doctor", "calibrate"}
    for where, words in found:
        try:
            parser.parse_args(words if words[1:] else [*words, "--help"])
        except SystemExit as done:
            assert done.code == 0, f"{where}: horovod-aps {' '.join(words)}"


def test_command_line_page_is_the_parsers() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import cli_page

    assert cli_page.PAGE.read_text() == cli_page.text(), "type: python scripts/cli_page.py"
    rows = re.findall(r"^\| `.*?` \| (.*) \|$", cli_page.text(), re.MULTILINE)
    assert len(rows) > 25 and all(rows)  # every argument is explained


def test_demo_table_is_the_demos() -> None:
    """README's table has the demo's rows and columns, and no row pays for statistics that the others do not have."""
    page = (ROOT / "README.md").read_text()
    section = page[page.index("### The demo") : page.index("### Speed and bytes")]
    header, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    source = (ROOT / "examples" / "demo_worker.py").read_text()
    formats = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FORMATS"
    )
    assert isinstance(formats, ast.Dict)
    names = [ast.literal_eval(key).replace("+ EF", "with error feedback") for key in formats.keys if key]
    assert [row[0] for row in rows] == names
    assert header == ["gradients", "test accuracy", "bytes per step", "of fp32's", "ms per step", "replicas identical"]
    assert "stats" not in ast.unparse(formats)


def test_settings_exist() -> None:
    known = set(re.findall(r"HOROVOD_APS_\w+", Path(config.__file__).read_text()))
    known |= set(re.findall(r"HOROVOD_APS_\w+", (ROOT / "scripts" / "setup.sh").read_text()))
    for page in PAGES:
        for name in re.findall(r"HOROVOD_APS_[A-Z0-9_]+", page.read_text()):
            assert name in known, f"{page.name}: {name}"


def test_all_modules_are_in_the_list_of_modules() -> None:
    """By name, with or without the folder; and nothing stands in the first column that is not there."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    package = ROOT / "horovod_aps"
    table = page[page.index("## The modules") : page.index("## Formats and kernels")]

    def listed(columns: slice) -> set[str]:
        rows = ["".join(line.split("|")[columns]) for line in table.splitlines() if line.startswith("| `")]
        return {name.rstrip("/").split("/")[-1] for row in rows for name in re.findall(r"`([\w/]+)`", row)}

    names = {path.stem for path in package.rglob("*.py") if not path.stem.startswith("_")}
    names |= {path.parent.name for path in package.glob("*/**/__init__.py")}
    assert not names - listed(slice(1, 3)), "not in the list"
    assert not listed(slice(1, 2)) - names - {"tools"}, "in the list only"


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
    # All of it is in the site, colours of code and diffs among it.
    for page in (tmp_path / "site").glob("*.html"):
        assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)="(?:https?:)?//', page.read_text()), page.name
    index = (tmp_path / "site" / "index.html").read_text()
    assert 'class="gd"' in index and 'class="gi"' in index and 'href="stylesheets/code.css"' in index
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("APSCompressor", "error_feedback", "FloatFormat", "EmulatedOptimizer", "suggest_overrides"):
        assert name in api, name
