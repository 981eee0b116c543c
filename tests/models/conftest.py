"""A saved model, for the tests of loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny import policy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policy("llama").save(tmp_path / "model")
    return tmp_path / "model"
