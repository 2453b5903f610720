"""ResNet-50 (or another torchvision classifier) on ImageNet, or any folder of images sorted into classes.

    horovodrun -np 2 python examples/pytorch/pytorch_imagenet_resnet50.py \\
        --train-dir imagenet/train --val-dir imagenet/val --aps-allreduce --aps-exp-bits 4 --aps-man-bits 3

Needs training.py beside it and common.py one folder up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision import datasets, models, transforms
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common  # noqa: E402
import training  # noqa: E402

from horovod_aps.torch import APSCompressor  # noqa: E402


def parse() -> argparse.Namespace:
    parser = common.Parser("PyTorch ImageNet example with APS gradient compression")
    parser.add_argument(
        "--train-dir", type=Path, default=Path("imagenet/train"), help="training images by class"
    )
    parser.add_argument(
        "--val-dir", type=Path, default=Path("imagenet/val"), help="validation images by class"
    )
    parser.add_argument("--model", default="resnet50", help="name of a torchvision classifier")
    parser.add_argument("--image-size", type=common.integer(32), default=224, help="side of the crops")
    parser.add_argument("--workers", type=common.integer(0), default=0, help="processes that load data, per rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    common.add_training_flags(parser, epochs=90, batch_size=32, base_lr=0.0125, warmup_epochs=5)
    common.add_compression_flags(parser)
    args = common.parse(parser)
    if args.model not in models.list_models(module=models):
        parser.error(
            f"--model must be a torchvision classifier such as resnet18 or vgg16, got {args.model!r}"
        )
    return args


def make_data(args: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Training data, validation data and the number of classes."""
    side = args.image_size
    if args.synthetic:
        shape = (3, side, side)
        return (
            datasets.FakeData(64 * args.batch_size, shape, 1000, transforms.ToTensor()),
            datasets.FakeData(8 * args.batch_size, shape, 1000, transforms.ToTensor()),
            1000,
        )
    classes = common.check_image_folder(args.train_dir, "--train-dir")
    common.check_same_classes(classes, common.check_image_folder(args.val_dir, "--val-dir"))
    to_tensor = [transforms.ToTensor(), transforms.Normalize(common.MEAN, common.STD)]
    train = transforms.Compose(
        [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), *to_tensor]
    )
    test = transforms.Compose(
        [transforms.Resize(round(side / 0.875)), transforms.CenterCrop(side), *to_tensor]
    )
    return datasets.ImageFolder(args.train_dir, train), datasets.ImageFolder(args.val_dir, test), len(classes)


def logits(output: Any) -> torch.Tensor:
    """The main output of a model; Inception and GoogLeNet return several."""
    return output if isinstance(output, torch.Tensor) else output.logits


def evaluate(
    model: torch.nn.Module, loader: Any, device: torch.device, args: argparse.Namespace
) -> tuple[float, float]:
    """Loss and top-1 accuracy over the validation data of all ranks."""
    model.eval()
    loss, accuracy = training.Mean("val.loss"), training.Mean("val.accuracy")
    with torch.no_grad():
        for images, labels in training.first_batches(loader, args.max_steps):
            images, labels = images.to(device), labels.to(device)
            output = logits(model(images))
            loss.update(F.cross_entropy(output, labels), len(labels))
            accuracy.update((output.argmax(1) == labels).float().mean(), len(labels))
    return loss.over_ranks(), accuracy.over_ranks()


def main() -> None:
    args = parse()
    # Horovod: initialize library.
    hvd.init()
    device = training.pick_device(args)
    with common.checks(hvd):
        train_data, val_data, n_classes = make_data(args)
        train_loader, val_loader, sampler = training.loaders(train_data, val_data, args, device)
    model = models.get_model(args.model, num_classes=n_classes).to(device)
    amp = training.MixedPrecision(args.mixed_precision, device)
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=args.base_lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    # Horovod: wrap the optimizer; this is where the gradients' format is chosen.
    compression = common.compression(args, hvd.Compression, APSCompressor)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    step = training.restore(args, model, optimizer, amp, compression)
    log = training.Log(args.log_dir)
    last_step = min(args.epochs * len(train_loader), args.max_steps or sys.maxsize)

    for epoch in range(step // len(train_loader), args.epochs):
        if step >= last_step:
            break
        model.train()
        sampler.set_epoch(epoch)
        train_loss = training.Mean("train.loss")
        with tqdm(total=len(train_loader), desc=f"epoch {epoch + 1}", disable=hvd.rank() != 0) as bar:
            for batch, (images, labels) in enumerate(train_loader):
                rate = common.learning_rate(args, epoch + batch / len(train_loader), hvd.size(), "step")
                for group in optimizer.param_groups:
                    group["lr"] = rate
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                with amp.autocast():
                    loss = F.cross_entropy(logits(model(images)), labels)
                amp.step(loss, optimizer)
                train_loss.update(loss.detach(), len(labels))
                step += 1
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
                if step >= last_step:
                    break
        val_loss, accuracy = evaluate(model, val_loader, device, args)
        mean_loss = train_loss.over_ranks()
        log.add(step, train_loss=mean_loss, train_rate=rate, val_loss=val_loss, val_accuracy=accuracy)
        training.save_checkpoint(args.checkpoint, model, optimizer, amp, step, compression)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}: step {step}, train loss {mean_loss:.3f}, val loss {val_loss:.3f}, "
                f"top-1 {accuracy:.2%}",
                flush=True,
            )
    log.close()
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main()
