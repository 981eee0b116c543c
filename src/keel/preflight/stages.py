"""Inspects a stage: what it samples and scores, or the demonstrations and rows it learns from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch

from keel.cluster.placement import placement_of
from keel.config.entry import load_function
from keel.config.fields import derive
from keel.config.sources import RewardSource
from keel.config.stage import DemonstrationSource, ImitationSource, JudgedSource
from keel.data.columns import prompt_columns
from keel.data.preferences import READERS, encode_row, without_bad
from keel.data.sft import SFTRow, Trained
from keel.data.splits import KINDS
from keel.engines.registry import check_engine, unmet_requests
from keel.engines.sampler import eos_ids, split_stops
from keel.learn.advantages import check_steps
from keel.learn.batch import from_groups
from keel.models.chat import ChatEncoder
from keel.models.families import uses_autocast
from keel.models.policy import Policy, rounding_effect
from keel.models.reward import Reader, check_classifier
from keel.preflight.batch import TrialBatch, check_ends, load_of, sample, size_for
from keel.preflight.context import (
    Finding,
    PromptStats,
    SamplingPlan,
    StageContext,
    StageStops,
    found,
    percent,
)
from keel.preflight.judge_cost import forecast_judge
from keel.preflight.prompts import (
    check_tokens,
    columns_read,
    encoded_prompts,
    end_of_turn,
    few_rows,
    how_read,
    no_validation,
    over_length,
    read_prompts,
    reply_holds_answer,
    report_left_out,
    special_in_answers,
    spread,
    unreadable,
)
from keel.preflight.rewards import (
    SHOWN,
    Gold,
    ScoredBatch,
    check_gold,
    check_readable,
    check_sampled_rewards,
    gold_of,
    weak_tests,
)
from keel.preflight.trial import LongestExample
from keel.rewards.code import CodeReward
from keel.rewards.registry import NamedReward
from keel.rewards.scorer import Scorer
from keel.runs.values import plain
from keel.training.judged_data import encoder
from keel.training.judging import base_policy
from keel.training.setup import (
    build_scorer,
    check_component,
    check_rewards,
    check_rewards_of_steps,
    check_taught,
    load_rewards,
    reward_context,
)
from keel.training.supervised import demonstration, encode_demonstration, open_set
from keel.types import KeelError, RewardResult, text_of

ROUNDED_TOKENS = 2048
"""Of the completions whose log-probabilities are computed in bfloat16 and in float32."""
THOUGHTS = 32
"""Examples with thoughts that are looked at."""
ENCODED = 2_000
"""Rows whose length is measured, evenly spread."""


def inspect_sampling_stage(context: StageContext, plan: SamplingPlan) -> None:
    """Prompts, batch, rewards and gold answers of what a stage samples.

    Raises StageStops if the stage would stop before it samples.
    """
    sampling, rollout = plan.sampling, plan.sampling.rollout
    if rollout.replayed is not None:
        with context.stops("as its stored rollouts are looked for", f"{plan.key}rollout.stored"):
            check_engine(rollout, steps=context.stage.steps)
    stats = read_prompts(
        context, sampling.tasks, sampling.prompts, plan.seed,
        prefix=plan.key, answer_key=sampling.setting("max_tokens"),
        answer_tokens=rollout.max_tokens, take=rollout.prompts_per_step,
        validation=sampling.validation_prompts,
    )  # fmt: skip
    tasks = stats.source.tasks
    if sampling.algorithm is not None and stats.conversations:
        _check_end_of_turn(context, plan)
    _check_names(context, plan)
    ready, waiting = _split_rewards(sampling.rewards.functions)
    for source, why in waiting:
        context.skipped_checks.append(f"reward {source.name or source.function!r}: {why}")
    callable_now = bool(ready) or not waiting  # without a reward it is the task's own score
    choice = sampling.rewards.model_copy(update={"functions": ready})
    key = f"{plan.key}rewards.functions"
    with context.stops("as its rewards are made", key):
        functions = load_rewards(choice, reward_context(context.recipe, None, context.policy))
        judge = _scorer(plan, functions, stats, bool(waiting))
    rewards = judge.functions
    results: tuple[tuple[RewardResult, ...], ...] = ()
    gold: Gold | None = None
    with contextlib.closing(judge):
        with context.stops("as its first batch is sampled", f"{plan.key}rollout"):
            trial = context.trained_by is not None
            batch = sample(context.policy, plan, stats, judge, trial=trial)
        _check_requests(context, plan, batch)
        check_ends(context, plan, batch)
        _check_rounding(context, plan, batch)
        with suppress(StageStops), context.stops("as its rewards are asked", key):
            called = rewards if callable_now else ()
            gold = gold_of(stats.first, tasks, called, context.policy.tokenizer, sampling.rewards)
            for reward in called:
                if isinstance(reward.function, CodeReward):
                    tried = stats.first[:SHOWN]
                    context.add(weak_tests(reward.name, reward.function, tried, key))
            if callable_now:
                start = time.perf_counter()
                asked = judge(batch.groups, 1)
                context.scoring = time.perf_counter() - start
                results = asked.results
                context.metrics |= asked.metrics.keys()
                _check_steps(context, plan, results, bool(waiting))
            if sampling.rewards.on_error == "stop":
                check_readable(tasks, rewards)
    _forecast_judges(context, plan, batch)
    _set_work(context, plan, batch, stats)
    evaluation = sampling.evaluation
    judging = None if evaluation is None else judge.judging(evaluation.component)
    if rollout.max_turns > 1 and stats.replies:
        context.add(reply_holds_answer(stats, plan))
    scored = ScoredBatch(plan, stats, batch, results, gold, rewards, judging, bool(waiting))
    check_gold(context, scored)
    if results and context.trained_by is None:
        check_sampled_rewards(context, scored)


def _check_requests(context: StageContext, plan: SamplingPlan, batch: TrialBatch) -> None:
    """What the stage asks for and its engine, on the recipe's processes, cannot give."""
    offered = placement_of(context.recipe.cluster).offers(batch.engine)
    for one in unmet_requests(plan.sampling, offered):
        key = f"{context.prefix}{one.key}"
        facts = {"name": one.key, "value": one.value, "why": one.why, "fix": one.fix}
        context.add(found("engine-cannot", key, **facts))


def _check_rounding(context: StageContext, plan: SamplingPlan, batch: TrialBatch) -> None:
    """How far the policy's autocast moves log-probabilities and gradient of some completions; a
    finding if a CPU samples in float32 and nothing corrects for the difference."""
    policy = context.policy
    if not uses_autocast(policy.model, policy.autocast):
        return
    whole = from_groups(batch.groups, policy.device)
    part = whole.micro_batches(ROUNDED_TOKENS)[0]
    signs = torch.arange(part.sequences, device=policy.device) % 2 * 2.0 - 1.0
    effect = rounding_effect(
        policy,
        part.packed,
        signs.repeat_interleave(part.lengths_S),
        plan.sampling.rollout.temperature,
    )
    context.figures["bfloat16 autocast"] = str(effect)
    algorithm = plan.sampling.algorithm
    samples_exactly = policy.device.type == "cpu" and batch.engine.in_process
    if algorithm is not None and not algorithm.corrections and samples_exactly:
        key = f"{context.prefix}algorithm.corrections.kind"
        context.add(found("bfloat16-uncorrected", key, effect=effect))


def _check_end_of_turn(context: StageContext, plan: SamplingPlan) -> None:
    """Whether what closes a turn ends a completion."""
    policy = context.policy
    with suppress(KeelError):  # a finding when the batch is sampled
        texts, ids = split_stops(plan.sampling.rollout.stop, policy.tokenizer)
        stops = (*eos_ids(policy.model, policy.tokenizer), *plan.sampling.rollout.stop_ids, *ids)
        closing = ChatEncoder(policy.tokenizer, plan.sampling.prompts.chat_template).closing
        key = f"{plan.key}rollout"
        context.add(end_of_turn(closing, policy.tokenizer, stops, texts, key))


def _check_names(context: StageContext, plan: SamplingPlan) -> None:
    """Whether rewards have valid names and options, those that cannot be made yet too."""
    key = f"{plan.key}rewards.functions"
    with context.stops("as its rewards are made", key):
        names = check_rewards(plan.sampling)
    with context.stops("as its advantages are estimated", key):
        check_rewards_of_steps(plan.sampling)
    evaluation = plan.sampling.evaluation
    if evaluation is not None and evaluation.prompts:
        with context.stops("as it is evaluated", f"{plan.key}evaluation.component"):
            check_component(evaluation, names)


def _check_steps(
    context: StageContext,
    plan: SamplingPlan,
    results: Sequence[Sequence[RewardResult]],
    partial: bool,
) -> None:
    """Whether the advantage can use what the rewards returned: steps, or whole answers."""
    scored = [v for judged in results for v in judged if v.reward is not None]
    has_steps = any(result.steps for result in scored)
    algorithm = plan.sampling.algorithm
    if algorithm is None or not scored or (partial and not has_steps):
        return
    key = f"{plan.key}rewards.functions"
    with suppress(StageStops), context.stops("as its advantages are estimated", key):
        check_steps(algorithm, has_steps)


def _split_rewards(
    functions: Sequence[RewardSource],
) -> tuple[tuple[RewardSource, ...], list[tuple[RewardSource, str]]]:
    """The rewards that can be called now, and the others with the reason why not."""
    ready: list[RewardSource] = []
    waiting: list[tuple[RewardSource, str]] = []
    for source in functions:
        stage = source.options.get("stage")
        if stage is not None and source.function in ("outcome", "process"):
            waiting.append((source, f"stage {stage!r} is yet to train it"))
        elif source.function == "judge":
            waiting.append((source, "it is paid for, and nothing was asked"))
        else:
            ready.append(source)
    return tuple(ready), waiting


def _scorer(
    plan: SamplingPlan, functions: Sequence[NamedReward], stats: PromptStats, partial: bool
) -> Scorer:
    """The stage's scorer; if rewards are missing, of the others, whatever their weights."""
    if partial and functions and not any(f.source.weight for f in functions):
        functions = [f.changed(weight=1.0) for f in functions]
    algorithm = plan.sampling.algorithm
    needed = algorithm is None or algorithm.needs_reward
    made = build_scorer(plan.sampling, functions, stats.source.tasks, needed=needed, shaped=True)
    made.check(stats.first)
    return made


def _forecast_judges(context: StageContext, plan: SamplingPlan, batch: TrialBatch) -> None:
    """The cost of the stage's judges."""
    for at, reward in enumerate(plan.sampling.rewards.functions):
        if reward.function == "judge":
            key = f"{plan.key}rewards.functions.{at}"
            held = 0 if context.prompts is None else len(context.prompts.validation)
            validation = min(plan.sampling.validation_prompts, held)
            forecast = forecast_judge(reward, batch.groups, context.stage, validation, key)
            if forecast is not None:
                context.forecasts.append(forecast)
                context.figures[f"judge {forecast.name!r}"] = str(forecast)


def _set_work(
    context: StageContext, plan: SamplingPlan, batch: TrialBatch, stats: PromptStats
) -> None:
    """What a trial of the stage runs on: its longest prompt, and as many prompts a step as take
    seconds to sample."""
    sampling, longest = plan.sampling, stats.longest
    rollout = sampling.rollout
    asked = rollout.prompts_per_step * rollout.group_size
    context.scoring *= 0 if sampling.algorithm is None else asked / max(batch.completions, 1)
    load = load_of(context.policy)
    context.step_prompts = size_for(
        rollout.prompts_per_step, rollout.group_size, rollout.max_tokens, *load
    ).prompts
    if longest is None:
        return
    data = prompt_columns(longest.content, longest.tools)
    if sampling.algorithm is None:  # rows of one prompt are all in the same split
        others = (p for p in (*stats.validation, *stats.first) if p.content != longest.content)
        other = next(others, None)
        if other is not None:
            data["validation"] = prompt_columns(other.content, ())["prompt"]
    teacher, algorithm = sampling.teacher, sampling.algorithm
    with context.stops("as its teachers are chosen", f"{context.prefix}teacher.by_task"):
        check_taught(sampling, stats.source.tasks)
    names: set[str | None] = {*(() if teacher is None else teacher.columns)}
    names.add(None if algorithm is None else algorithm.advantage.role_column)
    read = {name: value for name, value in longest.columns.items() if name in names}
    data["columns"] = plain(read)
    raw = longest.task in stats.source.encoder.raw
    context.longest = LongestExample(len(longest.tokens), data, raw)
    if rollout.program is not None:
        context.skipped_checks.append("memory and time of rollout.program and of its requests")
    elif rollout.max_turns > 1:
        context.skipped_checks.append("memory and time of further turns of a conversation")


# ---------------------------------------------------------------- demonstrations and stored rows


def inspect_demonstrations(context: StageContext, source: DemonstrationSource) -> None:
    """The first step's prompts, and the demonstrations made of them and of later prompts.

    Raises StageStops if the stage would stop.
    """
    policy, prefix = context.policy, context.prefix
    seed = derive(context.recipe.seed, context.stage.name)
    stats = read_prompts(
        context, source.tasks, source.prompts, seed,
        prefix=prefix, answer_key="prompts.max_tokens", answer_tokens=1, take=source.batch_size,
    )  # fmt: skip
    tasks, encoder = stats.source.tasks, stats.source.encoder
    lengths: list[int] = []
    texts: list[tuple[str, str]] = []
    with context.stops("as its demonstrations are made", f"{prefix}demonstration"):
        demonstrate = load_function(source.entry, "demonstration")
        rng = np.random.default_rng(derive(seed, "demonstrations", 1))
        later = (p for task in tasks.values() for p in encoded_prompts(task, encoder))
        for number, prompt in enumerate(chain(stats.first, later)):
            text = demonstration(prompt, tasks[prompt.task], source.entry, demonstrate, rng)
            found = encode_demonstration(prompt, text, encoder, policy.context, prefix)
            lengths.append(len(found.answer))
            whole = len(prompt.tokens) + lengths[-1]
            if number < len(stats.first):
                texts.append((prompt.id, text))
            if context.longest is None or whole > context.longest.tokens:
                data = {**prompt_columns(prompt.content, prompt.tools), "answer": text}
                context.longest = LongestExample(whole, data, prompt.task in encoder.raw)
    specials = [str(token) for token in policy.tokenizer.all_special_tokens]
    context.add(special_in_answers(texts, specials, f"{prefix}tasks.0.answer"))
    context.add_lengths("demonstration tokens", lengths)


def inspect_imitation(context: StageContext, source: ImitationSource) -> None:
    """The sets of examples of a stage, encoded as it encodes them.

    Raises StageStops if the stage would stop.
    """
    policy, prefix, sizes = context.policy, context.prefix, list[int | None]()
    lengths: list[int] = []
    bearing = held = 0
    for number, data in enumerate(source.data):
        key = f"{prefix}{source.key}data.{number}"
        if data.name not in KINDS:
            context.skipped_checks.append(f"the rows of {data.name!r}: its function was not called")
            continue
        with context.stops("as its examples are read", key):
            one_set = open_set(data, policy, source, number, seed=context.recipe.seed)
        rows, examples = one_set.rows, one_set.examples
        sizes.append(one_set.train.size("train"))
        held += len(one_set.validation)
        lengths += [len(one.tokens) for one in examples]
        bearing += sum(int(one.written.sum()) for one in examples)
        first = rows[0]
        own = {} if first.origin is None else first.origin.values
        taken = {data.columns.get(part, part): part for part in first.columns}
        taken |= {"conversations": "messages"} if "messages" in first.columns else {}
        context.figures[f"columns of {one_set.train.name}"] = columns_read(own, taken)
        if lines := list(one_set.encode.counts()):
            early = f" (of the first {len(rows)})" if data.streams else ""
            context.figures[f"long examples of {one_set.train.name}"] = "; ".join(lines) + early
        limit = source.limit(policy.context)
        context.add(dropped_thoughts(policy.tokenizer, rows, examples, limit, key))
        longest = max(examples, key=lambda one: len(one.tokens))
        if source.key:
            context.shown = max(context.shown, len(longest.tokens))
        elif context.longest is None or len(longest.tokens) > context.longest.tokens:
            row = next(row for row in rows if row.id == longest.id)
            context.longest = LongestExample(len(longest.tokens), row.columns, data.raw)
        report_left_out(context, one_set.left_out)
        used = len(examples) + len(one_set.validation)
        context.add(
            unreadable(one_set.left_out, used, f"{key}.bad_rows"),
            no_validation(one_set.train.name, one_set.unvalidated, f"{key}.validation_path"),
        )
    if source.key:
        return  # the length of the stage is not theirs
    if source.packing:
        context.skipped_checks.append("time of full blocks: the trial's hold one example")
    size = None if None in sizes else sum(n for n in sizes if n is not None)
    if len(sizes) == len(source.data):
        context.add(few_rows(size or 0, source.batch_size, f"{prefix}data.0.path"))
        context.resolve(size, source.batch_size)
    context.figures["validation examples"] = held
    if size:
        epochs = context.stage.steps * source.batch_size / size
        what = "train blocks" if source.packing else "train examples"
        context.figures |= {what: size, "epochs": round(epochs, 2)}
    if lengths:
        context.figures["tokens that bear loss"] = percent(bearing / sum(lengths))
    context.add_lengths("example tokens", lengths)


def dropped_thoughts(
    tokenizer: Any, rows: Sequence[SFTRow], examples: Sequence[Trained], limit: int | None, key: str
) -> Finding | None:
    """Conversations whose last answer loses its thought to the chat template."""
    encoded = {one.id: one for one in examples if len(one.tokens) != limit}  # the others are cut
    lost, count = list[str](), 0
    for row in rows:
        thought, one = _thought(row), encoded.get(row.id)
        if not thought or one is None:
            continue
        count += 1
        text = tokenizer.decode(one.tokens[one.written], clean_up_tokenization_spaces=False)
        lost += [] if thought in "".join(text.split()) else [row.id]
        if count == THOUGHTS:
            break
    if not lost:
        return None
    return found("thoughts-dropped", key, lost=len(lost), n=count, first=lost[0])


def _thought(row: SFTRow) -> str:
    """The thought of a conversation's last answer, without blanks; empty if it has none."""
    turns = [] if isinstance(row.completion, str) else row.completion
    if not turns or turns[-1]["role"] != "assistant":
        return ""
    apart = turns[-1].get("reasoning_content")
    inside, mark, _ = text_of(turns[-1]).partition("</think>")
    thought = apart if isinstance(apart, str) else inside.rpartition("<think>")[2] if mark else ""
    return "".join(thought.split())


def inspect_preference_data(context: StageContext, source: JudgedSource) -> None:
    """The judged rows of a stage, encoded, and the model that it starts from.

    Raises StageStops if the stage would stop.
    """
    prefix, data = context.prefix, source.data
    with context.stops("as its model is made", f"{prefix}base"):
        base = _base(context)
    if data is None:
        return
    if data.name not in KINDS:
        context.skipped_checks.append(f"the rows of {data.name!r}: its function was not called")
        return
    key = f"{prefix}data"
    with context.stops("as its rows are read", key):
        splits = READERS[source.records](data, context.recipe.seed)
        encode = _encoder(context, source, base)
        if data.bad_rows == "quarantine":
            splits = without_bad(splits, encode)
        chosen = [splits.train[at] for at in spread(len(splits.train), ENCODED)]
        encoded = [encode_row(row, encode) for row in chosen]
        lengths = [row.longest for row in encoded]
        held = (
            [encode_row(row, encode).longest for row in splits.validation[:ENCODED]]
            if source.validation_rows
            else []
        )
    limit = min((n for n in (source.max_tokens, base.context) if n is not None), default=None)
    within = [at for at, row in enumerate(encoded) if limit is None or row.longest <= limit]
    if within:
        longest = max(within, key=lambda at: encoded[at].length)
        example = chosen[longest].columns
        context.longest = LongestExample(encoded[longest].length, example, source.raw)
    unvalidated = "its rows are of one prompt" if source.validation_rows and not held else ""
    if held and limit is not None and min(held) > limit:
        error = KeelError(
            f"each of the {len(held)} validation rows is longer than {limit} tokens: raise "
            f"{prefix}max_tokens, or set {prefix}evaluation.rows = 0",
            key="evaluation.rows",
        )
        context.add_stop("as its rows are read", error, f"{prefix}max_tokens")
    _check_row_tokens(context, base, source, chosen, key)
    rows = len(splits.train)
    context.resolve(round(rows * len(within) / max(len(encoded), 1)), source.batch_size)
    first = splits.train[0]
    own = {} if first.origin is None else first.origin.values
    context.figures["columns"] = columns_read(
        own, {data.columns.get(part, part): part for part in first.columns}
    )
    report_left_out(context, splits.left_out)
    context.figures |= {
        "train rows": rows,
        "validation rows": len(splits.validation),
        "plain prompts are read": how_read(base.tokenizer, source.raw),
        "epochs": round(context.stage.steps * source.batch_size / max(rows, 1), 2),
    }
    context.add_lengths("row tokens", lengths)
    context.add(
        few_rows(rows, source.batch_size, f"{key}.path"),
        over_length(
            "rows-over-length", "rows", lengths, limit, "prompt and answer", f"{prefix}max_tokens",
            "raise it to {held} (a model with a longer context, if that is the bound)",
        ),
        unreadable(splits.left_out, rows + len(splits.validation), f"{key}.bad_rows"),
        no_validation("the data", unvalidated, f"{key}.validation_path"),
    )  # fmt: skip


def _check_row_tokens(
    context: StageContext, base: Policy, source: JudgedSource, rows: Sequence[Any], key: str
) -> None:
    """Findings of the first rows' prompts, and of the answers of all, as tokens."""
    template, tokenizer = source.template_keywords, base.tokenizer
    reader = Reader(tokenizer, None, template, raw=source.raw)
    prompts = [reader.prompt(row.prompt, row.id, row.tools) for row in rows[:32]]
    check_tokens(context, tokenizer, prompts, template, {prompt.task: key for prompt in prompts})
    specials = [str(token) for token in tokenizer.all_special_tokens]
    answers = [(row.id, text) for row in rows for text in row.answers.values()]
    context.add(special_in_answers(answers, specials, key, letters=True))


def _base(context: StageContext) -> Policy:
    """The language model that the stage's own starts from. Raises KeelError if none can."""
    choice, kind = context.stage.base_model, context.stage.reward_model
    if choice is None or kind is None:
        return context.policy
    base = base_policy(context.recipe, context.policy, choice)
    if choice.stage is None:
        check_classifier(base.model.config, kind)
    return base


def _encoder(context: StageContext, source: JudgedSource, base: Policy) -> Callable[[Any], Any]:
    """What encodes the stage's rows."""
    kind = context.stage.reward_model
    template = None if kind else source.template_keywords
    closing = kind == "outcome"
    reader = Reader(base.tokenizer, base.context, template, raw=source.raw, closing=closing)
    return encoder(source.records, reader, source.separator)
