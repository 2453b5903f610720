"""Wire formats: how the elements of a layer travel.

- `base`: `Format`: what layout, options, statistics and messages ask of one
- `floats`: `FloatFormat`: 1 sign, e exponent and m mantissa bits, and its arithmetic on plain arrays
- `raw`: `FLOAT32`: not compressed
- `host`: formats whose codec is written in Python
- `buckets`: scales that travel with the codes; `qsgd`, `onebit`, `tables`, `mx`: formats that have them
"""

from horovod_aps.formats.base import Format, parse
from horovod_aps.formats.floats import FloatFormat
from horovod_aps.formats.host import HostFormat
from horovod_aps.formats.mx import MX
from horovod_aps.formats.onebit import OneBit
from horovod_aps.formats.qsgd import QSGD
from horovod_aps.formats.raw import FLOAT32, Raw32
from horovod_aps.formats.tables import DynamicTree, Linear, MantissaTree, StaticTree, TableFormat

__all__ = [
    "DynamicTree",
    "FLOAT32",
    "FloatFormat",
    "Format",
    "HostFormat",
    "Linear",
    "MX",
    "MantissaTree",
    "OneBit",
    "QSGD",
    "Raw32",
    "StaticTree",
    "TableFormat",
    "parse",
]
