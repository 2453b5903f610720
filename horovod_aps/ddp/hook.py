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
from horovod_aps.ddp.state import APSState
from horovod_aps.frontends.tensors import DTYPE_CODES


def aps_hook(state: APSState, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket's gradients by the packed exchange; for `model.register_comm_hook(APSState(4, 3), aps_hook)`.

    Returns at once, and buckets travel while backward goes on. Sparse and complex gradients are left to PyTorch's own
    all-reduce.
    """
    if not isinstance(state, APSState):
        raise TypeError(f"aps_hook: state must be an APSState, got {type(state).__name__}")
    group, buffer = state.group_of(bucket), bucket.buffer()
    future: Future[Tensor]
    if dist.get_world_size(group) == 1:
        future = Future()
        future.set_result(buffer)
        return future
    if buffer.dtype not in DTYPE_CODES or buffer.layout != torch.strided:
        future = allreduce_hook(group, bucket)
    else:
        future = state.hand_in(bucket)
    if bucket.is_last():
        _at_the_end(partial(_finish, state, state.close_step()))
    return future


def _at_the_end(finish: Callable[[], None]) -> None:
    """Call `finish` when backward ends, before DDP takes the results, which it queues just after this.

    An error that it raises is the user's as it is; one in a future would come out of DDP as a RuntimeError.
    """
    try:
        Variable._execution_engine.queue_callback(finish)  # type: ignore[attr-defined]
    except RuntimeError:  # not in backward: a rank that has run out of inputs joins in
        finish()


def _finish(state: APSState, steps: list[Step]) -> None:
    for step in steps:
        step.over.wait()
    errors = [step.error for step in steps if step.error is not None]
    if not errors:
        state.after_step()
    elif isinstance(errors[0], (ValueError, TypeError)):
        _at_the_end(partial(_raise, errors[0]))  # after DDP has ended the step, so that there can be a next one
    else:
        raise errors[0]


def _raise(error: BaseException) -> None:
    raise error
