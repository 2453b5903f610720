"""For scripts that `horovod-aps study --script` runs: the compression that the study is trying."""

from __future__ import annotations

import importlib
from typing import Any

from horovod_aps import config

METHOD = "HOROVOD_APS_STUDY_METHOD"


def compression(default: str = "fp32", framework: str = "torch", **options: Any) -> Any:
    """What goes into `hvd.DistributedOptimizer(compression=...)`.

    Args:
        default: the method outside of a study: "fp32", "fp16", or a format's text, "+ef" with error feedback.
        framework: "torch", "tensorflow" or "keras".
        options: of the compressor, where there is one.
    """
    if framework not in ("torch", "tensorflow", "keras"):
        raise ValueError(f"compression: framework must be torch, tensorflow or keras, got {framework!r}")
    method = config.study_method(default)
    if method in ("fp32", "fp16"):
        horovod = importlib.import_module(f"horovod.{framework}")
        return horovod.Compression.none if method == "fp32" else horovod.Compression.fp16
    ours = importlib.import_module(f"horovod_aps.{framework}")
    text = method.removesuffix("+ef")
    if text != method:
        options["error_feedback"] = True
    return ours.PackedCompressor(text, **options)
