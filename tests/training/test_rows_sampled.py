"""Sampled preference data: rewards of the policy's answers, as files of the run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.config.judging import SampledData
from keel.config.sources import TaskSource
from keel.models.build import character_tokenizer
from keel.models.reward import joined
from keel.models.text import decode, split_steps
from keel.rewards.rules import place_match
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.judged_data import sampled_labels, sampled_pairs, sampled_steps
from keel.training.run import train
from keel.types import Completion, Group, Message, Prompt, RewardResult, Split, Step
from tests.data.made import completion
from tests.training.judged import TASK, recipe, sampled

SAMPLED = sampled(60, 20, group_size=5)
BRIEF: dict[str, Any] = {"steps": 2, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
CHAT = "{% for m in messages %}{{ m['content'] }}>{% endfor %}{% if marked %}999{% endif %}"


def stage(kind: str = "reward_model", keys: dict[str, Any] | None = None, **sampled: Any) -> Any:
    return {"stage": kind, "sampled": {**SAMPLED, **sampled}, **BRIEF, **(keys or {})}


def rows(folder: RunFolder, split: Split, name: str = "reward_model") -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.rows(name, split).read_text().splitlines()]


def worth(prompt: str, text: str) -> float:
    """place_match of an answer to a prompt of digits."""
    (reward,) = place_match(completions=[text], answer=["".join(sorted(prompt.rstrip(">")))])
    assert reward is not None
    return reward


def test_answer_of_the_higher_reward_is_chosen(tmp_path: Path) -> None:
    folder = train(recipe(stage()), tmp_path / "run")
    train_rows, held = rows(folder, "train"), rows(folder, "validation")
    for row in (*train_rows, *held):
        assert worth(row["prompt"], row["chosen"]) > worth(row["prompt"], row["rejected"])
    counts = Counter(row["prompt"] for row in train_rows)
    assert max(counts.values()) == 2  # as many as `pairs` says, the default
    assert not counts.keys() & {row["prompt"] for row in held}
    assert len({json.dumps(row) for row in train_rows}) == len(train_rows)
    notes = [event["text"] for event in load(folder.path).events() if event["event"] == "note"]
    message = (
        f"{len(train_rows)} train rows from 60 prompts; {len(held)} validation rows from 20 prompts"
    )
    assert notes == [f"reward_model: {message}"]


def test_kto_learns_from_sampled_rewards_as_labels(tmp_path: Path) -> None:
    folder = train(recipe(stage("dpo", {"loss": "kto"})), tmp_path / "run")
    for row in rows(folder, "train", "dpo"):
        assert row["label"] == worth(row["prompt"], row["completion"])
    assert load(folder.path).metrics("dpo")[-1]["loss"] > 0


def judged(row: dict[str, Any]) -> tuple[Any, list[float]]:
    """What was judged in a row, and its labels; of a pair, whether its first text is chosen."""
    if "chosen" in row:
        texts = sorted((row["chosen"], row["rejected"]))
        return (row["prompt"], texts), [float(row["chosen"] == texts[0])]
    labels = row["labels"] if "labels" in row else [row["label"]]
    return (row["prompt"], row.get("completions", row.get("completion"))), labels


@pytest.mark.quick("labels-1.0")
@pytest.mark.parametrize(("kind", "noise"), [("pairs", 0.25), ("labels", 1.0), ("steps", 0.25)])
def test_noise_flips_a_share_of_train_labels_only(kind: str, noise: float, tmp_path: Path) -> None:
    """A binomial of n, within four deviations; accuracy is measured against unflipped labels."""

    def made(noise: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        one = {
            "pairs": lambda: stage(train=200, pairs=4, noise=noise),
            "labels": lambda: stage(keys={"objective": "labels"}, train=150, noise=noise),
            "steps": lambda: steps(train=150, noise=noise),
        }[kind]()
        folder = train(recipe(one), tmp_path / str(noise))
        return rows(folder, "train", one["stage"]), rows(folder, "validation", one["stage"])

    (clean, held), (flips, held_again) = made(0.0), made(noise)
    assert held == held_again
    flipped = n = 0
    for plain, other in zip(clean, flips, strict=True):
        (content, labels), (same, noisy) = judged(plain), judged(other)
        assert content == same
        for label, found in zip(labels, noisy, strict=True):
            assert found in (label, 1 - label)
            n += label != 0.5
            flipped += label != found
        if kind == "labels":
            assert plain["label"] == worth(plain["prompt"], plain["completion"])
    assert n > 250
    assert abs(flipped - n * noise) <= 4 * (n * noise * (1 - noise)) ** 0.5


def test_equal_answers_are_one_row(tmp_path: Path) -> None:
    """Of one-token answers many are the same; each counts once."""
    folder = train(recipe(stage(keys={"objective": "labels"}, max_tokens=1)), tmp_path / "run")
    made = [(row["prompt"], row["completion"]) for row in rows(folder, "train")]
    assert len(set(made)) == len(made)
    assert len(made) < 60 * 5


STEP_MATCH = {"function": "step_match", "options": {"separator": " ", "strict": False}}


def steps(**sampled: Any) -> dict[str, Any]:
    task = {**TASK, "options": {**TASK["options"], "separator": " "}}
    sampled = {"tasks": [task], "rewards": {"functions": [STEP_MATCH]}, "max_tokens": 9, **sampled}
    made: dict[str, Any] = stage("process_reward_model", {"separator": " "}, **sampled)
    return made


def test_steps_are_labelled_where_they_end(tmp_path: Path) -> None:
    """A random policy seldom writes a blank; where it does, it closes a step."""
    folder = train(recipe(steps(train=200)), tmp_path / "run")
    made = rows(folder, "train", "process_reward_model")
    several = 0
    for row in made:
        gold = sorted(row["prompt"].rstrip(">"))
        marks = [
            float(number < len(gold) and text.strip() == gold[number])
            for number, text in enumerate(row["completions"])
        ]
        if len(marks) < len(gold):
            marks[-1] = 0.0
        if row["completions"] != [""]:
            assert row["labels"] == marks
        several += len(marks) > 1
    assert several > 20
    assert {0.0, 1.0} == {label for row in made for label in row["labels"]}


@pytest.mark.parametrize("text", ["12", "1 2", "1  23", " 1 2", "", "1 2 "])
def test_steps_joined_are_the_answer_that_was_written(text: str) -> None:
    """The reward will read the answer as it was written, so it must be learned from so."""
    tokenizer = character_tokenizer("0123456789 ", 40)
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    spans = split_steps(text, " ")
    ends = [*(end - 1 for _, end in spans[:-1]), len(ids) - 1]
    completion = Completion(
        tokens=np.array(ids),
        log_probs=np.zeros(len(ids), dtype=np.float32),
        written=np.ones(len(ids), dtype=np.bool_),
        finish="eos",
        text=text,
    )
    group = Group(Prompt(id="p", content="12>", tokens=(3, 4)), (completion,))
    result = RewardResult(reward=1.0, components={}, steps=tuple(Step(end, 1.0) for end in ends))
    make = sampled_steps(" ", lambda tokens: decode(tokenizer, [tokens])[0])
    choice = SampledData(tasks=(TaskSource(name="sort_digits"),))
    (row,) = make(group, [result], choice, np.random.default_rng(0))
    assert "".join(joined(row["completions"], " ")) == text
    assert row["labels"] == [1.0] * len(ends)
    assert row["prompt"] == "12>"


def test_rows_keep_messages_and_tools_whole() -> None:
    call = {"function": {"name": "f", "arguments": {"z": 1, "a": 2}}}
    turns: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    prompt = Prompt("p", turns, tools=({"name": "f"},))
    two = [completion(text) for text in "ab"]
    results = [RewardResult(1.0), RewardResult(0.0)]
    choice, rng = SampledData.model_validate(SAMPLED), np.random.default_rng(0)
    for make in (sampled_pairs, sampled_labels):
        made = make(Group(prompt, tuple(two)), results, choice, rng)
        assert all(row["prompt"] == turns and row["tools"] == [{"name": "f"}] for row in made)
        assert made


@pytest.mark.quick("dpo-True")
@pytest.mark.parametrize(
    ("kind", "marked"), [("dpo", False), ("dpo", True), ("reward_model", True)]
)
def test_rows_are_read_with_the_template_of_sampling(
    kind: str, marked: bool, tmp_path: Path
) -> None:
    """A step of all rows reads each prompt as the template makes it.

    The policy reads it with the recipe's words for the template; a reward model, which others will
    load without the recipe, with the template's own.
    """
    prompts = {"chat_template": {"marked": marked}}
    made = stage(kind, tasks=[{**TASK, "system": "12"}], prompts=prompts)
    folder = train(recipe(made, chat_template=CHAT), tmp_path / "sampled")
    every = rows(folder, "train", kind)
    one = {**made, "steps": 1, "batch_size": len(every)}
    (first,) = load(train(recipe(one, chat_template=CHAT), tmp_path / "run").path).metrics()
    read = 0
    for row in every:
        assert [turn["role"] for turn in row["prompt"]] == ["system", "user"]
        assert row["prompt"][0]["content"] == "12"
        prompt = sum(len(turn["content"]) + 1 for turn in row["prompt"]) + 3 * (
            marked and kind == "dpo"
        )
        read += 2 * (prompt + 1) + len(row["chosen"]) + len(row["rejected"])
    assert first["num_tokens"] == read


def test_resume_does_not_sample_existing_rows_again(tmp_path: Path) -> None:
    """So that what a judge was paid for is not paid twice."""
    folder = train(recipe(stage()), tmp_path / "run")
    kept = folder.rows("reward_model", "train").read_text().splitlines()[:10]
    folder.rows("reward_model", "train").write_text("\n".join(kept) + "\n")
    held = folder.rows("reward_model", "validation").read_bytes()
    folder.rows("reward_model", "validation").unlink()
    for entry in load(folder.path).checkpoints():
        shutil.rmtree(entry.path)
    train(None, folder.path, resume=True)
    assert folder.rows("reward_model", "train").read_text().splitlines() == kept
    assert folder.rows("reward_model", "validation").read_bytes() == held


@pytest.mark.slow
def test_rows_are_sampled_from_the_earlier_stages_policy(tmp_path: Path) -> None:
    """After imitation the answers are of digits alone, as the task's are; at random few are."""
    imitate = {
        "stage": "sft",
        "steps": 40,
        "batch_size": 32,
        "tasks": [TASK],
        "optimizer": {"learning_rate": 5e-3},
    }
    folder = train(recipe(imitate, stage()), tmp_path / "run")
    plain = train(recipe(stage()), tmp_path / "plain")
    clean, random = (
        float(np.mean([not set(row["rejected"]) & set("> ") for row in rows(run, "train")]))
        for run in (folder, plain)
    )
    assert random < 0.6
    assert clean > random + 0.2


def test_user_function_of_rows_gets_the_seed(tmp_path: Path) -> None:
    """`tests.training.judged:ones` draws its rows from the recipe's seed, as tasks do."""
    data = {"name": "tests.training.judged:ones", "options": {"n": 40}}
    made = {"stage": "reward_model", "data": data, **BRIEF}
    losses = [
        [
            row["loss"]
            for row in load(train(recipe(made, seed=seed), tmp_path / str(seed)).path).metrics()
        ]
        for seed in (1, 2)
    ]
    assert losses[0] != losses[1]
    given = {**made, "data": {**data, "options": {"n": 40, "seed": 1}}}
    again = load(train(recipe(given, seed=1), tmp_path / "given").path).metrics()
    assert [row["loss"] for row in again] == losses[0]
