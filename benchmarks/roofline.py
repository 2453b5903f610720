"""What the compilers make of the CUDA kernels, and what that predicts; no GPU is needed, and nothing is measured.

    python benchmarks/roofline.py          the table of docs/performance.md

Registers, stack and spills are NVRTC's own figures. Instructions per element are counted in the disassembly of probes:
the kernels' own functions in a loop over whole groups of 8, as nearly all groups are. A kernel is predicted to be held
up by memory or by the issue of instructions, whichever takes longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ARCHITECTURES = ("70", "80", "86", "90", "100")
DISASSEMBLED = ("80", "86", "90", "100")  # ptxas and nvdisasm of CUDA 13 have forgotten sm_70; NVRTC 12 has not
TOOLS = ("ptxas", "nvdisasm")
BLOCK = 256
PROBES = """
#include "aps_kernels.cu"
#define PROBE(name, ...)                                                                                     \\
    extern "C" __global__ void name(uint64_t data, uint64_t target, const uint64_t* inputs, uint8_t* message, \\
                                    ull* top, int exponent, float factor, int64_t n) {                        \\
        ApsSegment s = {};                                                                                   \\
        s.data = data, s.n = n, s.exponent = exponent, s.factor = factor;                                    \\
        s.exp_bits = 4, s.man_bits = 3, s.flags = 1, s.dtype = APS_F32;                                      \\
        __builtin_assume(data % 16 == 0);                                                                    \\
        __builtin_assume(target % 16 == 0);                                                                  \\
        __builtin_assume((uint64_t)message % 16 == 0);                                                       \\
        ApsSegment kept = s;                                                                                 \\
        kept.data = target;                                                                                  \\
        const FloatTile::Encoder encoder(s, exponent, APS_NEAREST, 0);                                       \\
        const FloatTile::Summer summer(s, exponent);                                                         \\
        uint32_t bits[8], codes[8], best = 0;                                                                \\
        float acc[8];                                                                                        \\
        (void)bits, (void)codes, (void)acc, (void)encoder, (void)summer, (void)kept;                         \\
        _Pragma("unroll 1") for (int64_t i = 8 * (int64_t)threadIdx.x; i < n; i += 8 * (int64_t)blockDim.x) { \\
            __VA_ARGS__                                                                                      \\
        }                                                                                                    \\
        if (best) raise_to(top, best);                                                                       \\
    }
#define SUM(count_in)                                                                       \\
    load_codes((const uint8_t*)(message), i, 8, 8, codes);                                  \\
    APS_UNROLL acc[k] = summer.value(codes[k]);                                             \\
    _Pragma("unroll") for (int j = 1; j < count_in; ++j) {                                  \\
        load_codes((const uint8_t*)(message + j * 4096), i, 8, 8, codes);                   \\
        APS_UNROLL acc[k] = acc[k] + summer.value(codes[k]);                                \\
    }
PROBE(probe_scan, load_group(s, i, 8, bits);
      APS_UNROLL best = (bits[k] & 0x7fffffffu) > best ? bits[k] & 0x7fffffffu : best;)
PROBE(probe_encode, load_floats(s, i, 8, bits); APS_UNROLL bits[k] = encoder.code(bits[k], i + k);
      store_codes(message, i, 8, 8, bits);)
PROBE(probe_decode, SUM(2) APS_UNROLL bits[k] = aps_bits(acc[k] * s.factor); store_floats(s, i, 8, bits);)
PROBE(probe_reduce_scan, SUM(8)
      APS_UNROLL { const uint32_t b = aps_bits(acc[k]) & 0x7fffffffu; best = b > best ? b : best; })
PROBE(probe_reduce, SUM(8) APS_UNROLL codes[k] = encoder.code(aps_bits(acc[k]), i + k);
      store_codes((uint8_t*)target, i, 8, 8, codes);)
PROBE(probe_residual, load_group(s, i, 8, bits); load_codes(message, i, 8, 8, codes);
      APS_UNROLL bits[k] = aps_quiet(aps_bits(aps_float(bits[k]) - summer.value(codes[k])));
      store_floats(s, i, 8, bits);)
PROBE(probe_add, load_floats(s, i, 8, bits); load_group(kept, i, 8, codes);
      APS_UNROLL codes[k] = aps_quiet(aps_bits(aps_float(codes[k]) + aps_float(bits[k])));
      store_floats(kept, i, 8, codes);)
"""
# bytes of device memory per element in (4,3): decode of 2 messages, reduce of 8
BYTES = {"scan": 4, "encode": 5, "decode": 6, "reduce_scan": 8, "reduce": 9, "residual": 9, "add": 12}
# device: architecture, multiprocessors, GHz, TB/s, threads per multiprocessor; from NVIDIA's data sheets
DEVICES = {
    "A100 40GB": ("80", 108, 1.41, 1.555, 2048),
    "H100 SXM": ("90", 132, 1.76, 3.35, 2048),
    "RTX 4090": ("86", 128, 2.52, 1.008, 1536),  # sm_89, which runs and issues as sm_86
}
ISSUED = 4 * 32  # thread instructions that a multiprocessor issues per cycle


def _folder() -> Path:
    from horovod_aps.kernels.nvrtc import source_folder

    return source_folder()


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a function finds, which takes long, in a folder of the user's, by sources and tools."""

    @cache
    @wraps(function)
    def found(*arguments: Any, **named: Any) -> Any:
        from cupy_backends.cuda.libs import nvrtc

        from horovod_aps.kernels.nvrtc import OPTIONS, cache_folder

        folder, parts = (
            cache_folder(),
            [function.__name__, repr((arguments, named)), repr(OPTIONS), repr(nvrtc.getVersion())],
        )
        parts += [path.read_text() for path in (Path(__file__), *sorted(_folder().glob("*.[hc]*")))]
        parts += [f"{tool} {Path(tool).stat().st_mtime}" for name in TOOLS if (tool := _tool(name))]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        file = None if folder is None else folder / f"roofline-{key}.json"
        if file is not None and file.exists():
            return json.loads(file.read_text())
        result = function(*arguments, **named)
        if file is not None:
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as made:
                json.dump(result, made)
            os.replace(made.name, file)
        return result

    return found


def _compile(code: str, options: list[str], ptx: bool = False) -> tuple[bytes, str]:
    from cupy_backends.cuda.libs import nvrtc

    from horovod_aps.kernels.nvrtc import OPTIONS

    program = nvrtc.createProgram(code, "kernels.cu", [], [])
    nvrtc.compileProgram(program, [*OPTIONS, f"-I{_folder()}", *options])
    made = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
    log = nvrtc.getProgramLog(program)
    nvrtc.destroyProgram(program)
    return made, log


@_kept
def resources(architecture: str) -> dict[str, dict[str, int]]:
    """Registers, stack and spilled bytes of every kernel, as NVRTC compiles it for an architecture."""
    code = (_folder() / "aps_kernels.cu").read_text()
    _, log = _compile(code, [f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"])
    found: dict[str, dict[str, int]] = {}
    pattern = (
        r"properties for (\w+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    for name, stack, stores, loads, registers in re.findall(pattern, log, re.S):
        found[name] = {"stack": int(stack), "spilled": int(stores) + int(loads), "registers": int(registers)}
    return found


def _tool(name: str) -> str | None:
    spec = find_spec("nvidia.cu13")
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        path = Path(folder) / "bin" / name
        if path.exists():
            path.chmod(path.stat().st_mode | 0o100)
            return str(path)
    return shutil.which(name)


@_kept
def disassembly(architecture: str, probes: bool = False) -> dict[str, list[str]]:
    """Lines of machine code of every kernel, or of the probes; empty without ptxas and nvdisasm."""
    ptxas, nvdisasm = _tool("ptxas"), _tool("nvdisasm")
    if ptxas is None or nvdisasm is None:
        return {}
    code = PROBES if probes else (_folder() / "aps_kernels.cu").read_text()
    ptx, _ = _compile(code, [f"--gpu-architecture=compute_{architecture}"], ptx=True)
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_bytes(ptx.rstrip(b"\0"))
        subprocess.run([ptxas, f"-arch=sm_{architecture}", str(source), "-o", str(binary)], check=True)
        text = subprocess.run([nvdisasm, "-c", str(binary)], check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if head := re.match(r"\.text\.(\w+):", line):
            found[(name := head[1])] = []
        elif found and (line.startswith(".L") or re.match(r"\s+/\*[0-9a-f]+\*/\s+\S", line)):
            found[name].append(line.strip())
    return found


@_kept
def ptx(architecture: str) -> dict[str, list[str]]:
    """Lines of every kernel in PTX, what comes before machine code; for what cannot be disassembled."""
    code = (_folder() / "aps_kernels.cu").read_text()
    text = _compile(code, [f"--gpu-architecture=compute_{architecture}"], ptx=True)[0].decode()
    parts = re.split(r"\.entry (\w+)\(", text)
    return {name: [line.strip() for line in body.splitlines()] for name, body in zip(parts[1::2], parts[2::2])}


def instructions_per_element(lines: list[str]) -> float:
    """Of the longest loop of a probe, whose turns take 8 elements each."""
    labels, best, n = {}, 0, 0
    for line in lines:
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = n
            continue
        n += 1
        target = re.search(r"BRA.*?`\((\.L\w+)\)", line)
        if target and target[1] in labels:
            best = max(best, n - labels[target[1]])
    return best / 8


def predict() -> list[dict[str, object]]:
    """Rows of the table: what each kernel takes on each device."""
    rows = []
    for name, n_bytes in BYTES.items():
        for device, (architecture, n_sms, ghz, bandwidth, threads) in DEVICES.items():
            registers = resources(architecture)[f"{name}_kernel"]["registers"]
            blocks = min(65536 // (-(-registers // 8) * 8 * BLOCK), threads // BLOCK)
            n_instructions = instructions_per_element(disassembly(architecture, probes=True)[f"probe_{name}"])
            by_memory = n_bytes / (bandwidth * 1e12)
            by_issue = n_instructions / (n_sms * ghz * 1e9 * ISSUED)
            rows.append(
                {
                    "kernel": name,
                    "device": device,
                    "registers": registers,
                    "occupancy": blocks * BLOCK / threads,
                    "instructions": n_instructions,
                    "bytes": n_bytes,
                    "share": by_memory / max(by_memory, by_issue),
                }
            )
    return rows


def main() -> int:
    if not disassembly("80", probes=True):
        print("roofline: no ptxas and nvdisasm here; make setup installs them", file=sys.stderr)
        return 1
    names = list(DEVICES)
    print(f"| kernel | bytes/element | instructions/element | registers | occupancy | {' | '.join(names)} |")
    print(f"| --- | ---: | ---: | ---: | ---: | {' | '.join('---:' for _ in names)} |")
    rows = predict()
    for name in BYTES:
        mine = [row for row in rows if row["kernel"] == name]
        first = mine[0]
        shares = " | ".join(f"{row['share']:.0%}" for row in mine)
        print(
            f"| {name} | {first['bytes']} | {first['instructions']:.1f} | {first['registers']} | "
            f"{first['occupancy']:.0%} | {shares} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
