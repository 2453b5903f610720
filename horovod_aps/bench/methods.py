"""The ways to synchronise gradients that the benchmark compares, behind one small interface.

A method takes a module (see works.py) and does with it what a user's training script would: Horovod
methods wrap an optimizer in `hvd.DistributedOptimizer`, DDP methods wrap the module. `synchronise(loss)` is
what gets timed for prepared gradients: from the start of backward, whose hooks hand the gradients over, until
all are averaged.
"""

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from horovod_aps.bench.names import FLAT, PACKED, bits_of, packed_format
from horovod_aps.bench.works import Batch

LEARNING_RATE = 0.01
# Larger than any model here: all gradients in one bucket.
ONE_BUCKET_MB = 4096


class Method(ABC):
    """One way to synchronise a module's gradients. `name` must differ between methods of one process."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.model = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)

    @abstractmethod
    def synchronise(self, loss: Tensor) -> None:
        """Backward, and wait until every gradient is the mean over the ranks."""

    def step(self, batch: Batch) -> float:
        """One whole training step; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def clear(self) -> None:
        """Drop the gradients, so that the next backward installs new ones instead of adding."""
        for parameter in self.module.parameters():
            parameter.grad = None


class HorovodMethod(Method):
    """`hvd.DistributedOptimizer` with a compressor, otherwise as Horovod comes."""

    def __init__(self, name: str, module: nn.Module, compression: Any) -> None:
        import horovod.torch as hvd

        super().__init__(name, module)
        # Horovod knows a tensor by its name on all ranks: were names shared by methods whose wire types
        # differ, each would throw the other's negotiated response out of the cache.
        named = [(f"{name}.{parameter}", value) for parameter, value in module.named_parameters()]
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=named, compression=compression)

    def synchronise(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.synchronize()  # type: ignore[attr-defined]


class DDPMethod(Method):
    """PyTorch's DistributedDataParallel over Gloo, which has averaged everything when backward returns."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        hook: Callable[..., Any] | None = None,
        state: Any = None,
        bucket_cap_mb: int | None = None,
    ) -> None:
        super().__init__(name, module)
        # All ranks have made equal modules, so the broadcast at the start would only cost time.
        self.model = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb, init_sync=False)
        if hook is not None:
            self.model.register_comm_hook(state, hook)

    def synchronise(self, loss: Tensor) -> None:
        loss.backward()


def make_method(name: str, module: nn.Module) -> Method:
    """The method of a name: "horovod_...", "aps_<e>_<m>[_flat]", "packed:<format>[+ef]", "ddp_aps_..." or "ddp_..."."""
    if name == "ddp_fp32":
        return DDPMethod(name, module)
    if name == "ddp_fp16":
        return DDPMethod(name, module, default_hooks.fp16_compress_hook)
    if name == "ddp_bf16":
        return DDPMethod(name, module, _bf16_over_gloo)
    if name.startswith("ddp_aps_"):
        from horovod_aps.ddp import APSState, aps_hook

        return DDPMethod(name, module, aps_hook, APSState(*bits_of(name)))
    if name == "ddp_powersgd":
        # Over Gloo this hook breaks with several buckets: it starts collectives from Gloo's worker threads,
        # in an order that differs between ranks. Rank 4 is the largest that its paper uses on images.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        return DDPMethod(name, module, powerSGD_hook.powerSGD_hook, state, ONE_BUCKET_MB)
    if name == "ddp_quant8":
        quantization_hooks.dist = _gloo_with_nested_results()  # type: ignore[assignment]
        return DDPMethod(name, module, quantization_hooks.quantization_pertensor_hook, dist.group.WORLD, ONE_BUCKET_MB)
    return HorovodMethod(name, module, make_compression(name))


def _bf16_over_gloo(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PyTorch's own hook under another name: by its name DDP refuses it without NCCL, though Gloo adds bfloat16 too."""
    return default_hooks.bf16_compress_hook(state, bucket)


def make_compression(name: str) -> Any:
    """What goes into `hvd.DistributedOptimizer(compression=...)` for a Horovod method."""
    import horovod.torch as hvd

    if name == "horovod_fp32":
        return hvd.Compression.none
    if name == "horovod_fp16":
        return hvd.Compression.fp16
    from horovod_aps.torch import APSCompressor, PackedCompressor

    if name.startswith(PACKED):
        wire_format, feedback = packed_format(name)
        return PackedCompressor(wire_format, error_feedback=feedback)
    return APSCompressor(*bits_of(name), hierarchy="flat" if name.endswith(FLAT) else "auto")


class _NestedWork:
    def __init__(self, work: Any) -> None:
        self._work = work

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda future: [future.value()])


def _gloo_with_nested_results() -> types.SimpleNamespace:
    """`torch.distributed` for the quantisation hook, which expects results nested as NCCL's are."""

    def all_gather(*args: Any, **kwargs: Any) -> _NestedWork:
        return _NestedWork(dist.all_gather(*args, **kwargs))

    return types.SimpleNamespace(group=dist.group, get_rank=dist.get_rank, all_gather=all_gather)
