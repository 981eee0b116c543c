"""People label the pairs of which a reward model is least sure, by features as of transformers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from keel.cli.main import main
from keel.data.judged_rows import Preference
from keel.models.loading import quiet
from keel.models.reward import reward_model_from
from keel.platform.signals import Interrupted
from keel.preferences import labeller as module
from keel.preferences.labeller import PeopleLabeller, head_weights, pair_features, text_features
from keel.preferences.records import LabelRecord
from keel.preferences.store import PreferenceStore
from keel.rewards.rules import place_match
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.judged_data import encoder
from keel.training.run import train as run_training
from keel.types import KeelError
from tests.durability.same import contents
from tests.models import tiny
from tests.preferences.made import leased
from tests.training.judged import recipe
from tests.training.small import Notes, Stop

ROWS = (
    Preference("one", "12=", "1101", "0010"),
    Preference("two", "3+4=", "11", "100110ab"),
    Preference("three", "5=", "0", ""),
)


def test_features_and_scores_are_those_of_stock_transformers(tmp_path: Path) -> None:
    """Each answer in a call of its own, by the saved model."""
    model = reward_model_from(tiny.policy(), "outcome", 0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    rows = [encoder("pairs", model.reader())(row) for row in ROWS]
    whole = pair_features(model, rows, 10_000)
    split = pair_features(model, rows, 1)
    assert whole.feature_CH.shape == (3, model.head.in_features)
    # float32, with attention over packed sequences in another order.
    near = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(split.feature_CH, whole.feature_CH, **near)
    np.testing.assert_allclose(split.score_C2, whole.score_C2, **near)
    with quiet():
        model.save(tmp_path)
        stock = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for c, row in enumerate(rows):
        states = []
        for side, answer in enumerate((row.chosen, row.rejected)):
            with torch.no_grad():
                out = stock(input_ids=torch.tensor([answer.tokens]), output_hidden_states=True)
            states.append(out.hidden_states[-1][0, answer.ends[0]].numpy())
            np.testing.assert_allclose(whole.score_C2[c, side], float(out.logits), **near)
        np.testing.assert_allclose(whole.feature_CH[c], states[0] - states[1], **near)
    difference = whole.feature_CH @ head_weights(model)
    np.testing.assert_allclose(difference, whole.score_C2[:, 0] - whole.score_C2[:, 1], **near)


def test_long_texts_have_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    model = reward_model_from(tiny.policy(), "outcome", 0)
    with quiet():
        model.save(tmp_path)
    assert model.context is not None
    long = Preference("long", "1=", "1" * model.context, "0")
    found = text_features(tmp_path, [ROWS[0], long, *ROWS[1:]])
    assert np.isnan(found).all(axis=1).tolist() == [False, True, False, False]
    rows = [encoder("pairs", model.reader())(row) for row in ROWS]
    whole = pair_features(model, rows, 10_000).feature_CH
    np.testing.assert_allclose(found[[0, 2, 3]], whole, atol=1e-4, rtol=1e-4)
    assert text_features(tmp_path, []).shape == (0, model.head.in_features)


train = partial(run_training, labeller=PeopleLabeller())
TASK = {"name": "sort_digits", "options": {"min_digits": 3, "max_digits": 4}}
SAMPLED: dict[str, Any] = {
    "tasks": [TASK],
    "rewards": {"functions": [{"function": "place_match"}]},
    "train": 60,
    "validation": 10,
    "group_size": 5,
    "max_tokens": 5,
    "noise": 0.5,
    "price": 0.01,
}
BRIEF: dict[str, Any] = {"steps": 2, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}


def stage(kind: str = "reward_model", **people: Any) -> dict[str, Any]:
    return {"stage": kind, "sampled": {**SAMPLED, "people": people}, **BRIEF}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    return lines(folder.rows("reward_model", "train"))


def right(row: dict[str, Any]) -> bool:
    """Whether the chosen answer is the better one by the reward without noise."""
    gold = "".join(sorted(row["prompt"].rstrip(">")))
    texts = [row["chosen"], row["rejected"]]
    better, worse = place_match(completions=texts, answer=[gold, gold])
    assert better is not None
    assert worse is not None
    return better > worse


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[str]]:
    """A run in which people without noise label 20 pairs, and its notes."""
    notes, path = Notes(), tmp_path_factory.mktemp("labelled") / "run"
    made = recipe(stage(labels=20, by="d_optimal", noise=0.0, price=0.5))
    return train(made, path, callbacks=[notes]), notes.notes


def test_chosen_pairs_have_the_labels_of_people(labelled: tuple[RunFolder, list[str]]) -> None:
    folder, notes = labelled
    found, pool = rows(folder), lines(folder.pool("reward_model"))
    assert Counter(row["source"] for row in found)["people"] == 20
    assert all(right(row) for row in found if row["source"] == "people")
    judged = [row for row in found if row["source"] == "rewards"]
    wrong = sum(not right(row) for row in judged)
    assert 0.3 < wrong / len(judged) < 0.7  # half of the rewards' labels are inverted
    assert wrong == sum(
        row["inverted"]
        for row, kept in zip(pool, found, strict=True)
        if kept["source"] == "rewards"
    )
    assert any("20 of them by people ($10.00)" in note for note in notes)
    with PreferenceStore(folder.preferences) as store:
        labels = list(store.labels())
    assert sum(label.cost or 0 for label in labels if label.source == "human") == 10


def test_half_of_the_labels_of_careless_people_are_wrong(tmp_path: Path) -> None:
    folder = train(recipe(stage(labels=60, by="random", noise=0.5)), tmp_path / "run")
    people = [row for row in rows(folder) if row["source"] == "people"]
    assert 0.25 < sum(right(row) for row in people) / len(people) < 0.75


def test_a_run_waits_for_real_people(tmp_path: Path) -> None:
    made = recipe(stage(labels=8, by="margin", price=0.5))
    message = r"waits for people: 8 of 8 pairs .* keel prefs annotate .*preferences\.db"
    with pytest.raises(KeelError, match=message):
        train(made, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    with PreferenceStore(folder.preferences) as store:
        judged = {}
        for number in range(8):
            lease = leased(store, "ada", float(number))
            pair = store.judged_pair(lease.pair)
            # Two ties, two skips, two for the first and two for the second answer.
            value = (0.5, None, 1.0, 0.0)[number % 4]
            judged[pair.prompt.content, pair.first.text, pair.second.text] = value
            store.submit(lease, LabelRecord(lease.pair, value, "human", "ada"))
            if number == 3:
                with pytest.raises(KeelError, match="waits for people: 4 of 8"):
                    train(None, folder.path, resume=True)
    train(None, folder.path, resume=True)
    found = [row for row in rows(folder) if row["source"] == "people"]
    assert Counter(row.get("probability", 1.0) for row in found) == {0.5: 2, 1.0: 4}
    for (prompt, first, second), value in judged.items():
        if value in (0.0, 1.0):
            chosen = (first, second) if value == 1.0 else (second, first)
            row = next(
                r
                for r in found
                if r["prompt"] == prompt and {*chosen} == {r["chosen"], r["rejected"]}
            )
            assert (row["chosen"], row["rejected"]) == chosen


def test_a_waiting_run_takes_changed_keys_of_people(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="8 of 8 pairs"):
        train(recipe(stage(labels=8, price=0.5)), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    text = folder.recipe.read_text()
    assert "labels = 8\n" in text
    folder.recipe.write_text(text.replace("labels = 8\n", "labels = 3\n").replace("0.5", "0.7"))
    with pytest.raises(KeelError, match="3 of 3 pairs"):
        train(None, folder.path, resume=True)
    with PreferenceStore(folder.preferences) as store:
        assert len(list(store.pairs())) == 8
        first = max(store.pairs(), key=lambda pair: pair.priority)
        chosen = lines(folder.chosen("reward_model"))[0]["row"]
        pool = lines(folder.pool("reward_model"))
        assert store.prompt(first.prompt).content == pool[chosen]["prompt"]


def test_a_labelled_pool_gives_nothing_to_choose(tmp_path: Path) -> None:
    made = recipe(stage(labels=10_000, noise=0.0, price=0.5))
    folder = train(made, tmp_path / "run")
    assert {row["source"] for row in rows(folder)} == {"people"}
    folder.rows("reward_model", "train").unlink()
    folder.chosen("reward_model").unlink()
    for entry in folder.list_checkpoints():
        shutil.rmtree(entry.path)
    train(None, folder.path, resume=True)
    assert lines(folder.chosen("reward_model")) == []
    assert {row["source"] for row in rows(folder)} == {"people"}


def test_a_stage_that_was_stopped_labels_nothing_twice(tmp_path: Path) -> None:
    made = recipe(stage(labels=20, noise=0.1, price=0.5))
    whole = train(made, tmp_path / "whole")
    again = train(made, tmp_path / "again")
    again.rows("reward_model", "train").unlink()
    for entry in again.list_checkpoints():
        shutil.rmtree(entry.path)
    train(None, again.path, resume=True)
    with PreferenceStore(whole.preferences) as a, PreferenceStore(again.preferences) as b:
        assert list(a.labels()) == list(b.labels())
        assert list(a.pairs()) == list(b.pairs())
    for name in contents(whole.path):
        if not name.startswith("preferences.db"):
            assert (whole.path / name).read_bytes() == (again.path / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["dpo", "process_reward_model"])
def test_only_outcome_reward_models_have_people(kind: str) -> None:
    with pytest.raises(KeelError, match="people"):
        recipe(stage(kind, labels=4))


def test_costs_of_a_run_hold_labels_and_hours(
    labelled: tuple[RunFolder, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = labelled
    assert main(["prefs", "costs", str(folder.path), "--gpu-price", "2", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["table"]
    of = {row["kind"]: row for row in table if row["round"] is None}
    pool = {json.dumps(row, sort_keys=True) for row in lines(folder.pool("reward_model"))}
    assert of["human"]["actual_dollars"] == of["human"]["forecast_dollars"] == 10
    assert of["api"]["actual_dollars"] == pytest.approx(0.01 * len(pool))
    hours = load(folder.path).seconds() / 3600
    assert of["gpu"]["actual_hours"] == pytest.approx(hours)
    assert of["gpu"]["actual_dollars"] == pytest.approx(2 * hours)
    assert main(["prefs", "costs", str(folder.preferences), "--gpu-price", "2"]) == 2
    assert "give a run folder" in capsys.readouterr().err


def first_round(tmp_path: Path, then: dict[str, Any]) -> tuple[RunFolder, PreferenceStore]:
    """A run that stopped in the stage after one with people, and a copy of its store."""
    made = recipe(stage(labels=20, noise=0.1, price=0.5), {**then, "checkpoints": {"every": 1}})
    with pytest.raises(Interrupted):
        train(made, tmp_path / "run", callbacks=[Stop(1, stage=then["name"])])
    folder = RunFolder.open(tmp_path / "run")
    return folder, PreferenceStore(folder.preferences)


AFTER = [
    {"name": "next", "stage": "dpo", "sampled": SAMPLED, **BRIEF},
    {**stage(labels=20, noise=0.1, price=0.5), "name": "next"},
]


@pytest.mark.parametrize(
    ("how", "then"),
    [("gone", AFTER[0]), ("older", AFTER[1]), ("changed", AFTER[0])],
    ids=["gone", "older", "changed"],
)
def test_store_without_the_labels_of_a_round_is_refused(
    tmp_path: Path, how: str, then: dict[str, Any]
) -> None:
    folder, store = first_round(tmp_path, then)
    with store:
        labels = list(store.labels(source="human"))
        if how == "older":
            store.database.execute("DELETE FROM labels WHERE id = ?", (labels[0].id,))
        elif how == "changed":
            sql = "UPDATE labels SET value = 1 - value WHERE id = ?"
            store.database.execute(sql, (labels[0].id,))
    if how == "gone":
        for path in folder.path.glob("preferences.db*"):
            path.unlink()
    lost = 20 if how == "gone" else 1
    message = rf"preferences\.db: {lost} of 20 labels .*'reward_model'.* restore it from a copy"
    with pytest.raises(KeelError, match=message):
        train(None, folder.path, resume=True)
    assert how != "gone" or not folder.preferences.exists()


def test_store_with_further_labels_is_that_of_the_run(tmp_path: Path) -> None:
    folder, store = first_round(tmp_path, AFTER[0])
    with store:
        labelled = {label.pair for label in store.labels(source="human")}
        pair = next(pair for pair in store.pairs() if pair.id not in labelled)
        store.add([LabelRecord(pair.id, 1.0, "human", "ada")])
    train(None, folder.path, resume=True)
    recorded = lines(folder.labels("reward_model"))
    assert len(recorded) == 20
    folder.labels("reward_model").write_text("")
    with pytest.raises(KeelError, match=r"reward_model-labels\.jsonl is damaged"):
        train(None, folder.path, resume=True)
