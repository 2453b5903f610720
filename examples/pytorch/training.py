"""What the PyTorch examples share: devices, mixed precision, sums over ranks, checkpoints, TensorBoard.

`hvd` is Horovod, or with --backend ddp what stands for it. Needs distributed.py beside it for that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

hvd: Any
Compressor: Any
if common.backend == "ddp":
    import distributed as hvd

    from horovod_aps.ddp import APSState as Compressor
    from horovod_aps.ddp import aps_hook
else:
    import horovod.torch as hvd

    from horovod_aps.torch import APSCompressor as Compressor  # before hvd.init(), for it says how MPI is to wait


def pick_device(args: argparse.Namespace) -> torch.device:
    """This rank's GPU if there is one, else the CPU; seeds the generators."""
    torch.manual_seed(args.seed)
    if args.no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    # Horovod: pin GPU to local rank.
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def distribute(args: argparse.Namespace, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any, Any]:
    """What to call in the forward pass, the optimizer, and the compressor: here the gradients' format is chosen."""
    if common.backend == "ddp":
        # DDP: wrap the model; the hook comes after that.
        has_aux = args.model.startswith(("inception", "googlenet"))  # whose outputs the loss leaves out
        wrapped = DistributedDataParallel(model, find_unused_parameters=has_aux)
        state = common.compression(args, None, Compressor) if args.aps_allreduce else None
        if args.aps_allreduce:
            wrapped.register_comm_hook(state, aps_hook)
        elif args.fp16_allreduce:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped, optimizer, state
    # Horovod: wrap the optimizer.
    compression = common.compression(args, hvd.Compression, Compressor)
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression), compression


def seed_of(*numbers: int) -> int:
    """A seed that depends on all of the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_step(args: argparse.Namespace, step: int) -> None:
    """Make dropout depend on seed, step and rank only, so that it is the same after --resume."""
    torch.manual_seed(seed_of(args.seed, step, hvd.rank()))


class Augmented(Dataset[Any]):
    """A dataset whose random transforms depend on seed, epoch and sample only, so that --resume finds them again."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed, self.epoch = data, seed, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, self.epoch, i))
            return self.data[i]


class Sampler(DistributedSampler[Any]):
    """Horovod: this rank's share in a new order for every epoch, without what was trained on before --resume."""

    n_done = 0

    def start(self, epoch: int, n_done: int) -> None:
        """The next iteration is this epoch, from its sample n_done of this rank on."""
        self.set_epoch(epoch)
        self.n_done = n_done

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.n_done, None)


def loaders(
    train: Any, tested: Any, args: argparse.Namespace, device: torch.device, test_batch_size: int | None = None
) -> tuple[DataLoader[Any], DataLoader[Any], Sampler]:
    """Loaders of this rank's share of the data, and the sampler to be told of every new epoch."""
    options: dict[str, Any] = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    if args.workers:
        # fork is unsafe once MPI or CUDA threads run. Workers live for one epoch, as a dataset may depend on it;
        # what takes long to import is imported once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchvision", *(["horovod.torch"] if common.backend == "horovod" else [])])
        options["multiprocessing_context"] = context
    # Horovod: every rank trains on its own share ...
    sampler = Sampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    # ... and tests on its own share, every sample exactly once.
    share = Subset(tested, range(hvd.rank(), len(tested), hvd.size()))
    train_loader: DataLoader[Any] = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, **options)
    common.check_batches(len(train_loader), len(train), args.batch_size, hvd.size())
    return train_loader, DataLoader(share, test_batch_size or args.batch_size, **options), sampler


def sample_of(data: Any, args: argparse.Namespace, batch_size: int) -> Subset[Any]:
    """What to validate on: all, or with --max-steps as many batches as that, picked at random."""
    n_wanted = args.max_steps and args.max_steps * batch_size * hvd.size()
    return Subset(data, common.validation_sample(len(data), n_wanted, args.seed))


def share_statistics(model: torch.nn.Module) -> None:
    """Horovod: batch normalisation's running statistics differ between ranks; take rank 0's, which are saved.

    So what is validated is what is saved, and a run that goes on from there has the same on all ranks.
    """
    buffers = dict(model.named_buffers())
    if buffers:
        hvd.broadcast_parameters(buffers, root_rank=0)


class MixedPrecision:
    """Autocast and loss scaling: float16 on GPUs, bfloat16 (which needs no scaling) on CPUs, or neither."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.enabled = enabled
        self.device = device.type
        self.scaler = torch.amp.GradScaler(self.device, enabled=enabled and self.on_gpu)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context for the forward pass."""
        dtype = torch.float16 if self.on_gpu else torch.bfloat16
        return torch.autocast(self.device, dtype=dtype, enabled=self.enabled)

    def step(self, loss: torch.Tensor, optimizer: Any) -> None:
        """Backward pass and update; a step in which any rank overflowed is skipped by all."""
        self.scaler.scale(loss).backward()
        if common.backend == "ddp":  # has averaged them in backward
            self.scaler.step(optimizer)
        else:
            # Horovod: the gradients must be averaged before the scaler looks for infinities in them.
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                self.scaler.step(optimizer)
        self.scaler.update()


class Mean:
    """A mean of samples over all ranks; ranks may hold different numbers of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = torch.zeros(2, dtype=torch.float64)

    def update(self, value: torch.Tensor, n_samples: int) -> None:
        """Add the mean `value` of n_samples on this rank."""
        self.sum += torch.tensor([value.item() * n_samples, n_samples], dtype=torch.float64)

    def over_ranks(self) -> float:
        """Horovod: the mean over all samples of all ranks; every rank must call it."""
        total = hvd.allreduce(self.sum, op=hvd.Sum, name=self.name)
        return (total[0] / total[1].clamp(min=1)).item()


def save_checkpoint(
    path: Path | None, model: torch.nn.Module, optimizer: Any, amp: MixedPrecision, step: int, compression: Any
) -> None:
    """Horovod: rank 0 writes what all ranks have in common; a crash leaves the old file or the new one.

    APS: every rank writes what error feedback has kept, in a file of its own.
    """
    if path is None:
        return
    if hasattr(compression, "state_dict"):
        _save({"step": step, "compressor": compression.state_dict()}, _own(path))
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        _save({**state, "scaler": amp.scaler.state_dict()}, path)


def _save(state: dict[str, Any], path: Path) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def _own(path: Path) -> Path:
    """This rank's own file beside the checkpoint."""
    return path.with_name(f"{path.name}.rank{hvd.rank()}")


def restore(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: Any, amp: MixedPrecision, compression: Any
) -> int:
    """Start all ranks alike, from rank 0's checkpoint or random weights; returns the steps already done."""

    def load() -> int:
        state = torch.load(args.checkpoint, weights_only=True, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        amp.scaler.load_state_dict(state["scaler"])
        return int(state["step"])

    step = 0
    with common.checks(hvd):
        common.check_checkpoint(args.checkpoint)
        if hvd.rank() == 0:
            step = common.resume(args, bool(args.checkpoint and args.checkpoint.exists()), load)
    # Horovod: broadcast progress, optimizer state and parameters from rank 0; the parameters last, because ranks
    # whose optimizer has no state yet take a step to make some, and weight decay moves the parameters in it.
    step, scaler_state, has_state = hvd.broadcast_object(
        (step, amp.scaler.state_dict(), bool(optimizer.state)), root_rank=0
    )
    amp.scaler.load_state_dict(scaler_state)
    if has_state:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if step and hasattr(compression, "load_state_dict") and _own(args.checkpoint).exists():
        own = torch.load(_own(args.checkpoint), weights_only=True)
        if own["step"] == step:
            compression.load_state_dict(own["compressor"])
    return step


class Log:
    """TensorBoard on rank 0 if --log-dir is given, else nothing."""

    def __init__(self, folder: str | None) -> None:
        self.writer = None
        if folder and hvd.rank() == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder)

    def add(self, step: int, **values: float) -> None:
        """Write scalars, with the first underscore of a name as the folder: train_loss is train/loss."""
        for name, value in values.items() if self.writer else ():
            assert self.writer is not None
            self.writer.add_scalar(name.replace("_", "/", 1), value, step)

    def close(self) -> None:
        """Flush to disk."""
        if self.writer:
            self.writer.close()
