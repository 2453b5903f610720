"""The HOROVOD_APS_* environment variables, read in this one place.

HOROVOD_APS_NUM_THREADS   threads of one CPU kernel call, default 1 (a host runs one rank per core)
HOROVOD_APS_AVX2          0 keeps the CPU kernels to the baseline instruction set, default 1
"""

import os


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


def num_threads() -> int:
    """Threads of one CPU kernel call (HOROVOD_APS_NUM_THREADS)."""
    return env_int("HOROVOD_APS_NUM_THREADS", 1, 1, 1024)


def use_avx2() -> bool:
    """Whether the CPU kernels may use AVX2 where the processor has it (HOROVOD_APS_AVX2)."""
    return bool(env_int("HOROVOD_APS_AVX2", 1, 0, 1))
