"""Auxiliary terms: what is trained in the same optimizer steps besides the surrogate. One class a
kind.

An algorithm has a list of them. Each adds its coefficient times the mean of a function of the
log-probabilities of its tokens, whose number is counted over the whole optimizer batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from keel.algorithms.symbols import number
from keel.algorithms.terms import (
    Coefficient,
    Description,
    Lazy,
    TermChoice,
    Unit,
    UnusedIf,
    equation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.objective import auxiliary
else:
    auxiliary = Lazy("auxiliary")

Steps = Annotated[int, Field(ge=0, le=1_000_000_000)]
_MEAN = "A mean over those of the optimizer batch, on all ranks."


class AuxiliaryTerm(TermChoice):
    """An auxiliary term; `of` are its tokens: those of completions (N), or of replies or
    demonstrations (among the M that are scored besides)."""

    coefficient: Coefficient = 0.1
    of: ClassVar[Literal["completions", "replies", "demonstrations"]]

    @property
    def active(self) -> bool:
        """Whether it has a gradient in some step."""
        return self.coefficient > 0

    def count(self, outcome_N: Tensor | None, replies: int) -> Tensor | int:
        """The number of its tokens in an optimizer batch; of demonstrations, which are not in it
        yet, 0."""
        return 0

    def value(self, log_prob: Tensor, outcome: Tensor | None) -> Tensor:
        """What is maximised of each token; `outcome` is the reward of its completion."""
        return log_prob

    def summand(self) -> str:
        """What the objective adds."""
        raise NotImplementedError

    def describe(self) -> Description:
        """The equation of what is added."""
        raise NotImplementedError


class PositiveNLL(AuxiliaryTerm):
    """VAPO: imitates the policy's own right answers."""

    kind: Literal["positive_nll"] = "positive_nll"
    threshold: float = Field(default=0.0, ge=-1e9, le=1e9)
    """A completion is right if its reward is more than this."""
    source: ClassVar[str] = "arXiv:2504.05118 §4.3"
    of: ClassVar[Literal["completions"]] = "completions"

    def count(self, outcome_N: Tensor | None, replies: int) -> Tensor | int:
        return 0 if outcome_N is None else (outcome_N > self.threshold).sum()

    def value(self, log_prob: Tensor, outcome: Tensor | None) -> Tensor:
        if outcome is None:
            return log_prob * 0
        return auxiliary.of_right(log_prob, outcome, threshold=self.threshold)

    def summand(self) -> str:
        return rf"{number(self.coefficient)} \cdot \frac{{1}}{{N^+}} \cdot \sum_{{n\in +}} \ell_n"

    def describe(self) -> Description:
        right = rf"\sum_n [R_n > {number(self.threshold)}]"
        text = f"The likelihood of right answers' tokens ($n \\in +$), $R_n$ the reward. {_MEAN}"
        return Description((equation("N^+", right),), text)


class Replies(AuxiliaryTerm):
    """ECHO: predicts what the environment replied in the rollouts."""

    kind: Literal["replies"] = "replies"
    source: ClassVar[str] = "arXiv:2605.24517"
    of: ClassVar[Literal["replies"]] = "replies"

    def count(self, outcome_N: Tensor | None, replies: int) -> int:
        return replies

    def summand(self) -> str:
        return rf"{number(self.coefficient)} \cdot \frac{{1}}{{|E|}} \cdot \sum_{{m\in E}} \ell_m"

    def describe(self) -> Description:
        text = (
            "The likelihood of the tokens that the environment or a tool wrote in the "
            "rollouts, with what the chat template puts around them: the policy learns what its "
            f"actions do. They are scored in the same forward pass. {_MEAN}"
        )
        return Description((equation("|E|", r"\sum_m [m \text{ is of a reply}]"),), text)


_FIXED = UnusedIf(lambda key: key.table.final is None, "the coefficient has no final value")


class DemonstrationNLL(AuxiliaryTerm):
    """CHORD: imitates demonstrations, whose share μ all other terms give up.

    `coefficient` is μ; with `final` it goes there by half a cosine, in `decay_steps` steps.
    """

    kind: Literal["demonstrations"] = "demonstrations"
    coefficient: Unit = 0.1
    weighting: Literal["uncertainty", "none"] = "uncertainty"
    """Weigh a token by p(1 − p) (CHORD-φ), or all alike (CHORD-μ)."""
    warmup_steps: Steps = 0
    """Steps in which μ grows linearly from 0."""
    final: Unit | None = None
    """μ after the decay; None: it stays."""
    decay_steps: Annotated[Steps, _FIXED] = 200
    source: ClassVar[str] = "arXiv:2508.11408"
    of: ClassVar[Literal["demonstrations"]] = "demonstrations"

    @property
    def active(self) -> bool:
        return max(self.coefficient, self.final or 0.0) > 0

    def share(self, step: int) -> float:
        """μ of a step, counted from 1."""
        if step < self.warmup_steps:
            return self.coefficient * step / self.warmup_steps
        if self.final is None:
            return self.coefficient
        done = min((step - self.warmup_steps) / max(self.decay_steps, 1), 1.0)
        gap = self.coefficient - self.final
        return self.final + gap * (1 + math.cos(math.pi * done)) / 2

    def value(self, log_prob: Tensor, outcome: Tensor | None) -> Tensor:
        return auxiliary.uncertain(log_prob) if self.weighting == "uncertainty" else log_prob

    def summand(self) -> str:
        weighed = r"\mathrm{sg}[\pi_m (1 - \pi_m)] \, \ell_m"
        each = weighed if self.weighting == "uncertainty" else r"\ell_m"
        return rf"\kappa \cdot \frac{{1}}{{M}} \cdot \sum_m {each}"

    def describe(self) -> Description:
        mu = number(self.coefficient)
        text = (
            f"$m$ runs over the $M$ tokens of the demonstrations of the optimizer step. {_MEAN} "
            r"All other terms have the share $1 - \kappa$ ($\mu$ in the paper)."
        )
        if self.warmup_steps:
            text += rf" $\kappa$ grows from 0 in {self.warmup_steps} steps."
        if self.final is not None:
            text += (
                rf" $\kappa$ goes to {number(self.final)}, by half a cosine, in "
                f"{self.decay_steps} steps."
            )
        parts = (mu, r"\text{ at first}") if self.final is not None else (mu,)
        return Description((equation(r"\kappa", *parts),), text)
