"""Whole checks: planted faults, sound recipes, what would stop a run, and what a check leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.config.fields import derive
from keel.config.load import load_recipe, shipped
from keel.config.sources import Rewards, RewardSource
from keel.data.mixture import PromptStream, build_task
from keel.engines.native import NativeEngine
from keel.models.build import character_tokenizer
from keel.models.chat import Encoder
from keel.models.policy import load_policy
from keel.preflight.batch import GROUPS, MEMBERS, SHORTEST, Size, longest_of, sample, size_for
from keel.preflight.check import Report
from keel.preflight.check import check as whole_check
from keel.preflight.context import StageContext
from keel.preflight.prompts import read_prompts
from keel.preflight.rewards import gold_of, shapes
from keel.rewards.registry import NamedReward, load_reward
from keel.rewards.scorer import Scorer
from keel.training.evaluation import evaluate
from keel.training.rollout import Sampler, collect
from keel.training.run import train
from keel.training.stages.rl import RLStage
from keel.types import KeelError
from studies.preflight import Case, cases, half_trained, look
from tests.data.made import source
from tests.shared import needs_bubblewrap, shared_path

CASES = ("gold-format", "budget", "end-of-turn", "idle-keys", "long-prompts", "cold",
         "always-fine", "never-in-tags", "leak", "bfloat16", "sft-header", "dpo-special",
         "reward-long", "quickstart", "reward-model", "half-trained")  # fmt: skip
DIGITS: dict[str, Any] = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 3}}
BUILD = {"family": "llama", "alphabet": "0123456789+=> ,abcdefghijklmnopqrstuvwxyz",
         "hidden_size": 16, "layers": 1, "heads": 2, "context": 48}  # fmt: skip
ROLLOUT = {"prompts_per_step": 8, "group_size": 4, "max_tokens": 4}
OWN = """
from keel.data.tasks import BaseTask
from keel.types import Prompt


def none(*, completions):
    return [None for _ in completions]


def penalty(*, completions, answer):
    return [0.0 if text.strip() == gold else -1.0 for text, gold in zip(completions, answer)]


def half(*, completions, answer):
    return [0.5 * (text.strip() == gold) for text, gold in zip(completions, answer)]


def broken(*, completions, answer):
    raise ValueError("no such thing")


class Sum(BaseTask):
    name = "sums"

    def size(self, split):
        return 40

    def prompt(self, split, index):
        a = index if split == "train" else 40 + index
        return Prompt(f"sums/{split}/{index}", f"{a}+17=", {"answer": str(a + 17)}, self.name)

    def gold(self, prompt):
        return prompt.columns["answer"]

    def score(self, prompt, completion):
        return float(completion.text.strip() == self.gold(prompt))


class Misnamed(Sum):
    def prompt(self, split, index):
        return Prompt(f"mine/{split}/{index}", f"{index}+17=", {"answer": "1"}, "mine")


class Spells(Sum):
    def reply(self, prompt, text):
        return f"no, {self.gold(prompt)}"


class OwnSpells:  # any object with the methods of a task
    name, size, prompt, gold, score = "sums", Sum.size, Sum.prompt, Sum.gold, Sum.score
    reply = Spells.reply


class SpellsAndEchoes(Sum):
    def reply(self, prompt, text):
        return f"not {text} but {self.gold(prompt)}"


class SpellsLate(Sum):
    def reply(self, prompt, text):
        return f"no, {self.gold(prompt)}" if "wrong" in text else "wrong"


class Echoes(Sum):
    def reply(self, prompt, text):
        return f"you sent {text}, attempt 18"


class Computes(Sum):
    def reply(self, prompt, text):
        a, plus, b = text.partition("+")
        return str(int(a) + int(b)) if a.isdigit() and b.isdigit() else "0"
"""


def check(source: Any, overrides: Sequence[str] = ()) -> Report:
    """Without memory and time, which have tests of their own."""
    return whole_check(source, overrides, runs=False)


def recipe(*stages: Mapping[str, Any]) -> dict[str, Any]:
    return {"threads": 1, "model": {"build": BUILD}, "stages": list(stages)}


def rl(*functions: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "stage": "rl", "steps": 3, "tasks": [DIGITS], "rollout": ROLLOUT,
        "evaluation": {"prompts": 8}, "rewards": {"functions": list(functions)}, **keys,
    }  # fmt: skip


def errors(report: Report) -> list[str]:
    return [one.kind for one in report.findings if one.severity == "error"]


def stops(report: Report) -> tuple[str, str]:
    """Key and evidence of the only error, which is that the stage stops."""
    (found,) = [one for one in report.findings if one.severity == "error"]
    assert found.kind == "would-stop"
    return found.key, found.evidence


def write_rows(path: Path, lines: Sequence[Mapping[str, Any] | str]) -> str:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def questions(path: Path, n: int, last: Sequence[Mapping[str, Any] | str] = ()) -> dict[str, Any]:
    """A task of a file with `n` good rows and others after them."""
    made = [{"prompt": f"{at}>", "answer": str(at)} for at in range(n)]
    return {"name": "jsonl", "path": write_rows(path, [*made, *last]), "answer": "answer"}


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    made = [{"prompt": f"{at}>", "chosen": str(at), "rejected": ">"} for at in range(60)]
    return write_rows(tmp_path / "pairs.jsonl", made)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("preflight")
    return {case.name: case for case in cases(folder, half_trained(folder))}


# ---------------------------------------------------------------- planted faults, sound recipes


@pytest.mark.quick("gold-format", "budget", "leak", "dpo-special", "reward-long", "half-trained")
@pytest.mark.parametrize("name", CASES)
def test_planted_fault_is_found_without_false_alarms(name: str, made: dict[str, Case]) -> None:
    assert sorted(made) == sorted(CASES)
    result = look(made[name], runs=False)
    assert result.found, result.kinds
    assert result.false_alarms == (), result.report.findings
    assert sum(case.fault is not None for case in made.values()) == 13
    if name == "idle-keys":
        keys = {one.key for one in result.report.findings}
        assert keys == {"reference.reset_every", "algorithm.surrogate.high"}


@pytest.mark.quick("quickstart", "rlhf", "tiny")
@pytest.mark.parametrize("name", [n for n in shipped() if load_recipe(n).model.build])
def test_shipped_recipe_has_no_findings(name: str) -> None:
    """Small ones; `evaluation` only encodes more prompts."""
    stages = [stage for stage in load_recipe(name).stages if isinstance(stage, RLStage)]
    repeated = stages[-1].name.removesuffix("-3").removesuffix("-2")
    assert check(name, [f"{repeated}.evaluation.prompts=8"]).findings == ()


def test_check_is_deterministic_and_leaves_nothing(
    made: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = made["cold"]
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first, second = (check(case.recipe, case.overrides).as_dict() for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["findings"][0]["kind"] == "zero-variance"
    assert json.loads(json.dumps(first))["stages"][0]["figures"] == first["stages"][0]["figures"]
    assert os.listdir(tmp_path) == []
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads


# ---------------------------------------------------------------- the batch


def test_batch_is_that_of_the_first_step(made: dict[str, Case]) -> None:
    """Token by token what `collect` samples for step 1."""
    loaded = load_recipe(made["half-trained"].recipe, ["rollout.prompts_per_step=4"])
    policy, stage = load_policy(loaded.model, loaded.seed), loaded.stages[0]
    assert isinstance(stage, RLStage)
    context = StageContext(loaded, stage, policy)
    plan = context.plan
    assert plan is not None
    stats = read_prompts(
        context, stage.tasks, stage.prompts, plan.seed,
        prefix="", answer_key="rollout.max_tokens", answer_tokens=10, take=4,
    )  # fmt: skip
    scorer = Scorer((), stats.source.tasks, max_tokens=10)
    batch = sample(policy, plan, stats, scorer, trial=False)
    tasks = list(stats.source.tasks.values())
    stream = PromptStream(tasks, [1.0], derive(plan.seed, "prompts"), Encoder(policy.tokenizer, 30))
    engine = NativeEngine(policy.model, policy.tokenizer)
    sampler = Sampler(
        engine, policy.tokenizer, stats.source.tasks, stream, scorer, stage.rollout, plan.seed
    )
    step = collect(sampler, stage.algorithm, 1)
    for mine, theirs in zip(batch.groups, step.groups, strict=True):
        assert mine.prompt.id == theirs.prompt.id
        for a, b in zip(mine.completions, theirs.completions, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)


def test_cut_completions_are_sampled_on_to_their_end(made: dict[str, Case]) -> None:
    """The budget that holds 95 % is that of completions that were never cut."""
    whole = check(made["half-trained"].recipe)
    short = check(made["half-trained"].recipe, ["rollout.max_tokens=4"])
    assert whole.stages[0].figures["cut at the budget"] == "0 of 256"
    budgets = {report.stages[0].figures["a budget for 95 %"] for report in (whole, short)}
    assert budgets == {"5"}
    truncated = next(one for one in short.findings if one.kind == "truncated")
    assert (truncated.key, truncated.fix) == ("rollout.max_tokens", "raise it to 5")


def test_size_of_the_batch_depends_on_model_and_device() -> None:
    assert size_for(32, 8, 10, 800_000, "cpu") == Size(prompts=32, members=8, tokens=10)
    half = 500_000_000
    size = size_for(32, 8, 512, half, "cpu")
    assert size.prompts == GROUPS
    assert MEMBERS <= size.members < 8
    assert SHORTEST <= size.tokens <= longest_of(half, "cpu") == 100
    assert size.prompts * size.members * size.tokens <= 4_000
    assert size_for(128, 1, 512, half, "cpu").members == 1
    assert size_for(32, 8, 512, half, "cuda") == Size(32, 8, 512)


def test_shapes_of_gold_answers_follow_the_rewards() -> None:
    def written(function: str, **options: Any) -> list[str]:
        source = RewardSource(function=function, options=options)
        return [shape.replace("{}", "7") for shape in shapes([NamedReward(function, source)])]

    assert written("exact_match") == ["7"]
    assert written("exact_match", tag="b") == ["7", "<b>7</b>"]
    assert "\\boxed{7}" in written("math")
    assert "```python\n7\n```" in written("code")
    assert {"7", "<answer>7</answer>", "\\boxed{7}", "#### 7"} <= set(written("a:b"))


def test_gold_answers_follow_the_thoughts_that_a_template_opens() -> None:
    task = build_task(source("addition"), 0)
    asked = replace(task.prompt("train", 0), opening="<think>\n")
    reward = RewardSource(function="exact_match")
    tokenizer = character_tokenizer("0123456789+=", 64)
    gold = gold_of([asked], {task.name: task}, [load_reward(reward)], tokenizer, Rewards())
    assert gold is not None
    assert gold.best == {"exact_match": [1.0]}


# ---------------------------------------------------------------- rewards and names

LEARNED = {"function": "outcome", "options": {"stage": "made"}}
WRONG: list[tuple[list[Mapping[str, Any]], str]] = [
    ([{"function": "judge", "options": {"model": "m", "rubrik": "x"}}], "did you mean 'rubric'"),
    ([{"function": "judge", "options": {"model": "m", "rivals": 0}}], "rivals"),
    ([{**LEARNED, "options": {"stage": "made", "token_budgt": 3}}], "did you mean 'token_budget'"),
    ([LEARNED, {"function": "task", "name": "outcome"}], "two rewards are named 'outcome'"),
    ([{**LEARNED, "weight": 0.0}], "every reward has weight 0"),
]


@pytest.mark.parametrize(("functions", "reason"), WRONG)
def test_reward_that_cannot_be_made_yet_is_validated(
    functions: list[Mapping[str, Any]], reason: str, pairs: str
) -> None:
    data = {"name": "jsonl", "path": pairs}
    first = {"stage": "reward_model", "name": "made", "steps": 2, "data": data}
    both = recipe(first, rl(*functions))
    key, line = stops(check(both))
    assert key == "rl.rewards.functions"
    assert reason in line


def test_unknown_evaluation_component_would_stop_unless_nothing_is_evaluated(
    tmp_path: Path,
) -> None:
    odd = rl(evaluation={"prompts": 8, "component": "tusk"})
    key, line = stops(check(recipe(odd)))
    assert key == "evaluation.component"
    assert "did you mean 'task'" in line
    with pytest.raises(KeelError, match=r"stage 'rl': evaluation\.component"):
        train(load_recipe(recipe({"stage": "sft", "tasks": [DIGITS]}, odd)), tmp_path / "run")
    assert errors(check(recipe(rl(evaluation={"prompts": 0, "component": "tusk"})))) == []


def test_would_stop_has_the_key_and_the_line(own: str, pairs: str, tmp_path: Path) -> None:
    gone = [{"name": "jsonl", "path": str(tmp_path / "gone.jsonl")}]
    late = questions(tmp_path / "late.jsonl", 290, [{"prompt": "7 7>", "answer": "7" * 60}])
    unknown = [{"prompt": "1>", "chosen": "Z", "rejected": "2"}] * 9
    rows = {"name": "jsonl", "path": write_rows(tmp_path / "unknown.jsonl", unknown)}
    long = [{"prompt": f"9{at}>", "chosen": "1" * 60, "rejected": "0"} for at in range(5)]
    held = {"path": pairs, "validation_path": write_rows(tmp_path / "held.jsonl", long)}
    for stage, key, reason in (
        (rl({"function": f"{own}:broken"}, tasks=[questions(tmp_path / "q.jsonl", 60)]),
         "rewards.functions", "no such thing"),
        (rl({"function": "code", "options": {"trusted": True}}), "rewards.functions", "tests"),
        (rl(tasks=gone), "tasks", "gone.jsonl"),
        (rl(rollout={**ROLLOUT, "stop_ids": [999]}), "rollout.stop_ids", "999"),
        (rl(rollout={**ROLLOUT, "stop": ["É"]}), "model.build.alphabet", "stop = 'É'"),
        (rl(tasks=[{"name": f"{own}:Misnamed"}]), "tasks", "is of task 'mine'"),
        ({"stage": "sft", "steps": 2, "batch_size": 4, "tasks": [late]}, "prompts.max_tokens",
         "tokens, more than the model's context of 48"),
        ({"stage": "reward_model", "data": rows}, "model.build.alphabet", "'Z'"),
        ({"stage": "dpo", "data": held}, "evaluation.rows",
         "each of the 5 validation rows is longer than 48"),
    ):  # fmt: skip
        found, line = stops(check(recipe(stage)))
        assert (found, reason in line) == (key, True), line
    with pytest.raises(KeelError, match="unknown key"):
        check(recipe(rl(stepps=3)))
    with pytest.raises(KeelError, match="does not exist"):
        check({**recipe(rl()), "model": {"name": "/nowhere/at/all"}})


@needs_bubblewrap
def test_tests_that_any_code_passes_are_named(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{at}+1=", "tests": f"assert {'not' * (at % 2)} f({at}) == {at}"}
        for at in range(60)
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    code = {"function": "code", "options": {"timeout": 60.0}}
    sizes = {"prompts_per_step": 3, "group_size": 2, "max_tokens": 4}
    stage = rl(code, tasks=[{"name": "jsonl", "path": path}], rollout=sizes)
    (found,) = [one for one in check(recipe(stage)).findings if one.kind == "weak-tests"]
    assert (found.key, found.severity) == ("rewards.functions", "warning")
    assert "of 3 examples" in found.evidence
    assert "[], " in found.evidence


def test_reward_that_returns_none_and_one_that_only_punishes(own: str, tmp_path: Path) -> None:
    none = check(recipe(rl({"function": f"{own}:none"})))
    assert [(one.kind, one.severity) for one in none.findings] == [("reward-none", "error")]
    task = questions(tmp_path / "rows.jsonl", 60)
    penalty = {"function": f"{own}:penalty"}
    punished = check(recipe(rl(penalty, tasks=[task], evaluation={"threshold": 0.0})))
    assert "gold-refused" not in [one.kind for one in punished.findings]
    half = check(recipe(rl({"function": f"{own}:half"}, tasks=[task])))
    assert half.stages[0].figures["gold answers, half"] == 0.5  # the best shape counts


def test_judge_is_not_called_and_its_price_is_estimated() -> None:
    """Nothing answers at port 9: a request would be an error."""
    options = {"model": "m", "url": "http://127.0.0.1:9/v1", "price_in": 1.0, "price_out": 4.0}
    report = check(recipe(rl({"function": "judge", "options": options})))
    assert report.findings == ()
    assert "questions" in str(report.stages[0].figures["judge 'judge'"])
    assert report.total["cost"] > 0
    assert any("nothing was asked" in what for what in report.stages[0].skipped_checks)


@pytest.mark.parametrize(
    ("task", "turns", "found"),
    [("Spells", 2, True), ("OwnSpells", 2, True), ("SpellsAndEchoes", 2, True),
     ("SpellsLate", 3, True),
     ("SpellsLate", 2, False), ("Spells", 1, False), ("Echoes", 3, False), ("Computes", 3, False)],
)  # fmt: skip
def test_reply_that_spells_the_answer(task: str, turns: int, found: bool, own: str) -> None:
    stage = rl(tasks=[{"name": f"{own}:{task}"}], rollout={**ROLLOUT, "max_turns": turns})
    kinds = [one.kind for one in check(recipe(stage)).findings]
    assert ("reply-holds-answer" in kinds) is found


# ---------------------------------------------------------------- prompts and rows


def test_prompts_that_cannot_be_read_or_never_fit(tmp_path: Path) -> None:
    for prompt, kind, key, evidence in (
        ("X>", "would-stop", "model.build.alphabet", "'X'"),
        ("0" * 48, "prompts-over-length", "rollout.max_tokens", "longer than 44 tokens"),
    ):
        lines = [{"prompt": f"{at}{prompt}", "answer": "1"} for at in range(100, 140)]
        (found,) = check(recipe(rl(tasks=[questions(tmp_path / "q.jsonl", 0, lines)]))).findings
        assert (found.kind, found.key, found.severity) == (kind, key, "error")
        assert evidence in found.evidence


def test_rows_that_repeat_and_rows_that_cannot_be_read(tmp_path: Path) -> None:
    """Of 60 rows 30 repeat one prompt, and a sixth has no prompt at all."""
    last = [{"prompt": "12>", "answer": "12"}] * 30 + [{"answer": "1"}] * 10
    task = {**questions(tmp_path / "rows.jsonl", 30, last), "bad_rows": "quarantine"}
    found = {one.kind: one for one in check(recipe({"stage": "sft", "tasks": [task]})).findings}
    assert set(found) == {"duplicate-prompts", "unreadable-rows"}
    assert "30 of " in found["duplicate-prompts"].evidence
    assert "10 of " in found["unreadable-rows"].evidence


@pytest.mark.parametrize(
    ("kind", "rows", "found"), [("rl", 3, 1), ("rl", 8, 0), ("sft", 3, 1), ("dpo", 3, 1)]
)
def test_fewer_rows_than_a_step_takes(kind: str, rows: int, found: int, tmp_path: Path) -> None:
    made = {"answer": "1", "chosen": "1", "rejected": "2"}
    lines = [{"prompt": f"{at}>", **made} for at in range(100, 100 + rows)]
    split = write_rows(tmp_path / "v.jsonl", [{"prompt": "9>", **made}])
    data = {"path": write_rows(tmp_path / "t.jsonl", lines), "validation_path": split}
    tasks = [{**data, "answer": "answer"}]
    sizes = {"steps": 2, "batch_size": 8}
    stage = {
        "rl": rl(tasks=tasks),
        "sft": {"stage": "sft", **sizes, "tasks": tasks},
        "dpo": {"stage": "dpo", **sizes, "data": data},
    }[kind]
    few = [one.what for one in check(recipe(stage)).findings if one.kind == "few-rows"]
    assert few == ["a step takes 8 examples, and there are 3 train rows"] * found


def test_gold_answer_that_the_tokenizer_cannot_write(tmp_path: Path) -> None:
    lines = [{"prompt": f"{at}>", "answer": f"{at}!"} for at in range(60)]
    report = check(recipe(rl(tasks=[questions(tmp_path / "q.jsonl", 0, lines)])))
    (found,) = [one for one in report.findings if one.kind == "gold-unwritable"]
    assert "'!'" in found.evidence
    assert found.severity == "error"


def test_unreadable_gold_answer_of_a_late_row_would_stop(tmp_path: Path) -> None:
    task = questions(tmp_path / "rows.jsonl", 290, [{"prompt": "7 7>", "answer": "none"}])
    numeric = {"function": "numeric_match"}
    key, line = stops(check(recipe(rl(numeric, tasks=[task]))))
    assert key == "tasks.answer"
    assert "rows.jsonl:291" in line
    skip = {"functions": [numeric], "on_error": "skip"}
    assert errors(check(recipe(rl(tasks=[task], rewards=skip)))) == []


def test_rows_left_out_are_counted_by_check_and_evaluation(tmp_path: Path) -> None:
    task = {**questions(tmp_path / "rows.jsonl", 40, ["{", "{"]), "bad_rows": "quarantine"}
    left = str(check(recipe(rl(tasks=[task]))).stages[0].figures["rows left out"])
    assert left.startswith("2 that cannot be read; the first: ")
    assert "rows.jsonl:41" in left
    train(load_recipe(recipe(rl(tasks=[task], steps=1))), tmp_path / "run")
    assert evaluate(tmp_path / "run")["left_out"] == 2


def test_conversations_are_shown_as_prompts_and_answers(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "1 2>"} for role in ("user", "assistant")]
    rows = [{"messages": [{**turns[0], "content": f"{at}>"}, turns[1]]} for at in range(40)]
    task = {"path": write_rows(tmp_path / "rows.jsonl", rows)}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = recipe(rl(tasks=[task]))
    source["model"] = {**source["model"], "chat_template": template}
    (stage,) = check(source).stages
    assert stage.figures["columns of jsonl:rows"] == "messages (prompt and answer)"


def test_validation_prompts_that_are_trained_on(tmp_path: Path, pairs: str) -> None:
    """By an earlier stage's judged rows, or another split of the same file within the stage."""
    task = questions(tmp_path / "rows.jsonl", 60)
    dpo = {"stage": "dpo", "steps": 2, "data": {"name": "jsonl", "path": pairs}}
    report = check(recipe(dpo, rl(tasks=[{**task, "validation_fraction": 0.4}])))
    (leak,) = [one for one in report.findings if one.kind == "trained-on-validation"]
    assert leak.key == "dpo.data.validation_path"
    assert check(recipe(dpo, rl(tasks=[task]))).findings == ()
    split = check(recipe(rl(tasks=[task, {**task, "validation_fraction": 0.5}])))
    (own,) = [one for one in split.findings if one.kind == "trained-on-validation"]
    assert "same validation_fraction" in own.fix
    other = questions(tmp_path / "other.jsonl", 70)
    other["validation_path"] = task["path"]
    for named, count in ((task, 1), (other, 1), ({**other, "validation_path": None}, 1)):
        sets = [{"name": "again", "task": named, "prompts": 4}]
        found = check(recipe(rl(tasks=[task], evaluation={"sets": sets}))).findings
        assert [one.kind for one in found].count("trained-on-validation") == count


@pytest.mark.slow
@needs_bubblewrap
def test_gsm8k_and_math500_with_their_rewards() -> None:
    """Rationales under numeric_match, answers under math: no gold answer is refused; and
    numeric_match stops at an answer of MATH that holds no number."""
    model = {"build": {"family": "qwen2", "tokenizer": "bytes", "hidden_size": 32, "layers": 1,
                       "heads": 2, "context": 3000}}  # fmt: skip
    files = shared_path("data/gsm8k/test.jsonl"), shared_path("data/math/math500.jsonl")
    gsm8k = {"name": "jsonl", "path": str(files[0]), "prompt": "{question}"}
    math500 = {"name": "jsonl", "path": str(files[1]), "prompt": "{problem}"}

    def report(task: dict[str, Any], reward: str) -> Report:
        rollout = {"max_tokens": 1200, "prompts_per_step": 16, "group_size": 1}
        stage = rl({"function": reward}, tasks=[{**task, "answer": "answer"}], rollout=rollout)
        stage["algorithm"] = "reinforce_pp"
        return check({"threads": 1, "model": model, "stages": [stage]})

    for task, reward in ((gsm8k, "numeric_match"), (math500, "math")):
        found = report(task, reward)
        assert {one.kind for one in found.findings} <= {"reward-zero"}, found.findings
        assert found.stages[0].figures[f"gold answers, {reward}"] == 1.0
    assert "which is not a number" in stops(report(math500, "numeric_match"))[1]
