"""Masks: which tokens the surrogate keeps, by the current policy's numbers. One class a kind.

An algorithm has a list of them, and a token that one leaves out adds nothing to the surrogate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from keel.algorithms.symbols import number, quote
from keel.algorithms.terms import (
    SINGLE_UPDATE,
    Choices,
    Coefficient,
    Description,
    EntryPoint,
    Positive,
    Share,
    TermChoice,
    Unit,
    equation,
    user_function,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.algorithms.signals import LossSignals

COVARIANCE = equation(r"\mathrm{cov}_n", r"(A_n - \mathrm{mean}(A)) (\ell_n - \mathrm{mean}(\ell))")
_MOVED = (
    "A token that has moved past its bound, towards where $A_n$ pushes it, has no gradient; a rare "
    "token may move by a large ratio."
)
_BATCH = "Of the whole optimizer batch, on all ranks, under the weights before its update."


class MaskTerm(TermChoice):
    """A mask; the defaults are those of one that reads the whole optimizer batch."""

    module: ClassVar[str] = "masks"
    whole_batch: ClassVar[bool] = True
    """Whether it reads other sequences than the token's own."""
    reads_entropy: ClassVar[bool] = False

    def value(self, signals: LossSignals) -> Tensor:
        """Whether each token is kept."""
        return self.computed(signals)

    def describe(self) -> Description:
        """The equation of what is kept."""
        raise NotImplementedError

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        """Why it does not go with the algorithm's other choices."""
        yield from ()


class TopEntropy(MaskTerm):
    """Keeps the share of the tokens with the highest entropy."""

    kind: Literal["top_entropy"] = "top_entropy"
    share: Share = 0.2
    source: ClassVar[str] = "arXiv:2506.01939"
    reads_entropy: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("entropy_N",)

    def describe(self) -> Description:
        right = rf"[H_n \geq \mathrm{{quantile}}_{{1 - {number(self.share)}}}(H)]"
        text = f"The tokens at which an answer branches learn, the others do not. {_BATCH}"
        return Description((equation("m_n", right),), text)


class OffPolicySequences(MaskTerm):
    """Leaves out bad answers that the policy has moved away from."""

    kind: Literal["off_policy_sequences"] = "off_policy_sequences"
    bound: Coefficient = 0.1
    source: ClassVar[str] = "arXiv:2512.02556"
    whole_batch: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = (
        "log_prob_N", "engine_log_prob_N", "advantage_N", "lengths_S",
    )  # fmt: skip

    def describe(self) -> Description:
        gap = (
            r"\frac{1}{L_i} \cdot \sum_{t\in i} (\ell_{\mathrm{engine},t} - \ell_t) \leq "
            + number(self.bound)
        )
        text = (
            "An answer that is worse than its group's mean, and has become unlikely, is left out: "
            "it would be pushed down where the policy no longer goes."
        )
        return Description((equation("m_n", rf"[A_n \geq 0 \text{{ or }} {gap}]"),), text)


class TotalVariation(MaskTerm):
    """DPPO: leaves out the tokens whose probability has moved far, where A pushes it further."""

    kind: Literal["total_variation"] = "total_variation"
    low: Annotated[Unit, SINGLE_UPDATE] = 0.15
    high: Annotated[Unit, SINGLE_UPDATE] = 0.15
    source: ClassVar[str] = "arXiv:2602.04879"
    whole_batch: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("log_prob_N", "old_log_prob_N", "advantage_N")

    def describe(self) -> Description:
        moved = r"\pi_n - \pi_{\mathrm{old},n}"
        inside = (
            rf"[{moved} \leq {number(self.high)}] \text{{ if }} A_n > 0, \quad "
            rf"[{moved} \geq -{number(self.low)}] \text{{ otherwise}}"
        )
        return Description((equation("m_n", inside),), _MOVED)


class BinaryKL(MaskTerm):
    """DPPO: the same, by the divergence of the choice of this token against all others."""

    kind: Literal["binary_kl"] = "binary_kl"
    low: Annotated[Coefficient, SINGLE_UPDATE] = 0.05
    high: Annotated[Coefficient, SINGLE_UPDATE] = 0.05
    source: ClassVar[str] = "arXiv:2602.04879"
    whole_batch: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = TotalVariation.reads

    def describe(self) -> Description:
        inside = (
            rf"[\mathrm{{KL}}_n \leq {number(self.high)} \text{{ or }} \rho_n \leq 1] "
            rf"\text{{ if }} A_n > 0, \quad "
            rf"[\mathrm{{KL}}_n \leq {number(self.low)} \text{{ or }} \rho_n \geq 1] "
            r"\text{ otherwise}"
        )
        old = r"\pi_{\mathrm{old},n}"
        parts = (
            rf"{old} \log(\frac{{{old}}}{{\pi_n}})",
            rf"+ (1 - {old}) \log(\frac{{1 - {old}}}{{1 - \pi_n}})",
        )
        return Description((equation("m_n", inside), equation(r"\mathrm{KL}_n", *parts)), _MOVED)


class SecondMoment(MaskTerm):
    """M2PO: leaves out the largest log-ratios until their mean square is within the bound."""

    kind: Literal["second_moment"] = "second_moment"
    bound: Annotated[Positive, SINGLE_UPDATE] = 0.04
    source: ClassVar[str] = "arXiv:2510.01161"
    reads: ClassVar[tuple[str, ...]] = ("log_prob_N", "old_log_prob_N")

    def describe(self) -> Description:
        mean = r"\frac{\sum_n m_n d_n^2}{\sum_n m_n}"
        text = (
            r"$d_n = \ell_n - \ell_{\mathrm{old},n}$: as many tokens as the bound allows, those "
            f"that moved least first. {_BATCH}"
        )
        return Description((equation(mean, number(self.bound), relation=r"\leq"),), text)


class ClipCov(MaskTerm):
    """Leaves out a random few of the tokens whose covariance is high."""

    kind: Literal["clip_cov"] = "clip_cov"
    share: Share = 2e-4
    floor: Coefficient = 1.0
    cap: Positive = 5.0
    source: ClassVar[str] = "arXiv:2505.22617"
    reads: ClassVar[tuple[str, ...]] = ("log_prob_N", "advantage_N", "clipped_N", "seed")

    def describe(self) -> Description:
        floor, cap = number(self.floor), number(self.cap)
        text = (
            rf"Of the tokens with ${floor} < \mathrm{{cov}}_n < {cap}$ that no clip has, a random "
            f"{number(self.share)} of all tokens (at least one) is left out: those that lower the "
            f"entropy most. {_BATCH}"
        )
        return Description((COVARIANCE,), text)


class CustomMask(MaskTerm):
    """The user's own: what it names of the whole optimizer batch, it gets; it says of each token
    whether it is kept."""

    kind: Literal["custom"] = "custom"
    function: EntryPoint
    options: dict[str, Any] = Field(default_factory=dict)
    reads_entropy: ClassVar[bool] = True

    def describe(self) -> Description:
        formula, given = user_function(self.function, self.options, r"\mathrm{batch}")
        text = f"Your own {quote(self.function)}, of the batch. {_BATCH}{given}"
        return Description((equation("m_n", formula),), text)
