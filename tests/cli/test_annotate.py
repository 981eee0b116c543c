"""`keel prefs annotate`: what it refuses, before anything is served."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from keel.preferences.store import PreferenceStore
from keel.view.server import TOKEN
from tests.cli.test_wrong_inputs import tried
from tests.preferences.made import made

Capture = pytest.CaptureFixture[str]
WORDS = ["prefs", "annotate", "a.db"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN, raising=False)
    made(tmp_path / "a.db", 2).close()
    made(tmp_path / "empty.db").close()
    (tmp_path / "text.db").write_text("no store")
    (tmp_path / "empty.md").write_text("\n")
    (tmp_path / "gold.jsonl").write_text('{"prompt": "p", "chosen": "c"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["prefs", "annotate"], ["STORE"]),
        (["prefs", "annotate", "none.db"], ["none.db", "no such file"]),
        (["prefs", "annotate", "text.db"], ["text.db", "it is not a store"]),
        (["prefs", "annotate", "empty.db"], ["there is no pair", "keel prefs import"]),
        ([*WORDS, "--round", "3"], ["no pair in round 3"]),
        ([*WORDS, "--overlap", "0"], ["--overlap", "0"]),
        ([*WORDS, "--gold-rate", "1.5"], ["--gold-rate", "1.5"]),
        ([*WORDS, "--wage", "nan"], ["--wage", "nan"]),
        ([*WORDS, "--rubric", "none.md"], ["--rubric none.md", "No such file"]),
        ([*WORDS, "--rubric", "empty.md"], ["--rubric empty.md", "empty"]),
        ([*WORDS, "--rubric", "a.db"], ["--rubric a.db", "text"]),
        ([*WORDS, "--gold", "none.jsonl"], ["--gold none.jsonl", "no such file"]),
        ([*WORDS, "--gold", "gold.jsonl"], ["gold.jsonl:1", "rejected"]),
    ],
)
def test_bad_inputs_are_refused(
    words: list[str], parts: list[str], here: Path, capsys: Capture
) -> None:
    line = tried(words, capsys)
    assert [part for part in parts if part not in line] == [], line
    with PreferenceStore(here / "a.db") as store:
        assert store.counts()["pairs"] == 2
        assert store.counts()["labels"] == 0


def test_taken_port_short_token_and_missing_nicegui_are_named(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = tried([*WORDS, "--port", port], capsys)
        assert f"cannot serve on 127.0.0.1:{port}" in line
    monkeypatch.setenv(TOKEN, "short")
    line = tried([*WORDS, "--host", "0.0.0.0"], capsys)
    assert f"{TOKEN}: use 16 or more" in line
    assert "short" not in line
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert "pip install 'keel-rl[view]'" in tried(WORDS, capsys)
