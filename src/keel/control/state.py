"""The state of a run on environments, saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from keel.config.control import ControlStage
from keel.control.collect import ChooseActions
from keel.control.environments import Environments
from keel.runs import checkpoint
from keel.types import KeelError

STATE, TENSORS = "state.json", "tensors.safetensors"


class ControlLearner(Protocol):
    """Q-learning, or a policy gradient."""

    @property
    def stage(self) -> ControlStage:
        """Its settings."""
        ...

    environments: Environments
    steps: int
    """Environment steps taken."""

    def iterate(self, number: int) -> dict[str, float]:
        """Collect and update; the metrics of the iteration."""
        ...

    def greedy(self) -> ChooseActions:
        """The best actions by the current networks."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...

    def facts(self) -> dict[str, Any]: ...

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class ControlProgress:
    """The position of a run, and the states of its learner and environments."""

    stage: int = 0
    step: int = 0
    """Iterations: records of metrics.jsonl."""
    steps: int = 0
    """Environment steps."""
    best: float | None = None
    best_step: int | None = None
    learner: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Any] = field(default_factory=dict)


def save(folder: Path, progress: ControlProgress, learner: ControlLearner) -> None:
    """Fill a checkpoint folder."""
    checkpoint.save_tensors(folder / TENSORS, learner.tensors())
    checkpoint.save_json(folder / STATE, asdict(progress))


def read(folder: Path) -> ControlProgress:
    """The progress that a checkpoint holds."""
    return checkpoint.load_record(folder / STATE, ControlProgress)


def learned(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """A checkpoint's tensors, and the facts of its learner."""
    return checkpoint.load_tensors(folder / TENSORS), read(folder).learner


def restore(folder: Path, progress: ControlProgress, learner: ControlLearner) -> bool:
    """Restore a learner and its environments; whether the latter reached the same states."""
    try:
        learner.restore(*learned(folder))
    except (RuntimeError, KeyError, ValueError) as error:
        raise KeelError(
            f"checkpoint {folder} does not fit the recipe's networks "
            f"({str(error).strip().splitlines()[-1].strip()}): put the keys in recipe.toml back, "
            "or start a new run"
        ) from error
    return learner.environments.restore(dict(progress.environments))


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as `name/key`."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def within(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `name/key`, by key."""
    head = f"{name}/"
    return {k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}
