"""Auxiliary terms: what is trained in the same optimizer steps besides the surrogate.

An algorithm has a list of them. Each adds its coefficient times a mean over its own tokens, whose
number is counted over the whole optimizer batch. One class a kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from keel.algorithms.symbols import number
from keel.algorithms.terms import (
    Coefficient,
    Description,
    Equation,
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

_MEAN = "A mean over those of the optimizer batch, on all ranks."


class AuxiliaryTerm(TermChoice):
    """An auxiliary term, which a coefficient of 0 switches off; `of` are its tokens: those of
    completions (N), or of replies or demonstrations (among the M that are scored besides)."""

    coefficient: Coefficient = 0.1
    of: ClassVar[Literal["completions", "replies", "demonstrations"]]

    @property
    def active(self) -> bool:
        """Whether it has a part in the objective at some step."""
        return self.coefficient > 0

    def value(
        self, log_prob: Tensor, outcome: Tensor | None = None, taught: Tensor | None = None
    ) -> Tensor:
        """What is maximised of each token; `outcome` is the reward of each of the N, `taught` the
        divergence to a teacher of each of the M."""
        return log_prob

    def describe(self) -> Description:
        """What the objective adds first, the equation of a symbol in it second."""
        raise NotImplementedError


class PositiveNLL(AuxiliaryTerm):
    """VAPO: imitates the policy's own right answers."""

    kind: Literal["positive_nll"] = "positive_nll"
    threshold: float = Field(default=0.0, ge=-1e9, le=1e9)
    """A completion is right if its reward is more than this."""
    source: ClassVar[str] = "arXiv:2504.05118 §4.3"
    of: ClassVar[Literal["completions"]] = "completions"

    def value(
        self, log_prob: Tensor, outcome: Tensor | None = None, taught: Tensor | None = None
    ) -> Tensor:
        assert outcome is not None
        return auxiliary.of_right(log_prob, outcome, threshold=self.threshold)

    def describe(self) -> Description:
        mean = r"\cdot \frac{1}{N^+} \cdot \sum_{n\in +} \ell_n"
        right = equation("N^+", rf"\sum_n [R_n > {number(self.threshold)}]")
        text = rf"The likelihood of right answers' tokens ($n \in +$), $R_n$ the reward. {_MEAN}"
        return _added(f"{number(self.coefficient)} {mean}", right, text)


_SILENT = UnusedIf(
    lambda key: (
        key.stage.rollout.program is None
        and (key.stage.rollout.max_turns == 1 or key.facts.replies.get(key.stage.name) is False)
    ),
    "no rollout has a reply: set rollout.max_turns, for a task that replies, or rollout.program",
)


class Replies(AuxiliaryTerm):
    """ECHO: predicts what the environment replied in the rollouts."""

    kind: Annotated[Literal["replies"], _SILENT] = "replies"
    coefficient: Annotated[Coefficient, _SILENT] = 0.1
    source: ClassVar[str] = "arXiv:2605.24517"
    of: ClassVar[Literal["replies"]] = "replies"

    def describe(self) -> Description:
        mean = r"\cdot \frac{1}{|E|} \cdot \sum_{m\in E} \ell_m"
        text = (
            "The likelihood of what the environment or a tool wrote in the rollouts, and the chat "
            f"template around it, scored in the same forward pass. {_MEAN}"
        )
        size = equation("|E|", r"\sum_m [m \text{ is of a reply}]")
        return _added(f"{number(self.coefficient)} {mean}", size, text)


_FIXED = UnusedIf(lambda key: key.table.final is None, "the coefficient has no final value")


class DemonstrationNLL(AuxiliaryTerm):
    """CHORD: imitates demonstrations, which have the share μ of the objective, all other terms the
    rest. μ is the coefficient, and goes to `final` by half a cosine in `decay_steps` steps."""

    kind: Literal["demonstrations"] = "demonstrations"
    coefficient: Unit = 0.1
    weighting: Literal["uncertainty", "none", "teacher"] = "uncertainty"
    """Weigh a token by p(1 − p) (CHORD-φ), or all alike (CHORD-μ); `teacher`: minimise the
    divergence of `distillation` on them in place of the NLL (GKD, whose λ is 1 − μ)."""
    warmup_steps: int = Field(default=0, ge=0, le=10**9)
    """Steps in which μ grows linearly from 0."""
    final: Unit | None = None
    """μ after the decay; None: it stays."""
    decay_steps: Annotated[int, Field(ge=1, le=10**9), _FIXED] = 200
    source: ClassVar[str] = "arXiv:2508.11408"
    of: ClassVar[Literal["demonstrations"]] = "demonstrations"

    @property
    def active(self) -> bool:
        return self.coefficient > 0 or bool(self.final)

    def share(self, step: int) -> float:
        """μ of a step, counted from 1."""
        if step < self.warmup_steps:
            return self.coefficient * step / self.warmup_steps
        if self.final is None:
            return self.coefficient
        done = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return self.final + (self.coefficient - self.final) * (1 + math.cos(math.pi * done)) / 2

    def value(
        self, log_prob: Tensor, outcome: Tensor | None = None, taught: Tensor | None = None
    ) -> Tensor:
        if self.weighting == "teacher":
            assert taught is not None
            return -taught
        return auxiliary.uncertain(log_prob) if self.weighting == "uncertainty" else log_prob

    def describe(self) -> Description:
        weight = r"\mathrm{sg}[\pi_m (1 - \pi_m)] \, " if self.weighting == "uncertainty" else ""
        text = (
            f"$m$ runs over the $M$ tokens of the demonstrations of the optimizer step. {_MEAN} "
            r"All other terms have the share $1 - \kappa$ ($\mu$ in the paper)."
        )
        if self.warmup_steps:
            text += rf" $\kappa$ grows from 0 in {self.warmup_steps} steps."
        if self.final is not None:
            end = f"{number(self.final)} in {self.decay_steps} steps, by half a cosine"
            text += rf" $\kappa$ goes to {end}."
        share = equation(r"\kappa", number(self.coefficient))
        if self.weighting == "teacher":
            text += r" $T_m$ is the divergence to the teacher, with the coefficient of its term."
            return _added(r"(-\kappa \cdot \frac{1}{M} \cdot \sum_m T_m)", share, text)
        return _added(rf"\kappa \cdot \frac{{1}}{{M}} \cdot \sum_m {weight}\ell_m", share, text)


def _added(summand: str, symbol: Equation, text: str) -> Description:
    return Description((equation("J", summand, relation=r"\leftarrow J +"), symbol), text)
