"""The smallest complete example without Horovod: PyTorch's DDP on scikit-learn's handwritten digits.

    torchrun --nproc-per-node 2 examples/pytorch/ddp_digits.py --aps-allreduce --aps-exp-bits 4 --aps-man-bits 3

Needs common.py one folder up.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("PyTorch DDP digits example with APS gradient compression")
    parser.add_argument("--epochs", type=common.integer(1), default=10, help="passes over the data")
    parser.add_argument("--batch-size", type=common.integer(1), default=32, help="samples per rank and step")
    parser.add_argument("--base-lr", type=float, default=0.025, help="learning rate of a single rank")
    parser.add_argument("--warmup-epochs", type=float, default=1, help="until the learning rate is that of all ranks")
    parser.add_argument("--max-steps", type=common.integer(1), metavar="N", help="stop after N steps")
    parser.add_argument("--synthetic", action="store_true", help="train on made-up data")
    parser.add_argument("--seed", type=common.integer(0), default=42, help="of initialisation and shuffling")
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    common.add_compression_flags(parser)
    return common.parse(parser)


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from horovod_aps.ddp import APSState, aps_hook


def make_net() -> nn.Sequential:
    """Two convolutions and two linear layers for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def make_data(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Every fifth digit is for testing; --synthetic takes noise instead."""
    if args.synthetic:
        generator = torch.Generator().manual_seed(args.seed)
        images = torch.rand(1000, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (1000,), generator=generator)
    else:
        pixels, classes = load_digits(return_X_y=True)
        images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        labels = torch.tensor(classes)
    is_test = torch.arange(len(images)) % 5 == 0
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def add_hook(model: DistributedDataParallel, args: argparse.Namespace) -> Any:
    """APS: this is where the gradients' format is chosen. Returns the state of our hook, if it is ours."""
    if args.aps_allreduce:
        state = common.compression(args, None, APSState)
        model.register_comm_hook(state, aps_hook)
        return state
    if args.fp16_allreduce:
        model.register_comm_hook(None, fp16_compress_hook)
    return None


def accuracy(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Over the test data of all ranks."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            hits = model(images.to(device)).argmax(1) == labels.to(device)
            counts += torch.tensor([hits.sum(), len(hits)], dtype=torch.float64, device=device)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main(args: argparse.Namespace) -> None:
    use_cuda = torch.cuda.is_available() and not args.no_cuda
    # DDP: torchrun says who and where we are.
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    torch.manual_seed(args.seed)
    train_data, test_data = make_data(args)
    sampler: DistributedSampler[Any] = DistributedSampler(train_data, seed=args.seed)
    train_loader = DataLoader(train_data, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_data, args.batch_size, sampler=range(rank, len(test_data), size))
    # DDP: wrap the model; the hook comes after that.
    model = DistributedDataParallel(make_net().to(device))
    state = add_hook(model, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9)
    n_batches, step = len(train_loader), 0
    last_step = min(args.epochs * n_batches, args.max_steps or sys.maxsize)
    while step < last_step:
        model.train()
        sampler.set_epoch(step // n_batches)
        for images, labels in train_loader:
            for group in optimizer.param_groups:
                group["lr"] = common.learning_rate(args, step / n_batches, size, "poly")
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            step += 1
            if step >= last_step:
                break
        top1 = accuracy(model.module, test_loader, device)
        if rank == 0:
            judged = common.judged_on(len(test_data), len(test_data), made_up=False)
            print(f"step {step}: test accuracy {top1:.2%} {judged}", flush=True)
    common.finish(args, state, rank)


if __name__ == "__main__":
    main(ARGS)
    gc.collect()  # DDP's model goes only now, and its hooks with it, which may hold the group
    dist.destroy_process_group()
