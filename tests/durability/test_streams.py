"""Output whose reader ends, full disks, encodings that lack a character."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from keel.runs.reader import load
from tests.durability.harm import plan
from tests.durability.processes import start
from tests.durability.same import RUN, TINY, one_line, same
from tests.shared import ROOT

pytestmark = pytest.mark.slow

HARSH = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
}
"""No locale, no encoding of its own but ASCII, and a backend that matplotlib does not know."""


def test_run_continues_when_the_reader_of_its_output_ends(tmp_path: Path, unharmed: Path) -> None:
    """As in `keel train | head -1`."""
    run, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start(tmp_path, "train", "tiny", *RUN, "--run", run, output=pipe)
    with pipe.open("rb") as reader:
        assert reader.readline().startswith(b"tiny: 12 GRPO steps")
    code, _, err = process.end()
    assert (code, err) == (0, "")
    same(run, unharmed)


def test_reader_that_ends_is_no_error(tmp_path: Path) -> None:
    """As in `keel recipes | true`."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = under(
        {}, "-m", "keel", "recipes", capture_output=False, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_run_whose_terminal_closes_is_saved(tmp_path: Path) -> None:
    run, sign = tmp_path / "run", tmp_path / "sign"
    ours, theirs = pty.openpty()
    process = start(
        tmp_path, "train", "tiny", *RUN, "--run", run,
        environment={**plan(3, pause=str(sign)), "TERM": "xterm"}, output=Path(os.ttyname(theirs)),
    )  # fmt: skip
    process.until(sign.exists)
    os.close(theirs)
    os.close(ours)
    process.send(signal.SIGHUP)  # the shell's own
    sign.unlink()
    assert process.end()[0] != 0
    assert load(run).checkpoints()[-1].place.step == 3


def under(environment: dict[str, str], *words: object, **options: Any) -> Any:
    """Python in a process of its own, under an environment of its own."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        **{"capture_output": True, "timeout": 120, **options},
    )


@pytest.mark.slow
def test_every_command_runs_in_an_ascii_locale(tmp_path: Path, unharmed: Path) -> None:
    script = tmp_path / "commands.py"
    run, out = tmp_path / "run", tmp_path / "model"
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "θ", "chosen": "ä", "rejected": "😀"}
    rows.write_text(json.dumps(row, ensure_ascii=False) + "\n", "utf-8")
    commands = [
        ("train", "tiny", *RUN, "--run", run),
        ("check", "tiny", *TINY),
        ("explain", "tiny"),
        ("explain", "grpo", "--json"),
        ("eval", run, "--prompts", "2"),
        ("export", run, out),
        ("recipes",),
        ("tasks",),
        ("tasks", "--show", "sort_digits"),
        ("prefs", "stats", rows),
        ("runs", "diff", run, unharmed),
        ("control", "reinforce", "steps=64", "--env", "CartPole-v1", "--run", tmp_path / "c"),
        ("eval", tmp_path / "θ"),
    ]
    script.write_text(
        textwrap.dedent("""
            import sys
            from keel.cli.main import main
            for words in %r:
                print("#", words[0], main(words), flush=True)
        """)
        % [[str(word) for word in words] for words in commands]
    )
    ended = under(HARSH, script)
    assert ended.returncode == 0, ended.stderr.decode()
    lines = ended.stdout.decode("ascii").splitlines()
    codes = [line.split()[1:] for line in lines if line.startswith("# ")]
    assert [command for command, _ in codes] == [str(words[0]) for words in commands]
    assert [command for command, code in codes if code != "0"] == ["eval"]
    assert r"J(\u03b8) = " in ended.stdout.decode("ascii")
    assert ended.stderr.count(b"keel: error: ") == 1
    same(run, unharmed)


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = under(
            {}, "-m", "keel", "recipes", capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert ended.returncode == 2
    assert one_line(ended.stderr.decode()) == (
        "keel: error: cannot write the output: No space left on device: write it elsewhere"
    )


def test_python_oo_is_refused_in_one_line() -> None:
    ended = under({}, "-OO", "-c", "import keel.models")
    assert ended.stderr.decode().splitlines()[-1].startswith("keel.types.KeelError: python -OO and")
    ended = under({}, "-OO", "-m", "keel", "tasks")
    assert (ended.returncode, ended.stderr) == (0, b"")
