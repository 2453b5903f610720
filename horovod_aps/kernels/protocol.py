"""What the exchange asks of kernels, whatever device they run on: `cpu.CpuKernels` and `cuda.CudaKernels` have it.

Flow of data: gradients -> scan -> (exponents shared) -> encode -> message -> reduce / decode -> gradients.
Every operation takes one table of segments that describes a whole bucket of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from horovod_aps.kernels.segments import SUM_FLOAT, Bytes, Message, Table

if TYPE_CHECKING:
    from horovod_aps.transports.base import Transport


class Buffer(Protocol):
    """float32 numbers in the memory that the kernels work in: a NumPy array, or one of the device's."""

    @property
    def size(self) -> int:
        """Elements."""
        ...


class Request(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Whether it has finished; never blocks."""
        ...


class _Done:
    def done(self) -> bool:
        return True


DONE = _Done()
"""The request of something that is over when it is asked for."""


class Kernels(Protocol):
    """Scan, encode, reduce and decode over a table of segments, error feedback, and the memory for it.

    Operations take place in the order in which they are called, and on a device later than that: what the host reads
    (exponents) is there when the request is done that the operation has returned.

    A message is a uint8 array (or its address); messages and data must not overlap. Nothing outside a
    segment's bytes is written. Malformed tables raise ValueError before anything is written. Rank and step
    belong in the seed: two ranks that pass the same seed, uid and index draw the same random bits.
    """

    def begin(self) -> None:
        """Have the next scan, and what comes before it, wait for what the framework has queued so far.

        Whatever else is done with the same data comes after the scan's request.
        """
        ...

    def end(self) -> None:
        """Have what the framework queues from now on wait for all operations so far."""
        ...

    def drain(self) -> None:
        """Wait until nothing is under way; for what has gone wrong."""
        ...

    def reach(self, transport: Transport) -> Transport:
        """What brings messages of `alloc` to other ranks over a transport."""
        ...

    def scan(self, segs: Table, stochastic: bool = False) -> Request:
        """Set `exponent` to the least E at which the segment's largest |x|, rounded, fits the format.

        All zero (or n = 0) gives EXP_ZERO, any NaN or Inf gives EXP_NONFINITE, raw float32 gives 0. With
        stochastic=True the largest |x| itself fits, since it may be rounded up.
        """
        ...

    def encode(self, segs: Table, message: Message, seed: int | None = None) -> None:
        """Write round(x * 2^(emax - E)) of every element, saturating.

        A seed makes it stochastic, except for segments that have the flag NEAREST; so it does in `reduce`, and so does
        `stochastic` in `scan`.
        """
        ...

    def copy(self, segs: Table, message: Message) -> Request:
        """Write values as float32, which is the segments' format, into a message.

        In place of a scan: after `begin`, and whatever else is done with the data or the message comes after the
        request.
        """
        ...

    def reduce(
        self,
        segs: Table,
        inputs: Sequence[Message],
        accumulate: int,
        out: Message,
        seed: int | None = None,
        keep_exponent: bool = False,
    ) -> Request:
        """Sum the inputs; write new exponents into segs and the encoded sums into out at the same offsets.

        Modes 1 and 2, and mode 0 with keep_exponent, keep the exponent and saturate. Otherwise an all-zero
        sum gets EXP_ZERO. EXP_NONFINITE stays.
        """
        ...

    def decode(
        self, segs: Table, inputs: Sequence[Message], accumulate: int = SUM_FLOAT, length: int | None = None
    ) -> None:
        """Sum the inputs, multiply by `factor`, scale back and store in `data`; EXP_NONFINITE stores NaN.

        `length` bounds the messages that are given as bare addresses.
        """
        ...

    def residual(self, segs: Table, message: Message) -> None:
        """Subtract from `data` what the rank's own message decodes to: the error that feedback carries over.

        A layer that was not finite leaves zeros, so that no NaN outlives the step.
        """
        ...

    def measure(self, segs: Table, message: Message) -> npt.NDArray[np.float64]:
        """Return per segment: nonzero x that became 0, sum (x-d)^2, sum x^2, max |x|, in true units."""
        ...

    def add(self, segs: Table, addresses: npt.NDArray[np.uint64]) -> None:
        """Add `data` to the float32 array at each segment's address: gradient plus carried-over error."""
        ...

    def alloc(self, n_bytes: int) -> Bytes:
        """Return n_bytes of zeroed memory for messages, where the kernels work."""
        ...

    def bytes_of(self, message: Bytes) -> Bytes:
        """Return what is in a message of `alloc`, for the host to read; waits for all operations so far."""
        ...

    def zeros(self, n: int) -> Buffer:
        """Return n float32 zeros in the memory that the kernels work in."""
        ...

    def address(self, array: Buffer) -> int:
        """Return the address of an array that `zeros` or `alloc` made."""
        ...

    def to_host(self, array: Buffer) -> npt.NDArray[np.float32]:
        """Return a NumPy copy of a buffer of `zeros`."""
        ...

    def from_host(self, values: npt.NDArray[np.float32]) -> Buffer:
        """Return a buffer like that of `zeros`, filled with values."""
        ...
