"""The memory of a stage on a card, counted: from the recipe to a plan, and what to change in it if
it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from keel.analysis.cards import GIB
from keel.analysis.costs import Budget, MemoryPlan, remedies
from keel.config.model import Model
from keel.config.schema import Recipe, Stage
from keel.config.sources import Rollout
from keel.engines.vllm.transfer import shares_gpu
from keel.models.adapter_files import resolved
from keel.models.families import context_length
from keel.models.head import GPU_CHUNK_BYTES, GPU_SHARE
from keel.models.shape import adapted, model_config, shape_of, without_weights
from keel.preflight.context import Finding, found

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float64": 8.0}
PROMPT = 1024
"""Tokens of a prompt if neither the recipe nor an example says how long it is."""


def plan_of(
    recipe: Recipe, stage: Stage, model: PreTrainedModel, memory: int,
    example: int | None = None, shown: int = 0,
) -> MemoryPlan:  # fmt: skip
    """What a stage keeps on a GPU that has `memory` bytes.

    `model` may be without weights. `example` is the longest example in tokens, without the
    completion that is sampled; None: `prompts.max_tokens` of a prompt, or `PROMPT`.
    `shown` is the longest demonstration that is imitated next to what is sampled.
    """
    spec, sampling = recipe.model, stage.sampling
    trained, adapter, quantised = model, spec.lora, spec.quantisation is not None
    if stage.base_model is not None:  # a reward model is a copy in the policy's dtype
        trained, adapter, quantised = _base(recipe, stage, model), stage.base_model.lora, False
    lora = resolved(adapter)
    longest, rows, every, copied, server = example or 0, 0, None, False, 0.0
    if sampling is not None:
        # Of weights in 4 bits a bfloat16 copy would be four times their size.
        own = spec.dtype == "float32" or spec.lora is not None
        copied = own and spec.quantisation is None
        rollout = sampling.rollout
        prompt = example or sampling.prompts.max_tokens or PROMPT
        longest = prompt + rollout.max_tokens
        completions = rollout.prompts_per_step * rollout.group_size
        rows, every = min(rollout.max_num_seqs, completions), completions
        if rollout.server is not None:
            copied, rows, server = False, 0, memory * _server_share(rollout)
    divergence = getattr(getattr(stage, "algorithm", None), "divergence", None)
    full = divergence is not None and divergence.estimator == "full"  # both policies' logits
    limit = context_length(model)
    longest = longest if limit is None else min(longest, limit)
    # A longer sequence is computed alone; a step may have fewer tokens than the budget.
    most = stage.initial_token_budget
    if every is not None:
        most = min(most, every * longest)
    checkpointed: bool | int = spec.activation_checkpointing
    name, value_optimizer = stage.value_model
    critic = None
    if stage.trains_critic:
        critic = shape_of(model if name is None else _named(spec, name))
    return MemoryPlan(
        shape=shape_of(trained),
        tokens=max(most, longest, shown),
        longest=longest,
        rows=rows,
        weight=BYTES[spec.dtype],
        quantised=quantised,
        rank=None if lora is None else lora.rank,
        adapted=0 if lora is None else adapted(trained, lora),
        optimizer=stage.optimizer.kind,
        offload=stage.optimizer.offload == "cpu",
        autocast=spec.dtype == "float32" and bool(spec.autocast),
        copied=copied,
        checkpointed=None if checkpointed is True else int(checkpointed),
        chunk=min(GPU_CHUNK_BYTES, memory // GPU_SHARE) * (2 if full else 1),
        head_copy=spec.head_dtype == "bfloat16",
        reference=int(stage.keeps_reference and lora is None),
        critic=critic,
        critic_optimizer=None if value_optimizer is None else value_optimizer.kind,
        critic_offload=None if value_optimizer is None else value_optimizer.offload == "cpu",
        extra=_extra(recipe, stage, model),
        server=server,
    )


def _base(recipe: Recipe, stage: Stage, policy: PreTrainedModel) -> PreTrainedModel:
    """The language model that a stage's reward model comes from, by earlier stages if need be."""
    base = stage.base_model
    while base is not None and base.stage is not None:
        before = base.stage
        base = next(one for one in recipe.stages if one.name == before).base_model
    return policy if base is None or base.name is None else _named(recipe.model, base.name)


def _named(spec: Model, name: str, revision: str | None = None) -> PreTrainedModel:
    """Another model with the settings of the recipe's, without weights. Raises KeelError."""
    other = spec.model_copy(update={"name": name, "revision": revision, "build": None})
    return without_weights(model_config(other), spec.trust_remote_code)


def _server_share(rollout: Rollout) -> float:
    """The share of the trainer's GPU that a server holds while the trainer works: none if it
    sleeps then, or runs on another GPU. One that runs already is not known."""
    server = rollout.server
    if server is None or server.url is not None:
        return 0.0
    awake = rollout.async_level > 0 or server.sleep_level == 0
    here = shares_gpu(torch.device("cuda"), server.gpus)
    return server.gpu_memory_utilization if awake and here else 0.0


def _extra(recipe: Recipe, stage: Stage, policy: PreTrainedModel) -> float:
    """Bytes of the teacher, and of the policy if a reward model is trained next to it."""
    spec, extra = recipe.model, 0.0
    if not stage.trains_policy:
        lora = resolved(spec.lora)
        extra += MemoryPlan(
            shape=shape_of(policy), tokens=0, longest=0, rows=0, weight=BYTES[spec.dtype],
            quantised=spec.quantisation is not None, rank=None if lora is None else lora.rank,
            adapted=0 if lora is None else adapted(policy, lora),
        ).weights  # fmt: skip
    teacher = None if stage.sampling is None else stage.sampling.teacher
    if teacher is not None and teacher.name is not None and teacher.url is None:
        width = BYTES[spec.dtype] if teacher.dtype == "model" else BYTES[teacher.dtype]
        for one in teacher.each.values():
            extra += width * shape_of(_named(spec, str(one.name), one.revision)).parameters
    return extra


def of_budget(budget: Budget, recipe: Recipe, stage: Stage) -> Iterator[Finding]:
    """A finding if the stage does not fit the card: the line that is enough, or those that save
    most, until it does."""
    if not budget.over:
        return
    prefix = f"{stage.name}." if len(recipe.stages) > 1 else ""
    lines, keys = [], []
    chosen, fits = remedies(budget, f"{'model' if stage.trains_policy else 'base'}.lora.rank")
    for one in chosen:
        key = one.line.split(" = ")[0]
        place = "" if key.startswith("model.") else prefix
        lines.append(f"{place}{one.line} ({size(one.saved)})")
        keys.append(f"{place}{key}")
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
