from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.platform.process import Child, JsonChild, Restarting, python_environment, python_module
from keel.types import KeelError
from tests.platform.processes import children, eventually, processes_with
from tests.source_tree import ROOT

MODULE = "tests.platform.odd_child"
LONG = 600.0
"""Seconds that no test waits for."""


def start(module: str = MODULE) -> JsonChild:
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    return JsonChild(
        python_module(module), environment={**python_environment(), "PYTHONPATH": path}
    )


@pytest.fixture
def child() -> Iterator[Restarting]:
    made = Restarting(start)
    yield made
    made.close()


def test_a_child_starts_once_asked_and_stays(child: Restarting) -> None:
    before = children()
    for value in ("x" * 200_000, {"a": [1, None]}, "é\n"):
        assert child.ask(LONG, ["echo", value]) == {"ok": value}
        assert len(children() - before) == 1
    assert child.ask(LONG, ["print", 'noise\n{"ok": 1}']) == {"ok": 'noise\n{"ok": 1}'}


def test_an_error_is_a_reply(child: Restarting) -> None:
    assert child.ask(LONG, ["raise", "no"]) == {"error": "ValueError: no"}
    assert child.ask(LONG, ["refuse", "a reason"]) == {"error": "a reason"}
    assert child.ask(LONG, ["take", 10**10])["error"].startswith("MemoryError")
    assert child.ask(LONG, ["echo", 3]) == {"ok": 3}


@pytest.mark.parametrize("what", [["sleep", LONG], ["hold", 10**9]])
def test_a_child_that_hangs_is_ended(child: Restarting, what: list[object]) -> None:
    child.ask(LONG, ["echo", 0])
    before = children()
    with pytest.raises(TimeoutError):
        child.ask(0.5, what)
    assert len(children()) < len(before)
    assert child.ask(LONG, ["echo", 1]) == {"ok": 1}


def test_a_child_that_ends_is_started_again_once(child: Restarting) -> None:
    child.ask(LONG, ["echo", 0])
    assert child.child is not None
    os.kill(child.child.pid, signal.SIGKILL)
    assert child.ask(LONG, ["echo", 1]) == {"ok": 1}
    with pytest.raises(KeelError, match=r"killed twice \(last words\)"):
        child.ask(LONG, ["exit", 1])
    assert child.ask(LONG, ["echo", 2]) == {"ok": 2}


def test_a_request_that_cannot_be_sent_ends_the_child(child: Restarting) -> None:
    with pytest.raises(TypeError):
        child.ask(LONG, ["echo", object()])
    assert child.ask(LONG, ["echo", 3]) == {"ok": 3}


def test_a_child_that_does_not_start_says_why() -> None:
    with pytest.raises(KeelError, match=r"does not start \(.*No module"):
        start("tests.platform.no_such_child").first(LONG, None)


def test_close_ends_the_child_and_a_call_under_way(child: Restarting) -> None:
    before = children()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            child.ask(LONG, ["sleep", LONG])
        except KeelError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert eventually(lambda: bool(children() - before))
    child.close()
    thread.join(60.0)
    assert len(errors) == 1
    assert children() <= before
    with pytest.raises(KeelError, match="closed"):
        child.ask(LONG, ["echo", 1])


def test_a_child_that_is_let_go_of_is_ended() -> None:
    before = children()
    made = start()
    made.ask(LONG, ["echo", 1])
    assert children() != before
    del made
    assert children() <= before


def test_no_file_of_the_folder_replaces_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit")
    assert start().first(LONG, ["echo", 1]) == {"ok": 1}


def test_what_an_ended_child_left_in_its_group_is_killed() -> None:
    """Also if it does not hold the lifeline, as an engine of a server that was killed."""
    mark = uuid.uuid4().hex
    sleep = [sys.executable, "-c", f"import time; time.sleep(600)  # {mark}"]
    code = f"import subprocess; subprocess.Popen({sleep})"
    child = Child([sys.executable, "-c", code])
    assert eventually(child.ended)
    assert processes_with(mark)
    child.end()
    assert eventually(lambda: not processes_with(mark))
    assert child.process.returncode == 0
