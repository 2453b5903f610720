"""The CPU kernels: table of segments, launchers over the compiled library, and array functions for `formats`.

Flow of data: gradients -> scan -> (exponents shared) -> encode -> message -> reduce / decode -> gradients.
Every launcher takes one contiguous array of dtype SEGMENT that describes a whole bucket of layers. ctypes
releases the GIL.
"""

import ctypes
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import config

EXP_ZERO = -32768  # exponent of an all-zero layer
EXP_NONFINITE = 32767  # exponent of a layer with NaN or Inf
SPECIALS, RAW = 1, 2  # Segment flags
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = 0, 1, 2, 3  # Segment dtype codes
SUM_FLOAT, SUM_FORMAT, SUM_KAHAN = 0, 1, 2  # accumulation modes

SEGMENT = np.dtype(
    [
        ("data", np.uint64),
        ("n", np.int64),
        ("offset", np.int64),
        ("exponent", np.int32),
        ("factor", np.float32),
        ("exp_bits", np.uint8),
        ("man_bits", np.uint8),
        ("flags", np.uint8),
        ("dtype", np.uint8),
        ("uid", np.uint32),
        ("pad", np.uint32),
        ("first", np.int64),
    ],
    align=True,
)

Array: TypeAlias = npt.NDArray[Any]
Message: TypeAlias = "int | Array"

_REASONS = {
    1: "exp_bits must be in 1..8 and man_bits in 0..23, with at least one nonzero finite value",
    2: "dtype must be in 0..3",
    3: "address must not be null",
    4: "the segment must lie inside its message",
    5: "the number of elements or inputs is out of range",
    6: "the exponent must be in -4096..4096, EXP_ZERO or EXP_NONFINITE",
}
_I32, _I64, _U64, _PTR = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
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
    "aps_encode_array": [_PTR, _PTR, _I64, _I32, _I32, _I32, _I32, _I32, _I32, _U64],
    "aps_decode_array": [_PTR, _PTR, _I64, _I32, _I32, _I32, _I32],
    "aps_quantize_array": [_PTR, _PTR, _I64, _I32, _I32, _I32, _I32, _I32, _I32, _U64],
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
            for name, arguments in _SIGNATURES.items():
                getattr(lib, name).argtypes = arguments
                getattr(lib, name).restype = _I64
            lib.aps_use_avx2(int(config.use_avx2()))
            lib.aps_set_num_threads(config.num_threads())
            _library = lib
    return _library


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


def check_segments(function: str, segs: Array) -> None:
    """Raise TypeError or ValueError unless segs is a contiguous one-dimensional array of dtype SEGMENT."""
    if not isinstance(segs, np.ndarray) or segs.dtype != SEGMENT:
        raise TypeError(f"{function}: segs must be a numpy array of dtype SEGMENT, got {type(segs).__name__}")
    if segs.ndim != 1 or not segs.flags.c_contiguous or not segs.flags.writeable:
        raise ValueError(f"{function}: segs must be one-dimensional, contiguous and writeable")


def message_address(function: str, message: Message) -> tuple[int, int]:
    """Return (address, length) of a message; the length of a bare address is unknown and given as -1."""
    if isinstance(message, (int, np.integer)):
        return int(message), -1
    if not isinstance(message, np.ndarray) or message.dtype != np.uint8 or not message.flags.c_contiguous:
        raise TypeError(f"{function}: a message must be a contiguous uint8 array or an address")
    return message.ctypes.data, message.nbytes


def input_table(function: str, inputs: Sequence[Message], length: int | None) -> tuple[Any, int]:
    """Return a C array of the input addresses and the length that all of them have at least (-1: unknown)."""
    if len(inputs) == 0:
        raise ValueError(f"{function}: inputs must hold at least 1 message, got 0")
    pairs = [message_address(function, message) for message in inputs]
    known = [size for _, size in pairs if size >= 0] + ([] if length is None else [length])
    return (_PTR * len(pairs))(*[address for address, _ in pairs]), min(known, default=-1)


def check_accumulate(function: str, accumulate: int) -> None:
    """Raise ValueError unless accumulate is one of the modes 0, 1, 2."""
    if accumulate not in (SUM_FLOAT, SUM_FORMAT, SUM_KAHAN):
        raise ValueError(f"{function}: accumulate must be in 0..2, got {accumulate}")


def seed_argument(seed: int | None, reduce: bool = False) -> tuple[int, int]:
    """Return (stochastic, seed modulo 2^64); a reduce draws from a stream independent of the encode's."""
    if seed is None:
        return 0, 0
    return 1, (seed ^ (0xA5C3_96E7_1B2D_4F85 if reduce else 0)) & (2**64 - 1)


class CpuKernels:
    """Launchers of the CPU library; `CudaKernels` has the same methods.

    A message is a uint8 array (or its address); messages and data must not overlap. Nothing outside a
    segment's bytes is written. Malformed tables raise ValueError before anything is written. Rank and step
    belong in the seed: two ranks that pass the same seed, uid and index draw the same random bits.
    """

    def scan(self, segs: Array, stochastic: bool = False) -> None:
        """Set `exponent` to the least E at which the segment's largest |x|, rounded, fits the format.

        All zero (or n = 0) gives EXP_ZERO, any NaN or Inf gives EXP_NONFINITE, RAW gives 0. With
        stochastic=True the largest |x| itself fits, since it may be rounded up.
        """
        check_segments("scan", segs)
        raise_on_error("scan", library().aps_scan(segs.ctypes.data, len(segs), int(stochastic)))

    def encode(self, segs: Array, message: Array, seed: int | None = None) -> None:
        """Write round(x * 2^(emax - E)) of every element, saturating; a seed makes it stochastic."""
        check_segments("encode", segs)
        address, length = message_address("encode", message)
        status = library().aps_encode_segments(
            segs.ctypes.data, len(segs), address, length, *seed_argument(seed)
        )
        raise_on_error("encode", status)

    def reduce(
        self,
        segs: Array,
        inputs: Sequence[Message],
        accumulate: int,
        out: Array,
        seed: int | None = None,
        keep_exponent: bool = False,
    ) -> None:
        """Sum the inputs; write new exponents into segs and the encoded sums into out at the same offsets.

        Modes 1 and 2, and mode 0 with keep_exponent, keep the exponent and saturate. Otherwise an all-zero
        sum gets EXP_ZERO. EXP_NONFINITE stays.
        """
        check_segments("reduce", segs)
        check_accumulate("reduce", accumulate)
        address, length = message_address("reduce", out)
        table, shortest = input_table("reduce", inputs, length if length >= 0 else None)
        stochastic, seed_bits = seed_argument(seed, reduce=True)
        status = library().aps_reduce_segments(
            segs.ctypes.data,
            len(segs),
            table,
            len(inputs),
            accumulate,
            int(keep_exponent),
            address,
            shortest,
            stochastic,
            seed_bits,
        )
        raise_on_error("reduce", status)

    def decode(
        self, segs: Array, inputs: Sequence[Message], accumulate: int = SUM_FLOAT, length: int | None = None
    ) -> None:
        """Sum the inputs, multiply by `factor`, scale back and store in `data`; EXP_NONFINITE stores NaN.

        `length` bounds the messages that are given as bare addresses.
        """
        check_segments("decode", segs)
        check_accumulate("decode", accumulate)
        table, shortest = input_table("decode", inputs, length)
        status = library().aps_decode_segments(
            segs.ctypes.data, len(segs), table, len(inputs), shortest, accumulate
        )
        raise_on_error("decode", status)

    def residual(self, segs: Array, message: Message) -> None:
        """Subtract from `data` what the rank's own message decodes to: the error that feedback carries over.

        A layer that was not finite leaves zeros, so that no NaN outlives the step.
        """
        check_segments("residual", segs)
        address, length = message_address("residual", message)
        raise_on_error(
            "residual", library().aps_residual_segments(segs.ctypes.data, len(segs), address, length)
        )

    def measure(self, segs: Array, message: Message) -> npt.NDArray[np.float64]:
        """Return per segment: nonzero x that became 0, sum (x-d)^2, sum x^2, max |x|, in true units."""
        check_segments("measure", segs)
        address, length = message_address("measure", message)
        out = np.zeros((len(segs), 4))
        status = library().aps_measure_segments(segs.ctypes.data, len(segs), address, length, out.ctypes.data)
        raise_on_error("measure", status)
        return out

    def add(self, segs: Array, addresses: npt.NDArray[np.uint64]) -> None:
        """Add `data` to the float32 array at each segment's address: gradient plus carried-over error."""
        check_segments("add", segs)
        targets = np.ascontiguousarray(addresses, dtype=np.uint64)
        if targets.shape != segs.shape:
            raise ValueError(f"add: addresses must have one entry per segment, got {targets.shape}")
        raise_on_error("add", library().aps_add_segments(segs.ctypes.data, len(segs), targets.ctypes.data))

    def zeros(self, n: int) -> npt.NDArray[np.float32]:
        """Return n float32 zeros in the memory that the kernels work in."""
        return np.zeros(n, dtype=np.float32)

    def to_host(self, array: Array) -> Array:
        """Return a NumPy copy of a buffer of `zeros`."""
        return array.copy()

    def from_host(self, values: Array) -> Array:
        """Return a buffer like that of `zeros`, filled with values."""
        return np.array(values, dtype=np.float32).reshape(-1)

    def address(self, array: Array) -> int:
        """Return the address of an array that `zeros` or `alloc` made."""
        return int(array.ctypes.data)

    def alloc(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return n_bytes of zeroed host memory at a 64-byte boundary, its pages already mapped."""
        if n_bytes < 0:
            raise ValueError(f"alloc: n_bytes must not be negative, got {n_bytes}")
        memory = np.empty(n_bytes + 64, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        memory.fill(0)
        return memory[start : start + n_bytes]


# Array functions: no scaling, the format's own domain. Inputs must be C-contiguous --------------------------


def _check_array(function: str, x: Array, dtype: int) -> None:
    if dtype not in (0, 1, 2, 3) or x.dtype.itemsize != (4, 8, 2, 2)[dtype]:
        raise TypeError(f"{function}: dtype code {dtype} does not describe an array of {x.dtype}")
    if not x.flags.c_contiguous:
        raise ValueError(f"{function}: the array must be contiguous")


def _code_dtype(width: int) -> npt.DTypeLike:
    return np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32


def quantize_array(
    x: Array,
    dtype: int,
    exp_bits: int,
    man_bits: int,
    specials: bool,
    seed: int | None = None,
    saturate: bool = False,
) -> Array:
    """Return x rounded to the format, in x's own dtype; a bfloat16 array comes as its uint16 view.

    With specials and not saturate, overflow gives Inf. NaN stays NaN, or becomes Inf (specials, man_bits 0),
    or zero of the opposite sign (no specials), as ml_dtypes has it.
    """
    _check_array("quantize_array", x, dtype)
    out = np.empty_like(x)
    status = library().aps_quantize_array(
        x.ctypes.data,
        out.ctypes.data,
        x.size,
        dtype,
        exp_bits,
        man_bits,
        specials,
        saturate,
        *seed_argument(seed),
    )
    raise_on_error("quantize_array", status)
    return out


def encode_array(
    x: Array,
    dtype: int,
    exp_bits: int,
    man_bits: int,
    specials: bool,
    seed: int | None = None,
    saturate: bool = False,
) -> Array:
    """Return the codes of x in the least of uint8, uint16, uint32; they round as in `quantize_array`."""
    _check_array("encode_array", x, dtype)
    out = np.empty(x.shape, dtype=_code_dtype(1 + exp_bits + man_bits))
    status = library().aps_encode_array(
        x.ctypes.data,
        out.ctypes.data,
        x.size,
        dtype,
        exp_bits,
        man_bits,
        specials,
        saturate,
        *seed_argument(seed),
    )
    raise_on_error("encode_array", status)
    return out


def decode_array(codes: Array, exp_bits: int, man_bits: int, specials: bool) -> npt.NDArray[np.float32]:
    """Return the values of codes as float32; only the top binade of e = 8 without specials overflows."""
    codes = np.ascontiguousarray(codes, dtype=_code_dtype(1 + exp_bits + man_bits)).reshape(codes.shape)
    out = np.empty(codes.shape, dtype=np.float32)
    status = library().aps_decode_array(
        codes.ctypes.data, out.ctypes.data, codes.size, FLOAT32, exp_bits, man_bits, specials
    )
    raise_on_error("decode_array", status)
    return out


def pack_codes(codes: Array, width: int) -> npt.NDArray[np.uint8]:
    """Return the low `width` bits of every code, packed little-endian; the last byte is zero padded."""
    flat = np.ascontiguousarray(codes, dtype=_code_dtype(width)).reshape(-1)
    out = np.empty((flat.size * width + 7) // 8, dtype=np.uint8)
    raise_on_error(
        "pack_codes", library().aps_pack_codes(flat.ctypes.data, flat.size, width, out.ctypes.data)
    )
    return out


def unpack_codes(data: Array, width: int, n: int) -> Array:
    """Return the first n codes of a packed uint8 array, in the least of uint8, uint16, uint32."""
    data = np.ascontiguousarray(data, dtype=np.uint8).reshape(-1)
    if not 1 <= width <= 32:
        raise ValueError(f"unpack_codes: width must be in 1..32, got {width}")
    if n < 0 or (n * width + 7) // 8 > data.size:
        raise ValueError(f"unpack_codes: n must be in 0..{data.size * 8 // width}, got {n}")
    out = np.empty(n, dtype=_code_dtype(width))
    raise_on_error("unpack_codes", library().aps_unpack_codes(data.ctypes.data, n, width, out.ctypes.data))
    return out
