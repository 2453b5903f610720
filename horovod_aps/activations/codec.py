"""Tensors to bytes and back: streams within an error bound, one bit per value, indices of max-pooling.

The work is in cuda/aps_activations.cpp, for CUDA tensors in aps_activations.cu, which give the same bytes.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from horovod_aps import kernels
from horovod_aps.activations import memory

DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}  # as in aps_scalar.h
_ONE = {torch.float32: 0x3F800000, torch.float16: 0x3C00, torch.bfloat16: 0x3F80, torch.bool: 1}
_REASONS = {-1: "an argument is out of range", -2: "there is no memory", -3: "the stream is malformed"}


class Pool(ctypes.Structure):
    """How indices of max-pooling lie in their windows; ActPool of aps_activations.cpp."""

    _fields_ = [("n_planes", ctypes.c_int64)] + [
        (name, ctypes.c_int32)
        for name in (
            "height",
            "width",
            "out_height",
            "out_width",
            "step_down",
            "step_right",
            "first_down",
            "first_right",
            "n_right",
            "n_bits",
        )
    ]


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The compiled library with the signatures of this module's functions."""
    lib = kernels.library()
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, arguments in {
        "aps_act_encode": [pointer, size, number, ctypes.c_double, pointer, number, number],
        "aps_act_fetch": [pointer, size],
        "aps_act_decode": [pointer, size, pointer, size, number, pointer, number],
        "aps_act_mask": [pointer, size, number, number, pointer],
        "aps_act_unmask": [pointer, size, number, ctypes.c_uint64, pointer],
        "aps_act_pool_plan": [pointer, pointer],
        "aps_act_pool_size": [pointer],
        "aps_act_pool_encode": [pointer, pointer, pointer],
        "aps_act_pool_decode": [pointer, pointer, pointer],
    }.items():
        getattr(lib, name).argtypes = arguments
        getattr(lib, name).restype = size
    lib.aps_act_two_valued.argtypes = [pointer, size, number, pointer]
    lib.aps_act_two_valued.restype = number
    return lib


def _checked(function: str, status: int) -> int:
    if status < 0:
        raise ValueError(f"{function}: {_REASONS[status]}")
    return status


def is_supported(tensor: torch.Tensor) -> bool:
    """Whether `encode` takes it: float32, float16 or bfloat16, on a CPU or a CUDA device."""
    return tensor.dtype in DTYPES and tensor.device.type in ("cpu", "cuda")


# ---- within a bound


@dataclass(frozen=True, eq=False)
class Guide:
    """What a stream is decoded beside: a mask, values that it was predicted from, or both. Only on CPUs."""

    mask: torch.Tensor | None = None
    """Bits of `pack_mask`; where they are not set the bound is 2^coarse times as large."""
    coarse: int = 0
    sources: tuple[Source, ...] = ()
    """The prediction is their sum where it is positive, else zero."""

    @property
    def depth(self) -> int:
        """How many predictions follow from each other."""
        return max((1 + s.stream.depth for s in self.sources), default=0)


@dataclass(frozen=True, eq=False)
class Stream:
    """Bytes and all that it takes to decode them; it does not change."""

    content: torch.Tensor
    n: int
    dtype: torch.dtype
    guide: Guide | None = None

    @property
    def depth(self) -> int:
        return self.guide.depth if self.guide is not None else 0


@dataclass(frozen=True, eq=False)
class Source:
    """A stream as part of a prediction: as it is, or scale·x + shift of its channel (float32 vectors)."""

    stream: Stream
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    plane: int = 1
    """Value i belongs to channel i // plane % channels."""
    name: str = ""
    """Of the layer that the stream is from."""


class _Hints(ctypes.Structure):
    """ActHints of aps_activations.cpp."""

    _fields_ = [("mask", ctypes.c_void_p), ("n_sources", ctypes.c_int64), ("sources", ctypes.c_void_p)]


class _Source(ctypes.Structure):
    """ActSource of aps_activations.cpp."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("hints", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("n_channels", ctypes.c_int64),
        ("plane", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    ]


def _hints(guide: Guide | None, kept: list[object]) -> int | None:
    """Address of the guide in C; what must stay until the call returns is added to `kept`."""
    if guide is None:
        return None
    sources = (_Source * len(guide.sources))()
    for out, source in zip(sources, guide.sources, strict=True):
        stream = source.stream
        out.stream, out.size = stream.content.data_ptr(), stream.content.numel()
        out.hints, out.plane, out.dtype = _hints(stream.guide, kept), source.plane, DTYPES[stream.dtype]
        if source.scale is not None and source.shift is not None:
            out.scale, out.shift = source.scale.data_ptr(), source.shift.data_ptr()
            out.n_channels = source.scale.numel()
    mask = guide.mask.data_ptr() if guide.mask is not None else None
    hints = _Hints(mask, len(sources), ctypes.addressof(sources) if guide.sources else None)
    kept += [sources, hints]
    return ctypes.addressof(hints)


def encode(flat: torch.Tensor, bound: float, guide: Guide | None = None) -> torch.Tensor:
    """The stream (uint8, same device) of a contiguous vector; decoding differs by at most `bound` anywhere.

    With a guide: by at most bound·2^coarse where its mask is not set.
    """
    if flat.is_cuda:
        from horovod_aps.activations import cuda

        return cuda.encode(flat, bound)
    lib = library()
    kept: list[object] = []
    hints, coarse = _hints(guide, kept), guide.coarse if guide is not None else 0
    threads = torch.get_num_threads()
    status = lib.aps_act_encode(flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], bound, hints, coarse, threads)
    size = _checked("compress", status)
    stream = memory.apart(size)
    _checked("compress", lib.aps_act_fetch(stream.data_ptr(), size))
    return stream


def decode(stream: torch.Tensor, n: int, dtype: torch.dtype, guide: Guide | None = None) -> torch.Tensor:
    """The vector of n values that the stream holds; ValueError if it holds anything else."""
    if stream.is_cuda:
        from horovod_aps.activations import cuda

        return cuda.decode(stream, n, dtype)
    out = torch.empty(n, dtype=dtype)
    if not stream.numel():
        raise ValueError("decompress: the stream is malformed")
    kept: list[object] = []
    hints, size = _hints(guide, kept), stream.numel()
    threads = torch.get_num_threads()
    status = library().aps_act_decode(stream.data_ptr(), size, out.data_ptr(), n, DTYPES[dtype], hints, threads)
    _checked("decompress", status)
    return out


@dataclass(frozen=True)
class Compressed:
    """A tensor as a stream; `stream.numel()` is its size in bytes."""

    stream: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype


def compress(tensor: torch.Tensor, error_bound: float) -> Compressed:
    """Compress a tensor so that no element changes by more than `error_bound`.

    float32, float16 and bfloat16. Zero stays zero, signs stay, NaN and Inf stay. What does not compress is kept as it
    is, block by block of 64.
    """
    if not is_supported(tensor):
        raise TypeError(
            f"compress: tensor must be float32, float16 or bfloat16 on a CPU or CUDA device, "
            f"got {tensor.dtype} on {tensor.device}"
        )
    if not (isinstance(error_bound, (int, float)) and error_bound >= 0 and math.isfinite(error_bound)):
        raise ValueError(f"compress: error_bound must be a finite number that is not negative, got {error_bound!r}")
    flat = tensor.detach().contiguous().resolve_neg().view(-1)
    return Compressed(encode(flat, float(error_bound)), tensor.shape, tensor.dtype)


def decompress(compressed: Compressed) -> torch.Tensor:
    """The tensor that `compress` was given, within its bound."""
    n = math.prod(compressed.shape)
    stream = compressed.stream
    if stream.dtype != torch.uint8 or stream.dim() != 1 or compressed.dtype not in DTYPES:
        raise ValueError("decompress: the stream must be a vector of uint8, and its dtype one that compress takes")
    return decode(stream.contiguous(), n, compressed.dtype).view(compressed.shape)


# ---- one bit per value


def other_value(flat: torch.Tensor) -> int | None:
    """The bits of the one value beside zero that a CPU tensor holds (0: none), or None if it holds more."""
    if flat.is_cuda or flat.element_size() not in (1, 2, 4):
        return None
    other = ctypes.c_uint64()
    found = library().aps_act_two_valued(flat.data_ptr(), flat.numel(), flat.element_size(), ctypes.byref(other))
    return other.value if found else None


def pack_mask(flat: torch.Tensor, positive: bool) -> torch.Tensor:
    """One bit per value: whether it is positive (or NaN), or whether it is not zero."""
    if flat.is_cuda:
        marks = ~(flat <= 0) if positive else flat != 0
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=flat.device)
        padded = torch.nn.functional.pad(marks.to(torch.uint8), (0, -flat.numel() % 8))
        return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    bits = memory.apart(-(-flat.numel() // 8))
    code = -1 if flat.dtype in (torch.bool, torch.uint8) else DTYPES[flat.dtype]
    _checked(
        "pack_mask",
        library().aps_act_mask(flat.data_ptr(), flat.numel(), code, positive, bits.data_ptr()),
    )
    return bits


def unpack_mask(bits: torch.Tensor, n: int, dtype: torch.dtype, other: int | None = None) -> torch.Tensor:
    """Zeros where bits are not set, elsewhere the value with the bits `other` (default: one)."""
    if bits.numel() != -(-n // 8):
        raise ValueError(f"unpack_mask: {n} values take {-(-n // 8)} bytes, got {bits.numel()}")
    if bits.is_cuda:
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        return ((bits[:, None] >> shifts) & 1).view(-1)[:n].to(dtype)
    out = torch.empty(n, dtype=dtype)
    other = _ONE[dtype] if other is None else other
    _checked("unpack_mask", library().aps_act_unmask(bits.data_ptr(), n, out.element_size(), other, out.data_ptr()))
    return out


# ---- indices of max-pooling


def pack_pool(indices: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, Pool] | None:
    """Indices (..., out height, out width) into pictures of `shape` (..., height, width), by their place in a window.

    Exact; None if they are not on the CPU or do not look like those of max-pooling.
    """
    if indices.is_cuda or indices.dim() < 3 or len(shape) != indices.dim() or not indices.is_contiguous():
        return None
    if indices.shape[:-2] != shape[:-2] or indices.numel() == 0:
        return None
    height, width = shape[-2:]
    out_height, out_width = indices.shape[-2:]
    pool = Pool(indices.numel() // (out_height * out_width), height, width, out_height, out_width)
    lib = library()
    if lib.aps_act_pool_plan(indices.data_ptr(), ctypes.byref(pool)) != 1:
        return None
    bits = memory.apart(_checked("pack_pool", lib.aps_act_pool_size(ctypes.byref(pool))))
    _checked("pack_pool", lib.aps_act_pool_encode(indices.data_ptr(), ctypes.byref(pool), bits.data_ptr()))
    return bits, pool


def unpack_pool(bits: torch.Tensor, pool: Pool) -> torch.Tensor:
    """The indices, as a vector; ValueError for bits that lead out of the picture."""
    lib = library()
    if bits.numel() != _checked("unpack_pool", lib.aps_act_pool_size(ctypes.byref(pool))):
        raise ValueError("unpack_pool: the bits do not fit the pooling")
    out = torch.empty(pool.n_planes * pool.out_height * pool.out_width, dtype=torch.int64)
    _checked("unpack_pool", lib.aps_act_pool_decode(bits.data_ptr() or None, ctypes.byref(pool), out.data_ptr()))
    return out
