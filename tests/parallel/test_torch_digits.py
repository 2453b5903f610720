"""Training a small convolutional net on scikit-learn's digits: what 8 bits cost in accuracy, and what APS is good for.

One test that does all trainings, on 2 ranks: fp32 through stock Horovod is the oracle.
"""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from sklearn.datasets import load_digits

from horovod_aps.torch import APSCompressor

hvd.init()
SEEDS, EPOCHS, BATCH, N_TEST = range(5), 8, 32, 597
# The weight of the loss, as in training for several tasks; undone before the step, so that fp32 does not notice.
# APS does not either. A fixed scale of 1 does: gradients then lie below the least value of (4,3), 2^-9.
LOSS_WEIGHT = 1 / 64


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images in [0, 1] and labels; the same split on all ranks."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = torch.tensor(digits.images[order] / 16.0, dtype=torch.float32)[:, None]
    y = torch.tensor(digits.target[order])
    return x[:-N_TEST], y[:-N_TEST], x[-N_TEST:], y[-N_TEST:]


def accuracy(compression: object, seed: int) -> float:
    """Test accuracy in per cent after training with this compression."""
    x, y, test_x, test_y = data()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.2, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    n_steps = EPOCHS * (len(x) // (BATCH * hvd.size()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / n_steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x) - BATCH * hvd.size() + 1, BATCH * hvd.size()):
            mine = order[start + BATCH * hvd.rank() : start + BATCH * (hvd.rank() + 1)]
            optimizer.zero_grad()
            (torch.nn.functional.cross_entropy(model(x[mine]), y[mine]) * LOSS_WEIGHT).backward()
            optimizer.synchronize()
            for p in model.parameters():
                p.grad /= LOSS_WEIGHT
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float((model(test_x).argmax(1) == test_y).double().mean() * 100)


def test_digits_accuracy_of_8_bits_is_that_of_fp32_and_aps_matters():
    compressions = {
        "fp32": lambda: hvd.Compression.none,
        "(4,3)": lambda: APSCompressor(4, 3),
        "(5,2)": lambda: APSCompressor(5, 2),
        "(4,3) without scaling": lambda: APSCompressor(4, 3, scaling=False),
    }
    scores = {name: [accuracy(make(), seed) for seed in SEEDS] for name, make in compressions.items()}
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    if hvd.rank() == 0:
        print("".join(f"\n{name}: {means[name]:.2f} % {values}" for name, values in scores.items()), flush=True)
    assert means["fp32"] > 95
    assert abs(means["(4,3)"] - means["fp32"]) < 1
    assert abs(means["(5,2)"] - means["fp32"]) < 1
    assert means["(4,3) without scaling"] < means["fp32"] - 2, "APS should be worth at least two points here"
