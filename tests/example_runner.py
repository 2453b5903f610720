"""Runs several examples one after the other in this process, as test_examples.py starts it on every rank.

    python tests/example_runner.py plan.json results-folder

The plan is a list of {"script": path, "arguments": [...]}. Every script runs as `__main__`; what it printed and
its exit code go to <folder>/rank<r>.json. One process for many scripts, because importing the frameworks and
launching the ranks take most of the time.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from common import launcher_rank  # noqa: E402


def run(script: Path, arguments: list[str]) -> dict[str, Any]:
    """Run one script; a message given to sys.exit counts as printed, as Python does it."""
    output = io.StringIO()
    code: Any = 0
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
            if isinstance(code, str):
                print(code)
                code = 1
        except Exception:
            traceback.print_exc()
            code = 1
    sys.path.remove(str(script.parent))
    return {"code": code, "output": output.getvalue()}


def main() -> None:
    plan, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = []
    for entry in plan:
        results.append(run(ROOT / "examples" / entry["script"], entry["arguments"]))
        (folder / f"rank{launcher_rank()}.json").write_text(json.dumps(results))
        if results[-1]["code"] and not entry.get("may_fail"):
            sys.exit(f"{entry['script']} failed:\n{results[-1]['output']}")


if __name__ == "__main__":
    main()
