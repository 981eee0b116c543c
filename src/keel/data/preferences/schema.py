"""The rows that reward models learn from. Torch-free.

Named as TRL names its columns: `prompt/chosen/rejected`, `prompt/completion/label`,
`prompt/completions/labels`. Rows with the same `group` hang together, by a column that the data
names; if it names none (None), rows of one prompt do. `tools` are described to the model by the
chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keel.data.tables import SourceRow
from keel.types import Content, Tools


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt.

    `probability` is that of `chosen` being the better one: 1 for a plain preference, between for a
    soft label, ½ for a tie. `margin` is by how much its score is to lie above (Bradley–Terry with
    margin). `id` names the row; rows of one prompt share a `prompt`.
    """

    id: str
    prompt: Content
    chosen: str
    rejected: str
    probability: float = 1.0
    margin: float = 0.0
    group: str | None = None
    tools: Tools = ()
    origin: SourceRow | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Labelled:
    """One answer, right (1) or wrong (0); between, a share of judges."""

    id: str
    prompt: Content
    completion: str
    label: float
    group: str | None = None
    tools: Tools = ()
    origin: SourceRow | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Stepwise:
    """An answer in steps, each right (1) or wrong (0); None if it was not judged.

    The completion is the steps joined by a separator.
    """

    id: str
    prompt: Content
    steps: tuple[str, ...]
    labels: tuple[float | None, ...]
    group: str | None = None
    tools: Tools = ()
    origin: SourceRow | None = field(default=None, compare=False, repr=False)

    @property
    def first_error(self) -> int | None:
        """The index (from 0) of the first wrong step; None if every judged step is right."""
        return first_wrong(self.labels)

    @staticmethod
    def until(
        id: str,
        prompt: Content,
        steps: tuple[str, ...],
        first_error: int | None,
        origin: SourceRow | None = None,
        tools: Tools = (),
    ) -> Stepwise:
        """From the index of the first wrong step: right before it, wrong there, unjudged after."""
        if first_error is not None and not 0 <= first_error < len(steps):
            raise ValueError(f"first wrong step {first_error} is none of the {len(steps)} steps")
        at = len(steps) if first_error is None else first_error
        labels = (*[1.0] * at, 0.0, *[None] * len(steps))[: len(steps)]
        return Stepwise(id, prompt, steps, labels, tools=tools, origin=origin)


def first_wrong(labels: Sequence[float | None]) -> int | None:
    """The index of the first label that says wrong; None if none does."""
    return next((i for i, label in enumerate(labels) if label is not None and label < 0.5), None)
