"""Decoding over static buffers, uncaptured on a CPU, against the engine's other runners."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from keel.config.model import Lora
from keel.engines import native, page_layouts
from keel.engines.native import NativeEngine
from keel.engines.sampler import GOING
from keel.engines.scheduler import Pages
from keel.engines.static import BUCKETS, NoHostReads, Record, StaticDecoder, bucket_of
from keel.models import attention
from keel.models.attention import Rules
from keel.models.lora import add_lora, lora_layers
from keel.models.policy import token_count
from keel.types import Group, KeelError, Prompt, Sampling
from tests.engines import scripted
from tests.engines.test_compiled import prompts
from tests.engines.test_conversation import SHORT, Forgetful, Host, wide
from tests.engines.tiny import (
    FAMILIES,
    TOKENIZER,
    assert_same,
    pairs,
    ragged_prompts,
    stock_log_probs,
    tiny,
)
from tests.models.test_attention import by_hand

ROUNDING = 1e-5
"""float32 log-probabilities, whose sums are in another order: what was asked for."""
LAST_PLACES = Sampling(30, stop_ids=(9, 10, 11))


def static(model: PreTrainedModel, rows: int = 256, **options: Any) -> NativeEngine:
    decoder = StaticDecoder(model, tokens=token_count(TOKENIZER), **options)
    return NativeEngine(model, TOKENIZER, max_num_seqs=rows, decoder=decoder)


def decoder_of(engine: NativeEngine) -> StaticDecoder:
    assert engine._decoder is not None
    return engine._decoder


def by_modules(model: PreTrainedModel) -> NativeEngine:
    return NativeEngine(model, TOKENIZER)


@pytest.fixture
def no_compiled_code() -> Iterator[None]:
    """The other engine runs the model's modules."""
    with patch.object(native, "compiled", lambda *_: None):
        yield


@pytest.mark.quick("llama", "gemma2", "opt")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("no_compiled_code")
def test_every_family_samples_as_by_its_modules(family: str) -> None:
    """Greedy and sampled tokens are the same, ragged groups among few rows too."""
    model = tiny(family, dtype=torch.float32)
    other = by_modules(copy.deepcopy(model))
    engine = static(model, rows=7, steps=4)
    for sampling in (
        Sampling(24, temperature=0),
        Sampling(24),
        Sampling(24, 1.3, top_k=20, top_p=0.9, min_p=0.01),
    ):
        wanted = other.sample(ragged_prompts(9), 3, sampling, 0)
        assert_same(engine.sample(ragged_prompts(9), 3, sampling, 0), wanted, atol=ROUNDING)
    assert len({len(c) for group in wanted for c in group.completions}) > 3
    assert decoder_of(engine).allocator.used == 0


@pytest.mark.quick("1-2", "2-3", "3-5", "9-16", "40-1")
@pytest.mark.parametrize(
    ("rows", "steps"),
    [(1, 2), (1, 5), (2, 3), (2, 16), (3, 1), (3, 5), (9, 2), (9, 16), (40, 1), (40, 3), (40, 16)],
)
def test_steps_between_reads_and_rows_change_nothing(rows: int, steps: int) -> None:
    """All buckets to 64; budgets end within, at and after a read."""
    model = tiny("llama", dtype=torch.float32)
    asked = ragged_prompts(10)
    wanted = by_modules(copy.deepcopy(model)).sample(asked, 4, LAST_PLACES, 1)
    engine = static(model, rows=rows, steps=steps)
    assert_same(engine.sample(asked, 4, LAST_PLACES, 1), wanted, atol=ROUNDING)
    ends = Counter(c.finish for group in wanted for c in group.completions)
    assert set(ends) == {"eos", "stop", "length"}


@pytest.mark.quick("150")
@pytest.mark.parametrize("rows", [60, 100, 150, 250, 300, 400, 600])
def test_large_buckets_change_nothing(rows: int) -> None:
    model = tiny("qwen2", dtype=torch.float32)
    asked = ragged_prompts(10)
    n = rows // 10 + 1
    wanted = by_modules(copy.deepcopy(model)).sample(asked, n, Sampling(12), 6)
    assert_same(static(model, rows=rows).sample(asked, n, Sampling(12), 6), wanted, atol=ROUNDING)


@pytest.mark.quick("None-1", "None-63", "None-64", "None-65", "None-130", "12-65")
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 130])
@pytest.mark.parametrize("most_pages", [None, 12])
def test_prompts_at_the_edges_of_pages(length: int, most_pages: int | None) -> None:
    """Full pages are shared, the last one copied; with few pages sequences are put back."""
    model = wide("qwen2")
    asked = prompts(length, length, 7)
    sampling = Sampling(90, ignore_eos=True)
    wanted = by_modules(copy.deepcopy(model)).sample(asked, 5, sampling, 2)
    engine = static(model, steps=7, most_pages=most_pages)
    shared: set[int] = set()
    real = Pages.keep

    def keep(own: Pages, pages: list[int]) -> None:
        shared.add(len(pages))
        real(own, pages)

    with patch.object(Pages, "keep", keep):
        found = engine.sample(asked, 5, sampling, 2)
    assert_same(found, wanted, atol=ROUNDING)
    assert shared == {0, length // 64}
    assert decoder_of(engine).allocator.used == 0


@pytest.mark.quick("14")
@pytest.mark.parametrize("most_pages", [9, 14, 19, 25])
def test_sequences_without_pages_are_put_back(most_pages: int) -> None:
    """They go on from what they had made: each token is drawn by its own number, once."""
    model = wide("llama")
    asked = prompts(100, 20, 70, 64, 3, 90)
    sampling = Sampling(120, ignore_eos=True)
    wanted = by_modules(copy.deepcopy(model)).sample(asked, 3, sampling, 3)
    engine = static(model, rows=12, steps=16, most_pages=most_pages)
    put_back = []
    real = native.PagedRun._put_back

    def counted(run: Any) -> None:
        put_back.append(run._rows[-1].sequence)
        real(run)

    with patch.object(native.PagedRun, "_put_back", counted):
        found = engine.sample(asked, 3, sampling, 3)
    assert_same(found, wanted, atol=ROUNDING)
    assert decoder_of(engine).allocator.count == most_pages
    assert put_back or most_pages > 20
    assert decoder_of(engine).allocator.used == 0


def test_long_prompts_enter_in_parts() -> None:
    model = wide("mistral", sliding_window=37)
    asked = prompts(150, 33, 129, 40, 80)
    wanted = by_modules(copy.deepcopy(model)).sample(asked, 2, Sampling(20), 4)
    engine = static(model)
    engine.prefill_tokens = 40
    entered: list[int] = []
    handle = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: entered.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    assert_same(engine.sample(asked, 2, Sampling(20), 4), wanted, atol=ROUNDING)
    handle.remove()
    assert max(entered) == 40


def loop_for_flash(query, key, value, cu_q, cu_k, *rest, **keys):
    """What the kernel computes, segment by segment."""
    window = keys["window_size_left"]
    rule = Rules(keys["scale"], None if window == -1 else window + 1)
    assert rest[:2] == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    parts = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        before = query.new_zeros(d - c - (b - a), *query.shape[1:])
        asks = torch.cat([before, query[a:b]])
        heads = (x.transpose(0, 1) for x in (asks, key[c:d], value[c:d]))
        parts.append(by_hand(*heads, rule)[a - b :])
    return torch.cat(parts).to(query), None


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_continued_tokens_attend_by_one_flash_call(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed: a loop stands where the kernel would."""
    model = wide(family, **({"sliding_window": 37} if family == "mistral" else {}))
    asked = prompts(150, 33, 129)
    engine = static(model)
    wanted = talk(engine, asked, 3)
    calls: list[int] = []

    def counted(*given: Any, **keys: Any) -> Any:
        calls.append(len(given[0]))
        return loop_for_flash(*given, **keys)

    monkeypatch.setattr(attention, "_FLASH", counted)
    monkeypatch.setattr(page_layouts, "flash_applies", lambda *_: True)
    engine.prefill_tokens = 40
    assert_same(talk(engine, asked, 3), wanted, atol=ROUNDING)
    assert len(calls) > 6


def test_steps_write_only_where_their_rows_go_on() -> None:
    """A row that ended, or has no budget left, writes to page 0; nothing beyond has a page."""
    engine = static(wide("llama"), rows=5)
    real = StaticDecoder.decode
    final = 62  # the place of the token before the last of the budget: 40 + 24 - 2
    ended: list[int] = []

    def decode(own: StaticDecoder, steps: int, **given: Any) -> Record:
        pools = [pool for pair in own._pools for pool in pair]
        before = [pool.clone() for pool in pools]
        assert own._ends is not None
        tokens = own.buffers.token[: len(given["position"])].clone()[None]
        record = real(own, steps, **given)
        tokens = torch.cat([tokens, torch.from_numpy(record.read()[0])])
        allowed = torch.zeros(own.allocator.count, 64, dtype=torch.bool)
        allowed[0] = True
        for row, (place, pages) in enumerate(zip(given["position"], given["pages"], strict=True)):
            assert np.count_nonzero(pages) <= final // 64 + 1
            over = (own._ends[tokens[:, row]] != GOING).tolist()
            count = over.index(True) if True in over else steps
            ended.append(count)
            for at in range(place, min(place + count, final + 1)):
                allowed[pages[at // 64], at % 64] = True
        for old, new in zip(before, pools, strict=True):
            same = (old == new).all(-1).all(1)
            assert (same | allowed).all()
        return record

    with patch.object(StaticDecoder, "decode", decode):
        engine.sample(prompts(40, 40, 40, 40), 3, Sampling(24, stop_ids=(2, 3)), 0)
    assert {0, 16} < set(ended)


@pytest.mark.parametrize("stop", [("3",), ("ab", "9"), ("7",)])
def test_stop_strings_end_rows_and_drop_what_follows(stop: tuple[str, ...]) -> None:
    model = tiny("llama", dtype=torch.float32)
    asked = ragged_prompts(12)
    sampling = Sampling(40, stop=stop)
    wanted = by_modules(copy.deepcopy(model)).sample(asked, 3, sampling, 5)
    found = static(model, rows=8, steps=6).sample(asked, 3, sampling, 5)
    assert_same(found, wanted, atol=ROUNDING)
    assert any(c.finish == "stop" for group in wanted for c in group.completions)


WORDS = Sampling(max_tokens=170, stop_ids=tuple(range(2, 9)))


def talk(engine: Any, asked: list[Prompt], turns: int) -> list[Group]:
    return scripted.talk(engine, asked, 2, WORDS, Host(), turns, tokenizer=TOKENIZER)


@pytest.mark.quick("3-None", "3-11")
@pytest.mark.parametrize("most_pages", [None, 11, 14])
@pytest.mark.parametrize("turns", [2, 3])
def test_conversations_continue_their_pages(turns: int, most_pages: int | None) -> None:
    """Each token is fed once if there are pages to keep; results never depend on it."""
    model = wide("qwen3")
    asked = prompts(15, 63, 64, 65, 33, 1)
    wanted = talk(by_modules(copy.deepcopy(model)), asked, turns)
    engine = static(model, steps=5, most_pages=most_pages)
    fed: list[int] = []
    real = StaticDecoder.enter

    def enter(own: StaticDecoder, tokens: Any, *rest: Any) -> Any:
        fed.append(len(tokens))
        return real(own, tokens, *rest)

    with patch.object(StaticDecoder, "enter", enter):
        found = talk(engine, asked, turns)
    assert_same(found, wanted, atol=ROUNDING)
    assert decoder_of(engine).allocator.used == 0
    with patch.object(StaticDecoder, "enter", enter):
        kept, fed[:] = sum(fed), []
        assert_same(talk(Forgetful(engine), asked, turns), wanted, atol=ROUNDING)
    if most_pages is None:
        assert kept < sum(fed) / 1.3
    assert any(SHORT in turn["content"] for g in wanted for c in g.completions for turn in c.turns)


def test_adapters_are_merged_and_weights_follow_the_model() -> None:
    """In a copy of another type; it takes over what changed between two calls."""
    model = tiny("qwen2", dtype=torch.float32)
    add_lora(model, Lora(rank=2, targets=("q_proj", "down_proj")), 0)
    generator = torch.Generator().manual_seed(0)
    engine = static(model, dtype=torch.float64)
    others = by_modules(model)
    for seed in range(2):
        with torch.no_grad():
            for _, layer in lora_layers(model):
                layer.lora_B["policy"].weight.normal_(std=0.1, generator=generator)
        wanted = others.sample(ragged_prompts(5), 2, Sampling(20), seed)
        assert_same(engine.sample(ragged_prompts(5), 2, Sampling(20), seed), wanted, atol=ROUNDING)
    copied = dict(decoder_of(engine)._weights.backbone.named_parameters())
    assert {p.dtype for p in copied.values()} == {torch.float64}
    assert not any("lora" in name for name in copied)


def test_bfloat16_weights_stay_close_to_the_model() -> None:
    model = tiny("llama", dtype=torch.float32)
    found = static(copy.deepcopy(model), dtype=torch.bfloat16).sample(
        ragged_prompts(8), 3, Sampling(20), 0
    )
    gaps = [
        np.abs(c.log_probs - stock_log_probs(model, group.prompt, c, 1.0)).mean()
        for group in found
        for c in group.completions
    ]
    # 8 bits of weights that are enlarged on purpose; a wrong page is off by whole nats.
    assert 1e-4 < np.mean(gaps) < 0.1


def test_the_host_reads_once_for_some_tokens() -> None:
    """Tokens and log-probabilities of 16 steps in one read, and one for each entry."""
    model = tiny("llama", dtype=torch.float32)
    engine = static(model, steps=16)
    asked, sampling = ragged_prompts(6), Sampling(64, ignore_eos=True)
    engine.sample(asked, 2, sampling, 0)  # makes buffers
    reads: Counter[str] = Counter()
    real = Record.read
    inside = False

    def read(own: Record) -> Any:
        nonlocal inside
        reads["record"] += 1
        inside = True
        try:
            return real(own)
        finally:
            inside = False

    def watched(name: str) -> Any:
        function = getattr(torch.Tensor, name)

        def call(own: torch.Tensor, *given: Any, **named: Any) -> Any:
            if not inside:
                reads[name] += 1
            return function(own, *given, **named)

        return call

    names = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")
    patches = [patch.object(torch.Tensor, name, watched(name)) for name in names]
    patches.append(patch.object(Record, "read", read))
    for one in patches:
        one.start()
    try:
        engine.sample(asked, 2, sampling, 0)
    finally:
        for one in patches:
            one.stop()
    assert reads == {"record": 1 + 4}  # the first tokens, and 63 more


def test_a_failed_call_frees_its_pages() -> None:
    model = tiny("llama", dtype=torch.float32)
    engine = static(model)
    wanted = engine.sample(ragged_prompts(5), 2, Sampling(20), 0)
    with (
        patch.object(Record, "read", side_effect=OSError("gone")),
        pytest.raises(OSError, match="gone"),
    ):
        engine.sample(ragged_prompts(5), 2, Sampling(20), 0)
    assert decoder_of(engine).allocator.used == 0
    assert_same(engine.sample(ragged_prompts(5), 2, Sampling(20), 0), wanted, atol=0)


def test_conversations_share_the_decoder_of_their_engine() -> None:
    """Graphs and pages are made once, also if the first call is one of several turns."""
    model = wide("llama")
    engine = NativeEngine(model, TOKENIZER)
    with (
        patch.object(native, "decodes_statically", lambda _: True),
        patch.object(
            StaticDecoder, "begin", autospec=True, side_effect=StaticDecoder.begin
        ) as made,
    ):
        for _ in range(2):
            talk(engine, prompts(5, 9), 2)
    assert len({id(call.args[0]) for call in made.call_args_list}) == 1


def continued(groups: list[Group]) -> list[Prompt]:
    """Each prompt with its answer, and a token more."""
    return [
        replace(prompt, tokens=(*prompt.tokens, *map(int, group.completions[0].tokens), 5))
        for group in groups
        for prompt in [group.prompt]
    ]


def test_pools_grow_around_the_pages_of_a_conversation() -> None:
    model = wide("llama")
    engine, other = static(model), by_modules(copy.deepcopy(model))
    with engine.conversation() as talking:
        first = talking.sample(prompts(70, 80), 1, replace(WORDS, max_tokens=30), 0)
        pages = decoder_of(engine).allocator
        kept, count = pages.used, pages.count
        again = continued(first)
        found = talking.sample(again, 4, Sampling(90), 2)
        assert kept == 4
        assert pages.count > count
    assert_same(found, other.sample(again, 4, Sampling(90), 2), atol=ROUNDING)


def test_pages_of_a_conversation_outlive_no_failed_call() -> None:
    """Its next turn is computed from its prompt again, and a refused setting frees nothing."""
    model = wide("llama")
    engine, other = static(model), by_modules(copy.deepcopy(model))
    asked, sampling = prompts(70, 80), Sampling(20, ignore_eos=True)
    with engine.conversation() as talking:
        first = talking.sample(asked, 1, WORDS, 0)
        # Else no pages are kept.
        assert all(group.completions[0].finish != "length" for group in first)
        with pytest.raises(KeelError, match="max_tokens"):
            engine.sample(asked, 1, Sampling(0), 0)
        with (
            patch.object(Record, "read", side_effect=OSError("gone")),
            pytest.raises(OSError, match="gone"),
        ):
            engine.sample(asked, 1, sampling, 0)
        engine.sample(prompts(90, 100, 66), 2, sampling, 1)
        again = continued(first)
        found = talking.sample(again, 1, sampling, 2)
    assert_same(found, other.sample(again, 1, sampling, 2), atol=ROUNDING)


@pytest.mark.parametrize(("family", "reads"), [("llama", False), ("qwen3_moe", True)])
def test_a_step_that_reads_on_the_host_is_recognised(family: str, reads: bool) -> None:
    """Before it is captured: eager experts look up which tokens they have."""
    engine = static(tiny(family, dtype=torch.float32))
    engine.sample(ragged_prompts(3), 1, Sampling(4), 0)
    refused = pytest.raises(RuntimeError, match="waits") if reads else nullcontext()
    with torch.no_grad(), NoHostReads(), refused:
        decoder_of(engine)._warm(2)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.item(),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_operators_that_wait_are_recognised(step: Any) -> None:
    with NoHostReads(), pytest.raises(RuntimeError, match="waits"):
        step(torch.ones(1))


def test_no_token_beyond_the_tokenizer_is_sampled() -> None:
    model = tiny("llama", dtype=torch.float32)
    engine = NativeEngine(model, TOKENIZER, decoder=StaticDecoder(model, tokens=20))
    found = engine.sample(ragged_prompts(5), 4, Sampling(10, ignore_eos=True), 0)
    assert max(c.tokens.max() for group in found for c in group.completions) == 19


@pytest.mark.parametrize("budget", [1, 2])
def test_short_budgets_are_used_up(budget: int) -> None:
    engine = static(tiny("llama", dtype=torch.float32), rows=3)
    found = engine.sample(ragged_prompts(4), 2, Sampling(budget, ignore_eos=True), 0)
    assert {len(c) for group in found for c in group.completions} == {budget}


def test_pages_are_free_after_their_last_user() -> None:
    pages = Pages(6)
    taken = pages.take(3)
    assert 0 not in taken
    pages.keep(taken[:2])
    pages.give(taken)
    assert (pages.free, pages.used) == (3, 2)
    pages.grow(8)
    pages.give(taken[:2])
    assert sorted(pages.take(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert pages.free == 0


def test_buckets_hold_their_rows() -> None:
    for rows in range(1, 3000):
        size = bucket_of(rows)
        assert size >= rows
        assert size in BUCKETS or size % 256 == 0


def test_lengths_of_prompts_grow_between_calls() -> None:
    """Pages and buffers are made larger, and results stay."""
    model = wide("llama")
    engine, other = static(model), by_modules(copy.deepcopy(model))
    for length in (5, 70, 140, 9):
        asked = prompts(length, 3)
        wanted = other.sample(asked, length % 7 + 1, Sampling(20), 0)
        found = engine.sample(asked, length % 7 + 1, Sampling(20), 0)
        assert_same(found, wanted, atol=ROUNDING)
        for ours, theirs in pairs(found, wanted):
            assert ours.finish == theirs.finish
