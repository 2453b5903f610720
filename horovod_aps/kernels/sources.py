"""Where the C++ and CUDA sources of the kernels are."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def source_folder() -> Path:
    """Return the folder with aps_kernels.cu and its headers, in a wheel or in a checkout."""
    beside = Path(__file__).parents[2] / "cuda"
    if (beside / "aps_kernels.cu").exists():  # of this checkout, whatever else is installed
        return beside
    package = import_module("horovod_aps.cuda")
    assert package.__file__ is not None
    return Path(package.__file__).parent
