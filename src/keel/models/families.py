"""The model families whose packed forward pass is correct, and how their logits are made.

A family is a transformers model type. Others are refused: some have no attention interface (Bloom,
Falcon, MPT), in others state leaks from one packed sequence into the next (Mamba, RWKV and other
recurrent layers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from keel.config.model import Autocast
from keel.models.attention import PackedLayout
from keel.models.head import Head
from keel.models.packed import Packed
from keel.types import KeelError


@dataclass(frozen=True)
class Family:
    """What a built model of the family needs beyond the common keys of its config."""

    gated: bool = True
    """A gated MLP (SwiGLU and the like), which is two thirds as wide at equal size."""
    width: str = "intermediate_size"
    """Config key of the MLP's width."""
    experts: bool = False


_DENSE = """
cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite hunyuan_v1_dense llama
ministral mistral olmo olmo2 olmo3 phi3 qwen2 qwen3 seed_oss smollm3
"""
_UNGATED = "arcee gpt_neox phi starcoder2"
_SPARSE = "gpt_oss mixtral olmoe qwen2_moe qwen3_moe"

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_DENSE.split(), Family()),
    **dict.fromkeys(_UNGATED.split(), Family(gated=False)),
    **dict.fromkeys(_SPARSE.split(), Family(experts=True)),
    "gpt2": Family(gated=False, width="n_inner"),
    "gpt_bigcode": Family(gated=False, width="n_inner"),
    "opt": Family(gated=False, width="ffn_dim"),
}
"""Model types whose packed forward pass was found equal to the separate one."""

SHIFTING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence of the batch."""

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def check_family(config: PreTrainedConfig, trusted: bool = False) -> None:
    """Raise KeelError for a family that is not listed, or a config that cannot be packed.

    With `trusted` (code that the user chose to trust) the probe decides on unlisted families.
    """
    family = config.model_type
    if family not in FAMILIES and not trusted:
        raise KeelError(
            f"model family {family!r} is not supported: use one of {', '.join(sorted(FAMILIES))}"
        )
    _check_sizes(config)
    for rope in _rope_types(config):
        if rope in SHIFTING_ROPE:
            raise KeelError(
                f"model family {family!r} with rope_type {rope!r}: a long sequence would change "
                "the positions of its neighbours in a packed batch; use a checkpoint whose "
                "rope_parameters are of type default, linear, llama3 or yarn"
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise KeelError(
            f"model family {family!r} with use_bidirectional_attention is no causal language "
            "model: load a checkpoint without that key"
        )


def _check_sizes(config: PreTrainedConfig) -> None:
    """Raise KeelError for impossible sizes, with which transformers would fail later."""
    for key in SIZES:
        value = getattr(config, key, None)
        if isinstance(value, int) and value < 1:
            raise KeelError(f"the model's config has {key} = {value}: it must be 1 or more")
    ids = getattr(config, "eos_token_id", None)
    for token in ids if isinstance(ids, list) else [ids]:
        # A family's default may lie outside the vocabulary; the tokenizer's replaces it.
        if isinstance(token, int) and not 0 <= token < 2**31:
            raise KeelError(
                f"the model's config has eos_token_id = {token}, which is no token: give one from "
                f"0 to {config.vocab_size - 1}, or leave it out"
            )
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        per_head = config.hidden_size // config.num_attention_heads
        per_head = getattr(config, "head_dim", None) or per_head
        turned = int(per_head * rope.get("partial_rotary_factor", 1.0))
        if turned < 2 or turned % 2:
            raise KeelError(
                f"the model's config rotates {turned} features of each attention head, which must "
                "be even and at least 2: change hidden_size, or the number of heads"
            )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """The rope types of a config, which holds one set of parameters or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [str(entry["rope_type"]) for entry in sets if "rope_type" in entry]


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens a sequence may have; None where the model has no limit."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def head_of(model: PreTrainedModel) -> Head:
    """How a model's logits are made from the hidden states of its backbone.

    Scale and soft cap are read from the config: Gemma 2 and 3 `final_logit_softcapping`, Granite
    `1 / logits_scaling`, Cohere `logit_scale`. Raises KeelError for a model without an output
    layer.
    """
    layer = model.get_output_embeddings()
    if layer is None or not hasattr(layer, "weight"):
        raise KeelError(
            f"model family {model.config.model_type!r} has no output layer: "
            "use a causal language model"
        )
    config = model.config
    scale = 1.0
    if config.model_type == "granite":
        scale = 1.0 / config.logits_scaling
    elif config.model_type in ("cohere", "cohere2"):
        scale = float(config.logit_scale)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight=layer.weight, bias=getattr(layer, "bias", None), scale=scale, softcap=softcap
    )


def uses_autocast(model: PreTrainedModel, wanted: Autocast) -> bool:
    """Whether the model works in bfloat16 autocast: float32 weights on a GPU, or on a CPU where
    `wanted` names bfloat16 (`auto` is settled at the start of a run: `keel.models.precision`)."""
    on = wanted == "bfloat16" if model.device.type == "cpu" else bool(wanted)
    return on and model.dtype == torch.float32


def autocast_for(model: PreTrainedModel, wanted: Autocast) -> torch.autocast:
    """bfloat16 autocast where `uses_autocast`; elsewhere no effect."""
    enabled = uses_autocast(model, wanted)
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=enabled)


def hidden_states(
    model: PreTrainedModel, packed: Packed, autocast: Autocast = True
) -> Float[Tensor, "N H"]:
    """The last hidden state that each scored token is predicted from, at `source_N`."""
    fed, at_N = packed.fed
    return states_at(model, fed, at_N, autocast)


def states_at(
    model: PreTrainedModel, packed: Packed, at_K: Int[Tensor, " K"], autocast: Autocast = True
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
