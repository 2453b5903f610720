"""What PyTorch checks of its own communication hooks, written anew against ours.

After `_test_ddp_hook_parity`, `test_ddp_hooks.py` and `test_c10d_gloo.py` of PyTorch 2.13: a hooked model against a
plain one over the kinds of models that these have, the numbers that can be said in advance, and what is refused.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ddp_common import assert_close, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_aps.ddp import APSState, aps_hook

start()
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def parity(module: nn.Module, inputs, n_steps: int = 4, error: float = 1e-5, state: APSState | None = None, **keywords):
    """Train a hooked and a plain copy with SGD; their gradients agree in every step, their weights at the end."""
    models = [DDP(copy.deepcopy(module), **keywords) for _ in range(2)]
    models[0].register_comm_hook(state or APSState(8, 23), aps_hook)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
    for number in range(n_steps):
        found = []
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            output = model(*inputs(number))
            output = output[0] if isinstance(output, tuple) else output
            output.square().mean().backward()
            found.append({n: p.grad.to_dense().clone() for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
        assert_close(*found, error)
    assert_close(*({n: p.detach() for n, p in model.named_parameters()} for model in models), error)
    return models[0]


def rows(width: int, n: int = 4):
    return lambda number: (torch.randn(n, width, generator=torch.Generator().manual_seed(100 * number + RANK)),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu = nn.Linear(2, 10, bias=False), nn.ReLU()
        self.fc2, self.fc3 = nn.Linear(10, 50, bias=False), nn.Linear(50, 4, bias=False)
        self.no_grad_param = nn.Parameter(torch.tensor([2, 2]).long(), requires_grad=False)

    def forward(self, x):
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x))))).softmax(1)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(300, 600, bias=False), nn.Linear(600, 500, bias=False)

    def forward(self, x):
        return self.fc2(self.fc1(x))


class Reducer(nn.Module):
    """With a last layer that the forward pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(2, 10), nn.Linear(10, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU()

    def forward(self, x, use_fc3=True):
        x = self.relu(self.fc2(self.relu(self.fc1(x)))).float()
        return self.fc3(x) if use_fc3 else x


class Shared(nn.Module):
    """One layer used twice, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.twice = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False), nn.Linear(6, 6)
        self.out.weight = self.embed.weight

    def forward(self, index):
        return self.out(self.twice(self.twice(self.embed(index))))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(100, 1, bias=False)

    def forward(self, x):
        return self.lin(x), {"key": [self.lin(x).detach()]}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(10, 3, sparse=True)
        self.last = nn.Linear(3, 3)

    def forward(self, index):
        return self.last(self.embedding(index))


def norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 40, bias=False), nn.BatchNorm1d(40), nn.ReLU(), nn.LayerNorm(40), nn.Linear(40, 4)
    )


def conv_net() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten())
    return net.to(memory_format=torch.channels_last)


def indices(number: int):
    return (torch.randint(0, 10, (4, 2), generator=torch.Generator().manual_seed(100 * number + RANK)),)


def images(number: int):
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(100 * number + RANK))
    return (x.to(memory_format=torch.channels_last),)


MODELS = {
    "net": (Net, rows(2), {}),
    "large": (Large, rows(300), {"bucket_cap_mb": 1}),
    "large views": (Large, rows(300), {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}),
    "reducer": (Reducer, rows(2), {}),
    "reducer, fc3 unused": (Reducer, lambda n: (*rows(2)(n), False), {"find_unused_parameters": True}),
    "reducer, fc3 by rank": (Reducer, lambda n: (*rows(2)(n), RANK == n % 2), {"find_unused_parameters": True}),
    "shared": (Shared, indices, {}),
    "nested output": (Nested, rows(100), {}),
    "sparse": (Sparse, indices, {}),
    "norms": (norm_net, rows(2, 8), {}),
    "convolutions": (conv_net, images, {}),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), rows(16), {"static_graph": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_parity_with_a_plain_model(name):
    make, inputs, keywords = MODELS[name]
    torch.manual_seed(0)
    parity(make(), inputs, **keywords)


def test_parity_over_100_steps_on_numbers_known_in_advance():
    """The gradient of the sum is the input: rank r has r, so the mean is (N - 1) / 2, which (4, 3) holds exactly."""
    net = DDP(nn.Linear(1, 5, bias=False))
    net.register_comm_hook(APSState(4, 3), aps_hook)
    for _ in range(100):
        net.zero_grad()
        net(torch.tensor([[float(RANK)]])).sum().backward()
        assert torch.equal(net.module.weight.grad, torch.full((5, 1), (SIZE - 1) / 2))


def test_parity_with_a_process_group():
    group = dist.new_group(list(range(SIZE)))
    torch.manual_seed(0)
    parity(Reducer(), rows(2), state=APSState(8, 23, process_group=group), process_group=group)


def test_reentrant_and_other_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last, self.reentrant = nn.Linear(20, 20), nn.Linear(20, 20), reentrant

        def forward(self, x):
            from torch.utils.checkpoint import checkpoint

            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
            return checkpoint(self.last, x, use_reentrant=self.reentrant)

    for reentrant in (True, False):
        parity(Checkpointed(reentrant), rows(20), static_graph=True)
    parity(Checkpointed(True), rows(20))


def test_the_hook_is_in_ddps_log():
    model = parity(Reducer(), rows(2), n_steps=1)
    assert model._get_ddp_logging_data()["comm_hook"] == "aps_hook"


def test_a_hook_is_registered_once():
    model = DDP(Reducer())
    model.register_comm_hook(APSState(4, 3), aps_hook)
    with pytest.raises(RuntimeError, match="register_comm_hook or register_builtin_comm_hook can only be called once"):
        model.register_comm_hook(APSState(4, 3), aps_hook)


def test_is_last_and_indices_are_ddps():
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last()))
        return aps_hook(state, bucket)

    model = DDP(Large(), bucket_cap_mb=1)
    model.register_comm_hook(APSState(4, 3), hook)
    for number in range(3):
        model(*rows(300)(number)).square().mean().backward()
    assert seen == [(0, True), (0, False), (1, True), (0, False), (1, True)]
