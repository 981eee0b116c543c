"""`keel prefs select`: priorities that leases follow, who labels, and what it says of itself."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.cli.main import main
from keel.models.reward import reward_model_from
from keel.preferences.store.records import (
    CompletionRecord,
    LabelRecord,
    PairRecord,
    PromptRecord,
    Record,
)
from keel.preferences.store.store import PreferenceStore
from tests.cli.test_prefs import printed
from tests.cli.test_wrong_inputs import tried
from tests.models import tiny
from tests.preferences.store.made import human, made

Capture = pytest.CaptureFixture[str]
GOOD, BAD = ["clear", "short", "right"], ["vague", "long", "wrong"]
ROUTE = ["--budget", "3", "--judge-price", "0.02", "--human-price", "0.2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pairs(count: int, kinds: int | None = None, seed: int = 0) -> list[tuple[list[Record], bool]]:
    """Pairs of answers of which good words make the better; copies of `kinds` pairs if given."""
    generator = random.Random(seed)

    def words() -> list[str]:
        return [generator.choice(GOOD + BAD + list("abcdefghijklmnop")) for _ in range(6)]

    few = [(words(), words()) for _ in range(kinds or count)]
    found = []
    for number in range(count):
        sides = [" ".join(side) for side in few[number % len(few)]]
        good = [sum(w in GOOD for w in s.split()) - sum(w in BAD for w in s.split()) for s in sides]
        prompt = PromptRecord(f"prompt {number}", id=f"q{number}")
        answers = [
            CompletionRecord(prompt.id, text, id=f"{side}{number}")
            for side, text in zip("ab", sides, strict=True)
        ]
        pair = PairRecord(prompt.id, *(a.id for a in answers), id=f"p{number}", round=number % 2)
        found.append(([prompt, *answers, pair], good[0] >= good[1]))
    return found


def store_of(path: Path, count: int, labelled: int, kinds: int | None = None) -> None:
    """A store whose first pairs people have labelled."""
    with PreferenceStore(path, create=True) as store:
        for number, (records, first) in enumerate(pairs(count, kinds)):
            store.add(records)
            if number < labelled:
                store.add([human(f"p{number}", float(first))])


def leased(path: Path, count: int) -> list[str]:
    """The pairs that a person gets, one after the other."""
    order = []
    with PreferenceStore(path) as store:
        for now in range(count):
            lease = store.lease_next("bob", float(now))
            assert lease is not None
            store.submit(lease, human(lease.pair, 1.0, "bob"))
            order.append(lease.pair)
    return order


def test_people_get_the_chosen_pairs_first(here: Path) -> None:
    """Through the real command: the leases follow the priorities."""
    store_of(here / "a.db", 120, 60)
    command = [sys.executable, "-m", "keel", "prefs", "select", "a.db", "--by", "d_optimal"]
    more = ["--count", "7", "--out", "chosen.jsonl", "--json"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["labelled"], found["unlabelled"], found["by"]) == (60, 60, "d_optimal")
    chosen = [row["pair"] for row in found["chosen"]]
    assert len(set(chosen)) == 7
    assert {int(pair[1:]) for pair in chosen} <= set(range(60, 120))
    assert [row["priority"] for row in found["chosen"]] == [7, 6, 5, 4, 3, 2, 1]
    assert (np.diff([row["score"] for row in found["chosen"]]) <= 1e-12).all()
    rows = [json.loads(line) for line in Path("chosen.jsonl").read_text().splitlines()]
    assert rows == found["chosen"]
    assert {row["labeller"] for row in rows} == {"human"}
    held = found["held_out"]
    assert (held["learned"], held["n"]) == (48, 12)
    # Good words make the better answer, and 48 labels show it.
    assert held["pairs"]["accuracy"]["mean"] > 0.7
    assert leased(here / "a.db", 7) == chosen


def test_the_default_follows_the_pool(here: Path, capsys: Capture) -> None:
    """Near-copies of six pairs: d_optimal, which takes no copy while others are left."""
    store_of(here / "a.db", 80, 0, kinds=6)
    found = printed(["prefs", "select", "a.db", "--count", "6"], capsys)
    assert found["by"] == "d_optimal"
    assert "100 % of the pool's pairs have a near-copy" in found["reason"]
    assert {int(row["pair"][1:]) % 6 for row in found["chosen"]} == set(range(6))
    assert "no pair is labelled" in found["hints"][0]
    store_of(here / "b.db", 80, 30)
    found = printed(["prefs", "select", "b.db", "--count", "6"], capsys)
    assert found["by"] == "random"
    assert "only where half or more have one was a gain" in found["reason"]


def test_what_is_printed(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 90, 60)
    assert main(["prefs", "select", "a.db", "--by", "bald", "--count", "25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "a.db: 60 labelled pairs to learn from, 30 without a person's label to choose from"
    )
    assert lines[1].startswith("features: hashed words on ")
    assert lines[2].startswith("on 12 held-out labelled pairs: accuracy ")
    assert lines[3] == "by bald: asked for"
    assert sum(line.startswith("p") and " human " in line for line in lines) == 20
    assert lines[-2:] == [
        "… and 5 more (--out FILE, --json)",
        "25 pairs are first in people's queue, in this order",
    ]


def test_random_needs_no_features(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 30, 10)
    words = ["prefs", "select", "a.db", "--by", "random", "--count", "5"]
    found = [printed([*words, "--seed", seed], capsys) for seed in "001"]
    assert found[0]["features"] is None
    orders = [[row["pair"] for row in one["chosen"]] for one in found]
    assert orders[0] == orders[1] != orders[2]
    assert leased(here / "a.db", 5) == orders[2]


def test_gold_pairs_are_not_selected(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 12, 0)
    gold = [LabelRecord(f"p{number}", 1.0, "rule", "gold") for number in range(7)]
    with PreferenceStore(here / "a.db") as store:
        store.add(gold)
    found = printed(["prefs", "select", "a.db", "--by", "random", "--count", "12"], capsys)
    assert {row["pair"] for row in found["chosen"]} == {f"p{number}" for number in range(7, 12)}


def test_rounds_sources_and_pools(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 60, 40)
    with PreferenceStore(here / "a.db") as store:
        store.add([LabelRecord(f"p{n}", 1.0, "judge", "m") for n in range(30, 50)])
    words = ["prefs", "select", "a.db", "--by", "margin"]
    found = printed([*words, "--round", "1"], capsys)
    assert (found["labelled"], found["unlabelled"]) == (50, 10)
    assert {int(row["pair"][1:]) % 2 for row in found["chosen"]} == {1}
    found = printed([*words, "--source", "judge"], capsys)
    assert (found["labelled"], found["unlabelled"], len(found["chosen"])) == (20, 20, 20)
    found = printed([*words, "--pool", "8"], capsys)
    assert (found["labelled"], found["unlabelled"], len(found["chosen"])) == (8, 8, 8)


def test_an_ensemble_takes_the_place_of_laplace(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 200, 150)
    words = ["prefs", "select", "a.db", "--by", "bald"]
    laplace = printed(words, capsys)
    ensemble = printed([*words, "--ensemble", "12"], capsys)
    for found in (laplace, ensemble):
        assert found["held_out"]["pairs"]["accuracy"]["mean"] > 0.6
    assert ensemble["chosen"][0]["deviation"] != laplace["chosen"][0]["deviation"]


def test_a_judge_and_people_share_a_budget(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 150, 60)
    words = ["prefs", "select", "a.db", "--by", "d_optimal", *ROUTE, "--judge-accuracy", "0.75"]
    found = printed([*words, "--out", "who.jsonl"], capsys)
    routing = found["routing"]
    judge, people = routing["labellers"]
    assert (judge["labeller"], people["labeller"]) == ("judge", "human")
    assert judge["pairs"] + people["pairs"] == len(found["chosen"])
    spent = judge["pairs"] * 0.02 + people["pairs"] * 0.2
    assert routing["spent"] == pytest.approx(spent)
    assert spent <= 3
    assert min(judge["pairs"], people["pairs"]) > 0
    assert routing["judge_agreement"] is None
    by = {
        name: [r for r in found["chosen"] if r["labeller"] == name] for name in ("judge", "human")
    }
    assert [row["priority"] for row in by["judge"]] == [None] * judge["pairs"]
    rows = [json.loads(line) for line in Path("who.jsonl").read_text().splitlines()]
    assert [r["pair"] for r in rows if r["labeller"] == "judge"] == [r["pair"] for r in by["judge"]]
    assert leased(here / "a.db", people["pairs"]) == [row["pair"] for row in by["human"]]


def test_a_budget_that_buys_nothing_says_so(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 60, 30)
    words = ["prefs", "select", "a.db", *ROUTE, "--judge-accuracy", "0.8", "--budget", "0.01"]
    assert "no pair is chosen: the budget buys no label" in message(words, capsys)
    with PreferenceStore(here / "a.db") as store:
        assert {pair.priority for pair in store.pairs()} == {0.0}


def test_a_short_list_is_routed(here: Path, capsys: Capture) -> None:
    """With --count the method makes a short list, and only its pairs are labelled."""
    store_of(here / "a.db", 150, 60)
    words = ["prefs", "select", "a.db", "--by", "d_optimal", "--count", "9"]
    listed = {row["pair"] for row in printed(words, capsys)["chosen"]}
    routed = printed([*words, *ROUTE, "--judge-accuracy", "0.75"], capsys)["chosen"]
    assert {row["pair"] for row in routed} == listed


def test_the_judges_accuracy_is_measured(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 100, 60)
    words = ["prefs", "select", "a.db", "--by", "bald", *ROUTE]
    assert "both decided 0 pairs, too few" in tried(words, capsys)
    with PreferenceStore(here / "a.db") as store:
        said = {label.pair: label.value for label in store.labels()}
        for number, (pair, value) in enumerate(said.items()):
            assert value is not None
            right = number % 4 > 0
            store.add([LabelRecord(pair, value if right else 1 - value, "judge", "m")])
        # The judge has labelled half of what is left too: it is not paid for these again.
        store.add([LabelRecord(f"p{n}", 1.0, "judge", "m") for n in range(60, 80)])
    found = printed(words, capsys)
    assert found["routing"]["judge_agreement"]["n"] == 60
    assert found["routing"]["labellers"][0]["accuracy"] == 0.75
    judged = {int(r["pair"][1:]) for r in found["chosen"] if r["labeller"] == "judge"}
    assert judged
    assert judged <= set(range(80, 100))
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "the judge agrees with people on 75 [" in text
    assert "of $3.00" in text
    with PreferenceStore(here / "a.db") as store:
        store.add(
            [
                LabelRecord(pair, 1 - value, "judge", f"m{n}")
                for pair, value in said.items()
                for n in range(9)
                if value is not None
            ]
        )
    assert "no better than chance" in tried(words, capsys)


# ---------------------------------------------------------------- features of a reward model


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
    words = ["prefs", "select", "a.db", "--model", "model", "--by", "d_optimal", "--count", "5"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["features"] == f"hidden states of model ({model.head.in_features})"
    assert found["left_out_long"] == 1
    assert (found["labelled"], found["unlabelled"], len(found["chosen"])) == (240, 60, 5)
    assert found["held_out"]["pairs"]["accuracy"]["mean"] > 0.8
    assert "left out: 1 pairs longer" in message(words, capsys)


def message(words: list[str], capsys: Capture) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- what is refused


def test_what_select_refuses(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 40, 30)
    made(here / "empty.db").close()
    (here / "there.jsonl").write_text("kept")
    (here / "folder").mkdir()
    select = ["prefs", "select", "a.db"]
    accuracy = ["--judge-accuracy", "0.8"]
    for words, what in (
        (["prefs", "select", "none.db"], "there is no such file"),
        (["prefs", "select", "empty.db"], "there is no pair: add pairs first"),
        ([*select, "--round", "9"], "there is no pair of round 9"),
        ([*select, "--by", "entropy"], "invalid choice: 'entropy'"),
        ([*select, "--count", "0"], "--count"),
        ([*select, "--ensemble", "1"], "--ensemble 1: one head has no spread"),
        ([*select, "--stage", "rm"], "--stage has no effect without a model"),
        ([*select, "--by", "random", "--model", "m"], "--model has no effect with --by random"),
        ([*select, "--model", "folder"], "folder"),
        ([*select, "--out", "there.jsonl"], "is there already"),
        ([*select, "--out", "no/x.jsonl"], "there is no folder"),
        ([*select, "--budget", "5"], "give --judge-price, --human-price too"),
        ([*select, *ROUTE[:4]], "give --human-price too"),
        ([*select, *accuracy], "--judge-accuracy has no effect without a budget"),
        ([*select, *ROUTE, "--judge-accuracy", "0.5"], "such labels tell nothing"),
        ([*select, *ROUTE, "--human-accuracy", "0.2", *accuracy], "such labels tell nothing"),
        ([*select, *ROUTE, *accuracy, "--judge-price", "0"], "--judge-price 0: give a number"),
        ([*select, *ROUTE, "--judge-accuracy", "1.5"], "between 0 and 1"),
    ):
        assert what in tried(words, capsys), words
    assert (here / "there.jsonl").read_text() == "kept"
    with PreferenceStore(here / "a.db") as store:
        assert {pair.priority for pair in store.pairs()} == {0.0}
        store.add([human(f"p{n}", 1.0) for n in range(40)])
    assert "people have labelled every pair" in tried(select, capsys)


def test_a_file_that_cannot_be_written_is_one_line(here: Path, capsys: Capture) -> None:
    store_of(here / "a.db", 40, 30)
    words: list[Any] = ["prefs", "select", "a.db", "--by", "random", "--out", "/proc/x.jsonl"]
    assert "cannot write /proc/x.jsonl" in tried(words, capsys)
