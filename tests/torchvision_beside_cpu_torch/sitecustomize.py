"""Put this folder on PYTHONPATH where torchvision's wheel was built for another torch than the one installed.

The CPU-only torch that Horovod is built with here does not load torchvision's compiled operators. The
examples use none of them, but `import torchvision` wants the schemas of two to exist. Python imports this
module by itself; the schemas are defined when torchvision is about to be imported, so that programs which do
not use torch do not get it.
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
