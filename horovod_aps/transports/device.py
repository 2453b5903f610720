"""Messages in the memory of a GPU over a transport of the host.

Through pinned memory, on a stream of its own for copies: out of the device after the kernels that write a message, back
into the device before those that read it; nobody waits. An MPI that knows CUDA takes messages from the device directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_aps.kernels.memory import is_over
from horovod_aps.transports.above import Above
from horovod_aps.transports.base import Bytes, Request, Transport

if TYPE_CHECKING:
    from horovod_aps.kernels.cuda import CudaKernels


_under_way: list[Any] = []  # when a transport was closed: the network may still write into their memory


class _Transfer:
    """One transfer: off the device, over the network, onto the device."""

    def __init__(self, owner: DeviceTransport, outgoing: Mapping[int, Any], incoming: Mapping[int, Any], tag: int):
        self._owner, self.outgoing, self.incoming, self.tag = owner, outgoing, incoming, tag
        self.sent: dict[int, Any] = {}  # what the transport below sends and fills
        self.filled: dict[int, Any] = {}
        self.left: Any = None  # the event after which the messages may be sent
        self.request: Request | None = None
        self.over = False

    @property
    def memory(self) -> Any:
        """That the network works on, but for pinned memory, which its owner sees to."""
        return self.outgoing, self.incoming

    def done(self) -> bool:
        if not self.over:
            self._owner.pump()
        return self.over


class DeviceTransport(Above):
    """A transport of the host for messages of `kernels`; messages of the host go through as they are."""

    def __init__(self, below: Transport, kernels: CudaKernels) -> None:
        super().__init__(below)
        self._kernels = kernels
        self.is_direct = below.memory == "any"
        self._waiting: deque[_Transfer] = deque()  # not sent, in order
        self._moving: list[_Transfer] = []
        self._retiring: deque[tuple[Any, list[np.ndarray]]] = deque()  # pinned memory, until copies from it are over

    @property
    def way(self) -> str:
        """How messages leave the device, for people."""
        return "from device memory by MPI" if self.is_direct else "through pinned host memory"

    def heard(self) -> list[tuple[int, bytes]]:
        self.pump()
        return super().heard()

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> Request:
        arrays = [*outgoing.values(), *incoming.values()]
        if all(isinstance(array, np.ndarray) for array in arrays):
            return self.below.transfer(outgoing, incoming, tag)
        move = _Transfer(self, outgoing, incoming, tag)
        kernels = self._kernels
        with kernels.at_work():
            if self.is_direct:
                move.sent, move.filled = dict(outgoing), dict(incoming)
                move.left = kernels._mark(kernels.stream)  # also: what still reads the memory that is filled
            else:
                self._take_off(move)
        self._waiting.append(move)
        self.pump()
        return move

    def _take_off(self, move: _Transfer) -> None:
        kernels, runtime = self._kernels, self._kernels.device.cuda.runtime
        kernels.copies.wait_event(kernels._mark(kernels.stream))
        copies: dict[tuple[int, int], np.ndarray] = {}  # one message may go to many
        for rank, array in move.outgoing.items():
            key = (array.ptr, len(array))
            if key not in copies:
                host = copies[key] = kernels.pinned.take(len(array))
                if len(array):
                    runtime.memcpyAsync(
                        host.ctypes.data, array.ptr, len(array), runtime.memcpyDeviceToHost, kernels.copies.ptr
                    )
            move.sent[rank] = copies[key]
        move.filled = {rank: kernels.pinned.take(len(array)) for rank, array in move.incoming.items()}
        move.left = kernels._mark(kernels.copies)

    def _put_on(self, move: _Transfer) -> None:
        kernels, runtime = self._kernels, self._kernels.device.cuda.runtime
        with kernels.at_work():
            kernels.copies.wait_event(kernels._mark(kernels.stream))  # what still reads the memory that is filled
            for rank, host in move.filled.items():
                if len(host):
                    runtime.memcpyAsync(
                        move.incoming[rank].ptr,
                        host.ctypes.data,
                        len(host),
                        runtime.memcpyHostToDevice,
                        kernels.copies.ptr,
                    )
            event = kernels._mark(kernels.copies)
            kernels.stream.wait_event(event)
        hosts = {id(host): host for host in [*move.sent.values(), *move.filled.values()]}
        self._retiring.append((event, list(hosts.values())))

    def close(self) -> None:
        _under_way.extend((move.request, move.sent, move.filled) for move in self._moving)
        super().close()

    def pump(self) -> None:
        """Move all transfers on, those with the same tag in the order in which they were started."""
        cuda = self._kernels.device.cuda
        while self._waiting and is_over(cuda, self._waiting[0].left):
            move = self._waiting.popleft()
            move.request = self.below.transfer(move.sent, move.filled, move.tag)
            self._moving.append(move)
        arrived = [move for move in self._moving if move.request is not None and move.request.done()]
        for move in arrived:
            self._moving.remove(move)
            if not self.is_direct:
                self._put_on(move)
            move.over, move.request = True, None
            move.sent, move.filled, move.outgoing, move.incoming = {}, {}, {}, {}
        while self._retiring and is_over(cuda, self._retiring[0][0]):
            for host in self._retiring.popleft()[1]:
                self._kernels.pinned.give(host)
