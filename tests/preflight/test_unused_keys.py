"""Keys without effect: each condition in the schema is tried, in a recipe where it holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from keel.algorithms.terms import UnusedIf
from keel.config.errors import models_in
from keel.config.load import load_recipe, read_own, shipped, to_toml
from keel.config.schema import Recipe
from keel.preflight.settings import Facts, unused_keys

WHERE = re.compile(r"\\\{.*?\\\}")
LOCAL = Facts(cpu=True, local=False, conversations=False, replies={"rl": False})
CHAT = Facts(cpu=False, local=False, conversations=True, replies={"rl": True})
BUILD: dict[str, Any] = {"build": {"hidden_size": 64}}
TASK: dict[str, Any] = {"name": "sort_digits"}
FILE: dict[str, Any] = {"name": "jsonl", "path": "rows.jsonl", "answer": "answer"}


def conditions(model: type[BaseModel]) -> Iterator[UnusedIf]:
    """Every condition of the keys below a model."""
    for info in model.model_fields.values():
        yield from (mark for mark in info.metadata if isinstance(mark, UnusedIf))
        for inner in models_in(info):
            yield from conditions(inner)


def found(recipe: dict[str, Any], *overrides: str, facts: Facts = LOCAL) -> list[str]:
    loaded = load_recipe(recipe, overrides)
    return [one.key for one in unused_keys(recipe, overrides, loaded, facts)]


def rl(**keys: Any) -> dict[str, Any]:
    return {"model": keys.pop("model", BUILD), "tasks": keys.pop("tasks", [TASK]), **keys}


def rewarded(*functions: dict[str, Any]) -> dict[str, Any]:
    return rl(rewards={"functions": list(functions)})


def before(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe's stage followed by another, so that no `keel eval` reads its keys."""
    model = recipe.pop("model")
    last = {"stage": "sft", "tasks": [TASK]}
    return {"model": model, "stages": [{"stage": "rl", **recipe}, last]}


def judging(stage: str, **keys: Any) -> dict[str, Any]:
    source = {} if "sampled" in keys else {"data": {"name": "jsonl", "path": "rows.jsonl"}}
    return {"model": BUILD, "stages": [{"stage": stage, **source, **keys}]}


def imitating(task: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    source = {"name": "jsonl", "path": "rows.jsonl", **data}
    table = {"data": [source]} if task is None else {"tasks": [task]}
    return {"model": BUILD, "stages": [{"stage": "sft", **table}]}


SAMPLED: dict[str, Any] = {"tasks": [TASK]}
PAIRWISE = {"model": "m", "mode": "pairwise"}
SHOWN = "algorithm=chord demonstrations.data=[{name='a:b'}]"
SERVED = "algorithm.corrections.kind=truncate rollout.engine=vllm"
URL = f"{SERVED} rollout.vllm.url=http://127.0.0.1:8000"
OVERRIDES = f"""
model.build.tokenizer=bytes model.build.alphabet=0123
prompts.chat_template.thinks=true
optimizer.min_lr_ratio=0.5
optimizer.muon_momentum=0.9
optimizer.offload=cpu
trackers.project=mine
alerts.on=["finished"]
stop_when.0.metric=kl stop_when.0.above=0.5 stop_when.0.mode=min
trackers.mlflow=true trackers.completions=3
trackers.mlflow=true trackers.histograms=false
cluster.rollout_workers=3
cluster.deadline=30
rollout.max_turns=3
rollout.stored=runs/a
rollout.engine=stored rollout.stored=runs/a rollout.curriculum.low=0.2
model.lora.adapter=a/b model.lora.rank=4
rollout.program=mine.py:run rollout.max_turns=3
rollout.reply_role=tool
rollout.max_programs=3
rollout.program=mine.py:run rollout.overlap_rewards=true
rollout.max_refills=3
rollout.vllm.gpu_memory_utilization=0.6
{URL} rollout.vllm.start_timeout=9.0
{URL} rollout.dtype=bfloat16
{SERVED} rollout.vllm.gpus=[0]
algorithm.corrections.kind=truncate model.dtype=bfloat16 rollout.dtype=bfloat16
algorithm=opd teacher.name=a/b rollout.overlong_buffer=8
algorithm=opd teacher.name=a/b rollout.length_penalty=0.1
algorithm=opd teacher.name=a/b rollout.truncated_factor=0.5
algorithm=ppo rollout.group_size=1 rollout.length_penalty=0.1
algorithm=opd model.dtype=bfloat16 teacher.name=a/b teacher.dtype=bfloat16
algorithm=opd teacher.name=a/b teacher.weights=live
algorithm=opd teacher.prompt=x teacher.rate=0.5
algorithm=opd teacher.name=a/b teacher.requests=4
algorithm=opd teacher.name=a/b teacher.timeout=9.0
algorithm=opd teacher.name=a/b teacher.retries=1
algorithm=opd teacher.name=a/b teacher.api_key_env=KEY
algorithm=opd teacher.name=a/b teacher.url=http://a/v1 teacher.dtype=bfloat16
algorithm=opd teacher.name=a/b teacher.url=http://a/v1 teacher.revision=main
algorithm=opd teacher.prompt=x teacher.revision=main
algorithm=ppo algorithm.advantage.adaptive_alpha=0.1 algorithm.advantage.lam=0.9
algorithm=dr_grpo algorithm.advantage.epsilon=0.1
algorithm=dr_grpo algorithm.advantage.ddof=0
algorithm.surrogate.high=0.28
algorithm.surrogate.dual=3.0
algorithm=cispo minibatches=1 algorithm.surrogate.cap=3.0
algorithm=cispo minibatches=1 algorithm.surrogate.floor=0.5
algorithm=sapo minibatches=1 algorithm.surrogate.temperature_positive=2.0
algorithm.weights.constant=99
algorithm=dppo_tv minibatches=1 algorithm.masks.0.low=0.1
algorithm=dppo_tv minibatches=1 algorithm.masks.0.high=0.1
algorithm=dppo_kl minibatches=1 algorithm.masks.0.low=0.1
algorithm=dppo_kl minibatches=1 algorithm.masks.0.high=0.1
algorithm=m2po minibatches=1 algorithm.masks.0.bound=0.1
{SHOWN} algorithm.auxiliary.0.decay_steps=9
algorithm.divergence.beta=0.0 algorithm.divergence.estimator=k2
algorithm=ppo_kl_penalty algorithm.divergence.adaptive.horizon=50.0
algorithm=ppo epochs=1 algorithm.value.clip=0.5
algorithm.corrections=[{{kind='reject',statistic='k2',cap=0.1}}] algorithm.corrections.0.floor=0.1
algorithm=pass_k algorithm.advantage.scale=none algorithm.advantage.epsilon=0.1
value.warmup_steps=2
value.kind=head
value.optimizer.learning_rate=1e-4
algorithm=dapo reference.reset_every=5
steps=100 reference.reset_every=100
algorithm=ppo reference.measured=true
evaluation.every=200
rollouts_every=500
tasks.0.weight=2.0
tasks.0.bad_rows=quarantine
"""
"""Overrides of which the last sets a key that has no effect."""
CASES: list[tuple[Any, ...]] = [
    *(
        (words[-1].partition("=")[0], rl(), tuple(words))
        for words in map(str.split, OVERRIDES.strip().splitlines())
    ),
    ("algorithm.auxiliary.0.kind", rl(), ("algorithm.auxiliary=[{kind='replies'}]",), CHAT),
    ("model.autocast", rl(model={**BUILD, "autocast": False}), ()),
    ("model.autocast", rl(model={**BUILD, "autocast": False}), ("model.dtype=float64",), CHAT),
    ("model.head_dtype", rl(model={**BUILD, "head_dtype": "tf32"}), ()),
    ("model.compile", rl(model={**BUILD, "compile": True}), ()),
    ("cluster.offload", rl(cluster={"offload": "cpu"}), (), CHAT),
    ("cluster.offload", rl(cluster={"processes": 2, "offload": "cpu"}), ()),
    ("rollout.vllm.sleep_level", rl(),
     (*SERVED.split(), "rollout.async_level=1", "rollout.vllm.sleep_level=2"),
     replace(LOCAL, cpu=False)),
    ("model.revision", rl(model={**BUILD, "revision": "main"}), ()),
    ("model.revision", rl(model={"name": ".", "revision": "main"}), (), replace(LOCAL, local=True)),
    ("model.trust_remote_code", rl(model={**BUILD, "trust_remote_code": True}), ()),
    ("model.chat_template", rl(model={**BUILD, "chat_template": "{{ messages }}"}), ()),
    ("model.build.kv_heads", rl(model={"build": {"family": "gpt2", "kv_heads": 2}}), (),
     replace(LOCAL, kv_heads=False)),
    ("prompts.chat_template.thinks", rl(prompts={"chat_template": {"thinks": True, "dates": True}}),
     (), replace(CHAT, unread={"rl": frozenset({"thinks"})})),
    ("algorithm.advantage.gamma",
     rl(), ("algorithm=gigpo", "algorithm.advantage.omega=0", "algorithm.advantage.gamma=0.9")),
    ("tasks.0.weight", rl(), ("tasks.weight=2.0",)),
    ("tasks.0.raw", rl(tasks=[{**TASK, "raw": True}]), (), replace(LOCAL, template=False)),
    ("tasks.0.validation_fraction", rl(tasks=[{**TASK, "validation_fraction": 0.2}]), ()),
    ("tasks.0.validation_fraction",
     rl(tasks=[{**FILE, "validation_path": "b.jsonl", "validation_fraction": 0.2}]), ()),
    ("rewards.functions.1.clip", rewarded({"function": "task"}, {
        "function": "place_match", "weight": 0.0, "clip": [0.0, 0.5]}), ()),
    ("rewards.functions.0.options.timeout",
     rewarded({"function": "outcome", "options": {"model": "m", "timeout": 9.0}}), ()),
    ("rewards.functions.0.options.rivals",
     rewarded({"function": "judge", "options": {"model": "m", "rivals": 3}}), ()),
    ("rewards.functions.0.options.low",
     rewarded({"function": "judge", "options": {**PAIRWISE, "low": 1.0}}), ()),
    ("rewards.functions.0.options.rivals", rewarded({
        "function": "judge", "options": {**PAIRWISE, "against": "gold", "rivals": 3}}), ()),
    ("rollout.overlap_rewards", rl(),
     ("rollout.max_turns=2", "rollout.overlap_rewards=true"), replace(LOCAL, replies={})),
    ("rl.evaluation.samples", before(rl()), ("rl.evaluation.prompts=0", "rl.evaluation.samples=4")),
    ("rl.evaluation.temperature", before(rl()), ("rl.evaluation.temperature=0.5",)),
    ("sampled.rewards.functions.0.correctness", judging("dpo", sampled={
        **SAMPLED, "rewards": {"functions": [{"function": "task", "correctness": True}]}}), ()),
    ("evaluation.every", judging("dpo", evaluation={"rows": 0, "every": 5}), ()),
    ("threshold", judging("process_reward_model", threshold=0.3, evaluation={"rows": 0}), ()),
    ("chat_template.thinking", judging("dpo", chat_template={"thinking": True}), ()),
    ("sampled.pairs",
     judging("reward_model", objective="labels", sampled={**SAMPLED, "pairs": 3}), ()),
    ("sampled.price", judging("reward_model", sampled={**SAMPLED, "price": 0.01}), ()),
    ("sampled.validation",
     judging("dpo", sampled={**SAMPLED, "validation": 9}, evaluation={"rows": 0}), ()),
    ("sampled.tasks.0.weight",
     judging("dpo", sampled={"tasks": [{**TASK, "weight": 3.0}]}), ()),
    ("data.0.weight", imitating(weight=2.0), ()),
    ("data.0.validation_fraction", imitating(
        name="datasets", options={"streaming": True}, validation_fraction=0.2), ()),
    ("demonstration", imitating(), ("demonstration=m:f",)),
    ("packing", imitating(TASK), ("packing=true",)),
    ("evaluation.every", imitating(), ("evaluation={rows=0,every=5}",)),
]  # fmt: skip
UNUSED = [(*case, LOCAL)[:4] for case in CASES]
"""Key, recipe, overrides, facts."""


@pytest.mark.parametrize(
    ("key", "recipe", "overrides", "facts"), UNUSED, ids=[c[0] for c in UNUSED]
)
def test_unused_key_is_reported_alone(
    key: str, recipe: dict[str, Any], overrides: tuple[str, ...], facts: Facts
) -> None:
    assert found(recipe, *overrides, facts=facts) == [key]


EFFECTS = """
optimizer.schedule=linear optimizer.min_lr_ratio=0.5
optimizer.kind=muon optimizer.muon_momentum=0.9
model.dtype=bfloat16 optimizer.offload=cpu
trackers.wandb=true trackers.project=mine
rollout.max_turns=3 algorithm=dapo rollout.max_refills=3
algorithm.surrogate.high=0.28 minibatches=2
rollout.length_penalty=0.1 rollout.truncated_factor=0.5
algorithm.surrogate.high=0.28 rollout.old_log_probs=engine
algorithm=cispo algorithm.surrogate.cap=3.0
algorithm=ppo value.warmup_steps=2
algorithm=dr_grpo algorithm.weights.constant=99
algorithm=dppo_tv minibatches=2 algorithm.masks.0.low=0.1
algorithm=dppo_tv minibatches=2 algorithm.masks.0.high=0.1
algorithm=dppo_kl minibatches=2 algorithm.masks.0.low=0.1
algorithm=dppo_kl minibatches=2 algorithm.masks.0.high=0.1
algorithm=m2po minibatches=2 algorithm.masks.0.bound=0.1
algorithm=chord demonstrations.data=[{name='a:b'}] algorithm.auxiliary={final=0.0,decay_steps=9}
algorithm=ppo algorithm.value.clip=0.5 value.optimizer.learning_rate=1e-4
algorithm=ppo algorithm.divergence.beta=0.0 reference.measured=true
rollout.max_turns=3 algorithm.auxiliary=[{kind='replies',coefficient=0.2}]
rollout.program=mine.py:run algorithm.auxiliary=[{kind='replies'}]
reference.measured=true
reference.reset_every=10
evaluation.samples=4 evaluation.temperature=0.5 evaluation.every=100
evaluation.prompts=0 evaluation.samples=4 evaluation.threshold=0.5
evaluation.temperature=0.5
"""
"""Overrides that all have an effect: `keel eval` of the run reads those of evaluations."""
EFFECTIVE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *((rl(), tuple(line.split())) for line in EFFECTS.strip().splitlines()),
    (rl(model={**BUILD, "autocast": False, "chat_template": "{{ messages }}"}), ()),
    (rl(model={"name": "a/b", "revision": "main", "trust_remote_code": True}), ()),
    (rl(tasks=[{**TASK, "weight": 2.0}, TASK]), ()),
    (rl(tasks=[{**FILE, "validation_fraction": 0.2, "bad_rows": "quarantine"}]), ()),
    (judging("dpo", sampled={**SAMPLED, "pairs": 3, "validation": 9}), ()),
]


@pytest.mark.parametrize(("recipe", "overrides"), EFFECTIVE)
def test_key_with_an_effect_is_not_reported(
    recipe: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    assert found(recipe, *overrides, facts=CHAT) == []


@pytest.mark.parametrize("facts", [LOCAL, CHAT])
@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_recipes_set_no_unused_key(name: str, facts: Facts, tmp_path: Path) -> None:
    """Neither as they are shipped, nor written out with every default, as a run folder has them.

    (Written out, what one recipe inherits from another looks as if it had set it itself.)
    """
    recipe = load_recipe(name)
    facts = replace(facts, replies={"rl": facts.replies["rl"] or "tool" in name})
    assert unused_keys(name, (), recipe, facts) == []
    if "extends" in read_own(name)[0]:
        return
    whole = tmp_path / "recipe.toml"
    whole.write_text(to_toml(recipe), encoding="utf-8")
    assert unused_keys(str(whole), (), recipe, facts) == []


def test_only_written_keys_that_change_something_are_reported(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text('extends = "tiny"\nrollout.max_refills = 3\nsteps = 7\n', encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'extends = "base.toml"\nsteps = 9\nepochs = 1\n[optimizer]\nmin_lr_ratio = 0.1\n',
        encoding="utf-8",
    )
    overrides = ["rollouts_every=500", "algorithm.surrogate.high=0.3"]
    loaded = load_recipe(str(recipe), overrides)
    assert loaded.stages[0].rollout.max_refills == 3  # type: ignore[union-attr]
    findings = unused_keys(str(recipe), overrides, loaded, LOCAL)
    assert [(one.key, one.what) for one in findings] == [
        ("rollouts_every", "rollouts_every = 500 has no effect"),
        ("algorithm.surrogate.high", "algorithm.surrogate.high = 0.3 has no effect"),
    ]


def test_keys_of_a_replaced_preset_are_not_reported() -> None:
    changes = {"divergence": {"beta": 0.0, "where": "reward"}, "surrogate": {"low": 0.1}}
    recipe = rl(algorithm={"preset": "grpo", **changes})
    assert len(found(recipe)) == 2
    assert found(recipe, "algorithm=rloo") == []


def test_unused_keys_are_named_with_their_stage() -> None:
    recipe = {
        "model": BUILD,
        "stages": [
            {"stage": "sft", "tasks": [TASK], "optimizer": {"min_lr_ratio": 0.3}},
            {"stage": "rl", "name": "second", "tasks": [TASK]},
        ],
    }
    assert found(recipe, "second.rollout.max_refills=2", "rollouts_every=400") == [
        "sft.optimizer.min_lr_ratio",
        "second.rollout.max_refills",
        "second.rollouts_every",
    ]


def test_every_condition_of_the_schema_has_a_case() -> None:
    """A new condition needs a recipe in `UNUSED` where it holds."""
    reasons = [
        one.evidence
        for _, recipe, overrides, facts in UNUSED
        for one in unused_keys(recipe, overrides, load_recipe(recipe, overrides), facts)
    ]
    assert reasons
    untried = {
        mark.why
        for mark in conditions(Recipe)
        if not any(re.fullmatch(WHERE.sub(".*", re.escape(mark.why)), one) for one in reasons)
    }
    assert sorted(untried) == []
