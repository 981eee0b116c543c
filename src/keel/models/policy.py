"""The policy: a causal language model and its tokenizer, which scores packed completions.

And whether it computes in bfloat16: processors with AMX or AVX-512 BF16 multiply several times
faster in it; on others the casts cost more than the products save. Which one this is shows in a
timing of the model's own sizes.
"""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from keel.analysis.costs import Shape
from keel.config.model import Autocast, Model
from keel.models import lora
from keel.models.adapter_files import read_adapter, save_adapter
from keel.models.families import (
    COMPILED,
    compile_again,
    context_length,
    head_of,
    hidden_states,
    prepare,
)
from keel.models.head import Head, OtherStates, Scores, ValueHead, readout
from keel.models.head import squares as squared
from keel.models.loading import (
    check_pair,
    check_served,
    choose_device,
    load_model,
    load_tokenizer,
)
from keel.models.packed import ENOUGH_ON_CPU, Packed
from keel.models.quantised import QuantisationEffect, quantise
from keel.models.shape import shape_of
from keel.models.sharded import within
from keel.models.tokenizer_round_trip import Served, quiet

BASE = "base.json"
"""File of an adapter's folder that names the base it was trained on."""
TIMED_TOKENS = ENOUGH_ON_CPU
"""Of a pass of the update on a CPU."""
REPEATS = 5
PATIENCE = 2.0
"""Seconds of a size after which its passes are not repeated."""
WORTH = 0.8
"""bfloat16 has to take less than this share of float32's seconds: norms, attention and the head
stay in float32, and a smaller gain would be lost in the noise of the timing."""


def token_count(tokenizer: Any) -> int:
    """The number of ids up to the last token: a model may have more, which stand for no text."""
    return int(max(tokenizer.get_vocab().values())) + 1


class HiddenStates(Protocol):
    """What a full divergence needs from a reference policy."""

    @property
    def head(self) -> Head: ...

    def hidden(self, packed: Packed) -> Float[Tensor, "N H"]: ...


class Policy(nn.Module):
    """A causal language model with packed attention, and its tokenizer.

    It stays in training mode, since evaluation mode would switch activation checkpointing off;
    dropout is 0 everywhere, so the two modes give the same results.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        autocast: Autocast = True,
        activation_checkpointing: bool | int = False,
        served: Served | None = None,
        revision: str | None = None,
        quantisation: QuantisationEffect | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.tokens = token_count(tokenizer)
        self.served = served or Served()
        self.revision = revision
        """The model's revision on the hub, from the recipe."""
        self.quantisation = quantisation
        """What keeping the base in 4 bits changed."""
        self.base_fingerprint = None if quantisation is None else quantisation.fingerprint
        """SHA-256 of the frozen weights below an adapter, before they were quantised."""
        if quantisation is None and self.has_lora:
            self.base_fingerprint = lora.base_fingerprint(model)
        self.autocast = autocast
        self.activation_checkpointing = activation_checkpointing
        self.set_checkpointing(model)

    def set_checkpointing(self, model: PreTrainedModel) -> None:
        """Recompute the model's activations in the backward pass, if this policy does."""
        model.train()
        if self.activation_checkpointing:
            # Without dropout a forward pass is deterministic: there is no random state to keep.
            options = {"use_reentrant": False, "preserve_rng_state": lora.has_dropout(model)}
            # transformers renamed it; the old name warns.
            if hasattr(model, "activation_checkpointing_enable"):
                model.activation_checkpointing_enable(options)
            else:
                model.gradient_checkpointing_enable(options)
        if not isinstance(self.activation_checkpointing, bool):
            layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
            for layer in layers[self.activation_checkpointing :]:
                layer.gradient_checkpointing = False
        if self.activation_checkpointing:
            compile_again(model)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def head(self) -> Head:
        """How logits are made from hidden states, with the current weights."""
        return replace(head_of(self.model), tokens=self.tokens)

    @property
    def hidden_size(self) -> int:
        """Width of the backbone's hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def context(self) -> int | None:
        """The model's context length in tokens; None where it has no limit."""
        return context_length(self.model)

    @cached_property
    def shape(self) -> Shape:
        """What the model's costs are counted from."""
        return shape_of(self.model)

    @property
    def has_lora(self) -> bool:
        return bool(lora.lora_layers(self.model))

    @property
    def rank(self) -> int | None:
        """That of the adapter; None without one."""
        layers = lora.lora_layers(self.model)
        return int(layers[0][1].r[lora.POLICY]) if layers else None

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name: all, or the adapter's."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def hidden(self, packed: Packed) -> Float[Tensor, "N H"]:
        """The hidden states that the scored tokens are predicted from."""
        return within(self.model, lambda: hidden_states(self.model, packed, self.autocast))

    def scores(
        self,
        packed: Packed,
        temperature: float = 1.0,
        *,
        entropy: bool = False,
        squares: bool = False,
        value_head: ValueHead | None = None,
        reference: HiddenStates | None = None,
        teacher: OtherStates | None = None,
    ) -> Scores:
        """log π of each scored token and, on request, entropy, Σ_v π² (without a gradient), value,
        Σ_v π log(π/π_ref) and the divergence to a teacher.

        One forward pass; logits are computed in chunks. The temperature divides the logits of
        policy, reference and teacher.
        """
        other = None
        if reference is not None:
            with torch.no_grad():
                other = (reference.hidden(packed), reference.head)

        def compute() -> Scores:
            hidden_NH = hidden_states(self.model, packed, self.autocast)
            out = readout(
                hidden_NH, self.head, packed.scored(), temperature,
                entropy=entropy, reference=other, teacher=teacher,
            )  # fmt: skip
            if squares:
                out = replace(out, squares_N=squared(hidden_NH, self.head, temperature))
            return out if value_head is None else replace(out, value_N=value_head(hidden_NH))

        return within(self.model, compute)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Base and adapter, unmerged and each tensor once; not the reference's adapter."""
        every = super().state_dict(*args, **kwargs)
        kept: dict[str, Tensor] = {}
        seen: set[tuple[int, int]] = set()
        for name, tensor in every.items():
            place = (tensor.data_ptr(), tensor.numel())
            if f".{lora.REFERENCE}." in name or (tensor.numel() and place in seen):
                continue
            seen.add(place)
            kept[name] = tensor
        return kept

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> None:
        """Copy a `state_dict` of this class in place; raises ValueError where names differ."""
        own = self.state_dict()
        if strict and own.keys() != state_dict.keys():
            odd = sorted(own.keys() ^ state_dict.keys())
            raise ValueError(f"the policy's weights do not fit: {len(odd)} differ, {odd[0]} first")
        with torch.no_grad():
            for name in own.keys() & state_dict.keys():
                own[name].copy_(state_dict[name])

    def save(self, folder: str | Path) -> None:
        """Write model, tokenizer and generation config, to load with plain `from_pretrained`.

        With LoRA the model is a merged copy, and the adapter is written to `adapter/`.
        """
        folder = Path(folder)
        with quiet():
            self.model.save_pretrained(folder, state_dict=lora.plain_weights(self.model))
        self.tokenizer.save_pretrained(folder)
        if self.has_lora:
            save_adapter(self.model, folder / "adapter")

    def save_adapter(self, folder: Path) -> None:
        """Write only the adapter, in peft's format, with the tokenizer and the base's identity."""
        save_adapter(self.model, folder)
        with quiet():
            self.tokenizer.save_pretrained(folder)
        base = {
            "base": self.model.config.name_or_path or None,
            "revision": self.revision,
            "fingerprint": self.base_fingerprint,
        }
        (folder / BASE).write_text(json.dumps(base, indent=2) + "\n", "utf-8")


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy, adapters included; parameters that are frozen in the model are shared."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    shared |= {id(b): b for b in lora.kept_weights(model)}
    twin = copy.deepcopy(model, shared).requires_grad_(False)
    # It computes while the policy learns, whose head switches a setting of the process (TF32) on
    # which torch's compiled code depends.
    setattr(twin, COMPILED, "nothing")
    for parameter in twin.parameters():
        parameter.grad = None
    return twin.eval()


def load_policy(spec: Model, seed: int) -> Policy:
    """The recipe's policy, checked by the packing probe. Raises KeelError where it is unusable.

    `seed` decides the weights of a built model and of a LoRA adapter.
    """
    # On the CPU first: the original weights need not fit into the GPU's memory.
    first = {} if spec.quantisation is None else {"device": "cpu"}
    model, tokenizer = load_model(spec.model_copy(update=first), seed), load_tokenizer(spec)
    name = spec.name if spec.build is None else f"build {spec.build.family}"
    check_pair(model, tokenizer, str(name))
    served = check_served(spec, model, tokenizer, str(name))
    effect = None
    if spec.quantisation is not None:
        effect = quantise(model, choose_device(spec.device), lora.base_fingerprint(model))
    prepare(model, spec.autocast)
    if spec.lora is not None:
        stored = None if spec.lora.adapter is None else read_adapter(spec.lora.adapter)
        settings = spec.lora if stored is None else stored.spec(spec.lora)
        lora.add_lora(model, settings, seed, revision=spec.revision)
        if stored is not None:
            stored.load_into(model)
    return Policy(
        model,
        tokenizer,
        autocast=spec.autocast,
        activation_checkpointing=spec.activation_checkpointing,
        served=served,
        revision=spec.revision,
        quantisation=effect,
    )


# ---------------------------------------------------------------- float32 or bfloat16


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Seconds of the products of a pass, forward and backward; casts of the weights included."""

    float32: float
    bfloat16: float

    @property
    def bfloat16_pays(self) -> bool:
        return self.bfloat16 < WORTH * self.float32

    def __str__(self) -> str:
        return (
            f"the products of {TIMED_TOKENS} tokens take {1000 * self.bfloat16:.3g} ms in bfloat16 "
            f"and {1000 * self.float32:.3g} ms in float32"
        )


def time_products(model: PreTrainedModel) -> ProductTimes:
    """The times of this model's matrix products on this machine, each size once.

    Medians of up to `REPEATS` passes, alternating between the two, after one that does not count.
    """
    sizes = _product_sizes(model.base_model)
    generator = torch.Generator().manual_seed(0)
    totals = {False: 0.0, True: 0.0}
    for (rows, columns), count in sizes.items():
        weight = torch.randn(rows, columns, generator=generator).requires_grad_()
        inputs = torch.randn(TIMED_TOKENS, columns, generator=generator).requires_grad_()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        begin = time.perf_counter()
        for repeat in range(1 + REPEATS):
            if repeat > 1 and time.perf_counter() - begin > PATIENCE:
                break
            for rounded in (False, True):
                start = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
                    out = nn.functional.linear(inputs, weight)
                torch.autograd.grad(out, (inputs, weight), torch.ones_like(out))
                if repeat:
                    seconds[rounded].append(time.perf_counter() - start)
        for rounded, own in seconds.items():
            totals[rounded] += count * median(own)
    return ProductTimes(totals[False], totals[True])


def needs_resolution(spec: Model, policy: Policy) -> bool:
    """Whether `model.autocast` leaves it to a timing what the policy computes in."""
    on_cpu = policy.device.type == "cpu" and policy.model.dtype == torch.float32
    return spec.autocast == "auto" and on_cpu


def resolve_autocast(spec: Model, policy: Policy, bfloat16: bool) -> Model:
    """Make the policy compute in bfloat16 or float32; the spec that other models follow."""
    policy.autocast = "bfloat16" if bfloat16 else False
    return spec.model_copy(update={"autocast": policy.autocast})


def _product_sizes(backbone: nn.Module) -> Counter[tuple[int, int]]:
    """The sizes of the matrices that each token is multiplied with, and how many there are."""
    return Counter(
        (int(weight.shape[0]), int(weight.shape[1]))
        for module in backbone.modules()
        if not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
        if weight.dim() == 2
    )


@dataclass(frozen=True, slots=True)
class RoundingEffect:
    """How far autocast moves a batch: absolute differences of log-probabilities, in nats, and that
    of the gradient of Σ a·log π relative to its norm."""

    mean: float
    largest: float
    gradient: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"log-probabilities differ from float32's by {self.mean:.2g} in the mean and "
            f"{self.largest:.2g} at most ({self.tokens} tokens), the gradient by "
            f"{100 * self.gradient:.2g} %"
        )


def rounding_effect(
    policy: Policy, packed: Packed, weight_N: Float[Tensor, "N"], temperature: float = 1.0
) -> RoundingEffect:
    """The effect of the policy's autocast on a batch with token weights a; its parameters' own
    gradients are left alone."""
    exact = copy.copy(policy)
    exact.autocast = False
    (log_p, grads), (true_log_p, true_grads) = (
        _log_probs_and_gradient(one, packed, weight_N, temperature) for one in (policy, exact)
    )
    gap = (log_p - true_log_p).abs()
    norm = sum(float(grad.double().square().sum()) for grad in true_grads)
    pairs = zip(grads, true_grads, strict=True)
    moved = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return RoundingEffect(
        mean=float(gap.mean()),
        largest=float(gap.max()),
        gradient=(moved / norm) ** 0.5 if norm else 0.0,
        tokens=len(gap),
    )


def _log_probs_and_gradient(
    policy: Policy, packed: Packed, weight_N: Tensor, temperature: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    log_prob_N = policy.scores(packed, temperature).log_prob_N
    parameters = list(policy.trainable().values())
    grads = torch.autograd.grad(
        log_prob_N @ weight_N, parameters, allow_unused=True, materialize_grads=True
    )
    return log_prob_N.detach(), grads
