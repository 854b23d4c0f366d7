"""Fixtures of the contract tests."""

from pathlib import Path

import pytest
from contract_harness import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny checkpoint for all engine tests."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
