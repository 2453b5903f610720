"""Images per second of a torchvision model on random data, for each way to send gradients.

    horovodrun -np 2 python examples/pytorch/pytorch_synthetic_benchmark.py --model resnet50 --aps-allreduce

Compare with --fp16-allreduce and without either. On one machine without GPUs the network is not what takes
time; benchmarks/ measures the exchange over links of a given speed. Needs training.py beside it
and common.py one folder up.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common


def parse() -> argparse.Namespace:
    parser = common.Parser("PyTorch synthetic benchmark with APS gradient compression")
    parser.add_argument("--model", default="resnet50", help="name of a torchvision classifier")
    common.add_benchmark_flags(parser)
    common.add_compression_flags(parser)
    return common.parse(parser)


if __name__ == "__main__":
    ARGS = parse()  # before the frameworks, whose import takes seconds: --help and a wrong flag need not wait

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import training

from horovod_aps.torch import APSCompressor

with common.needs_torchvision():
    from torchvision import models


def main(args: argparse.Namespace) -> None:
    if args.model not in models.list_models(module=models):
        common.refuse(f"--model must be a torchvision classifier such as resnet18 or vgg16, got {args.model!r}")
    # Horovod: initialize library.
    hvd.init()
    device = training.pick_device(args)
    model = models.get_model(args.model).to(device)
    amp = training.MixedPrecision(args.mixed_precision, device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    # Horovod: wrap the optimizer; this is where the gradients' format is chosen.
    compression = common.compression(args, hvd.Compression, APSCompressor)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def steps(n: int) -> float:
        """Seconds that n training steps take."""
        start = time.perf_counter()
        for _ in range(n):
            optimizer.zero_grad()
            with amp.autocast():
                output = model(images)
                loss = F.cross_entropy(output if isinstance(output, torch.Tensor) else output.logits, labels)
            amp.step(loss, optimizer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    steps(args.num_warmup_batches)
    rates = []
    with common.progress(args.num_iters, hvd.rank()) as bar:
        for _ in range(args.num_iters):
            rates.append(args.batch_size * args.num_batches_per_iter / steps(args.num_batches_per_iter))
            bar.update()
    # Horovod: every rank has its own clock; report the mean over ranks and measurements.
    all_rates = hvd.allgather(torch.tensor(rates), name="rates")
    if hvd.rank() == 0:
        unit = "GPU" if device.type == "cuda" else "CPU rank"
        spread = 1.96 * all_rates.std(correction=0).item()
        print(
            f"{args.model}, batch {args.batch_size}, {hvd.size()} ranks, {common.compression_name(args, compression)}\n"
            f"Images/s per {unit}: {all_rates.mean():.1f} +- {spread:.1f}\n"
            f"Images/s in all: {hvd.size() * all_rates.mean():.1f} +- {hvd.size() * spread:.1f}",
            flush=True,
        )
    common.finish(args, compression, hvd.rank())


if __name__ == "__main__":
    main(ARGS)
