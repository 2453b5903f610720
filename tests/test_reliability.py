"""Long runs and checkpoints under the launchers; the tests themselves are in tests/parallel."""

from __future__ import annotations

import pytest
from test_parallel import launch


@pytest.mark.parametrize("kind, n_ranks", [("mpirun", 2), ("gloo", 3)])
def test_torch_soak_and_checkpoint(kind, n_ranks, tmp_path):
    launch(kind, n_ranks, ["test_torch_soak.py", "test_torch_checkpoint.py"], tmp_path, limit=480)
