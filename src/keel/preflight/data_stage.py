"""Inspects stages that learn from stored rows and demonstrations: what is read, and how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from keel.config.entry import load_entry
from keel.config.fields import derive
from keel.config.stage import DemonstrationSource, JudgedSource
from keel.data.columns import prompt_columns
from keel.data.preferences import READERS, encode_row, without_bad
from keel.data.splits import KINDS
from keel.models.policy import Policy
from keel.models.reward import Reader, check_classifier
from keel.preflight import tokens
from keel.preflight.context import StageContext
from keel.preflight.prompts import (
    check_tokens,
    encoded_prompts,
    few_rows,
    how_read,
    over_length,
    read_prompts,
    report_left_out,
    spread,
    unreadable,
)
from keel.preflight.trial import LongestExample
from keel.training.judged_data import encoder
from keel.training.judging import base_policy
from keel.training.supervised import demonstration, encode_demonstration
from keel.types import KeelError

ENCODED = 2_000
"""Rows whose length is measured, evenly spread."""


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
        demonstrate = load_entry(source.entry, "demonstration")
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
    context.add(tokens.special_in_answers(texts, specials, f"{prefix}tasks.0.answer"))
    context.add_lengths("demonstration tokens", lengths)


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
    if held and limit is not None and min(held) > limit:
        error = KeelError(
            f"each of the {len(held)} validation rows is longer than {limit} tokens: raise "
            f"{prefix}max_tokens, or set {prefix}evaluation.rows = 0",
            key="evaluation.rows",
        )
        context.add_stop("as its rows are read", error, f"{prefix}max_tokens")
    _check_row_tokens(context, base, source, chosen, key)
    rows = len(splits.train)
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
    context.add(tokens.special_in_answers(answers, specials, key, letters=True))


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
