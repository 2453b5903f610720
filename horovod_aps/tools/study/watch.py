"""Run a user's training command as one rank of a study, and note when rank 0 printed which step and accuracy.

Started by measured.py under the launcher, never by hand. Lines such as "step 40: test accuracy 97.2 %" are read.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NUMBER = r"\s*[:=]?\s*([0-9]*\.?[0-9]+(?:e[-+]?\d+)?)\s*(%?)"


def read_line(line: str, metric: str) -> tuple[int | None, float | None]:
    """Step number and accuracy (in 0..1) of a line; None for what it does not have."""
    step = re.search(r"\bstep\s*[:=]?\s*(\d+)", line, re.IGNORECASE)
    value = re.search(re.escape(metric) + NUMBER, line, re.IGNORECASE)
    accuracy = None if value is None else float(value[1]) / (100 if value[2] else 1)
    return (int(step[1]) if step else None), accuracy


def main(argv: list[str]) -> int:
    config: dict[str, Any] = json.loads(argv[0])
    from horovod_aps.bench.netns import interface_bytes

    def count() -> int | None:
        return interface_bytes(config["interface"]) if config["interface"] else None

    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK") or "0"
    if rank != "0":
        return subprocess.run(argv[1:], check=False).returncode
    before, start, points = count(), time.monotonic(), []
    process = subprocess.Popen(argv[1:], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        step, accuracy = read_line(line, config["metric"])
        if step is not None or accuracy is not None:
            points.append({"seconds": time.monotonic() - start, "step": step, "accuracy": accuracy})
    code = process.wait()
    after = count()
    sent = None if before is None or after is None else after - before
    seen = {"seconds": time.monotonic() - start, "points": points, "bytes": sent}
    Path(config["result"]).write_text(json.dumps(seen))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
