"""The advantages A_n that follow time, and the user's own: one class for each kind.

Add one as a subclass of `AdvantageTerm`, here, in `group_advantages` or in `turn_advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from keel.algorithms.symbols import number, quote
from keel.algorithms.terms import (
    Choices,
    Description,
    EntryPoint,
    Equation,
    Lazy,
    Positive,
    Setting,
    TermChoice,
    Unit,
    UnusedIf,
    equation,
    user_function,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.algorithms.signals import RewardSignals
    from keel.objective import gae, segments
else:
    gae, segments = Lazy("gae"), Lazy("segments")

A = "A_n"
_ADAPTIVE = UnusedIf(
    lambda key: key.table.adaptive_alpha is not None,
    "adaptive_alpha sets the actor's λ, and critic_lam the critic's",
)


class AdvantageTerm(TermChoice):
    """An advantage; the defaults are those of one number for a completion, without a group."""

    module: ClassVar[str] = "group"
    reads_value: ClassVar[bool] = False
    """Whether it reads a value model (the default of `uses_value`)."""
    reads_steps: ClassVar[bool] = False
    """Whether rewards must come per step."""
    reads_greedy: ClassVar[bool] = False
    """Whether a greedy completion of each prompt must be sampled and scored too."""
    reads_reward: ClassVar[bool] = True
    """Whether it is made of rewards; where not, rewards are optional, and only logged."""
    reads_components: ClassVar[bool] = False
    """Whether it reads each reward for itself."""
    needs_positive: ClassVar[bool] = False
    """Whether rewards below 0, as a penalty gives, have no meaning for it."""
    reads_squares: ClassVar[bool] = False
    """Whether it reads Σ_v π² of the policy before the update."""
    bootstraps: ClassVar[bool] = False
    """Whether V of the next state stands for what comes after it."""
    places_steps: ClassVar[bool] = False
    """Whether a reward counts from the token that it is given at."""
    reads_turns: ClassVar[bool] = False
    """Whether it reads the turns of a conversation."""
    stateful: ClassVar[bool] = False
    """Whether it has a state between steps, which checkpoints hold: names with numbers."""

    def value(self, signals: RewardSignals) -> Tensor:
        """A before whitening, of shape (N,) or (S,)."""
        return self.computed(signals)

    def next_state(self, signals: RewardSignals) -> Mapping[str, float]:
        """The state after the step, of the one before it (`signals.state`)."""
        return {}

    def returns(self, signals: RewardSignals, advantage_N: Tensor) -> Tensor:
        """What the value model is regressed on, of shape (N,): A + V."""
        return gae.returns(advantage_N, signals.need("value_N"))

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        """The equations of A, without the whitening."""
        raise NotImplementedError

    def describe_returns(self) -> tuple[Equation, str]:
        """The equation of R̂, and what the value model is regressed on in words."""
        text = r"The value model is regressed on $\hat{R}_n$, taken before any whitening"
        return equation(r"\hat{R}_n", r"A_n + V_{\mathrm{old},n}"), text

    @property
    def whitens(self) -> bool:
        """Whether A is whitened over the optimizer batch."""
        return bool(getattr(self, "whiten", True))

    @property
    def uses_value(self) -> bool:
        """Whether it reads a value model, with these parameters."""
        return self.reads_value

    @property
    def uses_groups(self) -> bool:
        """Whether it compares completions of one prompt, with these parameters."""
        return "groups_S" in self.reads

    @property
    def role_column(self) -> str | None:
        """The column of prompts that names the roles; None: the task's name does."""
        return getattr(self, "role", None)

    @property
    def uses_teacher(self) -> bool:
        """Whether it reads a teacher's log-probabilities, with these parameters."""
        return False

    def varies(self, algorithm: Choices) -> bool:
        """Whether it may differ between the tokens of one sequence."""
        return self.bootstraps or self.reads_steps or self.reads_turns


def return_symbol(algorithm: Choices) -> str:
    """The reward of a whole completion: with a tilde where the divergence was taken from it."""
    return r"\tilde{R}" if _penalised(algorithm) else "R"


def _penalised(algorithm: Choices) -> bool:
    return algorithm.reward_divergence is not None and algorithm.reward_divergence.active


def less(algorithm: Choices) -> str:
    return ", less the divergence on every token" if _penalised(algorithm) else ""


def rewards(algorithm: Choices) -> str:
    return f"$r_n$ is the completion's reward on its last token and 0 before{less(algorithm)}"


def _state(algorithm: Choices) -> str:
    return (
        f"{rewards(algorithm)}; $V_n$ is the value model's estimate before token $n$ is written, "
        "0 after the last: a completion cut at the budget ends like any other. The recursion skips "
        "tool output, it does not decay through it."
    )


def _td(left: str, gamma: float) -> Equation:
    return equation(left, "r_n", rf"+ {number(gamma)} \cdot V_{{n+1}}", "- V_n")


def to_go(gamma: float) -> str:
    return rf"\sum_{{k\geq0}} {number(gamma)}^k \, r_{{n+k}}"


def over(setting: Setting) -> str:
    size = "" if setting.group_size is None else f"{setting.group_size} "
    return f"the {size}completions of one prompt"


def _temporal(signals: RewardSignals, gamma: float) -> tuple[Tensor, Tensor]:
    value_N, next_N = signals.need("value_N"), signals.need("next_value_N")
    delta_N = gae.td_error(signals.reward_N, value_N, next_N, gamma=gamma)
    return delta_N, segments.continues(signals.lengths_S)


class GAE(AdvantageTerm):
    """Generalised advantage estimation.

    `critic_lam` None means the actor's λ, or 1 with an adaptive one (VAPO).
    """

    kind: Literal["gae"] = "gae"
    gamma: Unit = 1.0
    lam: Annotated[Unit, _ADAPTIVE] = 0.95
    critic_lam: Unit | None = None
    adaptive_alpha: Positive | None = None
    """VAPO's α: λ = max(0, 1 − 1/(α l)) for the actor, by completion length l."""
    whiten: bool = False
    source: ClassVar[str] = "arXiv:1506.02438 eq. 16"
    reads_value: ClassVar[bool] = True
    bootstraps: ClassVar[bool] = True
    places_steps: ClassVar[bool] = True

    @property
    def _returns_lam(self) -> float | None:
        """λ of the returns where it is not the actor's; 1 with a length-adaptive actor."""
        if self.critic_lam is None and self.adaptive_alpha is not None:
            return 1.0
        return self.critic_lam

    def value(self, signals: RewardSignals) -> Tensor:
        delta_N, continues_N = _temporal(signals, self.gamma)
        lam: float | Tensor = self.lam
        if self.adaptive_alpha is not None:
            lam_S = gae.adaptive_lambda(signals.lengths_S, alpha=self.adaptive_alpha)
            lam = segments.spread(lam_S.to(delta_N), signals.lengths_S)
        return gae.gae(delta_N, continues_N, gamma=self.gamma, lam=lam)

    def returns(self, signals: RewardSignals, advantage_N: Tensor) -> Tensor:
        if self._returns_lam is not None:
            delta_N, continues_N = _temporal(signals, self.gamma)
            advantage_N = gae.gae(delta_N, continues_N, gamma=self.gamma, lam=self._returns_lam)
        return super().returns(signals, advantage_N)

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        gamma, lam = number(self.gamma), number(self.lam)
        equations = [_td(r"\delta_n", self.gamma)]
        figures = rf"$\gamma = {gamma}$, $\lambda = {lam}$."
        if self.adaptive_alpha is not None:
            lam, alpha = r"\lambda_i", number(self.adaptive_alpha)
            equations.append(equation(lam, rf"\max(0, 1 - \frac{{1}}{{{alpha} \cdot L_i}})"))
            figures = (
                rf"$\gamma = {gamma}$; $\lambda_i$ grows with the length $L_i$ of the completion "
                rf"(VAPO's rule, $\alpha = {alpha}$)."
            )
        total = equation(A, rf"\sum_{{k\geq0}} ({gamma} \cdot {lam})^k \, \delta_{{n+k}}")
        text = f"Generalised advantage estimation, {figures} {_state(algorithm)}"
        return Description((total, *equations), text)

    def describe_returns(self) -> tuple[Equation, str]:
        returns, text = super().describe_returns()
        if self._returns_lam is None:
            return returns, rf"{text}, $\lambda = {number(self.lam)}$ as the actor's"
        lam = number(self._returns_lam)
        decay = rf"({number(self.gamma)} \cdot {lam})^k"
        traces = rf"\sum_{{k\geq0}} {decay} \, \delta_{{n+k}}"
        returns = equation(r"\hat{R}_n", rf"{traces} + V_{{\mathrm{{old}},n}}")
        return returns, rf"{text}, under the critic's own $\lambda = {lam}$"


class MonteCarlo(AdvantageTerm):
    """Return to go less a baseline: the value model's, the batch's mean return, or none."""

    kind: Literal["monte_carlo"] = "monte_carlo"
    gamma: Unit = 1.0
    baseline: Literal["value", "batch_mean", "none"] = "value"
    whiten: bool = False
    source: ClassVar[str] = "Williams 1992"
    places_steps: ClassVar[bool] = True

    @property
    def uses_value(self) -> bool:
        return self.baseline == "value"

    def varies(self, algorithm: Choices) -> bool:
        return self.uses_value or self.gamma < 1 or algorithm.reward_divergence is not None

    def value(self, signals: RewardSignals) -> Tensor:
        return gae.monte_carlo(
            signals.reward_N,
            signals.lengths_S,
            signals.value_N,
            signals.next_value_N,
            gamma=self.gamma,
            baseline=self.baseline,
        )

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        parts, words = {
            "value": (
                ("- V_n",),
                f"The return to go less the value model's estimate. {_state(algorithm)}",
            ),
            "batch_mean": (
                (rf"- \mathrm{{mean}}_S({return_symbol(algorithm)})",),
                "The return to go less the mean reward of all completions of the step. "
                f"{rewards(algorithm)}.",
            ),
            "none": ((), f"The return to go, with no baseline. {rewards(algorithm)}."),
        }[self.baseline]
        return Description(
            (equation(A, to_go(self.gamma), *parts),), f"{words} $\\gamma = {number(self.gamma)}$."
        )


class TD(AdvantageTerm):
    kind: Literal["td"] = "td"
    gamma: Unit = 1.0
    whiten: bool = False
    source: ClassVar[str] = "Sutton and Barto 2018 eq. 6.5"
    reads_value: ClassVar[bool] = True
    bootstraps: ClassVar[bool] = True
    places_steps: ClassVar[bool] = True

    def value(self, signals: RewardSignals) -> Tensor:
        return _temporal(signals, self.gamma)[0]

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        text = f"The one-step temporal difference: least variance, most bias. {_state(algorithm)}"
        return Description((_td(A, self.gamma),), text)


class NStep(AdvantageTerm):
    kind: Literal["n_step"] = "n_step"
    gamma: Unit = 1.0
    steps: int = Field(default=5, ge=1, le=1_000_000_000)
    whiten: bool = False
    source: ClassVar[str] = "Sutton and Barto 2018 eq. 7.1"
    reads_value: ClassVar[bool] = True
    bootstraps: ClassVar[bool] = True
    places_steps: ClassVar[bool] = True

    def value(self, signals: RewardSignals) -> Tensor:
        delta_N, continues_N = _temporal(signals, self.gamma)
        return gae.n_step(delta_N, continues_N, gamma=self.gamma, steps=self.steps)

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        gamma = number(self.gamma)
        total = equation(A, rf"\sum_{{0\leq k<{self.steps}}} {gamma}^k \, \delta_{{n+k}}")
        text = (
            f"The temporal differences of the next {self.steps} tokens: rewards so far, then the "
            f"value model's estimate. {_state(algorithm)}"
        )
        return Description((total, _td(r"\delta_n", self.gamma)), text)


class ValueBaseline(AdvantageTerm):
    """The completion's reward less the value model's estimate for its prompt: one number for each
    completion, so that it goes with a ratio of the whole completion (GSPO with a critic)."""

    kind: Literal["value_baseline"] = "value_baseline"
    whiten: bool = False
    source: ClassVar[str] = "Williams 1992; Sutton and Barto 2018 §13.4"
    reads_value: ClassVar[bool] = True
    module: ClassVar[str] = "gae"
    reads: ClassVar[tuple[str, ...]] = ("reward_S", "value_N", "lengths_S")

    def returns(self, signals: RewardSignals, advantage_N: Tensor) -> Tensor:
        # The return to go (λ = 1), whose first one is the sequence's reward. A sequence without
        # reward keeps its values.
        return_N = gae.returns_to_go(signals.reward_N, signals.lengths_S, gamma=1.0)
        return signals.need("value_N").where(return_N.isnan(), return_N)

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        text = (
            "The completion as one action: its reward less the value model's estimate $V_{q_i}$ "
            "for its prompt, read at the prompt's last token, before anything is written. One "
            "number for all tokens of a completion, so that one ratio for each completion goes "
            "with it."
        )
        return Description((equation(A, f"{return_symbol(algorithm)}_i", "- V_{q_i}"),), text)

    def describe_returns(self) -> tuple[Equation, str]:
        text = (
            r"The value model is regressed on the return to go at every token of a completion; "
            r"$r_n$ is the completion's reward on its last token and 0 before, less the divergence "
            "on every token where that is part of the reward"
        )
        return equation(r"\hat{R}_n", r"\sum_{k\geq0} r_{n+k}"), text


class ZeroAdvantage(AdvantageTerm):
    """0: what the policy learns from is another term, such as a teacher's."""

    kind: Literal["zero"] = "zero"
    source: ClassVar[str] = "none is read"
    reads_reward: ClassVar[bool] = False

    def value(self, signals: RewardSignals) -> Tensor:
        return signals.reward_N.new_zeros(len(signals.reward_N))

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        return Description((equation(A, "0"),), "No reward is read.")

    @property
    def whitens(self) -> bool:
        return False


class CustomAdvantage(AdvantageTerm):
    """The user's own, of the signature of those in `keel.objective`: what it names, it gets.

    One that names `state` has a state between steps: it gives `(advantage, state after the step)`.

    `needs_value`, `needs_teacher` and `per_token` say what the checks cannot read off a function.
    """

    kind: Literal["custom"] = "custom"
    function: EntryPoint
    options: dict[str, Any] = Field(default_factory=dict)
    needs_value: bool = False
    needs_teacher: bool = False
    per_token: bool = False
    whiten: bool = False

    @property
    def uses_value(self) -> bool:
        return self.needs_value

    @property
    def uses_teacher(self) -> bool:
        return self.needs_teacher

    def varies(self, algorithm: Choices) -> bool:
        return self.per_token

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        formula, given = user_function(self.function, self.options, r"\mathrm{batch}")
        per = "token" if self.per_token else "completion"
        text = (
            f"Your own {quote(self.function)}; it is handed those of the batch's rewards, lengths, "
            f"groups and values that it names, and gives one number a {per}.{given}"
        )
        return Description((equation(A, formula),), text)
