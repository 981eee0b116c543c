"""Rewards that are rules: right or wrong, in the asked-for shape or not, too long or not.

All have TRL's signature, work on plain and on conversational completions, and give one number a
completion; None if a rule has nothing to judge by.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keel.data.columns import gold_entries, read_gold
from keel.graders.answers import chosen, in_tag, label_of, only_repeats, stated_number
from keel.graders.formats import (
    SECONDS,
    answer_part,
    has_tags,
    matches,
    opened,
    repeated_share,
    same_text,
)
from keel.graders.numbers import Number, read_number, same_number
from keel.rewards.outputs import Wrong
from keel.types import KeelError, text_of

_WORDS = {True: ("True", "true", "Yes", "yes"), False: ("False", "false", "No", "no")}
"""How a gold answer that is true or false may be written."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The text that states a completion's answer, its question, and the gold answers."""

    text: str | None
    question: str
    golds: list[str]

    def best(self, score: Callable[[str], float | Wrong]) -> float | Wrong | None:
        """The score of the gold answer that fits best; None without gold answers."""
        return max(map(score, self.golds), key=_number, default=None)


def samples(
    completions: Sequence[Any],
    answer: Sequence[Any],
    tag: str | None,
    openings: Sequence[str] | None,
    prompts: Sequence[Any] | None = None,
) -> list[Sample]:
    """What the rules compare. A text that only repeats its prompt states nothing.

    A value of `answer` may be a list, any entry of which is right, and blanks are not an answer.
    Raises KeelError for a table.
    """
    asked = prompts or [""] * len(completions)
    questions = [p if isinstance(p, str) else "\n".join(map(text_of, p)) for p in asked]
    try:
        golds = [
            [t for gold in gold_entries(read_gold(v)) for t in _texts_of(gold)] for v in answer
        ]
    except ValueError as error:
        raise KeelError(f"the answer column holds {error}: name a key of it") from None
    stated = stated_texts(completions, tag, openings)
    return [
        Sample(None if text and only_repeats(text, question) else text, question, each)
        for text, question, each in zip(stated, questions, golds, strict=True)
    ]


def _texts_of(gold: Any) -> list[str]:
    if isinstance(gold, bool):
        return list(_WORDS[gold])
    return [str(gold)] if str(gold).strip() else []


def _number(value: float | Wrong) -> float:
    return -1.0 if isinstance(value, Wrong) else value


def exact_match(
    *,
    completions: Sequence[Any],
    answer: Sequence[Any],
    normalised: bool = False,
    tag: str | None = None,
    openings: Sequence[str] | None = None,
) -> list[float | Wrong | None]:
    """1 if the text is the `answer` column's, less the blanks around it, else 0.

    `normalised` also ignores case, runs of blanks and full stops at the end; `tag` takes as the
    text what stands in the last `<tag>…</tag>` (without one, 0). None if the column is empty.
    """

    def score(text: str | None, gold: str) -> float:
        return float(text is not None and same_text(text, gold, normalised=normalised))

    found = samples(completions, answer, tag, openings)
    return [one.best(functools.partial(score, one.text)) for one in found]


def numeric_match(
    *,
    completions: Sequence[Any],
    answer: Sequence[Any],
    prompts: Sequence[Any] | None = None,
    tolerance: float = 0.0,
    tag: str | None = None,
    openings: Sequence[str] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, Sequence[Any]], None] | None = None,
) -> list[float | Wrong | None]:
    r"""1 if the text ends on the number that the `answer` column is or ends on, else 0.

    What the last `#### …` or `\boxed{…}` marks has to be that number as a whole, units aside, and
    so has the gold answer; without a mark, the number that the last sentence comes to counts. Two
    are the same if they differ by at most `tolerance · max(1, |gold|)`. A text that only repeats
    its prompt ends on no number. `tag` as for `exact_match`. None if the column is empty, and
    `Wrong` if it holds no number. The share of completions that end on no number is logged as
    `numeric_match/unread`, the number of each as `extracted`. Raises KeelError for a tolerance that
    is not a number of at least 0.
    """
    if not 0 <= tolerance < math.inf:
        raise KeelError(f"tolerance = {tolerance:g}: give a number of at least 0")
    found = samples(completions, answer, tag, openings, prompts)
    given = [stated_number(one.text) if one.text else None for one in found]

    def score(number: Number | None, gold: str) -> float | Wrong:
        wanted = read_number(gold, evaluated=False) or stated_number(gold, evaluated=False)
        if wanted is None:
            return Wrong(
                f"the answer column holds {gold[:60]!r}, which is not a number: use math or "
                "exact_match, or name another column in task.answer"
            )
        if number is None or not number.fits(wanted):
            return 0.0
        return float(same_number(number.value, wanted.value, tolerance))

    rewards = [one.best(functools.partial(score, n)) for one, n in zip(found, given, strict=True)]
    if log_metric is not None:
        read = [n for n, reward in zip(given, rewards, strict=True) if isinstance(reward, float)]
        log_metric("numeric_match/unread", read.count(None) / max(len(read), 1))
    if log_extra is not None:
        log_extra("extracted", [None if number is None else str(number.value) for number in given])
    return rewards


def choice(
    *,
    completions: Sequence[Any],
    answer: Sequence[Any],
    prompts: Sequence[Any] | None = None,
    tag: str | None = None,
    openings: Sequence[str] | None = None,
    log_extra: Callable[[str, Sequence[Any]], None] | None = None,
) -> list[float | Wrong | None]:
    r"""1 if the text settles on the option whose letter the `answer` column holds, else 0.

    `D`, `(D)` and `D) 14` are one letter, in a box, a statement or by itself. A text that settles
    on two, or on none, gets 0. `tag` as for `exact_match`. None if the column is empty, and
    `Wrong` if it holds no letter. The letter of each text is logged as `extracted`.
    """

    found = samples(completions, answer, tag, openings, prompts)
    given = [one.text and chosen(one.text, one.question) for one in found]

    def score(stated: str | None, gold: str) -> float | Wrong:
        letter = label_of(gold)
        if not letter:
            wrong = f"the answer column holds {gold[:60]!r}, which is not an option's letter"
            return Wrong(f"{wrong}: use exact_match, or name another column")
        return float(stated == letter)

    if log_extra is not None:
        log_extra("extracted", [letter or None for letter in given])
    return [one.best(functools.partial(score, n)) for one, n in zip(found, given, strict=True)]


def place_match(
    *,
    completions: Sequence[Any],
    answer: Sequence[Any],
    openings: Sequence[str] | None = None,
) -> list[float | Wrong | None]:
    """The share of characters that stand where the `answer` column has them, in [0, 1].

    Less the blanks around either text; counted over the longer of the two, so that neither rambling
    nor stopping short pays. A dense stand-in for `exact_match` while a policy gets nothing right.
    None if the column is empty.
    """

    def score(text: str | None, gold: str) -> float:
        stated, wanted = (text or "").strip(), gold.strip()
        agreeing = sum(a == b for a, b in zip(stated, wanted, strict=False))
        return agreeing / max(len(stated), len(wanted))

    found = samples(completions, answer, None, openings)
    return [one.best(functools.partial(score, one.text)) for one in found]


def format_match(
    *,
    completions: Sequence[Any],
    regex: str | None = None,
    tags: Sequence[str] | None = None,
    openings: Sequence[str] | None = None,
) -> list[float | Wrong]:
    """1 if `regex` is found in the text, or the text is made of `tags`; else 0.

    `^` and `$` are the ends of the text (blanks around it aside), `.` matches newlines too.
    `tags = ["think", "answer"]` asks for `<think>…</think> <answer>…</answer>` and nothing else.
    `Wrong` if the search of a text takes more than 5 seconds of computing.
    Raises KeelError unless exactly one of the two is given, and can be used.
    """
    if (regex is None) == (tags is None):
        raise KeelError("set exactly one of the options regex and tags")
    if regex is None:
        assert tags is not None
        if isinstance(tags, str):
            raise KeelError(f'tags = "{tags}": give a list, ["{tags}"]')
        if not tags:
            raise KeelError("tags = []: name at least one")
        return [float(has_tags(text, tags)) for text in texts(completions, openings)]
    try:
        found = matches(regex, texts(completions, openings))
    except re.error as error:
        raise KeelError(f"regex = {regex!r} is not a valid regular expression: {error}") from None
    slow = Wrong(
        f"regex = {regex!r:.80} takes more than {SECONDS} s on the text: avoid repetition "
        "inside repetition, such as (a+)+"
    )
    return [slow if one is None else float(one) for one in found]


def length(
    *,
    completion_ids: Sequence[Sequence[int]],
    target: int,
    width: int | None = None,
    both: bool = False,
) -> list[float]:
    """0 up to `target` tokens, then linearly down to −1 at `target + width`, −1 beyond.

    `width` None is `target`. With `both`, answers shorter than the target lose as much. Raises
    KeelError for a target or width under 1.
    """
    reach = target if width is None else width
    for name, value in (("target", target), ("width", reach)):
        if not 1 <= value < math.inf:
            raise KeelError(f"{name} = {value}: give at least 1")
    over = [len(ids) - target for ids in completion_ids]
    return [0.0 - min(1.0, (abs(n) if both else max(0, n)) / reach) for n in over]


def repetition(*, completions: Sequence[Any], n: int = 3, max_penalty: float = 1.0) -> list[float]:
    """−`max_penalty` times the share of the words' `n`-grams that occur earlier in the text.

    0 for a text of fewer than `n` words. Raises KeelError for `n` under 1 or a penalty under 0.
    """
    if n < 1:
        raise KeelError(f"n = {n}: give at least 1")
    if not 0 <= max_penalty < math.inf:
        raise KeelError(f"max_penalty = {max_penalty:g}: give at least 0; it is taken off")
    return [0.0 - max_penalty * repeated_share(text, n) for text in texts(completions)]


def texts(completions: Sequence[Any], openings: Sequence[str] | None = None) -> list[str]:
    """The policy's words: the text, or the text of the assistant's turns of a conversation.

    With `openings`, each turn begins with the tag that the chat template opened for it.
    """
    begun = [""] * len(completions) if openings is None else map(opened, openings)
    return [
        opening + c
        if isinstance(c, str)
        else "".join(opening + text_of(turn) for turn in c if turn["role"] == "assistant")
        for c, opening in zip(completions, begun, strict=True)
    ]


def stated_texts(
    completions: Sequence[Any], tag: str | None, openings: Sequence[str] | None = None
) -> list[str | None]:
    """The text of each completion after its thoughts, or in its last tag.

    None without the tag, and if a thought is not closed.
    """
    openings = [""] * len(completions) if openings is None else openings
    stated = map(answer_part, texts(completions, openings), openings)
    return [text if text is None or tag is None else in_tag(text, tag) for text in stated]


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """What an answer of `length` tokens gets for its length, in [−1, 0].

    0 up to `max_tokens − cache`; ((max_tokens − cache) − length) / cache over the last `cache`
    tokens of the budget; −1 beyond it. DAPO, arXiv 2503.14476, equation 13. `cache` 0 punishes
    only what is beyond the budget.
    """
    over = length - (max_tokens - cache)
    return 0.0 if over <= 0 else -1.0 if over >= cache else -over / cache


def relative_length_penalties(
    lengths: Sequence[int], rewards: Sequence[float | None], groups: Sequence[int], weight: float
) -> list[float]:
    """What answers get for their lengths against those to the same prompt.

    −β max(p, 1/K) L_i / mean(L) over the K answers of the prompt that have a reward; p is the share
    of rewards above 0: where the prompt is easy, length costs more. ALP, arXiv 2506.05256, with
    lengths over the group's mean, as in GR3 (arXiv 2603.10535), for lengths in tokens.
    """
    factors: dict[int, float] = {}
    for group in set(groups):
        known = [
            (length, reward > 0)
            for length, reward, g in zip(lengths, rewards, groups, strict=True)
            if g == group and reward is not None
        ]
        right = max(sum(is_right for _, is_right in known), 1)
        factors[group] = right / max(sum(length for length, _ in known), 1)  # p / mean(L)
    return [-weight * factors[g] * length for g, length in zip(groups, lengths, strict=True)]


BUILT_IN: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (exact_match, numeric_match, choice, place_match, format_match, length, repetition)
}
"""Built-ins that are plain functions, by the name that a recipe uses."""
