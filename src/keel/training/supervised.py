"""The loop of the stages that learn from stored examples, and the demonstrations of SFT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from keel.config.entry import load_function
from keel.config.fields import derive
from keel.config.sources import SFTData
from keel.config.stage import ImitationSource, Optimizer, StageConfig
from keel.data.mixture import ItemStream, Numbered
from keel.data.sft import (
    Block,
    SFTEncoder,
    SFTRow,
    StoredSet,
    Trained,
    encode_rows,
    pack,
    read_sft,
    set_name,
)
from keel.data.streamed import StreamedSet, first_rows
from keel.learn.batch import Batch, from_groups
from keel.learn.memory import LESS, TokenBudget, oom_context
from keel.learn.optimizer import (
    Cause,
    NotFinite,
    WeightOptimizer,
    bad_weight,
    find_offending_sequence,
    in_weights,
    learning_rate,
    stop_unless_finite,
    trainable,
)
from keel.learn.ranks import save_learned
from keel.models.chat import EncodedAnswer, Encoder, encode_answer
from keel.models.conversations import ConversationEncoder
from keel.models.head import CHUNK_TOKENS, log_probs, logits
from keel.models.packed import PackedSizes
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.runs.rows import LeftOut, counted, write_quarantine
from keel.training import loop
from keel.training.judged_data import some_rows
from keel.training.loop import EvaluationResult, StepResult
from keel.training.setup import PromptSource, RunContext, dropout_of, token_budget
from keel.training.state import Progress, State, restore_modules, restore_optimizers
from keel.types import Completion, Group, KeelError, Prompt, Task, one_line

B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class Examples(Generic[B]):
    """How a step reads its batch.

    `batch` gives that of a step (counted from 1); `backward` adds the gradient of a batch to the
    parameters', that many tokens at a time, and returns its metrics; `sizes` are the batch's
    tokens, `split` its examples as batches of one, `write` stores it in a folder; `state` is saved
    to resume the stream.
    """

    batch: Callable[[int], B]
    backward: Callable[[B, int], dict[str, float]]
    sizes: Callable[[B], PackedSizes]
    split: Callable[[B], Sequence[B]]
    write: Callable[[Path, B], None]
    state: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True, eq=False, kw_only=True)
class ExampleLoop(loop.Loop, Generic[B]):
    """The loop of a stage that learns from examples."""

    examples: Examples[B]
    policy: Policy
    optimizer: WeightOptimizer
    schedule: Optimizer
    modules: Mapping[str, nn.Module]
    reference: Reference | None

    def take_step(self, progress: Progress, number: int) -> StepResult:
        """One optimizer step on the batch of a step, or none if it would not be finite."""
        with self.writer.clock("data"):
            batch = self.examples.batch(number)
        rate = progress.rate_scale * learning_rate(self.schedule, number - 1, self.steps)
        with self.writer.clock("update"):
            try:
                metrics = update(self, batch, rate)
            except NotFinite as error:
                self.optimizer.clear()
                self.skip(
                    progress,
                    error,
                    began=self.optimizer.began,
                    weight=lambda: bad_weight(self.optimizer.parameters),
                    diagnose=lambda: _diagnose(self, batch),
                    keep=lambda folder: self.examples.write(folder, batch),
                )
                metrics = {}
        skipped, tokens = int("grad_norm" not in metrics), sum(self.examples.sizes(batch).lengths)
        metrics["learning_rate"] = rate
        return StepResult(metrics, tokens, skipped, stream=self.examples.state())

    def state(self, progress: Progress) -> State:
        learned = ({"optimizer": self.optimizer}, self.modules, self.reference)
        return State(progress, self.policy, lambda folder: save_learned(folder, *learned))


def train_on_examples(
    run: RunContext,
    stage: StageConfig,
    progress: Progress,
    examples: Examples[Any],
    optimizer: WeightOptimizer,
    *,
    budget: TokenBudget | None = None,
    modules: Mapping[str, nn.Module] | None = None,
    reference: Reference | None = None,
    evaluate: Callable[[int], EvaluationResult] | None = None,
) -> Progress:
    """A stage that learns from examples: restored, if the run resumes it, and run.

    `modules` are trained with the policy, or instead of it.
    """
    modules = modules or {}
    if run.resume_from is not None:
        restore_modules(run.resume_from, modules)
        restore_optimizers(run.resume_from, {"optimizer": optimizer})
    made = ExampleLoop(
        steps=stage.steps,
        checkpoints=stage.checkpoints,
        on_nonfinite=stage.on_nonfinite,
        budget=budget or token_budget(run, stage, progress),
        writer=run.writer,
        evaluate=evaluate,
        evaluate_every=stage.evaluation_interval or 0,
        stop_when=stage.stop_when,
        dropout=dropout_of(run.recipe, stage),
        examples=examples,
        policy=run.policy,
        optimizer=optimizer,
        schedule=stage.optimizer,
        modules=modules,
        reference=reference,
    )
    return loop.run(made, progress)


def update(made: ExampleLoop[Any], batch: Any, rate: float) -> dict[str, float]:
    """One optimizer step; its metrics. Raises NotFinite if none was taken."""
    metrics = made.budget.fitting(
        lambda tokens: made.examples.backward(batch, tokens),
        made.examples.sizes(batch),
        made.optimizer.clear,
        pending=lambda: made.optimizer.pending,
    )
    stop_unless_finite(metrics)
    metrics["grad_norm"] = made.optimizer.step(rate)
    stop_unless_finite(metrics)
    return metrics


def _diagnose(made: ExampleLoop[Any], batch: Any) -> tuple[Cause, str]:
    """The cause of a loss or gradient that is not finite, and the example that it comes from."""
    parameters = made.optimizer.parameters
    ones = made.examples.split(batch)
    cause = in_weights(parameters) or find_offending_sequence(
        lambda i: made.examples.backward(ones[i], made.budget.tokens),
        range(len(ones)),
        parameters,
        made.optimizer.clear,
    )
    return cause, "" if cause.sequence is None else f"row {cause.sequence} of the step"


# ---------------------------------------------------------------- imitation


def mixed_in(
    run: RunContext, source: ImitationSource | None, stage: str, seed: int
) -> Callable[[int, int], Batch] | None:
    """What a stage imitates besides what else it learns, if anything: different examples, as far as
    there are so many, for each optimizer step, by the seed, the step and its own number in that."""
    if source is None:
        return None
    seeded, policy = run.recipe.seed, run.policy
    sets = [open_set(one, policy, source, at, seed=seeded) for at, one in enumerate(source.data)]
    _note_sets(run, stage, sets)
    pool = [one.group for each in sets for one in each.examples]
    sizes = [len(each.examples) for each in sets]
    shares = np.repeat([one.weight for one in source.data] / np.array(sizes), sizes)

    def batch(step: int, number: int) -> Batch:
        rng = np.random.default_rng(derive(seed, "demonstrations", step, number))
        count = source.batch_size
        drawn = rng.choice(len(pool), count, replace=count > len(pool), p=shares / shares.sum())
        return from_groups([pool[at] for at in drawn], policy.device)

    return batch


def imitation(
    batch: Callable[[int], Batch],
    backward: Callable[[Batch, int], dict[str, float]],
    state: Callable[[], Mapping[str, Any]],
) -> Examples[Batch]:
    """Completions to imitate as the examples of a stage."""
    return Examples(
        batch=batch,
        backward=backward,
        sizes=lambda batch: batch.sizes,
        split=lambda batch: [batch.select([i]) for i in range(batch.sequences)],
        write=loop.write_batch,
        state=state,
    )


def imitate(policy: Policy, batch: Batch, token_budget: int) -> dict[str, float]:
    """The gradient of the mean cross-entropy of a batch's tokens, and its metrics."""
    weight = 1 / max(sum(batch.lengths), 1)
    total, right = 0.0, 0.0
    for micro in batch.micro_batches(token_budget):
        scores = policy.scores(micro.packed, 1.0, entropy=False)
        loss = -(weight * scores.log_prob_N).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        right += float((weight * scores.log_prob_N.detach().exp()).sum())
    return {
        "loss": total,
        "mean_token_probability": right,
        "completions/mean_length": float(np.mean(batch.lengths)),
    }


def train_on_sets(
    run: RunContext, stage: StageConfig, progress: Progress, source: ImitationSource
) -> Progress:
    """Imitate the examples of stored or streamed sets."""
    policy, seed = run.policy, derive(run.recipe.seed, stage.name)
    sets = [
        open_set(
            one, policy, source, number, seed=run.recipe.seed,
            quarantine=run.folder.quarantine / f"{stage.name}-data-{number}.jsonl",
        )
        for number, one in enumerate(source.data)
    ]  # fmt: skip
    _note_sets(run, stage.name, sets)
    streams = [one.train for one in sets if isinstance(one.train, StreamedSet)]
    weights = [one.weight for one in source.data]
    items: list[Numbered[Block]] = [one.train for one in sets]
    stream = ItemStream(items, weights, derive(seed, "examples"), shuffle=source.shuffle)
    if progress.stream:
        stream.restore(progress.stream)
    sizes = [item.size("train") for item in items]
    whole = None if None in sizes else sum(n for n in sizes if n is not None)
    stage = run.resolved(stage, whole, source.batch_size)
    held = [one for each in sets for one in each.validation]

    def batch(number: int) -> Batch:
        blocks = stream.take(source.batch_size)
        return from_groups([one.group for block in blocks for one in block], policy.device)

    def backward(batch: Batch, token_budget: int) -> dict[str, float]:
        counts = [one.counts() for one in streams]
        names = ("left_out", "cut") if streams else ()
        read = {f"examples/{name}": float(sum(one[name] for one in counts)) for name in names}
        return {**imitate(policy, batch, token_budget), **read}

    evaluate = partial(evaluate_imitation, policy, held, stage.initial_token_budget)
    progress = train_on_examples(
        run,
        stage,
        progress,
        imitation(batch, backward, stream.state),
        WeightOptimizer(trainable(policy), stage.optimizer),
        evaluate=evaluate if held else None,
    )
    for one in streams:
        _note_counts(run, stage.name, one.name, one.encode)
        if one.bad:
            run.writer.note(f"{stage.name}: {one.name}: {one.bad} rows left out: cannot be read")
    return progress


@dataclass(frozen=True, eq=False)
class OpenSet:
    """A set of examples, encoded: of the train split as blocks, of the validation split the first.

    `rows` and `examples` are the train split's, of a streamed set the first. `left_out` are the
    rows of both that are not used, `unvalidated` is why it has no validation examples.
    """

    train: StoredSet | StreamedSet
    validation: list[Trained]
    left_out: tuple[LeftOut, ...]
    encode: SFTEncoder
    rows: Sequence[SFTRow]
    examples: Sequence[Trained]
    unvalidated: str = ""


def open_set(
    data: SFTData,
    policy: Policy,
    source: ImitationSource,
    number: int,
    *,
    seed: int,
    quarantine: Path | None = None,
) -> OpenSet:
    """The set of number `number` of a stage; a streamed one adds bad rows to `quarantine`.

    Raises KeelError for what cannot be used.
    """
    limit, key = source.limit(policy.context), f"{source.key}data.{number}"
    if source.packing and limit is None:
        raise KeelError(
            "packing fills blocks of max_tokens, and the model states no context: set max_tokens",
            key="max_tokens",
        )
    chat = ConversationEncoder(policy.tokenizer, source.template_keywords)
    encode = SFTEncoder(chat, source.loss_on, limit, source.drops, data.raw)
    name = f"{set_name(data)}#{number + 1}" if number else set_name(data)
    size = limit if source.packing else None
    rows = source.validation_rows
    splits = first_rows(data, rows, key) if data.streams else read_sft(data, seed, key)
    examples, bad = encode_rows(splits.train, encode, data.bad_rows, key)
    if not examples:
        which = "first" if data.streams else "train"
        raise KeelError(
            f"{name}: none of the {len(splits.train)} {which} examples fits {limit} tokens: raise "
            f"{source.key}max_tokens",
            key=f"{source.key}max_tokens",
        )
    some = some_rows(splits.validation, rows)
    validation, worse = encode_rows(some, encode, data.bad_rows, key)
    train: StoredSet | StreamedSet
    if data.streams:
        train = StreamedSet(data, name, key, replace(encode, long=Counter()), size, quarantine)
    else:
        train = StoredSet(
            name, [(one,) for one in examples] if size is None else pack(examples, size)
        )
    left = (*splits.left_out, *bad, *worse)
    unvalidated = ""
    if rows and not validation:
        one = (
            "it is streamed, without validation_path"
            if data.streams
            else "its rows are of one prompt"
        )
        unvalidated = f"each of {len(some)} has more than {limit} tokens" if some else one
    return OpenSet(train, validation, left, encode, splits.train, examples, unvalidated)


def _note_sets(run: RunContext, stage: str, sets: Sequence[OpenSet]) -> None:
    """Say what of the sets is cut or left out; rows that are left out go to the quarantine.

    Of streamed sets only validation rows: the stream itself comes to the others.
    """
    again = {one.train.rows_of for one in sets if isinstance(one.train, StreamedSet)}
    left = [row for one in sets for row in one.left_out if row.source not in again]
    target = run.folder.quarantine / f"{stage}-rows.jsonl"
    write_quarantine(target, left)
    if run.resume_from is not None:
        return
    if left:
        run.writer.note(f"{stage}: rows left out: {counted(left)} (quarantine/{target.name})")
    for one in sets:
        if one.unvalidated:
            run.writer.note(f"{stage}: {one.train.name}: not validated: {one.unvalidated}")
        if isinstance(one.train, StoredSet):
            _note_counts(run, stage, one.train.name, one.encode)


def _note_counts(run: RunContext, stage: str, name: str, encode: SFTEncoder) -> None:
    for line in encode.counts():
        run.writer.note(f"{stage}: {name}: {line}")


@oom_context("the validation examples were scored", f"lower token_budget, {LESS}")
@torch.no_grad()
def evaluate_imitation(
    policy: Policy, examples: Sequence[Trained], token_budget: int, step: int
) -> EvaluationResult:
    """The mean cross-entropy of the tokens of validation examples that bear loss, and the share of
    them that the model finds the most probable."""
    batch = from_groups([one.group for one in examples], policy.device)
    loss, right = 0.0, 0
    for micro in batch.micro_batches(token_budget):
        hidden_NH, token_N = policy.hidden(micro.packed), micro.packed.scored()
        loss -= float(log_probs(hidden_NH, policy.head, token_N).double().sum())
        for at in range(0, len(token_N), CHUNK_TOKENS):
            part = slice(at, at + CHUNK_TOKENS)
            top_N = logits(hidden_NH[part], policy.head).argmax(-1)
            right += int((top_N == token_N[part]).sum())
    count = sum(batch.lengths)
    found = {"loss": loss / count, "mean_token_accuracy": right / count}
    report = {**found, "n": len(examples), "tokens": count}
    return EvaluationResult(
        report,
        {f"eval/{name}": value for name, value in found.items()},
        kind="measured",
        score=-found["loss"],
        scored="eval/loss",
        before=report,
    )


# ---------------------------------------------------------------- demonstrations of tasks


Demonstrate = Callable[[Prompt, str, np.random.Generator], str]
"""(prompt, gold answer, random numbers) -> the text to imitate."""


def demonstrations(
    policy: Policy, stage: str, entry: str, batch_size: int, source: PromptSource, seed: int
) -> Examples[Batch]:
    """Texts that a function of the recipe (`entry`) gives for prompts, as the examples of a stage.

    Raises KeelError for one that cannot be made or does not fit, when its step comes.
    """
    demonstrate, stream = load_function(entry, "demonstration"), source.stream

    def group(prompt: Prompt, rng: np.random.Generator) -> Group:
        text = demonstration(prompt, source.tasks[prompt.task], entry, demonstrate, rng)
        found = encode_demonstration(prompt, text, source.encoder, policy.context, f"{stage}.")
        completion = Completion.given(found.answer, text)
        return Group(replace(prompt, tokens=tuple(found.prompt)), (completion,))

    def batch(number: int) -> Batch:
        rng = np.random.default_rng(derive(seed, "demonstrations", number))
        return from_groups([group(one, rng) for one in stream.take(batch_size)], policy.device)

    def backward(batch: Batch, token_budget: int) -> dict[str, float]:
        left_out = float(sum(stream.left_out.values()))
        return {**imitate(policy, batch, token_budget), "prompts/left_out": left_out}

    return imitation(batch, backward, stream.state)


def demonstration(
    prompt: Prompt, task: Task, entry: str, demonstrate: Demonstrate, rng: np.random.Generator
) -> str:
    """The text that a function of the recipe (`entry`) gives for a prompt and its gold answer.

    Raises KeelError if the task knows no gold answer, or the function raises.
    """
    gold = task.gold(prompt)
    if gold is None:
        raise KeelError(
            f"task {prompt.task!r} has no gold answer to imitate: name the answer column in "
            "tasks.answer, or leave the sft stage out",
            key="tasks.answer",
        )
    try:
        return demonstrate(prompt, gold, rng)
    except Exception as error:
        message = one_line(error, named=True)
        raise KeelError(f"demonstration {entry!r} raised {message} at {prompt.id!r}") from error


def encode_demonstration(
    prompt: Prompt, text: str, encoder: Encoder, context: int | None, prefix: str
) -> EncodedAnswer:
    """A demonstration as the policy would have written it, with what ends it.

    `prefix` is that of the stage's keys. Raises KeelError if nothing can end it, or it does not fit
    the model's context.
    """
    raw = prompt.task in encoder.raw
    found = encode_answer(
        prompt.content, text, prompt.id, encoder.chat, prompt.tools, raw=raw, mask=False
    )
    if not found.closing:
        raise KeelError(
            "the tokenizer has no end-of-sequence token to end a demonstration with: set eos_token "
            "in its tokenizer_config.json"
        )
    length = len(found.prompt) + len(found.answer)
    if context is not None and length > context:
        raise KeelError(
            f"prompt {prompt.id!r} and its demonstration are {length} tokens, more than the "
            f"model's context of {context}: lower {prefix}prompts.max_tokens, or drop the row",
            key="prompts.max_tokens",
        )
    return found
