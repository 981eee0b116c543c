from __future__ import annotations

from pathlib import Path

import pytest

from keel.platform.files import locked
from keel.types import KeelError
from tests.runs.example import one_stage


def test_one_process_locks_a_folder_once(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    with locked(folder.path), pytest.raises(KeelError, match="is in use"), locked(folder.path):
        pass
    with pytest.raises(ZeroDivisionError), locked(folder.path):
        raise ZeroDivisionError
    with locked(folder.path):
        pass
    assert folder.lock.read_bytes() == b""
