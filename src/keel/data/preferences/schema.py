"""The rows that reward models learn from. Torch-free.

Named as TRL names its columns: `prompt/chosen/rejected`, `prompt/completion/label`,
`prompt/completions/labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.data.messages import prompt_columns
from keel.data.tables import SourceRow
from keel.types import Content, Tools


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """What rows of every kind have.

    `id` names the row; rows of one prompt share a `prompt`. Rows with the same `group` hang
    together, by a column that the data names; if it names none (None), rows of one prompt do.
    `tools` are described to the model by the chat template.
    """

    id: str
    prompt: Content
    group: str | None = field(default=None, kw_only=True)
    tools: Tools = field(default=(), kw_only=True)
    origin: SourceRow | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def answers(self) -> Mapping[str, str]:
        """The texts of the answers by their columns; names of one column are joined by a stroke."""
        raise NotImplementedError

    @property
    def columns(self) -> dict[str, Any]:
        """The row as readers take it, without its id and group."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Preference(JudgedRow):
    """Two answers to one prompt.

    `probability` is that of `chosen` being the better one: 1 for a plain preference, between for a
    soft label, ½ for a tie. `margin` is by how much its score is to lie above (Bradley–Terry with
    margin).
    """

    chosen: str
    rejected: str
    probability: float = 1.0
    margin: float = 0.0

    @property
    def answers(self) -> Mapping[str, str]:
        return {"chosen": self.chosen, "rejected": self.rejected}

    @property
    def columns(self) -> dict[str, Any]:
        more = {"probability": self.probability, "margin": self.margin}
        return {**prompt_columns(self.prompt, self.tools), **self.answers, **more}


@dataclass(frozen=True, slots=True)
class Labelled(JudgedRow):
    """One answer, right (1) or wrong (0); between, a share of judges."""

    completion: str
    label: float

    @property
    def answers(self) -> Mapping[str, str]:
        return {"completion": self.completion}

    @property
    def columns(self) -> dict[str, Any]:
        return {**prompt_columns(self.prompt, self.tools), **self.answers, "label": self.label}


@dataclass(frozen=True, slots=True)
class Stepwise(JudgedRow):
    """An answer in steps, each right (1) or wrong (0); None if it was not judged.

    The completion is the steps joined by a separator.
    """

    steps: tuple[str, ...]
    labels: tuple[float | None, ...]

    @property
    def answers(self) -> Mapping[str, str]:
        return {"completions/steps": "".join(self.steps)}

    @property
    def columns(self) -> dict[str, Any]:
        answers = {"completions": list(self.steps), "labels": list(self.labels)}
        return {**prompt_columns(self.prompt, self.tools), **answers}

    @property
    def first_error(self) -> int | None:
        """The index (from 0) of the first wrong step; None if every judged step is right."""
        return first_wrong(self.labels)


def first_wrong(labels: Sequence[float | None]) -> int | None:
    """The index of the first label that says wrong; None if none does."""
    return next((i for i, label in enumerate(labels) if label is not None and label < 0.5), None)
