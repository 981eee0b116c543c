"""What learns on environments, and its state, saved and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from keel.config.control import PolicyGradientStage, QLearningStage
from keel.config.fields import derive
from keel.control.collect import ChooseActions
from keel.control.environments import Environments
from keel.control.networks import TrainedNetwork
from keel.learn.optimizer import AdamW
from keel.runs import checkpoint
from keel.types import KeelError

Stage = TypeVar("Stage", bound=QLearningStage | PolicyGradientStage)
STATE, TENSORS = "state.json", "tensors.safetensors"


class ControlLearner(ABC, Generic[Stage]):
    """What both families have: environments, trained networks with their optimizer, and a state.

    Every iteration is a function of the state and its number.
    """

    trained: TrainedNetwork
    optimizer: AdamW

    def __init__(self, stage: Stage, seed: int, group: int = 1) -> None:
        choice = stage.environment
        self.stage, self.seed = stage, seed
        self.environments = Environments(choice, choice.count, derive(seed, "train"), group)
        self.steps = 0
        """Environment steps taken."""

    def train(self, modules: Mapping[str, nn.Module]) -> None:
        """Let the optimizer train these networks."""
        self.trained = TrainedNetwork(modules)
        self.optimizer = AdamW([("weights", self.trained.vector)], self.stage.optimizer)

    @abstractmethod
    def iterate(self, number: int) -> dict[str, float]:
        """Collect and update; the metrics of the iteration."""

    @abstractmethod
    def greedy(self) -> ChooseActions:
        """The best actions by the current networks."""

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors, by name."""
        return self.trained.state() | prefixed("optimizer", self.optimizer.state())

    def facts(self) -> dict[str, Any]:
        """The rest of the state."""
        return {"steps": self.steps}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """The state that `tensors` and `facts` gave."""
        self.trained.restore(tensors)
        self.optimizer.restore(within("optimizer", tensors))
        self.steps = facts["steps"]


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


def save(folder: Path, progress: ControlProgress, learner: ControlLearner[Any]) -> None:
    """Fill a checkpoint folder."""
    checkpoint.save_tensors(folder / TENSORS, learner.tensors())
    checkpoint.save_json(folder / STATE, asdict(progress))


def read(folder: Path) -> ControlProgress:
    """The progress that a checkpoint holds."""
    return checkpoint.load_record(folder / STATE, ControlProgress)


def learned(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """A checkpoint's tensors, and the facts of its learner."""
    return checkpoint.load_tensors(folder / TENSORS), read(folder).learner


def restore(folder: Path, progress: ControlProgress, learner: ControlLearner[Any]) -> bool:
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
