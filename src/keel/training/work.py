"""What every stage is put together from: the run around it, and prompts from its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.judging import JudgingStage
from keel.config.schema import Recipe, Stage
from keel.config.seeds import derive
from keel.config.sources import Prompts, TaskSource
from keel.data.tasks import PromptStream, build_tasks, heldout, stored
from keel.learn.token_budget import Budget
from keel.models.chat import Encoder
from keel.models.policy import Policy
from keel.runs.quarantine import LeftOut, counted, write_quarantine
from keel.runs.writer import Session
from keel.training.state import Progress
from keel.types import KeelError, Prompt, Task

ENCODED_BEFORE = 10_000
"""Stored rows of a stage whose prompts are encoded before the first step, to find the bad ones."""


@dataclass(frozen=True, eq=False)
class Work:
    """What a stage gets: the recipe, the hand that writes, the policy, and where to resume from."""

    recipe: Recipe
    session: Session
    policy: Policy
    resume_from: Path | None


@dataclass(frozen=True, eq=False)
class Source:
    """A stage's tasks, and the streams of encoded prompts over them."""

    tasks: dict[str, Task]
    weights: list[float]
    encoder: Encoder
    stream: PromptStream

    def heldout(self, n: int) -> list[Prompt]:
        return heldout(list(self.tasks.values()), self.weights, n, self.encoder)


def open_source(
    work: Work,
    stage: str,
    sources: Sequence[TaskSource],
    prompts: Prompts,
    seed: int,
    *,
    room: int,
    state: Mapping[str, Any] | None = None,
) -> Source:
    """The prompts of tasks, encoded, those left out that leave no room for an answer.

    `state` is that of the stream to go on from. Stored rows that no prompt comes of are in the run
    folder's quarantine when this returns.
    """
    tasks = {task.name: task for task in build_tasks(sources, work.recipe.seed)}
    lenient = {name for name, s in zip(tasks, sources, strict=True) if s.bad_rows == "quarantine"}
    weights = [source.weight for source in sources]
    encoder = Encoder(
        work.policy.tokenizer,
        longest_prompt(prompts.max_tokens, work.policy.context, room),
        prompts.chat_template,
        forgiven=lenient,
        note=work.session.note,
        raw=raw_tasks(tasks, sources),
        served=work.policy.served,
    )
    _set_aside(work, stage, tasks, encoder)
    stream = PromptStream(list(tasks.values()), weights, derive(seed, "prompts"), encoder)
    if state:
        stream.restore(state)
    return Source(tasks, weights, encoder, stream)


def raw_tasks(tasks: Mapping[str, Task], sources: Sequence[TaskSource]) -> set[str]:
    """The names of the tasks whose plain prompts go without the chat template."""
    return {name for name, source in zip(tasks, sources, strict=True) if source.raw}


def _set_aside(work: Work, stage: str, tasks: Mapping[str, Task], encoder: Encoder) -> None:
    """Put the rows of stored tasks that no prompt comes of into the quarantine, and say how many.

    So many rows as take seconds are encoded for that, in the order of the tasks; of the others,
    those that cannot be encoded are found in flight.
    """
    left: list[LeftOut] = []
    room = ENCODED_BEFORE
    for name, task in tasks.items():
        data = stored(task)
        if data is None:
            continue
        left += data.left_out
        rows = data.size("train") + data.size("heldout")
        if rows <= room:
            room -= rows
            left += data.refused(encoder.wrong, forgiven=name in encoder.forgiven)
            encoder.known.add(name)
    target = work.session.folder.quarantine / f"{stage}-prompts.jsonl"
    write_quarantine(target, left)
    if left and work.resume_from is None:
        work.session.note(f"{stage}: rows left out: {counted(left)} (quarantine/{target.name})")


def budget_of(stage: Stage | JudgingStage, progress: Progress, session: Session) -> Budget:
    """The stage's token budget, or what memory has had room for since where that is less."""
    budget = Budget(stage.token_budget, session.note)
    budget.tokens = min(progress.token_budget or budget.asked, budget.asked)
    return budget


def longest_prompt(wanted: int | None, context: int | None, room: int) -> int | None:
    """How long a prompt may be, so that an answer of `room` tokens still fits the context."""
    if context is None:
        return wanted
    if context <= room:
        raise KeelError(
            f"rollout.max_tokens = {room} leaves no room for a prompt in the model's context of "
            f"{context} tokens: lower it"
        )
    if wanted is not None and wanted + room > context:
        raise KeelError(
            f"prompts.max_tokens = {wanted} and rollout.max_tokens = {room} are more than the "
            f"model's context of {context} tokens: lower one of them"
        )
    return context - room if wanted is None else wanted
