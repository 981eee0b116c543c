"""A stage that samples, looked at: its prompts, a batch, its rewards, and what they give away."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from keel.config.judging import JudgingStage
from keel.config.schema import Recipe, RLStage, Stage
from keel.config.sources import RewardSource
from keel.insight.statistics import wilson_interval
from keel.models.policy import Policy
from keel.models.reward import RewardModel
from keel.pipelines import prompt_findings, sample_findings, token_findings
from keel.pipelines.asking import Asked, Prompted, prompted
from keel.pipelines.batch import Sampled, sample
from keel.pipelines.gold import RIGHT, Gold, gold_of
from keel.pipelines.judge_cost import judge_cost
from keel.pipelines.lengths import holding, quantile
from keel.pipelines.memory import rows_of, to_budget
from keel.pipelines.memory_passes import Extent
from keel.pipelines.seen import Seen, Trained
from keel.rewards.loading import TASK, NamedReward
from keel.rewards.score import Scorer
from keel.rewards.scoring import Here
from keel.tasks.user import UserTask
from keel.train.rewarding import load_rewards, scorer, surroundings
from keel.types import KeelError, Verdict


def look(
    seen: Seen, recipe: Recipe, stage: Stage, ask: Asked, policy: Policy, own: Trained
) -> None:
    """Prompts, batch, rewards and gold answers of what a stage samples."""
    source = read_prompts(seen, recipe, ask, policy)
    if source is None or not source.first:
        return
    seen.source = source
    _tokens(seen, ask, policy, source)
    rewards, waiting = _ready(ask.rewards.functions)
    for reward, why in waiting:
        seen.unseen.append(f"reward {reward.name or reward.function!r}: {why}")
    choice = ask.rewards.model_copy(update={"functions": rewards})
    try:
        functions = load_rewards(choice, surroundings(recipe, None, policy))
        judge = _scorer(ask, functions, source, bool(waiting))
    except KeelError as error:
        seen.stops("as its rewards are made", error, f"{ask.key}rewards.functions")
        return
    pairs = list(zip(rewards or (RewardSource(function=TASK),), judge.functions, strict=True))
    with closing(judge):
        start = time.perf_counter()
        batch = sample(policy, ask, source, judge, trial=own.by is not None)
        seen.work.sampling = time.perf_counter() - start
        _completions(seen, ask, batch, own)
        verdicts: tuple[tuple[Verdict, ...], ...] = ()
        gold: Gold | None = None
        try:
            gold = gold_of(
                source.first, source.tasks, pairs if _any(rewards, waiting) else [],
                policy.tokenizer, ask.rewards,
            )  # fmt: skip
            if _any(rewards, waiting):
                start = time.perf_counter()
                verdicts = judge(batch.groups, 1).verdicts
                seen.work.scoring = time.perf_counter() - start
        except KeelError as error:
            seen.stops("as its rewards are asked", error, f"{ask.key}rewards.functions")
    _costs(seen, ask, waiting, batch)
    if isinstance(stage, RLStage):
        _work(seen, stage, ask, batch, policy.context, own)
        seen.work.judges += judges_in(functions)
    elif isinstance(stage, JudgingStage):
        budget, twice = ask.rollout.max_tokens, 2 if _pairs(stage) else 1
        rows = [(Extent(row[0].before, budget),) * twice for row in rows_of(batch.groups)]
        seen.work.rows = [rows[at % len(rows)] for at in range(stage.batch_size)]
    _gold(seen, ask, gold, pairs, verdicts, source)
    if verdicts:
        _rewards(seen, ask, stage, batch, verdicts, (gold, pairs), (own, bool(waiting)))


def read_prompts(seen: Seen, recipe: Recipe, ask: Asked, policy: Policy) -> Prompted | None:
    """The prompts of what a stage samples, and what is to be said of them."""
    rollout = ask.rollout
    key = f"{ask.key}tasks"
    try:
        source = prompted(
            ask.tasks, ask.prompts, policy, recipe.seed, ask.seed,
            room=rollout.max_tokens, take=rollout.prompts_per_step, held=ask.heldout,
        )  # fmt: skip
    except KeelError as error:
        seen.stops("as its tasks are read", error, key)
        return None
    budget = f"{ask.key}{'' if ask.key.endswith('sampled.') else 'rollout.'}max_tokens"
    tell_prompts(seen, source, ask, rollout.max_tokens, budget)
    return source


def tell_prompts(seen: Seen, source: Prompted, ask: Asked, room: int, budget: str) -> None:
    """Figures and findings of prompts; `room` tokens are the answer's, which the key `budget`
    gives."""
    key = f"{ask.key}tasks"
    every = [n for lengths in source.lengths.values() for n in lengths]
    if source.rows is not None:
        seen.figures["train rows"] = source.rows
    if every:
        seen.figures |= {
            "prompt tokens (median)": quantile(every, 0.5),
            "prompt tokens (95 %)": quantile(every, 0.95),
            "prompt tokens (longest)": max(every),
        }
    own = ask.prompts.max_tokens is not None
    said = "prompts.max_tokens" if own else f"what {room} tokens of answer leave of the context"
    length_key = f"{ask.key}prompts.max_tokens" if own else budget
    before = len(seen.findings)
    for name, lengths in source.lengths.items():
        seen.add(prompt_findings.prompts_over_length(name, lengths, source.limit, said, length_key))
    if source.stopped is not None and not any(
        one.severity == "error" for one in seen.findings[before:]
    ):
        seen.stops("as its prompts are read", KeelError(source.stopped), key)
    rows = source.rows or 0
    seen.add(
        prompt_findings.unreadable(source.left_out, rows, f"{key}.bad_rows"),
        prompt_findings.repeated(source.repeated, rows, f"{key}.path"),
    )


# ---------------------------------------------------------------- details


def _tokens(seen: Seen, ask: Asked, policy: Policy, source: Prompted) -> None:
    tokenizer, template = policy.tokenizer, ask.prompts.chat_template
    shown = source.first[:8]
    task, chat = f"{ask.key}tasks.prompt", "model.chat_template"
    specials = [str(token) for token in tokenizer.all_special_tokens]
    seen.add(
        token_findings.doubled_bos(source.first, tokenizer.bos_token_id, task),
        token_findings.special_in_messages(source.first, specials, task),
        token_findings.template_text(tokenizer, shown, template, chat),
        token_findings.template_prefix(tokenizer, shown, template, chat),
    )


def _work(
    seen: Seen, stage: RLStage, ask: Asked, batch: Sampled, context: int | None, own: Trained
) -> None:
    """A whole step's rows, as the sampled ones go; as long as the budget where they do not say."""
    rows = rows_of(batch.groups)
    if own.by is not None or own.random or not batch.whole:
        rows = to_budget(stage, rows, context)
    whole = ask.rollout.prompts_per_step * ask.rollout.group_size
    seen.work.rows = [rows[at % len(rows)] for at in range(whole)]
    seen.work.sequences = batch.completions
    assert seen.source is not None
    seen.work.heldout = seen.source.heldout_tokens


def judges_in(functions: Sequence[NamedReward]) -> list[tuple[str, RewardModel]]:
    """The learned rewards that live in this process, by name."""
    judging = [(f.name, getattr(f.function, "judging", None)) for f in functions]
    return [(name, one.model) for name, one in judging if isinstance(one, Here)]


def _ready(
    functions: Sequence[RewardSource],
) -> tuple[tuple[RewardSource, ...], list[tuple[RewardSource, str]]]:
    """The rewards that can be asked now, and the others with why not."""
    ready: list[RewardSource] = []
    waiting: list[tuple[RewardSource, str]] = []
    for source in functions:
        if source.options.get("stage") is not None and source.function in ("outcome", "process"):
            waiting.append((source, f"stage {source.options['stage']!r} is yet to train it"))
        elif source.function == "judge":
            waiting.append((source, "it is paid for, and nothing was asked"))
        else:
            ready.append(source)
    return tuple(ready), waiting


def _any(rewards: Sequence[RewardSource], waiting: Sequence[object]) -> bool:
    """Whether there is a reward to ask: one of those named, or the task's own verdict."""
    return bool(rewards) or not waiting


def _scorer(
    ask: Asked, functions: Sequence[NamedReward], source: Prompted, partial: bool
) -> Scorer:
    """The stage's scorer; where rewards are missing, of the others, whatever they weigh."""
    if partial and functions and not any(f.weight for f in functions):
        functions = [replace(f, weight=1.0) for f in functions]
    soft = ask.rollout.soft_overlong
    budget = ask.rollout.max_tokens
    made = scorer(ask.rewards, functions, source.tasks, max_tokens=budget, soft_overlong=soft)
    made.check(source.first)
    return made


def _completions(seen: Seen, ask: Asked, batch: Sampled, own: Trained) -> None:
    """How the batch's completions end."""
    size, budget = batch.size, batch.budget
    n = batch.completions
    if own.by is not None:
        seen.unseen.append(
            f"how completions end and what they earn: stage {own.by!r} is yet to train the policy"
        )
    elif not batch.whole:
        seen.unseen.append(
            f"completions beyond {size.tokens} tokens (of a budget of {budget}): this model would "
            "take minutes here"
        )
    seen.figures |= {"sampled prompts": size.prompts, "sampled completions": n}
    if own.by is not None:
        return
    held = holding(batch.lengths, batch.ended)
    seen.figures |= {
        "completion tokens (median)": quantile(
            [len(c) for group in batch.groups for c in group.completions], 0.5
        ),
        "cut at the budget": f"{batch.cut} of {n}",
        "a budget for 95 %": str(held),
    }
    if own.random or not batch.whole:
        return
    key = f"{ask.key}{'' if ask.key.endswith('sampled.') else 'rollout.'}max_tokens"
    seen.add(
        sample_findings.truncated(batch.cut, n, budget, held, key),
        sample_findings.eos_never(batch.cut, n, budget, held, key),
    )


def _costs(
    seen: Seen, ask: Asked, waiting: Sequence[tuple[RewardSource, str]], batch: Sampled
) -> None:
    for reward, _ in waiting:
        if reward.function != "judge":
            continue
        cost = judge_cost(
            reward, batch.groups, ask.rollout.prompts_per_step, ask.rollout.group_size
        )
        if cost is not None:
            seen.figures[f"judge {cost.name!r}"] = str(cost)


def _gold(
    seen: Seen,
    ask: Asked,
    gold: Gold | None,
    pairs: Sequence[tuple[RewardSource, NamedReward]],
    verdicts: Sequence[Sequence[Verdict]],
    source: Prompted,
) -> None:
    """What the gold answers say: of the tokenizer, of the budget, of the rewards."""
    if gold is None:
        return
    n = len(gold.texts) + len(gold.unwritable)
    seen.figures["gold answers"] = n
    key = f"{ask.key}{'' if ask.key.endswith('sampled.') else 'rollout.'}max_tokens"
    alphabet = "model.build.alphabet"
    seen.add(
        sample_findings.gold_unwritable(gold.unwritable, n, alphabet),
        sample_findings.gold_over_budget(gold.lengths, ask.rollout.max_tokens, key),
    )
    users = any(isinstance(task, UserTask) for task in source.tasks.values())
    for reward, function in pairs:
        best = gold.best.get(function.name, ())
        told = [value for value in best if value is not None]
        if not told:
            continue
        full = reward.function in RIGHT and not (reward.function == TASK and users)
        spoken = [value for value in told if math.isfinite(value)]
        if spoken:
            seen.figures[f"gold answers, {function.name}"] = round(float(np.mean(spoken)), 3)
        seen.add(
            sample_findings.gold_refused(
                function.name, gold.texts, best, 1.0 if full else 1e-9,
                _values(verdicts, function.name), f"{ask.key}tasks.answer",
            )
        )  # fmt: skip


def _rewards(
    seen: Seen,
    ask: Asked,
    stage: Stage,
    batch: Sampled,
    verdicts: Sequence[Sequence[Verdict]],
    right: tuple[Gold | None, Sequence[tuple[RewardSource, NamedReward]]],
    bounds: tuple[Trained, bool],
) -> None:
    """What the batch's rewards say, as far as policy and rewards are those of the stage."""
    (gold, pairs), (own, partial) = right, bounds
    if own.by is not None:
        return
    totals = [value for judged in verdicts for value in _rewards_of(judged)]
    for _, function in pairs:
        values = _values(verdicts, function.name)
        if values:
            seen.figures[f"reward {function.name} (mean)"] = round(float(np.mean(values)), 4)
    if not totals or not batch.whole:
        return
    key = f"{ask.key}rewards.functions"
    alone = len([f for _, f in pairs if f.weight]) == 1 and not partial
    before = len(seen.findings)
    for _, function in pairs:
        best = () if gold is None or not function.weight else gold.best.get(function.name, ())
        values = _values(verdicts, function.name)
        seen.add(sample_findings.reward_zero(function.name, values, best, alone, key))
    if partial or any(f.kind == "gold-refused" for f in seen.findings):
        return
    texts = {c.text for group in batch.groups for c in group.completions}
    if len(seen.findings) == before:
        seen.add(sample_findings.reward_constant(totals, len(texts), key))
    if len(seen.findings) > before:
        return
    flat = sum(_flat(judged) for judged in verdicts)
    seen.figures["groups with equal rewards"] = _share(flat, len(verdicts))
    compares = stage.algorithm.needs_groups if isinstance(stage, RLStage) else _pairs(stage)
    dynamic = ask.rollout.dynamic_sampling
    if compares or dynamic:
        refills = ask.rollout.max_refills if dynamic else None
        size = f"{ask.key}{'' if ask.key.endswith('sampled.') else 'rollout.'}group_size"
        seen.add(
            sample_findings.zero_variance(flat, len(verdicts), batch.size.members, refills, size)
        )


def _pairs(stage: Stage) -> bool:
    """Whether a stage that judges learns from differences between answers."""
    return stage.stage == "dpo" or getattr(stage, "learns", None) == "pairs"


def _values(verdicts: Sequence[Sequence[Verdict]], name: str) -> list[float]:
    every = (v.components.get(name) for judged in verdicts for v in judged)
    return [value for value in every if value is not None]


def _rewards_of(judged: Sequence[Verdict]) -> list[float]:
    """What a group's advantages are made of: rewards of steps, where there are any."""
    steps = [step.reward for verdict in judged for step in verdict.steps]
    return steps or [v.reward for v in judged if v.reward is not None]


def _flat(judged: Sequence[Verdict]) -> bool:
    rewards = _rewards_of(judged)
    return not rewards or max(rewards) == min(rewards)


def _share(part: int, whole: int) -> str:
    share = wilson_interval(part, whole)
    return f"{part} of {whole} (95 % interval {share.low:.0%} to {share.high:.0%})"
