"""With this folder in PYTHONPATH a process finds itself on a machine with a GPU: the stand-in, and nothing else.

CuPy is the stand-in. For the ranks of `gpu-check`, PyTorch's `cuda()` gives memory that the device's streams write to,
and a second logical CPU of TensorFlow plays its GPU.
"""

import importlib
import sys

import cuda_standin

from horovod_aps.kernels.cuda import CudaKernels

sys.modules["cupy"] = cuda_standin
FRAMEWORK = 77
CudaKernels.__init__.__defaults__ = (None, 0, 32, 65535, None)  # blocks of 32 threads: the stand-in is slow


def play_torch() -> None:
    import torch

    from horovod_aps.kernels import CpuKernels, for_torch
    from horovod_aps.torch.gradient import Gradient

    hand_in, to_cpu, seen = Gradient.hand_in, torch.Tensor.cpu, []

    def registered(self, *arguments):
        hand_in(self, *arguments)
        for tensor in (self.staged, self.result):
            cuda_standin.register(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def cuda(self, device):
        seen.append(self.clone())
        return seen[-1]

    def cpu(self):
        cuda_standin.cuda.ExternalStream(FRAMEWORK).synchronize()
        return to_cpu(self)

    Gradient.hand_in, torch.Tensor.cuda, torch.Tensor.cpu = registered, cuda, cpu
    for_torch.kernels_for = lambda device: CudaKernels(stream=FRAMEWORK) if seen else CpuKernels()


def play_tensorflow() -> None:
    import tensorflow as tf

    from horovod_aps.tensorflow import devices

    config = tf.config
    config.set_logical_device_configuration(
        config.list_physical_devices("CPU")[0], [config.LogicalDeviceConfiguration()] * 2
    )

    class Addresses(devices.Addresses):
        def __init__(self, tensors) -> None:
            super().__init__(tensors)
            for tensor, address in zip(tensors, self.values):
                cuda_standin.register(address, tensor.shape.num_elements() * tensor.dtype.size)

    devices.Addresses = Addresses
    devices.gpus = lambda: ["/job:localhost/replica:0/task:0/device:CPU:1"]


if "--rank" in sys.orig_argv:
    importlib.import_module("horovod_aps.tools.gpu_check")
    {"torch": play_torch, "tensorflow": play_tensorflow}[sys.orig_argv[-1]]()
