"""The compiled library of CPU kernels: found, loaded once, and its errors turned into exceptions.

ctypes releases the GIL during a call.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from importlib.util import find_spec

from horovod_aps import config
from horovod_aps.kernels.sources import source_folder

_REASONS = {
    1: "exp_bits must be in 1..8 and man_bits in 0..23, with at least one nonzero finite value",
    2: "dtype must be in 0..3",
    3: "address must not be null",
    4: "the segment must lie inside its message",
    5: "the number of elements or inputs is out of range",
    6: "the exponent must be in -4096..4096, EXP_ZERO or EXP_NONFINITE",
    7: "the family of the segment's format has no kernels here",
}
_I32, _I64, _U32, _U64, _PTR = ctypes.c_int, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
SIGNATURES = {
    "aps_scan": [_PTR, _I64, _I32],
    "aps_encode_segments": [_PTR, _I64, _PTR, _I64, _I32, _U64],
    "aps_decode_segments": [_PTR, _I64, _PTR, _I32, _I64, _I32],
    "aps_reduce_segments": [_PTR, _I64, _PTR, _I32, _I32, _I32, _PTR, _I64, _I32, _U64],
    "aps_residual_segments": [_PTR, _I64, _PTR, _I64],
    "aps_measure_segments": [_PTR, _I64, _PTR, _I64, _PTR],
    "aps_add_segments": [_PTR, _I64, _PTR],
    "aps_check_segments": [_PTR, _I64, _I32, _I64],
    "aps_finish_scan": [_PTR, _I64, _PTR, _I32],
    "aps_finish_reduce": [_PTR, _I64, _PTR, _I32, _I32, _PTR],
    "aps_encode_array": [_PTR, _PTR, _I64, _I32, _I32, _I32, _I32, _I32, _U64],
    "aps_decode_array": [_PTR, _PTR, _I64, _I32, _I32, _I32, _I32],
    "aps_quantize_array": [_PTR, _PTR, _I64, _I32, _I32, _I32, _I32, _I32, _U64],
    "aps_register_table": [_PTR, _PTR, _I64],
    "aps_random_array": [_PTR, _I64, _U64, _U32, _I64],
    "aps_random16_array": [_PTR, _I64, _U64, _U32, _I64],
    "aps_set_flag": [_PTR, _I64, _I64, _I64, _I64, _PTR],
    "aps_bell": [_PTR],
    "aps_rest": [_PTR, _I64, _I64],
    "aps_least_flag": [_PTR, _I64, _I64],
    "aps_pack_codes": [_PTR, _I64, _I32, _PTR],
    "aps_unpack_codes": [_PTR, _I64, _I32, _PTR],
}
_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """Return the compiled library, loaded and configured from the environment on first use."""
    global _library
    with _lock:
        if _library is None:
            spec = find_spec("horovod_aps._cpu")
            if spec is None or spec.origin is None:
                raise ImportError("horovod_aps: the CPU kernel library is not built; type: pip install -e .")
            lib = ctypes.CDLL(spec.origin)
            _check_age(lib)
            for name, arguments in SIGNATURES.items():
                getattr(lib, name).argtypes = arguments
                getattr(lib, name).restype = _I64
            lib.aps_use_vectors(config.vectors())
            lib.aps_set_num_threads(config.num_threads())
            _library = lib
    return _library


def _check_age(lib: ctypes.CDLL) -> None:
    """Raise ImportError in a checkout whose sources have changed since: the library could give other numbers."""
    known = None
    if hasattr(lib, "aps_sources"):
        lib.aps_sources.restype = ctypes.c_char_p
        known = lib.aps_sources().decode()
    if not is_current(known):
        raise ImportError(
            "horovod_aps: the CPU kernel library was built from other sources than these; build it again: "
            "make setup, or pip install -e . --no-build-isolation"
        )


def is_current(known: str | None) -> bool:
    """Whether a library with this checksum was built from the sources beside it, if there are any."""
    paths = sorted(path for path in source_folder().iterdir() if path.suffix in (".h", ".inc", ".cpp"))
    if not any(path.suffix == ".cpp" for path in paths):
        return True  # an installed package, without its sources
    content = "\0".join(f"{path.name}\0{path.read_text()}" for path in paths)
    return known == hashlib.sha256(content.encode()).hexdigest()[:16]


def set_num_threads(n: int) -> None:
    """Set the threads of one kernel call, for the whole process; HOROVOD_APS_NUM_THREADS is the default."""
    if not 1 <= n <= 1024:
        raise ValueError(f"set_num_threads: n must be in 1..1024, got {n}")
    library().aps_set_num_threads(n)


def raise_on_error(function: str, status: int) -> None:
    """Raise ValueError for a status other than 0: 16 * (segment + 1) + reason."""
    if status:
        segment, reason = divmod(status, 16)
        where = f" (segment {segment - 1})" if segment else ""
        raise ValueError(f"{function}: {_REASONS[reason]}{where}")
