"""Tables of numbers that the native kernels know: given to the library once, named by a number from then on."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from horovod_aps.kernels.native import library

SIZE = 256
DEVICE_TABLE = np.dtype(
    [("n", np.int32), ("width", np.int32), ("values", np.float32, SIZE), ("least", np.float32, SIZE)]
)
"""ApsTable of cuda/aps_table.h."""

Floats = npt.NDArray[np.float32]

_numbers: dict[bytes, int] = {}
_tables: list[npt.NDArray[np.void]] = []
_lock = threading.Lock()


def number_of(values: Floats, least: Floats) -> int:
    """The number by which segments of this process name a table; least[i]: the least float32 of code i + 1."""
    key = values.tobytes()
    with _lock:
        if key not in _numbers:
            number = library().aps_register_table(values.ctypes.data, least.ctypes.data, len(values))
            if number < 0:
                raise ValueError("horovod_aps: a table's values must rise, and a process has room for 65536 tables")
            made = np.zeros(1, DEVICE_TABLE)
            made["n"], made["width"] = len(values), max(1, (len(values) - 1).bit_length())
            made["values"], made["least"] = values[-1], np.inf
            made["values"][0, : len(values)], made["least"][0, : len(least)] = values, least
            _tables.append(made)
            _numbers[key] = number
        return _numbers[key]


def table(number: int) -> npt.NDArray[np.void]:
    """A table as the CUDA kernels read it."""
    return _tables[number]
