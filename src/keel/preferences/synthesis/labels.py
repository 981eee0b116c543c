"""A judge's labels of pairs, each asked for in both orders. Torch-free."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import closing

from keel.data.gold import shown_gold
from keel.graders.stated import answer_part
from keel.preferences.store.records import JudgedPair, LabelRecord, PairRecord, Side
from keel.preferences.store.store import PreferenceStore
from keel.preferences.synthesis.completions import ProgressNotes, in_parallel, request_amounts
from keel.preferences.synthesis.forecast import ModelUsage
from keel.preferences.synthesis.options import ModelServer, SynthesisOptions, build_asker
from keel.rewards.judge.pairs import SWAPPED, WORTH
from keel.rewards.judge.prompts import Judgement, Question, pair_question
from keel.rewards.judge.requests import Asker
from keel.runs.values import clean_text
from keel.types import KeelError

ORDERS: tuple[Side, Side] = ("first", "second")
"""The side that is shown first in each of the two requests."""


def unjudged(
    store: PreferenceStore, options: SynthesisOptions, judge: ModelServer, prompts: Iterable[str]
) -> list[PairRecord]:
    """Pairs of these prompts (by id) that the judge has not labelled by this rubric."""
    chosen = set(prompts)
    found = store.unlabelled("judge", annotator=judge.model, rubric=options.rubric)
    return [pair for pair in found if pair.prompt in chosen]


def judge_pairs_of(
    store: PreferenceStore,
    options: SynthesisOptions,
    judge: ModelServer,
    pairs: Sequence[PairRecord],
    usage: ModelUsage,
    notes: ProgressNotes,
) -> None:
    """Label pairs. Raises KeelError if the judge gives no answers, and SpendLimitReached."""
    with closing(build_asker(store.path, options, judge, judges=True)) as asker:

        async def one(pair: PairRecord) -> None:
            await _judge(store, options, judge, asker, store.judged_pair(pair.id), usage)
            notes.add(len(ORDERS))

        # Two requests a pair.
        workers = max(1, (asker.options.concurrency + 1) // 2)
        in_parallel(pairs, one, workers)


async def _judge(
    store: PreferenceStore,
    options: SynthesisOptions,
    judge: ModelServer,
    asker: Asker,
    pair: JudgedPair,
    usage: ModelUsage,
) -> None:
    """The labels of a pair with what they took, in one transaction."""
    asked = questions(pair, options.rubric, options.reference)
    judgements = await asker.judge(asked)
    store.add(pair_labels(pair.pair.id, judgements, asker, options, judge))
    for judgement in judgements:
        for key, cost in judgement.costs.items():
            amounts = request_amounts(cost, asker.seconds.get(key), asker)
            usage.add(pair.prompt.id, amounts)


def questions(pair: JudgedPair, rubric: str, reference: str | None) -> list[Question]:
    """The two questions about a pair: its first completion shown first, then its second."""
    known = None if reference is None else pair.prompt.columns.get(reference)
    texts = [answer_part(one.text) or "" for one in (pair.first, pair.second)]
    return [
        pair_question(
            pair.prompt.content,
            *(texts if shown == "first" else texts[::-1]),
            rubric=rubric,
            reference=shown_gold(known),
        )
        for shown in ORDERS
    ]


def pair_labels(
    pair: str,
    judgements: Sequence[Judgement],
    asker: Asker,
    options: SynthesisOptions,
    judge: ModelServer,
) -> Iterable[LabelRecord]:
    """A label for each order; their mean is the judge's label of the pair.

    Opposite verdicts so have the mean ½. Where an order has no verdict both labels are skips: one
    order alone would favour a place. `note` has the judge's reason, or what is wrong.
    """
    complete = all(judgement.value is not None for judgement in judgements)
    for shown, judgement in zip(ORDERS, judgements, strict=True):
        choice = None if judgement.value is None else str(judgement.value)
        value = None
        note = judgement.reason
        if choice is None:
            note = f"no verdict: {judgement.wrong}"
        elif not complete:
            note = f"{choice}, but the other order has no verdict: {note}"
        else:
            value = WORTH[choice if shown == "first" else SWAPPED[choice]]
        seconds = [asker.seconds.get(key) for key in judgement.costs]
        yield LabelRecord(
            pair,
            value,
            "judge",
            judge.model,
            options.rubric,
            round=options.round,
            shown_first=shown,
            seconds=None if None in seconds else sum(s for s in seconds if s is not None),
            cost=None
            if judge.price is None
            else math.fsum(cost.dollars for cost in judgement.costs.values()),
            note=clean_text(note),
            at=time.time(),
        )


def check_reference(store: PreferenceStore, reference: str | None, prompts: Sequence[str]) -> None:
    """Raise KeelError if no prompt has the column of the reference."""
    if reference is None:
        return
    if not any(reference in store.prompt(id).columns for id in prompts):
        raise KeelError(f"reference = {reference!r}: no prompt has such a column: fix the name")
