"""What the rewards say of the right answers that the tasks know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from keel.config.sources import Rewards, RewardSource
from keel.data.tasks import stored
from keel.models.chat import encode_text
from keel.preflight.prompt_stats import places_of
from keel.rewards.registry import TASK, NamedReward
from keel.rewards.scorer import Scorer
from keel.rewards.validation import Wrong
from keel.types import Completion, Group, KeelError, Prompt, Task

RIGHT = ("exact_match", "numeric_match", "place_match", "math", "code", TASK)
"""Built-ins that give 1 for a right answer."""
FAILED = -math.inf
"""Where a reward fails on a gold answer."""
READABLE = ("numeric_match", "math")
"""Built-ins that read the gold answer, and stop where they cannot."""
SHOWN = 32
"""Prompts whose gold answers are scored."""


@dataclass(frozen=True, eq=False)
class Gold:
    """The gold answers of the batch's prompts, as completions, and what each reward gave.

    `best` is, by reward, the most that a gold answer got in any shape (bare, in tags, boxed, ...),
    a prompt each; None where the reward has nothing to judge by. `unwritable` says why the
    tokenizer cannot spell an answer. `wrong` is what functions of the user's gave to another
    prompt's gold answer in its place.
    """

    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    best: Mapping[str, tuple[float | None, ...]]
    unwritable: tuple[str, ...] = ()
    wrong: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


def judged_by_gold(source: RewardSource, function: NamedReward) -> bool:
    """Whether a reward says right or wrong, by the gold answer, and learned from."""
    if source.function in RIGHT or function.function is None:
        return True
    own = ":" in source.function
    return own and "answer" in (*function.required, *function.optional)


def gold_of(
    prompts: Sequence[Prompt],
    tasks: Mapping[str, Task],
    functions: Sequence[tuple[RewardSource, NamedReward]],
    tokenizer: Any,
    rewards: Rewards,
) -> Gold | None:
    """The gold answers scored; None where no task knows any.

    Raises KeelError where a reward fails on one as it stands, and `rewards` says to stop then.
    """
    known: list[Prompt] = []
    texts: list[str] = []
    lengths: list[int] = []
    unwritable: list[str] = []
    for prompt in prompts[:SHOWN]:
        text = tasks[prompt.task].gold(prompt)
        if text is None:
            continue
        try:
            ids = encode_text(text, f"the gold answer of {prompt.id!r}", tokenizer)
        except KeelError as error:
            unwritable.append(str(error))
            continue
        known.append(prompt)
        texts.append(text)
        lengths.append(len(ids) + 1)
    if not known and not unwritable:
        return None
    judging = [(s, f) for s, f in functions if judged_by_gold(s, f)]
    best: dict[str, list[float | None]] = {f.name: [None] * len(known) for _, f in judging}
    for number, shape in enumerate(shapes([source for source, _ in judging])):
        on_error = rewards.on_error if number == 0 else "skip"
        left = [at for at in range(len(known)) if any(_short(best[n][at]) for n in best)]
        if not left or not judging:
            break
        answered = [Group(known[at], (_answer(shape.format(texts[at]), tokenizer),)) for at in left]
        for name, values in _scored(answered, tasks, judging, rewards.timeout, on_error).items():
            for at, value in zip(left, values, strict=True):
                best[name][at] = _most(best[name][at], value)
    return Gold(
        tuple(known),
        tuple(texts),
        tuple(lengths),
        {name: tuple(values) for name, values in best.items()},
        tuple(unwritable),
        _wrong(known, texts, tasks, judging, (tokenizer, rewards.timeout)),
    )


def _wrong(
    known: Sequence[Prompt],
    texts: Sequence[str],
    tasks: Mapping[str, Task],
    judging: Sequence[tuple[RewardSource, NamedReward]],
    rest: tuple[Any, float],
) -> dict[str, tuple[float | None, ...]]:
    """What the user's functions give to the next gold answer that is another one."""
    own = [(s, f) for s, f in judging if ":" in s.function]
    if not own or len(set(texts)) < 2:
        return {}
    tokenizer, timeout = rest
    others = [
        next(t for t in (*texts[at:], *texts[:at]) if t != text) for at, text in enumerate(texts)
    ]
    answered = [
        Group(prompt, (_answer(text, tokenizer),))
        for prompt, text in zip(known, others, strict=True)
    ]
    said = _scored(answered, tasks, own, timeout, "skip")
    return {name: tuple(None if v == FAILED else v for v in vs) for name, vs in said.items()}


def unreadable_gold(
    tasks: Mapping[str, Task], functions: Sequence[tuple[RewardSource, NamedReward]]
) -> None:
    """Raise KeelError for a stored train row whose answer a built-in reward cannot read.

    Of up to `asking.STORED` rows of each task, evenly spread.
    """
    for task in tasks.values():
        data = stored(task)
        if data is None or data.answer is None:
            continue
        side = data.sides["train"]
        places = places_of(task)
        answers = [str(data.prompt("train", at).columns["answer"]) for at in places]
        for source, function in functions:
            if source.function not in READABLE or function.function is None:
                continue
            said = function.function(
                completions=[""] * len(answers), answer=answers, **function.options
            )
            for at, one in zip(places, said, strict=True):
                if isinstance(one, Wrong):
                    place = side.where.place(side.entries[at].line)
                    raise KeelError(f"{place}: reward {function.name!r}: {one.why}")


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What stands round an answer."""

    before: str
    behind: str

    def format(self, text: str) -> str:
        return f"{self.before}{text}{self.behind}"


def shapes(sources: Sequence[RewardSource]) -> list[AnswerShape]:
    """The shapes in which these rewards may want an answer, the bare one first."""
    tags = [str(s.options["tag"]) for s in sources if s.options.get("tag")]
    own = any(":" in s.function or s.function == TASK for s in sources)
    tags += ["answer"] if own else []
    found = [
        AnswerShape("", ""),
        *(AnswerShape(f"<{tag}>", f"</{tag}>") for tag in dict.fromkeys(tags)),
    ]
    if own:
        found.append(AnswerShape("<think>\n\n</think>\n<answer>", "</answer>"))
    if own or any(s.function in ("math", "numeric_match") for s in sources):
        found += [AnswerShape("\\boxed{", "}"), AnswerShape("#### ", "")]
    if own or any(s.function == "code" for s in sources):
        found.append(AnswerShape("```python\n", "\n```"))
    return found


def _scored(
    groups: Sequence[Group],
    tasks: Mapping[str, Task],
    functions: Sequence[tuple[RewardSource, NamedReward]],
    timeout: float,
    on_error: Literal["stop", "skip"],
) -> dict[str, list[float | None]]:
    """What each function says, none of them shut out by another or left to watch."""
    alone = [
        replace(f, gate_below=None, gated_reward=0.0, weight=1.0, normalise="none")
        for _, f in functions
    ]
    # Not closed: the functions are the batch's scorer's, which closes them.
    scored = Scorer(alone, tasks, timeout=timeout, on_error=on_error)(groups, 0)
    out = {f.name: [judged[0].components[f.name] for judged in scored.verdicts] for f in alone}
    for name in scored.failures:
        out[name] = [FAILED if value is None else value for value in out[name]]
    return out


def _answer(text: str, tokenizer: Any) -> Completion:
    """A text as though the policy had written it, its end too."""
    try:
        ids = encode_text(text, "the gold answer", tokenizer)
    except KeelError:  # what stands round it is no part of the alphabet
        ids = []
    eos = tokenizer.eos_token_id
    tokens = np.array([*ids, *([] if eos is None else [eos])], dtype=np.int64)
    return Completion(
        tokens=tokens,
        log_probs=np.zeros(len(tokens), dtype=np.float32),
        written=np.ones(len(tokens), dtype=np.bool_),
        finish="eos",
        text=text,
    )


def _short(value: float | None) -> bool:
    return value is None or value < 1


def _most(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)
