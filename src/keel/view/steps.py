"""The rollouts of single steps, as tables. Torch-free."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from keel.runs.reader import Run, rows_of
from keel.runs.rollouts import TERMS
from keel.view.rows import Row, score

KEPT = 4
"""Steps that are kept, of all runs and tabs together: a large one has 100 MB."""


class StepRows:
    """The completions of a step. Each row is made when it is asked for: as Python objects a step
    takes many times the memory of its table."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.groups: list[int] = table["group"].to_pylist()
        self.scores = [score({"reward": reward}) for reward in table["reward"].to_pylist()]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, at: int) -> Row:
        if not 0 <= at < len(self):
            raise IndexError(at)
        return rows_of(self.table.slice(at, 1))[0]

    @cached_property
    def by_group(self) -> dict[int, list[int]]:
        """The places of the completions of each group, best first."""
        found: dict[int, list[int]] = {}
        for at in sorted(range(len(self)), key=lambda at: -self.scores[at]):
            found.setdefault(self.groups[at], []).append(at)
        return {group: found[group] for group in dict.fromkeys(self.groups)}

    @property
    def widest(self) -> list[list[int]]:
        """The groups, those first whose rewards differ most."""

        def spread(members: list[int]) -> float:
            rewards = [self.scores[at] for at in members if math.isfinite(self.scores[at])]
            return max(rewards, default=0.0) - min(rewards, default=0.0)

        return sorted(self.by_group.values(), key=spread, reverse=True)

    @property
    def loss(self) -> dict[str, float]:
        """The terms of the loss, summed over all tokens of the step: what the step logged."""
        found: dict[str, float] = {}
        for name in TERMS:
            if name in self.table.column_names:
                values = pc.list_flatten(self.table[name]).cast(pa.float64())
                found[name] = pc.sum(values).as_py() or 0.0
        return {**found, "loss": sum(found.values())} if found else {}


def step_rows(run: Run, stage: str, step: int) -> StepRows:
    """The rollouts of a step, of which the last few are kept.

    Raises KeelError if it has none, or the file is damaged.
    """
    try:
        facts = run.folder.rollouts(run.stages.index(stage), step).stat()
        version = facts.st_size, facts.st_mtime_ns
    except OSError:
        version = -1, -1  # reading it says what is wrong
    return _read(run, stage, step, version)


@lru_cache(maxsize=KEPT)
def _read(run: Run, stage: str, step: int, version: tuple[int, int]) -> StepRows:
    return StepRows(run.rollout_table(step, stage))
