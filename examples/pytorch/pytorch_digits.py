"""The smallest complete example: a conv net on scikit-learn's handwritten digits, which ship with it.

    horovodrun -np 2 python examples/pytorch/pytorch_digits.py --aps-allreduce --aps-exp-bits 4 --aps-man-bits 3

Needs training.py beside it and common.py one folder up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("PyTorch digits example with APS gradient compression")
    common.add_training_flags(parser, epochs=10, batch_size=32, base_lr=0.025, warmup_epochs=1)
    common.add_compression_flags(parser)
    args = common.parse(parser)
    args.workers = 0
    return args


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import training
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from horovod_aps.torch import APSCompressor


class Net(torch.nn.Module):
    """Two convolutions and two linear layers for 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = torch.nn.Linear(1024, 128)
        self.fc2 = torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def make_data(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Every fifth digit is for testing; --synthetic takes ten random patterns under noise instead."""
    if args.synthetic:
        generator = torch.Generator().manual_seed(args.seed)
        labels = torch.randint(10, (1000,), generator=generator)
        patterns, noise = (torch.rand(n, 1, 8, 8, generator=generator) for n in (10, 1000))
        images = (3 * (patterns > 0.7)[labels] + noise) / 4
    else:
        pixels, classes = load_digits(return_X_y=True)
        images, labels = (
            torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8),
            torch.tensor(classes),
        )
    is_test = torch.arange(len(images)) % 5 == 0
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def main(args: argparse.Namespace) -> None:
    # Horovod: initialize library.
    hvd.init()
    device = training.pick_device(args)
    with common.checks(hvd):
        train_data, test_data = make_data(args)
        train_loader, test_loader, sampler = training.loaders(train_data, test_data, args, device)
    model = Net().to(device)
    amp = training.MixedPrecision(args.mixed_precision, device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9)
    # Horovod: wrap the optimizer; this is where the gradients' format is chosen.
    compression = common.compression(args, hvd.Compression, APSCompressor)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    step = training.restore(args, model, optimizer, amp, compression)
    log = training.Log(args.log_dir)
    n_batches = len(train_loader)
    last_step = min(args.epochs * n_batches, args.max_steps or sys.maxsize)
    with common.progress(last_step, hvd.rank(), done=step) as bar:
        while step < last_step:
            model.train()
            epoch, n_done = divmod(step, n_batches)
            sampler.start(epoch, n_done * args.batch_size)  # after --resume maybe in the middle
            for images, labels in train_loader:
                for group in optimizer.param_groups:
                    group["lr"] = common.learning_rate(args, step / n_batches, hvd.size(), "poly")
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                with amp.autocast():
                    loss = F.cross_entropy(model(images), labels)
                amp.step(loss, optimizer)
                step += 1
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
                if step >= last_step:
                    break
            model.eval()
            accuracy = training.Mean("accuracy")
            with torch.no_grad():
                for images, labels in test_loader:
                    hits = model(images.to(device)).argmax(1) == labels.to(device)
                    accuracy.update(hits.float().mean(), len(labels))
            top1 = accuracy.over_ranks()
            log.add(step, train_loss=loss.item(), test_accuracy=top1)
            training.save_checkpoint(args.checkpoint, model, optimizer, amp, step, compression)
            if hvd.rank() == 0:
                judged = common.judged_on(len(test_data), len(test_data), made_up=False)
                bar.write(f"step {step}: test accuracy {top1:.2%} {judged}")
    log.close()
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
