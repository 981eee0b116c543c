"""Small models and packed batches for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.config.model import BuildModel, Lora, Model
from keel.models.build import build_model
from keel.models.packed import Packed, pack
from keel.models.policy import Policy, load_policy

LENGTHS = (9, 17, 4, 13)
"""Ragged, and longer than the windows that the tests set."""

OPTIONS: dict[str, dict[str, Any]] = {
    # A window shorter than the sequences, and one layer of each kind.
    "cohere2": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.3,
    },
    "exaone4": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5},
    "ministral": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": 5},
    "olmo3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "starcoder2": {"sliding_window": 5},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
}
ONE_KV_HEAD_EACH = ("gpt2", "gpt_neox", "gpt_bigcode", "opt")


ALPHABET = "0123456789+= ab"


def build(family: str = "llama", **changes: Any) -> BuildModel:
    """Two layers of width 32."""
    keys: dict[str, Any] = {
        "family": family,
        "alphabet": ALPHABET,
        # A tokenizer of characters cannot be served with this family.
        "tokenizer": "bytes" if family == "qwen2" else "characters",
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": None if family in ONE_KV_HEAD_EACH else 2,
        "context": 64,
        "options": OPTIONS.get(family, {}),
    }
    return BuildModel(**keys | changes)


def spec(
    family: str = "llama",
    *,
    rank: int = 0,
    dtype: str = "float32",
    alphabet: str = ALPHABET,
    **keys: Any,
) -> Model:
    """A recipe's model; `rank` above 0 adds LoRA."""
    lora = Lora(rank=rank, alpha=2.0 * rank) if rank else None
    made = build(family, alphabet=alphabet)
    return Model(build=made, lora=lora, dtype=dtype, device="cpu", **keys)  # type: ignore[arg-type]


def policy(family: str = "llama", *, seed: int = 0, **keys: Any) -> Policy:
    """A policy whose weights are far from the near-uniform start, so that mistakes show."""
    made = load_policy(spec(family, **keys), seed)
    stir(made.model)
    return made


def stir(model: PreTrainedModel) -> PreTrainedModel:
    """Enlarge the weights and move norms and biases from 1 and 0; a seeded change."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                continue
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.add_(noise * 0.1)
    return model


def learn(policy: Policy, seed: int) -> None:
    """Move all that trains by seeded noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def deep_model(dtype: torch.dtype) -> PreTrainedModel:
    """16 layers of large weights, which bfloat16 moves by a fifth of the largest logit."""
    model = build_model(build("llama", layers=16), 0, dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def stock(family: str = "llama", *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights as `policy(family)`, in a model as transformers makes it."""
    model = build_model(build(family), 0, dtype)
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return stir(model).eval()


def sequences(words: int, seed: int = 3) -> list[Tensor]:
    """Random token ids of ragged lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, words, (length,), generator=generator) for length in LENGTHS]


def batch(words: int, seed: int = 3) -> tuple[list[Tensor], Packed]:
    """Sequences and their packing; all but the first two tokens of each are scored."""
    tokens = sequences(words, seed)
    return tokens, pack(tokens, [torch.arange(2, len(t)) for t in tokens])


def separate_log_probs(model: PreTrainedModel, tokens: list[Tensor], temperature: float) -> Tensor:
    """log π of what `batch` scores, by the stock model, each sequence alone, all logits at once."""
    values = []
    for sequence in tokens:
        logits = model(input_ids=sequence[None], use_cache=False).logits[0] / temperature
        log_p = logits.log_softmax(-1)
        values.append(log_p[1:-1].gather(1, sequence[2:, None])[:, 0])
    return torch.cat(values)
