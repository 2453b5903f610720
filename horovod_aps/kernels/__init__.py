"""The kernels: a typed protocol over a table of segments, on the CPU and on CUDA devices.

- `segments`: the record of a segment, its codes, the checks of arguments
- `protocol`: what the exchange asks of kernels
- `native`: the compiled CPU library
- `cpu`: the protocol over it
- `codecs`: formats whose codec is written in Python
- `cuda`: the protocol over CuPy; imported only where there is a GPU
- `arrays`: rounding and packing of plain arrays, for `formats`
"""

from horovod_aps.kernels.arrays import (
    decode_array,
    encode_array,
    pack_codes,
    quantize_array,
    unpack_codes,
)
from horovod_aps.kernels.codecs import HostCodec
from horovod_aps.kernels.cpu import CpuKernels
from horovod_aps.kernels.native import library, set_num_threads
from horovod_aps.kernels.protocol import DONE, Buffer, Kernels
from horovod_aps.kernels.segments import (
    BFLOAT16,
    DTYPE_CODES,
    DTYPE_NAMES,
    DTYPES,
    EXP_NONFINITE,
    EXP_ZERO,
    FAMILY_FLOAT,
    FAMILY_HOST,
    FAMILY_RAW,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    ITEM_SIZES,
    NEAREST,
    SEGMENT,
    SPECIALS,
    SUM_FLOAT,
    SUM_FORMAT,
    SUM_KAHAN,
    UNIT,
    Bytes,
    Message,
    Table,
    copied,
    packed_bytes,
)

__all__ = [
    "BFLOAT16",
    "Buffer",
    "Bytes",
    "CpuKernels",
    "DONE",
    "DTYPES",
    "DTYPE_CODES",
    "DTYPE_NAMES",
    "EXP_NONFINITE",
    "EXP_ZERO",
    "FAMILY_FLOAT",
    "FAMILY_HOST",
    "FAMILY_RAW",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "HostCodec",
    "ITEM_SIZES",
    "Kernels",
    "Message",
    "NEAREST",
    "SEGMENT",
    "SPECIALS",
    "SUM_FLOAT",
    "SUM_FORMAT",
    "SUM_KAHAN",
    "Table",
    "UNIT",
    "copied",
    "decode_array",
    "encode_array",
    "library",
    "pack_codes",
    "packed_bytes",
    "quantize_array",
    "set_num_threads",
    "unpack_codes",
]
