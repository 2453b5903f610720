"""The CUDA kernels of the activations' codec without a GPU: NVRTC and nvcc compile them, and g++ behind a stand-in for
CuPy gives the CPU's bytes.
"""

import ctypes
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import cuda_standin  # noqa: E402

from horovod_aps.activations import codec, cuda  # noqa: E402
from horovod_aps.kernels.cuda import source_folder  # noqa: E402

STREAM = 78


@pytest.fixture(scope="module")
def on_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cuda_standin)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
        cuda._kernel.cache_clear()
        cuda_standin.cuda.entered.clear()
        yield
        assert set(cuda_standin.cuda.entered) == {STREAM}
        cuda._kernel.cache_clear()


@pytest.mark.parametrize("dtype", list(codec.DTYPES), ids=str)
def test_streams_on_cuda_equal_cpu(on_device, dtype):
    """Oracle: the CPU library, itself tested against float64."""
    for n in (0, 1, 63, 65, 4097, 9000):
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(n, generator=generator).relu() + torch.randn(n, generator=generator) * (
            torch.arange(n) % 900 < 300
        )
        x[n // 2 : n // 2 + 1] = float("nan")
        for bound in (0.0, 1e-3, 0.1, 0.3, 4.0, 1e30):
            stream = codec.encode(x.to(dtype), bound)
            assert torch.equal(cuda.encode(x.to(dtype), bound), stream)
            whole = torch.int32 if dtype == torch.float32 else torch.int16
            expected = codec.decode(stream, n, dtype).view(whole)
            assert torch.equal(cuda.decode(stream, n, dtype).view(whole), expected)


def test_malformed_streams_are_refused_on_cuda(on_device):
    """The CPU's decoder says which; neither may accept what the other refuses."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).relu()
    stream = codec.encode(x, 0.05)
    generator = torch.Generator().manual_seed(1)
    verdicts = set()
    for _ in range(150):
        damaged = stream.clone()
        for _ in range(2):
            damaged[int(torch.randint(0, len(stream), (), generator=generator))] ^= 1 << int(
                torch.randint(0, 8, (), generator=generator)
            )
        outcomes = []
        for decode in (codec.decode, cuda.decode):
            try:
                outcomes.append(decode(damaged, 5000, torch.float32).view(torch.uint8).tolist())
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        verdicts.add(isinstance(outcomes[0], str))
    assert verdicts == {True, False}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_source_compiles_with_nvrtc(architecture):
    """Oracle: NVIDIA's run-time compiler, with the options that the launcher passes to CuPy."""
    spec = find_spec("nvidia.cuda_nvrtc")
    assert spec is not None and spec.submodule_search_locations, "pip install -r requirements.txt"
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libnvrtc.so*"))))
    program = ctypes.c_void_p()
    code = (source_folder() / "aps_activations.cu").read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), code, b"aps_activations.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", f"-I{source_folder()}", *cuda.OPTIONS]
    table = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = library.nvrtcCompileProgram(program, len(options), table)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
def test_source_compiles_with_nvcc(tmp_path):
    source = source_folder() / "aps_activations.cu"
    command = ["nvcc", "-arch=sm_80", "--fmad=false", "-c", str(source), "-o", str(tmp_path / "kernels.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
