"""docs/cli.md from the parsers of `horovod-aps`: `python scripts/cli_page.py` writes it, a test compares it."""

from __future__ import annotations

import argparse
import html
from pathlib import Path

from horovod_aps.tools import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
INTRODUCTION = """# The command line

`horovod-aps` has six subcommands; `horovod-aps --version` tells which version this is. A mistake is one line on
stderr and exit code 2. Bandwidths and times carry their units (`1gbit`, `1.5GB`, `50us`, `5ms`), options that end in
`-ms` take milliseconds. This page is written by `python scripts/cli_page.py`.

From Python, `predict` takes a model of PyTorch or Keras, a built-in one's name, or a list of layer sizes:

```python
import horovod_aps

print(horovod_aps.predict("resnet50", ranks=[2, 8], bandwidth=["1gbit", "10gbit"], backward_ms=120))
```
"""
EXAMPLES = {
    "predict": "horovod-aps predict --model resnet50 --bandwidth 1gbit 10gbit --ranks 2 8 64 --backward-ms 120",
    "calibrate": "mpirun -np 2 horovod-aps calibrate --out calibration.json",
    "study": "horovod-aps study --networks digits_fc resnet50 --links 100mbit 1gbit 10gbit --ranks 2",
    "timeline": "horovod-aps timeline horovod.json trace.rank0.json --output merged.json",
    "doctor": "horovodrun -np 2 horovod-aps doctor",
    "report": "horovod-aps report stats.json -o run.html",
}


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.dest}`"
    value = "" if action.nargs == 0 else action.metavar or action.dest.upper().replace("_", "-")
    more = " ..." if action.nargs == "+" else ""
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return "`" + ", ".join(action.option_strings) + (f" {value}" if value else "") + more + "`"


def text() -> str:
    """The whole page."""
    parser = cli.build_parser()
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {choice.dest: choice.help or "" for choice in subparsers._choices_actions}
    parts = [INTRODUCTION]
    for name, one in subparsers.choices.items():
        formatter = one._get_formatter()
        rows = [
            f"| {_name(action)} | {html.escape(formatter._expand_help(action), quote=False)} |"
            for action in one._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        summary = helps[name][0].upper() + helps[name][1:]
        parts.append(
            f"## {name}\n\n{summary}.\n\n```sh\n{EXAMPLES[name]}\n```\n\n| argument | |\n| --- | --- |\n"
            + "\n".join(rows)
            + "\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text())
    print(PAGE)
