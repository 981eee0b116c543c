"""What the rewards give to the right answers that the tasks know, and what that shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from keel.config.sources import Rewards, RewardSource
from keel.data.tasks import stored
from keel.models.text import encode_text
from keel.preflight.batch import CUT
from keel.preflight.finding import Finding, percent, quantile, shorten, surely_more
from keel.preflight.prompts import inspected_places
from keel.rewards.code import CodeReward
from keel.rewards.outputs import Wrong
from keel.rewards.registry import TASK, NamedReward
from keel.rewards.scorer import Scorer
from keel.types import Completion, Group, KeelError, Prompt, Task

RIGHT = ("exact_match", "numeric_match", "choice", "place_match", "math", "code", TASK)
"""Built-ins that give 1 for a right answer."""
FAILED = -math.inf
"""Where a reward fails on a gold answer."""
READABLE = ("numeric_match", "choice", "math")
"""Built-ins that read the gold answer, and stop if they cannot."""
SHOWN = 32
"""Prompts whose gold answers are scored."""
REFUSED = 0.1
"""A few gold answers of real data are wrong or oddly written; from one in ten on, surely (the
interval's lower end), the reward reads them otherwise than they are written."""
OTHER_COLUMN = "name the column that holds the answer alone (tasks.answer), or another reward"

Rated = tuple[RewardSource, NamedReward]
OnError = Literal["stop", "skip"]


@dataclass(frozen=True, eq=False)
class Gold:
    """The gold answers of the batch's prompts, as completions, and what each reward gave.

    `best` is, by reward, the most that a gold answer got in any shape (bare, in tags, boxed, ...),
    one per prompt; None if the reward has nothing to judge by. `unwritable` are the reasons why
    the tokenizer cannot spell answers. `wrong` is what the user's functions gave to another
    prompt's gold answer instead.
    """

    known: Sequence[tuple[Prompt, str]]
    lengths: Sequence[int]
    best: Mapping[str, Sequence[float | None]]
    unwritable: Sequence[str]
    wrong: Mapping[str, Sequence[float | None]]


def judged_by_gold(source: RewardSource, function: NamedReward) -> bool:
    """Whether a reward decides between right and wrong by the gold answer."""
    if source.function in RIGHT or function.function is None:
        return True
    return ":" in source.function and "answer" in (*function.required, *function.optional)


def gold_of(
    prompts: Sequence[Prompt],
    tasks: Mapping[str, Task],
    functions: Sequence[Rated],
    tokenizer: Any,
    rewards: Rewards,
) -> Gold | None:
    """The gold answers scored; None if no task knows any.

    Raises KeelError if a reward fails on one as it stands, and `rewards` asks to stop then.
    """
    known: list[tuple[Prompt, str]] = []
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
        known.append((prompt, text))
        lengths.append(len(ids) + 1)
    if not known and not unwritable:
        return None

    def scored(
        answers: Sequence[tuple[Prompt, str]], rated: Sequence[Rated], on_error: OnError
    ) -> dict[str, list[float | None]]:
        groups = [_answered(prompt, text, tokenizer) for prompt, text in answers]
        return _scored(groups, tasks, rated, rewards.timeout, on_error)

    judging = [(s, f) for s, f in functions if judged_by_gold(s, f)]
    best: dict[str, list[float | None]] = {f.name: [None] * len(known) for _, f in judging}
    for number, shape in enumerate(shapes([source for source, _ in judging])):
        on_error = rewards.on_error if number == 0 else "skip"
        left = [at for at in range(len(known)) if any((best[n][at] or 0) < 1 for n in best)]
        if not left:
            break
        answers = [(known[at][0], shape.replace("{}", known[at][1])) for at in left]
        for name, values in scored(answers, judging, on_error).items():
            for at, value in zip(left, values, strict=True):
                given = [v for v in (best[name][at], value) if v is not None]
                best[name][at] = max(given, default=None)
    wrong: dict[str, list[float | None]] = {}
    own = [(s, f) for s, f in judging if ":" in s.function]
    texts = [text for _, text in known]
    if own and len(set(texts)) > 1:
        swapped = [
            (prompt, next(t for t in (*texts[at:], *texts[:at]) if t != text))
            for at, (prompt, text) in enumerate(known)
        ]
        wrong = scored(swapped, own, "skip")
    return Gold(
        known,
        lengths,
        best,
        unwritable,
        {name: [None if v == FAILED else v for v in values] for name, values in wrong.items()},
    )


def check_readable(tasks: Mapping[str, Task], functions: Sequence[Rated]) -> None:
    """Raise KeelError for a stored train row whose answer a built-in reward cannot read.

    Of up to `prompts.STORED` rows of each task, evenly spread.
    """
    readers = [f for s, f in functions if s.function in READABLE and f.function is not None]
    for task in tasks.values():
        data = stored(task)
        if data is None or data.answer is None:
            continue
        places = inspected_places(task)
        answers = [data.prompt("train", at).columns["answer"] for at in places]
        for reader in readers:
            assert reader.function is not None
            texts = [""] * len(answers)
            values = reader.function(completions=texts, answer=answers, **reader.options)
            for at, value in zip(places, values, strict=True):
                if isinstance(value, Wrong):
                    place = data.splits["train"][at].row.place
                    raise KeelError(
                        f"{place}: reward {reader.name!r}: {value.why}", key="tasks.answer"
                    )


def weak_tests(
    name: str, reward: CodeReward, prompts: Sequence[Prompt], key: str
) -> Finding | None:
    """Tests that pass an answer which solves nothing: an empty list, `nan`, a raise, and so on."""
    found = reward.trivial([prompt.columns for prompt in prompts])
    weak = [(prompt.id, passed) for prompt, passed in zip(prompts, found, strict=True) if passed]
    if not weak:
        return None
    shown = "; ".join(f"{at!r}: {', '.join(passed)}" for at, passed in weak[:5])
    return Finding(
        "weak-tests",
        f"the tests of reward {name!r} pass answers that solve nothing",
        f"{len(weak)} of {len(prompts)} examples; the first, by what functions give: {shown}",
        key,
        "compare with expected values, and lengths first (np.isclose([], [4]).all() is true), or "
        "leave these examples out",
        "error" if len(weak) == len(prompts) else "warning",
    )


def shapes(sources: Sequence[RewardSource]) -> list[str]:
    """The shapes in which these rewards may want an answer, `{}`, the bare one first."""
    tags = [str(s.options["tag"]) for s in sources if s.options.get("tag")]
    own = any(":" in s.function or s.function == TASK for s in sources)
    tags += ["answer"] if own else []
    found = ["{}", *(f"<{tag}>{{}}</{tag}>" for tag in dict.fromkeys(tags))]
    if own:
        found.append("<think>\n\n</think>\n<answer>{}</answer>")
    if own or any(s.function in READABLE for s in sources):
        found += ["\\boxed{{}}", "#### {}"]
    if own or any(s.function == "code" for s in sources):
        found.append("```python\n{}\n```")
    return found


def _scored(
    groups: Sequence[Group],
    tasks: Mapping[str, Task],
    functions: Sequence[Rated],
    timeout: float,
    on_error: OnError,
) -> dict[str, list[float | None]]:
    """The values of each function, without gates and weights."""
    plain = [
        f.changed(gate_below=None, gated_reward=0.0, weight=1.0, normalise="none")
        for _, f in functions
    ]
    # Not closed: the functions are the batch's scorer's, which closes them.
    scored = Scorer(plain, tasks, timeout=timeout, on_error=on_error)(groups, 0)
    out = {f.name: [judged[0].components[f.name] for judged in scored.results] for f in plain}
    for name in scored.failures:
        out[name] = [FAILED if value is None else value for value in out[name]]
    return out


def _answered(prompt: Prompt, text: str, tokenizer: Any) -> Group:
    """A group of one completion, as if the policy had written the text and ended it."""
    try:
        ids = encode_text(text, "the gold answer", tokenizer)
    except KeelError:  # the characters round the answer may be unknown to the tokenizer
        ids = []
    eos = tokenizer.eos_token_id
    tokens = np.array([*ids, *([] if eos is None else [eos])], dtype=np.int64)
    completion = Completion(
        tokens=tokens,
        log_probs=np.zeros(len(tokens), dtype=np.float32),
        written=np.ones(len(tokens), dtype=np.bool_),
        finish="eos",
        text=text,
    )
    return Group(replace(prompt, opening=""), (completion,))  # its thoughts are closed


# ---------------------------------------------------------------- findings


def gold_over_budget(lengths: Sequence[int], budget: int, key: str) -> Finding | None:
    """Gold answers, their end included, that do not fit into the budget."""
    over = sum(n > budget for n in lengths)
    if not surely_more(over, len(lengths), CUT):
        return None
    held = quantile(lengths, 0.95)
    return Finding(
        "gold-over-budget",
        f"{percent(over / len(lengths))} of the right answers are longer than the budget of "
        f"{budget} tokens",
        f"{over} of {len(lengths)} gold answers, end-of-sequence token included; the longest has "
        f"{max(lengths)} tokens, {held} hold 95 %",
        key,
        f"raise it to {held} or more",
        "error" if over == len(lengths) else "warning",
    )


def gold_unwritable(reasons: Sequence[str], n: int, key: str) -> Finding | None:
    """Gold answers that the tokenizer has no tokens for."""
    if not reasons:
        return None
    return Finding(
        "gold-unwritable",
        "the policy cannot write right answers: its tokenizer does not know the characters",
        f"{len(reasons)} of {n} gold answers; {reasons[0]}",
        key,
        "add the characters to model.build.alphabet, or use another tokenizer",
        "error",
    )


def gold_refused(
    name: str,
    texts: Sequence[str],
    best: Sequence[float | None],
    full: float,
    samples: Sequence[float],
    key: str,
    wrong: Sequence[float | None] = (),
    fix: str = OTHER_COLUMN,
) -> Finding | None:
    """Gold answers that get less than `full`, in whatever shape, and no more than the worst sample.

    For a function of the user's, `full` is what is more than nothing. `wrong` is what another
    prompt's gold answer gets in the place of each: if 0 is the most there is, that is less.
    """
    worst = min(samples, default=0.0)
    others = [*wrong, *[None] * (len(texts) - len(wrong))]
    judged = [(t, v, w) for t, v, w in zip(texts, best, others, strict=True) if v is not None]
    refused = [
        (t, v)
        for t, v, w in judged
        if v < full and (full >= 1 or (v <= worst and (w is None or v <= w)))
    ]
    if not surely_more(len(refused), len(judged), REFUSED):
        return None
    text, value = refused[0]
    got = f"{value:g}" if math.isfinite(value) else "an error"
    return Finding(
        "gold-refused",
        f"reward {name!r} does not accept the gold answer",
        f"{len(refused)} of {len(judged)} gold answers, {shorten(text, 60)!r} the first, get "
        f"{got}: as they stand, in tags, boxed",
        key,
        fix,
        "error" if len(refused) == len(judged) else "warning",
    )


def own_reward_fix(conversation: bool, task: str) -> str:
    """How to fix a function of the user's that refuses gold answers."""
    lists = "; in a conversation it gets lists of messages, not texts" if conversation else ""
    return (
        f"let the function read what the answer column holds{lists}, or name the column that holds "
        f"the answer alone ({task}.answer)"
    )


def threshold_unreached(
    name: str, best: Sequence[float], samples: Sequence[float], threshold: float, key: str
) -> Finding | None:
    """An evaluation that no gold answer passes, in whatever shape, nor any sample."""
    if not best or max([*best, *samples]) >= threshold:
        return None
    most = max(best)
    return Finding(
        "threshold-unreached",
        "no right answer passes the evaluation",
        f"reward {name!r} gives at most {most:g} to {len(best)} gold answers, and an answer passes "
        f"from {threshold:g} on",
        key,
        f"set it to {most:g}, or name another reward in evaluation.component",
    )
