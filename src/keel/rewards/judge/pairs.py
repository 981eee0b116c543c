"""Pairwise verdicts: which pairs are compared, in which order, and what two orders amount to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.rewards.judge.prompts import RUBRIC, Judgement, pair_question
from keel.rewards.judge.requests import Asker
from keel.rewards.judge.store import Cost
from keel.types import Content

SWAPPED = {"first": "second", "second": "first", "tie": "tie"}
WORTH = {"first": 1.0, "second": 0.0, "tie": 0.5}
PLACES = ("first", "second")


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two answers `a` and `b` to a prompt."""

    prompt: Content
    a: str
    b: str
    reference: str | None = None


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


async def judge_pairs(
    asker: Asker, pairs: Sequence[ComparedPair], *, rubric: str = RUBRIC, both_orders: bool = True
) -> list[PairVerdict]:
    """The verdict on each pair.

    With one order, a hash of the pair's content chooses which answer stands first, so that a
    preference for a place favours neither side. Equal answers are a tie and are not asked about.
    Raises KeelError as asking does.
    """
    orders = [
        (False, False) if pair.a == pair.b else (True, True) if both_orders else _coin(pair)
        for pair in pairs
    ]
    questions = [
        pair_question(pair.prompt, one, other, rubric=rubric, reference=pair.reference)
        for pair, order in zip(pairs, orders, strict=True)
        for asked, one, other in ((order[0], pair.a, pair.b), (order[1], pair.b, pair.a))
        if asked
    ]
    found = iter(await asker.judge(questions))
    return [
        PairVerdict((next(found) if first else None, next(found) if second else None))
        for first, second in orders
    ]


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


def _coin(pair: ComparedPair) -> tuple[bool, bool]:
    """(True, False) or (False, True), by the content of the two answers, whichever is a."""
    digests = [hashlib.sha256(x.encode("utf-8", "replace")).digest() for x in (pair.a, pair.b)]
    flip = hashlib.sha256(min(digests) + max(digests)).digest()[0] % 2 == 0
    a_first = (digests[0] <= digests[1]) == flip
    return (a_first, not a_first)
