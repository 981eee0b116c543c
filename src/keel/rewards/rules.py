"""Rewards that are rules: right or wrong, in the asked-for shape or not, too long or not.

All have TRL's signature, work on plain and on conversational completions, and give one number a
completion; None where a rule has nothing to judge by.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from keel.data.gold import gold_entries, read_gold
from keel.graders.answers import in_tag, only_repeats, stated_number
from keel.graders.choices import chosen, label_of
from keel.graders.formats import (
    SECONDS,
    has_tags,
    matches,
    repeated_share,
    same_text,
)
from keel.graders.numbers import Number, read_number, same_number
from keel.graders.stated import answer_part, opened
from keel.rewards.validation import Wrong
from keel.types import KeelError, text_of

Rule = TypeVar("Rule", bound=Callable[..., list[Any]])


def any_gold(reward: Rule) -> Rule:
    """A reward whose `answer` may hold lists: it is called for every entry, and the best counts.

    Raises KeelError for what is no answer, such as a table.
    """

    @functools.wraps(reward)
    def best(*own: Any, **given: Any) -> list[Any]:
        try:
            golds = [_alternatives(value) or [None] for value in given.pop("answer")]
        except ValueError as error:
            raise KeelError(f"the answer column holds {error}: name a key of it") from None
        rounds = []
        for at in range(max(map(len, golds), default=1)):
            rounds.append(reward(*own, **given, answer=[g[min(at, len(g) - 1)] for g in golds]))
            given = {name: value for name, value in given.items() if not name.startswith("log_")}
        return [max(several, key=_number) for several in zip(*rounds, strict=True)]

    return cast(Rule, best)


def _alternatives(value: Any) -> list[Any]:
    """The answers that a column holds; true is also written yes, and blanks are no answer."""
    golds = [one for one in gold_entries(read_gold(value)) if str(one).strip()]
    words = {True: ("True", "true", "Yes", "yes"), False: ("False", "false", "No", "no")}
    return [same for one in golds for same in (words[one] if isinstance(one, bool) else [one])]


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else -1.0


@any_gold
def exact_match(
    *,
    completions: Sequence[Any],
    answer: Sequence[Any],
    normalised: bool = False,
    tag: str | None = None,
    openings: Sequence[str] | None = None,
) -> list[float | None]:
    """1 where the text is the `answer` column's, less the blanks around it, else 0.

    `normalised` also ignores case, runs of blanks and full stops at the end; `tag` takes as the
    text what stands in the last `<tag>…</tag>` (without one, 0). None where the column is empty.
    """
    return [
        None
        if gold is None
        else float(stated is not None and same_text(stated, str(gold), normalised=normalised))
        for stated, gold in zip(
            stated_texts(completions, tag, openings=openings), answer, strict=True
        )
    ]


@any_gold
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
    r"""1 where the text ends on the number that the `answer` column is or ends on, else 0.

    What the last `#### …` or `\boxed{…}` marks has to be that number as a whole, units aside, and
    so has the gold answer; without a mark, the number that the last sentence comes to counts. Two
    are the same where they differ by at most `tolerance · max(1, |gold|)`. A text that only repeats
    its prompt ends on no number. `tag` as for `exact_match`. None where the column is empty, and
    `Wrong` where it holds no number. The share of completions that end on no number is logged as
    `numeric_match/unread`, the number of each as `extracted`. Raises KeelError for a tolerance that
    is not a number of at least 0.
    """
    if not 0 <= tolerance < math.inf:
        raise KeelError(f"tolerance = {tolerance:g}: give a number of at least 0")
    rewards: list[float | Wrong | None] = []
    read: list[bool] = []
    extracted: list[str | None] = []
    every = stated_texts(completions, tag, prompts, openings)
    for stated, gold in zip(every, answer, strict=True):
        given = None if stated is None else stated_number(stated)
        extracted.append(None if given is None else str(given.value))
        if gold is None:
            rewards.append(None)
            continue
        wanted = _gold_number(str(gold))
        if wanted is None:
            wrong = (
                f"the answer column holds {str(gold)[:60]!r}, which is no number: use math or "
                "exact_match, or name another column in task.answer"
            )
            rewards.append(Wrong(wrong))
            continue
        read.append(given is not None)
        same = given is not None and same_number(given.value, wanted.value, tolerance)
        rewards.append(float(same and given is not None and given.fits(wanted)))
    if log_metric is not None:
        log_metric("numeric_match/unread", read.count(False) / max(len(read), 1))
    if log_extra is not None:
        log_extra("extracted", extracted)
    return rewards


@any_gold
def choice(
    *,
    completions: Sequence[Any],
    answer: Sequence[Any],
    prompts: Sequence[Any] | None = None,
    tag: str | None = None,
    openings: Sequence[str] | None = None,
) -> list[float | Wrong | None]:
    r"""1 where the text settles on the option whose letter the `answer` column holds, else 0.

    `D`, `(D)` and `D) 14` are one letter, in a box, a statement or by itself. A text that settles
    on two, or on none, gets 0. `tag` as for `exact_match`. None where the column is empty, and
    `Wrong` where it holds no letter.
    """
    rewards: list[float | Wrong | None] = []
    asked = [""] * len(answer) if prompts is None else question_texts(prompts)
    stated = stated_texts(completions, tag, prompts, openings)
    for text, gold, question in zip(stated, answer, asked, strict=True):
        letter = label_of(str(gold))
        if gold is None:
            rewards.append(None)
        elif not letter:
            wrong = f"the answer column holds {str(gold)[:60]!r}, which is no option's letter"
            rewards.append(Wrong(f"{wrong}: use exact_match, or name another column"))
        else:
            rewards.append(float(text is not None and chosen(text, question) == letter))
    return rewards


def _gold_number(gold: str) -> Number | None:
    """The number that a gold answer is, or that a solution ends on."""
    whole = read_number(gold, evaluated=False)
    return stated_number(gold, evaluated=False) if whole is None else whole


@any_gold
def place_match(
    *,
    completions: Sequence[Any],
    answer: Sequence[Any],
    openings: Sequence[str] | None = None,
) -> list[float | None]:
    """The share of characters that stand where the `answer` column has them, in [0, 1].

    Less the blanks around either text; counted over the longer of the two, so that neither rambling
    nor stopping short pays. A dense stand-in for `exact_match` where a policy gets nothing right
    yet. None where the column is empty.
    """
    pairs = zip(stated_texts(completions, None, openings=openings), answer, strict=True)
    return [
        None if gold is None else _agreeing((stated or "").strip(), str(gold).strip())
        for stated, gold in pairs
    ]


def _agreeing(stated: str, gold: str) -> float:
    agreeing = sum(a == b for a, b in zip(stated, gold, strict=False))
    return agreeing / max(len(stated), len(gold), 1)


def format_match(
    *,
    completions: Sequence[Any],
    regex: str | None = None,
    tags: Sequence[str] | None = None,
    openings: Sequence[str] | None = None,
) -> list[float | Wrong]:
    """1 where `regex` is found in the text, or the text is made of `tags`; else 0.

    `^` and `$` are the ends of the text (blanks around it aside), `.` matches newlines too.
    `tags = ["think", "answer"]` asks for `<think>…</think> <answer>…</answer>` and nothing else.
    `Wrong` where the search of a text takes more than 5 seconds of computing.
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
        raise KeelError(f"regex = {regex!r} is no regular expression: {error}") from None
    slow = Wrong(
        f"regex = {regex!r:.80} takes more than {SECONDS} s or 1 GiB on the text: avoid repetition "
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
    completions: Sequence[Any],
    tag: str | None,
    prompts: Sequence[Any] | None = None,
    openings: Sequence[str] | None = None,
) -> list[str | None]:
    """The text of each completion after its thoughts, or in its last tag.

    None without the tag, if a thought is not closed, and if the text only repeats its prompt.
    """
    openings = [""] * len(completions) if openings is None else openings
    stated = [
        answer_part(text, opening)
        for text, opening in zip(texts(completions, openings), openings, strict=True)
    ]
    if tag is not None:
        stated = [None if text is None else in_tag(text, tag) for text in stated]
    if prompts is None:
        return stated
    return [
        None if text is None or only_repeats(text, question) else text
        for text, question in zip(stated, question_texts(prompts), strict=True)
    ]


def question_texts(prompts: Sequence[Any]) -> list[str]:
    """The words of each prompt."""
    return [p if isinstance(p, str) else "\n".join(map(text_of, p)) for p in prompts]


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """What an answer of `length` tokens gets for its length, in [−1, 0].

    0 up to `max_tokens − cache`; ((max_tokens − cache) − length) / cache over the last `cache`
    tokens of the budget; −1 beyond it. DAPO, arXiv 2503.14476, equation 13. `cache` 0 punishes
    only what is beyond the budget.
    """
    free = max_tokens - cache
    if length <= free:
        return 0.0
    if length <= max_tokens:
        return (free - length) / cache
    return -1.0


BUILT_IN: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (exact_match, numeric_match, choice, place_match, format_match, length, repetition)
}
"""Built-ins that are plain functions, by the name that a recipe uses."""
