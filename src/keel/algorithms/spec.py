"""An algorithm as data: a row of five choices, an optional value loss and entropy bonus.

    J(θ) = Σ_n w_n · s(ρ_n(θ), A_n)  −  β Σ_n w_n · D_n(θ)

Nothing here computes; `keel.learn.loss` joins a row to `keel.objective` by look-up on `kind`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from keel.algorithms.rules import SEQUENCE_RATIOS, contradictions


class Row(BaseModel):
    """Frozen, closed to unknown keys, strict about types, never infinite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        strict=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_tables(cls, data: Any) -> Any:
        """TOML has no null: `"none"` unsets any field that may be absent. A table that is given in
        part keeps the rest of the field's own default."""
        if not isinstance(data, dict):
            return data
        return {
            k: None if v == "none" and _optional(cls, k) else _filled(cls, k, v)
            for k, v in data.items()
        }


def _filled(cls: type[BaseModel], key: str, value: Any) -> Any:
    info = cls.model_fields.get(key)
    if info is None or not isinstance(info.default, BaseModel) or not isinstance(value, dict):
        return value
    return {**info.default.model_dump(exclude_unset=True), **value}


def _optional(cls: type[BaseModel], key: str) -> bool:
    info = cls.model_fields.get(key)
    return info is not None and type(None) in get_args(info.annotation)


Positive = Annotated[float, Field(gt=0, le=1e9)]
Coefficient = Annotated[float, Field(ge=0, le=1e9)]
"""At most 1e9, as the square of that is finite in float32."""
Unit = Annotated[float, Field(ge=0, le=1)]
EntryPoint = Annotated[str, Field(pattern=r"^[^:]+:[\w.]+$")]
"""A Python object, as `module:name` or `path/to/file.py:name`."""

# ---------------------------------------------------------------- advantage


class GAE(Row):
    """Generalised advantage estimation.

    `critic_lam` None means the actor's λ, or 1 beside an adaptive one (VAPO).
    """

    kind: Literal["gae"] = "gae"
    gamma: Unit = 1.0
    lam: Unit = 0.95
    critic_lam: Unit | None = None
    adaptive_alpha: Positive | None = None
    """VAPO's α: λ = max(0, 1 − 1/(α l)) for the actor, by completion length l."""
    whiten: bool = False


class MonteCarlo(Row):
    """Return to go less a baseline: the value model's, the batch's mean return, or none."""

    kind: Literal["monte_carlo"] = "monte_carlo"
    gamma: Unit = 1.0
    baseline: Literal["value", "batch_mean", "none"] = "value"
    whiten: bool = False


class TD(Row):
    kind: Literal["td"] = "td"
    gamma: Unit = 1.0
    whiten: bool = False


class NStep(Row):
    kind: Literal["n_step"] = "n_step"
    gamma: Unit = 1.0
    steps: int = Field(default=5, ge=1, le=1_000_000_000)
    whiten: bool = False


class GroupRelative(Row):
    kind: Literal["group_relative"] = "group_relative"
    scale: Literal["std", "batch", "none"] = "std"
    epsilon: Coefficient = 1e-4
    ddof: int = Field(default=1, ge=0, le=1)
    """What is subtracted from the count in the standard deviation: 1 (of a sample, as in TRL and
    verl) or 0 (of a population)."""
    whiten: bool = False


class LeaveOneOut(Row):
    kind: Literal["leave_one_out"] = "leave_one_out"
    whiten: bool = False


class Optimal(Row):
    """Length-weighted optimal baseline (OPO)."""

    kind: Literal["optimal"] = "optimal"
    whiten: bool = False


class BatchNormalised(Row):
    """REINFORCE++: token returns (KL to go subtracted), whitened over the batch."""

    kind: Literal["batch_normalised"] = "batch_normalised"
    gamma: Unit = 1.0
    group_baseline: bool = False


class GreedyBaseline(Row):
    """ReMax: the reward of the greedy completion of the same prompt is the baseline."""

    kind: Literal["greedy_baseline"] = "greedy_baseline"
    whiten: bool = False


class ProcessGroupRelative(Row):
    kind: Literal["process_group_relative"] = "process_group_relative"
    epsilon: Coefficient = 1e-4
    whiten: bool = False


class ValueBaseline(Row):
    """The completion's reward less the value model's estimate for its prompt: one number for each
    completion, so that it goes with a ratio of the whole completion (GSPO with a critic)."""

    kind: Literal["value_baseline"] = "value_baseline"
    whiten: bool = False


class CustomAdvantage(Row):
    """The user's own, of the signature of those in `keel.objective`: what it names, it gets.

    `needs_value` and `per_token` say what the checks cannot read off a function.
    """

    kind: Literal["custom"] = "custom"
    function: EntryPoint
    options: dict[str, Any] = Field(default_factory=dict)
    needs_value: bool = False
    per_token: bool = False
    whiten: bool = False


Advantage = Annotated[
    Union[
        GAE, MonteCarlo, TD, NStep, GroupRelative, LeaveOneOut, Optimal, BatchNormalised,
        GreedyBaseline, ProcessGroupRelative, ValueBaseline, CustomAdvantage,
    ],
    Field(discriminator="kind"),
]  # fmt: skip

# ---------------------------------------------------------------- ratio

Ratio = Literal["none", "token", "sequence", "sequence_token", "sequence_product"]

# ---------------------------------------------------------------- surrogate


class Unclipped(Row):
    kind: Literal["unclipped"] = "unclipped"


class Clip(Row):
    """min(ρA, clip(ρ, 1−low, 1+high)A); `dual` is the factor c > 1 that bounds A < 0 from below."""

    kind: Literal["clip"] = "clip"
    low: Unit = 0.2
    high: Coefficient = 0.2
    dual: float | None = Field(default=None, gt=1, le=1e9)


class Cispo(Row):
    """sg[clip(ρ, floor, cap)]·A·log π, cap and floor absolute."""

    kind: Literal["cispo"] = "cispo"
    cap: Positive = 5.0
    floor: Coefficient = 0.0


class Sapo(Row):
    kind: Literal["sapo"] = "sapo"
    temperature_positive: Positive = 1.0
    temperature_negative: Positive = 1.05


class Geometric(Row):
    """GMPO: clipped per token in log space, then the geometric mean over the sequence."""

    kind: Literal["geometric"] = "geometric"
    low: Coefficient = 0.4
    high: Coefficient = 0.4


class LogProb(Row):
    kind: Literal["log_prob"] = "log_prob"


class CustomSurrogate(Row):
    """The user's own: `(log_ratio_N, advantage_N, lengths_S, **options) -> value_N`."""

    kind: Literal["custom"] = "custom"
    function: EntryPoint
    options: dict[str, Any] = Field(default_factory=dict)


Surrogate = Annotated[
    Union[Unclipped, Clip, Cispo, Sapo, Geometric, LogProb, CustomSurrogate],
    Field(discriminator="kind"),
]

# ---------------------------------------------------------------- weights, divergence, value


class Weights(Row):
    kind: Literal["sequence_mean", "token_mean", "constant", "sequence_sum"] = "sequence_mean"
    constant: int | None = Field(default=None, ge=1, le=2**24)
    """C of `constant`; None means the completion budget."""


class Adaptive(Row):
    """A β that follows a target KL; `rule` is PPO's doubling or Ziegler's proportional one."""

    rule: Literal["ppo", "ziegler"] = "ppo"
    target: Positive = 0.01
    horizon: Positive = 10_000.0


class Divergence(Row):
    """β D. To the old policy, `unbiased = false` is KL(old‖π) and `true` is KL(π‖old)."""

    to: Literal["reference", "old"] = "reference"
    where: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    beta: Coefficient = 0.04
    unbiased: bool = False
    """Multiply by the token ratio to the sampling policy (in the loss)."""
    adaptive: Adaptive | None = None


class ValueLoss(Row):
    """coefficient · ½ max((V−R)², (clip(V, V_old ± clip) − R)²), a token mean."""

    coefficient: Coefficient = 0.1
    clip: Positive | None = 0.2


class Correction(Row):
    """Truncated importance weights where the engine's log-probs differ from the trainer's.

    `truncate`: min(weight, cap); `mask`: weight inside [floor, cap], 0 outside.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    cap: Positive = 2.0
    floor: Coefficient = 0.5


class Algorithm(Row):
    """One row. `divergence`, `value` and `correction` are absent where None (`"none"` in TOML)."""

    advantage: Advantage
    ratio: Ratio
    surrogate: Surrogate
    weights: Weights
    divergence: Divergence | None = None
    value: ValueLoss | None = None
    entropy: Coefficient = 0.0
    correction: Correction | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Algorithm:
        for reason in contradictions(self):
            raise ValueError(reason)
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy must be in memory (β = 0 needs none)."""
        d = self.divergence
        return d is not None and d.to == "reference" and (d.beta > 0 or d.adaptive is not None)

    @property
    def needs_value(self) -> bool:
        """Whether the advantage reads a value model."""
        a = self.advantage
        if isinstance(a, CustomAdvantage):
            return a.needs_value
        if isinstance(a, MonteCarlo):
            return a.baseline == "value"
        return isinstance(a, GAE | TD | NStep | ValueBaseline)

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage compares completions of one prompt (group size at least 2)."""
        a = self.advantage
        return isinstance(a, GroupRelative | LeaveOneOut | Optimal | ProcessGroupRelative) or (
            isinstance(a, BatchNormalised) and a.group_baseline
        )

    @property
    def bootstraps(self) -> bool:
        """Whether the advantage puts V of the next state for what comes after it, so that an
        episode may be cut anywhere."""
        return isinstance(self.advantage, GAE | TD | NStep)

    @property
    def per_action(self) -> bool:
        """Whether the loss of an action reads nothing of the others in its sequence."""
        token = self.correction is None or self.correction.level == "token"
        return (
            self.ratio in ("none", "token")
            and self.weights.kind == "token_mean"
            and self.surrogate.kind not in ("geometric", "custom")
            and token
        )

    @property
    def bounds_ratio(self) -> bool:
        """Whether the surrogate holds the ratio near 1, by a clip or a gate."""
        return isinstance(self.surrogate, Clip | Cispo | Sapo | Geometric)

    @property
    def needs_greedy(self) -> bool:
        """Whether a greedy completion of each prompt must be sampled and scored too."""
        return isinstance(self.advantage, GreedyBaseline)

    @property
    def needs_steps(self) -> bool:
        """Whether rewards must come per step."""
        return isinstance(self.advantage, ProcessGroupRelative)

    @property
    def reads_steps(self) -> bool:
        """Whether rewards of steps can be told from one of the whole answer.

        A return to go does, where the loss has a place for one advantage a token.
        """
        a = self.advantage
        per_sequence = self.ratio in SEQUENCE_RATIOS or self.surrogate.kind == "geometric"
        return self.needs_steps or (
            isinstance(a, GAE | TD | NStep | MonteCarlo) and not per_sequence
        )

    @property
    def reward_divergence(self) -> Divergence | None:
        """The divergence, if it is part of the reward."""
        d = self.divergence
        return d if d is not None and d.where == "reward" else None

    @property
    def loss_divergence(self) -> Divergence | None:
        """The divergence, if it is a term of the loss."""
        d = self.divergence
        return d if d is not None and d.where == "loss" else None

    @property
    def per_token_advantage(self) -> bool:
        """Whether advantages may differ between the tokens of one sequence."""
        a = self.advantage
        if isinstance(a, CustomAdvantage):
            return a.per_token
        if isinstance(a, MonteCarlo):
            return a.baseline == "value" or a.gamma < 1 or self.reward_divergence is not None
        if isinstance(a, BatchNormalised):
            return a.gamma < 1 or self.reward_divergence is not None
        return isinstance(a, GAE | TD | NStep | ProcessGroupRelative)
