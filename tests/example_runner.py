"""Runs several examples one after the other in this process, as test_examples.py starts it on every rank.

    python tests/example_runner.py plan.json results-folder

The plan is a list of {"script": path, "arguments": [...]}. Every script runs as `__main__`; what it printed, its
exit code, a digest of its model's weights, the momenta of Keras's batch normalisation and the number of pixels that
it evaluated go to <folder>/rank<r>.json.
One process for many scripts, because importing the frameworks and launching the ranks take most of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import common  # noqa: E402
import segmentation_data  # noqa: E402

finish, mean_iou = common.finish, segmentation_data.mean_iou


def digest(model: Any) -> str:
    """Of all weights that are trained, of a PyTorch or a Keras model."""
    weights = model.parameters() if hasattr(model, "parameters") else model.trainable_weights
    arrays = [np.asarray(weight.detach() if hasattr(weight, "detach") else weight) for weight in weights]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def run(script: Path, arguments: list[str]) -> dict[str, Any]:
    """Run one script; a message given to sys.exit counts as printed, as Python does it."""
    output = io.StringIO()
    code: Any = 0
    seen: dict[str, Any] = {}

    def finish_and_look(*rest: Any) -> None:
        model = sys._getframe(1).f_locals["model"]  # every example's main() has one
        layers = getattr(model, "layers", [])
        seen["digest"] = digest(model)
        seen["momenta"] = sorted({layer.momentum for layer in layers if hasattr(layer, "momentum")})
        finish(*rest)

    def mean_iou_and_look(matrix: Any) -> float:
        seen["pixels"] = int(matrix.sum())
        return mean_iou(matrix)

    common.finish, segmentation_data.mean_iou = finish_and_look, mean_iou_and_look
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
    if "keras" in sys.modules:  # as in a new process: names of layers count from 0 again
        sys.modules["keras"].utils.clear_session()
        sys.modules["keras"].mixed_precision.set_global_policy("float32")
    return {"code": code, "output": output.getvalue(), **seen}


def main() -> None:
    plan, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = []
    for entry in plan:
        results.append(run(ROOT / "examples" / entry["script"], entry["arguments"]))
        (folder / f"rank{common.launcher_rank()}.json").write_text(json.dumps(results))
        if results[-1]["code"] and not entry.get("may_fail"):
            sys.exit(f"{entry['script']} failed:\n{results[-1]['output']}")


if __name__ == "__main__":
    main()
