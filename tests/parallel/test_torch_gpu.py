"""PyTorch's whole way on the stand-in for a GPU: hooks, streams, exchange, error feedback, checkpoint.

Tensors of the CPU play those of the GPU. Their gradients are written late, by the stand-in's framework stream, and are
NaN until then; the optimizer reads results only after that stream, not after the device. So an order that events do not
enforce gives wrong numbers. Oracle: the same training with the CPU kernels, bit for bit.
"""

from __future__ import annotations

import cuda_standin
import horovod.torch as hvd
import pytest
import torch

from horovod_aps.kernels import for_torch
from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.torch import APSCompressor
from horovod_aps.torch.gradient import Gradient

hvd.init()
FRAMEWORK = 77


@pytest.fixture
def gpu(monkeypatch):
    """From here on compressors find their tensors on a GPU."""

    def start() -> None:
        hand_in = Gradient.hand_in

        def registered(self, *arguments):
            hand_in(self, *arguments)
            for tensor in (self.staged, self.result):
                cuda_standin.register(tensor.data_ptr(), tensor.numel() * tensor.element_size())

        monkeypatch.setattr(Gradient, "hand_in", registered)
        monkeypatch.setattr(
            for_torch, "kernels_for", lambda device: CudaKernels(cuda_standin, stream=FRAMEWORK, block=32)
        )
        cuda_standin.reset(hvd.rank())

    yield start
    cuda_standin.drain()


def write_late(parameter: torch.Tensor) -> None:
    """A hook of autograd's: the gradient is there when the framework's stream has come so far."""
    grad = parameter.grad
    content = grad.clone()
    grad.fill_(float("nan"))
    cuda_standin.enqueue(FRAMEWORK, lambda: grad.copy_(content))


def train(n_steps: int, late: bool, **options) -> tuple[list[torch.Tensor], APSCompressor]:
    """Weights after some steps, with the state saved and loaded in the middle."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7))
    if late:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(write_late)
    compressor = APSCompressor(4, 3, bucket_mb=0.004, **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters(), compression=compressor
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(n_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        in_backward = cuda_standin.counts()["launches"]
        optimizer.synchronize()
        if late:
            assert step == 0 or in_backward, "nothing was launched"
            cuda_standin.cuda.ExternalStream(FRAMEWORK).synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        if step == n_steps // 2:
            compressor.load_state_dict(compressor.state_dict())
    return [parameter.detach().clone() for parameter in model.parameters()], compressor


@pytest.mark.parametrize(
    "options",
    [{}, {"error_feedback": True}, {"rounding": "stochastic", "error_feedback": True}, {"stats": True}],
    ids=["plain", "feedback", "stochastic", "stats"],
)
def test_training_on_gpu_equals_training_on_cpu(options, gpu):
    expected, on_cpu = train(4, False, **options)
    gpu()
    found, on_gpu = train(4, True, **options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    assert cuda_standin.counts()["launches"] > 0
    assert cuda_standin.kernel_bytes()["read_pinned"] + cuda_standin.kernel_bytes()["written_pinned"] == 0
    wanted, got = on_cpu.state_dict()["residuals"], on_gpu.state_dict()["residuals"]
    assert wanted.keys() == got.keys() and all(torch.equal(wanted[name], got[name]) for name in wanted)
    if hvd.size() > 1:
        assert "through pinned host memory" in str(on_gpu.stats())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_allreduce_on_gpu_equals_cpu(dtype, gpu):
    x = (torch.randn(1003, generator=torch.Generator().manual_seed(hvd.rank())) * 1e-3).to(dtype)
    expected = hvd.allreduce(x, name="x", compression=APSCompressor(5, 2))
    gpu()
    found = hvd.allreduce(x, name="x", compression=APSCompressor(5, 2))
    cuda_standin.cuda.ExternalStream(FRAMEWORK).synchronize()
    assert torch.equal(found, expected)
