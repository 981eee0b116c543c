"""A stage that samples, looked at: its prompts, a batch, its rewards, and what they give away."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

from keel.config.judging import JudgingStage
from keel.config.schema import Recipe, Stage
from keel.config.sources import RewardSource
from keel.data.tasks import stored
from keel.learn.advantages import check_steps
from keel.models.policy import Policy
from keel.preflight.context import LongestExample, PolicyOrigin, StageContext
from keel.preflight.findings import prompts as prompt_findings
from keel.preflight.findings import samples as sample_findings
from keel.preflight.findings import tokens as token_findings
from keel.preflight.findings.replies import reply_holds_answer
from keel.preflight.findings.rewards import ScoredBatch, check_gold, check_sampled_rewards
from keel.preflight.gold_answers import Gold, gold_of, unreadable_gold
from keel.preflight.judge_cost import forecast_judge
from keel.preflight.lengths import holding, quantile
from keel.preflight.prompt_stats import PromptStats, SamplingPlan, plain_content, prompted
from keel.preflight.trial_batch import TrialBatch, sample
from keel.rewards.registry import TASK, NamedReward
from keel.rewards.scorer import Scorer
from keel.runs.quarantine import WORDS, LeftOut
from keel.training.recipe_checks import check_component, check_rewards, check_rewards_of_steps
from keel.training.setup import load_rewards, reward_context, scorer
from keel.types import KeelError, Prompt, Verdict


def inspect_sampling_stage(
    seen: StageContext,
    recipe: Recipe,
    stage: Stage,
    plan: SamplingPlan,
    policy: Policy,
    own: PolicyOrigin,
) -> None:
    """Prompts, batch, rewards and gold answers of what a stage samples."""
    source = read_prompts(seen, recipe, plan, policy)
    if source is None or not source.first:
        return
    seen.source = source
    _tokens(seen, plan, policy, source)
    if not _check(seen, plan):
        return
    rewards, waiting = _ready(plan.rewards.functions)
    for reward, why in waiting:
        seen.unseen.append(f"reward {reward.name or reward.function!r}: {why}")
    choice = plan.rewards.model_copy(update={"functions": rewards})
    try:
        functions = load_rewards(choice, reward_context(recipe, None, policy))
        judge = _scorer(plan, functions, source, bool(waiting))
    except KeelError as error:
        seen.stops("as its rewards are made", error, f"{plan.key}rewards.functions")
        return
    pairs = list(zip(rewards or (RewardSource(function=TASK),), judge.functions, strict=True))
    with closing(judge):
        try:
            batch = sample(policy, plan, source, judge, trial=own.by is not None)
        except KeelError as error:
            seen.stops("as its first batch is sampled", error, f"{plan.key}rollout")
            return
        _completions(seen, plan, batch, own)
        verdicts: tuple[tuple[Verdict, ...], ...] = ()
        gold: Gold | None = None
        try:
            gold = gold_of(
                source.first, source.tasks, pairs if _any(rewards, waiting) else [],
                policy.tokenizer, plan.rewards,
            )  # fmt: skip
            if _any(rewards, waiting):
                start = time.perf_counter()
                verdicts = judge(batch.groups, 1).verdicts
                seen.work.scoring = time.perf_counter() - start
                _steps(seen, plan, verdicts, bool(waiting))
            if plan.rewards.on_error == "stop":
                unreadable_gold(source.tasks, pairs)
        except KeelError as error:
            seen.stops("as its rewards are asked", error, f"{plan.key}rewards.functions")
    _costs(seen, stage, plan, waiting, batch)
    evaluation = plan.sampling.evaluation
    _work(seen, stage, plan, batch, policy.context, own)
    judging = None if evaluation is None else judge.judging(evaluation.component)
    if plan.rollout.max_turns > 1 and source.replies:
        seen.add(reply_holds_answer(source, plan))
    judged = ScoredBatch(batch, verdicts, gold, pairs, judging, partial=bool(waiting))
    check_gold(seen, plan, judged, source)
    if verdicts and own.by is None:
        check_sampled_rewards(seen, stage, plan, judged)


def read_prompts(
    seen: StageContext, recipe: Recipe, plan: SamplingPlan, policy: Policy
) -> PromptStats | None:
    """The prompts of what a stage samples, and what is to be said of them."""
    rollout, sampling = plan.rollout, plan.sampling
    key = f"{plan.key}tasks"
    try:
        source = prompted(
            sampling.tasks, sampling.prompts, policy, recipe.seed, plan.seed,
            room=rollout.max_tokens, take=rollout.prompts_per_step,
            held=sampling.validation_prompts,
        )  # fmt: skip
    except KeelError as error:
        seen.stops("as its tasks are read", error, key)
        return None
    budget = plan.setting("max_tokens")
    check_prompts(seen, source, plan, rollout.max_tokens, budget)
    return source


def check_prompts(
    seen: StageContext, source: PromptStats, plan: SamplingPlan, room: int, budget: str
) -> None:
    """Figures and findings of prompts; `room` tokens are the answer's, which the key `budget`
    gives."""
    key = f"{plan.key}tasks"
    every = [n for lengths in source.lengths.values() for n in lengths]
    if source.rows is not None:
        seen.figures["train rows"] = source.rows
    if every:
        seen.figures |= {
            "prompt tokens (median)": quantile(every, 0.5),
            "prompt tokens (95 %)": quantile(every, 0.95),
            "prompt tokens (longest)": max(every),
        }
    seen.figures["plain prompts are read"] = source.read
    if source.differs is not None:
        seen.figures["tokenizer.json"] = (
            f"read otherwise by AutoTokenizer, whose class is used: {source.differs}"
        )
    own = plan.sampling.prompts.max_tokens is not None
    length_key = f"{plan.key}prompts.max_tokens" if own else budget
    said = length_key if own else f"what {room} tokens of answer leave of the context"
    before = len(seen.findings)
    limit = source.limit
    for name, ns in source.lengths.items():
        seen.add(prompt_findings.prompts_over_length(name, ns, limit, said, length_key, own))
    if source.stopped is not None and not any(
        one.severity == "error" for one in seen.findings[before:]
    ):
        seen.stops("as its prompts are read", KeelError(source.stopped), key)
    report_left_out(seen, source.left_out)
    seen.add(
        prompt_findings.unreadable(
            source.left_out, source.stored, f"{task_key(plan, source, source.left_out)}.bad_rows"
        ),
        prompt_findings.repeated(source.repeated, source.rows or 0, f"{key}.0.path"),
    )


def check_tokens(
    seen: StageContext,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    template: Mapping[str, Any],
    key: str,
    tasks: Sequence[str] = (),
) -> None:
    """Findings of prompts as tokens. A `{}` in `key` is the number of the prompt's task."""
    chat = "model.chat_template"
    specials = [str(token) for token in tokenizer.all_special_tokens]
    at = {name: key.format(number) for number, name in enumerate(tasks)}
    for name, own in (at or {"": key}).items():
        some = [p for p in prompts if not at or p.task == name]
        seen.add(
            token_findings.doubled_bos(some, tokenizer.bos_token_id, own),
            token_findings.special_in_messages(some, specials, own),
        )
    shown = prompts[:8]
    seen.add(
        token_findings.template_text(tokenizer, shown, template, chat),
        token_findings.template_prefix(tokenizer, shown, template, chat),
    )
    seen.unread |= token_findings.unread(tokenizer, shown, template)


def report_left_out(seen: StageContext, left: Sequence[LeftOut]) -> None:
    """How many rows are left out, by why, and the first of them."""
    if not left:
        return
    counts = Counter(WORDS[row.why] for row in left)
    said = ", ".join(f"{n} {word}" for word, n in counts.items())
    seen.figures["rows left out"] = f"{said}; the first: {left[0].reason}"


def task_key(plan: SamplingPlan, source: PromptStats, left: Sequence[LeftOut]) -> str:
    """The key of the task that the first of these rows is of."""
    for number, task in enumerate(source.tasks.values()):
        data = stored(task)
        if data is not None and any(row is one for row in left[:1] for one in data.left_out):
            return f"{plan.key}tasks.{number}"
    return f"{plan.key}tasks.0"


# ---------------------------------------------------------------- details


def _tokens(seen: StageContext, plan: SamplingPlan, policy: Policy, source: PromptStats) -> None:
    check_tokens(
        seen, policy.tokenizer, source.first, plan.sampling.prompts.chat_template,
        f"{plan.key}tasks.{{}}.prompt", list(source.tasks),
    )  # fmt: skip


def _check(seen: StageContext, plan: SamplingPlan) -> bool:
    """Whether the rewards are named and set as they may be, those that cannot be made yet too."""
    try:
        names = check_rewards(plan.rewards)
    except KeelError as error:
        seen.stops("as its rewards are made", error, f"{plan.key}rewards.functions")
        return False
    try:
        check_rewards_of_steps(plan.sampling)
    except KeelError as error:
        seen.stops("as its advantages are estimated", error, f"{plan.key}rewards.functions")
        return False
    evaluation = plan.sampling.evaluation
    if evaluation is not None and evaluation.prompts:
        try:
            check_component(evaluation, names)
        except KeelError as error:
            seen.stops("as it is evaluated", error, f"{plan.key}evaluation.component")
    return True


def _steps(
    seen: StageContext, plan: SamplingPlan, verdicts: Sequence[Sequence[Verdict]], partial: bool
) -> None:
    """Whether the advantage can use what the rewards returned: steps, or whole answers."""
    spoken = [v for judged in verdicts for v in judged if v.reward is not None]
    there = any(verdict.steps for verdict in spoken)
    algorithm = plan.sampling.algorithm
    if algorithm is None or not spoken or (partial and not there):
        return
    try:
        check_steps(algorithm, there)
    except KeelError as error:
        seen.stops("as its advantages are estimated", error, f"{plan.key}rewards.functions")


def _work(
    seen: StageContext,
    stage: Stage,
    plan: SamplingPlan,
    batch: TrialBatch,
    context: int | None,
    own: PolicyOrigin,
) -> None:
    """A whole step's sequences, as the sampled ones go; as long as the budget where those do not
    say how long they will be."""
    work, rollout = seen.work, plan.rollout
    assert seen.source is not None
    if seen.source.longest is not None:
        prompt, other = seen.source.longest.prompt, seen.source.longest.other
        data = {"prompt": plain_content(prompt.content)}
        if plan.sampling.algorithm is None and other is not None:
            # Rows of one prompt are all on one side.
            data["heldout"] = plain_content(other.content)
        work.longest = LongestExample(len(prompt.tokens), data, seen.source.longest.raw)
    full = own.by is not None or own.random or not batch.whole
    answers = [
        (prompt, _budget(prompt, rollout.max_tokens, context) if full else length)
        for group in batch.groups
        for prompt, length in [(len(group.prompt.tokens), len(c)) for c in group.completions]
    ]
    mean = sum(prompt + length for prompt, length in answers) / max(len(answers), 1)
    if plan.sampling.algorithm is None:
        # Examples of answers: as many as a step has, two in each pair.
        work.tokens = round(mean * cast(JudgingStage, stage).batch_size * (1 + stage.compares))
        work.scoring = 0.0
        return
    whole = rollout.prompts_per_step * rollout.group_size
    work.tokens, work.sequences = round(mean * whole), whole
    work.scoring *= whole / max(batch.completions, 1)
    work.decoded = max((length for _, length in answers), default=0)
    work.evaluated = len(seen.source.heldout_tokens)


def _budget(prompt: int, limit: int, context: int | None) -> int:
    """Tokens that a completion may have after a prompt of so many."""
    return limit if context is None else min(limit, context - prompt)


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
    plan: SamplingPlan, functions: Sequence[NamedReward], source: PromptStats, partial: bool
) -> Scorer:
    """The stage's scorer; where rewards are missing, of the others, whatever they weigh."""
    if partial and functions and not any(f.weight for f in functions):
        functions = [replace(f, weight=1.0) for f in functions]
    soft = plan.rollout.overlong_buffer
    budget = plan.rollout.max_tokens
    made = scorer(plan.rewards, functions, source.tasks, max_tokens=budget, overlong_buffer=soft)
    made.check(source.first)
    return made


def _completions(
    seen: StageContext, plan: SamplingPlan, batch: TrialBatch, own: PolicyOrigin
) -> None:
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
    key = plan.setting("max_tokens")
    seen.add(
        sample_findings.truncated(batch.cut, n, budget, held, key),
        sample_findings.eos_never(batch.cut, n, budget, held, key),
    )


def _costs(
    seen: StageContext,
    stage: Stage,
    plan: SamplingPlan,
    waiting: Sequence[tuple[RewardSource, str]],
    batch: TrialBatch,
) -> None:
    """What the stage's judges will be paid."""
    assert seen.source is not None
    validation = min(plan.sampling.validation_prompts, len(seen.source.heldout_tokens))
    for at, reward in enumerate(plan.rewards.functions):
        if reward.function != "judge" or not any(reward is one for one, _ in waiting):
            continue
        key = f"{plan.key}rewards.functions.{at}"
        forecast = forecast_judge(reward, batch.groups, stage, validation, key)
        if forecast is not None:
            seen.work.forecasts.append(forecast)
            seen.figures[f"judge {forecast.name!r}"] = str(forecast)
