"""The models that score what the policy wrote: the reference of the divergence term, the teacher of
on-policy distillation, and value models (a head on the policy's hidden states, or a critic)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keel.config.model import Autocast, Model, TeacherModel
from keel.models import lora
from keel.models.families import compile_again, head_of, hidden_states, prepare
from keel.models.head import Head, ValueHead, log_probs
from keel.models.loading import load_model, load_tokenizer, naming_keys, read_config
from keel.models.packed import Packed
from keel.models.policy import Policy
from keel.models.sharded import whole, within
from keel.types import KeelError


def reference_for(policy: Policy, state: Mapping[str, Tensor] | None = None) -> Reference:
    """A reference equal to the policy as it is now, or the one of a checkpoint's `state`.

    With LoRA it is the base with the adapter off, at no memory, or a second frozen adapter where
    the policy's has already learned; without LoRA, a frozen copy.
    """
    reference: Reference = AdapterOff(policy) if policy.has_lora else FrozenCopy(policy)
    if state is not None:
        # A resumed policy has learned since; an empty state means that its base is the reference.
        reference.restore(state)
    elif policy.has_lora and not lora.is_untouched(policy.model):
        reference.refresh(policy)
    return reference


class FrozenPolicy:
    """A policy that does not learn; `tokens` as in `Head`."""

    def __init__(self, model: PreTrainedModel, autocast: Autocast, tokens: int) -> None:
        self.model = model
        self.tokens = tokens
        self.autocast = autocast

    @property
    def head(self) -> Head:
        """How its logits are made from its hidden states."""
        head = head_of(self.model)
        bias = None if head.bias is None else whole(head.bias)
        return replace(head, weight=whole(head.weight), bias=bias, tokens=self.tokens)

    @torch.no_grad()
    def hidden(self, packed: Packed) -> Float[Tensor, "N H"]:
        """Its hidden states at the scored tokens; no gradient."""
        return within(self.model, lambda: hidden_states(self.model, packed, self.autocast))

    @torch.no_grad()
    def log_probs(self, packed: Packed, temperature: float = 1.0) -> Float[Tensor, "N"]:
        """log π of each scored token; no gradient. The temperature divides the logits."""
        hidden_NH = self.hidden(packed)
        return within(
            self.model, lambda: log_probs(hidden_NH, self.head, packed.scored(), temperature)
        )


class Reference(FrozenPolicy, ABC):
    """The policy as it was, or its base."""

    @abstractmethod
    def refresh(self, policy: Policy, rate: float = 1.0) -> None:
        """Become equal to the policy as it is now, or come nearer to it by this share."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that `restore` needs; empty where the policy's base is the reference."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned. Raises ValueError for the state of another model."""


class FrozenCopy(Reference):
    """A copy of the policy's model."""

    def __init__(self, policy: Policy) -> None:
        copied = lora.plain_copy(policy.model).requires_grad_(False).eval()
        compile_again(copied)
        super().__init__(copied, policy.autocast, policy.tokens)

    def refresh(self, policy: Policy, rate: float = 1.0) -> None:
        _copy(lora.plain_weights(policy.model), self.state(), rate)

    def state(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer once; tied ones under the first of their names."""
        parameters = dict(self.model.named_parameters())
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if name in parameters or name not in tied
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = self.state()
        if state.keys() != own.keys():
            raise ValueError("the reference's weights do not fit: another model was saved")
        _copy(state, own)


class AdapterOff(Reference):
    """The policy's base with the adapter off, or with a second, frozen adapter after `refresh`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model, policy.autocast, policy.tokens)

    def hidden(self, packed: Packed) -> Float[Tensor, "N H"]:
        with lora.reference_adapter(self.model):
            return super().hidden(packed)

    @property
    def head(self) -> Head:
        """Of the base, also if the policy's learns."""
        head, model = super().head, self.model
        weight = lora.kept_weight(model, head.weight)
        assert weight is not None
        return replace(head, weight=weight, bias=lora.kept_weight(model, head.bias))

    def refresh(self, policy: Policy, rate: float = 1.0) -> None:
        if rate == 1.0:
            return lora.freeze_reference(policy.model)
        own, kept = (lora.adapter_weights(policy.model, x) for x in (lora.POLICY, lora.REFERENCE))
        _copy(dict(zip(kept, own.values(), strict=True)), kept, rate)

    def state(self) -> dict[str, Tensor]:
        if not lora.has_reference(self.model):
            return {}
        return lora.adapter_weights(self.model, lora.REFERENCE)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            return
        lora.freeze_reference(self.model)
        own = lora.adapter_weights(self.model, lora.REFERENCE)
        if own.keys() != state.keys():
            raise ValueError("the reference adapter does not fit: another one was saved")
        _copy(state, own)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor], rate: float = 1.0) -> None:
    for name, tensor in target.items():
        if rate < 1 and tensor.is_floating_point():
            tensor.lerp_(source[name].to(tensor.dtype), rate)
        else:
            tensor.copy_(source[name])


# ---------------------------------------------------------------- the teacher


def load_teachers(
    choice: TeacherModel, policy: Policy, spec: Model, longest: int | None
) -> list[FrozenPolicy]:
    """The recipe's teachers; `spec` is the policy's, `longest` the most tokens of a sequence.

    Raises KeelError where `check_teachers` does, or its weights do not load.
    """
    check_teachers(choice, policy, spec, longest)
    found = []
    for key, one in choice.each.items():
        own = teacher_spec(one, spec)
        with naming_keys(name=key):
            model = load_model(own, seed=0)
        prepare(model, own.autocast)
        model = model.requires_grad_(False).eval()
        found.append(FrozenPolicy(model, own.autocast, policy.tokens))
    return found


def check_teachers(choice: TeacherModel, policy: Policy, spec: Model, longest: int | None) -> None:
    """Check teachers by their configs and tokenizers, without their weights.

    Raises KeelError where they do not load, where a token of the policy has another id or none in
    its tokenizer, or where its vocabulary or its context is too small.
    """
    if choice.name is None or choice.url is not None:
        return
    for key, one in choice.each.items():
        _check_teacher(key, one, policy, spec, longest)


def _check_teacher(
    key: str, choice: TeacherModel, policy: Policy, spec: Model, longest: int | None
) -> None:
    own, where = teacher_spec(choice, spec), f"{key} = {choice.name!r}"
    with naming_keys(name=key):
        config, tokenizer = read_config(own).get_text_config(), load_tokenizer(own)
    _check_tokens(where, tokenizer, policy.tokenizer)
    if config.vocab_size < policy.tokens:
        raise KeelError(
            f"{where} has a vocabulary of {config.vocab_size} tokens and the policy one of "
            f"{policy.tokens}: choose a teacher with the policy's vocabulary"
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and (longest is None or longest > context):
        most = "any number" if longest is None else longest
        raise KeelError(
            f"{where} reads {context} tokens at the most, and a prompt with its completion may "
            f"have {most}: lower prompts.max_tokens or rollout.max_tokens"
        )


def teacher_spec(choice: TeacherModel, policy: Model) -> Model:
    """The teacher as a model to load: on the policy's device, in its dtype unless it has one."""
    own = {
        "name": choice.name,
        "revision": choice.revision,
        "build": None,
        "lora": None,
        "quantisation": None,
    }
    dtype = {} if choice.dtype == "model" else {"dtype": choice.dtype}
    return policy.model_copy(update={**own, **dtype})


def _check_tokens(
    where: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase
) -> None:
    """Raise KeelError where a token of the policy means another one to the teacher, or none."""
    known, own = teacher.get_vocab(), policy.get_vocab()
    odd = sorted((at, token) for token, at in own.items() if known.get(token) != at)
    if odd:
        at, token = odd[0]
        there = "does not have" if token not in known else f"has as {known[token]}"
        raise KeelError(
            f"{where} has another tokenizer than the policy: {len(odd)} of the policy's {len(own)} "
            f"tokens differ, {token!r} ({at}) among them, which it {there}: choose a teacher of "
            "the policy's own family"
        )


# ---------------------------------------------------------------- value models


def value_head_for(policy: Policy) -> ValueHead:
    """A new value head on the policy's hidden states."""
    return ValueHead(policy.hidden_size, policy.model.dtype).to(policy.device)


class Critic(nn.Module):
    """A value model with its own backbone."""

    def __init__(self, backbone: PreTrainedModel, autocast: Autocast = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.autocast = autocast
        width = backbone.config.get_text_config().hidden_size
        self.head = ValueHead(width, backbone.dtype).to(backbone.device)

    def values(self, packed: Packed) -> Float[Tensor, "N"]:
        """V of the state before each scored token, read at `source_N`."""
        hidden_NH = within(
            self.backbone, lambda: hidden_states(self.backbone, packed, self.autocast)
        )
        values: Tensor = self.head(hidden_NH)
        return values


def critic_from_policy(policy: Policy) -> Critic:
    """A critic whose backbone starts as the policy's is now (adapters merged in the copy)."""
    copied = lora.plain_copy(policy.model)
    compile_again(copied)
    return Critic(copied.base_model, policy.autocast)


def load_critic(name: str, policy: Policy, spec: Model, seed: int) -> Critic:
    """A critic whose backbone comes from a folder or the hub; all else as in the policy's spec.

    It reads the policy's tokens, so it must have been trained with the same tokenizer. Raises
    KeelError where it does not load or its vocabulary is too small.
    """
    own = {"name": name, "build": None, "revision": None, "lora": None, "quantisation": None}
    with naming_keys(name="value.name"):
        model = load_model(spec.model_copy(update=own), seed)
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < len(policy.tokenizer):
        raise KeelError(
            f"value.name = {name!r} has embeddings for {rows} tokens but the policy's tokenizer "
            f"makes {len(policy.tokenizer)}: choose a critic of the policy's own family"
        )
    prepare(model, spec.autocast)
    policy.set_checkpointing(model)
    return Critic(model.base_model, spec.autocast)
