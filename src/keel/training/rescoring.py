"""The rollouts that a run stored, scored again by other rewards, next to the stored values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.evaluation import SamplingSource
from keel.config.fields import derive
from keel.config.load import load_recipe, read_overrides
from keel.config.schema import Recipe
from keel.config.sources import RewardSource
from keel.data.mixture import PromptStream, build_tasks
from keel.engines.stored import completion_of, find_prompts, groups_of
from keel.models.chat import Encoder
from keel.models.loading import choose_device, load_tokenizer
from keel.rewards.registry import load_reward
from keel.rewards.scorer import Scorer
from keel.runs.reader import Record, Run, load
from keel.runs.rows import COMPONENT, prompt_text
from keel.training.setup import context_of, templates_at, with_stops
from keel.types import Group, KeelError, Prompt, Task


@dataclass(frozen=True, slots=True)
class RescoredRow:
    """A completion (its number in the file of its step) with the stored value and the new one."""

    step: int
    row: int
    prompt_id: str
    stored: float | None
    new: float | None
    prompt: str
    completion: str

    @property
    def difference(self) -> float:
        """How far the values are apart; infinite if one of them is missing."""
        if self.stored is None or self.new is None:
            return 0.0 if self.stored is self.new else float("inf")
        return abs(self.new - self.stored)


@dataclass(frozen=True, eq=False)
class Rescored:
    """The values of one reward, and what they are compared `against`: the stored values of a reward
    of this name, else the stored reward.

    `threshold` is what makes a verdict: at least this is right (`evaluation.threshold`).
    """

    name: str
    against: str
    threshold: float
    rows: tuple[RescoredRow, ...]

    def summary(self) -> dict[str, Any]:
        """Means, correlation, and how many verdicts changed, over completions with both values."""
        both = [(r.stored, r.new) for r in self.rows if r.stored is not None and r.new is not None]
        stored, new = np.array(both, dtype=np.float64).reshape(-1, 2).T
        vary = len(both) > 1 and np.ptp(stored) > 0 and np.ptp(new) > 0
        was, now = stored >= self.threshold, new >= self.threshold
        return {
            "reward": self.name,
            "against": self.against,
            "completions": len(self.rows),
            "compared": len(both),
            "stored_mean": float(stored.mean()) if both else None,
            "mean": float(new.mean()) if both else None,
            "correlation": float(np.corrcoef(stored, new)[0, 1]) if vary else None,
            "threshold": self.threshold,
            "became_right": int((~was & now).sum()),
            "became_wrong": int((was & ~now).sum()),
        }

    def most_different(self, count: int) -> list[RescoredRow]:
        """Those furthest apart, the first of equal ones first."""
        apart = [row for row in self.rows if row.difference > 0]
        return sorted(apart, key=lambda row: -row.difference)[:count]


def rescore(
    run: Path | str,
    rewards: Sequence[str],
    *,
    options: Sequence[str] = (),
    step: int | None = None,
    stage: str | None = None,
) -> tuple[list[Rescored], list[str]]:
    """The stored rollouts of a step, or of all, scored by built-ins or functions, as training would
    call them, and notes.

    `options` are `key=value` of each. The columns that they ask for are those of the recipe's
    tasks; if its prompts are not found there any more, only the stored answer. What a judge replies
    is kept in the run folder, as in training. Raises KeelError if there are no such rollouts, or a
    reward fails.
    """
    reader = load(run)
    recipe = load_recipe(reader.folder.recipe)
    steps = [step] if step is not None else _steps(reader, stage)
    stored = {number: reader.rollouts(number, stage) for number in steps}
    name = stored[steps[0]][0]["stage"]
    sampling = next(one.sampling for one in recipe.stages if one.name == name)
    assert sampling is not None
    tokenizer, device = load_tokenizer(recipe.model), "cpu"
    with suppress(KeelError):  # of a device that this machine has not got
        device = str(choose_device(recipe.model.device))
    around = context_of(recipe, reader.folder, tokenizer, device)
    chat = tokenizer.chat_template is not None
    tasks = {task.name: task for task in build_tasks(sampling.tasks, recipe.seed, chat=chat)}
    chosen = read_overrides(options)
    sources = [RewardSource(function=one, options=chosen) for one in rewards]
    functions = [load_reward(source, around) for source in sources]
    found: dict[str, list[RescoredRow]] = {one.name: [] for one in functions}
    notes: dict[str, None] = {}
    prompts = _Prompts(recipe, name, sampling, tasks, tokenizer, notes)
    timeout = sampling.rewards.timeout
    stop = with_stops(sampling.rollout, sampling.tasks, tokenizer).stop
    scorer = Scorer(functions, tasks, timeout=timeout, needed=False, stop=stop)
    with closing(scorer), templates_at(run=reader.folder):
        for number, records in stored.items():
            groups = prompts.groups(number, records)
            results = [one for judged in scorer(groups, number).results for one in judged]
            for at, (record, result) in enumerate(zip(records, results, strict=True)):
                for reward, rows in found.items():
                    value = record.get(_against(reward, records))
                    new, text = result.components[reward], prompt_text(record["prompt"])
                    rows.append(
                        RescoredRow(
                            *(number, at, record["prompt_id"], value, new, text),
                            record["completion"],
                        )
                    )
    threshold = 1.0 if sampling.evaluation is None else sampling.evaluation.threshold
    last = stored[steps[-1]]
    made = [Rescored(n, _against(n, last), threshold, tuple(rows)) for n, rows in found.items()]
    return made, list(notes)


def _against(name: str, records: Sequence[Record]) -> str:
    return COMPONENT + name if COMPONENT + name in records[0] else "reward"


def _steps(reader: Run, stage: str | None) -> list[int]:
    places = reader.rollout_places()
    steps = [p.step for p in places if stage is None or reader.stages[p.stage] == stage]
    if not steps:
        raise KeelError(
            f"{reader.folder.path} has no rollouts{f' of stage {stage!r}' if stage else ''}: name "
            "another run, or set rollouts_every there"
        )
    return steps


class _Prompts:
    """The prompts of a run's steps, with their columns, from its recipe's tasks."""

    def __init__(
        self,
        recipe: Recipe,
        stage: str,
        sampling: SamplingSource,
        tasks: dict[str, Task],
        tokenizer: Any,
        notes: dict[str, None],
    ) -> None:
        raw = {one for one, source in zip(tasks, sampling.tasks, strict=True) if source.raw}
        # Their tokens say whether the chat template begins the answer's thoughts.
        self.encode = Encoder(
            tokenizer, template_kwargs=sampling.prompts.chat_template, forgiven=tasks, raw=raw
        )
        weights = [source.weight for source in sampling.tasks]
        seed = derive(derive(recipe.seed, stage), "prompts")
        self.stream = PromptStream(list(tasks.values()), weights, seed, self.encode)
        self.notes = notes

    def groups(self, step: int, records: Sequence[Record]) -> list[Group]:
        """The groups of a step."""
        groups = groups_of(records)
        wanted = [(one[0]["prompt_id"], prompt_text(one[0]["prompt"])) for one in groups]
        try:
            prompts = find_prompts(self.stream, wanted, f"step {step}")
        except KeelError as error:
            self.notes[f"columns are the stored answer alone ({error})"] = None
            prompts = [self.encode(one) or one for one in _bare(groups)]
        return [
            Group(prompt, tuple(map(completion_of, rows)))
            for prompt, rows in zip(prompts, groups, strict=True)
        ]


def _bare(groups: Sequence[Sequence[Record]]) -> Iterator[Prompt]:
    """The prompts as they are stored."""
    for first, *_ in groups:
        columns = {} if first["expected"] is None else {"answer": first["expected"]}
        yield Prompt(first["prompt_id"], first["prompt"], columns, first["task"])
