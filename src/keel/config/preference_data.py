"""The keys that say where preference data comes from. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from keel.algorithms.spec import FrozenModel
from keel.config.fields import SEPARATE_VALIDATION, BadRows


class PreferenceData(FrozenModel):
    """Rows that people, models or rules judged; `name` is `jsonl`, `parquet`, `datasets`, or a
    Python entry `module:function` that returns rows."""

    name: str
    path: str | None = None
    """Data file of the train side (jsonl, parquet), or the `datasets` name."""
    validation_path: str | None = None
    """Data file (or split) of the held-out side; without it a share is split off by content."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1), SEPARATE_VALIDATION] = 0.1
    group: str | None = None
    """Column whose equal values stay on one side, and are one cluster in an interval; the prompt
    unless set."""
    columns: dict[str, str] = Field(default_factory=dict)
    """The file's own names of columns, as in {prompt = "question"}."""
    raw: bool = False
    """Plain prompts are read as they stand. Otherwise they are the user's turn where the tokenizer
    has a chat template."""
    empty: Literal["refuse", "drop", "keep"] = "refuse"
    """What becomes of a row with an empty answer; dropped ones are counted."""
    bad_rows: BadRows = "stop"
    """A row that cannot be read stops the run, or is left out into the run folder's quarantine/,
    with its line and the reason."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of `datasets.load_dataset`."""
