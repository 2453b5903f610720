"""The C++ and CUDA sources; installed as `horovod_aps.cuda`.

In a checkout Python finds this folder under the name `cuda`, which NVIDIA's own packages share: CuPy would not import.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
