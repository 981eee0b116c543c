"""One packed forward pass through a model's backbone."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.models.attention import PackedLayout
from keel.models.packed import Packed


def uses_autocast(model: PreTrainedModel, wanted: bool) -> bool:
    """Whether the model works in bfloat16 autocast: float32 weights on a GPU."""
    return wanted and model.device.type == "cuda" and model.dtype == torch.float32


def autocast_for(model: PreTrainedModel, wanted: bool) -> torch.autocast:
    """bfloat16 autocast for float32 weights on a GPU; elsewhere no effect."""
    enabled = uses_autocast(model, wanted)
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=enabled)


def hidden_states(
    model: PreTrainedModel, packed: Packed, autocast: bool = True
) -> Float[Tensor, "N H"]:
    """The last hidden state that each scored token is predicted from, at `source_N`."""
    fed, at_N = packed.fed
    return states_at(model, fed, at_N, autocast)


def states_at(
    model: PreTrainedModel, packed: Packed, at_K: Int[Tensor, " K"], autocast: bool = True
) -> Float[Tensor, "K H"]:
    """The last hidden states at these indices among the T.

    `model` is a causal language model, one with a classification head, or their backbone, with
    packed attention. No cache is used: transformers' own would let sequences see each other.
    """
    backbone: nn.Module = model.base_model
    with autocast_for(model, autocast):
        out = backbone(
            input_ids=packed.tokens_T[None],
            position_ids=packed.positions()[None],
            use_cache=False,
            layout=PackedLayout(packed.lengths, packed.follows),
        )
    states: Tensor = out.last_hidden_state[0]
    return states.index_select(0, at_K)
