"""The surrogates that weigh the gradient of the log-probability: REINFORCE and its relatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from keel.algorithms.surrogates import SurrogateTerm, without_ratio
from keel.algorithms.symbols import number
from keel.algorithms.terms import Choices, Coefficient, Description, Positive, equation

_READS = (*SurrogateTerm.reads, "log_prob_N")


class LogProb(SurrogateTerm):
    kind: Literal["log_prob"] = "log_prob"
    source: ClassVar[str] = "Williams 1992"
    module: ClassVar[str] = "weighted"
    needs_ratio: ClassVar[bool] = False

    def describe(self) -> Description:
        text = r"REINFORCE: the gradient of $\ell_n$, times the advantage. Exact on policy only."
        return Description((equation("s", r"A_n \ell_n"),), text)

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        return without_ratio(self, algorithm)


class Cispo(SurrogateTerm):
    """sg[clip(ρ, floor, cap)]·A·log π, cap and floor absolute."""

    kind: Literal["cispo"] = "cispo"
    cap: Positive = 5.0
    floor: Coefficient = 0.0
    source: ClassVar[str] = "arXiv:2506.13585 eq. 4-5"
    bounds_ratio: ClassVar[bool] = True
    module: ClassVar[str] = "weighted"
    reads: ClassVar[tuple[str, ...]] = _READS

    @property
    def edges(self) -> tuple[float, float]:
        return self.floor, self.cap

    def describe(self) -> Description:
        floor, cap = number(self.floor), number(self.cap)
        formula = rf"\mathrm{{sg}}[\mathrm{{clip}}(\rho_n, {floor}, {cap})] \, A_n \ell_n"
        text = (
            rf"The ratio only weighs the gradient of $\ell_n$, cut to [{floor}, {cap}] as an "
            r"absolute ratio ($\mathrm{sg}$: no gradient through it). No token loses its gradient."
        )
        return Description((equation("s", formula),), text)

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        if algorithm.ratio_per_sequence:
            yield (
                'surrogate "cispo" weighs each token\'s log-probability by its own ratio: '
                f'set ratio = "token" (or "sequence_token"), not "{algorithm.ratio}"'
            )
        if not self.floor <= 1 <= self.cap:
            yield (
                f"surrogate.floor = {self.floor:g} and surrogate.cap = {self.cap:g} leave out 1, "
                "the ratio on policy: every token would get the same weight, set "
                "floor <= 1 <= cap"
            )


class Vespo(SurrogateTerm):
    """REINFORCE weighed by a gamma kernel of the completion's ratio."""

    kind: Literal["vespo"] = "vespo"
    power_positive: Coefficient = 2.0
    rate_positive: Coefficient = 3.0
    power_negative: Coefficient = 3.0
    rate_negative: Coefficient = 2.0
    source: ClassVar[str] = "arXiv:2602.10693"
    reads_sequence: ClassVar[bool] = True
    bounds_ratio: ClassVar[bool] = True
    token_ratio: ClassVar[bool] = True
    module: ClassVar[str] = "weighted"
    reads: ClassVar[tuple[str, ...]] = _READS

    def describe(self) -> Description:
        positive = rf"({number(self.power_positive)}, {number(self.rate_positive)})"
        negative = rf"({number(self.power_negative)}, {number(self.rate_negative)})"
        formula = r"\mathrm{sg}[W_i^{k} \, e^{\lambda (1 - W_i)}] \, A_n \ell_n"
        choice = rf"{positive} \text{{ if }} A_n \geq 0, \quad {negative} \text{{ otherwise}}"
        return Description(
            (
                equation("s", formula),
                equation("W_i", r"\exp\left(\sum_{t\in i} \log \rho_t\right)"),
                equation(r"(k, \lambda)", choice),
            ),
            "The completion's ratio weighs its gradient: by 1 on policy, and by ever less the "
            "further it has moved, without an edge.",
        )


class Topr(SurrogateTerm):
    """REINFORCE of the right answers, and of the wrong ones as far as the policy gives them."""

    kind: Literal["topr"] = "topr"
    threshold: float = Field(default=0.0, ge=-1e9, le=1e9)
    """A completion is right if its reward is more than this."""
    source: ClassVar[str] = "arXiv:2503.14286"
    reads_sequence: ClassVar[bool] = True
    reads_outcome: ClassVar[bool] = True
    bounds_ratio: ClassVar[bool] = True
    module: ClassVar[str] = "weighted"
    token_ratio: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (*_READS, "outcome_S")

    def describe(self) -> Description:
        right = rf"1 \text{{ if }} R_i > {number(self.threshold)}"
        wrong = r"\min\left(\exp\left(\sum_{t\in i} \log \rho_t\right), 1\right)"
        return Description(
            (
                equation("s", r"\mathrm{sg}[\omega_i] \, A_n \ell_n"),
                equation(r"\omega_i", rf"{right}, \quad {wrong} \text{{ otherwise}}"),
            ),
            "Right answers are learnt as they are, however old; wrong ones only as far as the "
            "policy would still give them.",
        )


class Dro(SurrogateTerm):
    """REINFORCE with a quadratic penalty on the log-ratio."""

    kind: Literal["dro"] = "dro"
    beta: Coefficient = 0.1
    source: ClassVar[str] = "arXiv:2405.19107"
    bounds_ratio: ClassVar[bool] = True
    module: ClassVar[str] = "weighted"
    reads: ClassVar[tuple[str, ...]] = _READS
    reads_advantage: ClassVar[bool] = False
    token_ratio: ClassVar[bool] = True

    def describe(self) -> Description:
        penalty = rf"- \frac{{1}}{{2}} \cdot {number(self.beta)} (\log \rho_n)^2"
        text = "The penalty holds the policy near the one that sampled, on both sides."
        return Description((equation("s", r"A_n \ell_n", penalty),), text)
