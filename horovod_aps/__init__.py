"""Low-precision gradient all-reduce with auto-precision scaling (APS) for an unpatched Horovod.

Importing this package imports no framework; names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .formats import FloatFormat as FloatFormat
    from .tools.predict import predict as predict

__version__ = "0.1.0"
__all__ = ["FloatFormat", "__version__", "predict"]

_LAZY = {"FloatFormat": "formats", "predict": "tools.predict"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
