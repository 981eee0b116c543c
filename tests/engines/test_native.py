"""The native engine against transformers.generate, plain forwards, and itself in other company."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from keel.engines.native import NativeEngine
from keel.types import Completion, Engine, Group, KeelError, Prompt, Sampling
from tests.engines.tiny import (
    FAMILIES,
    TOKENIZER,
    assert_same,
    pairs,
    ragged_prompts,
    stock_log_probs,
    tiny,
)

EOS = 1


def engine_for(model: PreTrainedModel, **options: int) -> NativeEngine:
    """An engine with a copy of the model, so that the model keeps transformers' attention."""
    return NativeEngine(copy.deepcopy(model), TOKENIZER, **options)


def completions(groups: list[Group]) -> list[tuple[Prompt, Completion]]:
    return [(group.prompt, c) for group in groups for c in group.completions]


@contextmanager
def tokens_entering(model: PreTrainedModel) -> Iterator[list[int]]:
    """How many tokens each forward pass of the model was given."""
    counts: list[int] = []

    def count(module: object, args: tuple, kwargs: dict) -> None:
        counts.append(kwargs["input_ids"].numel())

    handle = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    handle.remove()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_greedy_equals_generate_token_for_token(family: str) -> None:
    model = tiny(family, seed=5)
    prompts = ragged_prompts(64)
    groups = engine_for(model).sample(prompts, 1, Sampling(24, temperature=0), seed=0)
    # In float64 the eager softmax of most families turns padded rows into NaN; SDPA does not.
    model.set_attn_implementation("sdpa")
    longest = max(len(prompt.tokens) for prompt in prompts)
    padded = torch.tensor([[0] * (longest - len(p.tokens)) + list(p.tokens) for p in prompts])
    generated = model.generate(
        padded,
        attention_mask=torch.tensor(
            [[0] * (longest - len(p.tokens)) + [1] * len(p.tokens) for p in prompts]
        ),
        generation_config=GenerationConfig(
            max_new_tokens=24, do_sample=False, eos_token_id=EOS, pad_token_id=0
        ),
    )[:, longest:].tolist()
    for group, row in zip(groups, generated, strict=True):
        completion = group.completions[0]
        end = row.index(EOS) + 1 if EOS in row else 24
        assert completion.tokens.tolist() == row[:end]
        assert completion.finish == ("eos" if EOS in row else "length")
        assert completion.text == TOKENIZER.decode(row[:end], skip_special_tokens=True)
        assert "<eos>" not in completion.text
    assert len({tuple(row) for row in generated}) > 24  # the prompts matter
    assert 0 < sum(EOS in row for row in generated) < 64  # some stop by themselves


def test_settings_of_sampling_reach_the_draws() -> None:
    """Log-probabilities are those of the distribution that was drawn from."""
    model = tiny("llama", dtype=torch.float32)
    for group in engine_for(model).sample(ragged_prompts(8), 3, Sampling(12, 1.3), seed=1):
        for completion in group.completions:
            expected = stock_log_probs(model, group.prompt, completion, 1.3)
            # The bound that was asked for: float32 sums in another order.
            np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5)
            assert completion.log_probs.dtype == np.float32
            assert completion.written.all()
    greedy = engine_for(model).sample(ragged_prompts(8), 1, Sampling(12, temperature=0), seed=1)
    for cut in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        groups = engine_for(model).sample(ragged_prompts(8), 1, Sampling(12, **cut), seed=1)
        for ours, theirs in pairs(groups, greedy):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert not ours.log_probs.any()  # of the only token that is left


@pytest.mark.quick("qwen2", "gpt2", "opt", "gpt_neox")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_as_it_scores(family: str) -> None:
    """Windows, soft caps and sinks hold in the store's attention too, also past the window."""
    model = tiny(family)
    groups = engine_for(model, max_num_seqs=7).sample(ragged_prompts(5), 2, Sampling(15), seed=3)
    for prompt, completion in completions(groups):
        expected = stock_log_probs(model, prompt, completion)
        # Norms and rotary embeddings work in float32 even where the weights are float64.
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5)
    assert max(len(c) for _, c in completions(groups)) > 6


@pytest.mark.quick("100")
@pytest.mark.parametrize("max_num_seqs", [5, 100])
def test_each_prompt_enters_once_and_each_token_once(max_num_seqs: int) -> None:
    """No padding, no prompt recomputed, and rows that finish are not computed any more.

    The last token of a completion never enters: nothing is drawn after it.
    """
    engine = engine_for(tiny("qwen2"), max_num_seqs=max_num_seqs)
    prompts = ragged_prompts(9)
    with tokens_entering(engine.model) as counts:
        groups = engine.sample(prompts, 4, Sampling(16), seed=0)
    lengths = [len(completion) for _, completion in completions(groups)]
    assert len(set(lengths)) > 4
    expected = sum(len(prompt.tokens) for prompt in prompts) + sum(lengths) - len(lengths)
    assert sum(counts) == expected
    if max_num_seqs == 100:
        assert len(counts) == max(lengths)


@pytest.mark.parametrize("length", [1, 4])
def test_a_stop_string_cuts_at_its_first_place(length: int) -> None:
    """Also across tokens: here each token is one character."""
    engine = engine_for(tiny("llama"))
    prompts = ragged_prompts(30)
    free = engine.sample(prompts, 2, Sampling(30), seed=2)
    longest = max((c.text for _, c in completions(free)), key=len)
    stop = longest[12 : 12 + length]
    stopped = engine.sample(prompts, 2, Sampling(30, stop=("9" * 29, stop)), seed=2)
    stops = 0
    for (_, whole), (_, cut) in zip(completions(free), completions(stopped), strict=True):
        assert cut.tokens.tolist() == whole.tokens.tolist()[: len(cut)]
        if stop in whole.text:
            stops += 1
            assert cut.finish == "stop"
            assert cut.text == whole.text[: whole.text.index(stop) + len(stop)]
        else:
            assert (len(cut), cut.finish) == (len(whole), whole.finish)
    assert stops > 0


def test_a_completion_stops_at_the_end_of_the_context() -> None:
    model = tiny("gpt2", max_position_embeddings=20)
    prompts = ragged_prompts(8, longest=19)
    groups = engine_for(model).sample(prompts, 3, Sampling(50), seed=0)
    full = 0
    for prompt, completion in completions(groups):
        total = len(prompt.tokens) + len(completion)
        assert total <= 20
        assert completion.finish == "eos" or total == 20
        full += completion.finish == "length"
    assert full > 0


@pytest.mark.parametrize(
    ("prompts", "n", "sampling", "message"),
    [
        ([Prompt("far", "", tokens=(2,) * 96)], 1, Sampling(4), "'far' has 96 tokens"),
        ([Prompt("bare", "text")], 1, Sampling(4), "'bare' has no tokens"),
        (ragged_prompts(1), 0, Sampling(4), "0 completions"),
        (ragged_prompts(1), 1, Sampling(0), "max_tokens = 0"),
        (ragged_prompts(1), 1, Sampling(4, temperature=-1), "temperature = -1"),
        (ragged_prompts(1), 1, Sampling(4, top_p=0), "top_p = 0"),
        (ragged_prompts(1), 1, Sampling(4, stop=("",)), "stop = "),
        (ragged_prompts(1), 1, Sampling(4, stop_ids=(999,)), "stop_ids holds 999"),
    ],
)
def test_bad_input_is_refused(
    prompts: list[Prompt], n: int, sampling: Sampling, message: str
) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        engine_for(tiny("llama")).sample(prompts, n, sampling, seed=0)
    assert "\n" not in str(caught.value)


def test_a_model_without_eos_is_refused() -> None:
    model = tiny("llama", eos_token_id=None)
    model.generation_config.eos_token_id = None
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    with pytest.raises(KeelError, match="no end-of-sequence token"):
        NativeEngine(model, tokenizer)


def test_weights_that_are_not_numbers_are_reported_by_prompt() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[30] = float("nan")
    prompts = [Prompt("fine", "", tokens=(5, 6)), Prompt("broken", "", tokens=(5, 30))]
    sampling = Sampling(1, temperature=0)
    with pytest.raises(KeelError, match="'broken' are not finite"):
        engine_for(model).sample(prompts, 2, sampling, seed=0)


def test_no_prompts_give_no_groups() -> None:
    engine = engine_for(tiny("llama"))
    assert isinstance(engine, Engine)
    assert engine.sample([], 4, Sampling(4), seed=0) == []


def test_the_model_is_left_as_found() -> None:
    model = tiny("llama")
    engine = NativeEngine(model, TOKENIZER)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    engine.sample(ragged_prompts(4), 2, Sampling(8), seed=0)
    assert [module.training for module in model.modules()] == modes
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.requires_grad
        assert not weight.is_inference()
    assert torch.is_grad_enabled()


def test_sync_copies_weights_that_are_not_shared() -> None:
    model, other = tiny("llama", seed=0), tiny("llama", seed=1)
    engine = engine_for(model)
    prompts, sampling = ragged_prompts(6), Sampling(10)
    first = engine.sample(prompts, 2, sampling, seed=0)
    engine.sync(dict(engine.model.state_dict()))
    assert_same(first, engine.sample(prompts, 2, sampling, seed=0), atol=0)
    engine.sync(other.state_dict())
    expected = engine_for(other).sample(prompts, 2, sampling, seed=0)
    assert_same(expected, engine.sample(prompts, 2, sampling, seed=0), atol=0)
    assert all(weight.requires_grad for weight in engine.model.parameters())
    with pytest.raises(KeelError, match="no weight 'absent'"):
        engine.sync({"absent": torch.zeros(1)})
    with pytest.raises(KeelError, match=r"has shape \(3,\)"):
        engine.sync({"model.norm.weight": torch.zeros(3)})
