"""Whole preflights: the planted faults, sound recipes, and what a check leaves behind."""

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

from keel.config.load import load_recipe, shipped
from keel.config.schema import RLStage
from keel.engines.native import NativeEngine
from keel.models.policy import load_policy
from keel.preflight.check import Report
from keel.preflight.check import check as whole_check
from keel.preflight.gold_answers import shapes
from keel.preflight.prompt_stats import prompted, sampling_plan
from keel.preflight.trial_batch import (
    GROUPS,
    LONGER,
    MEMBERS,
    SHORTEST,
    Load,
    Size,
    sample,
    size_for,
)
from keel.rewards.scorer import Scorer
from keel.training.rollout import Sampler, collect
from keel.training.run import train
from keel.types import KeelError
from studies.preflight import Case, cases, half_trained, look
from tests.shared import shared_path

CASES = ("gold-format", "budget", "end-of-turn", "idle-keys", "long-prompts", "cold",
         "always-fine", "never-in-tags", "leak", "bfloat16", "sft-header", "dpo-special",
         "reward-long", "quickstart", "reward-model", "half-trained")  # fmt: skip
DIGITS: dict[str, Any] = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 4}}


def check(source: Any, overrides: Sequence[str] = ()) -> Report:
    """Without memory and time, which have tests of their own."""
    return whole_check(source, overrides, predicts=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("preflight")
    return {case.name: case for case in cases(folder, half_trained(folder))}


def kinds(report: Report) -> list[str]:
    return [one.kind for one in report.findings]


def rl(recipe: Any, **keys: Any) -> dict[str, Any]:
    """The half-trained policy's recipe with other keys."""
    assert isinstance(recipe, Mapping)
    return {**recipe, **keys}


@pytest.mark.parametrize("name", CASES)
def test_every_planted_fault_is_found_and_no_alarm_is_false(
    name: str, made: dict[str, Case]
) -> None:
    assert sorted(made) == sorted(CASES)
    row = look(made[name], predicts=False)
    assert row.found, row.kinds
    assert row.false_alarms == (), row.report.findings
    assert sum(case.fault is not None for case in made.values()) == 13
    if name == "idle-keys":
        keys = {one.key for one in row.report.findings}
        assert keys == {"reference.reset_every", "algorithm.surrogate.high"}


@pytest.mark.parametrize("name", [n for n in shipped() if not n.startswith("gsm8k")])
def test_shipped_recipes_are_sound(name: str) -> None:
    """Small ones; `evaluation` only draws more prompts to encode."""
    report = check(name, ["evaluation.prompts=8"])
    assert report.findings == ()


def test_the_batch_is_the_first_steps(made: dict[str, Case]) -> None:
    """Token by token what `collect` draws for step 1."""
    recipe = load_recipe(made["half-trained"].recipe, ["rollout.prompts_per_step=4"])
    policy, stage = load_policy(recipe.model, recipe.seed), recipe.stages[0]
    assert isinstance(stage, RLStage)
    plan = sampling_plan(recipe, stage)
    assert plan is not None
    source = prompted(
        stage.tasks, stage.prompts, policy, recipe.seed, plan.seed, room=10, take=4, held=0
    )
    scorer = Scorer((), source.tasks, max_tokens=10)
    seen = sample(policy, plan, source, scorer, trial=False)

    from keel.config.seeds import derive
    from keel.data.tasks import PromptStream
    from keel.models.chat import Encoder

    tasks = list(source.tasks.values())
    stream = PromptStream(tasks, [1.0], derive(plan.seed, "prompts"), Encoder(policy.tokenizer, 30))
    engine = NativeEngine(policy.model, policy.tokenizer)
    sampler = Sampler(
        engine, policy.tokenizer, dict(source.tasks), stream, scorer, stage.rollout, plan.seed
    )
    step = collect(sampler, stage.algorithm, 1)
    for mine, theirs in zip(seen.groups, step.groups, strict=True):
        assert mine.prompt.id == theirs.prompt.id
        for a, b in zip(mine.completions, theirs.completions, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)


def test_cut_completions_are_followed_to_their_end(made: dict[str, Case]) -> None:
    """The budget that holds 95 % is that of completions that were never cut."""
    whole = check(made["half-trained"].recipe)
    short = check(made["half-trained"].recipe, ["rollout.max_tokens=4"])
    assert whole.stages[0].figures["cut at the budget"] == "0 of 256"
    assert (
        short.stages[0].figures["a budget for 95 %"] == whole.stages[0].figures["a budget for 95 %"]
    )
    truncated = next(one for one in short.findings if one.kind == "truncated")
    assert truncated.key == "rollout.max_tokens"
    assert truncated.mend == "raise it to 5"


def test_a_check_is_a_function_of_its_recipe_and_leaves_nothing(
    made: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = made["cold"]
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first, second = check(case.recipe, case.overrides), check(case.recipe, case.overrides)
    assert first.findings == second.findings
    assert [s.figures for s in first.stages] == [s.figures for s in second.stages]
    assert os.listdir(tmp_path) == []
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(first.as_dict()))["findings"] == [
        one.as_dict() for one in first.findings
    ]


def test_a_stage_that_would_stop_is_a_finding_with_its_line(
    made: dict[str, Case], tmp_path: Path
) -> None:
    base = made["half-trained"].recipe
    broken = tmp_path / "broken.py"
    broken.write_text(
        "def reward(*, completions, answer):\n    raise ValueError('no such thing')\n"
    )
    raising = {"functions": [{"function": f"{broken}:reward"}]}
    wanting = {"functions": [{"function": "code"}]}
    gone = [{"name": "jsonl", "path": str(tmp_path / "gone.jsonl")}]
    for keys, key, said in (
        ({"rewards": raising}, "rewards.functions", "no such thing"),
        ({"rewards": wanting}, "rewards.functions", "tests"),
        ({"tasks": gone}, "tasks", "gone.jsonl"),
    ):
        (found,) = check(rl(base, **keys)).findings
        assert (found.kind, found.severity, found.key) == ("would-stop", "error", key)
        assert said in found.evidence
    with pytest.raises(KeelError, match="unknown key"):
        check(rl(base, stepps=3))
    with pytest.raises(KeelError, match="does not exist"):
        check(rl(base, model={"name": "/nowhere/at/all"}))


def test_a_judge_is_not_asked_and_its_price_is_reckoned(made: dict[str, Case]) -> None:
    """Port 9 answers nobody: a request would be an error."""
    options = {"model": "m", "url": "http://127.0.0.1:9/v1", "price_in": 1.0, "price_out": 4.0}
    judged = {"functions": [{"function": "judge", "options": options}]}
    report = check(rl(made["half-trained"].recipe, rewards=judged))
    assert report.findings == ()
    stage = report.stages[0]
    assert "questions" in str(stage.figures["judge 'judge'"])
    assert report.predicted["cost"] > 0
    assert any("nothing was asked" in what for what in stage.unseen)


def test_rows_of_preferences_are_read_and_measured(tmp_path: Path, made: dict[str, Case]) -> None:
    """Four tokens of prompt, the answer, its end: 12 fit, 13 do not."""
    rows = [
        {"prompt": f"{at}>", "chosen": "1" * (7 if at % 4 else 8), "rejected": "2"}
        for at in range(100, 160)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    recipe = {
        "model": {"name": made["half-trained"].recipe["model"]["name"]},  # type: ignore[index]
        "stages": [
            {
                "stage": "reward_model",
                "max_tokens": 12,
                "data": {"name": "jsonl", "path": str(path)},
            }
        ],
    }
    (found,) = check(recipe).findings
    assert (found.kind, found.key) == ("rows-over-length", "max_tokens")
    assert "the longest 13" in found.evidence
    rows[0] = {"prompt": "1>", "chosen": "z", "rejected": "2"}
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    (stops,) = check(recipe).findings
    assert stops.kind == "would-stop"
    assert "'z'" in stops.evidence


def test_a_resolved_recipe_is_as_sound_as_the_one_it_came_from(
    made: dict[str, Case], tmp_path: Path
) -> None:
    run = train(load_recipe(made["half-trained"].recipe, ["steps=1"]), tmp_path / "run")
    report = check(str(run.recipe))
    assert [k for k in kinds(report) if k == "no-effect"] == ["no-effect"]
    assert [one.key for one in report.findings] == ["evaluation.every"]


# ---------------------------------------------------------------- how much is sampled


def test_how_much_of_a_step_is_sampled() -> None:
    small = Load(800_000, 4, 4, "cpu")
    assert size_for(32, 8, 10, small) == Size(prompts=32, members=8, tokens=10)
    half = Load(500_000_000, 4, 24, "cpu")
    size = size_for(32, 8, 512, half)
    assert size.prompts == GROUPS
    assert MEMBERS <= size.members < 8
    assert SHORTEST <= size.tokens <= half.steps == 100
    assert size.prompts * size.members * size.tokens <= 4_000
    one = size_for(128, 1, 512, half)
    assert one.members == 1
    gpu = size_for(32, 8, 512, replace(half, device="cuda"))
    assert (gpu.prompts, gpu.members, gpu.tokens) == (32, 8, 512)
    assert small.steps > LONGER * 10


def test_shapes_of_gold_answers() -> None:
    from keel.config.sources import RewardSource

    def names(*sources: RewardSource) -> list[str]:
        return [shape.format("7") for shape in shapes(sources)]

    assert names(RewardSource(function="exact_match")) == ["7"]
    tag = RewardSource(function="exact_match", options={"tag": "b"})
    assert names(tag) == ["7", "<b>7</b>"]
    assert "\\boxed{7}" in names(RewardSource(function="math"))
    assert "```python\n7\n```" in names(RewardSource(function="code"))
    own = names(RewardSource(function="a:b"))
    assert {"7", "<answer>7</answer>", "\\boxed{7}", "#### 7"} <= set(own)


# ---------------------------------------------------------------- real data


def test_gsm8k_and_math500_with_their_rewards(tmp_path: Path, made: dict[str, Case]) -> None:
    """Rationales under numeric_match, answers under math: no gold answer is refused; and
    numeric_match stops at an answer of MATH that holds no number."""
    model = {"build": {"family": "qwen2", "tokenizer": "bytes", "hidden_size": 32, "layers": 1,
                       "heads": 2, "context": 6000}}  # fmt: skip
    files = shared_path("data/gsm8k/test.jsonl"), shared_path("data/math/math500.jsonl")
    gsm8k = {"name": "jsonl", "path": str(files[0]), "prompt": "{question}"}
    math500 = {"name": "jsonl", "path": str(files[1]), "prompt": "{problem}"}

    def found(task: dict[str, Any], reward: str) -> Report:
        task = {**task, "answer": "answer"}
        return check({"model": model, "stages": [
            {"stage": "sft", "steps": 5, "tasks": [task]},
            {"stage": "rl", "tasks": [task], "evaluation": {"prompts": 20},
             "rollout": {"max_tokens": 1200, "prompts_per_step": 32},
             "rewards": {"functions": [{"function": reward}]}},
        ]})  # fmt: skip

    for task, reward in ((gsm8k, "numeric_match"), (math500, "math")):
        report = found(task, reward)
        assert kinds(report) == []
        assert report.stages[1].figures[f"gold answers, {reward}"] == 1.0
    (stops,) = found(math500, "numeric_match").findings
    assert stops.kind == "would-stop"
    assert "which is no number" in stops.evidence


def test_memory_time_and_cost_are_predicted(made: dict[str, Case]) -> None:
    report = whole_check(made["half-trained"].recipe, ("evaluation.prompts=8",), price=3.6)
    said = report.stages[0].predicted
    assert 0 < said["memory"]["peak"] < said["memory"]["room"]
    assert {"sampling", "learning"} <= set(said["time"])
    assert said["seconds"] > 0
    assert said["cost"] == pytest.approx(said["seconds"] / 1000, abs=1e-3)
    assert report.predicted == {"seconds": said["seconds"], "cost": said["cost"]}
    assert report.findings == ()


def test_prompts_that_cannot_be_read_or_never_fit(made: dict[str, Case], tmp_path: Path) -> None:
    """A character that the tokenizer does not know stops the stage; that none fits says itself."""
    path = tmp_path / "rows.jsonl"
    task = {"name": "jsonl", "path": str(path), "answer": "answer"}

    def look_at(prompt: str) -> Report:
        rows = [{"prompt": f"{at}{prompt}", "answer": "1"} for at in range(100, 140)]
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
        return check(rl(made["half-trained"].recipe, tasks=[task]))

    (unknown,) = look_at("x>").findings
    assert (unknown.kind, unknown.key) == ("would-stop", "model.build.alphabet")
    assert "'x'" in unknown.evidence
    (long,) = look_at("0" * 40).findings
    assert (long.kind, long.severity) == ("prompts-over-length", "error")
    assert long.key == "rollout.max_tokens"
    assert "37 of 37 looked at are longer than 30 tokens" in long.evidence
