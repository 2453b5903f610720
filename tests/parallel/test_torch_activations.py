"""Compressed activations beside packed gradients: Horovod's optimizer with APSCompressor, and DDP.

Oracle: the same training without a saver, within the error that the bounds allow; replicas are bit-identical.
"""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch_common import assert_replicas_equal

from horovod_aps.activations import ActivationCompressor
from horovod_aps.bench.ports import free_port
from horovod_aps.torch import APSCompressor

hvd.init()


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 14 * 14, 5),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    return torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def train(saved: bool, n_steps: int = 5) -> tuple[nn.Module, ActivationCompressor]:
    model = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=APSCompressor(4, 3),
    )
    saver = ActivationCompressor(model, optimizer)
    for step in range(n_steps):
        x, y = batch(step)
        optimizer.zero_grad()
        if saved:
            with saver:
                loss = F.cross_entropy(model(x), y)
        else:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return model, saver


def test_activations_and_gradients_are_compressed_at_once():
    plain, _ = train(False)
    model, saver = train(True)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert_replicas_equal(model)
    for name, value in ((name, p.detach()) for name, p in plain.named_parameters()):
        assert float((weights[name] - value).norm() / value.norm().clamp(min=0.1)) < 0.05, name
    # Horovod's step runs the hooks twice; a step counts once.
    assert saver._n_steps == 5
    stats = saver.stats()
    assert stats["ratio"] > 3 and stats["layers"]["4"]["share"] == pytest.approx(0.01)


def test_activations_under_ddp():
    port = hvd.broadcast_object(free_port(), root_rank=0, name="activations.port")
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size()
    )
    try:
        model = nn.parallel.DistributedDataParallel(make())
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        saver = ActivationCompressor(model, optimizer)
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            with saver:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        assert_replicas_equal(model)
        assert saver.stats()["ratio"] > 3 and saver._by_name["module.4"].bound is not None
    finally:
        torch.distributed.destroy_process_group()
