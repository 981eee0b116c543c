"""A stage's memory against the machine's, its time and its cost, before it is begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keel.config.judging import DPOStage, ProcessRewardModelStage, RewardModelStage
from keel.config.schema import Recipe, RLStage, Stage
from keel.config.seeds import derive
from keel.learn.optimizer import trainable
from keel.learn.token_budget import TokenBudget
from keel.models.policy import Policy
from keel.models.reference import reference_for
from keel.models.reward import Kind, reward_model_from
from keel.preflight.context import StageContext
from keel.preflight.duration import Duration, StageSizes, Timed, stage_duration
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found
from keel.preflight.memory.ledger import bytes_of
from keel.preflight.memory.machine import Machine
from keel.preflight.memory.passes import Row, fed, micro_batches, packed_of, tokens_of
from keel.preflight.memory.prediction import Footprint, HeldModels, stage_footprint
from keel.preflight.throughput import seconds_of
from keel.training.setup import build_learner
from keel.types import KeelError

TIMED = 4_096
"""Tokens of a step's rows whose forward pass is timed, at the most."""
GIB = 2**30


def predict(
    seen: StageContext,
    recipe: Recipe,
    number: int,
    policy: Policy,
    there: Machine | None,
    price: float | None,
) -> dict[str, Any]:
    """The stage's memory, seconds and cost; empty where nothing is known of its rows."""
    stage = recipe.stages[number]
    if not seen.work.rows:
        return {}
    try:
        held = held_for(seen, recipe, stage, policy, there)
        footprint = stage_footprint(recipe.model, stage, held, [seen.work.rows], seen.work.heldout)
        duration = stage_duration(
            stage, timed(policy, stage, seen), sizes(policy, stage, seen, held)
        )
    except (KeelError, RuntimeError, NotImplementedError) as error:
        seen.unseen.append(f"its memory and time: {' '.join(str(error).split())[:200]}")
        return {}
    base = getattr(stage, "base", None)
    if base is not None and base.name is not None:
        seen.unseen.append(f"the size of {base.name!r}: memory and time are those of the policy")
    seen.add(None if there is None else too_large(footprint, there, _key(recipe, stage)))
    return as_dict(footprint, there, duration, price)


def held_for(
    seen: StageContext, recipe: Recipe, stage: Stage, policy: Policy, there: Machine | None
) -> HeldModels:
    """The stage's models, made as it makes them. Raises KeelError where they alone are too much."""
    own = bytes_of(policy)
    copies = _copies(recipe, stage)
    if there is not None and copies * own > there.room - own:
        raise KeelError(
            f"{copies + 1} models of {own / GIB:.2f} GiB do not fit into {there.room / GIB:.2f} GiB"
        )
    seed = derive(recipe.seed, stage.name)
    if isinstance(stage, RLStage):
        budget = TokenBudget(stage.token_budget, lambda text: None)
        learner = build_learner(stage, recipe.model, policy, seed, budget)
        judges = list(seen.work.judges)
        for source in stage.rewards.functions:
            kind: Kind = "outcome" if source.function == "outcome" else "process"
            if source.function == kind and source.options.get("stage") is not None:
                judges.append((source.name or kind, reward_model_from(policy, kind, 0)))
        return HeldModels(
            policy, learner.reference, learner.value_head, learner.critic, judges=tuple(judges)
        )
    if isinstance(stage, DPOStage):
        return HeldModels(policy, reference_for(policy))
    if isinstance(stage, RewardModelStage):
        return HeldModels(
            policy, reward_model=reward_model_from(policy, "outcome", 0, stage.base.lora)
        )
    if isinstance(stage, ProcessRewardModelStage):
        return HeldModels(
            policy, reward_model=reward_model_from(policy, "process", 0, stage.base.lora)
        )
    return HeldModels(policy)


@torch.no_grad()
def timed(policy: Policy, stage: Stage, seen: StageContext) -> Timed:
    """A forward pass over some of a step's rows, beside what the batch took."""
    rows: list[Row] = []
    for row in seen.work.rows:
        if rows and tokens_of([*rows, row]) > TIMED:
            break
        rows.append(row)
    device = policy.device
    parts = [packed_of(part, device) for part in micro_batches(rows, stage.token_budget, device)]

    def read() -> None:
        for packed in parts:
            float(policy.scores(packed).log_prob_N.sum())

    forward = seconds_of(read)
    work = seen.work
    return Timed(fed(rows), forward, work.sequences, work.sampling, work.scoring)


def sizes(policy: Policy, stage: Stage, seen: StageContext, held: HeldModels) -> StageSizes:
    """What a step of the stage works with."""
    learns = policy if held.reward_model is None else held.reward_model
    modules = [learns, held.value_head, held.critic]
    trained = sum(p.numel() for m in modules if m is not None for _, p in trainable(m))
    rows = seen.work.rows
    tokens = fed(rows) if held.reward_model is None else tokens_of(rows)
    heldout = len(seen.work.heldout)
    return StageSizes(
        step_tokens=tokens,
        step_sequences=len(rows),
        evaluation_tokens=heldout * tokens // len(rows),
        evaluation_sequences=heldout,
        trained=trained,
        # Weights and both moments of what learns.
        checkpoint_bytes=bytes_of(policy) + 8 * trained,
        adapters=policy.has_lora and held.reward_model is None,
        recomputes=policy.activation_checkpointing,
        critic=held.critic is not None,
    )


def too_large(footprint: Footprint, there: Machine, key: str) -> Finding | None:
    """A peak for which the machine has no room."""
    if there.fits(footprint):
        return None
    parts = sorted(footprint.highest.parts, key=lambda part: -part.bytes)[:3]
    most = ", ".join(f"{part.name} {part.bytes / GIB:.2f}" for part in parts)
    return found(
        "out-of-memory",
        f"the stage needs {footprint.peak / GIB:.2f} GiB, and {there.room / GIB:.2f} are free",
        f"predicted on {there.device} in the phase {footprint.highest.name!r} (GiB): {most}",
        key,
        "lower token_budget, rollout.max_rows or the batch; set model.activation_checkpointing = "
        "true, or [model.lora]",
        "error",
    )


def as_dict(
    footprint: Footprint, there: Machine | None, duration: Duration, price: float | None
) -> dict[str, Any]:
    """As JSON has it: bytes, seconds, and the cost where a price is given."""
    out: dict[str, Any] = {
        "memory": {
            "device": footprint.device,
            "peak": footprint.peak,
            "phase": footprint.highest.name,
            "holes_seen": footprint.holes_seen,
            "parts": {part.name: part.bytes for part in footprint.highest.parts},
            "room": None if there is None else there.room,
        },
        "seconds": round(duration.seconds, 1),
        "time": {name: round(seconds, 1) for name, seconds in duration.parts},
    }
    return out if price is None else {**out, "cost": round(duration.cost(price), 4)}


def _copies(recipe: Recipe, stage: Stage) -> int:
    """Models of the policy's size that the stage keeps beside it."""
    lora = recipe.model.lora is not None
    if isinstance(stage, RLStage):
        learned = [f for f in stage.rewards.functions if f.function in ("outcome", "process")]
        critic = stage.algorithm.value is not None and stage.value.kind == "critic"
        return (stage.keeps_reference and not lora) + critic + len(learned)
    return int(isinstance(stage, DPOStage) and not lora) + hasattr(stage, "base")


def _key(recipe: Recipe, stage: Stage) -> str:
    return f"{stage.name}.token_budget" if len(recipe.stages) > 1 else "token_budget"


def with_judges(predicted: dict[str, Any], seen: StageContext) -> dict[str, Any]:
    """The stage's prediction with what its judges will be paid; their dollars join its cost."""
    judges = [one for one in seen.work.forecasts if one.bound.dollars]
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
