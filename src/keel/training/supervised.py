"""The loop of the stages that learn from stored examples, and the demonstrations of SFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from torch import nn

from keel.config.fields import derive
from keel.config.stage import Optimizer, StageConfig
from keel.data.mixture import PromptStream
from keel.learn.batch import Batch, TokenBudget, from_groups
from keel.learn.optimizer import (
    Cause,
    NotFinite,
    WeightOptimizer,
    bad_weight,
    find_offending_sequence,
    in_weights,
    learning_rate,
    stop_unless_finite,
)
from keel.learn.ranks import save_learned
from keel.models.chat import EncodedAnswer, Encoder, encode_answer
from keel.models.packed import PackedSizes
from keel.models.policy import Policy
from keel.models.reference import Reference
from keel.training import loop
from keel.training.loop import EvaluationResult, StepResult
from keel.training.setup import RunContext, dropout_of, token_budget
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


Demonstrate = Callable[[Prompt, str, np.random.Generator], str]
"""(prompt, gold answer, random numbers) -> the text to imitate."""


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """Where the demonstrations of a stage come from, and the policy that learns from them."""

    stage: str
    entry: str
    """The recipe's name of `demonstrate`."""
    demonstrate: Demonstrate
    tasks: Mapping[str, Task]
    stream: PromptStream
    batch_size: int
    policy: Policy
    seed: int
    encoder: Encoder

    def examples(self) -> Examples[Batch]:
        """The demonstrations as the examples of a stage."""
        return Examples(
            batch=self.batch,
            backward=self.backward,
            sizes=lambda batch: batch.sizes,
            split=lambda batch: [batch.select([i]) for i in range(batch.sequences)],
            write=loop.write_batch,
            state=self.stream.state,
        )

    def batch(self, number: int) -> Batch:
        """The step's prompts, each with its demonstration as the completion, closed as a turn."""
        rng = np.random.default_rng(derive(self.seed, "demonstrations", number))
        groups = []
        for prompt in self.stream.take(self.batch_size):
            groups.append(self._group(prompt, rng))
        return from_groups(groups, self.policy.device)

    def backward(self, batch: Batch, token_budget: int) -> dict[str, float]:
        """The gradient of the mean cross-entropy of the demonstrations' tokens."""
        weight = 1 / max(sum(batch.lengths), 1)
        total, right = 0.0, 0.0
        for micro in batch.micro_batches(token_budget):
            scores = self.policy.scores(micro.packed, 1.0, entropy=False)
            loss = -(weight * scores.log_prob_N).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            right += float((weight * scores.log_prob_N.detach().exp()).sum())
        return {
            "loss": total,
            "mean_token_probability": right,
            "completions/mean_length": float(np.mean(batch.lengths)),
            "prompts/left_out": float(sum(self.stream.left_out.values())),
        }

    def _group(self, prompt: Prompt, rng: np.random.Generator) -> Group:
        """The prompt and the text to imitate. Raises KeelError if it cannot be made or does not
        fit."""
        text = demonstration(prompt, self.tasks[prompt.task], self.entry, self.demonstrate, rng)
        found = encode_demonstration(
            prompt, text, self.encoder, self.policy.context, f"{self.stage}."
        )
        tokens = np.array(found.answer, dtype=np.int64)
        completion = Completion(
            tokens=tokens,
            log_probs=np.zeros(len(tokens), dtype=np.float32),
            written=np.ones(len(tokens), dtype=np.bool_),
            finish="eos",
            text=text,
        )
        return Group(replace(prompt, tokens=tuple(found.prompt)), (completion,))


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
