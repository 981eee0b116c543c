"""A stage's memory, time and cost, from a trial run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keel.config.stage import StageConfig
from keel.learn.optimizer import trainable
from keel.models.policy import Policy
from keel.preflight.context import StageContext
from keel.preflight.judge_cost import evaluations_of
from keel.preflight.memory import (
    StageMemory,
    TrialResult,
    available_memory,
    out_of_memory,
    run_trial,
)
from keel.preflight.trial import Trial, trial_of
from keel.preflight.trial_batch import Load, load_of
from keel.preflight.trial_process import TrialProcess

DISK_BYTES = 300e6
"""Written, read again for the checksum and synced in a second."""


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What predictions need to know of the policy, which is not in memory meanwhile."""

    load: Load
    device: torch.device
    checkpoint_bytes: int


def facts_of(policy: Policy) -> PolicyFacts:
    """A checkpoint holds the weights, and both moments of what is trained."""
    weights = sum(p.nbytes for p in policy.parameters())
    moments = sum(8 * p.numel() for _, p in trainable(policy))
    return PolicyFacts(load_of(policy), policy.device, weights + moments)


def predict(
    contexts: Sequence[StageContext],
    policy: PolicyFacts,
    price: float | None,
    process: TrialProcess | None = None,
) -> list[dict[str, Any]]:
    """The memory, seconds and cost of each stage, in JSON types; empty where nothing is known.

    A lack of memory is added to the stage's findings. `process` may have been started before.
    """
    with process or TrialProcess() as process:
        trial = trial_of(contexts, policy.load, process.examples)
        if trial is None:
            return [{} for _ in contexts]
        room = available_memory(policy.device)
        result = run_trial(process, trial, policy.device, room)
    predicted: list[dict[str, Any]] = []
    for context in contexts:
        name = context.stage.name
        context.unseen += trial.omitted.get(name, ())
        processes = context.recipe.cluster.processes
        if processes > 1 and context.stage.shared_by_processes:
            context.unseen.append(f"memory and time of {processes} processes: those are of one")
        _check_memory(context, result, room)
        memory = result.stages.get(name)
        if memory is None:
            if context.work.longest is not None:
                stopped = result.stopped or "the trial run"
                why = " ran out of memory" if result.full else f": {result.why}"
                context.unseen.append(f"memory and time: {stopped!r}{why}")
            predicted.append({})
            continue
        parts = _parts(context, memory, trial, policy.checkpoint_bytes / DISK_BYTES)
        seconds = sum(parts.values())
        found: dict[str, Any] = {
            "memory": {
                "device": str(policy.device),
                "peak": memory.peak,
                "phase": memory.phase,
                "phases": dict(memory.phases),
                "room": room,
            },
            "seconds": round(seconds, 1),
            "time": {part: round(time, 1) for part, time in parts.items()},
        }
        if price is not None:
            found["cost"] = round(seconds / 3600 * price, 4)
        predicted.append(found)
    return predicted


def _check_memory(context: StageContext, result: TrialResult, room: int | None) -> None:
    recipe, name = context.recipe, context.stage.name
    memory, key = result.stages.get(name), f"{context.prefix}token_budget"
    if memory is not None and room is not None and memory.peak > room:
        evidence = f"measured in the phase {memory.phase!r}"
        context.add(out_of_memory(memory.peak, room, evidence, key))
    if result.full and name == (result.stopped or recipe.stages[0].name):
        evidence = f"a trial step stopped in the phase {result.phase!r}: {result.why}"
        context.add(out_of_memory(None, room, evidence, key))


def _parts(
    context: StageContext, memory: StageMemory, trial: Trial, checkpoint: float
) -> dict[str, float]:
    """The seconds of a stage by part, from those of the trial's step."""
    stage, work, timed = context.stage, context.work, memory.seconds
    learned = work.tokens / max(memory.tokens, 1.0)
    sampled = work.sequences * work.decoded / max(trial.sampled_tokens(stage.name), 1)
    step = {
        "sampling": timed.get("rollout", 0.0) * sampled,
        "scoring": work.scoring,
        "measuring": timed.get("score", 0.0) * learned,
        "learning": timed.get("update", 0.0) * learned,
    }
    evaluation = None if stage.sampling is None else stage.sampling.evaluation
    answers = 0 if evaluation is None else work.evaluated * (1 + evaluation.samples)
    one = (step["sampling"] + step["scoring"]) / max(work.sequences, 1)
    return stage_parts(stage, step, checkpoint, one * answers)


def stage_parts(
    stage: StageConfig, step: Mapping[str, float], checkpoint: float, evaluation: float
) -> dict[str, float]:
    """The seconds of a whole stage by part, without parts of 0.

    Given are the seconds of one step ("sampling", "scoring", "measuring", and "learning" in one
    pass), of a checkpoint and of an evaluation. Left out are loading, evaluations on preference
    data, and what longer answers would take.
    """
    parts = {name: seconds * stage.steps for name, seconds in step.items()}
    parts["learning"] *= stage.passes
    parts["evaluation"] = evaluation * evaluations_of(stage)
    # Every so many steps, and at the end.
    parts["checkpoints"] = checkpoint * ((stage.steps - 1) // stage.checkpoints.every + 1)
    return {name: seconds for name, seconds in parts.items() if seconds}


def with_judges(predicted: dict[str, Any], context: StageContext) -> dict[str, Any]:
    """The stage's prediction with the dollars of its judges, which are added to its cost."""
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
