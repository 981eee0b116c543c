"""An arithmetic estimate of the memory of a rank, without loading the weights: on a named GPU, or
on the CPU for which it stands with what is measured of one process.

It needs the model's config alone; `docs/howto/memory.md` has the formulas. Nothing is measured:
fragmentation, workspaces of kernels, and other lengths than those assumed are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from keel.analysis.scale.counts import activation_bytes
from keel.analysis.scale.memory import LOGITS
from keel.config.fields import unknown
from keel.config.schema import Recipe
from keel.config.stage import StageConfig
from keel.models.loading import read_config
from keel.models.packed import ENOUGH_ON_CPU
from keel.models.sharded import layers_of
from keel.models.teacher import teacher_spec
from keel.preflight.device_time import PROMPT_TOKENS, StageTime, time_of
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
LIBRARIES = {"cuda": GIB, "cpu": 400 * 2**20}
"""The CUDA context and workspaces; on a CPU what torch, transformers and others take."""
MASTER_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Part:
    """A use of memory in bytes, and the phase that needs it."""

    name: str
    bytes: int
    when: Literal["always", "sampling", "learning"] = "always"


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """The parts of a stage on each of its `ranks`, and the most of them at one time: sampling and
    learning alternate. `time` is None, and `untimed` says why, where it is not estimated."""

    name: str
    parts: tuple[Part, ...]
    peak: int
    ranks: int = 1
    time: StageTime | None = None
    untimed: str = ""


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """The stages of a recipe on devices with `memory` bytes; `parameters` are the policy's."""

    device: str
    memory: int
    parameters: int
    stages: tuple[StageEstimate, ...]
    fits: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the estimate needs of a model: counts of weights, and features of a layer.

    `unit` counts the weights that FSDP gathers at once: of a layer, or of all that is in none;
    `linear` is the sum of the in and out features of the linear layers, which LoRA adapts; `mlp`
    the width of the MLP, for sparse models of the experts that a token is sent to.
    """

    parameters: int
    unit: int
    linear: int
    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int


def estimate(recipe: Recipe, device: str, price: float | None = None) -> DeviceEstimate:
    """The estimate of a recipe on devices of `DEVICES`, one for each of `cluster.processes`.

    `price` is of an hour of one device.

    Raises:
        KeelError: the device is not known, or the model's config does not load.
    """
    if device not in DEVICES:
        raise KeelError(unknown("--device", device, DEVICES))
    config = read_config(recipe.model)
    sizes, memory = sizes_of(config), int(DEVICES[device] * GIB)
    stages = []
    for stage in recipe.stages:
        found = stage_estimate(recipe, stage, sizes, "cuda", memory)
        time: StageTime | str = "it does not fit"
        if found.peak <= memory:
            policy = (config, sizes.parameters)
            time = time_of(recipe, stage, policy, _teacher(recipe, stage), device, price)
        if isinstance(time, str):
            stages.append(replace(found, untimed=time))
        else:
            stages.append(replace(found, time=time))
    fits = all(stage.peak <= memory for stage in stages)
    return DeviceEstimate(device, memory, sizes.parameters, tuple(stages), fits)


def stage_estimate(
    recipe: Recipe,
    stage: StageConfig,
    sizes: Sizes,
    device: Literal["cuda", "cpu"],
    memory: int = 0,
) -> StageEstimate:
    """The memory of each rank of a stage on this kind of device, a GPU with `memory` bytes."""
    ranks = recipe.cluster.processes if stage.shared_by_processes else 1
    parts = (*_parts(recipe, stage, sizes, device, ranks), *_server(stage, memory))
    always, sampling, learning = (
        sum(part.bytes for part in parts if part.when == when)
        for when in ("always", "sampling", "learning")
    )
    return StageEstimate(stage.name, parts, always + max(sampling, learning), ranks)


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
    count = sum(p.numel() for p in model.parameters())
    units = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    return Sizes(
        parameters=count,
        unit=max([*units, count - sum(units)]),
        linear=sum(layer.in_features + layer.out_features for layer in linear),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query=heads * head,
        key_value=(getattr(config, "num_key_value_heads", None) or heads) * head,
        mlp=(mlp or 4 * config.hidden_size) * (getattr(config, "num_experts_per_tok", None) or 1),
    )


def _parts(
    recipe: Recipe, stage: StageConfig, sizes: Sizes, device: Literal["cuda", "cpu"], ranks: int
) -> Iterator[Part]:
    """The parts of a stage on a rank. A reward model has the policy's backbone.

    Models that learn, and those that they are compared with, are sharded over the ranks, each of
    which also has the policy whole, to sample with.
    """
    model, weights = recipe.model, -(-sizes.parameters // ranks)
    master = MASTER_BYTES[model.dtype]
    rounds = model.autocast if device == "cuda" else model.autocast == "bfloat16"
    working = 2 if rounds and master == 4 else master
    learned = weights if model.lora is None else -(-model.lora.rank * sizes.linear // ranks)
    name = "policy" if stage.trains_policy else "reward model"
    yield Part(
        "CUDA context and workspaces" if device == "cuda" else "libraries", LIBRARIES[device]
    )
    yield Part("policy weights", weights * master)
    if not stage.trains_policy:
        yield Part("reward model weights", weights * master)
    yield Part(f"{name} gradients", learned * master)
    yield Part(f"{name} optimizer moments", 2 * learned * master)
    if ranks > 1:
        yield Part("policy weights, whole (sampling)", sizes.parameters * master)
        yield Part("two gathered layers and a gradient", 3 * sizes.unit * master, "learning")
    if working != master:
        copied = sizes.parameters if ranks == 1 else 2 * sizes.unit
        yield Part("bfloat16 copy of the weights (autocast)", copied * working)
    if stage.keeps_reference and model.lora is None:
        yield Part("reference weights", weights * master)
    teacher = None if stage.sampling is None else stage.sampling.teacher
    if teacher is not None:
        own = teacher_spec(teacher, model)
        count = sizes_of(read_config(own)).parameters
        yield Part("teacher weights", -(-count // ranks) * MASTER_BYTES[own.dtype])
        if rounds and own.dtype == "float32":
            yield Part("bfloat16 copy of the teacher's weights (autocast)", 2 * count, "learning")
    if stage.keeps_critic:
        yield Part("critic, its gradients and moments", 4 * weights * master)
    yield from _sampling(stage, sizes, working if device == "cuda" else master, ranks)
    per_token = activation_bytes(
        sizes.layers,
        sizes.hidden,
        sizes.query,
        sizes.key_value,
        sizes.mlp,
        working,
        saved=not model.activation_checkpointing,
    )
    tokens = stage.token_budget if device == "cuda" else min(stage.token_budget, ENOUGH_ON_CPU)
    yield Part("activations of a micro-batch", tokens * per_token, "learning")
    yield Part("chunks of logits", LOGITS, "learning")


def _sampling(stage: StageConfig, sizes: Sizes, working: int, ranks: int) -> Iterator[Part]:
    """Keys and values of the sequences decoded together, whose prompts are shared by groups."""
    source = stage.sampling
    if source is None:
        return
    rollout = source.rollout
    if rollout.engine == "vllm":  # another process has them
        return
    share = -(-rollout.prompts_per_step // ranks)
    rows = min(rollout.max_rows, share * rollout.group_size)
    prompts = -(-rows // rollout.group_size) * (source.prompts.max_tokens or PROMPT_TOKENS)
    tokens = rows * rollout.max_tokens + prompts
    bytes_of_token = 2 * sizes.layers * sizes.key_value * working
    yield Part("key-value cache", tokens * bytes_of_token, "sampling")
    if rollout.dtype == "bfloat16":
        yield Part("bfloat16 copy of the weights (sampling)", 2 * sizes.parameters, "sampling")


def _server(stage: StageConfig, memory: int) -> Iterator[Part]:
    """What a vLLM server reserves of the trainer's GPU."""
    if stage.sampling is None or stage.sampling.rollout.engine != "vllm" or not memory:
        return
    server = stage.sampling.rollout.vllm
    if server.url is None and not server.gpus:
        yield Part("vLLM server", int(server.gpu_memory_utilization * memory))


def _teacher(recipe: Recipe, stage: StageConfig) -> tuple[PreTrainedConfig, int] | None:
    """The config of a stage's teacher and the count of its weights."""
    if stage.sampling is None or stage.sampling.teacher is None:
        return None
    config = read_config(teacher_spec(stage.sampling.teacher, recipe.model))
    return config, sizes_of(config).parameters
