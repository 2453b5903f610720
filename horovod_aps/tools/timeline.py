"""`horovod-aps timeline`: timelines of Horovod and horovod_aps on one time axis."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod_aps.timeline import START_KEY


def merge(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The events of several timelines on the time axis of the earliest; ValueError names a foreign file."""
    parts = []
    for path in paths:
        try:
            events = json.loads(path.read_text())
            start = next(event["args"][START_KEY] for event in events if START_KEY in event.get("args", {}))
        except (ValueError, AttributeError, TypeError, KeyError, StopIteration):
            raise ValueError(f"{path} must be a timeline of Horovod or horovod_aps, with {START_KEY}") from None
        parts.append((start, events))
    origin = min(start for start, _ in parts)
    merged = []
    for start, events in parts:
        for event in events:
            merged.append(event | {"ts": event["ts"] + start - origin} if "ts" in event else event)
    return merged


def add_parser(subparsers: Any) -> None:
    """Add the `timeline` subcommand."""
    parser = subparsers.add_parser("timeline", help="merge timelines of Horovod and horovod_aps")
    parser.add_argument("files", nargs="+", type=Path, help="Horovod's timeline and trace.rank<r>.json files")
    parser.add_argument(
        "--output", type=Path, default=Path("merged.json"), help="the merged file (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the output if it is there already")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.output.exists():
        if any(args.output.samefile(path) for path in args.files if path.exists()):
            raise ValueError(f"--output must not be one of the files to merge, got {args.output}")
        if not args.force:
            raise FileExistsError(f"{args.output} is there already; name another by --output, or add --force")
    events = merge(args.files)
    args.output.write_text(json.dumps(events))
    print(f"{len(events)} events of {len(args.files)} files in {args.output}; see it in chrome://tracing")
    return 0
