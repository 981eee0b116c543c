"""The quick backbone says what the model's own modules say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from keel.config.model import Lora
from keel.engines import compiled
from keel.engines.native import NativeEngine
from keel.models.attention import install
from keel.models.lora import add_lora
from keel.types import Prompt, Sampling
from tests.engines.tiny import TOKENIZER, tiny

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "yarn")


def rotary(kind: str) -> dict[str, Any]:
    """Keys of a config whose rotary embedding is of this kind."""
    reach = {"original_max_position_embeddings": 24, "factor": 4.0, "rope_theta": 10000.0}
    return {"rope_parameters": {"rope_type": kind, **reach}}


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    """In float32, its vectors drawn at random: norms of 1 and biases of 0 hide a mistake."""
    if family == "yarn":  # which also scales cosines and sines
        return model_of("llama", **rotary("yarn"))
    model = tiny(family, **changes).float()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            if name.endswith("bias"):
                parameter.sub_(1.0)
    install(model)
    return model


def prompts(*lengths: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(f"p{n}", "x", tokens=tuple(torch.randint(2, 40, (n,), generator=generator).tolist()))
        for n in lengths
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_draws_and_scores_as_the_modules_do(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    assert compiled.compiled(model, 64) is not None
    engine = NativeEngine(model, TOKENIZER, max_rows=6)
    quick = engine.sample(prompts(3, 9, 5), 4, Sampling(max_tokens=24), 0)
    monkeypatch.setattr(compiled, "library", lambda: None)
    own = engine.sample(prompts(3, 9, 5), 4, Sampling(max_tokens=24), 0)
    compared = 0
    for one, other in zip(quick, own, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            same = min(len(a), len(b))
            # A number that falls next to a border may tip a draw; up to there all is alike.
            if not (a.tokens[:same] == b.tokens[:same]).all():
                same = int((a.tokens[:same] != b.tokens[:same]).argmax())
            compared += same
            # float32 in another order.
            assert abs(a.log_probs[:same] - b.log_probs[:same]).max(initial=0) < 2e-5
    assert compared > 150


def test_mistral_sees_through_its_own_window() -> None:
    """Its layers read the window from the config, at their call."""
    narrow, wide = (model_of("mistral", sliding_window=n) for n in (4, 64))
    for window, model in ((4, narrow), (64, wide)):
        found = compiled.compiled(model, 64)
        assert found is not None
        assert {block.rules.window for block in found._blocks} == {window}


def test_what_is_built_otherwise_goes_through_its_own_modules() -> None:
    adapted = model_of("llama")
    add_lora(adapted, Lora(), 0)
    other = model_of("llama")
    other.config.hidden_act = "gelu"
    moving = model_of("llama", **rotary("dynamic"))
    for model in (tiny("llama").double(), model_of("gemma2"), adapted, other, moving):
        if model.config._attn_implementation != "keel":
            install(model)
        assert compiled.compiled(model, 64) is None


def test_weights_are_those_of_the_moment() -> None:
    model = model_of("qwen3")
    engine = NativeEngine(model, TOKENIZER)
    before = engine.sample(prompts(4), 2, Sampling(max_tokens=5, temperature=0), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    after = engine.sample(prompts(4), 2, Sampling(max_tokens=5, temperature=0), 0)
    assert before[0].completions[0].tokens.tolist() != after[0].completions[0].tokens.tolist()
