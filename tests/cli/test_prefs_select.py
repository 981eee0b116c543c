"""`keel prefs select`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.cli.main import main
from keel.models.reward import reward_model_from
from keel.preferences.records import CompletionRecord, PairRecord, PromptRecord
from keel.preferences.store import PreferenceStore
from tests.cli.test_prefs import printed
from tests.cli.test_wrong_inputs import tried
from tests.models import tiny
from tests.preferences.made import human, made

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_printed_and_written(here: Path, capsys: Capture) -> None:
    made(here / "a.db", 30).close()
    words = ["prefs", "select", "a.db", "--count", "25", "--out", "chosen.jsonl"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "a.db: 0 labelled pairs to learn from, 30 without a person's label to choose from",
        "by random",
    ]
    assert sum(line.startswith("p") and line.endswith("–") for line in lines) == 20
    assert lines[-3:] == [
        "… and 5 more (--out FILE, --json)",
        "25 pairs are first in people's queue, in this order",
        "chosen.jsonl: 25 rows",
    ]
    rows = [json.loads(line) for line in Path("chosen.jsonl").read_text().splitlines()]
    assert [row["priority"] for row in rows] == list(range(25, 0, -1))
    again = printed(words[:-2], capsys)
    assert [row["pair"] for row in again["chosen"]] == [row["pair"] for row in rows]


@pytest.mark.slow
def test_hidden_states_of_a_reward_model(here: Path, capsys: Capture) -> None:
    """What the model's own head says is learned from its hidden states."""
    model = reward_model_from(tiny.policy(), "outcome", 0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    model.save(here / "model")
    generator = random.Random(0)
    reader = model.reader()
    with PreferenceStore(here / "a.db", create=True) as store:
        for n in range(300):
            texts = ["".join(generator.choices("0123456789", k=4)) for _ in range(2)]
            prompt = PromptRecord(f"{n}=", id=f"q{n}")
            answers = [
                CompletionRecord(prompt.id, t, id=f"{s}{n}")
                for s, t in zip("ab", texts, strict=True)
            ]
            store.add([prompt, *answers, PairRecord(prompt.id, f"a{n}", f"b{n}", id=f"p{n}")])
            if n < 240:
                scores = model.judge([reader.answer(f"{n}=", t, "x") for t in texts], 1000)
                store.add([human(f"p{n}", float(scores[0][0] > scores[1][0]))])
        prompt = PromptRecord("1" * 400, id="long")
        answers = [CompletionRecord("long", t, id=f"{t}long") for t in "01"]
        store.add([prompt, *answers, PairRecord("long", "0long", "1long", id="long")])
    capsys.readouterr()
    words = ["prefs", "select", "a.db", "--model", "model", "--count", "5"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out_long"] == 1
    assert (found["labelled"], found["unlabelled"], len(found["chosen"])) == (240, 60, 5)
    assert found["held_out"]["pairs"]["accuracy"]["mean"] > 0.8
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "left out: 1 pairs longer than the model's context"
    assert lines[2].startswith("on 48 held-out labelled pairs: accuracy ")
    assert lines[3] == "by d_optimal"


def test_what_select_refuses(here: Path, capsys: Capture) -> None:
    made(here / "a.db", 4).close()
    made(here / "empty.db").close()
    (here / "there.jsonl").write_text("kept")
    (here / "folder").mkdir()
    select: list[Any] = ["prefs", "select", "a.db"]
    for words, what in (
        (["prefs", "select", "none.db"], "there is no such file"),
        (["prefs", "select", "empty.db"], "there is no pair: add pairs first"),
        ([*select, "--by", "entropy"], "invalid choice: 'entropy'"),
        ([*select, "--by", "bald"], "--by bald goes by the features of a reward model: give"),
        ([*select, "--count", "0"], "--count"),
        ([*select, "--stage", "rm"], "--stage has no effect without a model"),
        ([*select, "--by", "random", "--model", "m"], "--model has no effect with --by random"),
        ([*select, "--model", "folder"], "folder"),
        ([*select, "--out", "there.jsonl"], "is there already"),
        ([*select, "--out", "no/x.jsonl"], "there is no folder"),
        ([*select, "--out", "/proc/x.jsonl"], "cannot write /proc/x.jsonl"),
    ):
        assert what in tried(words, capsys), words
    assert (here / "there.jsonl").read_text() == "kept"
