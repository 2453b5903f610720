"""`horovod-aps doctor`: checks an installation and, under a launcher, the cluster; a red line comes with its remedy.

horovod-aps doctor                      this machine, Horovod on one rank, an exchange among emulated ranks
horovodrun -np 2 horovod-aps doctor     all ranks, with a real exchange over the transport in use
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from horovod_aps import __version__, config, kernels
from horovod_aps.frontends import idle
from horovod_aps.transports.mpi import takes_device_memory

GREEN, YELLOW, RED = "ok", "note", "FAIL"
REBUILD = (
    "reinstall Horovod for the frameworks that are here now: make setup, or HOROVOD_WITH_PYTORCH=1 (or "
    "HOROVOD_WITH_TENSORFLOW=1) pip install --no-cache-dir --force-reinstall --no-deps horovod==0.28.1"
)
REPORT = "please report this with the lines above"
REMEDIES = {  # for what a check did not foresee; by the name of its function
    "versions": "reinstall: pip install .",
    "environment": "unset the variables of this package",
    "kernels": "rebuild the CPU library: pip install -e . --no-build-isolation",
    "gpu": "see that nvidia-smi works, and that CuPy is the one for your CUDA version; without GPUs: "
    "CUDA_VISIBLE_DEVICES=",
    "launchers": "apt-get install openmpi-bin",
    "local exchange": REPORT,
    "import": REBUILD,
    "init": "start with the launcher of the MPI that Horovod was built with, or with horovodrun --gloo; "
    "horovodrun --check-build shows what it was built with",
    "horovod": REBUILD,
    "exchange": "try the other way to start (mpirun, horovodrun --gloo); HOROVOD_APS_LOG=debug prints every phase",
}
TESTED = {"torch": "2.13", "tensorflow": "2.21", "horovod": "0.28"}
N_VALUES = 1000
HOROVODS_CHOICES = {"HOROVOD_CONTROLLER": ("mpi", "gloo"), "HOROVOD_CPU_OPERATIONS": ("mpi", "gloo", "ccl")}
HOROVODS_NUMBERS = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CACHE_CAPACITY")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    topic: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"[{self.level:^4}] {self.topic}: {self.text}"
        return f"{line}\n       -> {self.remedy}" if self.remedy else line


def installed(*names: str) -> str | None:
    """Version of the first of these packages that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


# ---- One function per topic; each yields findings -----------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    """Python, NumPy and the frameworks, against what the project is tested with."""
    yield Finding(
        GREEN,
        "versions",
        f"horovod_aps {__version__}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, {platform.system()} {platform.machine()}",
    )
    found = {
        "torch": installed("torch"),
        "tensorflow": installed("tensorflow", "tensorflow-cpu"),
        "horovod": installed("horovod"),
    }
    if found["horovod"] is None:
        yield Finding(
            RED,
            "horovod",
            "is not installed",
            "make setup builds it; elsewhere: HOROVOD_WITH_PYTORCH=1 pip install horovod==0.28.1",
        )
    if found["torch"] is None and found["tensorflow"] is None:
        yield Finding(RED, "frameworks", "neither PyTorch nor TensorFlow is installed", "pip install torch")
    for name, text in found.items():
        if text is None:
            continue
        if text.startswith(TESTED[name] + "."):
            yield Finding(GREEN, name, text)
        else:
            yield Finding(
                YELLOW,
                name,
                f"{text}; the project is tested with {TESTED[name]}",
                "if something goes wrong, try that version first",
            )
    keras = installed("keras")
    if found["tensorflow"] and keras and keras.startswith("3") and os.environ.get("TF_USE_LEGACY_KERAS") != "1":
        yield Finding(
            YELLOW,
            "keras",
            f"{keras}: Horovod's own DistributedOptimizer never all-reduces with Keras 3",
            "use horovod_aps.keras.DistributedOptimizer, or TF_USE_LEGACY_KERAS=1 with tf-keras",
        )


def wrong_variables() -> dict[str, str]:
    """What is wrong with the variables of this package and with those of Horovod's that end or mislead it."""
    wrong = {}
    for read in (config.num_threads, config.vectors, config.log_level, config.timeline_file):
        try:
            read()
        except ValueError as error:
            wrong[str(error).split()[0]] = str(error)
    for name, known in HOROVODS_CHOICES.items():
        if os.environ.get(name, known[0]).lower() not in known:
            wrong[name] = f"{name} must be one of {', '.join(known)}, got {os.environ[name]!r}; Horovod ends with it"
    for name in HOROVODS_NUMBERS:
        try:
            float(os.environ.get(name, "0"))
        except ValueError:
            wrong[name] = f"{name} must be a number, got {os.environ[name]!r}; Horovod takes it for 0"
    return wrong


def check_environment() -> Iterator[Finding]:
    """HOROVOD_APS_* variables, and some of Horovod's: known, and with values that make sense."""
    given = config.given()
    for name in given:
        if name not in config.VARIABLES:
            yield Finding(
                RED,
                "environment",
                f"{name} is not a variable of horovod_aps",
                f"unset it, or use one of {', '.join(sorted(config.VARIABLES))}",
            )
    for name, text in wrong_variables().items():
        yield Finding(RED, "environment", text, f"unset {name} or correct it; the other checks go on without it")
    yield Finding(GREEN, "environment", ", ".join(map("=".join, given.items())) or "defaults")


def check_kernels() -> Iterator[Finding]:
    """The CPU library: loads, its instruction set, and that 1000 values survive a round trip in (8, 23)."""
    library = kernels.library()
    vectors = int(library.aps_use_vectors(config.vectors()))
    openmp = bool(library.aps_has_openmp())
    yield Finding(
        GREEN,
        "kernels",
        f"CPU library with {config.VECTORS[vectors]}, "
        f"{config.num_threads()} thread(s), OpenMP {'yes' if openmp else 'no'}",
    )
    if not vectors and config.vectors():
        yield Finding(YELLOW, "kernels", "this processor has no AVX2: kernels are some times slower")
    if not openmp and config.num_threads() > 1:
        yield Finding(
            RED,
            "kernels",
            "HOROVOD_APS_NUM_THREADS is set, but the library was built without OpenMP",
            "install a compiler with OpenMP and type: pip install -e . --no-build-isolation",
        )
    values = np.random.default_rng(0).standard_normal(N_VALUES).astype(np.float32)
    if not np.array_equal(kernels.quantize_array(values, kernels.FLOAT32, 8, 23, True), values):
        yield Finding(RED, "kernels", "float32 values do not survive (8, 23)", "rebuild: pip install -e .")


def check_gpu() -> Iterator[Finding]:
    """GPUs, and CuPy for them."""
    devices = 0
    if installed("torch"):
        devices = importlib.import_module("torch").cuda.device_count()
    cupy = installed("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")
    if not devices:
        yield Finding(GREEN, "gpu", "none seen by PyTorch; gradients on the CPU are all that is needed here")
    elif cupy is None:
        remedy = 'pip install "horovod_aps[cuda12]", or [cuda13] if nvidia-smi shows CUDA 13'
        yield Finding(RED, "gpu", f"{devices} GPU(s), but no CuPy", remedy)
    else:
        from horovod_aps.kernels.cuda import CudaKernels
        from horovod_aps.tools.gpu_check import compare

        one = CudaKernels()
        with one.at_work():  # compiles and loads
            one.function("scan_kernel")
        wrong = [line for line in compare(one) if "DIFFERS" in line]
        if wrong:
            yield Finding(RED, "gpu", f"kernels do not give the CPU's bits: {'; '.join(wrong)}", REPORT)
        else:
            yield Finding(GREEN, "gpu", f"{devices} GPU(s), CuPy {cupy}, kernels compiled and as on the CPU")
        yield Finding(GREEN, "gpu", f"packed bytes leave it {way_out()}, and so does float32 inside a host")


def way_out() -> str:
    """How packed bytes leave a GPU here, as far as one rank can tell."""
    otherwise = "by MPI" if takes_device_memory() else "through pinned host memory"
    ways = {}
    for framework, name in (("torch", "PyTorch"), ("tensorflow", "TensorFlow")):
        if installed(framework, f"{framework}-cpu") and installed("horovod"):
            with suppress(ImportError):  # Horovod may not have been built for it
                is_nccl = importlib.import_module(f"horovod_aps.{framework}.operations").may_carry()
                ways[name] = "by NCCL, in Horovod's own operations" if is_nccl else otherwise
    if len(set(ways.values())) > 1:
        return " and ".join(f"{way} ({name})" for name, way in ways.items())
    return next(iter(ways.values()), otherwise)


def check_launchers() -> Iterator[Finding]:
    """What could start several ranks here."""
    found = [
        name
        for name in ("mpirun", "horovodrun")
        if shutil.which(name) or os.path.exists(os.path.join(os.path.dirname(sys.executable), name))
    ]
    if found:
        yield Finding(GREEN, "launchers", ", ".join(found))
    else:
        yield Finding(RED, "launchers", "neither mpirun nor horovodrun is on PATH", "apt-get install openmpi-bin")


def check_local_exchange() -> Iterator[Finding]:
    """Three emulated ranks in this process."""
    from horovod_aps.engine.exchange import local_allreduce
    from horovod_aps.engine.layer import Layer
    from horovod_aps.options import Options

    inputs = [_values(rank) for rank in range(3)]
    outputs = [np.empty_like(x) for x in inputs]
    layers = [
        [Layer("doctor", x.shape, 0, x.ctypes.data, out.ctypes.data, 1 / 3, (x, out))]
        for x, out in zip(inputs, outputs)
    ]
    local_allreduce(layers, Options(4, 3), kernels.CpuKernels())
    same = all(np.array_equal(out, outputs[0]) for out in outputs)
    yield _judge("local exchange", outputs[0], 3, same, "3 emulated ranks")


# ---- Horovod, with or without a launcher ----------------------------------------------------------------------


def check_import(modules: list[Any]) -> Iterator[Finding]:
    """Horovod's module for each framework that is installed; what can be imported goes into `modules`."""
    failures = []
    for name, packages in (("torch", ("torch",)), ("tensorflow", ("tensorflow", "tensorflow-cpu"))):
        if installed(*packages) is None:
            continue
        if modules and config.launcher_rank() is not None:
            break  # one is enough to exchange something
        try:
            modules.append(importlib.import_module(f"horovod.{name}"))
        except Exception as error:  # a library built for another version fails in many ways
            failures.append((name, f"{type(error).__name__}: {error}"))
    for name, text in failures:
        # Horovod may be built for one framework on purpose.
        level = YELLOW if modules and "has not been built" in text else RED
        yield Finding(level, "import", f"horovod.{name} cannot be imported: {text}", REBUILD)
    if modules:
        yield Finding(GREEN, "import", ", ".join(module.__name__ for module in modules))


def check_init(hvd: Any) -> Iterator[Finding]:
    """`hvd.init()`, and that it found those whom the launcher started."""
    idle.choose()
    hvd.init()
    started = config.launcher_size()
    if started is not None and int(started) != hvd.size():
        yield Finding(
            RED,
            "init",
            f"the launcher started {started} processes, but Horovod sees {hvd.size()}",
            "the launcher and Horovod must use the same MPI or PMI: see horovodrun --check-build, "
            "mpirun --version, srun --mpi=list",
        )


def check_horovod(hvd: Any) -> Iterator[Finding]:
    """What Horovod was built with, and what it uses now."""
    built = [
        name
        for name in ("mpi", "gloo", "nccl", "ccl", "ddl", "cuda", "rocm")
        if hasattr(hvd, f"{name}_built") and getattr(hvd, f"{name}_built")()
    ]
    yield Finding(
        GREEN,
        "horovod",
        f"rank {hvd.rank()} of {hvd.size()}, built with {', '.join(built)}, "
        f"runs on {'MPI' if hvd.mpi_enabled() else 'Gloo'}",
    )
    if hvd.mpi_enabled() and idle.describe():
        yield Finding(GREEN, "MPI waits", idle.describe())
    if not hvd.mpi_enabled():
        yield Finding(GREEN, "transport", "connections of our own (Gloo)")
    elif not hvd.mpi_threads_supported():
        yield Finding(
            YELLOW,
            "transport",
            "connections of our own: MPI runs without thread support",
            "unset HOROVOD_MPI_THREADS_DISABLE, and call hvd.init() before anything else starts MPI",
        )
    elif installed("mpi4py") is None:
        yield Finding(
            YELLOW,
            "transport",
            "connections of our own: no mpi4py, which lets exchanges overlap",
            "pip install mpi4py==4.1.2",
        )
    else:
        from horovod_aps.frontends.world import mpi_usable

        basics = importlib.import_module(f"{hvd.__name__}.mpi_ops")._basics
        if mpi_usable(basics):
            yield Finding(GREEN, "transport", f"MPI directly, by mpi4py {installed('mpi4py')}")
        else:
            yield Finding(
                YELLOW,
                "transport",
                "connections of our own: mpi4py sees another MPI than Horovod",
                "build mpi4py against the MPI that Horovod uses: pip install --no-binary mpi4py mpi4py",
            )


def check_exchange(hvd: Any) -> Iterator[Finding]:
    """A real exchange with all ranks."""
    mine = _values(hvd.rank())
    if hvd.__name__ == "horovod.torch":
        torch, aps = importlib.import_module("torch"), importlib.import_module("horovod_aps.torch")
        compressor = aps.APSCompressor(4, 3)
        result = hvd.allreduce(torch.from_numpy(mine), name="horovod_aps.doctor", compression=compressor).numpy()
    else:
        tf, aps = importlib.import_module("tensorflow"), importlib.import_module("horovod_aps.tensorflow")
        compressor = aps.APSCompressor(4, 3)
        result = hvd.allreduce(tf.constant(mine), name="horovod_aps.doctor", compression=compressor).numpy()
    if hvd.size() > 1:
        yield Finding(GREEN, "hierarchy", compressor.stats()["hierarchy"] or "not known")
    everyone = gather_lines(hvd, result.tobytes().hex(), "horovod_aps.doctor.replicas")
    yield _judge("exchange", result, hvd.size(), len(set(everyone)) == 1, f"{hvd.size()} ranks")


def gather_lines(hvd: Any, text: str, name: str) -> list[str]:
    """The line of every rank. Plain bytes: Horovod's allgather_object would unpickle what others send."""
    raw = np.frombuffer(f"{text}\n".encode(), np.uint8)
    if hvd.__name__ == "horovod.torch":
        tensor = importlib.import_module("torch").from_numpy(raw.copy())
    else:
        tensor = importlib.import_module("tensorflow").constant(raw)
    return hvd.allgather(tensor, name=name).numpy().tobytes().decode().splitlines()


def _values(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(N_VALUES).astype(np.float32)


def _judge(topic: str, result: np.ndarray, n_ranks: int, same: bool, where: str) -> Finding:
    """Compare a reduced average with the exact one; (4, 3) keeps normal values to about 4 %."""
    exact = np.mean([_values(rank).astype(np.float64) for rank in range(n_ranks)], axis=0)
    error = float(np.linalg.norm(result - exact) / np.linalg.norm(exact))
    if not same:
        return Finding(RED, topic, "ranks got different results", REPORT)
    if not error < 0.1:
        return Finding(RED, topic, f"wrong result, relative error {error:.3g}", REPORT)
    return Finding(GREEN, topic, f"{where}, relative error {100 * error:.1f} % in (4, 3), the same bits on all")


# ---- The report -----------------------------------------------------------------------------------------------


def examine(checks: list[Callable[..., Iterator[Finding]]], *args: Any) -> list[Finding]:
    """All findings of checks that take `args`; a check that fails is one."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check(*args))
        except Exception as error:  # any failure of any part is what people call the doctor for
            topic = check.__name__.removeprefix("check_").replace("_", " ")
            remedy = "unset it or correct it" if str(error).startswith("HOROVOD_") else REMEDIES[topic]
            findings.append(Finding(RED, topic, f"{type(error).__name__}: {error}", remedy))
    return findings


class _Watchdog:
    """Ends a rank that waits for ever, as for a peer that is not there, with a line that says so."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._expire, [seconds])
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *args: Any) -> None:
        self._timer.cancel()

    @staticmethod
    def _expire(seconds: float) -> None:
        rank = config.launcher_rank()
        print(
            Finding(
                RED,
                "cluster",
                f"rank {rank} waited {seconds:.0f} s for the others",
                "check that all ranks run this command, and that firewalls let their ports through "
                "(horovodrun --network-interfaces, mpirun --mca btl_tcp_if_include)",
            ),
            flush=True,
        )
        os._exit(1)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if anything on any rank is red."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    launched = config.launcher_rank() is not None
    findings = examine([check_versions, check_environment])
    for name in wrong_variables():  # one fault, one red line: what follows is about the rest
        del os.environ[name]
    findings += examine([check_kernels, check_gpu, check_launchers, check_local_exchange])
    if not launched:
        print(*findings, sep="\n", flush=True)  # an MPI that cannot start ends the process
    modules: list[Any] = []
    with _Watchdog(args.timeout):
        horovod = examine([check_import], modules)
        if modules:
            horovod += examine([check_init], modules[0])
        usable = not _red(horovod)
        if usable:
            horovod += examine([check_horovod, check_exchange] if launched else [check_horovod], modules[0])
        findings += horovod
        if not launched:
            print(*horovod, sep="\n")
            print("To check a cluster: horovodrun -np 2 horovod-aps doctor (or mpirun -np 2 horovod-aps doctor)")
            return int(_red(findings))
        if not usable:  # cannot tell the others; the launcher ends them
            print(f"rank {config.launcher_rank()}:", *findings, sep="\n", flush=True)
            return 1
        hvd = modules[0]
        text = json.dumps([asdict(finding) for finding in findings])
        lines = gather_lines(hvd, text, "horovod_aps.doctor.reports")
        reports = [[Finding(**entry) for entry in json.loads(line)] for line in lines]
    if hvd.rank() == 0:
        print(_table(reports), flush=True)
    return int(any(map(_red, reports)))


def _red(findings: list[Finding]) -> bool:
    return any(finding.level == RED for finding in findings)


def _table(reports: list[list[Finding]]) -> str:
    """Rank 0's findings, then what other ranks have to say that rank 0 has not."""
    lines = [str(finding) for finding in reports[0]]
    for rank, report in enumerate(reports[1:], start=1):
        for finding in report:
            own = f"rank {rank} of" in finding.text
            if finding not in reports[0] and not own:
                lines.append(f"rank {rank}: {finding}")
    n_red = sum(finding.level == RED for report in reports for finding in report)
    lines.append(f"{len(reports)} ranks, {n_red} failures" if n_red else f"{len(reports)} ranks, all is well")
    return "\n".join(lines)


def parse_seconds(text: str) -> float:
    """A positive number that a timer takes."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return value


def add_parser(subparsers: Any) -> None:
    """Add the `doctor` subcommand."""
    parser = subparsers.add_parser("doctor", help="check this installation and, under a launcher, the cluster")
    parser.add_argument(
        "--timeout", type=parse_seconds, default=60.0, help="seconds to wait for other ranks (default: 60)"
    )
    parser.set_defaults(run=run)
