"""What a reward that is more than a function may know of the run that it judges for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class RewardContext:
    """Handed to the maker of a built-in reward, with its options.

    `tokenizer` is the policy's (None where there is no policy). `models` are the folders of the
    models that earlier stages of the run trained, by the stage's name. `folder` is where a reward
    may keep what it paid for (None: nowhere); `device` is the policy's.
    """

    tokenizer: Any = None
    models: Mapping[str, Path] = field(default_factory=dict)
    folder: Path | None = None
    device: str = "cpu"
    seed: int = 0
