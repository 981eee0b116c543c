"""Wrong inputs: each ends with exit code 2 and one line that says what and how to fix it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.config.load import to_toml
from tests.training.small import small

Words = list[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(to_toml(small("steps=1")))
    return tmp_path


def tried(words: Words, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that ends with 2."""
    try:
        code = main(words)
    except SystemExit as end:
        code = int(str(end.code))
    out = capsys.readouterr()
    assert code == 2, out.err
    assert "Traceback" not in out.err
    lines = out.err.strip().splitlines()
    assert len(lines) == 1, out.err
    assert lines[0].startswith("keel: error: ")
    return lines[0]


def reward(name: str, *more: str) -> Words:
    functions = f"rewards.functions=[{{function='tests.training.rewards:{name}'}}]"
    return ["train", "small.toml", functions, *more]


def data(*rows: str) -> Words:
    """A run on a data file of these lines."""
    Path("rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    tasks = "tasks=[{name='jsonl', path='rows.jsonl', answer='answer', validation_fraction=0.5}]"
    return ["train", "small.toml", tasks]


CASES: dict[str, tuple[Words, list[str]]] = {
    "missing data": (
        ["train", "small.toml", "tasks=[{name='jsonl', path='none.jsonl'}]"],
        ["none.jsonl"],
    ),
    "reward raises": (reward("raises"), ["raises", "the grader fell over", "RuntimeError"]),
    "reward nan": (reward("nan"), ["nan", "finite"]),
    "reward too few": (reward("too_few"), ["too_few", "1", "8"]),
    "reward hangs": (reward("hangs", "rewards.timeout=0.5"), ["hangs", "0.5", "rewards.timeout"]),
    "reward column": (reward("needs_column"), ["needs_column", "'solution'"]),
    "no such reward": (reward("missing"), ["missing"]),
    "no such task": (["train", "small.toml", "tasks=[{name='sort'}]"], ["sort"]),
    "missing model": (["train", "small.toml", "model.name=./none"], ["none", "does not exist"]),
    "budget over context": (
        ["train", "small.toml", "rollout.max_tokens=64"],
        ["rollout.max_tokens = 64", "64 tokens"],
    ),
    "no command": (["trian"], ["trian"]),
    "not a run": (["train", "--resume", "--run", "none"], ["none", "does not exist"]),
    "no task to evaluate": (["eval", "./none"], ["--task"]),
    "export of nothing": (["export", "none", "out"], ["none"]),
}
ROWS: dict[str, tuple[list[str], str]] = {
    "no rows": ([], "rows.jsonl"),
    "not JSON": (['{"prompt": "12>", "answer": "12"}', "{not json"], "rows.jsonl:2"),
    "longer than the context": (
        [json.dumps({"prompt": f"{i}" * 70 + ">", "answer": "1"}) for i in range(1, 9)],
        "too long",
    ),
    "unknown character": (
        [json.dumps({"prompt": f"{i} ü", "answer": "1"}) for i in range(8)],
        "model.build.alphabet",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_input(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, parts = CASES[case]
    line = tried(words, capsys)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("case", ROWS)
def test_wrong_rows_of_data(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, part = ROWS[case]
    assert part in tried(data(*rows), capsys)


def test_a_run_folder_that_exists(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "thesis.txt").write_text("all of it")
    line = tried(["train", "small.toml", "--run", "mine"], capsys)
    assert "mine" in line
    assert "--resume" in line
    assert (here / "mine" / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize("words", [["eval"], ["export"], ["prefs", "stats"], ["train"]])
def test_a_name_that_no_file_can_have_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ["out"] if words == ["export"] else []
    assert main([*words, "x/" + "y" * 300, *rest]) == 2
    message = capsys.readouterr().err
    assert message.startswith("keel: error: ")
    assert message.count("\n") == 1
