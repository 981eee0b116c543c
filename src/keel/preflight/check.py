"""`keel check`: everything a recipe names is loaded, one batch sampled and scored, nothing trained.

Stage by stage: what would go wrong, with the evidence and the key to change. What a stage's policy
or reward will have learned by then cannot be looked at, and the report says so. No run folder is
written, and nobody is paid: a judge is not asked, but its price is reckoned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from keel.config.judging import JudgingStage
from keel.config.load import Source, load_recipe
from keel.config.schema import Recipe, RLStage, SFTStage, Stage
from keel.config.seeds import derive
from keel.engines.compiled import is_llama_like
from keel.engines.stopping import eos_ids, split_stops
from keel.learn.custom import check_entries
from keel.learn.optimizer import trainable
from keel.models.kernels.build import fingerprint
from keel.models.policy import Policy, load_policy
from keel.models.value import load_critic
from keel.preflight.context import Figure, PolicyOrigin, StageContext
from keel.preflight.data_stage import inspect_demonstrations, inspect_preference_data
from keel.preflight.finding import Finding
from keel.preflight.findings import prompts as prompt_findings
from keel.preflight.findings import settings as setting_findings
from keel.preflight.findings import tokens as token_findings
from keel.preflight.judge_cost import over_budget
from keel.preflight.memory.process import TrialProcess
from keel.preflight.prediction import facts_of, predict, totals, with_judges
from keel.preflight.prompt_stats import SamplingPlan, sampling_plan
from keel.preflight.sampling_stage import inspect_sampling_stage
from keel.preflight.unused_keys import Facts, unused_keys
from keel.runs.trackers import check_trackers
from keel.types import KeelError

LOOKED_AT = 4_000_000
"""Weights that are read, of each tensor, to see how many a step would move."""


@dataclass(frozen=True)
class StageReport:
    """What was seen of a stage: figures in order, and what could not be looked at."""

    name: str
    kind: str
    figures: dict[str, Figure]
    unseen: tuple[str, ...] = ()
    predicted: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a preflight saw and found. `seconds` is what it took; `predicted` is of all stages
    together, as each stage's own is of one."""

    recipe: str
    stages: tuple[StageReport, ...]
    findings: tuple[Finding, ...]
    seconds: float
    predicted: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "recipe": self.recipe,
            "stages": [asdict(stage) for stage in self.stages],
            "findings": [one.as_dict() for one in self.findings],
            "predicted": self.predicted,
            "seconds": self.seconds,
        }


def check(
    source: Source,
    overrides: Sequence[str] = (),
    price: float | None = None,
    *,
    predicts: bool = True,
    process: TrialProcess | None = None,
) -> Report:
    """Look at a recipe: a TOML file, a shipped name or a mapping, with `key=value` overrides.

    `price` is of an hour of this machine. Without `predicts` memory and time are left out; they are
    measured in a process of its own, which may have been started before (`process`).
    Raises KeelError where the recipe cannot be read or its model not be loaded; whatever else would
    stop a stage is a finding.
    """
    start = time.perf_counter()
    recipe = load_recipe(source, overrides)
    with _threads(recipe.threads):
        policy = load_policy(recipe.model, recipe.seed)
        seen = [_stage(recipe, number, policy) for number in range(len(recipe.stages))]
        of_keys = unused_keys(source, overrides, recipe, _facts(recipe, policy, seen))
        of_model = list(_of_model(recipe, policy))
        facts = facts_of(policy)
    del policy  # the trial has one of its own
    predicted = predict(recipe, seen, facts, price, process) if predicts else [{} for _ in seen]
    findings = [
        *of_keys,
        *of_model,
        *_across(recipe, seen),
        *over_budget([forecast for stage in seen for forecast in stage.work.forecasts]),
        *(one for stage in seen for one in stage.findings),
    ]
    predicted = [with_judges(*pair) for pair in zip(predicted, seen, strict=True)]
    stages = tuple(
        StageReport(s.name, s.kind, s.figures, tuple(s.unseen), said)
        for s, said in zip(seen, predicted, strict=True)
    )
    order = {"error": 0, "warning": 1}
    findings = sorted(dict.fromkeys(findings), key=lambda one: order[one.severity])
    seconds = round(time.perf_counter() - start, 3)
    return Report(recipe.name, stages, tuple(findings), seconds, totals(predicted))


def _stage(recipe: Recipe, number: int, policy: Policy) -> StageContext:
    """A stage looked at, on its own."""
    stage = recipe.stages[number]
    seen = StageContext(stage.name, stage.stage, {"steps": stage.steps})
    key = f"{stage.name}." if len(recipe.stages) > 1 else ""
    _settings(seen, recipe, stage, key)
    try:
        check_trackers(stage.trackers)
    except KeelError as error:
        seen.stops("before its first step", error, f"{key}trackers")
    if stage.demonstrated:
        inspect_demonstrations(seen, recipe, cast(SFTStage, stage), policy)
    if stage.records is not None:
        inspect_preference_data(seen, recipe, cast(JudgingStage, stage), policy)
    if stage.sampling is not None and stage.sampling.algorithm is not None:
        _inspect_rl(seen, recipe, cast(RLStage, stage), policy)
    plan = sampling_plan(recipe, stage)
    if plan is not None:
        before = [s.name for s in recipe.stages[:number] if s.trains_policy]
        own = PolicyOrigin(before[-1] if before else None, recipe.model.build is not None)
        inspect_sampling_stage(seen, recipe, stage, plan, policy, own)
        talks = seen.source is not None and seen.source.conversations
        if plan.sampling.algorithm is not None and talks:
            _end_of_turn(seen, plan, policy, f"{key}rollout")
    if stage.prompts_in_step is not None:
        _epochs(seen, stage.steps * stage.prompts_in_step)
    return seen


def _end_of_turn(seen: StageContext, plan: SamplingPlan, policy: Policy, key: str) -> None:
    """Whether what closes a turn ends a completion. `key` is that of the rollout table."""
    tokenizer = policy.tokenizer
    with suppress(KeelError):  # as the batch is sampled, it is a finding
        texts, ids = split_stops(plan.rollout.stop, tokenizer)
        stops = (*eos_ids(policy.model, tokenizer), *plan.rollout.stop_ids, *ids)
        closed = token_findings.closing(tokenizer, plan.sampling.prompts.chat_template)
        seen.add(token_findings.end_of_turn(closed, stops, texts, key))


def _settings(seen: StageContext, recipe: Recipe, stage: Stage, key: str) -> None:
    """Findings from the stage's values alone."""
    optimizer = f"{key}optimizer"
    seen.add(
        setting_findings.warm_up(stage.optimizer, stage.steps, optimizer),
        setting_findings.adapter_rate(recipe.model, stage.optimizer, optimizer)
        if stage.trains_policy
        else None,
    )
    plan = sampling_plan(recipe, stage)
    if plan is not None:
        seen.add(*setting_findings.timeouts(plan.rewards, f"{plan.key}rewards"))
        seen.add(*setting_findings.shared_interpreters(plan.rewards, f"{plan.key}rewards"))


def _inspect_rl(seen: StageContext, recipe: Recipe, stage: RLStage, policy: Policy) -> None:
    """Its settings, and the other models and functions that its objective names."""
    key = f"{stage.name}." if len(recipe.stages) > 1 else ""
    critic = stage.value.optimizer
    seen.add(
        setting_findings.overlong(stage, f"{key}rollout"),
        setting_findings.reuse(stage, f"{key}epochs"),
        setting_findings.still_ratio(stage, f"{key}minibatches"),
        None
        if critic is None or stage.algorithm.value is None
        else setting_findings.warm_up(critic, stage.steps, f"{key}value.optimizer"),
    )
    try:
        check_entries(stage.algorithm)
    except KeelError as error:
        seen.stops("as its objective is made", error, f"{key}algorithm")
    if stage.algorithm.value is None or stage.value.name is None:
        return
    try:
        load_critic(stage.value.name, policy, recipe.model, derive(recipe.seed, stage.name))
    except KeelError as error:
        seen.stops("as its value model is made", error, f"{key}value.name")


def _epochs(seen: StageContext, prompts: int) -> None:
    """How often the stored rows are gone through."""
    rows = None if seen.source is None else seen.source.rows
    if rows:
        seen.figures["epochs"] = round(prompts / rows, 2)


def _of_model(recipe: Recipe, policy: Policy) -> Iterator[Finding]:
    """Findings of the model and its tokenizer."""
    tokenizer = policy.tokenizer
    named = getattr(getattr(policy.model, "generation_config", None), "eos_token_id", None)
    ids = () if named is None else (named,) if isinstance(named, int) else tuple(named)
    pair = token_findings.eos_pair(
        tokenizer.eos_token_id, ids, str(tokenizer.eos_token), "model.name"
    )
    if pair is not None:
        yield pair
    if is_llama_like(policy.model.base_model):
        slow = setting_findings.no_compiler(fingerprint("decode"))
        if slow is not None:
            yield slow
    for stage in recipe.stages:
        if not stage.trains_policy or recipe.model.dtype != "bfloat16":
            continue
        rate = stage.optimizer.learning_rate
        frozen = setting_findings.frozen_weights(
            recipe.model.dtype,
            _unmoved(policy, rate),
            rate,
            f"{stage.name}.optimizer.learning_rate",
        )
        if frozen is not None:
            yield frozen
            return


@torch.no_grad()
def _unmoved(policy: Policy, rate: float) -> float:
    """The share of bfloat16 weights that learn of which a step of `rate` is less than half of the
    last bit: |w| in [2^e, 2^(e+1)) has a last bit of 2^(e−7)."""
    still = count = 0
    for _, parameter in trainable(policy):
        if parameter.dtype != torch.bfloat16:
            continue
        some = parameter.detach().flatten()[:LOOKED_AT].float().abs()
        last = torch.exp2(torch.floor(torch.log2(some.clamp_min(1e-30))) - 7)
        still += int((last / 2 > rate).sum())
        count += some.numel()
    return still / count if count else 0.0


def _across(recipe: Recipe, seen: Sequence[StageContext]) -> Iterator[Finding]:
    """Held-out prompts that a stage before, or another task of the stage, learns from."""
    for at, stage in enumerate(seen):
        if stage.source is None or not stage.source.heldout:
            continue
        for before in seen[: at + 1]:
            rows = before.source is None or not before.source.learned
            learned = before.learned if before.source is None else before.source.learned
            prefix = f"{before.name}." if len(seen) > 1 else ""
            finding = prompt_findings.trained_on_held_out(
                len(stage.source.heldout & (learned | before.learned)),
                len(stage.source.heldout),
                before.name,
                stage.name,
                f"{prefix}data.validation_path"
                if rows
                else f"{prefix}tasks.0.validation_fraction"
                if before is stage
                else f"{prefix}tasks.0.validation_path",
            )
            if finding is not None:
                yield finding


def _facts(recipe: Recipe, policy: Policy, seen: Sequence[StageContext]) -> Facts:
    """What the loaded parts say of keys."""
    sources = [stage.source for stage in seen if stage.source is not None and stage.source.first]
    rows = any(stage.preference_data is not None for stage in recipe.stages)
    whole = len(sources) == len(seen)
    talks = any(source.conversations for source in sources)
    name = recipe.model.name
    return Facts(
        cpu=policy.device.type == "cpu",
        local=name is not None and Path(name).expanduser().is_dir(),
        kv_heads=hasattr(policy.model.config, "num_key_value_heads"),
        template=policy.tokenizer.chat_template is not None,
        conversations=True if talks else False if whole and not rows else None,
        unread={s.name: s.unread for s in seen},
        replies={s.name: s.source.replies for s in seen if s.source is not None},
    )


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """The recipe's threads for a while."""
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
