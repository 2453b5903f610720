"""One rank of tests/test_bytes.py: trains with each compression in turn and counts what its host sends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import horovod.torch as hvd
import torch
from cluster import interface_bytes

from horovod_aps.torch import APSCompressor

N_STEPS = 3


def train(compression: object, n_steps: int) -> int:
    """Bytes that this host sends in some steps of a net with three million parameters, in layers of 10 to a million."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(1000, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1000), torch.nn.Tanh(),
        torch.nn.Linear(1000, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 10),
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters(), compression=compression
    )
    start = 0
    for step in range(n_steps + 1):
        if step == 1:  # the first step agrees on the batch
            hvd.barrier()
            start = interface_bytes()
        x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    hvd.barrier()
    return interface_bytes() - start


def main() -> None:
    hvd.init()
    compressions = {
        "fp32": hvd.Compression.none,
        "fp16": hvd.Compression.fp16,
        "(4,3)": APSCompressor(4, 3),
        "(3,0)": APSCompressor(3, 0),
    }
    sent = {}
    for name, compression in compressions.items():
        # The better of two: on a busy machine TCP sends some segments twice, which is nobody's compression.
        mine = min(train(compression, N_STEPS) for _ in range(2))
        sent[name] = hvd.allgather(torch.tensor([mine]), name="sent").tolist()
    if hvd.rank() == 0:
        print("SENT " + json.dumps(sent), flush=True)


if __name__ == "__main__":
    main()
