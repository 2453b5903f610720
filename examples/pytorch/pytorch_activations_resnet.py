"""A ResNet with compressed activations: what forward saves takes a fraction of the memory, so a larger batch fits.

    python examples/pytorch/pytorch_activations_resnet.py --train-dir imagenet/train --val-dir imagenet/val
    horovodrun -np 2 python examples/pytorch/pytorch_activations_resnet.py --synthetic --max-steps 5 --aps-allreduce

Gradients can be packed at the same time (--aps-allreduce). --no-activations trains without, to compare: both print
the peak of the resident size. Needs pytorch_imagenet_resnet50.py and training.py beside it and common.py one folder up.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("PyTorch ResNet with compressed activations and gradients")
    parser.add_argument("--train-dir", type=Path, default=Path("imagenet/train"), help="training images by class")
    parser.add_argument("--val-dir", type=Path, default=Path("imagenet/val"), help="validation images by class")
    parser.add_argument("--model", default="resnet50", help="name of a torchvision classifier")
    parser.add_argument("--image-size", type=common.integer(32), default=160, help="side of the crops")
    parser.add_argument("--workers", type=common.integer(0), default=0, help="processes that load data, per rank")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-5)
    # Activations: the bound follows the momentum unless a number is given.
    parser.add_argument("--error-bound", default="auto", help='"auto", or how much an activation may change')
    parser.add_argument("--share", type=float, default=0.01, help="error of a gradient over the mean |momentum|")
    parser.add_argument("--no-activations", action="store_true", help="do not compress activations")
    parser.add_argument("--activations-report", metavar="FILE", help="write an HTML page on what was saved, by layer")
    common.add_training_flags(parser, epochs=90, batch_size=32, base_lr=0.0125, warmup_epochs=5)
    common.add_compression_flags(parser)
    args = common.parse(parser)
    if args.error_bound != "auto":
        try:
            args.error_bound = float(args.error_bound)
        except ValueError:
            parser.error(f'--error-bound must be "auto" or a number, got {args.error_bound!r}')
    return args


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import training
from pytorch_imagenet_resnet50 import evaluate, logits, make_data, models

from horovod_aps.activations import ActivationCompressor
from horovod_aps.torch import APSCompressor


def main(args: argparse.Namespace) -> None:
    if args.model not in models.list_models(module=models):
        common.refuse(f"--model must be a torchvision classifier such as resnet18 or vgg16, got {args.model!r}")
    # Horovod: initialize library.
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
    # Horovod: wrap the optimizer; this is where the gradients' format is chosen.
    compression = common.compression(args, hvd.Compression, APSCompressor)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    # Activations: the optimizer's momentum sets the bounds.
    saver: Any = contextlib.nullcontext()
    if not args.no_activations:
        saver = ActivationCompressor(
            model, optimizer, error_bound=args.error_bound, share=args.share, scaler=amp.scaler
        )
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
                # Activations: what is saved in here is compressed.
                with saver, amp.autocast():
                    loss = F.cross_entropy(logits(model(images)), labels)
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
    if hvd.rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"Peak resident size of this rank: {peak / 1e6:.0f} MB", flush=True)
        if isinstance(saver, ActivationCompressor):
            stats = saver.stats()
            print(
                f"Activations: {stats['saved_bytes'] / 1e6:.1f} MB saved in {stats['stored_bytes'] / 1e6:.1f} MB, "
                f"{stats['ratio']:.1f}x smaller",
                flush=True,
            )
            if args.activations_report:
                saver.report(args.activations_report)
                print(f"Report: {args.activations_report}", flush=True)
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
