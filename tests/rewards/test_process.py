"""Judgements of single steps by a learned model: places, probabilities, aggregates, advantages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from keel.models.loading import quiet
from keel.models.text import split_steps
from keel.rewards import Scorer
from keel.rewards.learned import _sigmoid, aggregate, on_tokens
from keel.rewards.registry import NamedReward, RewardContext
from keel.types import Group, KeelError, Prompt
from tests.models.test_reading import words_of as words
from tests.rewards.learned import completion, group, policy, reward, save_model
from tests.rewards.made import flat

SAME = 1e-5
"""Float32 in packed attention and in transformers' own."""
TEXTS = ["1+1\n=2\n2", "", "aa bb", "a\n\nb\n", "\n1+1\n=2"]
STEPS = [["1+1\n", "=2\n", "2"], [], ["aa bb"], ["a\n\n", "b\n"], ["\n1+1\n", "=2"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("process")
    save_model(made, "process")
    return made


@pytest.fixture
def around() -> RewardContext:
    return RewardContext(tokenizer=policy().tokenizer)


def process(folder: Path, around: RewardContext, **options: Any) -> NamedReward:
    return reward("process", around, options={"model": str(folder), **options})


def plain_steps(folder: Path, prompt: str, steps: list[str]) -> list[float]:
    """P(right) at the last token of each step by plain transformers; the last is the end."""
    tokenizer = policy().tokenizer
    with quiet():
        model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids = tokenizer(prompt)["input_ids"]
    ends = []
    for step in steps:
        ids = [*ids, *tokenizer(step)["input_ids"]]
        ends.append(len(ids) - 1)
    ids.append(tokenizer.eos_token_id)
    ends[-1] += 1
    with torch.no_grad():
        right = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
    return [float(right[end]) for end in ends]


def test_each_step_gets_its_probability_where_it_ends(folder: Path, around: RewardContext) -> None:
    scored = Scorer([process(folder, around)])([group(around.tokenizer, "1+1=", TEXTS)], 0)
    # Of letters, and an end of sequence: "1+1\n=2\n2" is nine tokens.
    ends = [[3, 6, 8], [0], [5], [2, 5], [4, 7]]
    for result, steps, places in zip(scored.results[0], STEPS, ends, strict=True):
        assert [step.end for step in result.steps] == places
        right = plain_steps(folder, "1+1=", steps) if steps else [0.0]
        assert [step.reward for step in result.steps] == pytest.approx(right, abs=SAME)
        assert result.reward == pytest.approx(sum(right), abs=SAME)
    spread = [step.reward for result in scored.results[0] for step in result.steps]
    assert len({round(x, 3) for x in spread}) == 9  # the model tells all of them apart


@pytest.mark.parametrize("how", ["min", "last", "product", "mean"])
def test_an_aggregate_is_one_number(how: Any, folder: Path, around: RewardContext) -> None:
    named = process(folder, RewardContext(), aggregate=how)  # no tokens of a policy needed
    scored = Scorer([named])([group(around.tokenizer, "1+1=", TEXTS)], 0)
    expected = [aggregate(plain_steps(folder, "1+1=", s), how) if s else 0.0 for s in STEPS]
    assert flat(scored) == pytest.approx(expected, abs=SAME)
    assert all(result.steps == () for result in scored.results[0])


def test_the_policys_tokens_need_not_be_the_models(folder: Path) -> None:
    """Steps end where the policy's tokens do: here bytes, with no end of sequence after."""
    bytewise = policy(tokenizer="bytes").tokenizer
    named = process(folder, RewardContext(tokenizer=bytewise))
    made = Group(Prompt("p", "1+1="), (completion(bytewise, "1+1\n=2\n2", end=False),))
    (result,) = Scorer([named])([made], 0).results[0]
    assert [step.end for step in result.steps] == [3, 6, 7]
    assert [step.reward for step in result.steps] == pytest.approx(
        plain_steps(folder, "1+1=", STEPS[0]), abs=SAME
    )


# ---------------------------------------------------------------- refusals


def test_an_unknown_aggregate_and_a_missing_policy(folder: Path, around: RewardContext) -> None:
    says = "reward 'process': aggregate = 'max': input should be 'steps', 'min', 'last'"
    with pytest.raises(KeelError, match=says):
        process(folder, around, aggregate="max")
    with pytest.raises(KeelError, match="tokens of a policy, and there is none"):
        process(folder, RewardContext())


def test_steps_are_not_normalised_here(folder: Path, around: RewardContext) -> None:
    named = reward("process", around, options={"model": str(folder)}, normalise="group")
    with pytest.raises(KeelError, match="process_group_relative normalises steps itself"):
        Scorer([named])([group(around.tokenizer, "1+1=", TEXTS)], 0)
    # One number an answer may be.
    options = {"model": str(folder), "aggregate": "min"}
    named = reward("process", around, options=options, normalise="group")
    scored = flat(Scorer([named])([group(around.tokenizer, "1+1=", TEXTS)], 0))
    assert sum(x for x in scored if x is not None) == pytest.approx(0.0, abs=1e-9)


# ---------------------------------------------------------------- places


def test_two_steps_in_one_token_are_refused() -> None:
    """Tokens here are words, and the blank before a word comes with the word."""
    made = words()
    text = "hi you slow hi"
    assert on_tokens(made, [7, 8, 9, 7], text, "you ", [0.5, 0.75]) == [(2, 0.5), (3, 0.75)]
    with pytest.raises(KeelError, match=r"two steps of 'hi you slow hi' end in one token.*'slow '"):
        on_tokens(made, [7, 8, 9, 7], text, "slow ", [0.5, 0.75])


@pytest.mark.parametrize("z", [0.0, 1.5, -1.5, 800.0, -800.0])
def test_a_sigmoid_of_any_size(z: float) -> None:
    expected = 0.0 if z < -700 else 1 / (1 + math.exp(-z))
    # Two ways of writing it differ in the last bit.
    assert _sigmoid(z) == pytest.approx(expected, rel=1e-15)


def test_steps_of_text_and_tokens_agree(folder: Path, around: RewardContext) -> None:
    made = [group(around.tokenizer, "1+1=", ["a\n\n\nb\n12\n", "\n\n", " \n1", "2\n \n"])]
    for result, one in zip(
        Scorer([process(folder, around)])(made, 0).results[0], made[0].completions, strict=True
    ):
        ends = [b for _, b in split_steps(one.text, "\n")]
        assert [step.end for step in result.steps] == [*(b - 1 for b in ends[:-1]), len(one) - 1]
