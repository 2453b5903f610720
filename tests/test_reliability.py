"""Long runs and checkpoints under the launchers; the tests themselves are in tests/parallel."""

from __future__ import annotations

import pytest
from test_parallel import launch


@pytest.mark.parametrize("kind", ["mpirun", pytest.param("gloo", marks=pytest.mark.slow)])
def test_torch_soak_and_checkpoint(kind, tmp_path):
    launch(kind, 2, ["test_torch_soak.py", "test_torch_checkpoint.py"], tmp_path, limit=480)
