"""The quick backbone says what the model's own modules say, one step or several in a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.config.model import Lora
from keel.engines import compiled, native
from keel.engines.compiled import MultiStep
from keel.engines.model_runner import DecodeRows, Prefill
from keel.engines.native import NativeEngine
from keel.models.attention import install
from keel.models.families import head_of, states_at
from keel.models.kernels.decode import PAGE, steps_library
from keel.models.lora import (
    add_lora,
    freeze_reference,
    lora_layers,
    reference_adapter,
)
from keel.models.packed import Packed
from keel.types import Completion, Group, KeelError, Prompt, Sampling
from tests.engines.test_decoding import poison
from tests.engines.tiny import TOKENIZER, agree, tiny

pytestmark = pytest.mark.skipif(steps_library() is None, reason="no compiler")
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
    engine = NativeEngine(model, TOKENIZER, max_num_seqs=6)
    quick = engine.sample(prompts(3, 9, 5), 4, Sampling(max_tokens=24), 0)
    monkeypatch.setattr(compiled, "library", lambda dtype: None)
    own = engine.sample(prompts(3, 9, 5), 4, Sampling(max_tokens=24), 0)
    agree(quick, own, rounding=2e-5)


def test_what_is_built_otherwise_goes_through_its_own_modules() -> None:
    other = model_of("llama")
    other.config.hidden_act = "gelu"
    moving = model_of("llama", **rotary("dynamic"))

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    doubled, uneven = model_of("llama"), model_of("llama")
    doubled.base_model.layers[1].mlp.up_proj.__class__ = Twice
    uneven.base_model.layers[1].self_attn.k_proj.out_features = 8
    unlike = (tiny("llama").double(), model_of("gemma2"), other, moving, doubled, uneven)
    for model in unlike:
        if model.config._attn_implementation != "keel":
            install(model)
        assert compiled.compiled(model, 64) is None


LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "a vector's width and less": (
        "llama",
        {"hidden_size": 20, "num_attention_heads": 2, "intermediate_size": 7},
    ),
    "one head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "one key head": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 36},
    ),
    "heads of 32": ("llama", {"hidden_size": 64, "num_attention_heads": 2}),
    "biases everywhere": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "intermediate_size": 100},
    ),
    "a window over pages": ("mistral", {"head_dim": 32, "sliding_window": 5}),
    "a large epsilon": ("llama", {"rms_norm_eps": 0.5}),
    "a large epsilon of heads": ("qwen3", {"rms_norm_eps": 0.5}),
}


@pytest.mark.parametrize(("family", "size"), LIKE.values(), ids=LIKE)
def test_token_by_token_in_any_size(
    family: str, size: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pages and windows, and panels that are not filled, in memory that held NaN before."""
    poison(monkeypatch)
    compare(model_of(family, **size))


def test_large_scores() -> None:
    """Scores beyond 88, where e^x is not a float32."""
    model = model_of("llama")
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.self_attn.q_proj.weight.mul_(60.0)
    compare(model, 20.0)


def compare(model: PreTrainedModel, rounding: float = 1.0) -> None:
    """`rounding`: how much larger than usual scores round."""
    tokens = torch.tensor(prompts(60)[0].tokens)
    found = compiled.compiled(model, 100)
    assert found is not None
    stepped = states_of(found, tokens, 17)
    given = Packed(tokens, (len(tokens),), torch.arange(1, len(tokens)), ())
    with torch.no_grad():
        whole = states_at(model, given, torch.arange(len(tokens)))
    torch.testing.assert_close(stepped, whole[16:], rtol=1e-5, atol=2e-5 * rounding)


def states_of(found: compiled.CompiledRunner, tokens: Tensor, prompt: int) -> Tensor:
    """A prompt at once, then token by token."""
    none = Prefill(np.zeros(0, dtype=np.int64), 0)
    enters = Prefill(np.array([prompt]), 0)
    found.admit(enters, 1)
    states = [found(tokens[:prompt], torch.arange(prompt), enters, None)[-1:]]
    for place, token in enumerate(tokens[prompt:]):
        found.reserve(np.array([place + 1]), 1)
        live = DecodeRows(np.array([0]), np.array([place]), np.array([prompt]), torch.device("cpu"))
        states.append(found(token[None], torch.tensor([prompt + place]), none, live))
    return torch.cat(states)


@pytest.mark.quick("mistral-dtype1")
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("mistral", torch.float32)]
)
def test_other_rows_and_threads_change_no_bit(family: str, dtype: torch.dtype) -> None:
    """Ten rows of three prompts in one step, against each in a step of its own."""
    # Heads of 32 and 8, whose code differs.
    model = model_of(family, hidden_size=64, num_attention_heads=2 if family == "llama" else 4)
    lengths, slots, ends = np.array([20, 3, 33]), np.arange(10) % 3, np.arange(10) * 5 % 37
    tokens = torch.randint(2, 40, (56,), generator=torch.Generator().manual_seed(0))

    def stepped(rows: list[int], threads: int) -> Tensor:
        """The rows' states, after answers of as many tokens as `ends` says."""
        torch.set_num_threads(threads)
        found = compiled.compiled(model, 100, dtype)
        assert found is not None
        enters, none = Prefill(lengths, 0), Prefill(lengths[:0], 0)
        found.admit(enters, 3)
        found(tokens, torch.from_numpy(enters.places()[1]), enters, None)
        out = None
        for place in range(37):
            end = np.minimum(ends[rows], place)
            found.reserve(end + 1, len(rows))
            live = DecodeRows(slots[rows], end, lengths, torch.device("cpu"))
            ids = torch.from_numpy((end * 7 + rows) % 40)
            out = found(ids, torch.from_numpy(lengths[slots[rows]] + end), none, live)
        assert out is not None
        return out

    before = torch.get_num_threads()
    try:
        together = stepped(list(range(10)), 1)
        assert torch.equal(together, stepped(list(range(10)), 3))
        for row in (0, 4, 9):
            assert torch.equal(together[row], stepped([row], 2)[0])
    finally:
        torch.set_num_threads(before)


def test_other_prompts_change_no_bit_of_a_completion() -> None:
    model, asked = model_of("qwen2"), prompts(3, 17, 40, 25)
    sampling = Sampling(max_tokens=24)

    def drawn(some: list[Prompt], **settings: int) -> dict[str, list[tuple[bytes, bytes]]]:
        groups = NativeEngine(model, TOKENIZER, **settings).sample(some, 4, sampling, 7)
        return {
            group.prompt.id: [
                (c.tokens.tobytes(), c.log_probs.tobytes()) for c in group.completions
            ]
            for group in groups
        }

    whole = drawn(asked)
    assert drawn(asked, max_num_seqs=3, prefill_tokens=20) == whole
    for one in asked:
        assert drawn([one]) == {one.id: whole[one.id]}


@pytest.mark.parametrize("inside", ["", "embed_tokens", "layers.1", "layers.0.self_attn.q_proj"])
def test_who_listens_to_a_module_hears_what_is_sampled(inside: str) -> None:
    model = model_of("llama")
    handle = model.base_model.get_submodule(inside).register_forward_hook(lambda *_: None)
    assert compiled.compiled(model, 64) is None
    handle.remove()
    assert compiled.compiled(model, 64) is not None
    module = model.base_model.layers[0].mlp
    module.forward = lambda x: 0 * x
    assert compiled.compiled(model, 64) is None


def test_the_adapter_that_speaks_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2")
    base = scores(model)
    add_lora(model, Lora(rank=2, targets=("q_proj", "o_proj", "up_proj", "down_proj")), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.lora_B["policy"].weight.normal_(std=0.1, generator=generator)
    with reference_adapter(model):  # there is no second one yet
        assert torch.equal(scores(model), base)
    freeze_reference(model)
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.lora_B["policy"].weight.mul_(-1)
    assert compiled.compiled(model, 64) is not None
    quick = scores(model)
    with reference_adapter(model):
        frozen = scores(model)
    monkeypatch.setattr(compiled, "library", lambda dtype: None)
    torch.testing.assert_close(quick, scores(model), rtol=0, atol=5e-5)
    with reference_adapter(model):
        torch.testing.assert_close(frozen, scores(model), rtol=0, atol=5e-5)
    assert (quick - frozen).abs().max() > 0.01


def scores(model: PreTrainedModel) -> Tensor:
    """Log-probabilities of the likeliest first token after each of some prompts."""
    groups = NativeEngine(model, TOKENIZER).sample(
        prompts(3, 8, 20, 5), 1, Sampling(max_tokens=1, temperature=0), 0
    )
    return torch.tensor([float(g.completions[0].log_probs[0]) for g in groups])


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", None), ("llama", torch.bfloat16)])
def test_weights_are_those_of_the_moment(family: str, dtype: torch.dtype | None) -> None:
    model = model_of(family)
    engine = NativeEngine(model, TOKENIZER, dtype=dtype)
    before = engine.sample(prompts(4), 2, Sampling(max_tokens=5, temperature=0), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    after = engine.sample(prompts(4), 2, Sampling(max_tokens=5, temperature=0), 0)
    assert before[0].completions[0].tokens.tolist() != after[0].completions[0].tokens.tolist()


# ---------------------------------------------------------------- several steps in one call


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
