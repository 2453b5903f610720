"""PyTorch Lightning: its DDP strategy takes the hook and the state.

    torchrun --nproc-per-node 2 examples/pytorch/ddp_lightning.py

On CPUs Lightning leaves hooks out without a word; there a callback registers it.
"""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from horovod_aps.ddp import APSState, aps_hook


class Regression(pl.LightningModule):
    """Two linear layers for the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 500), torch.nn.Linear(500, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class HookOnCpu(pl.Callback):
    """Registers the hook where Lightning does not."""

    def __init__(self, state: APSState) -> None:
        self.state = state

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.strategy.root_device.type == "cpu":
            trainer.strategy.model.register_comm_hook(self.state, aps_hook)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    state = APSState(e=4, m=3)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", ddp_comm_state=state, ddp_comm_hook=aps_hook),
        callbacks=[HookOnCpu(state)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, data)
    error = float((model.net(x) - x.sum(1, keepdim=True)).square().mean().detach())
    print(f"rank {trainer.global_rank}: error {error:.2e}, bytes {state.stats()['ratio']:.3f} of fp32's", flush=True)


if __name__ == "__main__":
    main()
