"""Wire formats: how the elements of a layer travel.

- `base`: `Format`: what layout, options, statistics and messages ask of one
- `floats`: `FloatFormat`: 1 sign, e exponent and m mantissa bits, and its arithmetic on plain arrays
- `raw`: `FLOAT32`: not compressed
- `host`: formats whose codec is written in Python
"""

from horovod_aps.formats.base import Format, parse
from horovod_aps.formats.floats import FloatFormat
from horovod_aps.formats.host import HostFormat
from horovod_aps.formats.raw import FLOAT32, Raw32

__all__ = [
    "FLOAT32",
    "FloatFormat",
    "Format",
    "HostFormat",
    "Raw32",
    "parse",
]
