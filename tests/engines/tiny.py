"""Small models of many families, with weights large enough to have opinions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from keel.models.build import character_tokenizer
from keel.types import Completion, Group, Prompt

ALPHABET = "0123456789abcdefghijklmnop+-*/=<>().,:;? \n"
TOKENIZER = character_tokenizer(ALPHABET, 96)
"""`<pad>` is 0 and `<eos>` 1."""

COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2}
SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = {"sliding_window": 3, "layer_types": [SLIDING, FULL, SLIDING]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": HEADS,
    "gpt2": {"n_inner": 48},
    "mistral": {**HEADS, "sliding_window": 3},
    "gemma2": {**HEADS, "sliding_window": 3, "query_pre_attn_scalar": 8},
    "gemma3_text": {**HEADS, **ALTERNATING, "query_pre_attn_scalar": 8},
    "gpt_oss": {**HEADS, **EXPERTS, **ALTERNATING, "num_local_experts": 4},
    "phi3": {"sliding_window": 4},
    "olmo2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": {**HEADS, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
}


def tiny(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any
) -> PreTrainedModel:
    """A model with random weights and transformers' plain attention, in evaluation mode."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**COMMON | FAMILIES[family] | options)
    if family == "gpt_oss":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped product knows no float64
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    return model.to(dtype).eval()


def ragged_prompts(count: int, longest: int = 14, seed: int = 0) -> list[Prompt]:
    """Prompts of random tokens, special ones aside, with lengths from 1 to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        Prompt(
            id=f"prompt-{number}",
            content="",
            tokens=tuple(torch.randint(2, len(TOKENIZER), (length,), generator=generator).tolist()),
        )
        for number, length in enumerate(lengths)
    ]


@torch.no_grad()
def stock_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits (tokens, V) of one sequence from a model that nothing was installed in."""
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def stock_log_probs(
    model: PreTrainedModel, prompt: Prompt, completion: Completion, temperature: float = 1.0
) -> np.ndarray:
    """Log-probabilities of a completion at a temperature, from a model as `stock_logits` wants."""
    ids = [*prompt.tokens, *completion.tokens.tolist()]
    scores = (stock_logits(model, ids).double() / temperature).log_softmax(-1)
    places = torch.arange(len(prompt.tokens) - 1, len(ids) - 1)
    return scores[places, torch.tensor(ids)[places + 1]].float().numpy()


def pairs(ours: Sequence[Group], theirs: Sequence[Group]) -> Iterator[tuple[Completion, ...]]:
    """The completions of two calls, one after the other."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.prompt.id == other.prompt.id
        yield from zip(one.completions, other.completions, strict=True)


def assert_same(ours: Sequence[Group], theirs: Sequence[Group], atol: float = 1e-6) -> None:
    """The same tokens and ends, and log-probabilities up to rounding."""
    for a, b in pairs(ours, theirs):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert (a.finish, a.text) == (b.finish, b.text)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=atol)


def agree(
    ours: Sequence[Group],
    theirs: Sequence[Group],
    rounding: float = 1e-4,  # float32 in another order
    least: float = 0.9,
) -> None:
    """The same words for at least so great a part, and their log-probabilities up to rounding."""
    compared = all_of = 0
    for a, b in pairs(ours, theirs):
        same = min(len(a), len(b))
        # A number that falls next to a border may tip a draw; up to there all is alike.
        if not (a.tokens[:same] == b.tokens[:same]).all():
            same = int((a.tokens[:same] != b.tokens[:same]).argmax())
        assert abs(a.log_probs[:same] - b.log_probs[:same]).max(initial=0) < rounding
        assert (a.written[:same] == b.written[:same]).all()
        compared, all_of = compared + same, all_of + len(b)
    assert compared > least * all_of
