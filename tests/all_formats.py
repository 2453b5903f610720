"""One format of every kind that `horovod_aps.formats` exports, for tests that must hold for all of them.

A new family comes in by itself, with the arguments that it has by default; what it cannot be made without, and what is
worth a second look, is in `ARGUMENTS`.
"""

from __future__ import annotations

import inspect
from typing import Any

from horovod_aps import formats
from horovod_aps.formats import Format

ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "FloatFormat": [(4, 3), (3, 0)],
    "QSGD": [(4,), (8,)],
    "MX": [(4, 3), (2, 1, 64, True)],
    "OneBit": [(), (64,), ("tensor",)],
    "DynamicTree": [(), ("bitsandbytes",)],
    "TableFormat": [((-1.0, -0.25, 0.0, 0.25, 1.0),)],
}


def every_format() -> list[Format]:
    """All of them, float32 included."""
    found: list[Format] = []
    for name in formats.__all__:
        kind = getattr(formats, name)
        if inspect.isclass(kind) and issubclass(kind, Format) and not inspect.isabstract(kind):
            found += [kind(*arguments) for arguments in ARGUMENTS.get(name, [()])]
    return found


def options_for(fmt: Format, **options: Any) -> dict[str, Any]:
    """Options that a compressor of this format must have, and others."""
    return {"error_feedback": True, **options} if fmt.needs_error_feedback else options
