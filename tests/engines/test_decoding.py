"""A step of the engine against each row's own sequence, written out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.engines.model_runner import DecodeRows, KVStore, StepLayout
from keel.engines.native import NativeEngine
from keel.models.attention import PackedLayout, Rules
from keel.types import Prompt, Sampling
from tests.engines.tiny import TOKENIZER, assert_same, tiny
from tests.models.test_attention import HEADS, KV_HEADS, RULES, WIDTH, by_hand

CPU = torch.device("cpu")
RULE = Rules(scaling=0.3)
STEPS = {
    "one prompt": ([5], [0, 0, 0], [2, 2, 2]),
    "alike": ([4, 4], [0, 0, 1, 1], [3, 3, 3, 3]),
    "ragged": ([6, 1, 3], [2, 0, 0, 1, 0], [0, 4, 1, 2, 4]),
    "one answer alone": ([2, 7], [1, 0, 1, 1], [1, 1, 1, 1]),
}


def heads(count: int, tokens: int, generator: torch.Generator) -> Tensor:
    return torch.randn(1, count, tokens, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_rows_see_their_prompt_and_their_own(
    step: tuple[list[int], list[int], list[int]],
    rules: dict,
) -> None:
    lengths, slots, ends = step
    rule, generator = Rules(scaling=0.3, **rules), torch.Generator().manual_seed(0)
    store = SimpleNamespace(prompts=KVStore(max(lengths)), answers=KVStore(9))
    store.prompts.reserve(len(lengths), max(lengths), 0)
    store.answers.reserve(len(slots), 9, 0)
    first = [heads(KV_HEADS, sum(lengths), generator) for _ in range(2)]
    own = [heads(KV_HEADS, len(slots) * 9, generator) for _ in range(2)]
    own = [x.reshape(KV_HEADS, len(slots), 9, WIDTH) for x in own]
    entry = torch.tensor(np.repeat(np.arange(len(lengths)), lengths))
    place = torch.cat([torch.arange(n) for n in lengths])
    store.prompts.write(0, (entry, place), *(x[0].transpose(0, 1) for x in first))
    # Each own token came in a step of its own; the last comes with prompts that enter.
    for at in range(max(ends)):
        rows = torch.tensor([r for r, end in enumerate(ends) if at < end])
        places = (rows, torch.full_like(rows, at))
        store.answers.write(0, places, *(x[:, rows, at].transpose(0, 1) for x in own))
    live = DecodeRows(np.array(slots), np.array(ends), np.array(lengths), CPU)
    entering, late = PackedLayout([3, 2]), [heads(KV_HEADS, 5, generator) for _ in range(2)]
    store.prompts.reserve(len(lengths) + 2, 3, len(lengths))
    extra = torch.tensor([0, 0, 0, 1, 1]) + len(lengths)
    layout = StepLayout(
        (store.prompts, store.answers), entering, (extra, torch.tensor([0, 1, 2, 0, 1])), live
    )
    query = heads(HEADS, 5 + len(slots), generator)
    new = [
        torch.cat([a[0], torch.stack([x[:, r, end] for r, end in enumerate(ends)], dim=1)], dim=1)
        for a, x in zip(late, own, strict=True)
    ]
    out = layout.attend(0, query, *(x[None] for x in new), rule)[0]
    starts = np.cumsum([0, *lengths])
    for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        span = slice(starts[slot], starts[slot + 1])
        keys, values = (
            torch.cat([a[0, :, span], x[:, row, : end + 1]], dim=1)
            for a, x in zip(first, own, strict=True)
        )
        # The query is the last of its sequence; what earlier ones would be does not matter.
        asks = query[0, :, 5 + row].unsqueeze(1).expand(-1, keys.shape[1], -1)
        expected = by_hand(asks, keys, values, rule)[-1]
        # float64 sums in another order.
        torch.testing.assert_close(out[5 + row], expected, rtol=0, atol=1e-12)
    prompts = entering.attend(0, query[:, :, :5], *late, rule)[0]
    torch.testing.assert_close(out[:5], prompts, rtol=0, atol=0)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing was written to holds NaN."""

    def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*given: Any, **options: Any) -> Tensor:
            new = empty(*given, **options)
            return new.fill_(float("nan")) if new.is_floating_point() else new

        return filled

    for owner, name in ((Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_memory_that_nothing_was_written_to_is_not_read(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows enter late, after longer prompts and with older rows, in stores that grow."""
    model = tiny(family).float()
    engine = NativeEngine(model, TOKENIZER, max_num_seqs=5)
    asked = [
        Prompt(f"p{n}", "x", tokens=tuple(2 + i % 40 for i in range(n))) for n in (3, 40, 1, 9, 44)
    ]
    clean = engine.sample(asked, 3, Sampling(max_tokens=50), 0)
    poison(monkeypatch)
    assert_same(engine.sample(asked, 3, Sampling(max_tokens=50), 0), clean, atol=0)


def test_a_store_keeps_live_entries_as_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison(monkeypatch)
    store = KVStore(longest=200)
    store.reserve(4, 2, 0)
    rows, values = torch.arange(4), torch.randn(4, 1, 3)
    for place in (0, 1):
        store.write(0, (rows, rows * 0 + place), values + place, values - place)
    before = [x.clone() for x in store.read(0, 4, 2)]
    store.copy(np.array([3]), np.array([0]))
    store.reserve(2, 150, 2)
    for now, then in zip(store.read(0, 2, 2), before, strict=True):
        assert torch.equal(now, then[[3, 1]])
    keys, _ = store.read(0, 9, 999)
    assert keys.shape[0] == 2
    assert 150 <= keys.shape[1] <= 200
    assert not keys[:, 2:150].any()
    store.reserve(5, 10, 2)
    keys, _ = store.read(0, 9, 999)
    assert keys.shape[0] >= 5
    assert torch.equal(keys[:2, :2], before[0][[3, 1]])
    # The places of entries that come later are zero.
    assert not store.read(0, 5, 10)[0][2:].any()
