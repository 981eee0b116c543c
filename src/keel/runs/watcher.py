"""What a run tells whoever watches it: one way, never asked back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Watcher(Protocol):
    """A terminal, a log, or nobody."""

    def stage(self, name: str, kind: str, steps: int, done: int) -> None:
        """A stage begins, `done` of its steps already taken."""
        ...

    def step(self, stage: str, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """A step is over and recorded."""
        ...

    def evaluation(self, stage: str, step: int, result: Mapping[str, Any]) -> None:
        """The held-out side was evaluated after so many steps."""
        ...

    def note(self, text: str) -> None:
        """One line worth knowing."""
        ...


class Silent:
    """Watches nothing."""

    def stage(self, name: str, kind: str, steps: int, done: int) -> None: ...

    def step(self, stage: str, step: int, metrics: Mapping[str, float], seconds: float) -> None: ...

    def evaluation(self, stage: str, step: int, result: Mapping[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...
