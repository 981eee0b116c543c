"""Readers that end, terminals that close, encodings that lack a character: a run goes on."""

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

from keel.runs import process as streams
from keel.runs.reader import load
from tests.durability.harm import plan
from tests.durability.processes import keel, start
from tests.durability.same import RUN, TINY, one_line, same
from tests.shared import ROOT

HARSH = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
    "MPLBACKEND": "nonsense",
}
"""No locale, no encoding of its own but ASCII, and a backend that matplotlib does not know."""


def lost(run: Path) -> list[tuple[str, str]]:
    """The streams that the run has recorded as lost, and why."""
    rows = [row for row in load(run).events() if row["event"] == "output_lost"]
    return [(row["stream"], row["why"]) for row in rows]


@pytest.mark.quick("False")
@pytest.mark.parametrize("quiet", [True, False])
def test_run_continues_when_the_reader_of_its_output_ends(
    quiet: bool, tmp_path: Path, unharmed: Path
) -> None:
    """As in `keel train | head -2`; in the quiet run only the reward prints."""
    run, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    harm = plan(1, print="first") if quiet else {}
    more = ("--quiet",) if quiet else ()
    process = start(
        tmp_path, "train", "tiny", *RUN, "--run", run, *more, environment=harm, output=pipe
    )
    with pipe.open("rb") as reader:
        if not quiet:
            assert reader.readline().startswith(b"tiny: 12 GRPO steps")
    code, _, err = process.end()
    assert (code, err) == (0, "")
    same(run, unharmed)
    assert lost(run) == [("stdout", "Broken pipe")]


def test_run_continues_when_its_terminal_closes(tmp_path: Path, unharmed: Path) -> None:
    """The kernel hangs up, and whatever is printed from then on fails."""
    run, sign = tmp_path / "run", tmp_path / "sign"
    ours, theirs = pty.openpty()
    harm = plan(3, pause=str(sign))
    process = start(
        tmp_path, "train", "tiny", *RUN, "--run", run, environment={**harm, "TERM": "xterm"},
        output=Path(os.ttyname(theirs)),
    )  # fmt: skip
    process.until(sign.exists)
    os.close(theirs)
    os.close(ours)
    process.send(signal.SIGHUP)  # the shell's own
    sign.unlink()
    assert process.end()[0] == 0
    same(run, unharmed)
    assert {stream for stream, _ in lost(run)} <= {"stdout", "stderr"}
    assert ("stdout", "Input/output error") in lost(run)


def test_hangup_with_an_open_terminal_stops_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ours, theirs = pty.openpty()
    try:
        process = start(
            tmp_path, "train", "tiny", *RUN, "--run", run, "--quiet",
            environment=plan(3, signal=signal.SIGHUP), output=Path(os.ttyname(theirs)),
        )  # fmt: skip
        assert process.end()[0] == 128 + signal.SIGHUP
    finally:
        os.close(theirs)
        os.close(ours)
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


def test_characters_outside_the_encoding_are_escaped_as_in_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "__stdout__", stream)
    text = "ä θ 😀 \udcff"
    with streams.outlasting():
        print(json.dumps(text, ensure_ascii=False))
    stream.close()
    with os.fdopen(reading, "rb") as read:
        message = read.read()
    assert message == b'"\xe4 \\u03b8 \\ud83d\\ude00 \\udcff"\n'
    assert json.loads(message.decode("latin-1")) == text


def test_no_file_gets_the_descriptor_of_a_closed_stream() -> None:
    """The exit code is the number of the next file that is opened."""
    script = (
        "import os, sys\nfrom keel.runs.process import outlasting\nwith outlasting():\n"
        "    print('dropped', flush=True)\n    print('dropped', file=sys.stderr)\n"
        "    next_one = os.open('/dev/null', os.O_RDONLY)\nsys.exit(next_one)"
    )
    ended = under({}, "-c", script, capture_output=False, preexec_fn=lambda: os.closerange(0, 3))
    assert ended.returncode > 2


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = under(
            {}, "-m", "keel", "recipes", capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert ended.returncode == 2
    assert one_line(ended.stderr.decode()) == (
        "keel: error: cannot write to stdout: No space left on device: write elsewhere"
    )


def test_folder_that_is_not_utf8_is_refused(tmp_path: Path, unharmed: Path) -> None:
    odd = tmp_path / "odd\udcff"
    for command in (
        ("train", "tiny", *RUN, "--run", odd),
        ("train", "--resume", "--run", odd),
        ("export", unharmed, odd),
    ):
        assert not odd.exists()
        if command[0] != "train" or "--resume" in command:
            odd.mkdir()
            (odd / "recipe.toml").write_text("")
        code, _, err = keel(tmp_path, *command)
        assert code == 2
        assert f"the name of {tmp_path}/odd\\udcff is not UTF-8" in one_line(err)
        if odd.exists():
            (odd / "recipe.toml").unlink()
            odd.rmdir()


def test_python_oo_is_refused_in_one_line() -> None:
    ended = under({}, "-OO", "-c", "import keel.models")
    assert ended.stderr.decode().splitlines()[-1].startswith("keel.types.KeelError: python -OO and")
    ended = under({}, "-OO", "-m", "keel", "tasks")
    assert (ended.returncode, ended.stderr) == (0, b"")
