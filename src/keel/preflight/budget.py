"""The memory of a stage on a card, counted: from the recipe to a plan, and what to change in it if
it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from keel.analysis.cards import GIB
from keel.analysis.costs import Budget, MemoryPlan, savings
from keel.config.schema import Recipe, Stage
from keel.models.families import context_length
from keel.models.head import GPU_CHUNK_BYTES, GPU_SHARE
from keel.models.shape import adapted, model_config, shape_of, without_weights
from keel.preflight.context import Finding, found

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float64": 8.0}
WORTH = 0.02
"""A line that saves less than this share of what is missing is not named."""
PROMPT = 1024
"""Tokens of a prompt if neither the recipe nor an example says how long it is."""


def plan_of(
    recipe: Recipe, stage: Stage, model: PreTrainedModel, memory: int, example: int | None = None
) -> MemoryPlan:
    """What a stage keeps on a GPU that has `memory` bytes.

    `model` may be without weights. `example` is the longest example in tokens, without the
    completion that is sampled; None: `prompts.max_tokens` of a prompt, or `PROMPT`.
    """
    spec, sampling, shape = recipe.model, stage.sampling, shape_of(model)
    longest, rows, every = example or 0, 0, None
    if sampling is not None:
        rollout = sampling.rollout
        prompt = example or sampling.prompts.max_tokens or PROMPT
        longest = prompt + rollout.max_tokens
        completions = rollout.prompts_per_step * rollout.group_size
        rows, every = min(rollout.max_num_seqs, completions), completions
    limit = context_length(model)
    longest = longest if limit is None else min(longest, limit)
    # A longer sequence is computed alone; a step may have fewer tokens than the budget.
    most = stage.token_budget if every is None else min(stage.token_budget, every * longest)
    rank = None if spec.lora is None else spec.lora.rank
    quantised = spec.quantisation is not None
    checkpointed: bool | int = spec.activation_checkpointing
    own = spec.dtype == "float32" or rank is not None
    return MemoryPlan(
        shape=shape,
        tokens=max(most, longest),
        longest=longest,
        rows=rows,
        weight=BYTES[spec.dtype],
        quantised=quantised,
        rank=rank,
        adapted=0 if spec.lora is None else adapted(model, spec.lora),
        optimizer=stage.optimizer.kind,
        offload=stage.optimizer.offload == "cpu",
        autocast=spec.dtype == "float32" and bool(spec.autocast),
        # Of weights in 4 bits a bfloat16 copy would be four times their size.
        copied=sampling is not None and own and not quantised,
        checkpointed=None if checkpointed is True else int(checkpointed),
        chunk=min(GPU_CHUNK_BYTES, memory // GPU_SHARE),
        head_copy=spec.head_dtype == "bfloat16",
        reference=int(stage.keeps_reference and rank is None),
        critic=int(stage.trains_critic),
        extra=_extra(recipe, stage, shape.parameters),
    )


def _extra(recipe: Recipe, stage: Stage, parameters: int) -> float:
    """Bytes of the teacher, and of the policy if a reward model is trained next to it."""
    spec, extra = recipe.model, 0.0
    if not stage.trains_policy:
        extra += BYTES[spec.dtype] * parameters
    teacher = None if stage.sampling is None else stage.sampling.teacher
    if teacher is not None:
        other = spec.model_copy(
            update={"name": teacher.name, "revision": teacher.revision, "build": None}
        )
        width = BYTES[spec.dtype] if teacher.dtype == "model" else BYTES[teacher.dtype]
        extra += width * shape_of(without_weights(model_config(other))).parameters
    return extra


def of_budget(budget: Budget, recipe: Recipe, stage: Stage) -> Iterator[Finding]:
    """A finding if the stage does not fit the card: the lines that save most, until it does."""
    if not budget.over:
        return
    prefix = f"{stage.name}." if len(recipe.stages) > 1 else ""
    lines, keys, fits = [], [], False
    for one in savings(budget.plan):
        if one.saved < WORTH * budget.over:
            continue
        key = one.line.split(" = ")[0]
        place = "" if key.startswith("model.") else prefix
        lines.append(f"{place}{one.line} ({size(one.saved)})")
        keys.append(f"{place}{key}")
        fits = Budget(one.plan, budget.card).over == 0
        if fits:
            break
    fix = "set " + ", then ".join(lines) if lines else "take a smaller model"
    if lines and not fits:
        fix += ": not enough yet; take a smaller model, or a larger card"
    items: dict[str, Any] = budget.plan.items()
    largest = sorted(items.items(), key=lambda pair: -pair[1])
    yield found(
        "over-card", keys[0] if keys else "model.name",
        stage=stage.name, over=size(budget.over), card=budget.card.name, fix=fix,
        items=", ".join(f"{name} {size(amount)}" for name, amount in largest[:5] if amount),
    )  # fmt: skip


def size(amount: float) -> str:
    """Bytes as `5.75 GiB`."""
    return f"{amount / GIB:.2f} GiB" if amount >= GIB / 10 else f"{amount / 2**20:.1f} MiB"
