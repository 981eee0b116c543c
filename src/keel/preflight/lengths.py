"""How long completions are, where some were cut before their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """A budget that holds a share of all completions; not `known`: at least so much."""

    tokens: int
    known: bool

    def __str__(self) -> str:
        return f"{self.tokens}" if self.known else f"more than {self.tokens}"


def holding(lengths: Sequence[int], ended: Sequence[bool], share: float = 0.95) -> BudgetShare:
    """The smallest budget that holds `share` of the completions, by Kaplan and Meier's estimate.

        S(t) = Π_{t_i ≤ t} (1 − d_i / n_i),   budget = min {t : 1 − S(t) ≥ share}

    d_i completions end at length t_i, n_i are at least so long. Of one that was cut (`ended` is
    False) only that it is longer is known. Where the estimate does not come so far, the longest
    length looked at is a lower bound. Source: Kaplan and Meier 1958, JASA 53:457.

    Raises ValueError where there are none.
    """
    if not lengths:
        raise ValueError("no lengths")
    left = 1.0
    for t in sorted({n for n, done in zip(lengths, ended, strict=True) if done}):
        at_risk = sum(n >= t for n in lengths)
        ends = sum(n == t and done for n, done in zip(lengths, ended, strict=True))
        left *= 1 - ends / at_risk
        # A product of fractions misses the share by rounding alone.
        if 1 - left >= share - 1e-12:
            return BudgetShare(t, True)
    return BudgetShare(max(lengths), False)


def quantile(lengths: Sequence[int], share: float) -> int:
    """The smallest length that `share` of the lengths do not exceed. Raises ValueError for none."""
    return holding(lengths, [True] * len(lengths), share).tokens
