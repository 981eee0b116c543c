"""One GPU: decoding in captured graphs, against the same function uncaptured and the model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from keel.engines.native import NativeEngine
from keel.engines.static import StaticDecoder
from keel.models.lora import lora_layers
from keel.models.policy import load_policy, token_count
from keel.types import Group, Prompt, Sampling
from tests.engines.test_compiled import prompts
from tests.engines.test_conversation import wide
from tests.engines.test_static import talk
from tests.engines.tiny import FAMILIES, TOKENIZER, assert_same, ragged_prompts, tiny
from tests.gpu import needs_gpus
from tests.models.tiny import spec

pytestmark = needs_gpus(1)
DEVICE = torch.device("cuda")
ROUNDING = 1e-4
"""float32 sums in another order, through enlarged weights."""


def on_gpu(model: torch.nn.Module, *, captures: bool = True, **options: object) -> NativeEngine:
    moved = copy.deepcopy(model).to(DEVICE)
    decoder = StaticDecoder(
        moved,
        tokens=token_count(TOKENIZER),
        autocast=False,
        **options,  # type: ignore[arg-type]
    )
    decoder._captures = captures
    return NativeEngine(moved, TOKENIZER, autocast=False, decoder=decoder)  # type: ignore[arg-type]


def graphs(engine: NativeEngine) -> list[object]:
    assert engine._decoder is not None
    return list(engine._decoder._graphs.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_equal_those_on_the_cpu(family: str) -> None:
    """Greedy, in float32. Mixtures of experts run without a graph, and in float64: rounding chooses
    another expert where two are 3e-8 from each other."""
    sparse = family in ("gpt_oss", "qwen3_moe")
    model = tiny(family, dtype=torch.float64 if sparse else torch.float32)
    greedy = Sampling(24, temperature=0)
    wanted = NativeEngine(copy.deepcopy(model), TOKENIZER).sample(ragged_prompts(9), 3, greedy, 0)
    engine = on_gpu(model)
    assert_same(engine.sample(ragged_prompts(9), 3, greedy, 0), wanted, atol=ROUNDING)
    assert (None in graphs(engine)) == sparse


def test_replayed_graphs_sample_what_the_step_samples() -> None:
    """Same numbers, with and without graphs, over calls with changed weights and settings."""
    model = wide("qwen2")
    engines = [on_gpu(model, captures=captures) for captures in (True, False)]
    for seed, sampling in enumerate(
        [Sampling(60), Sampling(60, 1.3), Sampling(60, 1.0, top_k=9, top_p=0.9), Sampling(60)]
    ):
        for engine in engines:
            with torch.no_grad():
                for weight in engine.model.parameters():
                    weight.mul_(1.01)
        found = [engine.sample(prompts(5, 64, 100), 9, sampling, seed) for engine in engines]
        assert_same(*found, atol=ROUNDING)
    assert all(graphs(engines[0]))


def test_few_pages_and_conversations_change_nothing() -> None:
    model = wide("qwen3")
    asked = prompts(15, 63, 64, 65, 33, 1)
    wanted = talk(on_gpu(model), asked, 3)
    assert_same(talk(on_gpu(model, most_pages=14, steps=5), asked, 3), wanted, atol=ROUNDING)


def test_autocast_samples_from_a_copy_in_bfloat16() -> None:
    """Its log-probabilities are those of the model under autocast, up to rounding."""
    model = tiny("llama", dtype=torch.float32).to(DEVICE)
    engine = NativeEngine(model, TOKENIZER)
    found: list[Group] = engine.sample(ragged_prompts(8), 4, Sampling(24), 0)
    assert engine._decoder is not None
    assert next(engine._decoder._weights.backbone.parameters()).dtype == torch.bfloat16
    assert next(model.parameters()).dtype == torch.float32
    lengths = [len(c) for group in found for c in group.completions]
    assert np.mean(lengths) > 2
    assert all(np.isfinite(c.log_probs).all() for group in found for c in group.completions)


@pytest.mark.filterwarnings("ignore:inner dimension")  # of 32 is not what its fast kernel takes
def test_adapters_on_a_base_in_4_bits_are_sampled_as_they_are_now() -> None:
    """Its modules run under autocast, whose casts no graph may keep."""
    pytest.importorskip("bitsandbytes")
    made = spec("llama", rank=4, quantisation="nf4").model_copy(update={"device": "cuda"})
    policy = load_policy(made, 0)
    engine = NativeEngine(policy.model, policy.tokenizer)
    plain = NativeEngine(policy.model, policy.tokenizer)
    plain._decoder = StaticDecoder(policy.model, tokens=policy.tokens)
    plain._decoder._captures = False
    generator = torch.Generator().manual_seed(0)
    asked = [Prompt(id=str(n), content="", tokens=(n + 2, n + 3)) for n in range(6)]
    found = []
    for seed in range(2):
        with torch.no_grad():
            for _, layer in lora_layers(policy.model):
                weight = layer.lora_B["policy"].weight
                weight.copy_(torch.randn(weight.shape, generator=generator))
        greedy = Sampling(20, temperature=0, ignore_eos=True)
        found.append(engine.sample(asked, 1, greedy, seed))
        assert_same(found[-1], plain.sample(asked, 1, greedy, seed), atol=2e-2)
    first, second = ([c.log_probs for g in groups for c in g.completions] for groups in found)
    assert not all(np.allclose(a, b, atol=0.1) for a, b in zip(first, second, strict=True))
