"""Seeds of stochastic rounding: what must differ differs."""

from __future__ import annotations

from horovod_aps.kernels import seed_argument
from horovod_aps.options import Options
from horovod_aps.seeds import stochastic_seed


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
    """Changing these numbers changes every run with stochastic rounding."""
    options = Options(4, 3, rounding="stochastic", seed=7)
    assert stochastic_seed(options, 5, 3) == stochastic_seed(options, 5, 3)
    assert stochastic_seed(options, 5, 3) != stochastic_seed(options, 5, 2)
    assert stochastic_seed(Options(4, 3, seed=7), 5, 3) is None
