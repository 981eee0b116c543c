"""A stage's memory, time and cost, before it is begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keel.config.schema import Recipe
from keel.config.stage import StageConfig
from keel.learn.optimizer import trainable
from keel.models.policy import Policy
from keel.preflight.context import StageContext
from keel.preflight.duration import DISK_BYTES, Timed, stage_duration
from keel.preflight.finding import Finding
from keel.preflight.memory.child import EXAMPLES
from keel.preflight.memory.machine import available_memory
from keel.preflight.memory.measure import StageMemory, TrialResult, out_of_memory, run_trial
from keel.preflight.memory.process import TrialProcess
from keel.preflight.memory.trial import Trial, trial_of
from keel.preflight.trial_batch import Load, load_of


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What predictions need to know of the policy, which is not in memory meanwhile."""

    load: Load
    device: torch.device
    checkpoint_bytes: int


def facts_of(policy: Policy) -> PolicyFacts:
    """Weights and both moments of what learns are in a checkpoint."""
    weights = sum(p.nbytes for p in policy.parameters())
    moments = sum(8 * p.numel() for _, p in trainable(policy))
    return PolicyFacts(load_of(policy), policy.device, weights + moments)


def predict(
    recipe: Recipe,
    contexts: Sequence[StageContext],
    policy: PolicyFacts,
    price: float | None,
    process: TrialProcess | None = None,
) -> list[dict[str, Any]]:
    """By stage its memory, seconds and cost, as JSON has them; empty where nothing is known.

    What there is no memory for is a finding of the stage's. `process` may have been started before;
    the policy is expected to be gone.
    """
    with process or TrialProcess() as process:
        trial = trial_of(recipe, contexts, policy.load, process.folder / EXAMPLES)
        if trial is None:
            return [{} for _ in contexts]
        room = available_memory(policy.device)
        result = run_trial(process, trial, policy.device, room)
    predicted: list[dict[str, Any]] = []
    for stage, context in zip(recipe.stages, contexts, strict=True):
        context.unseen += trial.omitted.get(stage.name, ())
        context.add(*_findings(recipe, stage, result, room))
        memory = result.stages.get(stage.name)
        if memory is None:
            if context.work.longest is not None:
                context.unseen.append(f"memory and time: {_why_unknown(result)}")
            predicted.append({})
            continue
        timed = _timed(context, memory, trial, policy)
        predicted.append(_as_dict(stage, memory, str(policy.device), room, timed, price))
    return predicted


def _findings(
    recipe: Recipe, stage: StageConfig, result: TrialResult, room: int | None
) -> Iterator[Finding]:
    memory = result.stages.get(stage.name)
    key = f"{stage.name}.token_budget" if len(recipe.stages) > 1 else "token_budget"
    if memory is not None and room is not None and memory.peak > room:
        yield out_of_memory(memory.peak, room, f"measured in the phase {memory.phase!r}", key)
    if result.full and stage.name == (result.stopped or recipe.stages[0].name):
        why = f"a trial step stopped in the phase {result.phase!r}: {result.why}"
        yield out_of_memory(None, room, why, key)


def _why_unknown(result: TrialResult) -> str:
    stopped = result.stopped or "the trial run"
    return f"{stopped!r} ran out of memory" if result.full else f"{stopped!r}: {result.why}"


def _timed(context: StageContext, memory: StageMemory, trial: Trial, policy: PolicyFacts) -> Timed:
    """The trial's seconds, for the tokens of a step."""
    work, seconds = context.work, memory.seconds
    learned = work.tokens / max(memory.tokens, 1.0)
    sampled = work.sequences * work.decoded / max(trial.sampled_tokens(context.name), 1)
    return Timed(
        measuring=seconds.get("score", 0.0) * learned,
        learning=seconds.get("update", 0.0) * learned,
        checkpoint=policy.checkpoint_bytes / DISK_BYTES,
        sequences=work.sequences,
        sampling=seconds.get("rollout", 0.0) * sampled,
        scoring=work.scoring,
        evaluated=work.evaluated,
    )


def _as_dict(
    stage: StageConfig,
    memory: StageMemory,
    device: str,
    room: int | None,
    timed: Timed,
    price: float | None,
) -> dict[str, Any]:
    """As JSON has it: bytes, seconds, and the cost where a price is given."""
    duration = stage_duration(stage, timed)
    out: dict[str, Any] = {
        "memory": {
            "device": device,
            "peak": memory.peak,
            "phase": memory.phase,
            "phases": dict(memory.phases),
            "room": room,
        },
        "seconds": round(duration.seconds, 1),
        "time": {name: round(seconds, 1) for name, seconds in duration.parts},
    }
    return out if price is None else {**out, "cost": round(duration.cost(price), 4)}


def with_judges(predicted: dict[str, Any], context: StageContext) -> dict[str, Any]:
    """The stage's prediction with what its judges will be paid; their dollars join its cost."""
    judges = [one for one in context.work.forecasts if one.bound.dollars]
    if not judges:
        return predicted
    dollars = {
        name: round(sum(getattr(one, name).dollars for one in judges), 4)
        for name in ("low", "estimate", "high", "bound")
    }
    cost = round(predicted.get("cost", 0.0) + dollars["estimate"], 4)
    return {**predicted, "judge": dollars, "cost": cost}


def totals(predicted: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds and cost of all stages together."""
    seconds = sum(one.get("seconds", 0.0) for one in predicted)
    costs = [one["cost"] for one in predicted if "cost" in one]
    return {"seconds": round(seconds, 1), **({"cost": round(sum(costs), 4)} if costs else {})}
