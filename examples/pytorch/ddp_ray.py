"""Ray Train: register the hook after `prepare_model`, which wraps the model in DDP.

    python examples/pytorch/ddp_ray.py

Needs `pip install "ray[train]"`. Starts two workers on this machine, unless it runs in a cluster of Ray's.
"""

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from horovod_aps.ddp import APSState, aps_hook


def train() -> None:
    """What each worker does."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    net = torch.nn.Sequential(torch.nn.Linear(20, 500), torch.nn.Linear(500, 1))
    model = prepare_model(net)
    state = APSState(e=4, m=3)
    model.register_comm_hook(state, aps_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    for _ in range(2):
        for inputs in x[rank::size].split(16):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
            optimizer.step()
    error = float((net(x) - x.sum(1, keepdim=True)).square().mean().detach())
    print(f"rank {rank}: error {error:.2e}, bytes {state.stats()['ratio']:.3f} of fp32's", flush=True)


def main() -> None:
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()


if __name__ == "__main__":
    main()
