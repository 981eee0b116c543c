"""Recipes that are refused: when they are read, or before the first step is paid for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.training.run import train
from keel.types import KeelError
from tests.training.judged import data, ones, recipe, traces
from tests.training.small import save_teacher, small

HERE = "tests.training.rewards"
TEACHER = "teacher.name=a/b"
SERVED = "teacher={name='a/b', url='http://a/v1'"
BF16 = "rollout.dtype=bfloat16"
AHEAD = "rollout.async_level=1"
TRUNCATE = "algorithm.corrections.kind=truncate"
FROM_ENGINE = "rollout.old_log_probs=engine"
TWICE = "{task='x', name='c/d'}"
LOG_LINEAR = "rollout.old_log_probs=log_linear"
OF_OLDER_WEIGHTS = (
    "rollout.async_level = 1 trains on rollouts of older weights: set algorithm.corrections.kind = "
    '"truncate" or "mask" and rollout.old_log_probs = "trainer"'
)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("algorithm=opd",), "reads a teacher: set teacher.name to the folder or hub name"),
        (
            ("algorithm=opd", "teacher={weights='live'}"),
            "the same prompt: set teacher.prompt",
        ),
        (
            (
                "algorithm={preset='grpo', distillation={place='loss'}}",
                "teacher={weights='averaged', prompt='{answer}'}",
            ),
            "is kept in the place of the reference policy, which is read too",
        ),
        (
            (
                "algorithm=sdft",
                "teacher={weights='base', prompt='{answer}'}",
                "reference.reset_every=2",
            ),
            "which reference.reset_every moves: drop that",
        ),
        (
            (
                "algorithm=sdft",
                "teacher={weights='averaged', prompt='{answer}'}",
                "model.dtype=bfloat16",
            ),
            "in which a share of a step is rounded away",
        ),
        (
            ("algorithm=sdft", "teacher={prompt='\\boxed{}'}"),
            "is not the name of a column: write {{ and }}",
        ),
        (("algorithm=sdft", "teacher={prompt='{answer'}"), "write {{ and }} for braces"),
        (
            (
                "algorithm={preset='sdft', auxiliary={kind='replies'}}",
                "teacher={prompt='{answer}'}",
            ),
            "scores tokens that teacher.prompt has no place for: set distillation.place",
        ),
        (
            ("algorithm=gkd", "teacher={name='a/b', by_task={task='x', name='c/d'}}"),
            'reads the vocabulary: set it to "advantage", or leave out by_task',
        ),
        (
            ("algorithm=opd", "teacher={prompt='{answer}', by_task={task='x', name='c/d'}}"),
            "set teacher.name to that of all others",
        ),
        (
            ("algorithm=opd", f"teacher={{name='a/b', by_task=[{TWICE}, {TWICE}]}}"),
            "teacher.by_task names a task twice",
        ),
        (("algorithm=opd", "teacher={url='http://a/v1'}"), "set teacher.name to the name that it"),
        (
            ("algorithm=opd", f"{SERVED}, api_key_env='sk-1 2'}}"),
            "teacher.api_key_env wants the NAME of an environment variable",
        ),
        (
            ("algorithm=gkd", f"{SERVED}}}"),
            'distillation.place = "loss" reads the vocabulary: set it to "advantage", or load',
        ),
        (
            ("algorithm=opd", f"{SERVED}}}", "rollout.temperature=0.7"),
            "the policy are at rollout.temperature = 0.7: set it to 1, or load the teacher",
        ),
        (("algorithm=grpo", TEACHER), 'the algorithm reads none: set algorithm = "opd", or'),
        (
            ("algorithm=opd", TEACHER, "rollout.dynamic_sampling=true"),
            "drops groups by their rewards: set rollout.dynamic_sampling = false",
        ),
        (
            ("algorithm={preset='opd', divergence={where='reward', estimator='k1'}}", TEACHER),
            'reads no reward: a divergence in it would be lost, set where = "loss"',
        ),
        (
            ("algorithm=gdpo", "rewards.functions=[{function='task', clip=[0.0, 0.5]}]"),
            "reads each reward as its function gives it: rewards.functions.0.clip would be lost",
        ),
        (
            ("algorithm=gdpo", "rollout.truncated_factor=0.5"),
            "rollout.truncated_factor would be lost, leave it out",
        ),
        *(
            (("algorithm=maxrl", f"rollout.{key}=1"), f"makes negative: set rollout.{key} = 0")
            for key in ("overlong_buffer", "length_penalty")
        ),
        (("rollout.curriculum={low=0.5, high=0.4}",), "curriculum.low = 0.5 is above high = 0.4"),
        (
            ("rollout.async_level=2", TRUNCATE, "rollout.curriculum={}"),
            "rollout.curriculum, by which a step decides which prompts are left for the next",
        ),
        ((AHEAD,), OF_OLDER_WEIGHTS),
        ((AHEAD, TRUNCATE, FROM_ENGINE), OF_OLDER_WEIGHTS),
        ((AHEAD, FROM_ENGINE), OF_OLDER_WEIGHTS),
        ((BF16,), 'set algorithm.corrections.kind = "truncate", or rollout.dtype = "model"'),
        (
            (BF16, FROM_ENGINE),
            'set algorithm.corrections.kind = "truncate" and rollout.old_log_probs = "trainer", or',
        ),
        ((BF16, TRUNCATE, FROM_ENGINE), 'set it to "trainer"'),
        ((LOG_LINEAR, TRUNCATE), "set rollout.async_level = 2 and algorithm.corrections.kind"),
        ((LOG_LINEAR, AHEAD, TRUNCATE, "algorithm=reinforce"), "has no old policy: set"),
        (
            (LOG_LINEAR, AHEAD, TRUNCATE, "reference.measured=true"),
            "reference.measured reads log-probs before the update, and rollout.old_log_probs",
        ),
        (("rollout.dtype=float16", TRUNCATE), "should be 'model' or 'bfloat16'"),
        (("rewards.timeout=1e10",), "rewards.timeout = 10000000000.0: input should be less than"),
        (("rollout.timeout=0",), "rollout.timeout = 0: input should be greater than 0"),
        (
            ("algorithm=ppo", "rollout.group_size=1", "rollout.dynamic_sampling=true"),
            "a group of one never has any",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(KeelError) as caught:
        small(*overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_at_their_limits_are_accepted() -> None:
    small("rewards.timeout=31536000", "rollout.timeout=31536000")
    taught = small("algorithm=opd", "teacher={name='a/b', dtype='bfloat16'}")
    assert taught.stages[0].teacher.dtype == "bfloat16"  # type: ignore[union-attr]
    assert small("algorithm=grpo", "teacher=none").stages[0].teacher is None  # type: ignore[union-attr]


# ---------------------------------------------------------------- stages


TASK = {"name": "sort_digits"}
FILE = {"name": "jsonl", "path": "rows.jsonl"}
BRIEF: dict[str, Any] = {"steps": 2, "batch_size": 4}
SFT: dict[str, Any] = {"stage": "sft", **BRIEF, "tasks": [TASK]}
JUDGE: dict[str, Any] = {"stage": "reward_model", **BRIEF, "data": FILE}
PROCESS: dict[str, Any] = {**JUDGE, "stage": "process_reward_model"}
LATER = {**JUDGE, "name": "later"}
ONE, TWO = {**JUDGE, "name": "one"}, {**JUDGE, "name": "two", "base": {"stage": "one"}}


def outcome_of(stage: str) -> dict[str, Any]:
    return {"functions": [{"function": "outcome", "options": {"stage": stage}}]}


def rl(stage: str) -> dict[str, Any]:
    return {"stage": "rl", "tasks": [TASK], "rewards": outcome_of(stage), "algorithm": "grpo"}


RL: dict[str, Any] = {"stage": "rl", "tasks": [TASK], "algorithm": "grpo"}


def based(kind: dict[str, Any], **base: Any) -> dict[str, Any]:
    return {**kind, "name": "made", "base": base}


STAGES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "reward of a later stage": (
        [rl("later"), LATER],
        r'rl: the reward "outcome" is of .*"later"',
    ),
    "rows judged by a later stage": (
        [{"stage": "dpo", "sampled": {"tasks": [TASK], "rewards": outcome_of("later")}}, LATER],
        r'dpo: the reward "outcome" is of .*"later"',
    ),
    "key of another loss": (
        [{"stage": "dpo", **BRIEF, "data": FILE, "loss": "ipo", "smoothing": 0.1}],
        r'smoothing = 0.1 is not read by loss = "ipo" \(but by "sigmoid", .*"cpo"\): drop it',
    ),
    "margin without SimPO": (
        [{"stage": "dpo", **BRIEF, "data": FILE, "loss": "cpo", "margin": 0.0}],
        r'margin = 0 is not read by loss = "cpo" \(but by "simpo"\): drop it',
    ),
    "likelihood of labelled answers": (
        [{"stage": "dpo", **BRIEF, "data": FILE, "loss": "kto", "nll": 1.0}],
        r'nll = 1 is not read by loss = "kto"',
    ),
    "weights of pairs": (
        [{"stage": "dpo", **BRIEF, "data": FILE, "desirable_weight": 1.3}],
        r'desirable_weight = 1.3 is not read by loss = "sigmoid" \(but by "kto"\)',
    ),
    "labelled answers one by one": (
        [{"stage": "dpo", **BRIEF, "batch_size": 1, "data": FILE, "loss": "kto"}],
        r'batch_size = 1: loss = "kto" compares each answer .*: set 2 or more',
    ),
    "process model as an outcome": (
        [{**PROCESS, "name": "made"}, rl("made")],
        r'"made", which is not a stage before .*there is none',
    ),
    "base is a later stage": (
        [SFT, based(JUDGE, stage="later"), LATER],
        r'made.base.stage = "later" is not a reward_model stage',
    ),
    "base is not a stage": (
        [SFT, based(JUDGE, stage="absent")],
        r'made.base.stage = "absent" is not a reward_model stage',
    ),
    "base is of another kind": (
        [SFT, based(PROCESS, stage="sft")],
        r'made.base.stage = "sft" is not a process_reward_model stage',
    ),
    "base of two sources": ([based(JUDGE, stage="a", name="b")], r"set one of base\.name"),
    "replay without a base": ([based(JUDGE, replay=0.1)], r"base\.replay"),
    # What the second holds out, the first has learned from.
    "another share of one file": (
        [ONE, {**TWO, "data": {**FILE, "validation_fraction": 0.3}}],
        r"one and two split the same data otherwise",
    ),
    "other groups of one file": (
        [ONE, {**TWO, "data": {**FILE, "group": "prompt"}}],
        r"one and two split the same data otherwise",
    ),
}


@pytest.mark.parametrize(("stages", "message"), STAGES.values(), ids=STAGES)
def test_stages_that_do_not_fit_are_refused(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        recipe(*stages)


def test_stages_that_split_one_file_alike_are_accepted() -> None:
    for other in ({}, {"validation_fraction": 0.05}, {"validation_path": "other.jsonl"}):
        recipe(ONE, {**TWO, "data": {**FILE, **other}})


# ---------------------------------------------------------------- before the first step


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("evaluation.component=tusk",), "did you mean 'task'"),
        (("algorithm.advantage={kind='custom', function='math:sqroot'}",), "sqrt"),
        (
            ("rewards.functions=[{function='step_match', options={separator=' '}}]",),
            '"group_relative" is of whole answers',
        ),
        (("algorithm=grpo_process",), "needs rewards of steps"),
    ],
)
def test_recipe_is_refused_before_there_is_a_folder(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    made = small("algorithm=grpo", "rewards.functions=[{function='task'}]", *overrides)
    with pytest.raises(KeelError, match=message):
        train(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def refused(folder: Path, stage: dict[str, Any], message: str, **model: Any) -> None:
    """The run ends with the message, and no step of a first stage was taken."""
    with pytest.raises(KeelError, match=message):
        train(recipe(SFT, stage, **model), folder)
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"stage": "dpo", "data": {**FILE, "path": "nope.jsonl"}}, r"nope\.jsonl"),
        (JUDGE, r"train\.jsonl:1.*chosen"),
        ({"stage": "dpo", "loss": "kto", "data": FILE}, r"train\.jsonl:1.*completion"),
        ({**JUDGE, "objective": "labels"}, r"train\.jsonl:1.*completion"),
        ({**RL, "tasks": [{"name": "nosuch"}]}, "stage 'rl': unknown task 'nosuch'"),
        (
            {**RL, "evaluation": {"sets": [{"name": "x", "task": {"path": "nope.jsonl"}}]}},
            r"stage 'rl': .*nope\.jsonl",
        ),
    ],
)
def test_data_of_a_later_stage_are_read_first(
    stage: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if stage.get("data") is FILE:
        stage = {**stage, "data": data(tmp_path, traces(9, 1), traces(9, 2))}
    brief = {"steps": 2} if stage["stage"] == "rl" else BRIEF
    refused(tmp_path / "run", {**stage, **brief}, message)


def test_model_family_without_the_class_is_refused_first(tmp_path: Path) -> None:
    stage = {**PROCESS, "data": data(tmp_path, traces(9, 1), traces(9, 2))}
    build = {"family": "cohere", "alphabet": "0123456789> ", "hidden_size": 32, "layers": 1}
    refused(tmp_path / "run", stage, "no token classification class", build=build)


def test_errors_of_a_base_name_its_keys(tmp_path: Path) -> None:
    stage = {**JUDGE, "data": data(tmp_path, ones(40, 1), ones(9, 2))}
    refused(
        tmp_path / "run", {**stage, "base": {"name": "./none"}}, r"^reward_model\.base\.name = "
    )
    targets = {"lora": {"rank": 2, "targets": ["nowhere"]}}
    with pytest.raises(KeelError, match=r"reward_model\.base\.lora"):
        train(recipe({**stage, "base": targets}), tmp_path / "one")


def test_unfit_teacher_of_a_later_stage_is_refused_first(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher").replace("teacher.name", "rl.teacher.name")
    name = ("model.build.alphabet=0123456789>x", "rl.algorithm=opd", teacher)
    with pytest.raises(KeelError, match=r"stage 'rl': teacher\.name = .* has another tokenizer"):
        train(small(*name, recipe="quickstart"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_unused_value_optimizer_needs_no_library() -> None:
    for preset, count in (("grpo", 1), ("ppo", 2)):
        (stage,) = small(f"algorithm={preset}", "value.optimizer.kind=adamw_8bit").stages
        assert len(stage.optimizers) == count


@pytest.mark.parametrize("key", ["rl.optimizer.kind", "rl.value.optimizer.kind"])
def test_missing_library_of_a_later_stage_is_named(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    chosen = small("rl.algorithm=ppo", f"{key}=adamw_8bit", recipe="quickstart")
    with pytest.raises(KeelError, match=r"stage 'rl': optimizer\.kind .* needs the bitsandbytes"):
        train(chosen, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("shouts", "'!'.*model.build.alphabet"),
        ("rambles", "more than the model's context"),
        ("falls", "raised RuntimeError"),
    ],
)
def test_invalid_demonstration_is_named(function: str, message: str, tmp_path: Path) -> None:
    build = {"alphabet": "0123456789>", "hidden_size": 32, "layers": 1, "heads": 2, "context": 32}
    stage = {**SFT, "demonstration": f"{HERE}:{function}"}
    with pytest.raises(KeelError, match=message):
        train(load_recipe({"model": {"build": build}, "stages": [stage]}), tmp_path / "run")


def test_epochs_too_few_for_the_policy_are_refused() -> None:
    stage = {**RL, "algorithm": "ppo", "num_train_epochs": 0.2, "value": {"warmup_steps": 50}}
    made = recipe(stage).stages[0]
    with pytest.raises(KeelError, match="leaves the policy none of the stage's 1 steps"):
        made.lasting(100, 32)
