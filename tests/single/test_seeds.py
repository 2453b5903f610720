"""Seeds of stochastic rounding: what must differ differs."""

from __future__ import annotations

from horovod_aps.engine.seeds import _mix, stochastic_seed
from horovod_aps.kernels.segments import seed_argument
from horovod_aps.options import Options


def seeds(seed: int, step_number: int, stream: int) -> set[int]:
    """What encode and reduce draw from, as the kernels get it."""
    value = stochastic_seed(Options(4, 3, rounding="stochastic", seed=seed), step_number, stream)
    return {seed_argument(value)[1], seed_argument(value, reduce=True)[1]}


def test_no_two_of_seeds_steps_and_ranks_alias():
    """Around every power of two, where shifted and xored fields would meet."""
    edges = [0, 1, 2, 2**16, 2**16 + 1, 2**24, 2**24 + 1, 2**31, 2**40, 2**48 + 1]
    users = [*edges, 2**63, 2**64, 2**64 + 1, 2**88]
    streams = [0, 1, 2, 255, 2**16, 2**16 + 1, 2**20]
    found = [value for seed in users for step in edges for stream in streams for value in seeds(seed, step, stream)]
    assert len(set(found)) == len(found) == 2 * len(users) * len(edges) * len(streams)
    assert all(0 <= value < 2**64 for value in found)


def test_seed_is_the_same_in_every_run():
    """A literal: another value here would change every run with stochastic rounding."""
    options = Options(4, 3, rounding="stochastic", seed=7)
    assert stochastic_seed(options, 5, 3) == 0xEC4FEE088277BCCC
    assert stochastic_seed(Options(4, 3, seed=7), 5, 3) is None


def test_mixer_is_splitmix64():
    """The first outputs for seed 0 that its authors publish."""
    outputs = [_mix(k * 0x9E37_79B9_7F4A_7C15 & 2**64 - 1) for k in range(3)]
    assert outputs == [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]
