"""A check at load time that the packed forward pass equals the stock model's.

Architectures differ in ways that no config shows, and a wrong one would train without an error. So
a few short sequences go through the model as transformers made it, one by one, and once through the
packed path and the head; a model whose logits differ is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.config.model import Autocast
from keel.models.attention import install
from keel.models.families import autocast_for, head_of, states_at, uses_autocast
from keel.models.head import logits
from keel.models.packed import pack
from keel.types import KeelError

LENGTHS = (7, 19, 12)
"""Tokens of the probe's sequences: ragged, the longest in the middle."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Largest difference allowed, relative to the largest logit, by the dtype of the arithmetic.

Another order of rounding moves float32 logits by about 1e-6; leaks between sequences by 1e-2 and
more. Some stock models take their softmax in float32 also for float64 weights. bfloat16 keeps
8 bits: each layer rounds at 4e-3 and a deep model reaches some 1e-2, so the probe finds only large
errors there.
"""


def prepare(model: PreTrainedModel, autocast: Autocast) -> None:
    """Give a stock model packed attention, and refuse it if that changes its logits.

    Raises KeelError with the family's name and the largest difference.
    """
    _prepare(model, autocast, "logits")


def prepare_backbone(model: PreTrainedModel, autocast: Autocast) -> None:
    """`prepare` for a model without a language head: its hidden states are compared."""
    _prepare(model, autocast, "hidden states")


@torch.no_grad()
def _prepare(model: PreTrainedModel, autocast: Autocast, what: str) -> None:
    family = model.config.model_type
    sequences = probe_sequences(model)
    stock = _stock(model.eval(), sequences, autocast, what)
    install(model)
    try:
        # In training mode, in which it will be used: what that mode changes is a fault too.
        ours = _packed_states(model.train(), sequences, autocast)
        if what == "logits":
            ours = logits(ours, head_of(model))
    except (ValueError, TypeError, RuntimeError) as error:
        raise KeelError(
            f"model family {family!r} cannot run packed sequences "
            f"({str(error).splitlines()[0]}): choose a model of a supported family"
        ) from error
    stock = stock.to(ours.dtype)
    difference = float((ours - stock).abs().max() / stock.abs().max().clamp_min(1e-12))
    dtype = torch.bfloat16 if uses_autocast(model, autocast) else model.dtype
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    # Not `>`, which a NaN would pass.
    if not difference <= tolerance:
        raise KeelError(
            f"model family {family!r} fails the packing probe: the {what} of "
            f"packed sequences differ from separate ones by {difference:.2g} of the largest "
            f"(allowed {tolerance:.0e} in {str(dtype).removeprefix('torch.')}); "
            "this model would train on wrong probabilities: choose another"
        )


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
    model: PreTrainedModel, sequences: list[Tensor], autocast: Autocast, what: str
) -> Tensor:
    """Logits or hidden states of every position, one sequence at a time."""
    module = model if what == "logits" else model.base_model
    field = "logits" if what == "logits" else "last_hidden_state"
    with autocast_for(model, autocast):
        outputs = [module(input_ids=tokens[None], use_cache=False) for tokens in sequences]
    return torch.cat([getattr(out, field)[0] for out in outputs])


def _packed_states(model: PreTrainedModel, sequences: list[Tensor], autocast: Autocast) -> Tensor:
    packed = pack(sequences, [torch.zeros(0, dtype=torch.long)] * len(sequences), model.device)
    everywhere = torch.arange(len(packed.tokens_T), device=model.device)
    return states_at(model, packed, everywhere, autocast)
