"""Test set-up shared by all tests: `import reference` works from any test, and the marks are declared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, so that a misspelt one is an error under --strict-markers."""
    config.addinivalue_line("markers", "slow: takes from ten seconds to minutes; leave out with -m 'not slow'")
