"""The recipe: every key a user may set, its type and its default. Torch-free.

A recipe is a model, a seed and one or more stages; each stage starts from the model before it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, model_validator

from keel.algorithms.spec import Algorithm, Coefficient, EntryPoint, Positive, Row, Unit
from keel.config.presets import DEFAULT_PRESET, resolve_algorithm

AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""TOML has lists only."""
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Words = Annotated[tuple[str, ...], AsTuple]
Ids = Annotated[tuple[int, ...], AsTuple]

# ---------------------------------------------------------------- model


class BuildModel(Row):
    """A small random model from a transformers config, with a tokenizer made on the spot."""

    family: str = "llama"
    """transformers model type: llama, qwen2, qwen3, gpt2, …"""
    tokenizer: Literal["characters", "bytes"] = "characters"
    alphabet: str = (
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=()[]<>,.:;!?'\"\n"
    )
    """The characters of a `characters` tokenizer."""
    hidden_size: Count = 128
    layers: Count = 4
    heads: Count = 4
    kv_heads: Count | None = None
    intermediate_size: Count | None = None
    """None means four times the hidden size (two and two thirds for gated families)."""
    context: Count = 256
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the family's transformers config."""


class Lora(Row):
    """Low-rank adapters (peft); the reference policy is then the base with the adapter off."""

    rank: Count = 16
    alpha: Positive = 32.0
    targets: Annotated[tuple[str, ...] | Literal["all-linear"], AsTuple] = "all-linear"


class Model(Row):
    """Which policy: `name` (a local folder or a hub name) or `build`."""

    name: str | None = None
    revision: str | None = None
    build: BuildModel | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the master weights. bfloat16 weights hardly move at small learning rates."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: bool = True
    """bfloat16 autocast on a GPU; no effect on a CPU."""
    trust_remote_code: bool = False
    activation_checkpointing: bool = False
    lora: Lora | None = None
    chat_template: str | None = None
    """A Jinja template, for a tokenizer that has none."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.name is None) == (self.build is None):
            raise ValueError("set exactly one of model.name (a folder or hub name) and model.build")
        return self


# ---------------------------------------------------------------- tasks and rewards


class TaskSource(Row):
    """One task of a mixture; `name` is a built-in, `reasoning_gym:NAME`, `jsonl`, `parquet`,
    `datasets`, or a Python entry `module:function`."""

    name: str
    weight: Positive = 1.0
    path: str | None = None
    """Data file of the train side (jsonl, parquet), or the `datasets` name."""
    heldout_path: str | None = None
    """Data file (or split) of the held-out side; without it a share is split off by content."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    prompt: str = "{prompt}"
    """How a row becomes a prompt: a format string over its columns (or the messages column)."""
    answer: str | None = None
    """Column that holds the gold answer."""
    system: str | None = None
    """System message; makes the prompt a conversation."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the generator, or of `datasets.load_dataset`."""


class RewardSource(Row):
    """One reward: a function by `module:function` or the name of a built-in."""

    function: str
    name: str | None = None
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)


class Rewards(Row):
    """How rewards are called. With no functions, the task's own verdict is the reward."""

    functions: Annotated[tuple[RewardSource, ...], AsTuple] = ()
    timeout: Positive = 60.0
    """Seconds that one call of one function may take."""
    on_error: Literal["stop", "skip"] = "stop"


class Prompts(Row):
    """What happens to a prompt before it is sampled."""

    max_tokens: Count | None = None
    """Longer prompts are left out and counted; None means what the context holds."""
    chat_template: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the tokenizer's chat template, such as enable_thinking."""


# ---------------------------------------------------------------- optimisation


class Optimizer(Row):
    """AdamW, and the schedule of its learning rate over the stage's steps."""

    learning_rate: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_share: Unit = 0.1
    """What is left of the learning rate at the end of a linear or cosine schedule."""
    warmup_steps: Index = 0
    betas: Annotated[tuple[float, float], AsTuple] = (0.9, 0.999)
    epsilon: Positive = 1e-8
    weight_decay: Coefficient = 0.0
    max_grad_norm: Positive | None = 1.0


class Checkpoints(Row):
    every: Count = 100
    keep: Count = 2
    """How many of the newest are kept, beside the best."""


class Trackers(Row):
    tensorboard: bool = False
    wandb: bool = False
    project: str = "keel"


class SFTStage(Row):
    """Supervised fine-tuning on the task's demonstrations."""

    stage: Literal["sft"] = "sft"
    name: str = "sft"
    tasks: Annotated[tuple[TaskSource, ...], AsTuple, Field(min_length=1)]
    prompts: Prompts = Prompts()
    demonstration: EntryPoint = "keel.tasks.demonstrations:gold"
    """`module:function` of (prompt, gold answer, random generator) -> the text to imitate."""
    steps: Count = 100
    batch_size: Count = 32
    token_budget: Count = 16_384
    optimizer: Optimizer = Optimizer(learning_rate=1e-5)
    checkpoints: Checkpoints = Checkpoints()
    trackers: Trackers = Trackers()


class Rollout(Row):
    """How each step's completions are drawn."""

    prompts_per_step: Count = 32
    group_size: Count = 8
    max_tokens: Count = 256
    temperature: Positive = 1.0
    top_k: Index = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Unit = 0.0
    stop: Words = ()
    stop_ids: Ids = ()
    max_turns: Count = 1
    """How often the policy may speak in one completion, where the task answers."""
    dynamic_sampling: bool = False
    """Drop groups without variance and refill; the preset's unless set."""
    max_refills: Count = 10
    mask_truncated: bool = False
    """Leave completions that hit the budget out of the loss."""
    soft_overlong: Index = 0
    """Punish length over the last so many tokens of the budget (DAPO); the preset's unless set."""
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    """Who computes log π_old: the trainer's own forward, or the engine as it sampled."""
    max_rows: Count = 256
    """How many sequences the native engine decodes at once."""

    @model_validator(mode="after")
    def _on_policy(self) -> Rollout:
        for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, key) != off:
                raise ValueError(
                    f"rollout.{key} = {getattr(self, key)} samples from a truncated distribution, "
                    "but the loss scores the full softmax, which is off policy: "
                    f"set rollout.{key} = {off} (evaluation may truncate)"
                )
        return self


class Value(Row):
    """The value model: a head on the policy's backbone, or a critic with its own."""

    kind: Literal["head", "critic"] = "critic"
    name: str | None = None
    """Folder or hub name of the critic's backbone; None starts it from the policy."""
    optimizer: Optimizer | None = None
    """Of a separate critic; None means the policy's."""


class Reference(Row):
    reset_every: Count | None = None
    """Re-set the reference policy to the current one every so many steps; None never."""


class Evaluation(Row):
    """Greedy pass@1 and sampled pass@k on the held-out side."""

    every: Index = 50
    """In steps; 0 evaluates before and after only."""
    prompts: Index = 200
    """How many held-out prompts; 0 evaluates never."""
    samples: Index = 0
    """k of pass@k; 0 leaves sampling out."""
    temperature: Positive = 1.0
    top_k: Index = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Unit = 0.0
    component: str | None = None
    """Name of the reward that decides; None: the first (the task's own where there is no other)."""
    threshold: float = 1.0
    """A completion passes from this value of it on."""


class NamedAlgorithm(Algorithm):
    """A row and the preset that its defaults came from."""

    preset: str = DEFAULT_PRESET


class RLStage(Row):
    """Reinforcement learning."""

    stage: Literal["rl"] = "rl"
    name: str = "rl"
    tasks: Annotated[tuple[TaskSource, ...], AsTuple, Field(min_length=1)]
    prompts: Prompts = Prompts()
    rewards: Rewards = Rewards()
    algorithm: NamedAlgorithm
    rollout: Rollout = Rollout()
    steps: Count = 100
    epochs: Count = 1
    """Passes over each step's batch (μ); the preset's unless set."""
    minibatches: Count = 1
    """Optimizer steps per epoch."""
    token_budget: Count = 16_384
    """Model-input tokens of a micro-batch; a longer sequence goes alone."""
    optimizer: Optimizer = Optimizer()
    value: Value = Value()
    reference: Reference = Reference()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    trackers: Trackers = Trackers()
    rollouts_every: Index = 1
    """Write the rollouts of every so many steps; 0 writes none."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        return resolve_algorithm(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _sizes(self) -> RLStage:
        r = self.rollout
        if self.algorithm.needs_groups and r.group_size < 2:
            raise ValueError(
                f'advantage "{self.algorithm.advantage.kind}" compares the completions of one '
                f"prompt: rollout.group_size = {r.group_size} leaves nothing to compare"
            )
        if r.dynamic_sampling and r.group_size < 2:
            raise ValueError(
                "rollout.dynamic_sampling drops groups without variance, and a group of one never "
                "has any: set rollout.dynamic_sampling = false, or rollout.group_size = 2 or more"
            )
        if self.algorithm.correction is not None and r.old_log_probs == "engine":
            raise ValueError(
                "algorithm.correction weighs the trainer's old log-probs against the engine's, and "
                'rollout.old_log_probs = "engine" makes them the same: set it to "trainer"'
            )
        if self.value.kind == "head" and (self.value.name or self.value.optimizer):
            raise ValueError(
                "value.name and value.optimizer are a critic's, and a head has neither backbone "
                'nor optimizer of its own: set value.kind = "critic", or leave them out'
            )
        if self.minibatches > r.prompts_per_step * r.group_size:
            raise ValueError(
                f"minibatches = {self.minibatches} is more than the "
                f"{r.prompts_per_step * r.group_size} completions of a step"
            )
        return self


Stage = Annotated[Union[SFTStage, RLStage], Field(discriminator="stage")]


class Recipe(Row):
    """One experiment, whole."""

    name: str = "recipe"
    description: str = ""
    seed: Index = 0
    threads: Count | None = None
    """CPU threads; None leaves torch's own."""
    model: Model
    stages: Annotated[tuple[Stage, ...], AsTuple, Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'two stages are named "{name}": give each a name of its own')
        return self
