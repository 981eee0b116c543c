"""The keys that every kind of stage has, and what each offers. Torch-free.

Other code reads these properties and calls these methods; it does not ask which kind a stage is. A
kind is one module of `keel.training.stages` with a subclass of `StageConfig`: its keys in a recipe,
how it is set up and run, and how it is shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from keel.algorithms.terms import AsTuple, Coefficient, FrozenModel, Positive, Unit, UnusedIf
from keel.config.fields import (
    AUTO_TOKENS,
    Count,
    Index,
    LearningRate,
    MicroBatchTokens,
    Real,
    StageName,
)
from keel.types import KeelError

if TYPE_CHECKING:
    from typing import Self

    from keel.algorithms.render import Explanation
    from keel.config.evaluation import SamplingSource
    from keel.config.model import BaseModelChoice, Cluster, Model
    from keel.config.sources import (
        PreferenceData,
        Prompts,
        Rewards,
        Rollout,
        SFTData,
        TaskSource,
    )

Records = Literal["pairs", "labels", "steps"]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean."""
Passes = Annotated[float, Field(gt=0, le=1_000_000)] | None
OnNonfinite = Literal["stop", "skip"]
"""Whether a run stops at a loss or gradient that is not finite, or goes on without the step."""

_CONSTANT = UnusedIf(
    lambda key: key.table.schedule == "constant", 'schedule = "constant" keeps the learning rate'
)
_NOT_MUON = UnusedIf(lambda key: key.table.kind != "muon", 'kind is not "muon"')
_ON_CPU = UnusedIf(
    lambda key: key.facts.cpu and key.recipe.model.dtype != "bfloat16",
    "the weights are in the machine's memory already, in their own dtype",
)
_BOUNDED = UnusedIf(
    lambda key: key.table.bound is not None, "above and below say which way is worse"
)
_LOWER_IS_BETTER = re.compile(r"(?:^|[/_])(?:loss|kl|perplexity|brier|ece)(?:$|[/_])")
_NO_NAMES = UnusedIf(
    lambda key: not (key.table.wandb or key.table.trackio or key.table.mlflow),
    "wandb, trackio and mlflow are off",
)
_NO_TABLES = UnusedIf(
    lambda key: not (key.table.wandb or key.table.trackio), "wandb and trackio are off"
)
_NO_HISTOGRAMS = UnusedIf(
    lambda key: not (key.table.tensorboard or key.table.wandb or key.table.trackio),
    "tensorboard, wandb and trackio are off",
)


class Optimizer(FrozenModel):
    """The optimizer, and the schedule of its learning rate over the stage's steps."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` keeps the moments in 8 bits (bitsandbytes, arXiv:2110.02861). `muon`
    orthogonalises the momentum of the matrices inside layers and takes steps of AdamW's size
    (arXiv:2502.16982); all else learns by AdamW."""
    offload: Annotated[Literal["none", "cpu"], _ON_CPU] = "none"
    """`cpu`: moments, float32 weights and the step are on the host of one GPU; for several
    processes see `cluster.offload`."""

    learning_rate: LearningRate = 1e-6
    """The highest rate of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    min_lr_ratio: Annotated[Unit, _CONSTANT] = 0.1
    """Learning rate at the end of a linear or cosine schedule, as a share of `learning_rate`."""
    warmup_steps: Index = 0
    """Steps in which the rate grows linearly from 0."""
    warmup_ratio: Unit | None = None
    """The same as a share of the stage's steps, rounded up, instead of `warmup_steps`."""
    betas: Annotated[tuple[Decay, Decay], AsTuple] = (0.9, 0.999)
    """Decay rates of the two moments of AdamW."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Coefficient = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    muon_momentum: Annotated[Decay, _NOT_MUON] = 0.95
    """Decay rate of Muon's momentum."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; None: never."""

    @model_validator(mode="after")
    def _one_warm_up(self) -> Optimizer:
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio:g} are "
                "two lengths of one warm-up: drop one"
            )
        return self

    def warm_up(self, steps: int) -> int:
        """The number of steps of the warm-up, in a stage of `steps`."""
        ratio = self.warmup_ratio
        return self.warmup_steps if ratio is None else math.ceil(ratio * steps)


class Checkpoints(FrozenModel):
    """When checkpoints are written, and how many are kept."""

    every: Count = 100
    """Steps between checkpoints; the last step always writes one."""
    keep: Count = 2
    """How many of the newest are kept, besides the best of each stage."""


class StopRule(FrozenModel):
    """Ends the stage after a step, if its record meets the rule; the stages after it go on.

    With `above` or `below`: `patience` records of the metric in a row are beyond the bound. Without
    them: its last `patience` records are no better than the best one before them.
    """

    metric: str
    """Name of a metric of the stage; records without it do not count."""
    above: Real | None = None
    """Ends the stage if the metric is greater than this."""
    below: Real | None = None
    """Ends the stage if the metric is less than this."""
    mode: Annotated[Literal["max", "min"] | None, _BOUNDED] = None
    """Which value is better; None: smaller if `loss`, `kl`, `perplexity`, `brier` or `ece` is a
    word of the name."""
    patience: Count = 1
    """Records of the metric that have to meet the rule."""

    @model_validator(mode="after")
    def _one_bound(self) -> StopRule:
        if self.above is not None and self.below is not None:
            raise ValueError("set one of above and below, or give each a rule of its own")
        return self

    @property
    def bound(self) -> float | None:
        """`above` or `below`, if one is set."""
        return self.below if self.above is None else self.above

    @property
    def sign(self) -> int:
        """1 if greater values are better or beyond the bound, −1 if smaller ones are."""
        if self.bound is not None:
            return -1 if self.above is None else 1
        mode = self.mode or ("min" if _LOWER_IS_BETTER.search(self.metric) else "max")
        return -1 if mode == "min" else 1

    def __str__(self) -> str:
        records = "1 record" if self.patience == 1 else f"{self.patience} records"
        if self.bound is None:
            return f"{self.metric} no better for {records}"
        side = "below" if self.above is None else "above"
        return f"{self.metric} {side} {self.bound:g} for {records}"


class Trackers(FrozenModel):
    """Experiment trackers."""

    tensorboard: bool = False
    """Log the metrics to TensorBoard."""
    wandb: bool = False
    """Log the metrics to Weights & Biases."""
    trackio: bool = False
    """Log the metrics to trackio."""
    mlflow: bool = False
    """Log the metrics to MLflow: to MLFLOW_TRACKING_URI, else to SQLite in the run folder."""
    project: Annotated[str, _NO_NAMES] = "keel"
    """Project of W&B and trackio, experiment of MLflow."""
    run_name: Annotated[str | None, _NO_NAMES] = None
    """Name of the run there; None: the name of the run folder."""
    group: Annotated[str | None, _NO_NAMES] = None
    """Group of the run there (of MLflow a tag), for example of the seeds of one experiment."""
    completions: Annotated[Index, _NO_TABLES] = 0
    """Completions per step in a table of W&B and trackio."""
    histograms: Annotated[bool, _NO_HISTOGRAMS] = True
    """Log the distributions of rewards and lengths (not to MLflow)."""


# ---------------------------------------------------------------- what a stage offers


@dataclass(frozen=True, slots=True)
class JudgedSource:
    """The rows of pairs or labels that a stage learns from, and how they are read.

    `data` is None if the stage samples them. Steps are those between `separator`; the first whose
    probability of being right is below `threshold` is the predicted mistake.
    """

    records: Records
    data: PreferenceData | None
    batch_size: int
    max_tokens: int | None
    raw: bool
    template_keywords: Mapping[str, Any]
    validation_rows: int
    separator: str = "\n"
    threshold: float = 0.5


@dataclass(frozen=True, slots=True)
class DemonstrationSource:
    """What a stage imitates: demonstrations that the function `entry` makes of its prompts."""

    tasks: tuple[TaskSource, ...]
    prompts: Prompts
    entry: str
    batch_size: int


@dataclass(frozen=True, slots=True)
class ImitationSource:
    """The sets of examples that a stage imitates, and how they are read: as in `SFTStage`; `key`
    is that of the table with `data`, and a dot, if that is not the stage itself."""

    data: tuple[SFTData, ...]
    batch_size: int
    max_tokens: int | None
    template_keywords: Mapping[str, Any]
    loss_on: Literal["assistant", "all"] = "assistant"
    packing: bool = False
    drops: bool = False
    shuffle: bool = True
    validation_rows: int = 0
    key: str = ""

    def limit(self, context: int | None) -> int | None:
        """The most tokens of an example, with a model of this context."""
        return min((n for n in (self.max_tokens, context) if n is not None), default=None)


class StageConfig(FrozenModel):
    """A stage of a recipe."""

    trains_policy: ClassVar[bool] = True
    learns_from_rollouts: ClassVar[bool] = False
    """Whether the policy samples, is rewarded and learns, step by step, by an algorithm."""
    reward_model: ClassVar[Literal["outcome", "process"] | None] = None
    """The kind of reward model that the stage trains."""
    panels: ClassVar[str | None] = None
    """The plots that show the stage: a table of `keel.analysis.metrics`."""

    stage: str
    name: StageName
    steps: Index = 100
    """Optimizer steps."""
    num_train_epochs: Passes = None
    """Passes over the train examples or prompts, instead of `steps`. Epochs follow each other
    without a gap; the last step is filled up."""
    token_budget: MicroBatchTokens = "auto"
    """Most model-input tokens of a micro-batch; a longer example is computed alone. `auto` as in
    stage `rl`."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-5)
    on_nonfinite: OnNonfinite = "stop"
    """Whether a NaN or infinite loss or gradient stops the run, or its step is skipped."""
    checkpoints: Checkpoints = Checkpoints()
    trackers: Trackers = Trackers()
    stop_when: Annotated[tuple[StopRule, ...], AsTuple] = ()
    """Rules that end the stage before its last step."""

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("num_train_epochs") in (None, "none"):
            return data
        if data.get("steps"):
            raise ValueError(
                f"steps = {data['steps']} and num_train_epochs = {data['num_train_epochs']} are "
                "two lengths of one stage: drop one (steps = 0 drops that of a recipe)"
            )
        return {**data, "steps": 0}

    @model_validator(mode="after")
    def _takes_steps(self) -> Self:
        if self.unresolved or self.steps or self.learns_from_rollouts:
            return self
        raise ValueError("steps = 0 trains nothing: set it greater than 0, or num_train_epochs")

    @property
    def unresolved(self) -> bool:
        """Whether the number of steps depends on the data; `steps` is 0 until it is known."""
        return self.num_train_epochs is not None

    def lasting(self, size: int | None, batch: int) -> Self:
        """The stage with its number of steps: it takes `batch` of `size` examples at a time.

        Raises KeelError if it is to make passes over data without an end (None).
        """
        if self.num_train_epochs is None:
            return self
        if size is None:
            raise KeelError(
                f"num_train_epochs = {self.num_train_epochs:g} counts passes over data that has no "
                "known end: set steps",
                key="num_train_epochs",
            )
        # The product of a share and a size may end just above a whole number.
        steps = max(math.ceil(round(self.num_train_epochs * size / batch, 9)), 1)
        found = self.model_copy(update={"steps": steps, "num_train_epochs": None})
        try:
            found.check_steps()
        except ValueError as error:
            raise KeelError(f"num_train_epochs = {self.num_train_epochs:g}: {error}") from None
        return found

    def check_steps(self) -> None:
        """Raise ValueError if the stage has too few steps for what else it is to do."""

    def train(self, run: Any, progress: Any) -> Any:
        """Set the stage up, or restore it, and run it from `progress` to its last step, or until
        the run is to stop; returns the progress. `run` is a `keel.training.setup.RunContext`."""
        raise NotImplementedError

    def explain(self, lora: bool) -> Explanation | None:
        """What the stage optimises, its choices compared with the preset that they came from; None
        if no algorithm says it."""
        return None

    def check_processes(self, model: Model, cluster: Cluster) -> None:
        """Raise ValueError if the stage cannot run on the recipe's processes."""

    @property
    def initial_token_budget(self) -> int:
        """`token_budget` as a number: if a trial finds it, that of the trial."""
        return AUTO_TOKENS if self.token_budget == "auto" else self.token_budget

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those of all that learns."""
        return (self.optimizer,)

    @property
    def sampling(self) -> SamplingSource | None:
        """What the stage samples; None if it samples nothing."""
        return None

    @property
    def prompt_keywords(self) -> Mapping[str, Any]:
        """The chat template's keywords for the prompts that the stage's policy answers."""
        return {} if self.sampling is None else self.sampling.prompts.chat_template

    @property
    def trained_tasks(self) -> tuple[TaskSource, ...]:
        """The tasks whose train prompts the stage learns from."""
        return () if self.sampling is None else self.sampling.tasks

    @property
    def demonstrated(self) -> DemonstrationSource | None:
        """The demonstrations that the policy imitates, if the stage has any."""
        return None

    @property
    def judged(self) -> JudgedSource | None:
        """The rows of pairs or labels that the stage learns from, if it does."""
        return None

    @property
    def compares(self) -> bool:
        """Whether the stage learns from differences between answers to one prompt."""
        return self.records == "pairs"

    @property
    def imitated(self) -> ImitationSource | None:
        """The conversations and texts that the policy imitates, if the stage has any."""
        return None

    @property
    def prompts_in_step(self) -> int | None:
        """How many prompts of its tasks a step takes; None if steps take no prompts."""
        return None

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen reference policy is in memory."""
        return False

    @property
    def value_model(self) -> tuple[str | None, Optimizer | None]:
        """The backbone and the optimizer of the stage's value model, if it has its own."""
        return None, None

    @property
    def trains_critic(self) -> bool:
        """Whether the value model has a backbone of its own, which is trained."""
        return False

    @property
    def evaluation_interval(self) -> int | None:
        """Steps between evaluations, 0 for none but before and after; None: there is none."""
        return None

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """Names or patterns of the metrics that an evaluation records."""
        return ()

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

    def with_rollout(self, change: Callable[[Rollout, Sequence[TaskSource]], Rollout]) -> Self:
        """The stage with what `change` makes of the rollout and tasks that it learns from."""
        return self

    def on_examples(
        self,
        *,
        tasks: tuple[TaskSource, ...],
        data: PreferenceData,
        rewards: Rewards,
        prompts: int | None,
    ) -> Self:
        """The stage on other examples, as `keel check` runs it: without evaluation, completions as
        long as they may be, at most `prompts` prompts a step."""
        raise NotImplementedError
