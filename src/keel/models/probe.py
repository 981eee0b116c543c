"""A load-time probe: does the packed forward say what the stock model says of each sequence alone?

Architectures differ in ways that no config tells, and a wrong one trains without a word. So a few
short sequences go once through the model as transformers made it, one by one, and once through the
packed path and the chunked head's rules; a model whose logits differ is refused with the figure.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.models.attention import install
from keel.models.backbone import autocast_for, hidden_states
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


def prepare(model: PreTrainedModel, autocast: bool) -> None:
    """Turn a stock model to packed attention, and refuse it if that changes what it says.

    Raises KeelError with the family's name and the largest difference.
    """
    family = model.config.model_type
    sequences = probe_sequences(model)
    stock = _stock_logits(model.eval(), sequences, autocast)
    install(model)
    try:
        # In training mode, in which it will be used: what that mode changes is a fault too.
        difference = _difference(model.train(), sequences, stock, autocast)
    except (ValueError, TypeError, RuntimeError) as error:
        raise KeelError(
            f"model family {family!r} cannot run packed sequences "
            f"({str(error).splitlines()[0]}): choose a model of a supported family"
        ) from error
    dtype = torch.bfloat16 if _casts(model, autocast) else model.dtype
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    # Not `>`, which a NaN would pass.
    if not difference <= tolerance:
        raise KeelError(
            f"model family {family!r} fails the packing probe: the logits of "
            f"packed sequences differ from separate ones by {difference:.2g} of the largest logit "
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
        outputs = [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences]
    return torch.cat(outputs)


@torch.no_grad()
def _difference(
    model: PreTrainedModel, sequences: list[Tensor], stock: Tensor, autocast: bool
) -> float:
    """max |packed − stock| / max |stock| over all logits of all positions."""
    everywhere = [torch.ones(len(tokens), dtype=torch.bool) for tokens in sequences]
    for mask in everywhere:
        mask[0] = False
    packed = pack(sequences, everywhere, model.device)
    ours = logits(hidden_states(model, packed, autocast), head_of(model))
    # Packed states are read one position before each target: drop each sequence's last.
    ends = torch.tensor(packed.lengths).cumsum(0) - 1
    kept = torch.ones(len(stock), dtype=torch.bool)
    kept[ends] = False
    stock = stock[kept.to(stock.device)].to(ours.dtype)
    return float((ours - stock).abs().max() / stock.abs().max().clamp_min(1e-12))
