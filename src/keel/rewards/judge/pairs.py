"""Two answers side by side: which pairs meet, in which order, and what the two orders say."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from keel.data.preferences.schema import Preference
from keel.rewards.judge.prompts import RUBRIC, pair_question
from keel.rewards.judge.requests import Asker, Judgement
from keel.rewards.judge.spending import Cost
from keel.types import Content

Place = Literal["first", "second", "tie"]
SWAPPED = {"first": "second", "second": "first", "tie": "tie"}
WORTH = {"first": 1.0, "second": 0.0, "tie": 0.5}


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two answers `a` and `b` to a prompt."""

    prompt: Content
    a: str
    b: str
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """What a judge says of a pair.

    `said` are the places it preferred: with `a` standing first, then with `b`; None where that
    order was not asked, or its answer said nothing (`wrong` says why). `value` is what `a` is worth
    against `b`: 1, 0, or ½ for a tie and for orders that differ; None where an order is missing.
    """

    said: tuple[Place | None, Place | None]
    value: float | None
    wrong: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def both(self) -> bool:
        """Whether both orders spoke."""
        return None not in self.said

    @property
    def inconsistent(self) -> bool:
        """Whether the orders differ about the answers."""
        first, second = self.said
        return first is not None and second is not None and first != SWAPPED[second]


async def judge_pairs(
    asker: Asker, pairs: Sequence[ComparedPair], *, rubric: str = RUBRIC, both_orders: bool = True
) -> list[PairVerdict]:
    """The verdict on each pair.

    With one order, which answer stands first is a coin thrown by the pair's content, so that a
    preference for a place favours neither side. Nobody need be asked about an answer and its equal:
    a tie. Raises KeelError as asking does.
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
    told = iter(await together(asker, [asker.judge(question) for question in questions]))
    return [
        verdict(next(told) if order[0] else None, next(told) if order[1] else None)
        if any(order)
        else PairVerdict((None, None), 0.5)
        for order in orders
    ]


def verdict(first: Judgement | None, second: Judgement | None) -> PairVerdict:
    """The verdict on a pair from its one or two orders; `second` had `b` standing first."""
    asked = [j for j in (first, second) if j is not None]
    said = (_place(first), _place(second))
    worth = [WORTH[said[0]]] if said[0] else []
    worth += [WORTH[SWAPPED[said[1]]]] if said[1] else []
    value = None
    if asked and len(worth) == len(asked):
        value = worth[0] if len(set(worth)) == 1 else 0.5
    return PairVerdict(
        said=said,
        value=value,
        wrong=tuple(j.parsed.wrong for j in asked if j.parsed.wrong),
        reasons=tuple(j.parsed.reason for j in asked if j.parsed.reason),
        costs={key: cost for j in asked for key, cost in j.costs.items()},
    )


def position_bias(verdicts: Sequence[PairVerdict]) -> float | None:
    """How much more often the first place won in both orders than the second, in [−1, 1].

    Over the pairs of which both orders spoke; None where there is none. A judge that looks at the
    answers alone has 0, one that always says "first" 1.
    """
    both = [v.said for v in verdicts if v.both]
    if not both:
        return None
    first, second = both.count(("first", "first")), both.count(("second", "second"))
    return (first - second) / len(both)


def choose_pairs(n: int, rivals: int) -> list[tuple[int, int]]:
    """Which of `n` answers meet: each about `rivals` others, the nearest round the circle.

    Where the numbers leave somebody over, one meets one more. The answers of a group are drawn
    alike, so that no choice among them is better than another.
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


def compare_pairs(
    asker: Asker,
    preferences: Sequence[Preference],
    *,
    rubric: str = RUBRIC,
    both_orders: bool = True,
) -> list[PairVerdict]:
    """A judge's verdicts on pairs that people have judged; `a` is the answer that they chose.

    Runs an event loop: not to be called within one. Raises KeelError as asking does.
    """

    async def run() -> list[PairVerdict]:
        pairs = [ComparedPair(row.prompt, row.chosen, row.rejected) for row in preferences]
        try:
            return await judge_pairs(asker, pairs, rubric=rubric, both_orders=both_orders)
        finally:
            await asker.client.leave()

    return asyncio.run(run())


def labels(
    verdicts: Sequence[PairVerdict], preferences: Sequence[Preference]
) -> tuple[list[str], list[str]]:
    """People's labels and the judge's, "a", "b" or "tie", for Cohen's κ; pairs without a verdict
    are left out.

    Which answer is called a is a coin thrown by the pair's content: were it always the chosen one,
    people would have said one thing throughout, and no agreement could exceed chance.
    """
    people: list[str] = []
    judge: list[str] = []
    for found, row in zip(verdicts, preferences, strict=True):
        if found.value is None:
            continue
        chosen_is_a = _coin(ComparedPair(row.prompt, row.chosen, row.rejected))[0]
        people.append(_label(row.probability, chosen_is_a))
        judge.append(_label(found.value, chosen_is_a))
    return people, judge


async def together(asker: Asker, asking: Sequence[object]) -> list[Judgement]:
    """What came of several questions asked at once.

    Where one fails, no other is sent any more, and those on their way are waited for, since they
    are paid for.
    """
    tasks = [asyncio.ensure_future(one) for one in asking]  # type: ignore[call-overload]
    try:
        return list(await asyncio.gather(*tasks))
    except Exception:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asker.drain()
        raise


def _place(judgement: Judgement | None) -> Place | None:
    return judgement.parsed.value if judgement else None  # type: ignore[return-value]


def _coin(pair: ComparedPair) -> tuple[bool, bool]:
    """(True, False) or (False, True), by the content of the two answers, whichever is a."""
    digests = [hashlib.sha256(x.encode("utf-8", "replace")).digest() for x in (pair.a, pair.b)]
    flip = hashlib.sha256(min(digests) + max(digests)).digest()[0] % 2 == 0
    a_first = (digests[0] <= digests[1]) == flip
    return (a_first, not a_first)


def _label(value: float, chosen_is_a: bool) -> str:
    if value == 0.5:
        return "tie"
    return "a" if (value > 0.5) == chosen_is_a else "b"
