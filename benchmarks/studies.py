"""What the studies (accuracy.py, feedback.py, onebit.py, roundoff.py) share: where results go, and picking records."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"  # what is shipped
OUT = ROOT / "out" / "studies"

Records = list[dict[str, Any]]


def values(records: Records, key: str, **wanted: Any) -> list[float]:
    """One figure of the records that have what is wanted, in their order."""
    return [r[key] for r in records if all(r.get(name) == value for name, value in wanted.items())]


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with those that every study has; folders exist afterwards."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results and plots (out/studies)")
    parser.add_argument("--images", type=Path, help="folder of plots, if not --out (docs/images for what is shipped)")
    parser.add_argument("--report", action="store_true", help="only write tables and plot of the results so far")
    parser.add_argument("--show", action="store_true", help="print the tables that are shipped, and run nothing")
    arguments = parser.parse_args(argv)
    if arguments.images is None:
        arguments.images = IMAGES if arguments.out.resolve() == RESULTS else arguments.out
    if not arguments.show:
        for folder in (arguments.out, arguments.images):
            folder.mkdir(parents=True, exist_ok=True)
    return arguments


def show(name: str) -> int:
    """Print a study's tables as they are shipped."""
    path = RESULTS / f"{name}.md"
    print(f"As shipped in {path.relative_to(ROOT)}, nothing was run:\n\n{path.read_text()}")
    return 0


def pyplot() -> Any:
    """Matplotlib's, for files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write the figure, and say where."""
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot().close(figure)
    print(f"plot: {path}")
