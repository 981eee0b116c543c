"""A saved model, for the tests of loading."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models.tiny import policy


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saved") / "model"
    policy("llama").save(made)
    return made


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """One that the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "model"))
