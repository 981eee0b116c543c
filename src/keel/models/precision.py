"""Whether bfloat16 makes the products of a model faster on this CPU, and how far it moves them.

Processors with AMX or AVX-512 BF16 multiply several times faster in bfloat16; on others the casts
cost more than the products save. Which one this is shows in a timing of the model's own sizes.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.config.model import Model
from keel.models.packed import ENOUGH_ON_CPU, Packed
from keel.models.policy import Policy

TOKENS = ENOUGH_ON_CPU
"""Of a pass of the update on a CPU."""
REPEATS = 5
PATIENCE = 2.0
"""Seconds of a size after which its passes are not repeated."""
WORTH = 0.8
"""bfloat16 has to take less than this share of float32's seconds: norms, attention and the head
stay in float32, and a smaller gain would be lost in the noise of the timing."""


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
            f"the products of {TOKENS} tokens take {1000 * self.bfloat16:.3g} ms in bfloat16 and "
            f"{1000 * self.float32:.3g} ms in float32"
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
        inputs = torch.randn(TOKENS, columns, generator=generator).requires_grad_()
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
