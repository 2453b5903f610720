"""Seeds of stochastic rounding: the kernels draw their random bits from one, all transports make it here."""

from __future__ import annotations

from horovod_aps.options import Options

MASK = 2**64 - 1


def _mix(x: int) -> int:
    """SplitMix64's finaliser: one-to-one on 64 bits, and one changed bit changes half of the others."""
    x = (x + 0x9E37_79B9_7F4A_7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return x ^ (x >> 31)


def stochastic_seed(options: Options, step_number: int, stream: int) -> int | None:
    """`seed_of` for rounding="stochastic"; None for rounding to nearest."""
    return None if options.rounding == "nearest" else seed_of(options.seed, step_number, stream)


def seed_of(seed: int, step_number: int, stream: int) -> int:
    """64 bits, others for every step and stream, the same in every run.

    Encoding uses its rank as the stream, the reduction of a shard the number of those who exchange it. With the
    same user's seed and stream no two of 2^64 steps have the same bits, nor two of 2^64 streams in one step.
    """
    state, rest = 0, seed
    while True:  # a seed may have any number of bits
        state = _mix(state ^ (rest & MASK))
        rest >>= 64
        if not rest:
            break
    return _mix(_mix(state ^ step_number) ^ stream)
