"""Pairwise verdicts: which pairs are compared, in which order, and what two orders amount to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.rewards.judge.prompts import Judgement
from keel.rewards.judge.store import Cost

SWAPPED = {"first": "second", "second": "first", "tie": "tie"}
WORTH = {"first": 1.0, "second": 0.0, "tie": 0.5}
PLACES = ("first", "second")


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """A judge's judgements of a pair: with `a` first, and with `b` first; None if not asked.

    Equal answers are asked about in neither order.
    """

    orders: tuple[Judgement | None, Judgement | None]

    @property
    def choices(self) -> tuple[str | None, str | None]:
        """ "first", "second" or "tie" in each order; None without a verdict."""
        first, second = (
            None if j is None or j.value is None else str(j.value) for j in self.orders
        )
        return first, second

    @property
    def value(self) -> float | None:
        """The worth of `a` against `b`: 1, 0, or ½ for a tie, equal answers and orders that differ.

        None if an order that was asked has no verdict.
        """
        first, second = self.choices
        worth = [WORTH[first]] if first else []
        worth += [WORTH[SWAPPED[second]]] if second else []
        if len(worth) < sum(j is not None for j in self.orders):
            return None
        return worth[0] if len(set(worth)) == 1 else 0.5

    @property
    def wrong(self) -> str:
        """Why an order has no verdict; empty if all have."""
        return "\n".join(j.wrong for j in self.orders if j is not None and j.wrong)

    @property
    def costs(self) -> Mapping[str, Cost]:
        """The costs of both orders."""
        return {key: cost for j in self.orders if j is not None for key, cost in j.costs.items()}

    @property
    def both(self) -> bool:
        """Whether both orders gave a verdict."""
        return None not in self.choices

    @property
    def inconsistent(self) -> bool:
        """Whether the orders differ about the answers."""
        first, second = self.choices
        return first is not None and second is not None and first != SWAPPED[second]

    def words(self, place: int) -> str:
        """The judge's reasons about `a` (place 0) or `b` (1), a line for each order.

        "First" in a reason means another answer in each order, so each line says where this one
        stood.
        """
        found = []
        for order, (choice, judgement) in enumerate(zip(self.choices, self.orders, strict=True)):
            if choice is not None and judgement is not None:
                stood = PLACES[place ^ order]
                outcome = "tie" if choice == "tie" else "better" if choice == stood else "worse"
                line = f"as the {stood} of two, {outcome}: {judgement.reason}"
                found.append(line.removesuffix(": "))
        return "\n".join(found)


def asked_orders(a: str, b: str, both: bool) -> tuple[bool, bool]:
    """Whether a pair is asked about with `a` first, and with `b` first.

    Equal answers are a tie and are not asked about. With one order, a hash of the two answers
    chooses which stands first, so that a preference for a place favours neither side.
    """
    if a == b:
        return False, False
    if both:
        return True, True
    digests = [hashlib.sha256(x.encode("utf-8", "replace")).digest() for x in (a, b)]
    flip = hashlib.sha256(min(digests) + max(digests)).digest()[0] % 2 == 0
    a_first = (digests[0] <= digests[1]) == flip
    return a_first, not a_first


def position_bias(verdicts: Sequence[PairVerdict]) -> float | None:
    """How much more often the first place won in both orders than the second, in [−1, 1].

    Over the pairs with a verdict in both orders; None without such pairs. 0 for a judge that looks
    at the answers alone, 1 for one that always prefers the first place.
    """
    both = [v.choices for v in verdicts if v.both]
    if not both:
        return None
    first, second = both.count(("first", "first")), both.count(("second", "second"))
    return (first - second) / len(both)


def choose_pairs(n: int, rivals: int) -> list[tuple[int, int]]:
    """Which of `n` answers are compared: each with about `rivals` others, its nearest in a circle.

    If the numbers do not divide evenly, one is compared once more.
    """
    count = [0] * n
    pairs: list[tuple[int, int]] = []
    wanted = min(rivals, n - 1)
    for enough in (all, any):
        for reach in range(1, n // 2 + 1):
            for i in range(n):
                pair = (min(i, (i + reach) % n), max(i, (i + reach) % n))
                if pair not in pairs and enough(count[at] < wanted for at in pair):
                    pairs.append(pair)
                    count[pair[0]] += 1
                    count[pair[1]] += 1
    return sorted(pairs)
