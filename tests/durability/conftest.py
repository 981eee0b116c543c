"""One run that nothing happens to, for all tests that compare theirs with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durability.processes import keel
from tests.durability.same import RUN


@pytest.fixture(scope="session")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("whole")
    code, _, err = keel(tmp_path, "train", "tiny", *RUN, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    return tmp_path / "run"
