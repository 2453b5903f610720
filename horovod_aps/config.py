"""The HOROVOD_APS_* environment variables, read in this one place.

HOROVOD_APS_NUM_THREADS   threads of one CPU kernel call, default 1 (a host runs one rank per core)
HOROVOD_APS_AVX2          0 keeps the CPU kernels to the baseline instruction set, default 1
HOROVOD_APS_AVX512        0 keeps them to AVX2, default 1
HOROVOD_APS_LOG           debug, info, warning (default) or error; debug prints every phase of every exchange
HOROVOD_APS_TIMELINE      trace.json makes every rank write its phases to trace.rank<r>.json, see `timeline`
HOROVOD_APS_HOST          the host that this rank counts to in a two-level exchange, default by the machine's name
HOROVOD_APS_GPU_WAY       how packed bytes leave a GPU: auto (default: NCCL, else MPI, else pinned memory), mpi, pinned
HOROVOD_APS_STUDY_METHOD  set by `horovod-aps study` for the script that it runs: what `study.compression()` gives
"""

import os
import re
from pathlib import Path

VARIABLES = {
    "HOROVOD_APS_NUM_THREADS",
    "HOROVOD_APS_AVX2",
    "HOROVOD_APS_AVX512",
    "HOROVOD_APS_LOG",
    "HOROVOD_APS_TIMELINE",
    "HOROVOD_APS_HOST",
    "HOROVOD_APS_GPU_WAY",
    "HOROVOD_APS_STUDY_METHOD",
    "HOROVOD_APS_BUILD_CACHE",
    "HOROVOD_APS_TEST_LOG",
}  # the last two are for scripts/setup.sh and tests
# Rank and size as launchers set them. The innermost comes first: mpirun and horovodrun may run inside an srun. Slurm
# sets SLURM_PROCID, and SLURM_NTASKS for a job's size, in an sbatch script too, where nothing was launched; it is
# SLURM_STEP_NUM_TASKS that only srun sets. A bare PMIX_RANK is from a launcher that tells no size.
LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("PMIX_RANK",),
)
VECTORS = ("baseline instructions", "AVX2", "AVX-512")  # by their number in aps_use_vectors
GPU_WAYS = ("auto", "mpi", "pinned")
LOG_LEVELS = ("debug", "info", "warning", "error")


def given() -> dict[str, str]:
    """The HOROVOD_APS_* variables that are set, known or not."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("HOROVOD_APS_")}


def env_int(name: str, default: int, low: int, high: int) -> int:
    """Return an integer environment variable; ValueError names the variable, its range and what was given."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer in {low}..{high}, got {text!r}") from None
    if not low <= value <= high:
        raise ValueError(f"{name} must be in {low}..{high}, got {value}")
    return value


def study_method(default: str) -> str:
    """The method that a study is trying (HOROVOD_APS_STUDY_METHOD)."""
    return os.environ.get("HOROVOD_APS_STUDY_METHOD", "").strip() or default


def num_threads() -> int:
    """Threads of one CPU kernel call (HOROVOD_APS_NUM_THREADS)."""
    return env_int("HOROVOD_APS_NUM_THREADS", 1, 1, 1024)


def vectors() -> int:
    """The most of VECTORS that the CPU kernels may use (HOROVOD_APS_AVX2, HOROVOD_APS_AVX512)."""
    avx2, avx512 = (env_int(name, 1, 0, 1) for name in ("HOROVOD_APS_AVX2", "HOROVOD_APS_AVX512"))
    return avx2 + avx2 * avx512


def log_level() -> str:
    """The least level that is printed (HOROVOD_APS_LOG)."""
    level = os.environ.get("HOROVOD_APS_LOG", "").strip().lower() or "warning"
    if level not in LOG_LEVELS:
        raise ValueError(f"HOROVOD_APS_LOG must be one of {', '.join(LOG_LEVELS)}, got {level!r}")
    return level


def timeline_file() -> Path | None:
    """Where this rank writes its phases (HOROVOD_APS_TIMELINE), or None."""
    text = os.environ.get("HOROVOD_APS_TIMELINE", "").strip()
    if not text:
        return None
    path = Path(text)
    if not path.parent.is_dir():
        raise ValueError(f"HOROVOD_APS_TIMELINE must be a file in a folder that exists, got {text!r}")
    return path.with_name(f"{path.stem}.rank{launcher_rank() or 0}{path.suffix or '.json'}")


def host_name() -> str:
    """The host that this rank counts to (HOROVOD_APS_HOST), or an empty text."""
    return os.environ.get("HOROVOD_APS_HOST", "").strip()


def gpu_way() -> str:
    """The best way for packed bytes to leave a GPU that may be taken (HOROVOD_APS_GPU_WAY)."""
    way = os.environ.get("HOROVOD_APS_GPU_WAY", "").strip().lower() or "auto"
    if way not in GPU_WAYS:
        raise ValueError(f"HOROVOD_APS_GPU_WAY must be one of {', '.join(GPU_WAYS)}, got {way!r}")
    return way


def completes_early() -> bool:
    """Whether Horovod was told to call operations on GPUs complete when they are only queued."""
    return os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "").strip() not in ("", "0")


def allows_operations() -> bool:
    """Whether Horovod's own operations may carry packed bytes of a GPU, if it has them there.

    Not if Horovod says that an operation is over before it is.
    """
    return gpu_way() == "auto" and not completes_early()


def network_interfaces() -> list[str]:
    """The interfaces that Horovod's Gloo, or else PyTorch's, was told to use."""
    for name in ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"):
        if text := os.environ.get(name, "").strip():
            return [part.strip() for part in text.split(",")]
    return []


def meeting_address() -> str:
    """The host at which ranks meet: of Horovod's Gloo or of torch.distributed; empty if nobody says."""
    horovod = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "").strip()
    return horovod or os.environ.get("MASTER_ADDR", "").strip()


def is_on_one_host() -> bool:
    """Whether the launcher says that all ranks are on this host, or that the meeting's address is right for it."""
    if os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "").strip():
        return True
    size = os.environ.get("WORLD_SIZE", "")
    return bool(size) and size == os.environ.get("LOCAL_WORLD_SIZE")


def mpi_size() -> int:
    """How many ranks MPI's launcher has started directly; 0 if it was not MPI's, or torchrun came in between."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "0")) if "PMIX_RANK" in os.environ else 0


def is_elastic() -> bool:
    """Whether Horovod's launcher has started an elastic job, which goes on after errors with those that are left."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def local_size() -> int:
    """How many ranks Open MPI's launcher has started on this host, or Slurm's by `srun --mpi=pmix`; 0 if neither."""
    found = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if found.isdecimal():
        return int(found)
    return _slurm_tasks() if "PMIX_RANK" in os.environ and _is_slurm_step() else 0


def slurm_cores() -> int:
    """The cores of this host that Slurm has given to the step whose ranks it has started; 0 if it has not."""
    found = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(found) if found.isdecimal() and _is_slurm_step() else 0


def _is_slurm_step() -> bool:
    """Whether srun has started the ranks themselves, and not what has."""
    return "SLURM_STEP_NUM_TASKS" in os.environ and "OMPI_COMM_WORLD_LOCAL_SIZE" not in os.environ


def _slurm_tasks() -> int:
    """Tasks of this step on this node, from a list by node such as "4(x2),3"; 0 if that cannot be read."""
    node, counts = os.environ.get("SLURM_NODEID", ""), os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in counts.split(",")]
    known = [part for part in parts if part]
    if node.isdecimal() and len(known) == len(parts):
        n_nodes = 0  # that the parts up to here tell of
        for part in known:
            n_nodes += int(part[2] or 1)
            if int(node) < n_nodes:
                return int(part[1])
    usual = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(usual) if usual.isdecimal() else 0


def launcher_rank() -> str | None:
    """This process's rank as its launcher tells it, known before `hvd.init()`; None without a launcher."""
    return _launched()[0]


def launcher_size() -> str | None:
    """How many processes the launcher started; None without a launcher, or if it does not tell."""
    return _launched()[1]


def _launched() -> tuple[str | None, str | None]:
    """Rank and size from one launcher, never mixed: the first of LAUNCHERS that set its variables."""
    for names in LAUNCHERS:
        values = [os.environ.get(name, "") for name in names]
        if all(map(str.isdecimal, values)):
            return (values[0], values[1] if len(values) > 1 else None)
    return None, None
