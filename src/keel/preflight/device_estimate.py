"""An arithmetic estimate of the memory of a run on a named GPU, without loading the weights.

It needs the model's config alone; `docs/howto/memory.md` has the formulas. Nothing is measured:
fragmentation, workspaces of kernels, and other lengths than those assumed are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from keel.analysis.scale.counts import activation_bytes
from keel.analysis.scale.memory import LOGITS
from keel.config.fields import unknown
from keel.config.schema import Recipe
from keel.config.stage import StageConfig
from keel.models.loading import read_config
from keel.models.teacher import teacher_spec
from keel.types import KeelError

GIB = 2**30
DEVICES = {
    "a100-40gb": 39.4,
    "a100-80gb": 79.2,
    "h100-80gb": 79.1,
    "h200-141gb": 139.8,
    "l4-24gb": 22.0,
    "rtx4090-24gb": 23.5,
}
"""The memory that torch sees, in GiB."""
LIBRARIES = GIB
"""The CUDA context and workspaces."""
PROMPT_TOKENS = 512
"""Assumed of a prompt where the recipe sets no prompts.max_tokens."""
MASTER_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Part:
    """A use of memory in bytes, and the phase that needs it."""

    name: str
    bytes: int
    when: Literal["always", "sampling", "learning"] = "always"


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """The parts of a stage, and the most of them at one time: sampling and learning alternate."""

    name: str
    parts: tuple[Part, ...]
    peak: int


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """The stages of a recipe on a device with `memory` bytes; `parameters` are the policy's."""

    device: str
    memory: int
    parameters: int
    stages: tuple[StageEstimate, ...]
    fits: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the estimate needs of a model: counts of weights, and features of a layer.

    `linear` is the sum of the in and out features of the linear layers, which LoRA adapts; `mlp`
    the width of the MLP, for sparse models of the experts that a token is sent to.
    """

    parameters: int
    linear: int
    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int


def estimate(recipe: Recipe, device: str) -> DeviceEstimate:
    """The estimate of a recipe on a device of `DEVICES`.

    Raises:
        KeelError: the device is not known, or the model's config does not load.
    """
    if device not in DEVICES:
        raise KeelError(unknown("--device", device, DEVICES))
    sizes, memory = sizes_of(read_config(recipe.model)), int(DEVICES[device] * GIB)
    stages = []
    for stage in recipe.stages:
        parts = tuple(_parts(recipe, stage, sizes))
        always, sampling, learning = (
            sum(part.bytes for part in parts if part.when == when)
            for when in ("always", "sampling", "learning")
        )
        stages.append(StageEstimate(stage.name, parts, always + max(sampling, learning)))
    fits = all(stage.peak <= memory for stage in stages)
    return DeviceEstimate(device, memory, sizes.parameters, tuple(stages), fits)


def sizes_of(config: PreTrainedConfig) -> Sizes:
    """The sizes of the model that a config describes; its weights take no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config = config.get_text_config()
    linear = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    widths = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim")
    mlp = next((size for name in widths if (size := getattr(config, name, None))), None)
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        linear=sum(layer.in_features + layer.out_features for layer in linear),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query=heads * head,
        key_value=(getattr(config, "num_key_value_heads", None) or heads) * head,
        mlp=(mlp or 4 * config.hidden_size) * (getattr(config, "num_experts_per_tok", None) or 1),
    )


def _parts(recipe: Recipe, stage: StageConfig, sizes: Sizes) -> Iterator[Part]:
    """The parts of a stage. A reward model has the policy's backbone."""
    model, weights = recipe.model, sizes.parameters
    master = MASTER_BYTES[model.dtype]
    working = 2 if model.autocast and master == 4 else master
    learned = weights if model.lora is None else model.lora.rank * sizes.linear
    name = "policy" if stage.trains_policy else "reward model"
    yield Part("CUDA context and workspaces", LIBRARIES)
    yield Part("policy weights", weights * master)
    if not stage.trains_policy:
        yield Part("reward model weights", weights * master)
    yield Part(f"{name} gradients", learned * master)
    yield Part(f"{name} optimizer moments", 2 * learned * master)
    if working != master:
        yield Part("bfloat16 copy of the weights (autocast)", weights * working)
    if stage.keeps_reference and model.lora is None:
        yield Part("reference weights", weights * master)
    teacher = None if stage.sampling is None else stage.sampling.teacher
    if teacher is not None:
        own = teacher_spec(teacher, model)
        count = sizes_of(read_config(own)).parameters
        yield Part("teacher weights", count * MASTER_BYTES[own.dtype])
        if own.autocast and own.dtype == "float32":
            yield Part("bfloat16 copy of the teacher's weights (autocast)", 2 * count, "learning")
    if stage.keeps_critic:
        yield Part("critic, its gradients and moments", 4 * weights * master)
    yield from _sampling(stage, sizes, working)
    per_token = activation_bytes(
        sizes.layers,
        sizes.hidden,
        sizes.query,
        sizes.key_value,
        sizes.mlp,
        working,
        saved=not model.activation_checkpointing,
    )
    yield Part("activations of a micro-batch", stage.token_budget * per_token, "learning")
    yield Part("chunks of logits", LOGITS, "learning")


def _sampling(stage: StageConfig, sizes: Sizes, working: int) -> Iterator[Part]:
    """Keys and values of the sequences decoded together, whose prompts are shared by groups."""
    source = stage.sampling
    if source is None:
        return
    rollout = source.rollout
    rows = min(rollout.max_rows, rollout.prompts_per_step * rollout.group_size)
    prompts = -(-rows // rollout.group_size) * (source.prompts.max_tokens or PROMPT_TOKENS)
    tokens = rows * rollout.max_tokens + prompts
    bytes_of_token = 2 * sizes.layers * sizes.key_value * working
    yield Part("key-value cache", tokens * bytes_of_token, "sampling")
    if rollout.dtype == "bfloat16":
        yield Part("bfloat16 copy of the weights (sampling)", 2 * sizes.parameters, "sampling")
