"""What demo.py runs on every rank: train the same network from the same start with each gradient format.

A user's script would hold one of these five; the line that matters is `compression=` in `Run`. The formats take turns,
an epoch each, so that whatever else the machine does slows all of them alike. The report comes from a run of its own:
measuring errors layer by layer takes time, which must not be in the table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from horovod_aps.torch import APSCompressor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import interface_bytes  # noqa: E402

WARM_UP = 10  # steps left out of the timing: buffers are being made
REPORT_EPOCHS = 4  # shows the loss fall; enough for the report
FORMATS: dict[str, Callable[[], Any]] = {
    "fp32": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "APS (4,3)": lambda: APSCompressor(e=4, m=3),
    "APS (3,0) + EF": lambda: APSCompressor(e=3, m=0, error_feedback=True),
    "(4,3) without APS": lambda: APSCompressor(e=4, m=3, scaling=False),
}


def network() -> torch.nn.Module:
    """A small conv net for 8x8 images, 620 thousand parameters, deep enough to have small gradients."""
    layers: list[torch.nn.Module] = []
    for n_in, n_out in ((1, 32), (32, 64), (64, 64), (64, 64)):
        layers += [torch.nn.Conv2d(n_in, n_out, 3, padding=1), torch.nn.ReLU()]
    layers.insert(4, torch.nn.MaxPool2d(2))
    return torch.nn.Sequential(
        *layers, torch.nn.Flatten(), torch.nn.Linear(1024, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )


def digits(seed: int) -> tuple[torch.Tensor, ...]:
    """Train images, test images, train labels, test labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.2, random_state=seed, stratify=labels)
    images_of = [torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) for x in parts[:2]]
    return (*images_of, *(torch.tensor(y) for y in parts[2:]))


def identical(model: torch.nn.Module) -> bool:
    """Whether all ranks hold bit-identical parameters, by comparing digests of their bytes."""
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).digest()[:8]
    digests = hvd.allgather(torch.tensor([int.from_bytes(digest, "little", signed=True)]), name="digests")
    return len(set(digests.tolist())) == 1


class Run:
    """One network in training with one format."""

    def __init__(self, name: str, compression: Any, args: argparse.Namespace, data: tuple[torch.Tensor, ...]) -> None:
        self.name, self.args, self.data = name, args, data
        torch.manual_seed(args.seed)
        self.model = network()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=self.model.named_parameters(prefix=name),
            compression=compression,
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.order = torch.Generator().manual_seed(args.seed)  # the same on all ranks, which take turns in it
        self.sent = 0
        self.losses: list[float] = []
        self.times: list[float] = []

    def epoch(self, bar: tqdm) -> None:
        """One pass over the data."""
        images, _, labels, _ = self.data
        n_images = len(images) // (self.args.batch_size * hvd.size()) * self.args.batch_size
        bar.set_description_str(f"{self.name:<18}", refresh=False)
        hvd.barrier()
        before = interface_bytes(self.args.interface)
        shuffled = torch.randperm(len(images), generator=self.order)[hvd.rank() :: hvd.size()]
        for batch in shuffled[:n_images].split(self.args.batch_size):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            self.times.append(time.perf_counter() - start)
            self.losses.append(loss.item())
            bar.set_postfix(loss=f"{self.losses[-1]:.3f}", refresh=False)
            bar.update()
        hvd.barrier()
        self.sent += (interface_bytes(self.args.interface) or 0) - (before or 0)

    def row(self) -> dict[str, Any]:
        """Its row of the table."""
        _, images, _, labels = self.data
        with torch.no_grad():
            accuracy = (self.model(images).argmax(1) == labels).float().mean().item()
        steady = torch.tensor(self.times[min(WARM_UP, len(self.times) - 1) :])
        n_senders = hvd.size() if self.args.interface == "lo" else 1  # all ranks send through loopback
        return {
            "name": self.name,
            "accuracy": accuracy,
            "bytes_per_step": self.sent / n_senders / len(self.times),
            "ms_per_step": 1e3 * steady.median().item(),
            "identical": identical(self.model),
            "losses": hvd.allreduce(torch.tensor(self.losses), name="losses").tolist(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON file that rank 0 writes")
    parser.add_argument("--interface", default="lo", help="network interface whose byte counter is read (lo)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (32)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    data = digits(args.seed)
    runs = [Run(name, make(), args, data) for name, make in FORMATS.items()]
    measured = APSCompressor(e=4, m=3, stats=True)
    reported = Run("report", measured, args, data)
    turns = [run for _ in range(args.epochs) for run in runs] + [reported] * min(REPORT_EPOCHS, args.epochs)
    n_steps = len(data[0]) // (args.batch_size * hvd.size())
    with tqdm(total=len(turns) * n_steps, unit="step", ncols=90, disable=hvd.rank() != 0) as bar:
        for run in turns:
            run.epoch(bar)
    rows = [run.row() for run in runs]
    if hvd.rank() == 0:
        measured.report(args.results.with_name("demo_report.html"), title="The demo's APS (4,3)")
        args.results.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
