"""Supervised fine-tuning on a task's demonstrations: the warm-up before reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from keel.config.fields import derive
from keel.data.tasks.mixture import PromptStream
from keel.learn.batch import Batch, from_groups
from keel.models.chat import EncodedAnswer, Encoder, encode_answer
from keel.models.policy import Policy
from keel.training import non_finite
from keel.training.supervised import Examples, GradientStep
from keel.types import Completion, Group, KeelError, Prompt, Task, one_line

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
            write=non_finite.write_batch,
            state=self.stream.state,
        )

    def batch(self, number: int) -> Batch:
        """The step's prompts, each with its demonstration as the completion, closed as a turn."""
        rng = np.random.default_rng(derive(self.seed, "demonstrations", number))
        groups = []
        for prompt in self.stream.take(self.batch_size):
            groups.append(self._group(prompt, rng))
        return from_groups(groups, self.policy.device)

    def backward(self, batch: Batch, token_budget: int) -> GradientStep:
        """The gradient of the mean cross-entropy of the demonstrations' tokens."""
        weight = 1 / max(sum(batch.lengths), 1)
        total, right = 0.0, 0.0
        for micro in batch.micro_batches(token_budget):
            scores = self.policy.scores(micro.packed, 1.0, entropy=False)
            loss = -(weight * scores.log_prob_N).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            right += float((weight * scores.log_prob_N.detach().exp()).sum())
        metrics = {
            "loss": total,
            "mean_token_probability": right,
            "completions/mean_length": float(np.mean(batch.lengths)),
            "prompts/left_out": float(sum(self.stream.left_out.values())),
        }
        return GradientStep(metrics, sum(batch.input_lengths))

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
