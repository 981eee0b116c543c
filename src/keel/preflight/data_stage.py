"""Stages that learn from rows and demonstrations, looked at: what is read, and how long it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from keel.config.entry import load_entry
from keel.config.judging import JudgingStage, ProcessRewardModelStage
from keel.config.sampling import Rollout, SamplingSource
from keel.config.schema import Recipe, SFTStage
from keel.config.seeds import derive
from keel.config.sources import Rewards
from keel.data.preferences import dataset as preferences
from keel.data.preferences.dataset import READERS
from keel.data.preferences.schema import Labelled, Preference, Stepwise
from keel.data.preferences.split import Sieve
from keel.data.tasks.base import places
from keel.models.chat import Encoder, encode_text
from keel.models.policy import Policy, load_policy
from keel.models.reward import check_classifier
from keel.models.reward_inputs import Reader
from keel.preflight.context import LongestExample, StageContext
from keel.preflight.findings import prompts as prompt_findings
from keel.preflight.findings import tokens as token_findings
from keel.preflight.lengths import quantile
from keel.preflight.prompt_stats import (
    PromptStats,
    SamplingPlan,
    first_of,
    how_read,
    places_of,
    plain_content,
)
from keel.preflight.sampling_stage import check_prompts, check_tokens, report_left_out
from keel.training.judged_data import (
    label_encoder,
    of_step,
    pair_encoder,
    step_encoder,
)
from keel.training.setup import longest_prompt, raw_tasks
from keel.types import KeelError, Prompt

ENCODED = 2_000
"""Rows whose length is measured, evenly spread."""


def inspect_demonstrations(
    seen: StageContext, recipe: Recipe, stage: SFTStage, policy: Policy
) -> None:
    """The first step's prompts, and the demonstrations made of them."""
    prefix = f"{stage.name}." if len(recipe.stages) > 1 else ""
    try:
        source = first_of(recipe, stage, policy)
    except KeelError as error:
        seen.stops("as its tasks are read", error, f"{prefix}tasks")
        return
    seen.source = source
    sampling = SamplingSource(
        "", stage.tasks, stage.prompts, Rewards(), Rollout(),
        validation_prompts=0, seed_name=(), first_draw=(),
    )  # fmt: skip
    plan = SamplingPlan(stage.name, prefix, sampling, seed=0, first_seed=0)
    check_prompts(seen, source, plan, 1, f"{prefix}prompts.max_tokens")
    if not source.first:
        return
    key = f"{prefix}tasks.{{}}.prompt"
    words = stage.prompts.chat_template
    check_tokens(seen, policy.tokenizer, source.first, words, key, list(source.tasks))
    lengths: list[int] = []
    texts: list[tuple[str, str]] = []
    raw = raw_tasks(source.tasks, stage.tasks)
    try:
        demonstrate = load_entry(stage.demonstration, "demonstration")
        rng = np.random.default_rng(derive(derive(recipe.seed, stage.name), "demonstrations", 1))
        for prompt in source.first:
            text, n = _demonstrated(demonstrate, prompt, source, rng, policy, prefix)
            texts.append((prompt.id, text))
            lengths.append(n)
            seen.work.tokens += len(prompt.tokens) + n
            _keep_longest(seen, prompt, text, len(prompt.tokens) + n, prompt.task in raw)
        limit = longest_prompt(stage.prompts.max_tokens, policy.context, 1)
        lenient = {
            t for t, s in zip(source.tasks, stage.tasks, strict=True) if s.bad_rows != "stop"
        }
        encoder = Encoder(policy.tokenizer, limit, words, forgiven=lenient, raw=raw)
        # Of the rows that later steps come to, each is looked at once.
        for task in source.tasks.values():
            for at in places_of(task):
                later = encoder(task.prompt("train", at))
                if later is not None:
                    text, n = _demonstrated(demonstrate, later, source, rng, policy, prefix)
                    lengths.append(n)
                    _keep_longest(seen, later, text, len(later.tokens) + n, later.task in raw)
    except KeelError as error:
        seen.stops("as its demonstrations are made", error, f"{prefix}demonstration")
        return
    specials = [str(token) for token in policy.tokenizer.all_special_tokens]
    seen.add(token_findings.special_in_answers(texts, specials, f"{prefix}tasks.0.answer"))
    seen.figures |= {
        "demonstration tokens (median)": quantile(lengths, 0.5),
        "demonstration tokens (longest)": max(lengths),
    }


def inspect_preference_data(
    seen: StageContext, recipe: Recipe, stage: JudgingStage, policy: Policy
) -> None:
    """The judged rows of a stage, encoded, and the model that it starts from."""
    prefix = f"{stage.name}." if len(recipe.stages) > 1 else ""
    try:
        base = _base(recipe, stage, policy)
    except KeelError as error:
        seen.stops("as its model is made", error, f"{prefix}base")
        return
    if stage.data is None:
        return
    if stage.data.name not in preferences.KINDS:
        seen.unseen.append(f"the rows of {stage.data.name!r}: its function was not called")
        return
    key = f"{prefix}data"
    try:
        sides = READERS[stage.records or "pairs"](stage.data, recipe.seed)
        encode = _encoder(stage, base)
        sieve: Any = Sieve(encode, None)
        if stage.data.bad_rows == "quarantine":
            sides = sieve.without_bad(sides)
        step = max(len(sides.train) / ENCODED, 1.0)
        chosen = [sides.train[int(at * step)] for at in range(min(len(sides.train), ENCODED))]
        encoded = [sieve(row) for row in chosen]
        lengths = [row.longest for row in encoded]
        held = stage.evaluation.rows and [sieve(row).longest for row in sides.heldout[:ENCODED]]
    except KeelError as error:
        seen.stops("as its rows are read", error, key)
        return
    limits = [n for n in (stage.max_tokens, base.context) if n is not None]
    limit = min(limits) if limits else None
    fitting = [
        (row, record)
        for row, record in zip(encoded, chosen, strict=True)
        if limit is None or row.longest <= limit
    ]
    if fitting:
        seed = derive(recipe.seed, stage.name, "rows")
        first = of_step([row for row, _ in fitting], stage.batch_size, 1, seed)
        seen.work.tokens = sum(row.length for row in first)
        longest, record = max(fitting, key=lambda pair: pair[0].length)
        seen.work.longest = LongestExample(longest.length, _as_columns(record), stage.raw)
    _held_out(seen, held or [], limit, prefix)
    _tokens(seen, base, stage, chosen, key)
    seen.learned = frozenset(place for row in sides.train for place in places(row.prompt))
    rows = len(sides.train)
    report_left_out(seen, sides.left_out)
    seen.figures |= {
        "train rows": rows,
        "held-out rows": len(sides.heldout),
        "plain prompts are read": how_read(base.tokenizer, stage.raw),
        "epochs": round(stage.steps * stage.batch_size / max(rows, 1), 2),
    }
    if lengths:
        seen.figures |= {
            "row tokens (median)": quantile(lengths, 0.5),
            "row tokens (95 %)": quantile(lengths, 0.95),
            "row tokens (longest)": max(lengths),
        }
    over = sum(limit is not None and n > limit for n in lengths)
    seen.add(
        prompt_findings.rows_over_length(
            over, len(lengths), limit, max(lengths, default=0),
            quantile(lengths, 0.95) if lengths else 0, f"{prefix}max_tokens",
        ),
        prompt_findings.unreadable(sides.left_out, rows + len(sides.heldout), f"{key}.bad_rows"),
    )  # fmt: skip


def _held_out(seen: StageContext, held: Sequence[int], limit: int | None, prefix: str) -> None:
    """Whether any held-out row fits; `held` are their tokens."""
    if not held or limit is None or min(held) <= limit:
        return
    error = KeelError(
        f"each of the {len(held)} held-out rows is longer than {limit} tokens: raise "
        f"{prefix}max_tokens, or set {prefix}evaluation.rows = 0"
    )
    seen.stops("as its rows are read", error, f"{prefix}max_tokens")


def _tokens(
    seen: StageContext, base: Policy, stage: JudgingStage, rows: Sequence[Any], key: str
) -> None:
    """Findings of the first rows' prompts, and of the answers of all, as tokens."""
    template = stage.template_keywords
    reader = Reader(base.tokenizer, None, template, raw=stage.raw)
    prompts = [_read(reader, row) for row in rows[:32]]
    check_tokens(seen, base.tokenizer, prompts, template, key)
    specials = [str(token) for token in base.tokenizer.all_special_tokens]
    answers = [(row.id, text) for row in rows[:ENCODED] for text in _answers(row)]
    seen.add(token_findings.special_in_answers(answers, specials, key, letters=True))


def _read(reader: Reader, row: Any) -> Prompt:
    """A row's prompt with its tokens."""
    return reader.prompt(row.prompt, row.id)


def _answers(row: Any) -> tuple[str, ...]:
    """What a row has of answers."""
    if isinstance(row, Preference):
        return row.chosen, row.rejected
    return row.steps if isinstance(row, Stepwise) else (row.completion,)


def _as_columns(row: Preference | Labelled | Stepwise) -> dict[str, Any]:
    """A row as the readers of preference data take it."""
    prompt = plain_content(row.prompt)
    if isinstance(row, Preference):
        answers: dict[str, Any] = {"chosen": row.chosen, "rejected": row.rejected}
        return {"prompt": prompt, **answers, "probability": row.probability, "margin": row.margin}
    if isinstance(row, Stepwise):
        return {"prompt": prompt, "completions": list(row.steps), "labels": list(row.labels)}
    return {"prompt": prompt, "completion": row.completion, "label": row.label}


def _keep_longest(seen: StageContext, prompt: Prompt, text: str, tokens: int, raw: bool) -> None:
    """Keep an example where none before was longer."""
    if seen.work.longest is None or tokens > seen.work.longest.tokens:
        data = {"prompt": plain_content(prompt.content), "answer": text}
        seen.work.longest = LongestExample(tokens, data, raw)


def _demonstrated(
    demonstrate: Callable[..., Any],
    prompt: Prompt,
    source: PromptStats,
    rng: Any,
    policy: Policy,
    prefix: str,
) -> tuple[str, int]:
    """The demonstration for a prompt, and its tokens with its end. Raises KeelError where there is
    none, or it does not fit."""
    gold = source.tasks[prompt.task].gold(prompt)
    if gold is None:
        raise KeelError(
            f"task {prompt.task!r} has no gold answer to imitate: name the answer column "
            "in tasks.answer, or leave the sft stage out"
        )
    text, ids = _spelled(demonstrate, prompt, gold, rng, policy)
    whole = len(prompt.tokens) + len(ids) + 1
    if policy.context is not None and whole > policy.context:
        raise KeelError(
            f"prompt {prompt.id!r} and its demonstration are {whole} tokens, more than the "
            f"model's context of {policy.context}: lower {prefix}prompts.max_tokens"
        )
    return text, len(ids) + 1


def _spelled(
    demonstrate: Callable[..., Any], prompt: Any, gold: str, rng: Any, policy: Policy
) -> tuple[str, list[int]]:
    """A demonstration and its tokens. Raises KeelError where it cannot be made or spelled."""
    try:
        text = demonstrate(prompt, gold, rng)
    except KeelError:
        raise
    except Exception as error:  # of the user's making
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"it raised {message} at {prompt.id!r}") from error
    return text, encode_text(text, f"the demonstration for {prompt.id}", policy.tokenizer)


def _base(recipe: Recipe, stage: JudgingStage, policy: Policy) -> Policy:
    """The language model that the stage's own starts from. Raises KeelError where none can."""
    choice, kind = stage.base_model, stage.reward_model
    if choice is None or kind is None:
        return policy
    base = policy
    if choice.name is not None:
        own = {"name": choice.name, "build": None, "revision": None, "lora": None}
        base = load_policy(
            recipe.model.model_copy(update={**own, "chat_template": None}), recipe.seed
        )
        if base.tokenizer.chat_template is None:
            base.tokenizer.chat_template = recipe.model.chat_template
    if choice.stage is None:
        check_classifier(base.model.config, kind)
    return base


def _encoder(stage: JudgingStage, base: Policy) -> Callable[[Any], Any]:
    """What makes tokens of the stage's rows."""
    closing = stage.reward_model == "outcome"
    template = None if stage.reward_model else stage.template_keywords
    reader = Reader(base.tokenizer, base.context, template, raw=stage.raw, closing=closing)
    if stage.records == "steps":
        return step_encoder(reader, cast(ProcessRewardModelStage, stage).separator)
    return label_encoder(reader) if stage.records == "labels" else pair_encoder(reader)
