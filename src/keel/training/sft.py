"""Supervised fine-tuning on a task's demonstrations: the warm-up before reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keel.config.schema import SFTStage
from keel.config.seeds import derive
from keel.data.tasks.mixture import PromptStream
from keel.learn.batch import Batch, from_groups
from keel.learn.optimizer import AdamW
from keel.learn.token_budget import TokenBudget
from keel.models.chat import encode_text
from keel.models.policy import Policy
from keel.runs.writer import RunWriter
from keel.training import non_finite as faults
from keel.training import supervised as fit
from keel.training.state import Progress
from keel.types import Completion, Group, KeelError, Prompt, Task

Demonstrate = Callable[[Prompt, str, np.random.Generator], str]
"""(prompt, gold answer, random numbers) -> the text to imitate."""


@dataclass(frozen=True, eq=False)
class Imitation:
    """What supervised fine-tuning works with."""

    stage: SFTStage
    policy: Policy
    optimizer: AdamW
    budget: TokenBudget
    stream: PromptStream
    tasks: dict[str, Task]
    demonstrate: Demonstrate
    writer: RunWriter
    seed: int


def run(work: Imitation, progress: Progress) -> Progress:
    """From `progress` to the last step of the stage, or until the run is asked to stop."""
    return fit.run(
        fit.Fit(
            steps=work.stage.steps,
            rows=fit.Rows(
                draw=lambda number: demonstrations(work, number),
                learn=lambda batch, tokens: learn(work, batch, tokens),
                sizes=lambda batch: batch.sizes,
                alone=lambda batch: [batch.select([i]) for i in range(batch.sequences)],
                keep=faults.write_batch,
                stream=work.stream.state,
            ),
            policy=work.policy,
            optimizer=work.optimizer,
            choice=work.stage.optimizer,
            budget=work.budget,
            on_nonfinite=work.stage.on_nonfinite,
            checkpoints=work.stage.checkpoints,
            writer=work.writer,
            modules={},
        ),
        progress,
    )


def demonstrations(work: Imitation, number: int) -> Batch:
    """The step's prompts, each with its demonstration as the completion, EOS at its end."""
    rng = np.random.default_rng(derive(work.seed, "demonstrations", number))
    groups = []
    for prompt in work.stream.take(work.stage.batch_size):
        gold = work.tasks[prompt.task].gold(prompt)
        if gold is None:
            raise KeelError(
                f"stage {work.stage.name!r}: task {prompt.task!r} has no gold answer to imitate: "
                "name the answer column (tasks.answer) or leave the sft stage out"
            )
        groups.append(Group(prompt, (_demonstration(work, prompt, gold, rng),)))
    return from_groups(groups, work.policy.device)


def learn(work: Imitation, batch: Batch, token_budget: int) -> fit.Learned:
    """The gradient of the mean cross-entropy of the demonstrations' tokens."""
    weight = 1 / max(sum(batch.lengths), 1)
    total, right = 0.0, 0.0
    for micro in batch.micro_batches(token_budget):
        scores = work.policy.scores(micro.packed, 1.0, entropy=False)
        loss = -(weight * scores.log_prob_N).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        right += float((weight * scores.log_prob_N.detach().exp()).sum())
    metrics = {
        "loss": total,
        "mean_token_probability": right,
        "completions/mean_length": float(np.mean(batch.lengths)),
    }
    metrics["prompts/left_out"] = float(sum(work.stream.left_out.values()))
    return fit.Learned(metrics, sum(batch.input_lengths))


def _demonstration(
    work: Imitation, prompt: Prompt, gold: str, rng: np.random.Generator
) -> Completion:
    """The text to imitate, with its end. Raises KeelError where it cannot be made or learned."""
    name = work.stage.demonstration
    try:
        text = work.demonstrate(prompt, gold, rng)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"demonstration {name!r} raised {message} at {prompt.id!r}") from error
    ids = encode_text(text, f"the demonstration for {prompt.id}", work.policy.tokenizer)
    eos = work.policy.tokenizer.eos_token_id
    if eos is None:
        raise KeelError(
            f"stage {work.stage.name!r}: the tokenizer has no end-of-sequence token to end a "
            "demonstration with: set eos_token in its tokenizer_config.json"
        )
    tokens = np.array([*ids, eos], dtype=np.int64)
    whole, context = len(prompt.tokens) + len(tokens), work.policy.context
    if context is not None and whole > context:
        raise KeelError(
            f"prompt {prompt.id!r} and its demonstration are {whole} tokens, more than the model's "
            f"context of {context}: lower {work.stage.name}.prompts.max_tokens, or drop the row"
        )
    return Completion(
        tokens=tokens,
        log_probs=np.zeros(len(tokens), dtype=np.float32),
        written=np.ones(len(tokens), dtype=np.bool_),
        finish="eos",
        text=text,
    )
