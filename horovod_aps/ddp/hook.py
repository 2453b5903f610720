"""The communication hook: gradients come in from DDP, and their averages go back.

DDP compares the hook's annotations with the classes themselves, so this module has no postponed ones.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from horovod_aps.ddp.driver import Step
from horovod_aps.ddp.state import PackedState
from horovod_aps.errors import LostPeer, for_users
from horovod_aps.frontends.checks import refuse_alone
from horovod_aps.frontends.tensors import DTYPE_CODES
from horovod_aps.kernels import for_torch


def aps_hook(state: PackedState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket's gradients by the packed exchange; for `model.register_comm_hook(APSState(4, 3), aps_hook)`.

    Returns at once, and buckets travel while backward goes on. Sparse gradients are left to PyTorch's own all-reduce.
    """
    if not isinstance(state, PackedState):
        raise TypeError(f"aps_hook: state must be an APSState or a PackedState, got {type(state).__name__}")
    group, buffer = state.group_of(bucket), bucket.buffer()
    future: Future[Tensor]
    if dist.get_world_size(group) == 1:
        refuse_alone(state._options)
        future = Future()
        future.set_result(buffer)
        return future
    if buffer.layout != torch.strided or buffer.dtype not in DTYPE_CODES:
        future = allreduce_hook(group, bucket)
    else:
        for_torch.refuse_capture(buffer.device)
        future = state.hand_in(bucket)
    if bucket.is_last():
        finish = partial(_finish, state, state.close_step())
        # Backward ends with what was queued, in order. DDP will queue its own end just after this, so what this one
        # queues comes after DDP has taken the results, bucket by bucket.
        if not _queue(lambda: Variable._execution_engine.queue_callback(finish)):
            finish()  # not in backward: a rank that has run out of inputs joins in
    return future


def _queue(call: Callable[[], None]) -> bool:
    """Have it called when backward ends; False if there is no backward."""
    try:
        Variable._execution_engine.queue_callback(call)
    except RuntimeError:
        return False
    return True


def _finish(state: PackedState, steps: list[Step]) -> None:
    """Raise what went wrong in a step. In a future it would come out of DDP as a RuntimeError, and DDP be unusable."""
    for step in steps:
        step.over.wait()
        if step.error is not None:
            if isinstance(step.error, LostPeer):
                raise for_users(step.error, state._options.who, LostPeer) from None
            raise step.error
    state.after_step()
