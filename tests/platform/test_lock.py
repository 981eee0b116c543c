from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keel.platform.files import locked
from keel.runs.layout import RunFolder
from keel.types import KeelError
from tests.runs.example import one_stage

HOLD = """
import sys, time
from pathlib import Path
from keel.platform.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: RunFolder) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    process = holder(folder)
    try:
        printed = rf"is in use by process {process.pid}: wait .* --run DIR"
        with pytest.raises(KeelError, match=printed), locked(folder.path):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with locked(folder.path):
        assert folder.lock.read_text() == f"{os.getpid()}\n"


def test_one_process_locks_a_folder_once(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    with locked(folder.path), pytest.raises(KeelError, match="is in use"), locked(folder.path):
        pass
    with pytest.raises(ZeroDivisionError), locked(folder.path):
        raise ZeroDivisionError
    with locked(folder.path):
        pass
    assert folder.lock.read_bytes() == b""


def test_missing_folder_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="cannot write"), locked(tmp_path / "x"):
        pass
