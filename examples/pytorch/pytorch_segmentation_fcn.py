"""Semantic segmentation with torchvision's FCN or DeepLab on Cityscapes, VOC or folders of images and labels.

    horovodrun -np 2 python examples/pytorch/pytorch_segmentation_fcn.py --data-dir camvid --layout folder \\
        --crop 176 240 --aps-allreduce --aps-exp-bits 4 --aps-man-bits 3

Without Horovod: torchrun --nproc-per-node 2 examples/pytorch/pytorch_segmentation_fcn.py --backend ddp ...
Needs training.py beside it, and common.py and segmentation_data.py one folder up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import segmentation_data

MODELS = (
    "fcn_resnet50",
    "fcn_resnet101",
    "deeplabv3_resnet50",
    "deeplabv3_resnet101",
    "deeplabv3_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
)


def parse() -> argparse.Namespace:
    parser = common.Parser("PyTorch segmentation example with APS gradient compression")
    segmentation_data.add_flags(parser)
    parser.add_argument("--model", choices=MODELS, default="fcn_resnet50", help="torchvision model")
    parser.add_argument("--workers", type=common.integer(0), default=0, help="processes that load data, per rank")
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    common.add_training_flags(parser, epochs=60, batch_size=4, base_lr=0.01, warmup_epochs=1)
    common.add_compression_flags(parser)
    common.add_backend_flag(parser)
    args = common.parse(parser)
    if args.model.startswith("deeplab") and args.batch_size < 2:
        parser.error("--batch-size must be at least 2 for DeepLab, whose image pooling normalises over the batch")
    return args


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import torch
import torch.nn.functional as F
import training
from torch.utils.data import Dataset
from training import hvd

with common.needs_torchvision():
    from torchvision.models import segmentation


class AsTensors(Dataset[Any]):
    """SegmentationData as PyTorch wants it: channels first."""

    def __init__(self, data: segmentation_data.SegmentationData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, labels = self.data[i]
        return torch.from_numpy(image).permute(2, 0, 1).contiguous(), torch.from_numpy(labels)


def make_model(args: argparse.Namespace, n_classes: int) -> torch.nn.Module:
    """The model without pretrained weights; FCN and DeepLab get their auxiliary classifier."""
    options = {} if args.model.startswith("lraspp") else {"aux_loss": True}
    return getattr(segmentation, args.model)(weights=None, weights_backbone=None, num_classes=n_classes, **options)


def pixel_loss(output: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the pixels that have a class, plus 0.4 of the auxiliary classifier's."""
    if not (labels != segmentation_data.VOID).any():
        # The mean over no pixels would be NaN; all outputs, for DDP waits for the gradients of all.
        return sum(0.0 * logits.sum() for logits in output.values())  # type: ignore[return-value]
    losses = {
        name: F.cross_entropy(logits.float(), labels, ignore_index=segmentation_data.VOID)
        for name, logits in output.items()
    }
    return losses["out"] + 0.4 * losses.get("aux", 0.0)


def evaluate(model: torch.nn.Module, loader: Any, device: torch.device, n_classes: int) -> float:
    """Mean IoU over all pixels of the validation images of all ranks."""
    training.share_statistics(model)
    model.eval()
    matrix = torch.zeros(n_classes, n_classes, dtype=torch.int64)
    with torch.no_grad():
        for images, labels in loader:
            predictions = model(images.to(device))["out"].argmax(1).cpu()
            matrix += torch.from_numpy(segmentation_data.confusion(labels.numpy(), predictions.numpy(), n_classes))
    # Horovod: counts add up over the ranks; means of each rank's mean IoU would be something else.
    return segmentation_data.mean_iou(hvd.allreduce(matrix, op=hvd.Sum, name="confusion").numpy())


def main(args: argparse.Namespace) -> None:
    # Horovod, or DDP: initialize library.
    hvd.init()
    device = training.pick_device(args)
    with common.checks(hvd):
        train_data = segmentation_data.SegmentationData(args, "train")
        val_data = segmentation_data.SegmentationData(args, "val")
        sample = training.sample_of(AsTensors(val_data), args, 1)
        train_loader, val_loader, sampler = training.loaders(
            AsTensors(train_data),
            sample,
            args,
            device,
            test_batch_size=1,  # whole images, of any size
        )
    n_classes = train_data.n_classes
    model = make_model(args, n_classes).to(device)
    amp = training.MixedPrecision(args.mixed_precision, device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=args.weight_decay)
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
                rate = common.learning_rate(args, step / n_batches, hvd.size(), "poly")
                for group in optimizer.param_groups:
                    group["lr"] = rate
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                with amp.autocast():
                    output = forward(images)
                loss = pixel_loss(output, labels)
                amp.step(loss, optimizer)
                train_loss.update(loss.detach(), len(labels))
                step += 1
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
                if step >= last_step:
                    break
        mean_loss, iou = train_loss.over_ranks(), evaluate(model, val_loader, device, n_classes)
        log.add(step, train_loss=mean_loss, train_rate=rate, val_iou=iou)
        training.save_checkpoint(args.checkpoint, model, optimizer, amp, step, compression)
        if hvd.rank() == 0:
            judged = common.judged_on(len(sample), len(val_data), args.synthetic)
            print(
                f"epoch {epoch + 1}: step {step}, train loss {mean_loss:.3f}, mean IoU {iou:.3f} {judged}", flush=True
            )
    log.close()
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
    if ARGS.backend == "ddp":
        hvd.shutdown()  # when the model is gone: after it, DDP with PyTorch's fp16 hook now and then hangs in its end
