"""The CUDA kernels: `protocol.Kernels` over CuPy, with the same table of segments as on the CPU.

Kernels run on streams of our own; nothing waits on the host. `begin` has one of them, the front, wait for what the
framework has queued; `scan` and what comes before it run there. Everything else runs on the other, once the host has
seen the scan's request done: a program queues backward far ahead of the device, and what earlier buckets still need
must not stand behind scans of later ones. `end` orders what the framework queues next after all of it. What the host
must know, the exponents, is copied to pinned memory, and the request of the operation says when it is there. Messages
lie in device memory; `reach` puts what carries them to other ranks in front of a transport.

Segments hold device addresses, which the frontends take from tensors without a copy. The module that stands for the
device is passed in, so the tests run these launchers on the host with a stand-in for CuPy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from horovod_aps.kernels import nvrtc, tables
from horovod_aps.kernels.memory import DeviceArray, PinnedPool, Uploads, is_over
from horovod_aps.kernels.native import library, raise_on_error
from horovod_aps.kernels.protocol import DONE, Buffer, Kernels, Request
from horovod_aps.kernels.segments import (
    EXP_NONFINITE,
    EXP_ZERO,
    FAMILY_FLOAT,
    FAMILY_MX,
    FAMILY_ONEBIT,
    FAMILY_QSGD,
    FAMILY_RAW,
    FAMILY_TABLE,
    FLOAT32,
    FLOAT64,
    NEAREST,
    SEGMENT,
    SPECIALS,
    SUM_FLOAT,
    Bytes,
    Message,
    Table,
    check_accumulate,
    check_segments,
    copied,
    seed_argument,
    target_addresses,
)
from horovod_aps.kernels.sources import source_folder as source_folder
from horovod_aps.transports.base import Transport
from horovod_aps.transports.device import DeviceTransport

TILE = 4096  # elements per tile, as APS_TILE in aps_kernels.cu
MEASURE_CHUNK = 256  # as APS_MEASURE_CHUNK in aps_codecs.h
WARP = 32
# These have kernels of their own, in aps_kernels_buckets.h.
BUCKET_FAMILIES = (FAMILY_QSGD, FAMILY_ONEBIT, FAMILY_TABLE, FAMILY_MX)
HIGH_PRIORITY = -5  # of a stream; CUDA takes the highest that the device has
TILE_DTYPE = np.dtype([("segment", np.int64), ("begin", np.int64)])
# Bytes between the fields of a segment, which have any content: a table that is there already would be sent again.
HOLES = np.setdiff1d(
    np.arange(SEGMENT.itemsize),
    [at + k for dtype, at, *_ in (SEGMENT.fields or {}).values() for k in range(dtype.itemsize)],
)

Rows = npt.NDArray[np.bool_]

_functions: dict[tuple[int, int], dict[str, Any]] = {}  # by device module and number
_lock = threading.Lock()


# ---- which segments the common kernels may take -----------------------------------------------------------
# They work in float32, which gives the bits of the exact functions under the conditions that aps_encode_plan and
# aps_decode_plan of aps_scalar.h check as well.


def _limits(segs: Table) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest normal exponent of each segment's format."""
    bias = (1 << (segs["exp_bits"].astype(np.int64) - 1).clip(0)) - 1
    top = (1 << segs["exp_bits"].astype(np.int64)) - 1 - (segs["flags"] & SPECIALS)
    return 1 - bias, np.maximum(top, 1) - bias


def _is_constant(exponents: np.ndarray) -> Rows:
    return (exponents == EXP_ZERO) | (exponents == EXP_NONFINITE)


def encodes_in_float(segs: Table, exponents: np.ndarray, stochastic: bool) -> Rows:
    """Which segments aps_encode_fast encodes, given values as float32."""
    emin, emax = _limits(segs)
    man, exponents = segs["man_bits"].astype(np.int64), exponents.astype(np.int64)
    draws = stochastic & (segs["flags"] & NEAREST == 0)
    spread = emax - emin + man + np.where(draws, 33, 2)
    shift = emax - exponents
    fits = (segs["exp_bits"] <= 7) & (man <= 21) & (shift >= -126) & (shift <= 127) & (exponents - spread >= -126)
    return (segs["family"] == FAMILY_RAW) | _is_constant(exponents) | fits


def decodes_in_float(segs: Table, factors: np.ndarray, n_in: int, accumulate: int) -> Rows:
    """Which segments are summed and scaled in float32 at their true size."""
    emin, emax = _limits(segs)
    exponents = segs["exponent"].astype(np.int64)
    with np.errstate(invalid="ignore"):
        powers = np.frexp(factors.astype(np.float64))[1] - 1
    low = exponents - (emax - emin) - segs["man_bits"] - np.maximum(-powers, 0) >= -125
    high = exponents + np.maximum(powers, 0) + int(n_in).bit_length() + 2 <= 126
    finite = np.isfinite(factors) & (factors != 0)
    fits = (segs["exp_bits"] != 8) & (accumulate == SUM_FLOAT) & finite & low & high
    return (segs["family"] == FAMILY_RAW) | _is_constant(exponents) | fits


def has_buckets(segs: Table) -> Rows:
    """Which segments have scales of buckets before their codes."""
    return np.isin(segs["family"], BUCKET_FAMILIES)


def bucket_tiles_of(segs: Table, rows: Rows) -> npt.NDArray[np.void]:
    """The table that cuts the segments in `rows` into tiles of whole buckets, of TILE elements or more."""
    block = np.where(segs["block"] == 0, np.maximum(segs["n"], 1), segs["block"]).astype(np.int64)
    return tiles_of(segs, block * -(-TILE // block), rows)


def tiles_of(segs: Table, size: int | npt.NDArray[np.int64], rows: Rows | None = None) -> npt.NDArray[np.void]:
    """Return the table that cuts the segments, or those in `rows`, into tiles of `size` elements."""
    size = np.broadcast_to(size, segs.shape)
    counts = -(-segs["n"] // size)
    if rows is not None:
        counts = np.where(rows, counts, 0)
    tiles = np.empty(int(counts.sum()), dtype=TILE_DTYPE)
    tiles["segment"] = np.repeat(np.arange(len(segs)), counts)
    first = np.cumsum(counts) - counts
    tiles["begin"] = (np.arange(len(tiles)) - np.repeat(first, counts)) * np.repeat(size, counts)
    return tiles


class _Later:
    """Something that the host does once an event has come; done when it has."""

    def __init__(self, cuda: Any, event: Any, then: Callable[[], None]) -> None:
        self._cuda, self._event, self._then = cuda, event, then
        self._over = False

    def done(self) -> bool:
        if not self._over and is_over(self._cuda, self._event):
            self._over = True
            self._then()
        return self._over


class CudaKernels(Kernels):
    """Launchers for one device of `device` (CuPy unless another module is given), by default the current one.

    `stream` is the address of the framework's current CUDA stream, or a function that returns it.
    Formats whose codec is in Python are refused.
    """

    def __init__(
        self,
        device: Any = None,
        stream: int | Callable[[], int] = 0,
        block: int = 256,
        max_grid: int = 65535,
        index: int | None = None,
    ) -> None:
        if not WARP <= block <= 1024 or block % WARP:
            raise ValueError(f"CudaKernels: block must be a multiple of 32 in 32..1024, got {block}")
        if max_grid < 1:
            raise ValueError(f"CudaKernels: max_grid must be at least 1, got {max_grid}")
        self.device = import_module("cupy") if device is None else device
        self._framework = stream
        self.block, self.max_grid = block, max_grid
        self._index = index
        self._is_ready = self._is_dirty = False
        self._local = threading.local()  # the stream that a thread's operations go to, if it is the front
        self._waited = -1  # the framework's stream that has waited for all of ours

    # Launching ----------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The number of the device."""
        if self._index is None:
            self._index = int(self.device.cuda.Device().id)
        return self._index

    @contextmanager
    def at_work(self) -> Generator[None, None, None]:
        """The device is current, and so is our stream: memory that is asked for belongs to it."""
        cuda = self.device.cuda
        with cuda.Device(self.index):
            if not self._is_ready:
                # Short kernels with long waits between them: not behind those of backward.
                self.stream, self.front, self.copies = (
                    cuda.Stream(non_blocking=True, priority=HIGH_PRIORITY) for _ in range(3)
                )
                self.pinned = PinnedPool(cuda)
                self._fetching: deque[tuple[Any, np.ndarray]] = deque()
                self._uploads_of: dict[int, Uploads] = {}
                for stream in (self.stream, self.front):
                    with stream:
                        self._uploads_of[stream.ptr] = Uploads(cuda, stream)
                self._tiles: dict[tuple[bytes, bytes, int | bytes], npt.NDArray[np.void]] = {}
                self._is_ready = True
            with self._active:
                yield

    @property
    def _active(self) -> Any:
        return getattr(self._local, "active", self.stream)

    @property
    def _uploads(self) -> Uploads:
        return self._uploads_of[self._active.ptr]

    def _leave_front(self) -> None:
        """What follows is not about the data of a scan that is under way."""
        self._local.__dict__.pop("active", None)

    def function(self, name: str) -> Any:
        """The kernel of this name; compiles all of them for the device when it is first asked for one."""
        key = (id(self.device), self.index)
        with _lock:
            if key not in _functions:
                with self.device.cuda.Device(self.index):
                    _functions[key] = {"": nvrtc.load(self.device, "aps_kernels.cu", self.index)}
            known = _functions[key]
            if name not in known:
                known[name] = known[""].get_function(name)
            return known[name]

    def _launch(self, name: str, n_work: int, *arguments: np.integer) -> None:
        if n_work:
            grid = min(n_work, self.max_grid)
            self.function(name)((grid,), (self.block,), arguments, 0, self._active)
            self._is_dirty = True

    def _table(self, segs: Table, exponents: np.ndarray) -> tuple[np.uint64, np.uint64]:
        """Addresses of the segments, without their exponents, and of these."""
        still = copied(segs)
        still["exponent"] = 0
        still.view(np.uint8).reshape(len(still), SEGMENT.itemsize)[:, HOLES] = 0
        put = self._uploads.put
        for row in np.flatnonzero(segs["family"] == FAMILY_TABLE):
            still[row]["first"] = put(tables.table(int(segs[row]["codec"])))
        return np.uint64(put(still)), np.uint64(put(exponents.astype(np.int32)))

    def _run(self, name: str, segs: Table, exponents: np.ndarray, common: Rows, rows: Rows, *rest: np.integer) -> None:
        """Launch an operation: its common kernel on some segments, its wide one on the others, or that for buckets."""
        if not len(segs):  # a shard of nothing: fewer elements than ranks
            return
        table = self._table(segs, exponents)
        own = has_buckets(segs) & (name not in ("scan", "add"))  # these look at no format
        if own.any() and name in ("encode", "reduce"):
            of_tables = segs["family"] == FAMILY_TABLE
            self._launch_tiles(name + "_sides_kernel", table, self._tiles_of(segs, own & ~of_tables, None), *rest)
            if of_tables.any():
                self._write_table_scales(name, segs, table, of_tables, ~_is_constant(exponents), *rest)
        for suffix, mine in (
            ("_kernel", rows & common & ~own),
            ("_wide_kernel", rows & ~common & ~own),
            ("_bucket_kernel", rows & own),
        ):
            self._launch_tiles(name + suffix, table, self._tiles_of(segs, mine, TILE), *rest)
        self._uploads.trim()

    def _write_table_scales(
        self,
        name: str,
        segs: Table,
        table: tuple[np.uint64, np.uint64],
        rows: Rows,
        usual: Rows,
        *rest: np.integer,
    ) -> None:
        """The largest magnitudes of whole segments: many blocks look for them, as a scan does."""
        top = self._zeroed(len(segs), np.uint64)
        where = np.uint64(top.ptr)
        if name == "encode":
            wide, message = segs["dtype"] == FLOAT64, rest[0]
            for kernel, mine in (("scan_kernel", ~wide), ("scan_wide_kernel", wide)):
                self._launch_tiles(kernel, table, self._tiles_of(segs, rows & usual & mine, TILE), where)
        else:
            message = rest[3]
            tiles = self._tiles_of(segs, rows & usual, TILE)
            self._launch_tiles("reduce_scan_bucket_kernel", table, tiles, rest[0], rest[1], where)
        tiles = self._tiles_of(segs, rows, None)
        self._launch_tiles("table_sides_kernel", table, tiles, where, message, np.int32(name == "reduce"))

    def _launch_tiles(
        self, name: str, table: tuple[np.uint64, np.uint64], tiles: np.ndarray, *rest: np.integer
    ) -> None:
        if len(tiles):
            address = np.uint64(self._uploads.put(tiles))
            self._launch(name, len(tiles), *table, address, np.int64(len(tiles)), *rest)

    def _tiles_of(self, segs: Table, rows: Rows, size: int | None) -> npt.NDArray[np.void]:
        """Tiles of so many elements; None: of whole buckets."""
        key = (segs["n"].tobytes(), rows.tobytes(), segs["block"].tobytes() if size is None else size)
        if key not in self._tiles:
            if len(self._tiles) >= 1024:
                self._tiles.clear()
            self._tiles[key] = bucket_tiles_of(segs, rows) if size is None else tiles_of(segs, size, rows)
        return self._tiles[key]

    def _check(self, function: str, segs: Table, uses_data: bool, length: int) -> None:
        check_segments(function, segs)
        status = library().aps_check_segments(segs.ctypes.data, len(segs), int(uses_data), length)
        raise_on_error(function, status)

    def _inputs(self, function: str, inputs: Sequence[Message], length: int | None) -> tuple[np.ndarray, int]:
        if len(inputs) == 0:
            raise ValueError(f"{function}: inputs must hold at least 1 message, got 0")
        pairs = [_device_address(function, message) for message in inputs]
        known = [size for _, size in pairs if size >= 0] + ([] if length is None else [length])
        addresses = np.array([address for address, _ in pairs], dtype=np.uint64)
        if not addresses.all():
            raise ValueError(f"{function}: address must not be null")
        return addresses, min(known, default=-1)

    def _fetch(self, ptr: int, n_bytes: int) -> tuple[Any, np.ndarray]:
        """Begin to copy device memory to pinned memory; returns an event and the memory."""
        target = self.pinned.take(n_bytes)
        runtime = self.device.cuda.runtime
        if n_bytes:
            runtime.memcpyAsync(target.ctypes.data, ptr, n_bytes, runtime.memcpyDeviceToHost, self._active.ptr)
        event = self._mark(self._active)
        while self._fetching and is_over(self.device.cuda, self._fetching[0][0]):
            self._fetching.popleft()
        self._fetching.append((event, target))  # whoever asked for it may forget it
        return event, target

    def _mark(self, stream: Any) -> Any:
        event = self.device.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _empty(self, size: int, dtype: npt.DTypeLike) -> DeviceArray:
        n_bytes = max(size * np.dtype(dtype).itemsize, 1)
        try:
            memory = self.device.cuda.alloc(n_bytes)
        except self.device.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(
                f"APSCompressor: no memory for {n_bytes} bytes on GPU {self.index} ({error}); if TensorFlow has "
                f"reserved all of it, call tf.config.experimental.set_memory_growth(gpu, True) before the first op"
            ) from None
        return DeviceArray(memory, memory.ptr, size, dtype)

    def _zeroed(self, size: int, dtype: npt.DTypeLike) -> DeviceArray:
        array = self._empty(size, dtype)
        if array.nbytes:
            self.device.cuda.runtime.memsetAsync(array.ptr, 0, array.nbytes, self._active.ptr)
        return array

    # Order --------------------------------------------------------------------------------------------------

    def _framework_stream(self) -> int:
        """The address of the framework's current stream, which CuPy has no lasting class for."""
        return self._framework() if callable(self._framework) else self._framework

    def begin(self) -> None:
        """Have the next scan, and what comes before it, wait for what the framework has queued so far."""
        with self.at_work():
            queued = self.device.cuda.Event(disable_timing=True)
            self.device.cuda.runtime.eventRecord(queued.ptr, self._framework_stream())
            self.front.wait_event(queued)
            self.front.wait_event(self._mark(self.stream))  # residuals of the step before, memory that is used again
            self._local.active = self.front

    def end(self) -> None:
        """Have what the framework queues from now on wait for all our kernels so far."""
        if not self._is_ready:
            return
        framework = self._framework_stream()
        if self._is_dirty or self._waited != framework:
            with self.at_work():
                for stream in (self.stream, self.front):  # the front reads gradients
                    event = self._mark(stream)  # which must live until it is waited for
                    self.device.cuda.runtime.streamWaitEvent(framework, event.ptr)
            self._is_dirty, self._waited = False, framework

    def drain(self) -> None:
        """Wait until nothing is under way; for what has gone wrong."""
        if self._is_ready:
            with self.at_work():
                for stream in (self.front, self.copies, self.stream):
                    stream.synchronize()

    def reach(self, transport: Transport) -> Transport:
        """What brings messages in device memory to other ranks over this transport."""
        return transport if transport.memory == "device" else DeviceTransport(transport, self)

    # The operations -----------------------------------------------------------------------------------------

    def scan(self, segs: Table, stochastic: bool = False) -> Request:
        """Set `exponent` of every segment; see Kernels.scan."""
        self._check("scan", segs, True, -1)
        with self.at_work():
            top = self._zeroed(len(segs), np.uint64)
            rows = (segs["family"] == FAMILY_FLOAT) | has_buckets(segs)
            unused = np.zeros(len(segs), np.int32)
            self._run("scan", segs, unused, segs["dtype"] != FLOAT64, rows, np.uint64(top.ptr))
            event, found = self._fetch(top.ptr, top.nbytes)
        self._leave_front()

        def finish() -> None:
            library().aps_finish_scan(segs.ctypes.data, len(segs), found.ctypes.data, int(stochastic))
            self.pinned.give(found)

        return _Later(self.device.cuda, event, finish)

    def encode(self, segs: Table, message: Message, seed: int | None = None) -> None:
        """Write the codes of every element into the message; see Kernels.encode."""
        self._leave_front()
        self._encode("encode", segs, message, seed)

    def copy(self, segs: Table, message: Message) -> Request:
        """Write values as float32 into the message; see Kernels.copy."""
        self._encode("copy", segs, message, None)
        with self.at_work():
            event = self._mark(self._active)
        self._leave_front()
        return _Later(self.device.cuda, event, lambda: None)

    def _encode(self, function: str, segs: Table, message: Message, seed: int | None) -> None:
        address, length = _device_address(function, message)
        self._check(function, segs, True, length)
        stochastic, bits = seed_argument(seed)
        common = encodes_in_float(segs, segs["exponent"], bool(stochastic)) & (segs["dtype"] != FLOAT64)
        with self.at_work():
            arguments = (np.uint64(address), np.int32(stochastic), np.uint64(bits))
            self._run("encode", segs, segs["exponent"], common, _all(segs), *arguments)

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
        self._leave_front()
        check_accumulate("reduce", accumulate)
        address, length = _device_address("reduce", out)
        stochastic, bits = seed_argument(seed, reduce=True)
        addresses, shortest = self._inputs("reduce", inputs, length if length >= 0 else None)
        self._check("reduce", segs, False, shortest)
        keep = keep_exponent or accumulate != SUM_FLOAT
        in_float = (segs["family"] == FAMILY_RAW) | ((segs["exp_bits"] != 8) & (accumulate == SUM_FLOAT))

        def encode_sums(found: np.ndarray) -> None:
            exponents = np.empty(len(segs), dtype=np.int32)
            library().aps_finish_reduce(
                segs.ctypes.data, len(segs), found.ctypes.data, int(keep), stochastic, exponents.ctypes.data
            )
            common = in_float & encodes_in_float(segs, exponents, bool(stochastic))
            with self.at_work():
                sources = np.uint64(self._uploads.put(addresses))
                rest = (np.uint64(address), np.int32(stochastic), np.uint64(bits))
                arguments = (sources, np.int32(len(inputs)), np.int32(accumulate), *rest)
                self._run("reduce", segs, exponents, common, _all(segs), *arguments)

        if keep:
            encode_sums(np.zeros(len(segs), dtype=np.uint64))
            return DONE
        with self.at_work():
            top = self._zeroed(len(segs), np.uint64)
            rows = ((segs["family"] == FAMILY_FLOAT) | has_buckets(segs)) & ~_is_constant(segs["exponent"])
            sources = np.uint64(self._uploads.put(addresses))
            arguments = (sources, np.int32(len(inputs)), np.uint64(top.ptr))
            self._run("reduce_scan", segs, segs["exponent"], in_float, rows, *arguments)
            event, found = self._fetch(top.ptr, top.nbytes)

        def finish() -> None:
            encode_sums(found)
            self.pinned.give(found)

        return _Later(self.device.cuda, event, finish)

    def decode(
        self,
        segs: Table,
        inputs: Sequence[Message],
        accumulate: int = SUM_FLOAT,
        length: int | None = None,
    ) -> None:
        """Sum the inputs, scale back and store in `data`; see Kernels.decode."""
        self._leave_front()
        check_accumulate("decode", accumulate)
        addresses, shortest = self._inputs("decode", inputs, length)
        self._check("decode", segs, True, shortest)
        common = decodes_in_float(segs, segs["factor"], len(inputs), accumulate) & (segs["dtype"] != FLOAT64)
        with self.at_work():
            sources = np.uint64(self._uploads.put(addresses))
            arguments = (sources, np.int32(len(inputs)), np.int32(accumulate))
            self._run("decode", segs, segs["exponent"], common, _all(segs), *arguments)

    def residual(self, segs: Table, message: Message) -> None:
        """Subtract from `data` what the own message decodes to; see Kernels.residual."""
        self._leave_front()
        address, length = _device_address("residual", message)
        self._check("residual", segs, True, length)
        ones = np.ones(len(segs), np.float32)
        common = decodes_in_float(segs, ones, 1, SUM_FLOAT) & (segs["dtype"] == FLOAT32)
        with self.at_work():
            self._run("residual", segs, segs["exponent"], common, _all(segs), np.uint64(address))

    def measure(self, segs: Table, message: Message) -> npt.NDArray[np.float64]:
        """Return lost elements, squared error, squares and largest magnitude; waits. See Kernels.measure."""
        address, length = _device_address("measure", message)
        self._check("measure", segs, True, length)
        result = np.zeros((len(segs), 4))
        with self.at_work():
            chunks = self._tiles_of(segs, _all(segs), MEASURE_CHUNK)
            out = self._zeroed(4 * len(chunks), np.float64)
            arguments = (np.uint64(self._uploads.put(chunks)), np.int64(len(chunks)))
            n_blocks = -(-len(chunks) // self.block)
            table = self._table(segs, segs["exponent"])
            rest = (*table, *arguments, np.uint64(address), np.uint64(out.ptr))
            for name in ("measure_kernel", "measure_bucket_kernel") if has_buckets(segs).any() else ("measure_kernel",):
                self._launch(name, n_blocks, *rest)
            parts = self._read(out).view(np.float64).reshape(-1, 4)
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
        with self.at_work():
            where = np.uint64(self._uploads.put(targets))
            self._run("add", segs, segs["exponent"], segs["dtype"] != FLOAT64, _all(segs), where)

    # Memory -------------------------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> Bytes:
        """Return n_bytes of zeroed device memory."""
        if n_bytes < 0:
            raise ValueError(f"alloc: n_bytes must not be negative, got {n_bytes}")
        with self.at_work():
            return cast(Bytes, self._zeroed(n_bytes, np.uint8))

    def bytes_of(self, message: Bytes) -> Bytes:
        """Return a copy of a message on the host; waits."""
        with self.at_work():
            return self._read(cast(DeviceArray, message))

    def _read(self, array: DeviceArray) -> np.ndarray:
        if not array.nbytes:
            return np.zeros(0, np.uint8)
        event, found = self._fetch(array.ptr, array.nbytes)
        event.synchronize()
        copy = found.copy()
        self.pinned.give(found)
        return copy

    def zeros(self, n: int) -> DeviceArray:
        """Return n float32 zeros on the device."""
        with self.at_work():
            return self._zeroed(n, np.float32)

    def address(self, array: Buffer) -> int:
        """Return the address of an array that `zeros` or `alloc` made."""
        return int(cast(DeviceArray, array).ptr)

    def to_host(self, array: Buffer) -> npt.NDArray[np.float32]:
        """Return a NumPy copy of an array that `zeros` made; waits."""
        with self.at_work():
            return self._read(cast(DeviceArray, array)).view(np.float32)

    def from_host(self, values: npt.NDArray[np.float32]) -> DeviceArray:
        """Return a device array like that of `zeros`, filled with values."""
        content = np.array(values, dtype=np.float32).reshape(-1)
        with self.at_work():
            array = self._empty(content.size, np.float32)
            self._uploads.copy(content.tobytes(), array.ptr)
            return array


def _all(segs: Table) -> Rows:
    return np.ones(len(segs), np.bool_)


def _device_address(function: str, message: Message) -> tuple[int, int]:
    """(address, length) of a message on the device; the length of a bare address is unknown and given as -1."""
    if isinstance(message, (int, np.integer)):
        return int(message), -1
    if not isinstance(message, DeviceArray):
        raise TypeError(f"{function}: a message must be in device memory, got {type(message).__name__}")
    return message.ptr, message.nbytes
