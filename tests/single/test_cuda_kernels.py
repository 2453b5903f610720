"""CUDA kernels without a GPU: they compile for real GPUs, and give the bits of the CPU library.

Oracle: CpuKernels (itself tested against NumPy in test_kernels.py), zero tolerance.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import cuda_standin  # noqa: E402
from cuda_compilers import compile_with_nvcc  # noqa: E402

from horovod_aps import kernels as K  # noqa: E402
from horovod_aps.formats import MX, QSGD, DynamicTree, OneBit, TableFormat  # noqa: E402
from horovod_aps.kernels import cuda as C  # noqa: E402
from horovod_aps.kernels.memory import DeviceArray  # noqa: E402
from horovod_aps.kernels.nvrtc import OPTIONS  # noqa: E402

SIZES = [0, 1, 7, 8, 9, 1023, 1025, 4096, 4099]
FORMATS = [(4, 3), (5, 2), (3, 0), (3, 2), (5, 10), (8, 7), (8, 23), (7, 23), (2, 12), (1, 2), (1, 6), (6, 1)]
BUCKETS = [MX(4, 3), MX(2, 1, 8, True), DynamicTree(), TableFormat([-1, 0.1, 1]),
           QSGD(8), QSGD(4, 64), QSGD(2, 128, "l2"), QSGD(5, 27, "l2"), QSGD(8, 5000, "l2"), OneBit(64), OneBit(27),
           OneBit(300), OneBit(4096), OneBit("tensor")]  # fmt: skip
LAUNCHES = [(32, 1), (256, 65535), (96, 3)]


def bits_of(values: np.ndarray, dtype: int) -> np.ndarray:
    """Values as an array of the segment dtype code; bfloat16 by truncation, as uint16."""
    if dtype == K.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype([np.float32, np.float64, np.float16][dtype])


def make_bucket(rng: np.random.Generator, n_rows: int, share: float = 0.3) -> tuple[np.ndarray, list[np.ndarray], int]:
    """A table of segments of random format, dtype, size and scale, some zero or not finite; a share has buckets."""
    segs = np.zeros(n_rows, dtype=K.SEGMENT)
    arrays, offset = [], 0
    for row in segs:
        n = int(rng.choice(SIZES))
        dtype = int(rng.integers(4))
        scale = 10.0 ** rng.choice([-44, -39, -20, -3, 0, 5, 30, 37])
        values = rng.standard_normal(n) * np.exp2(rng.integers(-20, 2, n)) * scale
        if n and rng.random() < 0.1:
            values[rng.integers(n)] = rng.choice([np.nan, np.inf])
        if rng.random() < 0.1:
            values[:] = 0
        array = bits_of(values, dtype)
        exp_bits, man_bits = FORMATS[rng.integers(len(FORMATS))]
        flags = K.SPECIALS if rng.random() < 0.6 else 0
        flags |= K.NEAREST if rng.random() < 0.2 else 0
        is_raw = rng.random() < 0.1
        row["family"] = K.FAMILY_RAW if is_raw else K.FAMILY_FLOAT
        row["data"], row["n"], row["offset"] = array.ctypes.data, n, offset
        row["factor"] = rng.choice([1.0, 0.5, 1 / 3, -2.0, 1e-30, 1e-42, 0.0])
        row["exp_bits"], row["man_bits"], row["flags"], row["dtype"] = exp_bits, man_bits, flags, dtype
        row["uid"], row["first"] = rng.integers(2**32), rng.choice([0, 8, 2**32 - 16, 2**40])
        if rng.random() < share:
            fmt = BUCKETS[rng.integers(len(BUCKETS))]
            fmt.describe(row)
            offset += fmt.bytes_for(n)
        offset += (n * (32 if is_raw else 1 + exp_bits + man_bits) + 7) // 8 + int(rng.integers(4))
        arrays.append(array)
    return segs, arrays, offset + 8


class Cpu:
    """Arrays where the CPU kernels work."""

    kernels = K.CpuKernels()

    def put(self, array: np.ndarray) -> tuple[int, np.ndarray]:
        copy = array.copy()
        return copy.ctypes.data, copy

    def get(self, place: np.ndarray, like: np.ndarray) -> np.ndarray:
        return place

    def message(self, content: np.ndarray) -> np.ndarray:
        message = self.kernels.alloc(len(content))
        message[:] = content
        return message

    def bytes_of(self, message: np.ndarray) -> np.ndarray:
        return message


class Gpu:
    """Arrays in the memory of the stand-in; some do not begin where a vector could be loaded."""

    def __init__(self, block: int, max_grid: int) -> None:
        self.kernels = C.CudaKernels(cuda_standin, stream=77, block=block, max_grid=max_grid)
        self._n = 0

    def put(self, array: np.ndarray) -> tuple[int, Any]:
        self._n += 1
        lead = array.itemsize * (self._n % 3 == 0)
        raw = np.concatenate([np.zeros(lead, np.uint8), array.view(np.uint8)])
        raw = np.concatenate([raw, np.zeros(-len(raw) % 4, np.uint8)])
        place = self.kernels.from_host(raw.view(np.float32))
        return place.ptr + lead, (place, lead)

    def get(self, place: Any, like: np.ndarray) -> np.ndarray:
        found = cuda_standin.read(place[0].ptr + place[1], like.nbytes)
        return np.frombuffer(found, like.dtype)

    def message(self, content: np.ndarray) -> Any:
        padded = np.concatenate([content, np.zeros(-len(content) % 4, np.uint8)])
        message = self.kernels.from_host(padded.view(np.float32))
        return DeviceArray(message, message.ptr, len(content), np.uint8)

    def bytes_of(self, message: Any) -> np.ndarray:
        return self.kernels.bytes_of(message)


def aimed(segs: np.ndarray, addresses: list[int]) -> np.ndarray:
    table = segs.copy()
    table["data"] = addresses
    return table


def finish(request: Any) -> None:
    while not request.done():
        pass


def run_all(side: Any, segs: np.ndarray, arrays: list[np.ndarray], length: int, seed: int | None, accumulate: int,
            keep: bool) -> list[np.ndarray]:  # fmt: skip
    """What every operation makes of a bucket."""
    kernels = side.kernels
    addresses, places = zip(*[side.put(array) for array in arrays])
    table = aimed(segs, addresses)
    finish(kernels.scan(table, stochastic=seed is not None))
    exponents = table["exponent"].copy()
    # what lies between the segments must stay
    messages = [side.message(np.full(length, 0xA5, np.uint8)) for _ in range(4)]
    for k in range(3):
        kernels.encode(table, messages[k], None if seed is None else seed + k)
    measured = kernels.measure(table, messages[0])
    ones = [np.ones(len(array), dtype=np.float32) for array in arrays]
    targets, kept = zip(*[side.put(array) for array in ones])
    kernels.add(table, np.array(targets, dtype=np.uint64))
    kernels.residual(table, messages[0])
    reduced = table.copy()
    finish(kernels.reduce(reduced, messages[:3], accumulate, messages[3], seed, keep_exponent=keep))
    results = []
    for inputs, mode, made in ((messages[:3], accumulate, table), (messages[3:], 0, reduced)):
        targets, outs = zip(*[side.put(np.zeros_like(array)) for array in arrays])
        kernels.decode(aimed(made, targets), inputs, mode)
        results += [side.get(place, array) for place, array in zip(outs, arrays)]
    return [
        exponents,
        *[side.bytes_of(message) for message in messages],
        measured,
        *[side.get(place, one) for place, one in zip(kept, ones)],
        *[side.get(place, array) for place, array in zip(places, arrays)],
        reduced["exponent"].copy(),
        *results,
    ]


@pytest.fixture(autouse=True)
def fresh_device():
    cuda_standin.reset()


@pytest.mark.parametrize(("block", "max_grid"), LAUNCHES)
@pytest.mark.parametrize("seed", [None, 12345])
def test_cuda_kernels_agree_with_cpu_bit_for_bit(block: int, max_grid: int, seed: int | None) -> None:
    rng = np.random.default_rng([block, max_grid, seed is None])
    for accumulate, keep in [(0, False), (0, True), (1, False), (2, False)]:
        segs, arrays, length = make_bucket(rng, 24)
        arguments = (segs, arrays, length, seed, accumulate, keep)
        expected, got = run_all(Cpu(), *arguments), run_all(Gpu(block, max_grid), *arguments)
        for index, (wanted, found) in enumerate(zip(expected, got, strict=True)):
            same = wanted.tobytes() == found.tobytes()
            if index == 5:  # the sign of a NaN among the measured sums depends on the compiler
                same = np.array_equal(wanted, found, equal_nan=True)
            assert same, f"accumulate {accumulate}, result {index}"
    assert cuda_standin.kernel_bytes()["read_pinned"] + cuda_standin.kernel_bytes()["written_pinned"] == 0


@pytest.mark.parametrize("fmt", [(4, 3), (3, 0), (5, 10), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [K.FLOAT32, K.FLOAT16, K.BFLOAT16])
def test_cuda_kernels_take_the_common_way(fmt: tuple[int, int], dtype: int) -> None:
    """Gradients of usual size never come to the kernels that work in double, and give the CPU's bits."""
    rng = np.random.default_rng(7)
    segs, arrays, offset = np.zeros(3, K.SEGMENT), [], 0
    for row, n in zip(segs, (1, 1025, 9000)):
        arrays.append(bits_of(rng.standard_normal(n) * 1e-3, dtype))
        row["n"], row["offset"], row["factor"], row["dtype"] = n, offset, 0.25, dtype
        row["exp_bits"], row["man_bits"], row["flags"] = *fmt, K.SPECIALS
        offset += -(-n * (1 + sum(fmt)) // 128) * 16
    arguments = (segs, arrays, offset, None, 0, False)
    expected, got = run_all(Cpu(), *arguments), run_all(Gpu(256, 65535), *arguments)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(expected, got, strict=True))
    used = {name for name in cuda_standin.counts() if name.endswith("_wide_kernel")}
    assert used <= ({"residual_wide_kernel"} if dtype != K.FLOAT32 else set())


def test_threads_do_not_get_in_each_others_way() -> None:
    cuda_standin.look_for_races()
    segs, arrays, length = make_bucket(np.random.default_rng(3), 12)
    run_all(Gpu(64, 7), segs, arrays, length, 5, 0, False)


def test_cuda_kernels_are_compiled_once_per_device() -> None:
    first, second = C.CudaKernels(cuda_standin), C.CudaKernels(cuda_standin)
    assert first.function("scan_kernel") is second.function("scan_kernel")


def test_cuda_kernels_zeros_and_address_name_the_same_memory() -> None:
    kernels = C.CudaKernels(cuda_standin)
    zeros = kernels.zeros(3)
    assert kernels.address(zeros) % 256 == 0 and cuda_standin.read(zeros.ptr, 12) == bytes(12)
    message = kernels.alloc(16)
    assert kernels.address(message) == message.ptr and message[4:12].ptr == message.ptr + 4
    assert len(kernels.alloc(0)) == 0 and len(message[4:12]) == 8


@pytest.mark.parametrize("side", [Cpu(), Gpu(32, 4)], ids=["cpu", "cuda"])
def test_kernels_refuse_malformed_tables(side: Any) -> None:
    kernels = side.kernels
    address, place = side.put(np.ones(16, dtype=np.float32))
    good = np.zeros(1, dtype=K.SEGMENT)
    good["data"], good["n"], good["exp_bits"], good["man_bits"] = address, 16, 4, 3
    message = kernels.alloc(16)
    kernels.encode(good, message)
    for field, value, words in [
        ("exp_bits", 0, "exp_bits must be in 1..8"),
        ("exp_bits", 9, "exp_bits must be in 1..8"),
        ("man_bits", 24, "man_bits in 0..23"),
        ("dtype", 4, "dtype must be in 0..3"),
        ("data", 0, "null"),
        ("n", -1, "out of range"),
        ("offset", 1, "inside its message"),
        ("offset", -1, "inside its message"),
    ]:
        bad = good.copy()
        bad[field] = value
        with pytest.raises(ValueError, match=words):
            kernels.encode(bad, message)
    with pytest.raises(ValueError, match="at least 1 message"):
        kernels.decode(good, [])
    with pytest.raises(ValueError, match="accumulate must be in 0..2, got 3"):
        kernels.decode(good, [message], 3)
    with pytest.raises(TypeError, match="dtype SEGMENT"):
        kernels.scan(np.zeros(3))
    with pytest.raises(ValueError, match="null"):
        kernels.decode(good, [0])


@pytest.mark.slow
def test_cuda_source_compiles_with_nvcc_where_installed(tmp_path: Path) -> None:
    """Oracle: nvcc; without it test_cuda_binary.py is the proof."""
    compile_with_nvcc("aps_kernels.cu", tmp_path / "kernels.cubin", *OPTIONS, "-cubin")


def test_kernels_have_no_undefined_behaviour() -> None:
    """UBSan ends the process where there is some: shifts, overflow, null, alignment."""
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/single']\n"
        "import cuda_standin, numpy as np\n"
        "compiled = cuda_standin.compile_for_host\n"
        "flags = ('-fsanitize=undefined', '-fsanitize-undefined-trap-on-error')\n"
        "cuda_standin.compile_for_host = lambda code, options: compiled(code, options, flags)\n"
        "import test_cuda_kernels as t\n"
        "for seed in (None, 5):\n"
        "    segs, arrays, length = t.make_bucket(np.random.default_rng(11), 24)\n"
        "    t.run_all(t.Gpu(32, 9), segs, arrays, length, seed, 0, False)\n"
        "print('fine', cuda_standin.nvrtc.n_compiled)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": tempfile.mkdtemp()}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "fine 1\n"), done.stderr
