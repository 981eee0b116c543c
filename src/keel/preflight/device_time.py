"""Seconds and price of a stage on named GPUs, by the cost model of docs/scale.md.

Nothing is measured, and no figure has been compared with a run of Keel on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedConfig

from keel.analysis.scale.catalogue import DEFAULT, HARDWARE
from keel.analysis.scale.counts import parameters
from keel.analysis.scale.shapes import ModelShape, Parallelism, Workload
from keel.analysis.scale.step import pass_seconds, step_cost
from keel.config.schema import Recipe, RLStage
from keel.config.stage import StageConfig
from keel.training.setup import loss_config

PROMPT_TOKENS = 512
"""Assumed of a prompt where the recipe sets no prompts.max_tokens."""
MEAN = 0.5
"""Assumed mean length of a completion, as a share of rollout.max_tokens."""
KNOWN = {"a100-80gb": "A100", "h100-80gb": "H100", "h200-141gb": "H200"}
"""Devices of which the cost model has the data sheet."""
CLOSE = 0.02
"""How far the weights of the cost model's decoder may be from the model's own."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a step by part, of one step and of the stage on all its devices; dollars where a
    price is known. `mean` and `prompt` tokens are assumed."""

    parts: Mapping[str, float]
    step: float
    total: float
    devices: int
    mean: float
    prompt: int
    cost: float | None


def time_of(
    recipe: Recipe,
    stage: StageConfig,
    policy: tuple[PreTrainedConfig, int],
    teacher: tuple[PreTrainedConfig, int] | None,
    device: str,
    price: float | None,
) -> StageTime | str:
    """The time of a stage; or why there is none.

    `policy` and `teacher` are a model's config and the count of its weights, `price` is of an hour
    of one device.
    """
    if not stage.shared_by_processes:
        return "only stages of kind rl are in the cost model"
    if device not in KNOWN:
        return f"the cost model has no data sheet of it, only of {', '.join(KNOWN)}"
    if recipe.model.lora is not None:
        return "adapters are not in the cost model"
    shape = known_shape(*policy)
    scoring = None if teacher is None else known_shape(*teacher)
    if shape is None or (teacher is not None and scoring is None):
        return "the cost model knows decoders with gated MLPs and without experts"
    ranks = recipe.cluster.processes
    rl = cast(RLStage, stage)
    if rl.keeps_critic and rl.value.name is not None:
        return "a critic with a model of its own (value.name) is not in the cost model"
    work = work_of(rl)
    spread = Parallelism(
        ranks,
        ranks,
        shards=ranks,
        checkpointing=recipe.model.activation_checkpointing,
        micro_tokens=stage.token_budget,
    )
    machine = HARDWARE[KNOWN[device]]
    cost = step_cost(shape, machine, DEFAULT, spread, work)
    score, update = cost.score, cost.update
    if scoring is not None:
        score += pass_seconds(scoring, machine, DEFAULT, spread, work, learn=False)
    if rl.keeps_critic:  # of the policy's shape; it scores and learns on the same batches
        score += pass_seconds(shape, machine, DEFAULT, spread, work, learn=False)
        update += cost.update
    every = {"generation": cost.generation, "score": score, "update": update, "sync": cost.sync}
    parts = {name: seconds for name, seconds in every.items() if seconds}
    step = sum(parts.values())
    total = step * stage.steps
    dollars = None if price is None else round(total / 3600 * ranks * price, 4)
    return StageTime(parts, step, total, ranks, work.mean, work.prompt, dollars)


def work_of(stage: RLStage) -> Workload:
    """A step of the stage; passes of the policy and the reference that score come before those
    that learn."""
    rollout, scored = stage.rollout, loss_config(stage)
    return Workload(
        sequences=rollout.prompts_per_step * rollout.group_size,
        group=rollout.group_size,
        prompt=stage.prompts.max_tokens or PROMPT_TOKENS,
        mean=max(1.0, MEAN * rollout.max_tokens),
        most=rollout.max_tokens,
        scored=scored.score_old + scored.score_reference,
        epochs=stage.epochs,
        minibatches=stage.minibatches,
    )


def known_shape(config: PreTrainedConfig, count: int) -> ModelShape | None:
    """The cost model's shape of a model with `count` weights; None where it has none like it."""
    shape = shape_of(config)
    close = shape is not None and abs(parameters(shape) / count - 1) <= CLOSE
    return shape if close else None


def shape_of(config: PreTrainedConfig) -> ModelShape | None:
    """The cost model's shape of a decoder with gated MLPs; None of a mixture of experts, and of one
    whose config has no such widths."""
    config = config.get_text_config()
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    mlp = getattr(config, "intermediate_size", None)
    if mlp is None or any(getattr(config, name, None) for name in experts):
        return None
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape(
        str(config.model_type),
        config.num_hidden_layers,
        config.hidden_size,
        heads * width,
        (getattr(config, "num_key_value_heads", None) or heads) * width,
        mlp,
        config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        vectors=2 * config.hidden_size,
    )
