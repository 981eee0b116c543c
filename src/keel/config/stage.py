"""What every kind of stage says of itself. Torch-free.

Other code reads these properties; it does not ask which kind a stage is. A new kind is a subclass
in the union `keel.config.schema.Stage`, and an entry of `keel.training.stage_kinds`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from keel.algorithms.spec import FrozenModel

if TYPE_CHECKING:
    from typing import Self

    from keel.config.model import BaseModelChoice
    from keel.config.optimisation import Checkpoints, OnNonfinite, Optimizer, Trackers
    from keel.config.sampling import SamplingSource
    from keel.config.sources import PreferenceData, Rewards, TaskSource

Records = Literal["pairs", "labels", "steps"]


class StageConfig(FrozenModel):
    """A stage of a recipe."""

    trains_policy: ClassVar[bool] = True
    shared_by_processes: ClassVar[bool] = False
    """Whether `cluster.processes` share the stage; others run on the first of them."""
    reward_model: ClassVar[Literal["outcome", "process"] | None] = None
    """The kind of reward model that the stage trains."""

    if TYPE_CHECKING:  # fields of every kind, each with its own default
        stage: str
        name: str
        steps: int
        token_budget: int
        optimizer: Optimizer
        on_nonfinite: OnNonfinite
        checkpoints: Checkpoints
        trackers: Trackers

    @property
    def sampling(self) -> SamplingSource | None:
        """What the stage samples; None where it samples nothing."""
        return None

    @property
    def trained_tasks(self) -> tuple[TaskSource, ...]:
        """The tasks whose train prompts the stage learns from."""
        return () if self.sampling is None else self.sampling.tasks

    @property
    def demonstrated(self) -> bool:
        """Whether the policy imitates demonstrations of answers to the prompts of its tasks."""
        return False

    @property
    def compares(self) -> bool:
        """Whether the stage learns from differences between answers to one prompt."""
        return self.records == "pairs"

    @property
    def prompts_in_step(self) -> int | None:
        """How many prompts of its tasks a step takes; None where steps take no prompts."""
        return None

    @property
    def passes(self) -> int:
        """How often the stage learns from each step's batch."""
        return 1

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen reference policy is in memory."""
        return False

    @property
    def keeps_critic(self) -> bool:
        """Whether a value model with a backbone of its own is in memory."""
        return False

    @property
    def evaluation_interval(self) -> int | None:
        """Steps between evaluations, 0 for none but before and after; None: there is none."""
        return None

    @property
    def preference_data(self) -> PreferenceData | None:
        """The preference data that the stage reads."""
        return None

    @property
    def records(self) -> Records | None:
        """What the stage learns from: preference pairs, labelled answers, labelled steps."""
        return None

    @property
    def base_model(self) -> BaseModelChoice | None:
        """What the stage's own reward model starts from."""
        return None

    def on_examples(
        self,
        *,
        tasks: tuple[TaskSource, ...],
        data: PreferenceData,
        rewards: Rewards,
        prompts: int | None,
    ) -> Self:
        """The stage on other examples, as `keel check` runs it: without evaluation, completions as
        long as they may be, at most so many `prompts` a step."""
        raise NotImplementedError
