"""torch.distributed's all-to-all and all-gather of bytes; with NCCL, from the memory of one GPU to that of others.

In a process group of our own, since operations of a group have an order, and the user's are none of our business. They
run behind our kernels: NCCL waits for what the current stream has queued, and that is our stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horovod_aps import config
from horovod_aps.errors import LostPeer
from horovod_aps.frontends.messages import Messages

TIMEOUT = timedelta(minutes=30)  # as torch.distributed waits


def are_wanted(group: Any, device: torch.device) -> bool:
    """Whether messages of a device should travel so: on a GPU, if the process group has NCCL for it."""
    return device.type == "cuda" and config.gpu_way() == "auto" and "cuda:nccl" in str(dist.get_backend_config(group))


class _Operation:
    """One operation under way: from each rank the bytes from `starts` on, one after the other or padded."""

    def __init__(self, owner: GroupOperations, work: Any, sent: Any, received: Any, starts: dict[int, int]) -> None:
        self._owner, self._work, self._sent, self._received, self._starts = owner, work, sent, received, starts

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def put(self, places: Sequence[tuple[int, Any]]) -> None:
        with self._owner.at_work():
            try:
                self._work.wait()
            except RuntimeError as error:
                raise LostPeer(f"an operation of torch.distributed has failed: {error}") from None
            self._owner.unpack(self._received, [(self._starts[start], array) for start, array in places if len(array)])


class GroupOperations(Messages):
    """Of some ranks, which meet through `store`, on messages that kernels of `device` have made."""

    def __init__(self, kernels: Any, device: torch.device, store: Any, rank: int, size: int) -> None:
        """All ranks come here at the same time, for it may wait for them."""
        super().__init__(kernels, device)
        self._group: Any
        if device.type == "cuda":
            self._group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    @property
    def way(self) -> str:
        return "from device memory by NCCL" if self._device.type == "cuda" else "by torch.distributed's operations"

    def close(self) -> None:
        """Nobody will use it again."""
        self._group.shutdown()

    def alltoall_sized(self, parts: Sequence[Any], sizes: Sequence[int]) -> _Operation:
        """See `SizedOperations`."""
        starts = _starts(sizes)
        with self.at_work():
            sent, received = self.pack(parts), self.empty(sum(sizes))
            work = self._begin(self._group.alltoall_base, received, sent, list(sizes), [len(part) for part in parts])
        return _Operation(self, work, sent, received, dict(zip(starts, starts)))

    def allgather_sized(self, part: Any, sizes: Sequence[int]) -> _Operation:
        """See `SizedOperations`; parts are made equally long, since NCCL's and Gloo's all-gather want that."""
        longest = max(*sizes, 1)
        with self.at_work():
            sent, received = self.pack([part]), self.empty(longest * len(sizes))
            if len(sent) < longest:
                padded = self.empty(longest)
                padded[: len(sent)] = sent
                sent = padded
            work = self._begin(self._group._allgather_base, received, sent)
        places = range(0, longest * len(sizes), longest)
        return _Operation(
            self, work, sent, received, {start: place for start, place, n in zip(_starts(sizes), places, sizes) if n}
        )

    def _begin(self, operation: Any, *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except RuntimeError as error:
            raise LostPeer(f"an operation of torch.distributed has failed: {error}") from None


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each of parts in a row begins."""
    return list(itertools.accumulate([0, *sizes[:-1]]))
