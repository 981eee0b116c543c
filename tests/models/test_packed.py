"""Packing: layout, positions, targets, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.models.attention import install
from keel.models.families import hidden_states
from keel.models.packed import Packed, pack
from tests.engines.tiny import tiny


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), max_size=5))
def test_targets_are_those_of_the_masks(masks: list[list[bool]]) -> None:
    masks = [[False, *mask[1:]] for mask in masks]
    tokens = [torch.arange(len(mask)) + 100 * k for k, mask in enumerate(masks)]
    packed = pack(tokens, [torch.tensor(mask) for mask in masks])
    expected = [
        100 * k + place for k, mask in enumerate(masks) for place, on in enumerate(mask) if on
    ]
    assert packed.scored().tolist() == expected
    assert packed.positions().tolist() == [place for mask in masks for place in range(len(mask))]
    assert packed.tokens_T.dtype == packed.target_N.dtype == torch.int64


@pytest.mark.parametrize(
    ("tokens", "target", "reason"),
    [
        ([], [], "sequence 0 is empty"),
        ([1, 2], [True, False], "must lie in 1"),
        ([1, 2], [0], "must lie in 1"),
        ([1, 2], [2], "must lie in 1"),
        ([1, 2, 3], [2, 1], "must ascend"),
        ([1, 2, 3], [1, 1], "must ascend"),
        ([1, 2, 3], [False, True], "3 tokens but its target mask 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    tokens: list[int], target: list[int] | list[bool], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        pack([torch.tensor(tokens, dtype=torch.int64)], [torch.tensor(target)])


def test_as_many_targets_as_sequences() -> None:
    with pytest.raises(ValueError, match="1 sequences but targets for 0"):
        pack([torch.tensor([1])], [])


@settings(deadline=None)
@given(st.data())
def test_the_last_token_of_a_sequence_is_not_fed(data: st.DataObject) -> None:
    """Sequences, and prompts with answers after them: what is fed, piece by piece."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    follows: list[int] = []
    for piece in range(len(lengths)):
        beginnings = [-1, *(p for p in range(piece) if follows[p] == -1)]
        follows.append(data.draw(st.sampled_from(beginnings)))
    tokens = torch.arange(sum(lengths)) + 100
    begins = {sum(lengths[:p]) for p, first in enumerate(follows) if first == -1}
    targets = [t for t in range(sum(lengths)) if t not in begins and data.draw(st.booleans())]
    whole = Packed(tokens, tuple(lengths), torch.tensor(targets).long(), tuple(follows))
    fed, at_N = whole.fed
    expected = [
        piece[:-1] if len(piece) > 1 and number not in follows else piece
        for number, piece in enumerate(tokens.split(lengths))
    ]
    assert fed.lengths == tuple(map(len, expected))
    assert fed.follows == whole.follows
    assert torch.equal(fed.tokens_T, torch.cat(expected))
    assert torch.equal(fed.tokens_T[at_N], whole.tokens_T[whole.source_N])
    order = whole.positions().tolist()
    kept = torch.isin(whole.tokens_T, fed.tokens_T)  # every token is another number
    assert fed.positions().tolist() == [p for p, k in zip(order, kept, strict=True) if k]


def test_nothing_is_fed_of_nothing() -> None:
    fed, at_N = pack([], []).fed
    assert (len(fed.tokens_T), len(at_N)) == (0, 0)


def test_the_last_token_of_a_sequence_does_not_enter_the_model() -> None:
    """Of a prompt's two answers and of a sequence alone."""
    model, entered = tiny("llama"), []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: entered.append(given[0].numel())
    )
    install(model)
    whole = Packed(torch.arange(2, 26) % 15, (5, 3, 9, 7), torch.arange(1, 24), (-1, 0, 0, -1))
    assert len(hidden_states(model, whole)) == 23
    assert entered == [24 - 3]
