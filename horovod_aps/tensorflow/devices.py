"""Gradients on a GPU: their addresses over DLPack, and the CuPy kernels that pack them where they are.

Only eager tensors have addresses. In a graph the exchange is therefore a `tf.py_function` on the GPU, whose arguments
are eager tensors there. TensorFlow does not say which stream it queues its work on, so the host waits twice: for what
TensorFlow has queued before the first kernel, and for our kernels before results are handed over.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import tensorflow as tf

from horovod_aps.kernels.cuda import CudaKernels


class _DLTensor(ctypes.Structure):
    """The beginning of what a DLPack capsule points to."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@cache
def array_module() -> Any:
    """CuPy, or None with a warning: then gradients are copied to the host."""
    try:
        return import_module("cupy")
    except ImportError:
        warnings.warn(
            "APSCompressor: CuPy is not installed, so gradients are copied from the GPU to the host and "
            'packed there; pip install "horovod_aps[cuda12]"',
            stacklevel=2,
        )
        return None


@cache
def gpus() -> list[str]:
    """Names of the GPUs that TensorFlow uses in this process."""
    return [device.name for device in tf.config.list_logical_devices("GPU")]


def can_pack() -> bool:
    """Whether there is a GPU, and CuPy for it."""
    return bool(gpus()) and array_module() is not None


def gpu_for_graph(values: Sequence[tf.Tensor]) -> str | None:
    """Where the exchange of a graph's tensors belongs: on the first GPU, if the user has not put them on the CPU."""
    if not gpus() or any("CPU:0" in str(value.device).upper() for value in values):
        return None
    return gpus()[0] if array_module() is not None else None


def gpu_of(values: Sequence[tf.Tensor]) -> str | None:
    """The GPU on which all of these eager tensors are, if there is one that we can use."""
    devices = {str(value.backing_device) for value in values}
    if len(devices) != 1 or not devices <= set(gpus()):
        return None
    return devices.pop() if array_module() is not None else None


class Addresses:
    """Addresses of eager tensors, which stay valid as long as this object."""

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._capsules = [tf.experimental.dlpack.to_dlpack(tensor) for tensor in tensors]
        found = [_DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")) for capsule in self._capsules]
        self.values = [(entry.data or 0) + entry.byte_offset for entry in found]


@contextmanager
def at_work(addresses: Sequence[int], gpu: str) -> Generator[None, None, None]:
    """TensorFlow's queued work is over, and the GPU of these addresses is CUDA's current one.

    TensorFlow counts only the GPUs that it may see, so its own number would be the wrong one. Tensors without elements
    have no address; then any other tensor on the GPU tells.
    """
    with tf.device(gpu):
        any_other = Addresses([tf.raw_ops.Empty(shape=[1], dtype=tf.float32)] if not any(addresses) else [])
    tf.test.experimental.sync_devices()
    cuda = array_module().cuda
    known = next(address for address in (*addresses, *any_other.values) if address)
    with cuda.Device(cuda.runtime.pointerGetAttributes(known).device):
        yield


def kernels() -> CudaKernels:
    """The launchers for the current GPU; whoever hands over results waits for them, so any stream will do."""
    return CudaKernels(array_module())
