"""Rewards of learned models: scores in order, here or elsewhere; steps, where they end."""

from __future__ import annotations

import math
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from keel.models.loading import quiet
from keel.models.reward import Answered
from keel.rewards import Scorer
from keel.rewards.learned import _sigmoid, aggregate, on_tokens
from keel.rewards.registry import NamedReward, RewardContext
from keel.types import Group, KeelError, Message, Prompt
from tests.models.test_reading import words_of as words
from tests.platform.processes import descendants, gone
from tests.rewards.learned import completion, group, policy, reward, save_model
from tests.rewards.made import flat

SAME = 1e-5
"""Float32 in packed attention and in transformers' own."""
TEXTS = ["2", "aa bb", "", "2", "12+12=24\nab", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("outcome")
    save_model(made, "outcome")
    return made


@pytest.fixture
def around() -> RewardContext:
    return RewardContext(tokenizer=policy().tokenizer)


@pytest.fixture
def two_groups(around: RewardContext) -> list[Group]:
    return [
        group(around.tokenizer, "1+1=", TEXTS),
        group(around.tokenizer, "a:", ["2", "b"], "t/train/1"),
    ]


def outcome(folder: Path, around: RewardContext, **options: Any) -> NamedReward:
    return reward("outcome", around, options={"model": str(folder), **options})


def plain_scores(folder: Path, rows: list[tuple[str, str]]) -> list[float]:
    """Prompt, answer and end of sequence through plain transformers, one by one."""
    tokenizer = policy().tokenizer
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for prompt, text in rows:
        ids = [*tokenizer(prompt + text)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            found.append(model(input_ids=torch.tensor([ids])).logits.item())
    return found


def spied(named: NamedReward) -> list[list[Answered]]:
    """What the model of a reward is asked to judge, call by call."""
    judging: Any = named.function.model  # type: ignore[union-attr]
    real, seen = judging.model.judge, []

    def judge(answers: list[Answered], budget: int) -> Any:
        seen.append(list(answers))
        return real(answers, budget)

    judging.model.judge = judge
    return seen


def test_scores_are_those_of_plain_transformers_in_order(
    folder: Path, around: RewardContext, two_groups: list[Group]
) -> None:
    expected = plain_scores(folder, [*(("1+1=", t) for t in TEXTS), ("a:", "2"), ("a:", "b")])
    scored = Scorer([outcome(folder, around)])(two_groups, 0)
    assert flat(scored) == pytest.approx(expected, abs=SAME)
    assert len({round(x, 3) for x in expected}) == 7  # only the two equal ones agree
    assert scored.results[0][0].components == {"outcome": flat(scored)[0]}
    assert scored.results[0][0].steps == ()


def test_the_opening_of_a_plain_prompt_is_read_once(
    folder: Path, around: RewardContext, two_groups: list[Group]
) -> None:
    opened = [replace(g, prompt=replace(g.prompt, opening=g.prompt.content)) for g in two_groups]
    plain = Scorer([outcome(folder, around)])(two_groups, 0)
    assert flat(Scorer([outcome(folder, around)])(opened, 0)) == flat(plain)


def test_equal_answers_to_equal_prompts_are_judged_once(
    folder: Path, around: RewardContext, two_groups: list[Group]
) -> None:
    named = outcome(folder, around)
    seen = spied(named)
    scored = Scorer([named])(two_groups, 0)
    (asked,) = seen
    assert len(asked) == 7  # "2" came twice for one prompt, and once for another
    lengths = [len(answer.tokens) for answer in asked]
    assert lengths == sorted(lengths)
    assert flat(scored)[0] == flat(scored)[3] != flat(scored)[6]


def test_the_model_reads_with_its_own_tokenizer(folder: Path, around: RewardContext) -> None:
    """A policy of bytes writes other tokens of the same text."""
    bytewise = policy(tokenizer="bytes").tokenizer
    found = flat(Scorer([outcome(folder, around)])([group(bytewise, "1+1=", TEXTS)], 0))
    assert found == pytest.approx(plain_scores(folder, [("1+1=", t) for t in TEXTS]), abs=SAME)


def test_text_unknown_to_the_tokenizer_is_named(folder: Path) -> None:
    bytewise = policy(tokenizer="bytes").tokenizer
    named = outcome(folder, RewardContext(tokenizer=bytewise))
    with pytest.raises(
        KeelError, match=r"reward 'outcome' at step 3 .*answer of completion 1 holds 'ß'"
    ):
        Scorer([named])([group(bytewise, "1+1=", ["2", "ß"])], 3)


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tools_of_a_prompt_are_read_through_the_template(
    process: bool, tmp_path: Path, around: RewardContext
) -> None:
    model = save_model(tmp_path, "outcome")
    model.tokenizer.chat_template = (
        "{{ tools[0]['name'] if tools else '' }}:{{ messages[0]['content'] }}="
    )
    model.tokenizer.save_pretrained(tmp_path)
    turns = (Message(role="user", content="1+1"),)
    groups = [group(around.tokenizer, turns, ["2"], f"t/train/{n}") for n in range(3)]
    tools = [({"name": "a"},), ({"name": "b"},), ()]
    groups = [
        replace(one, prompt=replace(one.prompt, tools=own, columns={"tools": "[]"}))
        for one, own in zip(groups, tools, strict=True)
    ]
    with closing(Scorer([outcome(tmp_path, around, process=process)])) as scorer:
        found = flat(scorer(groups, 0))
    rows = [("a:1+1=", "2"), ("b:1+1=", "2"), (":1+1=", "2")]
    assert found == pytest.approx(plain_scores(tmp_path, rows), abs=SAME)


def test_an_answer_beyond_the_models_context_is_refused(
    tmp_path: Path, around: RewardContext
) -> None:
    save_model(tmp_path, "outcome", context=16)
    scorer = Scorer([outcome(tmp_path, around)])
    fits, filled = "a" * 11, "a" * 12
    assert None not in flat(scorer([group(around.tokenizer, "1+1=", [fits, filled])], 0))
    says = r"completion 1 is 18 tokens with its prompt.*context of 16: lower rollout.max_tokens"
    with pytest.raises(KeelError, match=says):
        scorer([group(around.tokenizer, "1+1=", [fits, "a" * 13])], 0)


# ---------------------------------------------------------------- which model


def test_the_model_of_a_stage_before(folder: Path, two_groups: list[Group]) -> None:
    around = RewardContext(tokenizer=policy().tokenizer, models={"judge": folder})
    named = reward("outcome", around, options={"stage": "judge"})
    expected = flat(Scorer([outcome(folder, around)])(two_groups, 0))
    assert flat(Scorer([named])(two_groups, 0)) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "set exactly one of the options model .* and stage"),
        ({"model": "x", "stage": "judge"}, "set exactly one of the options model .* and stage"),
        ({"stage": "jugde"}, "stage = 'jugde': no stage .* of that name \\(those that do: judge"),
        ({"stage": "judge"}, "stage 'judge' has not made its reward model yet: put it before"),
        ({"model": "nowhere/at-all"}, "model.name = 'nowhere/at-all' is neither a folder here nor"),
        ({"model": "x", "modle": "y"}, "unknown option 'modle'"),
    ],
)
def test_wrong_models_are_named(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    around = RewardContext(tokenizer=policy().tokenizer, models={"judge": tmp_path / "later"})
    with pytest.raises(KeelError, match=f"reward 'outcome': .*{says}"):
        reward("outcome", around, options=options)


# ---------------------------------------------------------------- in a process of its own


@pytest.fixture
def elsewhere(folder: Path, around: RewardContext) -> Iterator[NamedReward]:
    named = outcome(folder, around, process=True)
    yield named
    named.function.close()  # type: ignore[union-attr]


def worker_of(named: NamedReward) -> int:
    """The process that a reward started."""
    return int(named.function.model.child.child.pid)  # type: ignore[union-attr]


def address_space(pid: int) -> int:
    """The soft limit of a process."""
    return resource.prlimit(pid, resource.RLIMIT_AS)[0]


@pytest.mark.slow
def test_own_process_gives_the_same_scores_and_ends(
    folder: Path, around: RewardContext, two_groups: list[Group], elsewhere: NamedReward
) -> None:
    assert elsewhere.function.model.child.child is None  # type: ignore[union-attr]
    scorer = Scorer([elsewhere], timeout=600.0)
    here = flat(Scorer([outcome(folder, around)])(two_groups, 0))
    assert flat(scorer(two_groups, 0)) == pytest.approx(here, abs=SAME)
    pid = worker_of(elsewhere)
    turned = flat(scorer(two_groups[::-1], 1))
    assert turned == pytest.approx([*here[6:], *here[:6]], abs=SAME)
    assert worker_of(elsewhere) == pid != os.getpid()  # and keeps the model
    assert address_space(pid) == resource.RLIM_INFINITY  # memory_mb is 0 unless given
    (worker,) = (one for one in descendants(os.getpid()) if one.pid == pid)
    assert worker.lives
    scorer.close()
    assert gone({worker}) == set()
    with pytest.raises(KeelError, match="the child process is closed"):
        scorer(two_groups, 2)


@pytest.mark.slow
def test_errors_of_the_own_process_are_reported(tmp_path: Path, around: RewardContext) -> None:
    save_model(tmp_path, "process")
    named = outcome(tmp_path, around, process=True, memory_mb=20_000)
    scorer = Scorer([named], timeout=600.0)
    groups = [group(around.tokenizer, "1+1=", ["2", "a"])]
    with pytest.raises(KeelError, match="2 labels, so it is not an outcome reward model"):
        scorer(groups, 0)
    pid = worker_of(named)
    assert address_space(pid) == 20_000_000_000
    shutil.rmtree(tmp_path)
    save_model(tmp_path, "outcome", context=16)
    assert None not in flat(scorer(groups, 1))
    with pytest.raises(KeelError, match="completion 1 is 25 tokens with its prompt") as error:
        scorer([group(around.tokenizer, "1+1=", ["2", "a" * 20])], 2)
    assert "\n" not in str(error.value)
    assert worker_of(named) == pid  # a refusal costs no process
    os.kill(pid, signal.SIGKILL)
    assert None not in flat(scorer(groups, 3))  # in a new one
    assert worker_of(named) != pid
    scorer.close()


def test_own_process_that_takes_too_long_is_ended(
    folder: Path, around: RewardContext, two_groups: list[Group]
) -> None:
    """Loading alone takes longer than a hundredth of a second."""
    named = outcome(folder, around, process=True, timeout=0.01)
    scorer = Scorer([named], timeout=600.0)
    with pytest.raises(KeelError, match=r"reward model '.*' gives no scores within 0.01 s"):
        scorer(two_groups, 0)
    assert named.function.model.child.child.ended()  # type: ignore[union-attr]
    scorer.close()


# ---------------------------------------------------------------- steps

ANSWERS = ["1+1\n=2\n2", "", "aa bb", "a\n\nb\n", "\n1+1\n=2"]
STEPS = [["1+1\n", "=2\n", "2"], [], ["aa bb"], ["a\n\n", "b\n"], ["\n1+1\n", "=2"]]


@pytest.fixture(scope="module")
def stepwise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("process")
    save_model(made, "process")
    return made


def process(stepwise: Path, around: RewardContext, **options: Any) -> NamedReward:
    return reward("process", around, options={"model": str(stepwise), **options})


def plain_steps(stepwise: Path, prompt: str, steps: list[str]) -> list[float]:
    """P(right) at the last token of each step by plain transformers; the last is the end."""
    tokenizer = policy().tokenizer
    with quiet():
        model = AutoModelForTokenClassification.from_pretrained(stepwise).eval()
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


def test_each_step_gets_its_probability_where_it_ends(
    stepwise: Path, around: RewardContext
) -> None:
    scored = Scorer([process(stepwise, around)])([group(around.tokenizer, "1+1=", ANSWERS)], 0)
    # Of letters, and an end of sequence: "1+1\n=2\n2" is nine tokens.
    ends = [[3, 6, 8], [0], [5], [2, 5], [4, 7]]
    for result, steps, places in zip(scored.results[0], STEPS, ends, strict=True):
        assert [step.end for step in result.steps] == places
        right = plain_steps(stepwise, "1+1=", steps) if steps else [0.0]
        assert [step.reward for step in result.steps] == pytest.approx(right, abs=SAME)
        assert result.reward == pytest.approx(sum(right), abs=SAME)
    spread = [step.reward for result in scored.results[0] for step in result.steps]
    assert len({round(x, 3) for x in spread}) == 9  # the model tells all of them apart


@pytest.mark.parametrize("how", ["min", "last", "product", "mean"])
def test_an_aggregate_is_one_number(how: Any, stepwise: Path, around: RewardContext) -> None:
    named = process(stepwise, RewardContext(), aggregate=how)  # no tokens of a policy needed
    scored = Scorer([named])([group(around.tokenizer, "1+1=", ANSWERS)], 0)
    expected = [aggregate(plain_steps(stepwise, "1+1=", s), how) if s else 0.0 for s in STEPS]
    assert flat(scored) == pytest.approx(expected, abs=SAME)
    assert all(result.steps == () for result in scored.results[0])


def test_the_policys_tokens_need_not_be_the_models(stepwise: Path) -> None:
    """Steps end where the policy's tokens do: here bytes, with no end of sequence after."""
    bytewise = policy(tokenizer="bytes").tokenizer
    named = process(stepwise, RewardContext(tokenizer=bytewise))
    made = Group(Prompt("p", "1+1="), (completion(bytewise, "1+1\n=2\n2", end=False),))
    (result,) = Scorer([named])([made], 0).results[0]
    assert [step.end for step in result.steps] == [3, 6, 7]
    assert [step.reward for step in result.steps] == pytest.approx(
        plain_steps(stepwise, "1+1=", STEPS[0]), abs=SAME
    )


def test_an_unknown_aggregate_and_a_missing_policy(stepwise: Path, around: RewardContext) -> None:
    says = "reward 'process': aggregate = 'max': input should be 'steps', 'min', 'last'"
    with pytest.raises(KeelError, match=says):
        process(stepwise, around, aggregate="max")
    with pytest.raises(KeelError, match="tokens of a policy, and there is none"):
        process(stepwise, RewardContext())


def test_steps_are_not_normalised_here(stepwise: Path, around: RewardContext) -> None:
    named = reward("process", around, options={"model": str(stepwise)}, normalise="group")
    with pytest.raises(KeelError, match="process_group_relative normalises steps itself"):
        Scorer([named])([group(around.tokenizer, "1+1=", ANSWERS)], 0)
    # One number an answer may be.
    options = {"model": str(stepwise), "aggregate": "min"}
    named = reward("process", around, options=options, normalise="group")
    scored = flat(Scorer([named])([group(around.tokenizer, "1+1=", ANSWERS)], 0))
    assert sum(x for x in scored if x is not None) == pytest.approx(0.0, abs=1e-9)


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
