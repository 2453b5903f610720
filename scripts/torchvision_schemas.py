"""Lets torchvision's wheel, which was built for the CUDA build of torch, be imported beside the CPU build.

The CPU build does not load torchvision's compiled operators. The examples use none of them, but `import torchvision`
wants the schemas of two to exist. `make setup` puts this module into .venv, where Python imports it by itself; the
schemas are defined when torchvision is about to be imported, so that programs which do not use torch do not get it.
"""

import importlib.abc
import sys


class _DefineSchemas(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _DefineSchemas())
