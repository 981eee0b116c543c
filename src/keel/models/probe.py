"""A check at load time that the packed forward pass equals the stock model's.

Architectures differ in ways that no config shows, and a wrong one would train without an error. So
a few short sequences go through the model as transformers made it, one by one, and once through the
packed path and the head; a model whose logits differ is refused.

Both compute in float32, whatever the recipe's autocast: in bfloat16, rounding alone moves the
logits of a deep trained model by a tenth of the largest. bfloat16 weights become float32 one module
at a time, so that no float32 copy of a large model is made. A model that works in bfloat16 attends
by other kernels then; a second pass compares how far it and the stock model are from float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.config.model import Autocast
from keel.models.attention import install
from keel.models.families import autocast_for, head_of, states_at, uses_autocast
from keel.models.head import logits
from keel.models.packed import pack
from keel.types import KeelError

LENGTHS = (7, 19, 12)
"""Tokens of the probe's sequences: ragged, the longest in the middle."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest difference allowed, relative to the largest logit.

Another order of rounding moves float32 logits by about 1e-6; leaks between sequences by 1e-2 and
more. Some stock models take their softmax in float32 also for float64 weights.
"""

TF32_TOLERANCE = 1e-2
"""The same if the user allows products in TF32, which keep 11 bits."""

FURTHER = 3.0
"""How many times the stock model's mean distance from float32 is allowed in bfloat16.

Both distances are rounding alone and nearly equal; means, since rounding may choose another expert
of a sparse model for a single token.
"""


Output = Literal["logits", "hidden states"]


@torch.no_grad()
def prepare(model: PreTrainedModel, autocast: Autocast, what: Output = "logits") -> None:
    """Give a stock model packed attention, and refuse it if that changes `what` it computes.

    Of a model without a language head the hidden states are compared. Raises KeelError with the
    family's name and the largest difference.
    """
    family = model.config.model_type
    sequences = probe_sequences(model)
    rounds = model.dtype == torch.bfloat16 or uses_autocast(model, autocast)
    model.eval()
    with _exact(model):
        exact = _stock(model, sequences, False, what)
    rounded = _stock(model, sequences, autocast, what) if rounds else exact
    install(model)
    # In training mode, in which it will be used: what that mode changes is a fault too.
    model.train()
    try:
        with _exact(model):
            ours = _packed(model, sequences, False, what)
        ours_rounded = _packed(model, sequences, autocast, what) if rounds else exact
    except (ValueError, TypeError, RuntimeError) as error:
        raise KeelError(
            f"model family {family!r} cannot run packed sequences "
            f"({str(error).splitlines()[0]}): choose a model of a supported family"
        ) from error
    difference = float((ours - exact).abs().max() / exact.abs().max().clamp_min(1e-12))
    tolerance, fault = TOLERANCE[exact.dtype], None
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        tolerance = TF32_TOLERANCE
    # Not `>`, which a NaN would pass.
    if not difference <= tolerance:
        fault = f"from separate ones by {difference:.2g} of the largest (allowed {tolerance:.0e})"
    else:
        far, stock_far = (float((x - exact).abs().mean()) for x in (ours_rounded, rounded))
        if not far <= FURTHER * stock_far:
            fault = f"in bfloat16 from float32's by {far:.2g}, and separate ones by {stock_far:.2g}"
    if fault is not None:
        raise KeelError(
            f"model family {family!r} fails the packing probe: the {what} of packed sequences "
            f"differ {fault}; this model would train on wrong probabilities: choose another"
        )


@contextmanager
def _exact(model: PreTrainedModel) -> Iterator[None]:
    """Within the block a module's bfloat16 weights are float32 while it runs."""
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                kept[parameter], parameter.data = parameter.data, parameter.data.float()

    def restore(module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(parameter, parameter.data)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(widen))
            hooks.enter_context(module.register_forward_hook(restore, always_call=True))
        yield


def probe_sequences(model: PreTrainedModel) -> list[Tensor]:
    """Random token ids, the same at every call, no longer than the model's context."""
    context = getattr(model.config, "max_position_embeddings", None) or max(LENGTHS)
    words = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, words, (min(length, context),), generator=generator).to(model.device)
        for length in LENGTHS
    ]


def _stock(
    model: PreTrainedModel, sequences: list[Tensor], autocast: Autocast, what: Output
) -> Tensor:
    """Logits or hidden states of every position, one sequence at a time."""
    module = model if what == "logits" else model.base_model
    field = "logits" if what == "logits" else "last_hidden_state"
    with autocast_for(model, autocast):
        outputs = [module(input_ids=tokens[None], use_cache=False) for tokens in sequences]
    return torch.cat([getattr(out, field)[0] for out in outputs])


def _packed(
    model: PreTrainedModel, sequences: list[Tensor], autocast: Autocast, what: Output
) -> Tensor:
    """The same of the packed path."""
    packed = pack(sequences, [torch.zeros(0, dtype=torch.long)] * len(sequences), model.device)
    everywhere = torch.arange(len(packed.tokens_T), device=model.device)
    states = states_at(model, packed, everywhere, autocast)
    return logits(states, head_of(model)) if what == "logits" else states
