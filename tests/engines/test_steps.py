"""Several steps in one call say what one at a time says, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from keel.engines import compiled, native
from keel.engines.compiled import MultiStep
from keel.engines.native import NativeEngine
from keel.models.families import head_of
from keel.models.kernels.decode import PAGE, steps_library
from keel.types import Completion, Group, KeelError, Prompt, Sampling
from tests.engines.test_compiled import model_of, prompts
from tests.engines.test_decoding import poison
from tests.engines.tiny import TOKENIZER

pytestmark = pytest.mark.skipif(steps_library() is None, reason="no compiler")

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: model_of("llama"),
    "qwen3": lambda: model_of("qwen3"),
    "a window": lambda: model_of("mistral", sliding_window=5),
    "a large epsilon": lambda: model_of("llama", rms_norm_eps=0.5),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each call did."""
    found: list[int] = []
    real = MultiStep.__call__

    def counting(self: MultiStep, *given: Any) -> Any:
        tokens, log_probs = real(self, *given)
        found.append(len(tokens))
        return tokens, log_probs

    monkeypatch.setattr(MultiStep, "__call__", counting)
    # A slow machine cuts no call short.
    monkeypatch.setattr(compiled, "SLICE", 3600.0)
    return found


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Group]]:
    """What an engine samples without them."""

    def sample(engine: NativeEngine, *asked: Any) -> list[Group]:
        with monkeypatch.context() as patched:
            patched.setattr(native, "make_multi_step", lambda *given: None)
            return engine.sample(*asked)

    return sample


def message(groups: list[Group]) -> list[tuple[list[int], list[float], str]]:
    def each(answer: Completion) -> tuple[list[int], list[float], str]:
        return answer.tokens.tolist(), answer.log_probs.tolist(), answer.finish

    return [each(answer) for group in groups for answer in group.completions]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("max_num_seqs", [256, 5])
def test_they_say_what_single_steps_say(
    make: Callable[[], PreTrainedModel],
    max_num_seqs: int,
    calls: list[int],
    one_by_one: Callable[..., list[Group]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over pages, blocks of numbers and rows that end, in memory that held NaN before."""
    poison(monkeypatch)
    engine = NativeEngine(make(), TOKENIZER, max_num_seqs=max_num_seqs)
    asked = (prompts(3, 9, 17), 4, Sampling(max_tokens=75), 0)
    ours, theirs = engine.sample(*asked), one_by_one(engine, *asked)
    assert message(ours) == message(theirs)
    assert {len(answer) for group in ours for answer in group.completions} > {75}
    assert max(calls) > 4
    if max_num_seqs == 256:  # all entered at once: a call ends where a row does, or a page
        ends = {len(a) for group in ours for a in group.completions}
        assert len(calls) <= len(ends | set(range(PAGE + 1, 76, PAGE)))


SAMPLINGS = {
    "greedy": Sampling(max_tokens=20, temperature=0.0),
    "truncated": Sampling(max_tokens=40, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
    "one token": Sampling(max_tokens=1),
    "stop ids": Sampling(max_tokens=60, stop_ids=(5, 11)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_any_sampling(
    name: str,
    calls: list[int],
    one_by_one: Callable[..., list[Group]],
) -> None:
    sampling, dtype = SAMPLINGS[name], torch.bfloat16 if name == "truncated" else None
    engine = NativeEngine(model_of("llama"), TOKENIZER, dtype=dtype)
    asked = (prompts(4, 7), 3, sampling, 2)
    assert message(engine.sample(*asked)) == message(one_by_one(engine, *asked))
    assert len(calls) == 0 if sampling.max_tokens == 1 else max(calls) > 1


def test_they_end_at_the_context(calls: list[int], one_by_one: Callable[..., list[Group]]) -> None:
    """Prompts of unlike length have budgets of their own."""
    model = model_of("llama", max_position_embeddings=64, eos_token_id=1)
    engine = NativeEngine(model, TOKENIZER)
    asked = (prompts(3, 40, 63), 3, Sampling(max_tokens=200), 1)
    ours = engine.sample(*asked)
    assert message(ours) == message(one_by_one(engine, *asked))
    assert "length" in {answer.finish for group in ours for answer in group.completions}
    assert max(calls) > 1


def test_no_row_takes_a_page_long_before_its_use(calls: list[int]) -> None:
    engine = NativeEngine(model_of("llama"), TOKENIZER, max_num_seqs=1)
    (group,) = engine.sample(prompts(4), 12, Sampling(max_tokens=75), 0)
    assert max(len(answer) for answer in group.completions) > 1 + 2 * PAGE
    assert max(calls) == PAGE


@pytest.mark.parametrize(
    ("change", "stop"), [({"scale": 0.5}, ()), ({"softcap": 2.0}, ()), ({}, ("a b",))]
)
def test_what_compiled_code_lacks_goes_step_by_step(
    change: dict[str, Any],
    stop: tuple[str, ...],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scale or a soft cap of the head, and stop strings."""
    monkeypatch.setattr(native, "head_of", lambda model: replace(head_of(model), **change))
    engine = NativeEngine(model_of("llama"), TOKENIZER)
    engine.sample(prompts(4), 2, Sampling(max_tokens=9, stop=stop), 0)
    assert not calls


def test_a_call_ends_when_its_time_is_over(
    calls: list[int], one_by_one: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "SLICE", 0.0)
    engine = NativeEngine(model_of("llama"), TOKENIZER)
    asked = (prompts(4, 7), 3, Sampling(max_tokens=30), 0)
    assert message(engine.sample(*asked)) == message(one_by_one(engine, *asked))
    assert set(calls) == {1}


def test_weights_that_break_are_reported(calls: list[int]) -> None:
    """Broken at a token that no prompt holds: the steps meet it, not the prompts."""
    model = model_of("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[:2] = float("nan")
        model.get_input_embeddings().weight[40:] = float("nan")
    engine = NativeEngine(model, TOKENIZER)
    asked = [Prompt("p", "x", tokens=tuple(range(2, 12)))]
    with pytest.raises(KeelError, match="prompt 'p' are not finite"):
        engine.sample(asked, 8, Sampling(max_tokens=60), 0)
    assert calls


def test_tokens_are_those_of_their_steps(calls: list[int]) -> None:
    """A later call must not change what an earlier one gave."""
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    counting = MultiStep.__call__

    def keeping(self: MultiStep, *given: Any) -> Any:
        tokens, log_probs = counting(self, *given)
        kept.append((tokens, tokens.copy()))
        return tokens, log_probs

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MultiStep, "__call__", keeping)
        NativeEngine(model_of("llama"), TOKENIZER).sample(
            prompts(4, 7), 3, Sampling(max_tokens=50), 0
        )
    assert len(kept) > 2
    assert all((now == then).all() for now, then in kept)


def test_embeddings_that_lie_otherwise(
    calls: list[int], one_by_one: Callable[..., list[Group]]
) -> None:
    model = model_of("llama", tie_word_embeddings=False)
    embedding = model.get_input_embeddings()
    embedding.weight.data = embedding.weight.data.t().contiguous().t()
    engine = NativeEngine(model, TOKENIZER)
    asked = (prompts(4), 3, Sampling(max_tokens=9), 0)
    assert message(engine.sample(*asked)) == message(one_by_one(engine, *asked))
    assert not calls


def test_a_token_without_an_embedding_is_not_fed(calls: list[int]) -> None:
    """Read by compiled code it would be whatever lies after the embeddings."""
    model = model_of("llama", tie_word_embeddings=False)
    words = model.config.vocab_size
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 20 * words, bias=False)
    model.config.vocab_size = 20 * words
    engine = NativeEngine(model, TOKENIZER)
    engine.tokens = 20 * words  # as if the tokenizer had them
    with pytest.raises(IndexError):
        engine.sample(prompts(4), 8, Sampling(max_tokens=30), 0)
    assert not calls
