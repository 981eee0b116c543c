"""The advantages A_n that compare an answer with others: one class for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from keel.algorithms.advantages import (
    A,
    AdvantageTerm,
    less,
    over,
    return_symbol,
    rewards,
    to_go,
)
from keel.algorithms.symbols import number
from keel.algorithms.terms import (
    Choices,
    Coefficient,
    Description,
    Lazy,
    Setting,
    Unit,
    UnusedIf,
    equation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.algorithms.signals import RewardSignals
    from keel.objective import baselines, group
else:
    baselines, group = Lazy("baselines"), Lazy("group")

UNSCALED = UnusedIf(lambda key: key.table.scale == "none", 'scale = "none" divides by nothing')
_GROUPED = ("reward_S", "groups_S")
_TIES = "A group whose rewards are all equal gives exactly 0."


def _fraction(above: str, below: str, epsilon: float) -> str:
    plus = f" + {number(epsilon)}" if epsilon > 0 else ""
    return rf"\frac{{{above}}}{{{below}{plus}}}"


class GroupRelative(AdvantageTerm):
    kind: Literal["group_relative"] = "group_relative"
    scale: Literal["std", "batch", "none"] = "std"
    epsilon: Annotated[Coefficient, UNSCALED] = 1e-4
    ddof: Annotated[int, UNSCALED] = Field(default=1, ge=0, le=1)
    """What is subtracted from the count in the standard deviation: 1 (of a sample, as in TRL and
    verl) or 0 (of a population)."""
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2402.03300 §4.1.2"
    reads: ClassVar[tuple[str, ...]] = _GROUPED

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward = return_symbol(algorithm)
        centred = rf"{reward}_i - \mathrm{{mean}}_g({reward})"
        mean = rf"$\mathrm{{mean}}_g$ is over {over(setting)}"
        if self.scale == "none":
            text = (
                f"{mean}; not divided by a standard deviation, so that a prompt nearly always "
                f"solved or nearly always failed is not weighed up. {_TIES}"
            )
            return Description((equation(A, centred),), text)
        where, count, spread = (
            ("g", "G", r"so is $\mathrm{std}_g$")
            if self.scale == "std"
            else ("S", "S", r"$\mathrm{std}_S$ over the batch")
        )
        below = rf"\mathrm{{std}}_{where}({reward})"
        deviation = equation(
            rf"{below}^2",
            rf"\frac{{1}}{{{f'{count} - 1' if self.ddof else count}}} \cdot \sum_{{j\in {where}}}",
            rf"({reward}_j - \mathrm{{mean}}_{where}({reward}))^2",
        )
        kind = "unbiased one" if self.ddof else "population's, not the unbiased one"
        text = (
            f"{mean}, {spread}; the standard deviation is the {kind}. One number for all tokens "
            f"of a completion. {_TIES}"
        )
        ratio = _fraction(centred, below, self.epsilon)
        return Description((equation(A, ratio), deviation), text)


class LeaveOneOut(AdvantageTerm):
    kind: Literal["leave_one_out"] = "leave_one_out"
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2402.14740 §2.2"
    reads: ClassVar[tuple[str, ...]] = _GROUPED

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward, size = return_symbol(algorithm), setting.group_size
        others, count = ("G-1", "$G$") if size is None else (str(size - 1), str(size))
        text = (
            "The reward less the mean reward of the other completions of the prompt, of "
            f"{count} in all: an unbiased baseline. {_TIES}"
        )
        mean = rf"- \frac{{1}}{{{others}}} \sum_{{j\neq i}} {reward}_j"
        return Description((equation(A, f"{reward}_i", mean),), text)


class Optimal(AdvantageTerm):
    """Length-weighted optimal baseline (OPO)."""

    kind: Literal["optimal"] = "optimal"
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2505.23585 §3"
    reads: ClassVar[tuple[str, ...]] = (*_GROUPED, "lengths_S")

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward = return_symbol(algorithm)
        mean = rf"- \frac{{\sum_{{j\in g}} L_j {reward}_j}}{{\sum_{{j\in g}} L_j}}"
        text = (
            f"The baseline weighs {over(setting)} by their length $L_j$ in tokens: the one of "
            f"least variance where a gradient's size grows with the length. {_TIES}"
        )
        return Description((equation(A, f"{reward}_i", mean),), text)


class BatchNormalised(AdvantageTerm):
    """REINFORCE++: token returns (KL to go subtracted), whitened over the batch."""

    kind: Literal["batch_normalised"] = "batch_normalised"
    gamma: Unit = 1.0
    group_baseline: bool = False
    source: ClassVar[str] = "arXiv:2501.03262"

    @property
    def uses_groups(self) -> bool:
        return self.group_baseline

    def varies(self, algorithm: Choices) -> bool:
        return self.gamma < 1 or algorithm.reward_divergence is not None

    def value(self, signals: RewardSignals) -> Tensor:
        # The group's baseline is of the outcome alone; the penalty is subtracted token by token.
        return baselines.baselined_returns(
            signals.outcome_S,
            signals.penalty_N,
            signals.groups_S,
            signals.lengths_S,
            gamma=self.gamma,
            group_baseline=self.group_baseline,
        )

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward = (
            r"the completion's reward less the mean reward of its group, "
            r"$R_i - \mathrm{mean}_g(R)$,"
            if self.group_baseline
            else "the completion's reward $R_i$"
        )
        text = (
            rf"The return to go, $\gamma = {number(self.gamma)}$; $r_n$ is {reward} on the last "
            f"token and 0 before{less(algorithm)}."
        )
        return Description((equation(A, to_go(self.gamma)),), text)


class GreedyBaseline(AdvantageTerm):
    """ReMax: the reward of the greedy completion of the same prompt is the baseline."""

    kind: Literal["greedy_baseline"] = "greedy_baseline"
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2310.10505 §4"
    reads_greedy: ClassVar[bool] = True
    module: ClassVar[str] = "baselines"
    reads: ClassVar[tuple[str, ...]] = ("reward_S", "baseline_S")

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        text = (
            r"$R_\mathrm{greedy}$ is the reward of the greedy completion of the same prompt, "
            "sampled and scored with the others and never trained on. It needs no group."
        )
        total = equation(A, f"{return_symbol(algorithm)}_i", r"- R_\mathrm{greedy}")
        return Description((total,), text)


class ProcessGroupRelative(AdvantageTerm):
    kind: Literal["process_group_relative"] = "process_group_relative"
    epsilon: Coefficient = 1e-4
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2402.03300 §4.1.3"
    reads_steps: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (
        "step_reward_K", "step_end_K", "step_sequence_K", "groups_S", "lengths_S",
    )  # fmt: skip

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        scaled = _fraction(r"r_k - \mathrm{mean}_g(r)", r"\mathrm{std}_g(r)", self.epsilon)
        steps = equation(r"\tilde{r}_k", scaled)
        total = equation(A, r"\sum_{k: \mathrm{end}(k) \geq n} \tilde{r}_k")
        text = (
            "$r_k$ is the reward of reasoning step $k$; mean and unbiased standard deviation are "
            f"over all steps of {over(setting)}. A token gets the sum of the normalised rewards "
            "of its completion's steps that end at it or after it; tokens after the last step "
            "get 0."
        )
        return Description((total, steps), text)


class MeanRelative(AdvantageTerm):
    """MaxRL: the reward less the group's mean, over that mean."""

    kind: Literal["mean_relative"] = "mean_relative"
    epsilon: Coefficient = 1e-4
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2602.02710"
    needs_positive: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = _GROUPED

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward = return_symbol(algorithm)
        mean = rf"\mathrm{{mean}}_g({reward})"
        text = (
            rf"$\mathrm{{mean}}_g$ is over {over(setting)}: of rewards that are not negative, the "
            "rarer a right answer, the more it weighs, up to the gradient of its log-likelihood. "
            f"{_TIES}"
        )
        ratio = _fraction(f"{reward}_i - {mean}", mean, self.epsilon)
        return Description((equation(A, ratio),), text)


class BestOfGroup(AdvantageTerm):
    """pass@k: the best answer of a group gets its lead over the second, the others nothing."""

    kind: Literal["best_of_group"] = "best_of_group"
    scale: Literal["std", "none"] = "std"
    epsilon: Annotated[Coefficient, UNSCALED] = 1e-6
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2503.19595"
    reads: ClassVar[tuple[str, ...]] = _GROUPED

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward = return_symbol(algorithm)
        lead = rf"{reward}_{{(1)}} - {reward}_{{(2)}}"
        if self.scale == "std":
            lead = _fraction(lead, rf"\mathrm{{std}}_g({reward})", self.epsilon)
        formula = rf"{lead} \text{{ if }} i \text{{ is the best of its group}}, \quad 0"
        text = (
            f"The best of {over(setting)} gets its lead over the second best, which is what the "
            "maximum of the group owes to it; where several are best, none leads."
        )
        return Description((equation(A, rf"{formula} \text{{ otherwise}}"),), text)


class RescaledBaseline(AdvantageTerm):
    """GPG: the reward less the group's mean, more the fewer rewards of the batch are not 0."""

    kind: Literal["rescaled_baseline"] = "rescaled_baseline"
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2504.02546"
    reads: ClassVar[tuple[str, ...]] = _GROUPED

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward = return_symbol(algorithm)
        centred = rf"({reward}_i - \mathrm{{mean}}_g({reward}))"
        count = rf"\frac{{S}}{{\max(1, \sum_j [{reward}_j \neq 0])}}"
        text = rf"$\mathrm{{mean}}_g$ is over {over(setting)}, $\alpha$ over the batch. {_TIES}"
        return Description((equation(A, rf"\alpha \, {centred}"), equation(r"\alpha", count)), text)


class SeparatelyNormalised(AdvantageTerm):
    """GDPO: each reward normalised within its group before the rewards are added; whitened.

    The weights are those of `rewards.functions`.
    """

    kind: Literal["separately_normalised"] = "separately_normalised"
    epsilon: Coefficient = 1e-4
    source: ClassVar[str] = "arXiv:2601.05242"
    reads: ClassVar[tuple[str, ...]] = _GROUPED
    reads_components: ClassVar[bool] = True

    def value(self, signals: RewardSignals) -> Tensor:
        rewards, weights = signals.components, signals.component_weights
        if not rewards:
            raise ValueError("the advantage needs the single rewards, and the batch has none")
        return group.separately_normalised(
            [*rewards.values()],
            signals.groups_S,
            weights=[weights[name] for name in rewards],
            epsilon=self.epsilon,
        )

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        centred = r"R_{k,i} - \mathrm{mean}_g(R_k)"
        part = _fraction(centred, r"\mathrm{std}_g(R_k)", self.epsilon)
        text = (
            "$R_k$ is the reward of function $k$ and $w_k$ its weight; mean and unbiased standard "
            f"deviation are over {over(setting)}. Added as they are, rewards of a large spread "
            f"would hide the others. {_TIES}"
        )
        return Description((equation(A, rf"\sum_k w_k \, {part}"),), text)


class OptimalToken(AdvantageTerm):
    """The baseline of least variance for each place in the answer (OTB)."""

    kind: Literal["optimal_token"] = "optimal_token"
    zero_tail: bool = True
    """No baseline beyond the second longest answer of the group; else that answer's own return."""
    epsilon: Coefficient = 1e-8
    whiten: bool = False
    source: ClassVar[str] = "Li et al. 2026, The Optimal Token Baseline"
    reads_squares: ClassVar[bool] = True
    places_steps: ClassVar[bool] = True
    module: ClassVar[str] = "baselines"
    reads: ClassVar[tuple[str, ...]] = (
        "reward_N", "old_log_prob_N", "old_squares_N", "groups_S", "lengths_S",
    )  # fmt: skip

    def varies(self, algorithm: Choices) -> bool:
        return True

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        total = r"\sum_{j\in g} G_{j,t} W_{j,t}"
        mean = _fraction(total, r"\sum_{j\in g} W_{j,t}", self.epsilon)
        energy = r"\sum_{m\leq n} (1 - 2 \pi_m + \sum_v \pi(v)^2)"
        text = (
            f"$G_n$ is the return to go; the baseline of place $t$ weighs {over(setting)} by the "
            "expected squared size of their gradient so far, $W$. "
            + ("Beyond the second longest of them it is 0. " if self.zero_tail else "")
            + f"{rewards(algorithm)}."
        )
        return Description((equation(A, to_go(1.0), f"- {mean}"), equation("W_n", energy)), text)
