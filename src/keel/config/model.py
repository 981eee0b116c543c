"""The keys that say which model: a folder, a hub name, or one built on the spot. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from keel.algorithms.spec import FrozenModel, Positive, UnusedIf
from keel.config.fields import AsTuple, Depth, Tokens, Width

NO_CONVERSATION = UnusedIf(
    lambda key: key.facts.conversations is False,
    "no prompt is a conversation, so no chat template is used",
)
_BUILT = UnusedIf(lambda key: key.table.build is not None, "the model is built, not loaded")
_LOCAL = UnusedIf(lambda key: key.facts.local, "model.name is a folder, which has no revisions")
_ON_CPU = UnusedIf(lambda key: key.facts.cpu, "there is no autocast on a CPU")
_NOT_FLOAT32 = UnusedIf(
    lambda key: key.table.dtype != "float32", 'autocast is for model.dtype = "float32" only'
)
_BYTES = UnusedIf(lambda key: key.table.tokenizer == "bytes", "bytes need no alphabet")
_NO_KV_HEADS = UnusedIf(
    lambda key: not key.facts.kv_heads, "{key.table.family} has no separate key-value heads"
)


class BuildModel(FrozenModel):
    """A small random model from a transformers config, with a tokenizer made on the spot."""

    family: str = "llama"
    """transformers model type: llama, qwen2, qwen3, gpt2, …"""
    tokenizer: Literal["characters", "bytes"] = "characters"
    alphabet: Annotated[str, _BYTES] = (
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=()[]<>,.:;!?'\"\n"
    )
    """The characters of a `characters` tokenizer."""
    hidden_size: Width = 128
    layers: Depth = 4
    heads: Depth = 4
    kv_heads: Annotated[Depth | None, _NO_KV_HEADS] = None
    intermediate_size: Width | None = None
    """None means four times the hidden size (two and two thirds for gated families)."""
    context: Tokens = 256
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the family's transformers config."""


class Lora(FrozenModel):
    """Low-rank adapters (peft); the reference policy is then the base with the adapter off."""

    rank: Width = 16
    alpha: Positive = 32.0
    targets: Annotated[tuple[str, ...] | Literal["all-linear"], AsTuple] = "all-linear"


class Model(FrozenModel):
    """Which policy: `name` (a local folder or a hub name) or `build`."""

    name: str | None = None
    revision: Annotated[str | None, _LOCAL, _BUILT] = None
    build: BuildModel | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the master weights. bfloat16 weights hardly move at small learning rates."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: Annotated[bool, _ON_CPU, _NOT_FLOAT32] = True
    """bfloat16 autocast on a GPU; no effect on a CPU."""
    trust_remote_code: Annotated[bool, _BUILT] = False
    activation_checkpointing: bool = False
    lora: Lora | None = None
    chat_template: Annotated[str | None, NO_CONVERSATION] = None
    """A Jinja template, for a tokenizer that has none."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.name is None) == (self.build is None):
            raise ValueError("set exactly one of model.name (a folder or hub name) and model.build")
        return self


class BaseModelChoice(FrozenModel):
    """What a reward model's backbone starts from."""

    name: str | None = None
    """Folder or hub name of a causal language model; None starts from the policy before the
    stage."""
    stage: str | None = None
    """Name of an earlier stage of the same kind, whose reward model learns on, head and all."""
    lora: Lora | None = None
    """Adapters on a frozen backbone; the head always learns."""

    @model_validator(mode="after")
    def _one_base(self) -> BaseModelChoice:
        if self.name is not None and self.stage is not None:
            raise ValueError("set one of base.name (a model) and base.stage (an earlier stage)")
        return self
