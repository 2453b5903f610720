"""Streams on CUDA devices: launchers over CuPy for cuda/aps_activations.cu, in torch's current stream.

Two passes over the data: sizes of the blocks, then their bytes at the sums of the sizes. Same bytes as on the CPU.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from horovod_aps.kernels.nvrtc import load

BLOCK, CHUNK_BLOCKS = 64, 64  # as in aps_activations.h
HEADER = struct.Struct("<IB3xqfIq")
MAGIC = 0x31415041
THREADS = 128
_CODES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}


@functools.lru_cache(maxsize=16)
def _kernel(name: str, device: int) -> Any:
    """The compiled kernel of a device."""
    import cupy

    with cupy.cuda.Device(device):
        return load(cupy, "aps_activations.cu", device).get_function(name)


def _launch(name: str, tensor: Tensor, n_blocks: int, *arguments: Any) -> None:
    import cupy

    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    device = tensor.device.index or 0
    typed = tuple(np.uint64(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments)
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):
        _kernel(name, device)((min(65535, -(-n_blocks // THREADS)),), (THREADS,), typed)


def _bits(value: float, code: str, as_code: str) -> int:
    return int(struct.unpack(as_code, struct.pack(code, value))[0])


def bound_of(eb: float, dtype: torch.dtype) -> float:
    """The bound that the quantiser works with, act_bound of aps_activations.h."""
    if not eb >= 2.0**-100:
        return 0.0
    eb = min(eb, 2.0**100)
    lower, drop = (eb * (1.0 - 2.0**-8), 41) if dtype == torch.float32 else (eb, 52)
    bits = _bits(lower, "<d", "<Q")
    return float(struct.unpack("<d", struct.pack("<Q", bits >> drop << drop))[0])


def encode(flat: Tensor, bound: float) -> Tensor:
    """The stream of a contiguous vector, on its device."""
    n = flat.numel()
    n_blocks, device = -(-n // BLOCK), flat.device
    n_chunks = -(-n_blocks // CHUNK_BLOCKS)
    plans = torch.empty(n_blocks, dtype=torch.int16, device=device)
    sizes = torch.zeros(n_chunks * CHUNK_BLOCKS, dtype=torch.int32, device=device)
    dtype, eb = np.int32(_CODES[flat.dtype]), np.uint64(_bits(bound, "<d", "<Q"))
    if n:
        _launch("activations_plan_kernel", flat, n_blocks, flat, np.int64(n), dtype, eb, plans, sizes)
    by_chunk = sizes.view(n_chunks, CHUNK_BLOCKS).long()
    counts = torch.full((n_chunks,), CHUNK_BLOCKS, device=device)
    if n_chunks:
        counts[-1] = n_blocks - (n_chunks - 1) * CHUNK_BLOCKS
    chunk_sizes = by_chunk.sum(1) + 2 * counts
    tables = HEADER.size + 4 * n_chunks + chunk_sizes.cumsum(0) - chunk_sizes
    offsets = (tables + 2 * counts)[:, None] + by_chunk.cumsum(1) - by_chunk
    total = HEADER.size + 4 * n_chunks + int(chunk_sizes.sum())
    stream = torch.empty(total, dtype=torch.uint8, device=device)
    header = HEADER.pack(MAGIC, int(dtype), n, bound_of(bound, flat.dtype), n_chunks, total)
    stream[: HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    stream[HEADER.size : HEADER.size + 4 * n_chunks] = chunk_sizes.to(torch.int32).view(torch.uint8)
    if n:
        arguments = (flat, np.int64(n), dtype, eb, plans, offsets.contiguous(), tables, stream)
        _launch("activations_write_kernel", flat, n_blocks, *arguments)
    return stream


def decode(stream: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The vector of n values, on the stream's device; ValueError if the stream holds anything else."""
    n_blocks = -(-n // BLOCK)
    n_chunks = -(-n_blocks // CHUNK_BLOCKS)
    start = HEADER.size + 4 * n_chunks
    if stream.numel() < start:
        raise ValueError("decompress: the stream is malformed")
    fields = HEADER.unpack(bytes(stream[: HEADER.size].cpu().tolist()))
    if fields[:3] + fields[4:] != (MAGIC, _CODES[dtype], n, n_chunks, stream.numel()) or not 0 <= fields[3] <= 2e30:
        raise ValueError("decompress: the stream is malformed")
    chunk_sizes = stream[HEADER.size : start].clone().view(torch.int32).long()
    tables = torch.empty(n_chunks + 1, dtype=torch.int64, device=stream.device)
    tables[0] = start
    tables[1:] = start + chunk_sizes.cumsum(0)
    if int(tables[-1]) != stream.numel() or bool((chunk_sizes < 0).any()):
        raise ValueError("decompress: the stream is malformed")
    out = torch.empty(n, dtype=dtype, device=stream.device)
    wrong = torch.zeros(1, dtype=torch.int32, device=stream.device)
    if n:
        bound = np.uint32(_bits(fields[3], "<f", "<I"))
        arguments = (stream, tables, np.int64(n), np.int32(_CODES[dtype]), bound, out, wrong)
        _launch("activations_decode_kernel", stream, n_blocks, *arguments)
        if int(wrong):
            raise ValueError("decompress: the stream is malformed")
    return out
