"""Horovod's own all-to-all and all-gather of bytes; with NCCL, from the memory of one GPU to that of others.

They run behind our kernels: Horovod waits for what the current stream has queued, and that is our stream. What has come
is copied to where our kernels look for it, on the same stream; nobody waits on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from horovod_aps import config
from horovod_aps.errors import LostPeer
from horovod_aps.frontends.messages import Messages
from horovod_aps.frontends.world import process_set_of


def are_wanted(device: torch.device) -> bool:
    """Whether messages of a device should travel so: on a GPU, if Horovod was built for NCCL.

    Not if Horovod says that an operation is over before it is (HOROVOD_ENABLE_ASYNC_COMPLETION).
    """
    return device.type == "cuda" and may_carry()


def may_carry() -> bool:
    """Whether messages of a GPU may travel so, if there is one."""
    return config.allows_operations() and has_nccl()


def has_nccl() -> bool:
    """Whether Horovod was built for NCCL."""
    return bool(mpi_ops._basics.nccl_built())


class _Operation:
    """One operation of Horovod's."""

    def __init__(self, owner: HorovodOperations, handle: int) -> None:
        self._owner, self._handle = owner, handle

    def done(self) -> bool:
        return bool(mpi_ops.poll(self._handle))

    def put(self, places: Sequence[tuple[int, Any]]) -> None:
        with self._owner.at_work():
            try:
                output = mpi_ops.synchronize(self._handle)
            except HorovodInternalError as error:
                raise LostPeer(str(error)) from None
            received = output[0] if isinstance(output, tuple) else output
            self._owner.unpack(received, places)


class HorovodOperations(Messages):
    """Of the ranks of a process set, on messages that kernels of `device` have made."""

    def __init__(self, kernels: Any, device: torch.device, process_set_id: int) -> None:
        super().__init__(kernels, device)
        self._process_set = process_set_of(mpi_ops._basics, process_set_id)

    @property
    def way(self) -> str:
        return "from device memory by Horovod's NCCL" if self._device.type == "cuda" else "by Horovod's operations"

    def alltoall(self, name: str, parts: Sequence[Any]) -> _Operation:
        splits = torch.tensor([len(part) for part in parts], dtype=torch.int32)
        with self.at_work():
            return self._begin(mpi_ops.alltoall_async, self.pack(parts), splits, name)

    def allgather(self, name: str, part: Any) -> _Operation:
        with self.at_work():
            return self._begin(mpi_ops.allgather_async, self.pack([part]), name)

    def _begin(self, operation: Any, *arguments: Any) -> _Operation:
        try:
            return _Operation(self, operation(*arguments, process_set=self._process_set))
        except HorovodInternalError as error:
            raise LostPeer(str(error)) from None
