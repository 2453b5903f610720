"""The CUDA kernels: `protocol.Kernels` over CuPy, with the same table of segments as on the CPU.

The sources in `horovod_aps/cuda` are compiled once per device by CuPy's NVRTC. Segments hold device
addresses, which the frontends take from tensors without a copy (DLPack or `__cuda_array_interface__`);
messages are pinned host memory that MPI and the kernels both reach. The module that stands for the device is
passed in, so the tests run these launchers on the host with a stand-in for CuPy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from horovod_aps.kernels.native import library, raise_on_error
from horovod_aps.kernels.protocol import DONE, Buffer, Kernels, Request
from horovod_aps.kernels.segments import (
    SUM_FLOAT,
    Bytes,
    Message,
    Table,
    check_accumulate,
    check_segments,
    input_addresses,
    message_address,
    seed_argument,
    target_addresses,
)

TILE = 4096  # elements per tile, as APS_TILE in aps_kernels.cu
MEASURE_CHUNK = 256  # as APS_MEASURE_CHUNK in aps_scalar.h
TILE_DTYPE = np.dtype([("segment", np.int64), ("begin", np.int64)])
OPTIONS = ("-std=c++17", "--fmad=false")  # a fused multiply-add would change the last bit


# ---- what is used of CuPy ---------------------------------------------------------------------------------


class DevicePointer(Protocol):
    """An address on the device."""

    @property
    def ptr(self) -> int: ...


class DeviceArray(Protocol):
    """cupy.ndarray."""

    @property
    def size(self) -> int: ...
    @property
    def data(self) -> DevicePointer: ...
    def get(self) -> npt.NDArray[np.generic]: ...


Argument = DeviceArray | np.integer


class RawKernel(Protocol):
    """A kernel of a compiled module."""

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Argument, ...]) -> None: ...


class RawModule(Protocol):
    """Compiled source."""

    def get_function(self, name: str) -> RawKernel: ...


class Stream(AbstractContextManager["Stream"], Protocol):
    """A CUDA stream, current while entered."""

    def synchronize(self) -> None: ...


class CurrentDevice(Protocol):
    """The device that is current."""

    @property
    def id(self) -> int: ...


class Cuda(Protocol):
    """cupy.cuda."""

    def Device(self) -> CurrentDevice: ...  # noqa: N802 (CuPy's name)
    def ExternalStream(self, ptr: int) -> Stream: ...  # noqa: N802 (CuPy's name)
    def alloc_pinned_memory(self, size: int) -> memoryview: ...


class DeviceModule(Protocol):
    """cupy, or what stands in for it."""

    @property
    def cuda(self) -> Cuda: ...
    def RawModule(self, *, code: str, options: tuple[str, ...]) -> RawModule: ...  # noqa: N802 (CuPy's name)
    def asarray(self, a: npt.NDArray[np.generic]) -> DeviceArray: ...
    def zeros(self, shape: int, dtype: npt.DTypeLike) -> DeviceArray: ...


# ---- compiling and cutting --------------------------------------------------------------------------------

_modules: dict[tuple[int, int], RawModule] = {}
_lock = threading.Lock()


def source_folder() -> Path:
    """Return the folder with aps_kernels.cu and aps_scalar.h, in a wheel or in a checkout."""
    package = import_module("horovod_aps.cuda")
    assert package.__file__ is not None
    return Path(package.__file__).parent


def tiles_of(segs: Table, size: int) -> npt.NDArray[np.void]:
    """Return the table that cuts every segment into tiles of `size` elements."""
    counts = -(-segs["n"] // size)
    tiles = np.empty(int(counts.sum()), dtype=TILE_DTYPE)
    tiles["segment"] = np.repeat(np.arange(len(segs)), counts)
    first = np.cumsum(counts) - counts
    tiles["begin"] = (np.arange(len(tiles)) - np.repeat(first, counts)) * size
    return tiles


class CudaKernels(Kernels):
    """Launchers for the current device of `device` (CuPy unless another module is given).

    `stream` is the address of the framework's current CUDA stream, or a function that returns it.
    Every call waits for its kernels: the host reads exponents and messages next, or reuses the message.
    Formats whose codec is in Python are refused.
    """

    def __init__(
        self,
        device: DeviceModule | None = None,
        stream: int | Callable[[], int] = 0,
        block: int = 256,
        max_grid: int = 65535,
    ) -> None:
        if not 1 <= block <= 1024:
            raise ValueError(f"CudaKernels: block must be in 1..1024, got {block}")
        if max_grid < 1:
            raise ValueError(f"CudaKernels: max_grid must be at least 1, got {max_grid}")
        self.device = cast(DeviceModule, import_module("cupy")) if device is None else device
        self.stream = stream
        self.block, self.max_grid = block, max_grid

    # Launching ----------------------------------------------------------------------------------------------

    def _module(self) -> RawModule:
        key = (id(self.device), int(self.device.cuda.Device().id))
        with _lock:
            if key not in _modules:
                folder = source_folder()
                code = (folder / "aps_kernels.cu").read_text()
                _modules[key] = self.device.RawModule(code=code, options=(*OPTIONS, f"-I{folder}"))
            return _modules[key]

    def _launch(self, name: str, n_work: int, *arguments: Argument) -> None:
        if n_work:
            grid = min(n_work, self.max_grid)
            self._module().get_function(name)((grid,), (self.block,), arguments)

    def _on_stream(self) -> Stream:
        return self.device.cuda.ExternalStream(self.stream() if callable(self.stream) else self.stream)

    def _tables(self, segs: Table, size: int = TILE) -> tuple[DeviceArray, DeviceArray, np.int64]:
        tiles = tiles_of(segs, size)
        to_device = self.device.asarray
        return to_device(segs.view(np.uint8)), to_device(tiles.view(np.uint8)), np.int64(len(tiles))

    def _check(self, function: str, segs: Table, uses_data: bool, length: int) -> None:
        check_segments(function, segs)
        status = library().aps_check_segments(segs.ctypes.data, len(segs), int(uses_data), length)
        raise_on_error(function, status)

    def _inputs(self, function: str, inputs: Sequence[Message], length: int | None) -> tuple[DeviceArray, int]:
        sources, shortest = input_addresses(function, inputs, length)
        addresses = np.array(sources, dtype=np.uint64)
        if not addresses.all():
            raise ValueError(f"{function}: address must not be null")
        return self.device.asarray(addresses), shortest

    # The operations -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Kernels run on the framework's stream."""

    def end(self) -> None:
        """Every call has waited for its kernels."""

    def scan(self, segs: Table, stochastic: bool = False) -> Request:
        """Set `exponent` of every segment; see Kernels.scan."""
        self._check("scan", segs, True, -1)
        with self._on_stream() as stream:
            table, tiles, n_tiles = self._tables(segs)
            top = self.device.zeros(len(segs), dtype=np.uint64)
            self._launch("scan_kernel", int(n_tiles), table, tiles, n_tiles, top)
            found = np.ascontiguousarray(top.get())
            stream.synchronize()
        library().aps_finish_scan(segs.ctypes.data, len(segs), found.ctypes.data, int(stochastic))
        return DONE

    def encode(self, segs: Table, message: Message, seed: int | None = None) -> None:
        """Write the codes of every element into the message; see Kernels.encode."""
        address, length = message_address("encode", message)
        self._check("encode", segs, True, length)
        stochastic, bits = seed_argument(seed)
        with self._on_stream() as stream:
            table, tiles, n_tiles = self._tables(segs)
            arguments = (np.uint64(address), np.int32(stochastic), np.uint64(bits))
            self._launch("encode_kernel", int(n_tiles), table, tiles, n_tiles, *arguments)
            stream.synchronize()

    def reduce(
        self,
        segs: Table,
        inputs: Sequence[Message],
        accumulate: int,
        out: Message,
        seed: int | None = None,
        keep_exponent: bool = False,
    ) -> Request:
        """Sum the inputs and encode the sums into out with new exponents; see Kernels.reduce."""
        check_accumulate("reduce", accumulate)
        address, length = message_address("reduce", out)
        stochastic, bits = seed_argument(seed, reduce=True)
        with self._on_stream() as stream:
            sources, shortest = self._inputs("reduce", inputs, length if length >= 0 else None)
            self._check("reduce", segs, False, shortest)
            table, tiles, n_tiles = self._tables(segs)
            found = np.zeros(len(segs), dtype=np.uint64)
            common = (table, tiles, n_tiles, sources, np.int32(len(inputs)))
            keep = keep_exponent or accumulate != SUM_FLOAT
            if not keep:
                top = self.device.zeros(len(segs), dtype=np.uint64)
                self._launch("reduce_scan_kernel", int(n_tiles), *common, top)
                found = np.ascontiguousarray(top.get())
                stream.synchronize()
            exponents = np.empty(len(segs), dtype=np.int32)
            library().aps_finish_reduce(
                segs.ctypes.data, len(segs), found.ctypes.data, int(keep), stochastic, exponents.ctypes.data
            )
            acc_exp = self.device.asarray(exponents)
            rest = (np.int32(accumulate), acc_exp, np.uint64(address), np.int32(stochastic), np.uint64(bits))
            self._launch("reduce_kernel", int(n_tiles), *common, *rest)
            stream.synchronize()
        return DONE

    def decode(
        self,
        segs: Table,
        inputs: Sequence[Message],
        accumulate: int = SUM_FLOAT,
        length: int | None = None,
    ) -> None:
        """Sum the inputs, scale back and store in `data`; see Kernels.decode."""
        check_accumulate("decode", accumulate)
        with self._on_stream() as stream:
            sources, shortest = self._inputs("decode", inputs, length)
            self._check("decode", segs, True, shortest)
            table, tiles, n_tiles = self._tables(segs)
            arguments = (sources, np.int32(len(inputs)), np.int32(accumulate))
            self._launch("decode_kernel", int(n_tiles), table, tiles, n_tiles, *arguments)
            stream.synchronize()

    def residual(self, segs: Table, message: Message) -> None:
        """Subtract from `data` what the own message decodes to; see Kernels.residual."""
        address, length = message_address("residual", message)
        self._check("residual", segs, True, length)
        with self._on_stream() as stream:
            table, tiles, n_tiles = self._tables(segs)
            self._launch("residual_kernel", int(n_tiles), table, tiles, n_tiles, np.uint64(address))
            stream.synchronize()

    def measure(self, segs: Table, message: Message) -> npt.NDArray[np.float64]:
        """Return lost elements, squared error, squares and largest magnitude; see Kernels.measure."""
        address, length = message_address("measure", message)
        self._check("measure", segs, True, length)
        result = np.zeros((len(segs), 4))
        with self._on_stream() as stream:
            table, chunks, n_chunks = self._tables(segs, MEASURE_CHUNK)
            out = self.device.zeros(4 * int(n_chunks), dtype=np.float64)
            n_blocks = -(-int(n_chunks) // self.block)
            self._launch("measure_kernel", n_blocks, table, chunks, n_chunks, np.uint64(address), out)
            parts = np.asarray(out.get()).reshape(-1, 4)
            stream.synchronize()
        bounds = np.concatenate(([0], np.cumsum(-(-segs["n"] // MEASURE_CHUNK))))
        for k in range(len(segs)):
            mine = parts[bounds[k] : bounds[k + 1]]
            if len(mine):  # a running sum adds in order, as the CPU does
                result[k, :3] = np.cumsum(mine[:, :3], axis=0)[-1]
                result[k, 3] = mine[:, 3].max()
        return result

    def add(self, segs: Table, addresses: npt.NDArray[np.uint64]) -> None:
        """Add `data` to the float32 arrays at `addresses`; see Kernels.add."""
        self._check("add", segs, True, -1)
        targets = target_addresses(segs, addresses)
        if not targets[segs["n"] > 0].all():
            raise ValueError("add: address must not be null")
        with self._on_stream() as stream:
            table, tiles, n_tiles = self._tables(segs)
            self._launch("add_kernel", int(n_tiles), table, tiles, n_tiles, self.device.asarray(targets))
            stream.synchronize()

    # Memory -------------------------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> Bytes:
        """Return n_bytes of zeroed pinned host memory, which the device reads and writes in place."""
        if n_bytes < 0:
            raise ValueError(f"alloc: n_bytes must not be negative, got {n_bytes}")
        memory = self.device.cuda.alloc_pinned_memory(max(n_bytes, 1))
        array = np.frombuffer(memory, dtype=np.uint8, count=n_bytes)
        array.fill(0)
        return array

    def bytes_of(self, message: Bytes) -> Bytes:
        """Return the message."""
        return message

    def zeros(self, n: int) -> DeviceArray:
        """Return n float32 zeros on the device."""
        return self.device.zeros(n, dtype=np.float32)

    def address(self, array: Buffer) -> int:
        """Return the address of an array that `zeros` or `alloc` made."""
        if isinstance(array, np.ndarray):
            return int(array.ctypes.data)
        return int(cast(DeviceArray, array).data.ptr)

    def to_host(self, array: Buffer) -> npt.NDArray[np.float32]:
        """Return a NumPy copy of an array that `zeros` made."""
        return np.array(cast(DeviceArray, array).get(), dtype=np.float32)

    def from_host(self, values: npt.NDArray[np.float32]) -> DeviceArray:
        """Return a device array like that of `zeros`, filled with values."""
        return self.device.asarray(np.array(values, dtype=np.float32).reshape(-1))
