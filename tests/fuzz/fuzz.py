"""Builds the fuzz targets with sanitizers and runs them for a while: `python tests/fuzz/fuzz.py --seconds 600`.

With clang it is coverage-guided (libFuzzer). Without it g++ builds the same target with a driver of its own, which
feeds it the same random inputs in every run. A finding is printed and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "cuda"
COMMON = ["-g", "-O1", "-std=c++17", "-fno-trapping-math", "-ffp-contract=off", "-fno-sanitize-recover=all"]
SANITIZERS = "address,undefined,float-cast-overflow"
SOURCES = ("fuzz_kernels.cpp", "fuzz_activations.cpp")
# What clang is told to use, by the processor's names.
AVX2 = {"avx2": "-mavx2", "f16c": "-mf16c", "bmi2": "-mbmi2"}
AVX512 = {f"avx512{name}": f"-mavx512{name.lstrip('_')}" for name in ("f", "bw", "vl", "dq", "vbmi", "_vbmi2")}
N_SEEDS = 200  # inputs to start from, long enough to describe whole tables


@dataclass
class Report:
    """How a run ended."""

    guided: bool
    finding: str
    n_inputs: int
    n_edges: int
    """Edges of the control flow that were covered; 0 if the run was not guided."""


def has(features: dict[str, str]) -> bool:
    """Whether the processor has all of these."""
    info = Path("/proc/cpuinfo")
    return info.exists() and set(features) <= set(info.read_text().split())


def guided_possible() -> bool:
    """Whether clang with libFuzzer is here, and the processor has what the AVX2 loops need."""
    return shutil.which("clang++") is not None and has(AVX2)


def build(folder: Path, guided: bool, kernels: Path = KERNELS, source: str = SOURCES[0], *flags: str) -> Path:
    """Compile a target with the kernel sources of `kernels`; CalledProcessError shows what the compiler said."""
    target = folder / f"{Path(source).stem}_{'guided' if guided else 'random'}"
    if guided:
        command = [
            "clang++",
            *COMMON,
            *AVX2.values(),
            *(AVX512.values() if has(AVX512) else ()),
            "-Wno-unknown-pragmas",
            "-Wno-unknown-warning-option",
            f"-fsanitize=fuzzer,{SANITIZERS}",
        ]
    else:
        command = ["g++", *COMMON, "-DAPS_FUZZ_DRIVER", f"-fsanitize={SANITIZERS}"]
    subprocess.run([*command, *flags, f"-I{kernels}", str(HERE / source), "-o", str(target)], check=True)
    return target


def run(target: Path, guided: bool, seconds: int, corpus: Path, seed: int = 1) -> Report:
    """Feed the target for `seconds`; stops at the first finding, whose input guided runs leave in `corpus`."""
    if guided:
        corpus.mkdir(exist_ok=True)
        rng = random.Random(seed)
        for i in range(N_SEEDS):
            (corpus / f"seed{i}").write_bytes(rng.randbytes(rng.randrange(20, 300)))
        command = [
            str(target),
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            "-max_len=512",
            "-len_control=0",
            "-timeout=20",
            "-print_final_stats=1",
            f"-artifact_prefix={corpus}/",
            str(corpus),
        ]
    else:
        command = [str(target), str(seconds), str(seed)]
    # Sanitizers and a preloaded library get into each other's way; nothing here needs one.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds + 120, env=environment
    )
    output = done.stdout + done.stderr
    finding = "" if done.returncode == 0 else output[-6000:]
    counted = re.search(r"number_of_executed_units: (\d+)|(\d+) inputs", output)
    n_inputs = int(counted[1] or counted[2]) if counted else 0
    edges = [int(found) for found in re.findall(r"cov: (\d+)", output)]
    return Report(guided, finding, n_inputs, max(edges, default=0))


def main() -> int:
    """Run from the command line; the corpus is kept from run to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("out/fuzz"), help="for binaries, inputs and findings")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    guided = guided_possible()
    found = False
    for source in SOURCES:
        corpus = args.folder / ("corpus" if source == SOURCES[0] else f"corpus_{Path(source).stem}")
        report = run(build(args.folder, guided, source=source), guided, args.seconds // 2, corpus, args.seed)
        print(f"{source}:", report.finding or f"{report.n_inputs} inputs, {report.n_edges} edges covered, no finding")
        found = found or bool(report.finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
