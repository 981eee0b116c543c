"""The recipe: every key a user may set, its type and its default. Torch-free.

A recipe is a model, a seed and one or more stages; each stage starts from the model before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field, model_validator

from keel.algorithms.terms import AsTuple, FrozenModel
from keel.config.entry import stage_kinds
from keel.config.fields import Count, Real, Seed, Threads
from keel.config.model import Alerts, Cluster, Model
from keel.config.stage import StageConfig

if TYPE_CHECKING:
    from keel.algorithms.render import Explanation

    Stage = StageConfig
else:
    Stage = Annotated[Union[stage_kinds()], Field(discriminator="stage")]


class ExpectedFigure(FrozenModel):
    """A metric at the end, over seeds."""

    metric: str = "eval/pass@1"
    """Name of the metric, of the last stage that records it."""
    mean: Real | None = None
    """The mean over the seeds; None: only the bounds are known."""
    low: Real
    """The lowest of the seeds."""
    high: Real
    """The highest of the seeds."""
    seeds: Count
    """How many were run."""

    def __str__(self) -> str:
        scale, unit = (100, " %") if self.low >= 0 and self.high <= 1 else (1, "")
        text = f"{scale * self.low:.1f} to {scale * self.high:.1f}{unit}"
        if self.mean is not None:
            off = scale * max(self.mean - self.low, self.high - self.mean)
            text = f"{scale * self.mean:.1f} ± {off:.1f}{unit}"
        return f"{text} ({self.metric}, {self.seeds} seeds)"


class Expected(FrozenModel):
    """What a shipped recipe comes to; a run does not read it."""

    after: ExpectedFigure | None = None
    """The figure that was measured at the end."""
    hardware: str = ""
    """What it was measured on or is meant for, and the time there."""
    published: str = ""
    """The published figure it aims at, with its source."""
    run_here: bool = True
    """Whether its authors ran it as it is."""

    def lines(self) -> list[str]:
        """What it says, a line for each thing."""
        found = [] if self.after is None else [f"expected: {self.after}"]
        found += [] if self.run_here else ["not run by Keel's authors"]
        pairs = (("hardware", self.hardware), ("published", self.published))
        return found + [f"{name}: {text}" for name, text in pairs if text]


class Recipe(FrozenModel):
    """One experiment."""

    name: str = "recipe"
    """Name of the run folder."""
    description: str = ""
    """Printed when the run starts."""
    seed: Seed = 0
    """Every random number is a function of it."""
    threads: Threads | None = None
    """CPU threads; None: the default of torch."""
    model: Model
    cluster: Cluster = Cluster()
    alerts: Alerts = Alerts()
    stages: Annotated[tuple[Stage, ...], AsTuple, Field(min_length=1)]
    expected: Expected | None = None
    """What the recipe, run as it is, comes to."""

    @model_validator(mode="after")
    def _names_differ(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        folded = [name.casefold() for name in names]
        for name in names:
            if folded.count(name.casefold()) > 1:  # names of files, which some disks do not tell
                raise ValueError(f'two stages are named "{name}": give each a name of its own')
            if len(name) > 64:
                raise ValueError(f'a stage is named "{name[:24]}…": give it at most 64 characters')
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Recipe:
        for stage in self.stages:
            stage.check_processes(self.model, self.cluster)
        return self

    @model_validator(mode="after")
    def _bases_exist(self) -> Recipe:
        """A reward model learns on only if a stage before has made one of its kind."""
        for at, stage in enumerate(self.stages):
            base = None if stage.base_model is None else stage.base_model.stage
            if base is None:
                continue
            before = {s.name: s for s in self.stages[:at] if s.reward_model == stage.reward_model}
            if base not in before:
                raise ValueError(
                    f'{stage.name}.base.stage = "{base}" is not a {stage.stage} stage '
                    f"before this one ({', '.join(before) or 'there is none'})"
                )
            _one_split(before[base], stage)
        return self

    @model_validator(mode="after")
    def _learned_rewards_exist(self) -> Recipe:
        """A learned reward by its stage is made by one before, before anything is paid for."""
        for at, stage in enumerate(self.stages):
            functions = () if stage.sampling is None else stage.sampling.rewards.functions
            for function in functions:
                name, kind = function.options.get("stage"), function.function
                if kind not in ("outcome", "process") or name is None:
                    continue
                before = [other.name for other in self.stages[:at] if other.reward_model == kind]
                if name not in before:
                    raise ValueError(
                        f'{stage.name}: the reward "{function.function}" is of stage = "{name}", '
                        "which is not a stage before this one that makes such a model "
                        f"({', '.join(before) or 'there is none'})"
                    )
        return self


def explain_recipe(recipe: Recipe) -> list[Explanation]:
    """What a recipe optimises, with its numbers: one explanation for each
    reinforcement-learning stage, in order."""
    lora = recipe.model.lora is not None
    found = [stage.explain(lora) for stage in recipe.stages]
    return [one for one in found if one is not None]


def _one_split(base: StageConfig, stage: StageConfig) -> None:
    """Records that a base was trained on must not be in the validation split of the next stage."""
    one, other = base.preference_data, stage.preference_data
    if one is None or other is None or other.validation_path is not None:
        return
    if (one.name, one.path, one.options) != (other.name, other.path, other.options):
        return
    # Splits follow from where a prompt or group lies: a smaller share holds out some of the same.
    if (
        one.validation_path is not None
        or one.group != other.group
        or other.validation_fraction > one.validation_fraction
    ):
        raise ValueError(
            f"{base.name} and {stage.name} split the same data otherwise, so that rows which "
            f"{stage.name} holds out were learned from: give both the same group and "
            "validation_fraction"
        )
