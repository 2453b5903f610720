"""Lets torchvision's wheel, which was built for the CUDA build of torch, be imported beside the CPU build.

The CPU build cannot load torchvision's compiled operators. The examples use none of them, but `import torchvision`
wants the schemas of two to exist. `make setup` puts this module into .venv, where Python imports it by itself; the
schemas are defined when torchvision is about to be imported, so that programs which do not use torch do not get it.
Where the operators do load, as with the CUDA build, they bring their schemas; a second definition would be an error.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path


class _DefineSchemas(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            spec = importlib.util.find_spec("torchvision")
            folders = spec.submodule_search_locations if spec else []
            try:
                libraries = [library for folder in folders for library in Path(folder).glob("_C*.so")]
                for library in libraries:
                    torch.ops.load_library(str(library))
            except OSError:
                libraries = []
            if libraries:
                return None
            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _DefineSchemas())
