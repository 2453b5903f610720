"""An exchange on the stand-in for a GPU, to be run under a sanitizer (tests/single/test_cuda_sanitizers.py).

The arguments are what to do wrong, one after the other: "nothing", "wait" (no stream waits for another), "front"
(gradients are copied on a stream that has not waited for the framework's), "length" (memory on the device is 4 bytes
shorter than it says).
"""

import ctypes
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "single")]

import cuda_standin  # noqa: E402
import numpy as np  # noqa: E402
from test_cuda_exchange import FRAMEWORK, OnGpu, run  # noqa: E402
from test_two_level_messages import by_messages  # noqa: E402

from horovod_aps.kernels.cuda import CudaKernels  # noqa: E402
from horovod_aps.kernels.memory import DeviceArray  # noqa: E402
from horovod_aps.options import Options  # noqa: E402


class Seen(OnGpu):
    """Gradients are written and results read by copies, which a sanitizer sees."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list = []

    def _copy(self, array: np.ndarray, address: int, kind: int) -> np.ndarray:
        memory = cuda_standin.PinnedMemory(array.nbytes)
        host = np.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(memory.ptr), array.dtype)
        host[:] = array.reshape(-1)
        self._kept.append(memory)
        places = (address, memory.ptr) if kind == 1 else (memory.ptr, address)
        cuda_standin.cuda.runtime.memcpyAsync(*places, array.nbytes, kind, FRAMEWORK)
        return host.reshape(array.shape)

    def backward(self, tensors, arrays) -> None:
        for (_, _, address), array in zip(tensors, arrays):
            self._copy(array, address, 1)

    def results(self, tensors):
        found = [self._copy(array, address, 2) for _, array, address in tensors]
        cuda_standin.cuda.ExternalStream(FRAMEWORK).synchronize()
        return found


OPTIONS = Options(4, 3, error_feedback=True, overrides={"l2": "qsgd4"})


copy, empty = CudaKernels.copy, CudaKernels._empty


def exchange(fault: str) -> None:
    def short(self: CudaKernels, size: int, dtype: type) -> DeviceArray:
        array = empty(self, size * np.dtype(dtype).itemsize - 4, np.uint8)
        return DeviceArray(array._memory, array.ptr, size, dtype)

    if fault == "front":
        CudaKernels.copy = lambda self, *arguments: (self._leave_front(), copy(self, *arguments))[1]
    elif fault == "length":
        CudaKernels._empty = short
    for n_ranks, hosts in ((2, ""), (4, "aabb")):
        cuda_standin.reset(n_ranks)
        cuda_standin._state.drop_waits = fault == "wait"
        side = Seen()
        run(side, n_ranks, OPTIONS, 2, by_messages(hosts, OPTIONS, side.kernels) if hosts else None)
    cuda_standin.drain()
    assert cuda_standin.counts()["launches"]
    print(f"done: {fault}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        exchange(argument)
