"""Inspects stages that learn from stored rows and demonstrations: what is read, and how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np

from keel.config.entry import load_entry
from keel.config.fields import derive
from keel.config.judging import JudgingStage
from keel.config.stage import Records
from keel.data.messages import prompt_columns
from keel.data.preferences import dataset as preferences
from keel.data.preferences.dataset import READERS, encode_row, without_bad
from keel.data.preferences.schema import Labelled, Preference, Stepwise
from keel.models.policy import Policy
from keel.models.reward import Reader, check_classifier
from keel.preflight import tokens
from keel.preflight.context import PromptStats, StageContext
from keel.preflight.finding import quantile
from keel.preflight.prompts import (
    encoded_prompts,
    few_rows,
    how_read,
    over_length,
    read_prompts,
    report_left_out,
    unreadable,
)
from keel.preflight.sampling_stage import check_tokens
from keel.preflight.trial import LongestExample
from keel.training.judged_data import encoder
from keel.training.preference_stages import base_policy
from keel.training.sft import encode_demonstration
from keel.training.stages.process_reward_model import ProcessRewardModelStage
from keel.training.stages.sft import SFTStage
from keel.types import KeelError, Prompt, one_line

ENCODED = 2_000
"""Rows whose length is measured, evenly spread."""


def inspect_demonstrations(context: StageContext) -> None:
    """The first step's prompts, and the demonstrations made of them and of later prompts.

    Raises StageStops if the stage would stop.
    """
    stage, policy, prefix = cast(SFTStage, context.stage), context.policy, context.prefix
    seed = derive(context.recipe.seed, stage.name)
    stats = read_prompts(
        context, stage.tasks, stage.prompts, seed,
        prefix=prefix, answer_key=f"{prefix}prompts.max_tokens", answer_tokens=1,
        take=stage.batch_size,
    )  # fmt: skip
    keys = {name: f"{prefix}tasks.{at}.prompt" for at, name in enumerate(stats.tasks)}
    check_tokens(context, policy.tokenizer, stats.first, stage.prompts.chat_template, keys)
    lengths: list[int] = []
    texts: list[tuple[str, str]] = []
    with context.stops("as its demonstrations are made", f"{prefix}demonstration"):
        demonstrate = load_entry(stage.demonstration, "demonstration")
        rng = np.random.default_rng(derive(seed, "demonstrations", 1))
        later = (p for task in stats.tasks.values() for p in encoded_prompts(task, stats.encoder))
        for number, prompt in enumerate(chain(stats.first, later)):
            text, n = _demonstrated(demonstrate, prompt, stats, rng, policy, prefix)
            whole = len(prompt.tokens) + n
            lengths.append(n)
            if number < len(stats.first):
                texts.append((prompt.id, text))
            if context.work.longest is None or whole > context.work.longest.tokens:
                data = {**prompt_columns(prompt.content, prompt.tools), "answer": text}
                context.work.longest = LongestExample(whole, data, prompt.task in stats.raw)
    specials = [str(token) for token in policy.tokenizer.all_special_tokens]
    context.add(tokens.special_in_answers(texts, specials, f"{prefix}tasks.0.answer"))
    context.figures |= {
        "demonstration tokens (median)": quantile(lengths, 0.5),
        "demonstration tokens (longest)": max(lengths),
    }


def inspect_preference_data(context: StageContext) -> None:
    """The judged rows of a stage, encoded, and the model that it starts from.

    Raises StageStops if the stage would stop.
    """
    stage, prefix = cast(JudgingStage, context.stage), context.prefix
    with context.stops("as its model is made", f"{prefix}base"):
        base = _base(context, stage)
    if stage.data is None:
        return
    if stage.data.name not in preferences.KINDS:
        context.skipped_checks.append(
            f"the rows of {stage.data.name!r}: its function was not called"
        )
        return
    key = f"{prefix}data"
    with context.stops("as its rows are read", key):
        splits = READERS[stage.records or "pairs"](stage.data, context.recipe.seed)
        encode = _encoder(stage, base)
        if stage.data.bad_rows == "quarantine":
            splits = without_bad(splits, encode)
        step = max(len(splits.train) / ENCODED, 1.0)
        chosen = [splits.train[int(at * step)] for at in range(min(len(splits.train), ENCODED))]
        encoded = [encode_row(row, encode) for row in chosen]
        lengths = [row.longest for row in encoded]
        held = (
            [encode_row(row, encode).longest for row in splits.validation[:ENCODED]]
            if stage.evaluation.rows
            else []
        )
    limit = min((n for n in (stage.max_tokens, base.context) if n is not None), default=None)
    fitting = [
        (row, record)
        for row, record in zip(encoded, chosen, strict=True)
        if limit is None or row.longest <= limit
    ]
    if fitting:
        longest, record = max(fitting, key=lambda pair: pair[0].length)
        context.work.longest = LongestExample(longest.length, _as_columns(record), stage.raw)
    if held and limit is not None and min(held) > limit:
        error = KeelError(
            f"each of the {len(held)} validation rows is longer than {limit} tokens: raise "
            f"{prefix}max_tokens, or set {prefix}evaluation.rows = 0"
        )
        context.add_stop("as its rows are read", error, f"{prefix}max_tokens")
    _check_row_tokens(context, base, stage, chosen, key)
    rows = len(splits.train)
    report_left_out(context, splits.left_out)
    context.figures |= {
        "train rows": rows,
        "validation rows": len(splits.validation),
        "plain prompts are read": how_read(base.tokenizer, stage.raw),
        "epochs": round(stage.steps * stage.batch_size / max(rows, 1), 2),
    }
    if lengths:
        context.figures |= {
            "row tokens (median)": quantile(lengths, 0.5),
            "row tokens (95 %)": quantile(lengths, 0.95),
            "row tokens (longest)": max(lengths),
        }
    context.add(
        few_rows(rows, stage.batch_size, f"{key}.path"),
        over_length(
            "rows-over-length", "rows", lengths, limit, "prompt and answer", f"{prefix}max_tokens",
            "raise it to {held} (a model with a longer context, if that is the bound)",
        ),
        unreadable(splits.left_out, rows + len(splits.validation), f"{key}.bad_rows"),
    )  # fmt: skip


def _check_row_tokens(
    context: StageContext, base: Policy, stage: JudgingStage, rows: Sequence[Any], key: str
) -> None:
    """Findings of the first rows' prompts, and of the answers of all, as tokens."""
    template, tokenizer = stage.template_keywords, base.tokenizer
    reader = Reader(tokenizer, None, template, raw=stage.raw)
    prompts = [reader.prompt(row.prompt, row.id, row.tools) for row in rows[:32]]
    check_tokens(context, tokenizer, prompts, template, {prompt.task: key for prompt in prompts})
    specials = [str(token) for token in tokenizer.all_special_tokens]
    answers = [(row.id, text) for row in rows for text in _answers(row)]
    context.add(tokens.special_in_answers(answers, specials, key, letters=True))


def _answers(row: Preference | Labelled | Stepwise) -> tuple[str, ...]:
    if isinstance(row, Preference):
        return row.chosen, row.rejected
    return row.steps if isinstance(row, Stepwise) else (row.completion,)


def _as_columns(row: Preference | Labelled | Stepwise) -> dict[str, Any]:
    """A row as the readers of preference data take it."""
    prompt = prompt_columns(row.prompt, row.tools)
    if isinstance(row, Preference):
        answers: dict[str, Any] = {"chosen": row.chosen, "rejected": row.rejected}
        return {**prompt, **answers, "probability": row.probability, "margin": row.margin}
    if isinstance(row, Stepwise):
        return {**prompt, "completions": list(row.steps), "labels": list(row.labels)}
    return {**prompt, "completion": row.completion, "label": row.label}


def _demonstrated(
    demonstrate: Callable[..., Any],
    prompt: Prompt,
    stats: PromptStats,
    rng: Any,
    policy: Policy,
    prefix: str,
) -> tuple[str, int]:
    """The demonstration for a prompt, and its tokens with its end. Raises KeelError if there is
    none, or it cannot be encoded, or does not fit."""
    gold = stats.tasks[prompt.task].gold(prompt)
    if gold is None:
        raise KeelError(
            f"task {prompt.task!r} has no gold answer to imitate: name the answer column "
            "in tasks.answer, or leave the sft stage out"
        )
    try:
        text = demonstrate(prompt, gold, rng)
    except KeelError:
        raise
    except Exception as error:  # a function of the user's
        raise KeelError(f"it raised {one_line(error, named=True)} at {prompt.id!r}") from error
    found = encode_demonstration(prompt, text, stats.encoder, policy.context, prefix)
    return text, len(found.answer)


def _base(context: StageContext, stage: JudgingStage) -> Policy:
    """The language model that the stage's own starts from. Raises KeelError if none can."""
    choice, kind = stage.base_model, stage.reward_model
    if choice is None or kind is None:
        return context.policy
    base = base_policy(context.recipe, context.policy, choice)
    if choice.stage is None:
        check_classifier(base.model.config, kind)
    return base


def _encoder(stage: JudgingStage, base: Policy) -> Callable[[Any], Any]:
    """What encodes the stage's rows."""
    closing = stage.reward_model == "outcome"
    template = None if stage.reward_model else stage.template_keywords
    reader = Reader(base.tokenizer, base.context, template, raw=stage.raw, closing=closing)
    if stage.records == "steps":
        return encoder("steps", reader, cast(ProcessRewardModelStage, stage).separator)
    return encoder(cast(Records, stage.records), reader)
