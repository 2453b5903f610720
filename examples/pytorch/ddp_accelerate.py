"""Hugging Face Accelerate: register the hook after `prepare`, which wraps the model in DDP.

torchrun --nproc-per-node 2 examples/pytorch/ddp_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from horovod_aps.ddp import APSState, aps_hook


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    net = torch.nn.Sequential(torch.nn.Linear(20, 500), torch.nn.Linear(500, 1))
    model, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.02), data)
    state = APSState(e=4, m=3)
    model.register_comm_hook(state, aps_hook)
    for _ in range(2):
        for inputs, sums in data:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), sums))
            optimizer.step()
    error = float((net(x) - x.sum(1, keepdim=True)).square().mean().detach())
    ratio = state.stats()["ratio"]
    print(f"rank {accelerator.process_index}: error {error:.2e}, bytes {ratio:.3f} of fp32's", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
