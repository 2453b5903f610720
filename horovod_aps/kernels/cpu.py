"""The CPU kernels: `protocol.Kernels` over the compiled library, and over codecs in Python for formats without one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from horovod_aps.kernels import codecs
from horovod_aps.kernels.native import library, raise_on_error
from horovod_aps.kernels.protocol import DONE, Buffer, Kernels, Request
from horovod_aps.kernels.segments import (
    FAMILY_RAW,
    SUM_FLOAT,
    Bytes,
    Message,
    Table,
    check_accumulate,
    check_segments,
    input_addresses,
    message_address,
    seed_argument,
    target_addresses,
)

if TYPE_CHECKING:
    from horovod_aps.transports.base import Transport


class CpuKernels(Kernels):
    """Launchers of the CPU library; see `protocol.Kernels` for what they do."""

    # The library refuses a table with a segment whose codec is in Python, before anything is written; only then is the
    # table looked at and split.

    def begin(self) -> None:
        """Nothing is queued on a CPU."""

    def end(self) -> None:
        """Every operation is over when it returns."""

    def drain(self) -> None:
        """Nothing is ever under way."""

    def reach(self, transport: Transport) -> Transport:
        """Every transport reaches host memory."""
        return transport

    def scan(self, segs: Table, stochastic: bool = False) -> Request:
        """Set `exponent` of every segment; see Kernels.scan."""
        check_segments("scan", segs)
        status = library().aps_scan(segs.ctypes.data, len(segs), int(stochastic))
        if status and codecs.is_hosted(segs):
            codecs.split(
                "scan",
                segs,
                -1,
                lambda part, _: self.scan(part, stochastic),
                lambda _, segment: segment.scan(stochastic),
            )
            return DONE
        raise_on_error("scan", status)
        return DONE

    def encode(self, segs: Table, message: Message, seed: int | None = None) -> None:
        """Write the codes of every element into the message; see Kernels.encode."""
        check_segments("encode", segs)
        address, length = message_address("encode", message)
        status = library().aps_encode_segments(segs.ctypes.data, len(segs), address, length, *seed_argument(seed))
        if status and codecs.is_hosted(segs):
            return codecs.split(
                "encode",
                segs,
                length,
                lambda part, _: self.encode(part, message, seed),
                lambda _, segment: segment.encode(address, seed),
            )
        raise_on_error("encode", status)

    def copy(self, segs: Table, message: Message) -> Request:
        """Write values as float32; see Kernels.copy."""
        self.encode(segs, message)
        return DONE

    def reduce(
        self,
        segs: Table,
        inputs: Sequence[Message],
        accumulate: int,
        out: Message,
        seed: int | None = None,
        keep_exponent: bool = False,
    ) -> Request:
        """Sum the inputs and encode the sums into out with new exponents; see Kernels.reduce."""
        check_segments("reduce", segs)
        check_accumulate("reduce", accumulate)
        address, length = message_address("reduce", out)
        sources, shortest = input_addresses("reduce", inputs, length if length >= 0 else None)
        stochastic, seed_bits = seed_argument(seed, reduce=True)
        status = library().aps_reduce_segments(
            segs.ctypes.data,
            len(segs),
            _pointers(sources),
            len(sources),
            accumulate,
            int(keep_exponent),
            address,
            shortest,
            stochastic,
            seed_bits,
        )
        if status and codecs.is_hosted(segs):
            draw = seed_bits if stochastic else None
            codecs.split(
                "reduce",
                segs,
                shortest,
                lambda part, _: self.reduce(part, inputs, accumulate, out, seed, keep_exponent),
                lambda _, segment: segment.reduce(sources, accumulate, address, draw, keep_exponent),
            )
            return DONE
        raise_on_error("reduce", status)
        return DONE

    def decode(
        self, segs: Table, inputs: Sequence[Message], accumulate: int = SUM_FLOAT, length: int | None = None
    ) -> None:
        """Sum the inputs, scale back and store in `data`; see Kernels.decode."""
        check_segments("decode", segs)
        check_accumulate("decode", accumulate)
        sources, shortest = input_addresses("decode", inputs, length)
        status = library().aps_decode_segments(
            segs.ctypes.data, len(segs), _pointers(sources), len(sources), shortest, accumulate
        )
        if status and codecs.is_hosted(segs):
            return codecs.split(
                "decode",
                segs,
                shortest,
                lambda part, _: self.decode(part, inputs, accumulate, length),
                lambda _, segment: segment.decode(sources, accumulate),
            )
        raise_on_error("decode", status)

    def residual(self, segs: Table, message: Message) -> None:
        """Subtract from `data` what the own message decodes to; see Kernels.residual."""
        check_segments("residual", segs)
        address, length = message_address("residual", message)
        status = library().aps_residual_segments(segs.ctypes.data, len(segs), address, length)
        if status and codecs.is_hosted(segs):
            return codecs.split(
                "residual",
                segs,
                length,
                lambda part, _: self.residual(part, message),
                lambda _, segment: segment.residual(address),
            )
        raise_on_error("residual", status)

    def measure(self, segs: Table, message: Message) -> npt.NDArray[np.float64]:
        """Return lost elements, squared error, squares and largest magnitude; see Kernels.measure."""
        check_segments("measure", segs)
        address, length = message_address("measure", message)
        out = np.zeros((len(segs), 4))
        status = library().aps_measure_segments(segs.ctypes.data, len(segs), address, length, out.ctypes.data)
        if status and codecs.is_hosted(segs):

            def native(part: Table, rows: npt.NDArray[np.bool_]) -> None:
                out[rows] = self.measure(part, message)

            def hosted(row: int, segment: codecs.Segment) -> None:
                out[row] = segment.measure(address)

            codecs.split("measure", segs, length, native, hosted)
            return out
        raise_on_error("measure", status)
        return out

    def add(self, segs: Table, addresses: npt.NDArray[np.uint64]) -> None:
        """Add `data` to the float32 arrays at `addresses`; see Kernels.add."""
        check_segments("add", segs)
        targets = target_addresses(segs, addresses)
        status = library().aps_add_segments(segs.ctypes.data, len(segs), targets.ctypes.data)
        if status and codecs.is_hosted(segs):  # no codec takes part in this
            plain = segs.copy()
            plain["family"] = FAMILY_RAW
            return self.add(plain, targets)
        raise_on_error("add", status)

    # ---- memory -------------------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> Bytes:
        """Return n_bytes of zeroed host memory at a 64-byte boundary, its pages already mapped."""
        if n_bytes < 0:
            raise ValueError(f"alloc: n_bytes must not be negative, got {n_bytes}")
        memory = np.empty(n_bytes + 64, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        memory.fill(0)
        return memory[start : start + n_bytes]

    def bytes_of(self, message: Bytes) -> Bytes:
        """Return the message."""
        return message

    def zeros(self, n: int) -> npt.NDArray[np.float32]:
        """Return n float32 zeros."""
        return np.zeros(n, dtype=np.float32)

    def address(self, array: Buffer) -> int:
        """Return the address of an array that `zeros` or `alloc` made."""
        return int(np.asarray(array).ctypes.data)

    def to_host(self, array: Buffer) -> npt.NDArray[np.float32]:
        """Return a copy of a buffer of `zeros`."""
        return np.array(array, dtype=np.float32)

    def from_host(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return a buffer like that of `zeros`, filled with values."""
        return np.array(values, dtype=np.float32).reshape(-1)


def _pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
