"""What a stage's rewards give to its first batch and to the right answers that its tasks know.

They may refuse right answers, never vary, or never be earned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from keel.analysis.statistics import wilson_interval
from keel.config.sources import Rewards
from keel.data.mixture import UserTask, stored
from keel.models.text import encode_text
from keel.preflight.batch import CUT, SAMPLES, TrialBatch
from keel.preflight.context import (
    Finding,
    PromptStats,
    SamplingPlan,
    Severity,
    StageContext,
    found,
    interval,
    percent,
    quantile,
    surely_more,
)
from keel.preflight.prompts import inspected_places
from keel.rewards.code import CodeReward
from keel.rewards.outputs import Wrong
from keel.rewards.registry import TASK, NamedReward
from keel.rewards.scorer import Scorer
from keel.training.rollout import all_alike
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Task, shorten

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
FLAT = 0.6
"""A third to a half of equal groups is common in good runs (all right, or all wrong): only if
surely more than this share is equal does a step mostly sample in vain. Eight groups of eight, or 28
of 32, are so sure."""


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


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """What a stage's first step samples, its rewards, and what they give to the gold answers.

    `results` are empty if no reward was called; `judging` is the reward that evaluation counts
    right answers by; `partial`: some rewards could not be called.
    """

    plan: SamplingPlan
    stats: PromptStats
    batch: TrialBatch
    results: Sequence[Sequence[RewardResult]]
    gold: Gold | None
    rewards: Sequence[NamedReward]
    judging: NamedReward | None
    partial: bool

    def values(self, name: str) -> list[float]:
        """The values that a reward gave to the samples."""
        every = (v.components.get(name) for judged in self.results for v in judged)
        return [value for value in every if value is not None]

    def gold_values(self, name: str) -> list[float]:
        """The best values that a reward gave to the gold answers it can judge."""
        best = () if self.gold is None else self.gold.best.get(name, ())
        return [value for value in best if value is not None]


def check_gold(context: StageContext, scored: ScoredBatch) -> None:
    """What the gold answers show of the tokenizer, the budget and the rewards."""
    plan, stats, gold = scored.plan, scored.stats, scored.gold
    if gold is None:
        return
    n = len(gold.known) + len(gold.unwritable)
    context.figures["gold answers"] = n
    if gold.unwritable:
        facts = {"count": len(gold.unwritable), "n": n, "reason": gold.unwritable[0]}
        context.add(found("gold-unwritable", "model.build.alphabet", **facts))
    budget_key = plan.setting("max_tokens")
    context.add(gold_over_budget(gold.lengths, plan.sampling.rollout.max_tokens, budget_key))
    users = any(isinstance(task, UserTask) for task in stats.source.tasks.values())
    refused, texts = False, [text for _, text in gold.known]
    for reward in scored.rewards:
        name, function = reward.name, reward.source.function
        values = scored.gold_values(name)
        if not values:
            continue
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            context.figures[f"gold answers, {name}"] = round(float(np.mean(finite)), 3)
        full = function in RIGHT and not (function == TASK and users)
        own = ":" in function
        task = f"{plan.key}{stats.task_key(gold.known[0][0])}"
        finding = gold_refused(
            name, texts, gold.best[name], 1.0 if full else 1e-9, scored.values(name),
            f"{plan.key}rewards.functions" if own else f"{task}.answer", gold.wrong.get(name, ()),
            own_reward_fix(stats.conversations, task) if own else OTHER_COLUMN,
        )  # fmt: skip
        refused |= finding is not None
        context.add(finding)
    evaluation = plan.sampling.evaluation
    if refused or evaluation is None or not evaluation.prompts or scored.judging is None:
        return
    name, key = scored.judging.name, f"{plan.key}evaluation.threshold"
    threshold = evaluation.threshold
    context.add(
        threshold_unreached(name, scored.gold_values(name), scored.values(name), threshold, key)
    )


def check_sampled_rewards(context: StageContext, scored: ScoredBatch) -> None:
    """What the batch's rewards show, as far as policy and rewards are those of the stage."""
    plan, batch = scored.plan, scored.batch
    key, rollout = f"{plan.key}rewards.functions", plan.sampling.rollout
    for function in scored.rewards:
        values = scored.values(function.name)
        if values:
            context.figures[f"reward {function.name} (mean)"] = round(float(np.mean(values)), 4)
    algorithm = plan.sampling.algorithm
    if algorithm is not None and not algorithm.needs_reward:
        return
    totals = [value for judged in scored.results for value in _rewards_of(judged)]
    if not totals and not scored.partial and batch.completions >= SAMPLES:
        context.add(found("reward-none", key, n=batch.completions))
    if not totals or not batch.whole:
        return
    never = [
        reward_zero(f.name, scored.values(f.name), scored.gold_values(f.name), key)
        for f in scored.rewards
        if f.source.weight
    ]
    context.add(*never)
    if scored.partial:
        return
    if not any(never):
        texts = {c.text for group in batch.groups for c in group.completions}
        constant = reward_constant(totals, len(texts), *_flattened(scored, key))
        never.append(constant)
        context.add(constant)
    if any(never) or any(one.kind == "gold-refused" for one in context.findings):
        return
    dynamic = rollout.dynamic_sampling
    of_steps = algorithm is not None and algorithm.needs_steps
    flat = sum(all_alike(one, of_steps) if dynamic else _flat(one) for one in scored.results)
    groups = len(scored.results)
    context.figures["groups with equal rewards"] = f"{flat} of {groups} ({interval(flat, groups)})"
    if context.stage.compares or dynamic:
        refills = rollout.max_refills if dynamic else None
        size_key = plan.setting("group_size")
        context.add(zero_variance(flat, groups, batch.size.members, refills, size_key))


def _flattened(scored: ScoredBatch, key: str) -> tuple[str, str | None]:
    """The key of a gate or a clip that makes all rewards equal, and what it does."""
    weighed = [reward for reward in scored.rewards if reward.source.weight]
    for at, reward in enumerate(scored.rewards):
        values = scored.values(reward.name)
        if values and reward.gates(max(values)):
            return f"{key}.{at}.gate_below", f"the gate {reward.name!r} is shut for each of them"
        cut = {reward.clipped(value) for value in values}
        if weighed == [reward] and len(cut) == 1 and len(set(values)) > 1:
            return f"{key}.{at}.clip", f"clip makes {cut.pop():g} of every value"
    return key, None


def _rewards_of(judged: Sequence[RewardResult]) -> list[float]:
    """What a group's advantages are made of: rewards of steps, if there are any."""
    steps = [step.reward for result in judged for step in result.steps]
    return steps or [v.reward for v in judged if v.reward is not None]


def _flat(judged: Sequence[RewardResult]) -> bool:
    return len(set(_rewards_of(judged))) <= 1


# ---------------------------------------------------------------- gold answers


def judged_by_gold(reward: NamedReward) -> bool:
    """Whether a reward decides between right and wrong by the gold answer."""
    name = reward.source.function
    if name in RIGHT or reward.function is None:
        return True
    return ":" in name and "answer" in (*reward.required, *reward.optional)


def gold_of(
    prompts: Sequence[Prompt],
    tasks: Mapping[str, Task],
    functions: Sequence[NamedReward],
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
        answers: Sequence[tuple[Prompt, str]],
        rated: Sequence[NamedReward],
        on_error: Literal["stop", "skip"],
    ) -> dict[str, list[float | None]]:
        groups = [_answered(prompt, text, tokenizer) for prompt, text in answers]
        return _scored(groups, tasks, rated, rewards.timeout, on_error)

    judging = [reward for reward in functions if judged_by_gold(reward)]
    best: dict[str, list[float | None]] = {f.name: [None] * len(known) for f in judging}
    for number, shape in enumerate(shapes(judging)):
        left = [at for at in range(len(known)) if any((best[n][at] or 0) < 1 for n in best)]
        if not left:
            break
        answers = [(known[at][0], shape.replace("{}", known[at][1])) for at in left]
        values = scored(answers, judging, rewards.on_error if number == 0 else "skip")
        for name, own in values.items():
            for at, value in zip(left, own, strict=True):
                given = [v for v in (best[name][at], value) if v is not None]
                best[name][at] = max(given, default=None)
    wrong: dict[str, list[float | None]] = {}
    users = [reward for reward in judging if ":" in reward.source.function]
    texts = [text for _, text in known]
    if users and len(set(texts)) > 1:
        swapped = [
            (prompt, next(t for t in (*texts[at:], *texts[:at]) if t != text))
            for at, (prompt, text) in enumerate(known)
        ]
        for name, own in scored(swapped, users, "skip").items():
            wrong[name] = [None if value == FAILED else value for value in own]
    return Gold(known, lengths, best, unwritable, wrong)


def shapes(rewards: Sequence[NamedReward]) -> list[str]:
    """The shapes in which these rewards may want an answer, `{}`, the bare one first."""
    sources = [reward.source for reward in rewards]
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
    functions: Sequence[NamedReward],
    timeout: float,
    on_error: Literal["stop", "skip"],
) -> dict[str, list[float | None]]:
    """The values of each function, without gates and weights."""
    plain = [
        f.changed(gate_below=None, gated_reward=0.0, weight=1.0, normalise="none")
        for f in functions
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
    completion = Completion.given([*ids, *([] if eos is None else [eos])], text)
    return Group(replace(prompt, opening=""), (completion,))  # its thoughts are closed


def check_readable(tasks: Mapping[str, Task], functions: Sequence[NamedReward]) -> None:
    """Raise KeelError for a stored train row whose answer a built-in reward cannot read.

    Of up to `prompts.STORED` rows of each task, evenly spread.
    """
    readers = [f for f in functions if f.source.function in READABLE and f.function is not None]
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
    solved = reward.trivial([prompt.columns for prompt in prompts])
    weak = [(prompt.id, passed) for prompt, passed in zip(prompts, solved, strict=True) if passed]
    if not weak:
        return None
    shown = "; ".join(f"{at!r}: {', '.join(passed)}" for at, passed in weak[:5])
    severity: Severity = "error" if len(weak) == len(prompts) else "warning"
    facts = {"name": name, "weak": len(weak), "n": len(prompts), "shown": shown}
    return found("weak-tests", key, severity, **facts)


# ---------------------------------------------------------------- findings


def gold_over_budget(lengths: Sequence[int], budget: int, key: str) -> Finding | None:
    """Gold answers, their end included, that do not fit into the budget."""
    over = sum(n > budget for n in lengths)
    if not surely_more(over, len(lengths), CUT):
        return None
    held = quantile(lengths, 0.95)
    return found(
        "gold-over-budget", key, "error" if over == len(lengths) else "warning",
        share=percent(over / len(lengths)), budget=budget, over=over, n=len(lengths),
        longest=max(lengths), held=held,
    )  # fmt: skip


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
    return found(
        "gold-refused", key, "error" if len(refused) == len(judged) else "warning",
        name=name, refused=len(refused), n=len(judged), first=shorten(text, 60), got=got, fix=fix,
    )  # fmt: skip


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
    facts = {"name": name, "most": max(best), "n": len(best), "threshold": threshold}
    return found("threshold-unreached", key, **facts)


def reward_zero(
    name: str, values: Sequence[float], gold: Sequence[float], key: str
) -> Finding | None:
    """A reward that no sample earns, though gold answers do.

    A warning: so few samples cannot tell never from seldom, and seldom is enough to learn from.
    """
    if len(values) < SAMPLES or any(values) or max(gold, default=0) <= 0:
        return None
    high = percent(wilson_interval(0, len(values)).high)
    mean = sum(gold) / len(gold)
    return found("reward-zero", key, name=name, n=len(values), high=high, mean=mean)


def reward_constant(
    totals: Sequence[float], texts: int, key: str, why: str | None = None
) -> Finding | None:
    """The same reward for every sample, of which `texts` differ from each other.

    `why` describes the gate or the clip that makes them so, whose key `key` then is.
    """
    if len(totals) < SAMPLES or max(totals) > min(totals):
        return None
    what = "the reward never varies, so nothing can be learned from it"
    fix = "use a reward that differs between answers, or harder prompts"
    if why is not None:
        fix = "set it to what some of the answers reach, or leave it out"
    elif texts == 1:
        what = "every sample is the same, and so is its reward"
        key = key.rpartition("rewards")[0] + "rollout.temperature"
        fix = "raise it, or give different prompts"
    facts = {"value": totals[0], "n": len(totals), "texts": texts, "fix": fix}
    return found("reward-constant", key, what=what, why="" if why is None else f"; {why}", **facts)


def zero_variance(
    flat: int, groups: int, members: int, refills: int | None, key: str
) -> Finding | None:
    """Groups in which all completions have the same reward; `refills` if these are replaced."""
    if members < 2 or not surely_more(flat, groups, FLAT):
        return None
    refilled = ""
    if refills is not None:
        rounds = groups / (groups - flat) if flat < groups else None
        wanted = (
            "no number of refills fills" if rounds is None else f"about {rounds:.0f} rounds fill"
        )
        refilled = f"; dynamic sampling replaces them: {wanted} a step, {refills + 1} are made"
    return found(
        "zero-variance", key, share=percent(flat / groups), flat=flat, groups=groups,
        members=members, interval=interval(flat, groups), refilled=refilled,
    )  # fmt: skip
