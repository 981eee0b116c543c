"""Rewards that are made: of mathematics, of a language, and what a program returned.

The language is lingua's: exact, the same at every call, from text alone. In its low-accuracy mode,
which reads three letters at a time: for texts of 120 characters or more the other mode does the
same, and for shorter ones it takes a gigabyte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from statistics import mean
from typing import Any

from pydantic import model_validator

from keel.algorithms.terms import FrozenModel
from keel.config.fields import Count, Seconds
from keel.graders.answers import final_answer
from keel.graders.instructions import followed
from keel.graders.mathematics import Mathematics
from keel.platform.extras import install_command
from keel.rewards.outputs import Summary, Wrong
from keel.rewards.registry import Column, RewardContext, with_arguments
from keel.rewards.rules import Sample, samples, stated_texts, texts
from keel.types import KeelError


class MathOptions(FrozenModel):
    """The options of `math`."""

    timeout: Seconds = 5.0
    """Seconds for a completion."""
    workers: Count = 2
    """Processes that run at a time."""
    tag: str | None = None
    """The text is what stands in the last `<tag>…</tag>` (without one, 0)."""
    evaluated: bool = True
    """An answer that leaves arithmetic to do (`17 \\times 24`) is not that number."""
    strict: bool = True
    """False: math-verify reads the text and compares, as accuracies are published."""


def math(context: RewardContext, options: MathOptions) -> MathReward:
    """The reward of a mathematically right answer."""
    return MathReward(Mathematics(**options.model_dump(exclude={"tag"})), options.tag)


class MathReward:
    """1 if the text ends on what is mathematically the `answer` column's answer, else 0.

    None if the column is empty, and `Wrong` if its answer cannot be read. What cannot be read, or
    not compared within its time, is 0; the number that ran out of time or brought their process
    down is logged, and as `extracted` what each text ends on.
    """

    def __init__(self, mathematics: Mathematics, tag: str | None) -> None:
        self._mathematics = mathematics
        self._tag = tag
        self.abandon = mathematics.abandon
        self.close = mathematics.close

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        answer: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        openings: Sequence[str] | None = None,
        log_summary: Callable[[Sequence[Any], Summary], None] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
    ) -> list[float | Wrong | None]:
        found = samples(completions, answer, self._tag, openings, prompts)
        # An empty text is compared too: an answer column that cannot be read is always wrong.
        pairs = [(gold, one.text or "", one.question) for one in found for gold in one.golds]
        findings = self._mathematics.compare(pairs)
        known = dict(zip(pairs, findings, strict=True))

        def score(one: Sample, gold: str) -> float | Wrong:
            finding = known[gold, one.text or "", one.question]
            if finding == "unreadable gold":
                return Wrong(
                    f"the answer column holds {gold[:60]!r}, which cannot be read: use "
                    "exact_match, or name another column in task.answer"
                )
            return float(finding == "same")

        if log_summary is not None:
            log_summary(findings, _unfinished)
        if log_extra is not None:
            answers = [final_answer(one.text or "", words=True) for one in found]
            log_extra("extracted", [None if one is None else one.text for one in answers])
        return [one.best(partial(score, one)) for one in found]


def _unfinished(found: Sequence[str]) -> Mapping[str, float]:
    return {"math/timed_out": found.count("timed out"), "math/died": found.count("died")}


class LanguageOptions(FrozenModel):
    """The options of `language`."""

    wanted: str | None = None
    """The code of the language (ISO 639-1), such as "en"."""
    column: Column | None = None
    """The column with such a code."""
    share: bool = False
    """The reward is the share of the text's letters in sentences of that language."""

    @model_validator(mode="after")
    def _one_of_two(self) -> LanguageOptions:
        if (self.wanted is None) == (self.column is None):
            raise ValueError("set exactly one of the options wanted and column")
        return self


def language(context: RewardContext, options: LanguageOptions) -> Callable[..., Any]:
    """The reward of a text in the language that was asked for.

    1 if the text is most likely in it, else 0; its code and formulas aside. None if the text shows
    no language, such as a number, and if the column is empty; `Wrong` if the column names no
    language. Raises KeelError if lingua is missing.
    """
    check_language(options.wanted or "en")

    def score(text: str, code: Any) -> float | Wrong | None:
        if code is None:
            return None
        try:
            check_language(code)
        except KeelError as error:
            return Wrong(str(error))
        if options.share:
            return language_share(text, code)
        found = language_of(text)
        return None if found is None else float(found == code)

    def language(
        *, completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Wrong | None]:
        answers = texts(completions)
        wanted = columns[options.column] if options.column else [options.wanted] * len(answers)
        return list(map(score, answers, wanted))

    return with_arguments(language, ["completions", *([options.column] if options.column else [])])


class InstructionOptions(FrozenModel):
    """The options of `ifeval`."""

    partial: bool = False
    """The reward is the share of the prompt's instructions that are followed."""


def ifeval(context: RewardContext, options: InstructionOptions) -> InstructionReward:
    """The reward of a text that follows instructions which a program can check.

    Raises KeelError if lingua is missing.
    """
    check_language("en")
    return InstructionReward(options.partial)


class InstructionReward:
    """1 if a text follows all instructions of IFEval's columns, else 0.

    The share of all instructions that are followed, and both figures by the loose rule
    (`keel.graders.instructions.followed`), are in the metrics, and in evaluations.
    """

    figures = ("ifeval/instruction_strict", "ifeval/prompt_loose", "ifeval/instruction_loose")
    """Metrics that belong to an evaluation."""

    def __init__(self, partial: bool) -> None:
        self._partial = partial
        with_arguments(self, ("completions", *INSTRUCTIONS), ("openings", "log_summary"))

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        openings: Sequence[str] | None = None,
        log_summary: Callable[[Sequence[Any], Summary], None] | None = None,
        **columns: Sequence[Any],
    ) -> list[float]:
        rows = list(
            zip(
                stated_texts(completions, None, openings),
                *(columns[name] for name in INSTRUCTIONS),
                strict=True,
            )
        )
        strict, loose = (
            [
                followed(text or "", names, given, language_of, loose=loose)
                for text, names, given in rows
            ]
            for loose in (False, True)
        )
        if log_summary is not None:
            log_summary(list(zip(strict, loose, strict=True)), _followed)
        return [sum(one) / len(one) if self._partial else float(all(one)) for one in strict]


INSTRUCTIONS = ("instruction_id_list", "kwargs")
"""The columns of IFEval: the names of a prompt's instructions, and the arguments of each."""


def _followed(found: Sequence[tuple[list[bool], list[bool]]]) -> Mapping[str, float]:
    """Shares of prompts, and of instructions, whatever the prompt."""
    strict, loose = ([one for one in part if one] for part in zip(*found, strict=True))
    values = (chain(*strict), map(all, loose), chain(*loose))
    return dict(zip(InstructionReward.figures, (mean(map(float, v)) for v in values), strict=True))


class ReturnedOptions(FrozenModel):
    """The options of `returned`."""

    column: Column = "reward"
    """The column of what the program returned."""


def returned(context: RewardContext, options: ReturnedOptions) -> Callable[..., Any]:
    """What `rollout.program` returned with the completion: a number, or this column of a mapping.

    None if the program returned none, as one that the budget ended.
    """

    def returned(*, completions: Sequence[Any], **columns: Sequence[Any] | None) -> list[Any]:
        return list(columns.get(options.column) or [None] * len(completions))

    return with_arguments(returned, ["completions"], [options.column])


LEAST = 20
"""Texts of fewer letters show no language."""

# Each of these takes time in line with the text's length, whatever the text: a span that does not
# close is given up at the next that opens, and nothing is looked for from every place to the end.
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\begin\{(\w++\*?)\}(?:(?!\\begin\{).)*?\\end\{\1\}", re.DOTALL)
_SPANS = re.compile(
    r"\$\$(?:[^$\\]|\\.)*+\$\$|\$(?:[^$\\]|\\.)*+\$"  # mathematics
    r"|\\\((?:(?!\\\().)*?\\\)|\\\[(?:(?!\\\[).)*?\\\]"
    r"|</?[A-Za-z][^<>\n]*>"  # tags
    r"|https?://\S+"
    # A formula or a number, from where it begins: a $ within it opens nothing.
    r"|(?<![^\s。，、])[^\s。，、\d=+^_\\{}]*+[\d=+^_\\{}](?:[^\s。，、]*[^\s。，、.!?;:])?"
    r"|\\(?:[A-Za-z]+|\$)",
    re.DOTALL,
)
# What is left of one after a span; a full stop after it ends the sentence.
_TOKEN = re.compile(r"[^\s。，、]+")
_FORMULA = re.compile(r"[\d=+^_\\{}]")
_NAME = re.compile(r"(?<![^\W\d_])[A-Za-z](?![^\W\d_])")  # the names of quantities
# lingua takes time to the square of a word's length.
_LONG = re.compile(r"\S{200}")
# A character of these scripts is worth three letters.
_DENSE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_DENSE_LETTER = re.compile(f"[{_DENSE}]")
_SENTENCE = re.compile(rf"[^{_DENSE}.!?;。！？；।]+[.!?;।]*|[{_DENSE}][{_DENSE}，、\s]*[。！？；]*")


def check_language(code: str) -> None:
    """Raise KeelError if lingua is not installed, or knows no language of this code."""
    if code not in _codes():
        raise KeelError(
            f"no language {code!r}: give a two-letter code of ISO 639-1, of {' '.join(_codes())}"
        )


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language that a text is most likely in; None if none shows.

    Code, mathematics and tags do not count; fewer than 20 letters show nothing.
    """
    return _detect(prose(text))


def language_share(text: str, code: str) -> float | None:
    """The share of a text's letters that stand in passages of a language; None if none shows.

    A passage is a sentence, or several short ones that follow each other in one kind of script.
    Code, mathematics, tags, and passages of no language do not count.
    """
    wanted = total = 0
    for passage in _passages(prose(text)):
        found = _detect(passage)
        if found is not None:
            total += _letters(passage)
            wanted += _letters(passage) * (found == code)
    return wanted / total if total else None


def _passages(text: str) -> list[str]:
    passages: list[list[str]] = []
    last = 0  # letters of the last one
    for sentence in _SENTENCE.findall(text):
        letters = _letters(sentence)
        if passages and last < 2 * LEAST and _dense(passages[-1][0]) == _dense(sentence):
            passages[-1].append(sentence)
            last += letters
        elif letters:
            passages.append([sentence])
            last = letters
    return ["".join(sentences) for sentences in passages]


def _letters(text: str) -> int:
    """How many letters, in Latin ones' worth."""
    return sum(map(str.isalpha, text)) + 2 * len(_DENSE_LETTER.findall(text))


def _dense(text: str) -> bool:
    return _DENSE_LETTER.match(text) is not None


def prose(text: str) -> str:
    """A text without its code, mathematics, tags and links."""
    text = _CODE.sub(" ", text)
    for _ in range(3):  # environments in environments
        text = _ENVIRONMENT.sub(" ", text)
    return _NAME.sub(" ", _TOKEN.sub(_word, _SPANS.sub(" ", text)))


def _word(token: re.Match[str]) -> str:
    """A token that is not a formula or number; of one that is, what ends the sentence after it."""
    if not _FORMULA.search(token[0]):
        return token[0]
    return " " + token[0][len(token[0].rstrip(".!?;:")) :]


def _detect(text: str) -> str | None:
    if _letters(text) < LEAST:
        return None
    found = _detector().detect_language_of(_LONG.sub(r"\g<0> ", text))
    return None if found is None else str(found.iso_code_639_1.name).lower()


@cache
def _detector() -> Any:
    return _lingua().LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()


@cache
def _codes() -> tuple[str, ...]:
    every = _lingua().Language.all()
    return tuple(sorted(language.iso_code_639_1.name.lower() for language in every))


def _lingua() -> Any:
    try:
        import lingua
    except ImportError:
        raise KeelError(f"lingua is not installed: {install_command('language')}") from None
    return lingua
