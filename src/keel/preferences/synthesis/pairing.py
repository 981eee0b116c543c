"""Which completions of a prompt are compared. Torch-free."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from keel.preferences.store.records import CompletionRecord, PairRecord, content_id


def different_texts(completions: Sequence[CompletionRecord]) -> list[CompletionRecord]:
    """The first completion of every text that is not blank."""
    first: dict[str, CompletionRecord] = {}
    for completion in completions:
        if completion.text.strip():
            first.setdefault(completion.text, completion)
    return list(first.values())


def new_pairs(
    completions: Sequence[CompletionRecord],
    pairs: Sequence[PairRecord],
    most: int,
    *,
    round: int = 0,
    seed: int = 0,
) -> list[PairRecord]:
    """Pairs to add to those of a prompt, so that it has at most `most`.

    Two completions of one text are never a pair, nor two texts that are one already. The next pair
    is the one whose busier completion is in the fewest pairs, then whose other one is, then by a
    hash of the two and the seed. So all completions are compared about equally often, and a larger
    `most` keeps the pairs of a smaller one.
    """
    text = {completion.id: completion.text for completion in completions}
    known = {frozenset((text[pair.first], text[pair.second])) for pair in pairs}
    used = Counter(text[side] for pair in pairs for side in (pair.first, pair.second))
    candidates = {
        content_id(seed, a.text, b.text): (a, b)
        for a, b in itertools.combinations(
            sorted(different_texts(completions), key=lambda one: one.text), 2
        )
        if frozenset((a.text, b.text)) not in known
    }
    found: list[PairRecord] = []
    while candidates and len(pairs) + len(found) < most:
        name = min(
            candidates,
            key=lambda key: (*sorted((used[c.text] for c in candidates[key]), reverse=True), key),
        )
        one, other = candidates.pop(name)
        used.update((one.text, other.text))
        # As in imports, which one is first depends on the two alone.
        first, second = sorted((one.id, other.id))
        found.append(PairRecord(one.prompt, first, second, round=round))
    return found
