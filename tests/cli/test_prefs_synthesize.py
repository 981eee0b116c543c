"""`keel prefs synthesize` and `audit`: what they print, their exit codes, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.preferences.store import PreferenceStore
from tests.cli.test_wrong_inputs import tried
from tests.data.made import jsonl
from tests.preferences.made import human, made
from tests.preferences.synthesis_made import judges, prompts_file, server
from tests.rewards.judge_server import JudgeServer

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    prompts_file(tmp_path, 6)
    return tmp_path


@pytest.fixture
def found() -> Iterator[JudgeServer]:
    with server() as opened:
        yield opened


def words(url: str, *more: str) -> list[str]:
    return [
        *("prefs", "synthesize", "a.db", "--prompts", "prompts.jsonl", "--samples", "2"),
        *("--model", f"w@{url}", "--judge", f"j@{url}", "--max-tokens", "60", *more),
    ]


PRICES = ("--price", "w=2,8", "--price", "j=1,4")


def test_what_it_prints(here: Path, found: JudgeServer, capsys: Capture) -> None:
    assert main(words(found.url, *PRICES)) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "a.db: new: 12 completions, 6 pairs, 12 labels"
    assert lines[1].startswith("  dollars")
    assert "forecast" in lines[1]
    assert "judge j: 6 pairs in both orders, 0 ties, 0 without a verdict" in lines
    assert any(line.startswith("  same in both orders") and "1.000" in line for line in lines)
    notes = err.splitlines()
    assert notes[0] == "sample: 1 of 6 prompts"
    assert "completions of w: 10" in notes
    assert notes.index("labels of j: 10") > notes.index("completions of w: 10")


def test_options_reach_the_requests(here: Path, found: JudgeServer) -> None:
    (here / "rubric.txt").write_text("is it long\n")
    more = ("--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--pairs", "0")
    sets = ("--model-set", "limit_name=max_completion_tokens", "--judge-set", "max_tokens=77")
    sets += ("--model-set", "extra.a=1", "--model-set", "extra.b=low")
    assert main(words(found.url, *more, *sets, "--rubric-file", "rubric.txt")) == 0
    writing = [asked.body for asked in found.log if not judges(asked)]
    assert {body["seed"] for body in writing} == {7, 8}
    assert (writing[0]["temperature"], writing[0]["top_p"]) == (0.5, 0.9)
    assert writing[0]["max_completion_tokens"] == 60
    assert (writing[0]["a"], writing[0]["b"]) == (1, "low")
    assert len(writing) == len(found.log)  # no pairs, no judge
    assert main(words(found.url, *more, *sets, "--rubric-file", "rubric.txt", "--pairs", "1")) == 0
    judging = [asked.body for asked in found.log if judges(asked)]
    assert len(judging) == 12
    assert judging[0]["max_tokens"] == 77
    assert "is it long" in judging[0]["messages"][0]["content"]


def test_a_used_up_budget_ends_with_3(here: Path, found: JudgeServer, capsys: Capture) -> None:
    assert main(words(found.url, *PRICES, "--budget", "0.003")) == 3
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert last.startswith("keel: stopped: budget = 0.003 dollars is used up")
    assert "run it again with a larger --budget (now 0.003)" in last
    assert "left: " in out
    assert main(words(found.url, *PRICES, "--budget", "1", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["left"] == {"completions": 0, "labels": 0}
    assert result["stopped"] is None
    assert result["requests"]["answers"] == 24
    assert result["audit"][0]["order_consistency"]["mean"] == 1
    assert result["forecast"]["totals"]["dollars"]["mean"] > 0
    assert len(found.log) == len(set(found.names)) == 24


def test_audit_of_a_store(here: Path, found: JudgeServer, capsys: Capture) -> None:
    made(here / "b.db", 2).close()
    assert main(["prefs", "audit", "b.db"]) == 0
    assert "no pair has a judge's labels in both orders" in capsys.readouterr().out
    assert main(words(found.url)) == 0
    with PreferenceStore(here / "a.db") as store:
        pairs = [pair.id for pair in store.pairs()]
        store.add([human(pair, 1.0) for pair in pairs])
    capsys.readouterr()
    assert main(["prefs", "audit", "a.db"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a.db"
    assert any(line.startswith("  accuracy, of people") and "n = 6" in line for line in lines)
    assert main(["prefs", "audit", "a.db", "--json"]) == 0
    (judge,) = json.loads(capsys.readouterr().out)["judges"]
    assert judge["people"]["pairs"] == 6


URL = "http://127.0.0.1:9/v1"
WRONG: dict[str, tuple[list[str], str]] = {
    "nothing": (["--prompts", "prompts.jsonl"], "nothing to do: give --model"),
    "no store": (["--judge", f"j@{URL}"], "there is no such file"),
    "no file": (["--prompts", "prompt.jsonl", "--judge", f"j@{URL}"], "did you mean"),
    "address": (["--model", "w@localhost:8000"], "write NAME@http://HOST:PORT/v1"),
    "judge folder": (["--judge", "./model"], "a judge is asked over HTTP"),
    "price form": (["--judge", f"j@{URL}", "--price", "j=1"], "write IN,OUT"),
    "price of whom": (["--judge", f"judge@{URL}", "--price", "jduge=1,2"], "did you mean 'judge'"),
    "budget": (["--judge", f"j@{URL}", "--budget", "1"], "the price of 'j' is unknown"),
    "no budget": (["--judge", f"j@{URL}", "--budget", "0"], "give dollars above 0"),
    "no key": (["--judge", "j@openai", "--prompts", "prompts.jsonl"], "OPENAI_API_KEY"),
    "key": (
        ["--judge", f"j@{URL}", "--prompts", "prompts.jsonl", "--api-key-env", "j=sk-12-34"],
        "wants the NAME of an environment variable",
    ),
    "set": (["--model", f"w@{URL}", "--judge-set", "retries=1"], "there is no --judge"),
    "set key": (
        ["--judge", f"j@{URL}", "--prompts", "prompts.jsonl", "--judge-set", "mode=rubric"],
        "unknown key 'mode'",
    ),
    "set value": (
        ["--judge", f"j@{URL}", "--prompts", "prompts.jsonl", "--judge-set", "retries=-1"],
        "retries = -1",
    ),
    "model set": (
        ["--model", f"w@{URL}", "--prompts", "prompts.jsonl", "--model-set", "max_tokens=9"],
        "unknown key 'max_tokens'",
    ),
    "secret in an option": (
        ["--model", f"w@{URL}", "--prompts", "prompts.jsonl", "--model-set", "extra.api_key=k123"],
        "would hold a secret",
    ),
    "rubric file": (["--judge", f"j@{URL}", "--rubric-file", "none.txt"], "cannot be read"),
    "samples": (["--model", f"w@{URL}", "--samples", "0"], "0 is not 1 or more"),
    "bad row": (["--judge", f"j@{URL}", "--prompts", "bad.jsonl"], "bad.jsonl:2"),
    "empty row": (["--judge", f"j@{URL}", "--prompts", "empty.jsonl"], "the prompt is empty"),
    "no column": (["--judge", f"j@{URL}", "--prompts", "none.jsonl"], "unknown column 'prompt'"),
    "not a store": (["--judge", f"j@{URL}", "--prompts", "prompts.jsonl"], "cannot be used"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs(
    case: str, here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    jsonl(here / "bad.jsonl", [{"prompt": "fine"}, {"prompt": 7}])
    jsonl(here / "empty.jsonl", [{"prompt": " "}])
    jsonl(here / "none.jsonl", [{"question": "p"}])
    (here / "text.db").write_text("no database at all, but long enough to be one" * 40)
    options, part = WRONG[case]
    store = "text.db" if case == "not a store" else "a.db"
    line = tried(["prefs", "synthesize", store, *options], capsys)
    assert part in line, line
    assert "sk-12" not in line
