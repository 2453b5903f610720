"""A device that behaves like one, on the host: what the package uses of CuPy, with kernels compiled by g++.

- Memory: device memory is protected pages that the host cannot touch; pinned memory is registered; a kernel that
  touches anything else, or an address that is not aligned, stops with `IllegalAddress`: `runtime.cpp` looks at every
  access.
- Streams: what is queued runs later, in an order drawn from a seed that events allow. A copy to the host spoils its
  target until it has run, memory that is used again is spoilt first: a missing wait gives a wrong number.
- Counting: launches, copies, events and blocking waits, and the bytes that kernels move.
- Flush-to-zero as the compiler's options say.

Names and arguments are CuPy's; `tests/single/test_cuda_cupy.py` compares them with the real one. `reset()` gives a
fresh device.
"""

import ctypes
import hashlib
import itertools
import os
import random
import subprocess
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuda_standin import sanitizer as sanitizers

__version__ = "of the stand-in"
MAX_ARGUMENTS = 12
ARENA = 1 << 32  # bytes of address space
PAGE = 4096
DEVICE, PINNED = 1, 2
NOT_READY, ILLEGAL_ADDRESS = 600, 700  # CUDA's numbers
FOLDER = Path(__file__).parent
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class IllegalAddress(RuntimeError):
    """A kernel or a copy has touched memory that it cannot reach, or in a way that it cannot."""


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory.OutOfMemoryError."""


class _Stats(SimpleNamespace):
    seconds: float


class _State:
    """One device and all that is queued on it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        address = _libc.mmap(None, ARENA, 0, 0x4022, -1, 0)  # no access; private, anonymous, no reserve
        assert address not in (None, ctypes.c_void_p(-1).value)
        self.base, self.used, self.is_open, self.n_allocated = int(address), 0, 0, 0
        self.device_ranges: dict[int, int] = {}  # of live allocations: address -> size
        self.foreign: dict[int, int] = {}  # memory of the framework that plays the device's
        self.pinned: dict[int, int] = {}
        self.dying: list[tuple[int, np.ndarray]] = []  # pinned memory that was given back while something was queued
        self.free: dict[tuple[int, int], list[int]] = {}  # by stream and size
        self.streams: dict[int, _Stream] = {}
        self.sanitizer = sanitizers.sanitizer()
        self.sanitizer.poison(self.base, ARENA)
        self.reset(0)

    def reset(self, seed: int, eager: bool = False, limit: int = ARENA) -> None:
        self.random = random.Random(seed)
        self.eager = eager
        self.limit = limit
        self.counts: Counter[str] = Counter()
        self.kernel_bytes: Counter[str] = Counter()
        self.looks_for_races = False
        self.drop_waits = False
        self.error: BaseException | None = None

    # ---- memory -------------------------------------------------------------------------------------------

    def allocate(self, n_bytes: int, stream: int) -> int:
        size = -(-max(n_bytes, 1) // 512) * 512
        with self.lock:
            spare = self.free.get((stream, size))
            if spare:
                address = spare.pop()
            else:
                if self.n_allocated + size > self.limit:
                    raise OutOfMemoryError(f"Out of memory allocating {size} bytes")
                address = self.base + self.used
                self.used += size
            self.device_ranges[address] = size
            self.n_allocated += size
            self.counts["allocations"] += 1
            owner = self.stream(stream)

            def spoil() -> None:
                self.sanitizer.unpoison(address, n_bytes)
                self.sanitizer.set(owner.fiber, address, 0xCD, n_bytes)

            owner.push("spoil", spoil)
            return address

    def release(self, address: int, stream: int) -> None:
        with self.lock:
            size = self.device_ranges.pop(address)
            self.n_allocated -= size
            if sanitizers.KIND == "address":  # by then what its stream has queued is over
                self.stream(stream).push("poison", lambda: self.sanitizer.poison(address, size))
            self.free.setdefault((stream, size), []).append(address)

    def kind_of(self, address: int, n_bytes: int) -> int:
        if self.base <= address and address + n_bytes <= self.base + self.used:
            return DEVICE  # perhaps given back, but the stream that it belongs to may still use it
        for ranges, kind in ((self.pinned, PINNED), (self.foreign, DEVICE)):
            for start, size in list(ranges.items()):
                if start <= address and address + n_bytes <= start + size:
                    return kind
        return 0

    def known(self) -> np.ndarray:
        rows = [(start, start + size, DEVICE) for start, size in list(self.foreign.items())]
        rows += [(start, start + size, PINNED) for start, size in list(self.pinned.items())]
        rows += [(self.base, self.base + self.used, DEVICE)]
        return np.array(rows, np.uint64).reshape(-1, 3)

    def opened(self, run: Callable[[], Any]) -> None:
        """Run something as the device: its pages can be touched meanwhile."""
        with self.lock:
            size = -(-self.used // PAGE) * PAGE
            if size and not self.is_open:
                _libc.mprotect(self.base, size, 3)
            self.is_open += 1
            try:
                run()
            finally:
                self.is_open -= 1
                if size and not self.is_open:
                    _libc.mprotect(self.base, size, 0)

    # ---- streams ------------------------------------------------------------------------------------------

    def stream(self, ptr: int) -> "_Stream":
        if ptr not in self.streams:
            self.streams[ptr] = _Stream(ptr)
        return self.streams[ptr]

    def step(self) -> bool:
        """Run the head of a stream drawn at random; False if none can run."""
        ready = [stream for stream in self.streams.values() if stream.can_run()]
        if not ready:
            return False
        self.random.choice(ready).run_one()
        return True

    def until(self, is_over: Callable[[], bool]) -> None:
        def run() -> None:
            while not is_over():
                assert self.step(), "the device waits for an event that is never recorded"

        with self.lock:
            if not is_over():
                self.opened(run)

    def wait_for(self, streams: "list[_Stream]") -> None:
        """Until nothing is queued on these, which comes before what the host does next."""
        marks = [stream.leave_mark() for stream in streams]
        self.until(lambda: not any(stream.queue for stream in streams))
        for mark in filter(None, marks):
            self.sanitizer.acquire(0, mark)

    def bury(self) -> None:
        """Have done with pinned memory that was given back, if nothing is queued that could use it."""
        if not any(stream.queue for stream in self.streams.values()):
            while self.dying:
                ptr, array = self.dying.pop()
                array.fill(0xDD)
                self.pinned.pop(ptr, None)

    def progress(self, raises: bool = True) -> None:
        """A moment passes: now and then some of what is queued runs."""

        def run() -> None:
            for _ in range(self.random.randrange(1, 25)):
                self.step()

        with self.lock:
            if self.random.random() < 0.4 and any(stream.queue for stream in self.streams.values()):
                self.opened(run)
        if raises:
            self.check()

    def check(self) -> None:
        """Raise what has gone wrong on the device."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class _Stream:
    """What is queued on one stream."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.fiber = _state.sanitizer.fiber()
        self.queue: deque[tuple[str, Any, int]] = deque()
        self.log: list[str] = []

    def push(self, what: str, run: Callable[[], Any]) -> None:
        mark = _state.sanitizer.mark()
        _state.sanitizer.release(0, mark)  # what the host has done by now comes first
        with _state.lock:
            self.queue.append((what, run, mark))
            if _state.eager:
                _state.until(lambda: not self.queue)

    def leave_mark(self) -> int:
        """A mark after all that is queued, if a sanitizer listens."""
        mark: int = _state.sanitizer.mark()
        if mark:
            self.push("mark", lambda: _state.sanitizer.release(self.fiber, mark))
        return mark

    def can_run(self) -> bool:
        if not self.queue:
            return False
        what, payload, _ = self.queue[0]
        return what != "wait" or payload()

    def run_one(self) -> None:
        what, run, mark = self.queue.popleft()
        _state.sanitizer.acquire(self.fiber, mark)
        if what == "wait":
            return
        try:
            _state.opened(run)
        except BaseException as error:  # as a device does: seen at the next call that looks
            _state.error = _state.error or error


_state = _State()


def reset(seed: int = 0, *, eager: bool = False, limit: int = ARENA) -> None:
    """Start afresh: nothing queued, nothing counted, another order of streams."""
    _state.until(lambda: not any(stream.queue for stream in _state.streams.values()))
    _state.reset(seed, eager, limit)
    _current.__dict__.clear()


def counts() -> Counter[str]:
    """What was asked of the device: launches, waits, copies, events."""
    return _state.counts


def kernel_bytes() -> Counter[str]:
    """Bytes that kernels have read and written, by kernel and kind of memory."""
    return _state.kernel_bytes


def register(address: int, n_bytes: int) -> None:
    """Memory of a framework's tensor plays device memory."""
    if n_bytes > 0:
        with _state.lock:
            _state.foreign[address] = max(n_bytes, _state.foreign.get(address, 0))


def unregister(address: int) -> None:
    _state.foreign.pop(address, None)


def look_for_races(on: bool = True) -> None:
    """Have kernels stop where two threads touch the same byte and one of them writes."""
    _state.looks_for_races = on


def enqueue(stream: int, run: Callable[[], Any]) -> None:
    """Queue a piece of the framework's own work."""
    _state.stream(stream).push("framework", run)


def drain() -> None:
    """Let the device finish; not counted, for tests that look at memory."""
    _state.wait_for([*_state.streams.values()])
    _state.progress()


def drain_quietly() -> None:
    """Let the device finish, whatever goes wrong on it."""
    _state.until(lambda: not any(stream.queue for stream in _state.streams.values()))
    _state.error = None


def read(address: int, n_bytes: int) -> bytes:
    """Contents of device memory, for tests."""
    drain()
    found: list[bytes] = []
    _state.opened(lambda: found.append(ctypes.string_at(address, n_bytes)))
    return found[0]


# ---- cupy.cuda --------------------------------------------------------------------------------------------

_current = threading.local()


class MemoryPointer:
    """As CuPy's: memory that goes back to its stream's pool when nobody holds it."""

    def __init__(self, ptr: int, stream: int) -> None:
        self.ptr, self._stream = ptr, stream

    def __del__(self) -> None:
        _state.release(self.ptr, self._stream)


def _alloc(size: int) -> MemoryPointer:
    stream = getattr(_current, "streams", [0])[-1]
    return MemoryPointer(_state.allocate(size, stream), stream)


class PinnedMemory:
    """Page-locked host memory of exactly this size."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self._array = np.full(max(size, 1) + 256, 0x5A, np.uint8)
        self.ptr = int(self._array.ctypes.data) + -self._array.ctypes.data % 256
        self.size = size
        begin, end = self._array.ctypes.data, self._array.ctypes.data + len(self._array)
        for start, n in list(_state.foreign.items()):
            if start < end and begin < start + n:  # of tensors that are gone; a shorter one may be alive at its start
                del _state.foreign[start]
                register(start, begin - start)
        _state.bury()
        _state.pinned[self.ptr] = size
        _state.counts["pinned bytes"] += size

    def __del__(self) -> None:
        """As cudaFreeHost, which waits for the device: what is queued by now still finds the memory."""
        _state.dying.append((self.ptr, self._array))
        _state.bury()


class _StreamHandle:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __enter__(self) -> "_StreamHandle":
        _current.__dict__.setdefault("streams", [0]).append(self.ptr)
        cuda.entered.append(self.ptr)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.streams.pop()

    def synchronize(self) -> None:
        _state.counts["waits"] += 1
        _state.wait_for([_state.stream(self.ptr)])
        _state.progress()

    def record(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        _state.counts["stream waits"] += 1
        if _state.drop_waits:
            return
        version, mark, stream = event._recorded, event._mark, _state.stream(self.ptr)
        stream.push("wait", lambda: event._finished >= version)
        if mark:
            stream.push("mark", lambda: _state.sanitizer.acquire(stream.fiber, mark))


class Stream(_StreamHandle):
    _numbers = iter(range(1 << 20, 1 << 30))

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        assert non_blocking, "a blocking stream waits for the framework's default stream"
        super().__init__(next(self._numbers))


class ExternalStream(_StreamHandle):
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__(ptr)


class Event:
    _numbers = itertools.count(1)
    _by_ptr: "weakref.WeakValueDictionary[int, Event]" = weakref.WeakValueDictionary()

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._recorded = self._finished = self._mark = 0
        self.ptr = next(self._numbers)
        self._by_ptr[self.ptr] = self

    def record(self, stream: _StreamHandle | None = None) -> None:
        _state.counts["events"] += 1
        self._recorded += 1
        self._mark = _state.sanitizer.mark()
        version, mark, where = self._recorded, self._mark, _state.stream(stream.ptr if stream is not None else 0)

        def reach() -> None:
            _state.sanitizer.release(where.fiber, mark)
            self._finished = max(self._finished, version)

        where.push("record", reach)

    @property
    def done(self) -> bool:
        """As CuPy's: False as well when something has gone wrong."""
        return _Runtime.eventQuery(self.ptr) == 0

    def query(self) -> int:
        _state.counts["queries"] += 1
        _state.progress(raises=False)
        if _state.error is not None:
            return ILLEGAL_ADDRESS
        if self._finished < self._recorded:
            return NOT_READY
        if self._mark:
            _state.sanitizer.acquire(0, self._mark)
        return 0

    def synchronize(self) -> None:
        _state.counts["waits"] += 1
        version = self._recorded
        _state.until(lambda: self._finished >= version)
        if self._mark:
            _state.sanitizer.acquire(0, self._mark)
        _state.progress()


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = device if device is not None else getattr(_current, "devices", [0])[-1]
        self.compute_capability = "80"

    def __enter__(self) -> "Device":
        _current.__dict__.setdefault("devices", [0]).append(self.id)
        cuda.devices.append(self.id)
        return self

    def __exit__(self, *_: Any) -> None:
        _current.devices.pop()

    def synchronize(self) -> None:
        _state.counts["waits"] += 1
        drain()


class _Attributes:
    """Of an address: all memory belongs to device 0."""

    device = 0

    def __init__(self, ptr: int) -> None:
        assert ptr


class _Runtime:
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N815
    pointerGetAttributes = _Attributes  # noqa: N815
    getDeviceCount = staticmethod(lambda: 1)  # noqa: N815
    getDeviceProperties = staticmethod(lambda device: {"name": b"the stand-in"})  # noqa: N815
    driverGetVersion = runtimeGetVersion = staticmethod(lambda: 12090)  # noqa: N815
    eventQuery = staticmethod(lambda event: Event._by_ptr[event].query())  # noqa: N815
    eventRecord = staticmethod(lambda event, stream: Event._by_ptr[event].record(_StreamHandle(stream)))  # noqa: N815
    streamWaitEvent = staticmethod(  # noqa: N815
        lambda stream, event, flags=0: _StreamHandle(stream).wait_event(Event._by_ptr[event])
    )

    @staticmethod
    def check_status(status: int) -> None:
        if status:
            _state.check()
            raise RuntimeError(f"the device says {status}")

    @staticmethod
    def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        _state.counts["copies"] += 1
        kinds = {1: (PINNED, DEVICE), 2: (DEVICE, PINNED), 3: (DEVICE, DEVICE)}[kind]

        def check() -> None:
            for address, wanted in zip((src, dst), kinds):
                if _state.kind_of(address, size) != wanted:
                    raise IllegalAddress(f"a copy of kind {kind} was given {address:#x}, which is not such memory")

        check()
        if kind == 2:
            ctypes.memset(dst, 0xA5, size)  # whoever reads too early reads this

        owner = _state.stream(stream)

        def run() -> None:
            check()
            _state.sanitizer.copy(owner.fiber, dst, src, size)

        owner.push("copy", run)

    @staticmethod
    def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        _state.counts["memsets"] += 1
        if _state.kind_of(ptr, size) != DEVICE:
            raise IllegalAddress(f"memset of {ptr:#x}, which is not device memory")
        owner = _state.stream(stream)
        owner.push("memset", lambda: _state.sanitizer.set(owner.fiber, ptr, value, size))


# ---- compiling and launching ------------------------------------------------------------------------------


class nvrtc:  # noqa: N801 (CuPy's name)
    """cupy_backends.cuda.libs.nvrtc: a "cubin" is a shared library."""

    n_compiled = 0
    version = (12, 9)

    @staticmethod
    def getVersion() -> tuple[Any, ...]:  # noqa: N802
        """Not that of any real one: what is compiled here must not be found in the cache there, nor the reverse."""
        return (*nvrtc.version, "of the stand-in", _own_key())

    @staticmethod
    def createProgram(src: str, name: str, headers: list, include_names: list) -> dict[str, Any]:  # noqa: N802
        return {"src": src}

    @staticmethod
    def compileProgram(prog: dict[str, Any], options: list) -> None:  # noqa: N802
        nvrtc.n_compiled += 1
        prog["cubin"] = compile_for_host(prog["src"], tuple(options))

    @staticmethod
    def getCUBIN(prog: dict[str, Any]) -> bytes:  # noqa: N802
        return prog["cubin"]

    @staticmethod
    def getProgramLog(prog: dict[str, Any]) -> str:  # noqa: N802
        return ""

    @staticmethod
    def destroyProgram(prog: dict[str, Any]) -> None:  # noqa: N802
        prog.clear()


def _own_key() -> str:
    """Changes with all that goes into a "cubin" beside the kernels."""
    parts = [os.environ.get("APS_STANDIN_FLAGS", ""), sanitizers.KIND]
    parts += [(FOLDER / name).read_text() for name in ("shim.h", "runtime.cpp")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def compile_for_host(code: str, options: tuple[str, ...], extra: tuple[str, ...] = ()) -> bytes:
    """The shared library of a kernel source; kept in memory of this machine by what it is made from."""
    assert "--fmad=false" in options
    extra = (*extra, *os.environ.get("APS_STANDIN_FLAGS", "").split())
    includes = [option for option in options if option.startswith("-I")]
    flush = any(option.lstrip("-") in ("ftz=true", "use_fast_math") for option in options)
    parts = [
        code,
        repr(sorted(extra)) + _own_key(),
        str(flush),
    ]
    parts += [path.read_text() for one in includes for path in sorted(Path(one[2:]).glob("*.h"))]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    cache = Path(tempfile.gettempdir()) / f"aps_standin_{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    library = cache / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
            source.write_text(code)
            command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror"]
            command += ["-Wno-unknown-pragmas"]
            objects = [str(Path(folder) / "kernels.o"), str(Path(folder) / "runtime.o")]
            shim = ["-include", str(FOLDER / "shim.h"), *includes]
            flags, plain = sanitizers.KERNEL_FLAGS, {**os.environ, "LD_PRELOAD": ""}
            runtime = [*sanitizers.RUNTIME_FLAGS, str(FOLDER / "runtime.cpp")]
            for arguments in (
                [*command, *flags, *extra, *shim, "-c", str(source), "-o", objects[0]],
                [*command, "-c", *runtime, "-o", objects[1]],
                ["g++", "-shared", *objects, "-o", str(made)],
            ):
                subprocess.run(arguments, check=True, env=plain)
            os.replace(_copy(made, cache), library)
    return library.read_bytes() + (b"FLUSH" if flush else b"KEEPS")


def _copy(path: Path, folder: Path) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(path.read_bytes())
    return Path(file.name)


_WORDS = (
    "status", "address", "size", "is_write", "read_device", "written_device", "read_pinned", "written_pinned",
    "n_accesses",
)  # fmt: skip
_libraries: dict[bytes, ctypes.CDLL] = {}


class Function:
    def __init__(self, library: ctypes.CDLL, name: str, flush: bool) -> None:
        self._library, self._name, self._flush = library, name, flush
        self._address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Any,
        shared_mem: int = 0,
        stream: _StreamHandle | None = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        assert len(args) <= MAX_ARGUMENTS and block[0] % 32 == 0
        slots = np.zeros(MAX_ARGUMENTS, np.uint64)
        for k, argument in enumerate(args):
            # CuPy takes the size of a scalar from its type, so a plain int would be an error there
            assert isinstance(argument, np.integer), f"argument {k} must be a NumPy integer"
            slots[k] = int(argument) & (2**64 - 1)
        _state.counts["launches"] += 1
        _state.counts[self._name] += 1
        owner = _state.stream(stream.ptr if stream is not None else getattr(_current, "streams", [0])[-1])

        def run() -> None:
            known = _state.known()
            self._library.standin_launch.restype = ctypes.c_void_p
            found = self._library.standin_launch(
                ctypes.c_void_p(self._address),
                grid[0],
                block[0],
                ctypes.c_void_p(slots.ctypes.data),
                ctypes.c_void_p(known.ctypes.data),
                len(known),
                int(self._flush),
                int(_state.looks_for_races),
                ctypes.c_void_p(owner.fiber),
            )
            seen = dict(zip(_WORDS, (ctypes.c_uint64 * len(_WORDS)).from_address(found)))
            if seen["status"]:
                what = ("", "an illegal address", "a misaligned address", "a race")[seen["status"]]
                verb = "writes" if seen["is_write"] else "reads"
                raise IllegalAddress(f"{self._name} {verb} {seen['size']} bytes at {seen['address']:#x}: {what}")
            for word in _WORDS[4:]:
                _state.kernel_bytes[f"{self._name} {word}"] += seen[word]
                _state.kernel_bytes[word] += seen[word]

        owner.push(self._name, run)


class Module:
    def load(self, cubin: bytes) -> None:
        self._flush = cubin.endswith(b"FLUSH")
        key = hashlib.sha256(cubin).digest()
        if key not in _libraries:
            with tempfile.NamedTemporaryFile(suffix=".so") as file:
                file.write(cubin[:-5])
                file.flush()
                _libraries[key] = ctypes.CDLL(file.name)
        self._library = _libraries[key]

    def get_function(self, name: str) -> Function:
        return Function(self._library, name, self._flush)


class RawModule:
    """As CuPy's, which always asks the compiler to flush subnormal numbers."""

    def __init__(self, code: str, *, options: tuple[str, ...] = ()) -> None:
        self._module = Module()
        self._module.load(compile_for_host(code, (*options, "-ftz=true")))

    def get_function(self, name: str) -> Function:
        return self._module.get_function(name)


class cuda:  # noqa: N801 (CuPy's name)
    """cupy.cuda."""

    entered: list[int] = []
    devices: list[int] = []
    Stream, ExternalStream, Event, Device = Stream, ExternalStream, Event, Device
    alloc = staticmethod(_alloc)
    PinnedMemory = PinnedMemory
    runtime = _Runtime
    function = SimpleNamespace(Module=Module, Function=Function)
    memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
