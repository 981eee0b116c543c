"""A load-time probe: does the packed forward say what the stock model says of each sequence alone?

Architectures differ in ways that no config tells, and a wrong one trains without a word. So a few
short sequences go once through the model as transformers made it, one by one, and once through the
packed path and the chunked head's rules; a model whose logits differ is refused with the figure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.models.attention.functions import install
from keel.models.backbone import autocast_for, states_at
from keel.models.families import head_of
from keel.models.head import logits
from keel.models.packed import pack
from keel.types import KeelError

LENGTHS = (7, 19, 12)
"""Tokens of the probe's sequences: ragged, the longest in the middle."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Largest difference allowed, relative to the largest logit, by the dtype of the arithmetic.

Rounding in another order moves float32 logits by 1e-6 or so; leaks between sequences by 1e-2 and
more. Some stock models take their softmax in float32 also for float64 weights. bfloat16 keeps
8 bits, so that each layer rounds at 4e-3 and a deep model reaches some 1e-2: there the probe finds
only the coarse faults.
"""


Speak = Callable[[PreTrainedModel, list[Tensor], bool], Tensor]
"""What a model says of sequences, at every position of each."""


def prepare(model: PreTrainedModel, autocast: bool) -> None:
    """Turn a stock model to packed attention, and refuse it if that changes its logits.

    Raises KeelError with the family's name and the largest difference.
    """
    _prepare(model, autocast, _stock_logits, _packed_logits, "logits")


def prepare_backbone(model: PreTrainedModel, autocast: bool) -> None:
    """`prepare` for a model without a language head: its hidden states are compared."""
    _prepare(model, autocast, _stock_states, _packed_states, "hidden states")


def _prepare(
    model: PreTrainedModel, autocast: bool, alone: Speak, together: Speak, what: str
) -> None:
    family = model.config.model_type
    sequences = probe_sequences(model)
    stock = alone(model.eval(), sequences, autocast)
    install(model)
    try:
        # In training mode, in which it will be used: what that mode changes is a fault too.
        ours = together(model.train(), sequences, autocast)
    except (ValueError, TypeError, RuntimeError) as error:
        raise KeelError(
            f"model family {family!r} cannot run packed sequences "
            f"({str(error).splitlines()[0]}): choose a model of a supported family"
        ) from error
    stock = stock.to(ours.dtype)
    difference = float((ours - stock).abs().max() / stock.abs().max().clamp_min(1e-12))
    dtype = torch.bfloat16 if _casts(model, autocast) else model.dtype
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


def _casts(model: PreTrainedModel, autocast: bool) -> bool:
    return autocast and model.device.type == "cuda" and model.dtype == torch.float32


@torch.no_grad()
def _stock_logits(model: PreTrainedModel, sequences: list[Tensor], autocast: bool) -> Tensor:
    with autocast_for(model, autocast):
        return torch.cat([model(input_ids=t[None], use_cache=False).logits[0] for t in sequences])


@torch.no_grad()
def _packed_logits(model: PreTrainedModel, sequences: list[Tensor], autocast: bool) -> Tensor:
    return logits(_packed_states(model, sequences, autocast), head_of(model))


@torch.no_grad()
def _stock_states(model: PreTrainedModel, sequences: list[Tensor], autocast: bool) -> Tensor:
    backbone = model.base_model
    with autocast_for(model, autocast):
        outputs = [backbone(input_ids=tokens[None], use_cache=False) for tokens in sequences]
    return torch.cat([out.last_hidden_state[0] for out in outputs])


@torch.no_grad()
def _packed_states(model: PreTrainedModel, sequences: list[Tensor], autocast: bool) -> Tensor:
    packed = pack(sequences, [torch.zeros(0, dtype=torch.long)] * len(sequences), model.device)
    everywhere = torch.arange(len(packed.tokens_T), device=model.device)
    return states_at(model, packed, everywhere, autocast)
