"""Memory of keys and values: what nothing was written to is not read, and what lives is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.engines.model_runner import KVStore
from keel.engines.native import NativeEngine
from keel.types import Prompt, Sampling
from tests.engines.tiny import TOKENIZER, assert_same, tiny


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
