"""The `horovod-aps` command: a dispatcher; each subcommand is a module with `add_parser(subparsers)`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from horovod_aps import __version__

SUBCOMMANDS = ("predict", "calibrate", "study", "timeline", "doctor", "report")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; every one sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(prog="horovod-aps", description="Tools around horovod_aps.")
    parser.add_argument("--version", action="version", version=f"horovod-aps {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name in SUBCOMMANDS:
        importlib.import_module(f"horovod_aps.tools.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a user's mistake is one line on stderr and exit code 2."""
    args = build_parser().parse_args(argv)
    try:
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `horovod-aps predict ... | head`; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"horovod-aps {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
