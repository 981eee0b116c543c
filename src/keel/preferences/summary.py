"""What a set of preference pairs is made of: counts, lengths, duplicates, how far people agree."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from keel.analysis.proportions import share_interval
from keel.data.preferences.schema import Preference
from keel.preferences.agreement import (
    Bootstrap,
    count_votes,
    fleiss_kappa,
    pairwise_agreement,
)


def summarise(pairs: Sequence[Preference]) -> dict[str, Any]:
    """Counts of the pairs, ready for JSON.

    A tie has probability ½; a soft label lies between ½ and a certain answer. `duplicates` are rows
    whose prompt and two answers, in whichever order, an earlier row has; `contradictions` those of
    them that prefer the other answer.
    """
    certain = sum(pair.probability in (0.0, 1.0) for pair in pairs)
    ties = sum(pair.probability == 0.5 for pair in pairs)
    duplicates, contradictions = _repeats(pairs)
    return {
        "rows": len(pairs),
        "prompts": len({_key(pair) for pair in pairs}),
        "ties": ties,
        "soft": len(pairs) - certain - ties,
        "margins": sum(pair.margin != 0 for pair in pairs),
        "empty_answers": sum(not (p.chosen.strip() and p.rejected.strip()) for p in pairs),
        "duplicates": duplicates,
        "contradictions": contradictions,
        "characters": _lengths(pairs),
        "longer_preferred": _longer(pairs),
    }


def agreement(
    votes: Sequence[Sequence[Hashable]], prompts: Sequence[Hashable]
) -> dict[str, Any] | None:
    """Fleiss' κ and the share of pairs of judges that agree; None with fewer than two votes a row.

    Intervals are drawn over prompts, as the rows of one prompt hang together.

    Raises:
        ValueError: rows with different numbers of votes.
    """
    if not votes or max(map(len, votes)) < 2:
        return None
    counts, drawn = count_votes(votes), Bootstrap(groups=prompts)
    return {
        "judges": int(counts[0].sum()),
        "unanimous": sum(len(set(row)) == 1 for row in votes),
        "pairwise": pairwise_agreement(counts, drawn).as_dict(),
        "fleiss_kappa": fleiss_kappa(counts, drawn).as_dict(),
    }


def _key(pair: Preference) -> str:
    return json.dumps(pair.prompt, sort_keys=True)


def _repeats(pairs: Sequence[Preference]) -> tuple[int, int]:
    """Rows that repeat an earlier one, and those of them that say the opposite of its first."""
    first: dict[tuple[str, frozenset[str]], str | None] = {}
    duplicates = contradictions = 0
    for pair in pairs:
        key = (_key(pair), frozenset((pair.chosen, pair.rejected)))
        winner = _winner(pair)
        if key not in first:
            first[key] = winner
            continue
        duplicates += 1
        known = first[key]
        contradictions += known is not None and winner is not None and winner != known
    return duplicates, contradictions


def _winner(pair: Preference) -> str | None:
    if pair.probability == 0.5:
        return None
    return pair.chosen if pair.probability > 0.5 else pair.rejected


def _lengths(pairs: Sequence[Preference]) -> dict[str, dict[str, float]]:
    """Median and mean length in characters."""
    sides = {"chosen": [p.chosen for p in pairs], "rejected": [p.rejected for p in pairs]}
    return {
        side: {
            "median": float(np.median([len(text) for text in texts])),
            "mean": float(np.mean([len(text) for text in texts])),
        }
        for side, texts in sides.items()
    }


def _longer(pairs: Sequence[Preference]) -> dict[str, float | int]:
    """How often the longer answer is preferred, where one is longer and one is preferred.

    Clustered by prompt, as the pairs of one prompt hang together.
    """
    decided = [p for p in pairs if p.probability != 0.5 and len(p.chosen) != len(p.rejected)]
    longer = [(len(p.chosen) > len(p.rejected)) == (p.probability > 0.5) for p in decided]
    return share_interval(longer, map(_key, decided)).as_dict()
