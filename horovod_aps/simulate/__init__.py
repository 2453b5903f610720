"""Study any (e, m) without a cluster: casts, low-precision GEMMs, N emulated ranks in one process (torch).

The real exchange does not use this package; `EmulatedOptimizer` uses the real exchange's own code.
"""

from horovod_aps.simulate.cast import Quantizer, float_quantize, quantizer
from horovod_aps.simulate.emulate import EmulatedOptimizer
from horovod_aps.simulate.gemm import QuantConv2d, QuantLinear, quant_gemm
from horovod_aps.simulate.gradients import sum_gradients

__all__ = [
    "EmulatedOptimizer",
    "QuantConv2d",
    "QuantLinear",
    "Quantizer",
    "float_quantize",
    "quant_gemm",
    "quantizer",
    "sum_gradients",
]
