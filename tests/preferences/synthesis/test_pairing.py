"""Which completions are compared."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from keel.preferences.records import CompletionRecord, PairRecord
from keel.preferences.synthesis.work import different_texts, new_pairs


def completions(*texts: str, model: str = "m") -> list[CompletionRecord]:
    return [
        CompletionRecord("p", text, model, id=f"{at}-{text}-{model}")
        for at, text in enumerate(texts)
    ]


def texts(pairs: list[PairRecord], every: list[CompletionRecord]) -> list[frozenset[str]]:
    text = {one.id: one.text for one in every}
    return [frozenset((text[pair.first], text[pair.second])) for pair in pairs]


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e", " "]), max_size=9),
    st.integers(0, 12),
    st.integers(0, 3),
)
def test_pairs_of_any_completions(words: list[str], most: int, seed: int) -> None:
    every = completions(*words)
    found = new_pairs(every, [], most, seed=seed)
    different = len({word for word in words if word.strip()})
    pairs = texts(found, every)
    assert len(found) == min(most, different * (different - 1) // 2)
    assert len(set(pairs)) == len(pairs)
    assert all(len(pair) == 2 and " " not in pair for pair in pairs)
    # No completion is compared much more often than another.
    used = Counter(text for pair in pairs for text in pair)
    if pairs:
        counts = [used[text] for text in {w for w in words if w.strip()}]
        assert max(counts) - min(counts) <= 2
    # A larger number keeps these, and going on from these gives the same.
    assert new_pairs(every, [], most + 2, seed=seed)[: len(found)] == found
    assert found + new_pairs(every, found, most + 2, seed=seed) == new_pairs(
        every, [], most + 2, seed=seed
    )


def test_order_of_completions_does_not_matter() -> None:
    every = completions("a", "b", "c", "d")
    assert new_pairs(every, [], 4) == new_pairs(every[::-1], [], 4)
    for pair in new_pairs(every, [], 6):
        assert pair.first < pair.second


def test_texts_are_a_pair_once() -> None:
    one, other = completions("a", "b"), completions("a", "b", "c", model="n")
    there = [PairRecord("p", other[0].id, other[1].id)]
    found = new_pairs([*one, *other], there, 9)
    assert set(texts(found, [*one, *other])) == {frozenset("ac"), frozenset("bc")}


def test_a_text_of_two_models_is_the_first_ones() -> None:
    one, other = completions("a"), completions("a", "b", model="n")
    assert different_texts([*one, *other]) == [one[0], other[1]]


def test_seed_changes_which_pairs() -> None:
    every = completions(*"abcdefgh")
    found = {frozenset(texts(new_pairs(every, [], 4, seed=seed), every)) for seed in range(5)}
    assert len(found) > 1
