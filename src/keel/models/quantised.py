"""A frozen base in 4 bits under an adapter (QLoRA, arXiv:2305.14314): the only module that imports
bitsandbytes.

The linear layers of the backbone are kept as NF4 numbers in blocks of 64, whose scales are 8-bit
numbers (double quantisation). They compute in the dtype of their input, which is bfloat16 under
autocast. Embeddings, norms, output layer and 3-D weights of experts stay as they are.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.models.families import exact_weights, probe_sequences, stock_outputs
from keel.platform.extras import install_command
from keel.types import KeelError

BLOCK = 64
"""Weights with one scale."""


def bitsandbytes(key: str) -> Any:
    """The library. Raises KeelError, naming the `key` of the recipe, if it is not installed."""
    try:
        return import_quietly()
    except ImportError as error:
        raise KeelError(
            f"{key} needs the bitsandbytes package: {install_command('quantisation')}, or leave "
            "it out"
        ) from error


def import_quietly() -> Any:
    """Import bitsandbytes; raises ImportError.

    On some processors it would download a kernel from the hub as it is imported, if the package
    `kernels` is installed, and warn if it is not.
    """
    if "bitsandbytes" not in sys.modules:
        logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
        level, kernels = logger.level, sys.modules.get("kernels")
        logger.setLevel(logging.ERROR)
        sys.modules["kernels"] = None  # type: ignore[assignment]
        try:
            import bitsandbytes  # noqa: F401
        finally:
            logger.setLevel(level)
            if kernels is None:
                del sys.modules["kernels"]
            else:
                sys.modules["kernels"] = kernels
    import bitsandbytes as library

    return library


class QuantisedLinear(nn.Linear):
    """A frozen linear layer whose weight (outputs, inputs) is kept in 4 bits.

    bitsandbytes' own layer repacks its weight for bfloat16 in evaluation mode on some CPUs, and
    ignores autocast; only its functions are used here.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        library = bitsandbytes('model.quantisation = "nf4"')
        weight = linear.weight.detach().to(device).contiguous()
        packed, self.scales = library.functional.quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        kind, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        bias = None if self.bias is None else self.bias.to(dtype)
        out: Tensor = import_quietly().matmul_4bit(
            input.to(dtype), self.weight, quant_state=self.scales, bias=bias
        )
        return out

    def dequantised(self) -> Tensor:
        """The weight that it computes with, in the dtype that it had before.

        With a float32 input outside of autocast, a bfloat16 base's product takes the weight as its
        numbers and scales say, in float32; here it is rounded once more.
        """
        weight: Tensor = import_quietly().functional.dequantize_4bit(self.weight, self.scales)
        return weight

    def _apply(self, fn: Any, recurse: bool = True) -> QuantisedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales.to(self.weight.device)
        return self


@dataclass(frozen=True, slots=True)
class QuantisationEffect:
    """What quantising changed: the share of weights in 4 bits, the fingerprint of the weights
    before, and differences of log-probabilities of tokens that the model sampled, in nats."""

    share: float
    fingerprint: str
    mean: float
    largest: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.0f} % of the weights are in 4 bits: log-probabilities differ from "
            f"the original weights' by {self.mean:.2g} in the mean and {self.largest:.2g} at most "
            f"({self.tokens} sampled tokens)"
        )


@torch.no_grad()
def quantise(model: PreTrainedModel, device: torch.device, fingerprint: str) -> QuantisationEffect:
    """Quantise the linear layers of a stock model's backbone, one after the other, on `device`, and
    move all else there.

    Raises KeelError without bitsandbytes, or for a family that has no such layers (GPT-2).
    """
    output, backbone = model.get_output_embeddings(), model.base_model
    every = sum(p.numel() for p in model.parameters())
    linear = [
        (parent, name, child)
        for parent in backbone.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not output
    ]
    if not linear:
        raise KeelError(
            f"model family {model.config.model_type!r} has no linear layers that "
            'model.quantisation = "nf4" could keep in 4 bits: choose a family that has (llama, '
            "qwen2, qwen3, …), or leave it out"
        )
    bitsandbytes('model.quantisation = "nf4"')
    before = _log_probs(model)
    drawn = torch.multinomial(before.exp(), 1, generator=torch.Generator().manual_seed(0))
    small = sum(child.weight.numel() for _, _, child in linear)
    for parent, name, child in linear:
        setattr(parent, name, QuantisedLinear(child, device))
    model.to(device)
    gap = (_log_probs(model).gather(1, drawn) - before.gather(1, drawn)).abs()
    return QuantisationEffect(
        small / every, fingerprint, float(gap.mean()), float(gap.max()), len(gap)
    )


def _log_probs(model: PreTrainedModel) -> Tensor:
    """log p (T, V) after each token of the probe, in float32 on the CPU."""
    model.eval()
    with exact_weights(model):
        logits = stock_outputs(model, probe_sequences(model), False, "logits")
    return logits.float().cpu().log_softmax(-1)


def dequantised_linear(layer: QuantisedLinear) -> nn.Linear:
    """A trainable layer that computes the same."""
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(layer.dequantised())
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().clone())
    return plain


def weight_count(model: nn.Module) -> int:
    """The number of weights, those in 4 bits included."""
    packed = sum(
        m.in_features * m.out_features - m.weight.numel()
        for m in model.modules()
        if isinstance(m, QuantisedLinear)
    )
    return packed + sum(p.numel() for p in model.parameters())
