"""The whole exchange on the CUDA launchers, driven through the stand-in for the device; oracle: the CPU kernels."""

import cuda_standin
import numpy as np
import pytest

from horovod_aps.engine.exchange import Exchange, local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.kernels.cuda import CudaKernels
from horovod_aps.options import Options

SHAPES = ((1,), (7,), (33, 5), (4099,))


def run(kernels: object, n_ranks: int, options: Options, n_steps: int) -> tuple[list[np.ndarray], list[Exchange]]:
    """Results of the last of `n_steps` exchanges of the same gradients, and the exchanges."""
    rng = np.random.default_rng(5)
    grads = [[rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(n_ranks)]
    outs = [[np.empty_like(grad) for grad in rank] for rank in grads]
    layers = [
        [
            Layer(f"l{i}", grad.shape, 0, grad.ctypes.data, out.ctypes.data, 1 / n_ranks, (grad, out))
            for i, (grad, out) in enumerate(zip(grads[r], outs[r], strict=True))
        ]
        for r in range(n_ranks)
    ]
    exchanges = None
    for _ in range(n_steps):
        exchanges = local_allreduce(layers, options, kernels, exchanges)
    assert exchanges is not None
    return [out for rank in outs for out in rank], exchanges


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [Options(4, 3), Options(3, 0, error_feedback=True), Options(5, 2, rounding="stochastic", stats=True)],
    ids=str,
)
def test_cuda_exchange_equals_cpu(n_ranks: int, options: Options) -> None:
    on_cpu, cpu = run(CpuKernels(), n_ranks, options, 3)
    on_gpu, gpu = run(CudaKernels(cuda_standin), n_ranks, options, 3)
    assert [one.statistics.as_dict() for one in cpu] == [one.statistics.as_dict() for one in gpu]
    for a, b in zip(on_cpu, on_gpu, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_cuda_exchange_keeps_its_state() -> None:
    options = Options(3, 0, error_feedback=True)
    _, cpu = run(CpuKernels(), 2, options, 2)
    _, gpu = run(CudaKernels(cuda_standin), 2, options, 2)
    state = gpu[1].state()
    assert set(state["residuals"]) == set(cpu[1].residuals)
    gpu[0].load_state(state)
    for name, values in cpu[1].residuals.items():
        np.testing.assert_array_equal(gpu[0].kernels.to_host(gpu[0].residuals[name]), values)
