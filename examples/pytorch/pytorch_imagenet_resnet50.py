"""ResNet-50 (or another torchvision classifier) on ImageNet, or any folder of images sorted into classes.

    horovodrun -np 2 python examples/pytorch/pytorch_imagenet_resnet50.py \\
        --train-dir imagenet/train --val-dir imagenet/val --aps-allreduce --aps-exp-bits 4 --aps-man-bits 3

Without Horovod: torchrun --nproc-per-node 2 examples/pytorch/pytorch_imagenet_resnet50.py --backend ddp ...
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
    parser = common.Parser("PyTorch ImageNet example with APS gradient compression")
    parser.add_argument("--train-dir", type=Path, default=Path("imagenet/train"), help="training images by class")
    parser.add_argument("--val-dir", type=Path, default=Path("imagenet/val"), help="validation images by class")
    parser.add_argument("--model", default="resnet50", help="name of a torchvision classifier")
    parser.add_argument("--image-size", type=common.integer(32), default=224, help="side of the crops")
    parser.add_argument("--workers", type=common.integer(0), default=0, help="processes that load data, per rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    common.add_training_flags(parser, epochs=90, batch_size=32, base_lr=0.0125, warmup_epochs=5)
    common.add_compression_flags(parser)
    common.add_backend_flag(parser)
    return common.parse(parser)


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import torch
import torch.nn.functional as F
import training
from training import hvd

with common.needs_torchvision():
    from torchvision import datasets, models, transforms


def make_data(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """Training data, validation data and the number of classes."""
    side = args.image_size
    if args.synthetic:
        shape, n_train = (3, side, side), 64 * args.batch_size
        return (
            training.Augmented(datasets.FakeData(n_train, shape, 1000, transforms.ToTensor()), args.seed),
            datasets.FakeData(8 * args.batch_size, shape, 1000, transforms.ToTensor(), random_offset=n_train),
            1000,
        )
    classes = common.check_image_folder(args.train_dir, "--train-dir")
    common.check_same_classes(classes, common.check_image_folder(args.val_dir, "--val-dir"))
    to_tensor = [transforms.ToTensor(), transforms.Normalize(common.MEAN, common.STD)]
    train = transforms.Compose([transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), *to_tensor])
    test = transforms.Compose([transforms.Resize(round(side / 0.875)), transforms.CenterCrop(side), *to_tensor])
    augmented = training.Augmented(datasets.ImageFolder(args.train_dir, train), args.seed)
    return augmented, datasets.ImageFolder(args.val_dir, test), len(classes)


def logits(output: Any) -> torch.Tensor:
    """The main output of a model; Inception and GoogLeNet return several."""
    return output if isinstance(output, torch.Tensor) else output.logits


def evaluate(model: torch.nn.Module, loader: Any, device: torch.device) -> tuple[float, float]:
    """Loss and top-1 accuracy over the validation data of all ranks."""
    training.share_statistics(model)
    model.eval()
    loss, accuracy = training.Mean("val.loss"), training.Mean("val.accuracy")
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            output = logits(model(images))
            loss.update(F.cross_entropy(output, labels), len(labels))
            accuracy.update((output.argmax(1) == labels).float().mean(), len(labels))
    return loss.over_ranks(), accuracy.over_ranks()


def main(args: argparse.Namespace) -> None:
    if args.model not in models.list_models(module=models):
        common.refuse(f"--model must be a torchvision classifier such as resnet18 or vgg16, got {args.model!r}")
    # Horovod, or DDP: initialize library.
    hvd.init()
    device = training.pick_device(args)
    with common.checks(hvd):
        train_data, val_data, n_classes = make_data(args)
        sample = training.sample_of(val_data, args, args.batch_size)
        train_loader, val_loader, sampler = training.loaders(train_data, sample, args, device)
    model = models.get_model(args.model, num_classes=n_classes).to(device)
    amp = training.MixedPrecision(args.mixed_precision, device)
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=args.base_lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    # Horovod wraps the optimizer, DDP the model; this is where the gradients' format is chosen.
    forward, optimizer, compression = training.distribute(args, model, optimizer)
    step = training.restore(args, model, optimizer, amp, compression)
    log = training.Log(args.log_dir)
    n_batches = len(train_loader)
    last_step = min(args.epochs * n_batches, args.max_steps or sys.maxsize)
    while step < last_step:
        epoch, n_done = divmod(step, n_batches)
        model.train()
        sampler.start(epoch, n_done * args.batch_size)  # after --resume maybe in the middle
        train_data.epoch = epoch
        train_loss = training.Mean("train.loss")
        with common.progress(n_batches, hvd.rank(), f"epoch {epoch + 1}", n_done) as bar:
            for images, labels in train_loader:
                training.seed_step(args, step)
                rate = common.learning_rate(args, step / n_batches, hvd.size(), "step")
                for group in optimizer.param_groups:
                    group["lr"] = rate
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                with amp.autocast():
                    loss = F.cross_entropy(logits(forward(images)), labels)
                amp.step(loss, optimizer)
                train_loss.update(loss.detach(), len(labels))
                step += 1
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
                if step >= last_step:
                    break
        val_loss, accuracy = evaluate(model, val_loader, device)
        mean_loss = train_loss.over_ranks()
        log.add(step, train_loss=mean_loss, train_rate=rate, val_loss=val_loss, val_accuracy=accuracy)
        training.save_checkpoint(args.checkpoint, model, optimizer, amp, step, compression)
        if hvd.rank() == 0:
            judged = common.judged_on(len(sample), len(val_data), args.synthetic)
            print(
                f"epoch {epoch + 1}: step {step}, train loss {mean_loss:.3f}, val loss {val_loss:.3f}, "
                f"top-1 {accuracy:.2%} {judged}",
                flush=True,
            )
    log.close()
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
    if ARGS.backend == "ddp":
        hvd.shutdown()  # when the model is gone: after it, DDP with PyTorch's fp16 hook now and then hangs in its end
