"""Corrections for an engine whose log-probabilities differ from the trainer's: one class a kind.

An algorithm has a list of them. The first one gets the weight 1 of every token, each makes new
weights c_n of those before it, and the surrogate is multiplied by the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from keel.algorithms.symbols import number, quote
from keel.algorithms.terms import (
    Coefficient,
    Description,
    EntryPoint,
    Equation,
    Lazy,
    Positive,
    TermChoice,
    UnusedIf,
    equation,
    user_function,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.algorithms.signals import Signals
    from keel.objective import corrections
else:
    corrections = Lazy("corrections")

Level = Literal["token", "sequence"]
_GAP = r"\ell_{\mathrm{old},n} - \ell_{\mathrm{engine},n}"
_GAPS = r"\sum_{t\in i} (\ell_{\mathrm{old},t} - \ell_{\mathrm{engine},t})"
_MEAN = r"\exp\left(\frac{1}{L_i} \cdot \sum_{t\in i} \log \omega_t\right)"
_WEIGHT = r"\omega_n"
_EACH = {"token": "token", "sequence": "completion, an unnormalised product"}
_KEPT = "A token left out keeps its place in the weights $w_n$."


class CorrectionTerm(TermChoice):
    """A correction; the defaults are those of one that multiplies by a factor."""

    module: ClassVar[str] = "corrections"
    reads: ClassVar[tuple[str, ...]] = ("engine_log_prob_N", "old_log_prob_N", "lengths_S")
    multiplies: ClassVar[bool] = True
    """Whether it multiplies the weights of those before it by a factor."""
    weighs: ClassVar[bool] = False
    """Whether that factor is an importance weight, not 0 or 1."""

    @property
    def per_token(self) -> bool:
        """Whether the weight of a token reads no other token."""
        each = (getattr(self, "level", None), getattr(self, "over", None))
        return self.multiplies and "token" in each

    def apply(self, weight_N: Tensor, signals: Signals) -> Tensor:
        """c_n, of the weights so far."""
        return weight_N * self.computed(signals)

    def limited(self, signals: Signals) -> Tensor | None:
        """The tokens whose weight it truncates or sets to 0; None if it does neither."""
        return self.computed(signals) == 0

    def describe(self) -> Description:
        """First the equation of the factor, then those of symbols that only it has."""
        raise NotImplementedError

    def refusals(self, key: str) -> Iterator[str]:
        """Bounds that leave out the weight of a token that was sampled on policy; `key` is where it
        stands in the algorithm."""
        bounds = self._options()
        floor, cap = bounds.get("floor", 0.0), bounds.get("cap", math.inf)
        if not floor <= 1 <= cap:
            yield (
                f"{key}.floor = {floor:g} and {key}.cap = {cap:g} leave out 1, the weight on "
                "policy: every token would be masked, set floor <= 1 <= cap"
            )

    def _within(self, weight: str) -> str:
        """The floor and the cap around a weight, in LaTeX."""
        bounds = self._options()
        return rf"{number(bounds['floor'])} \leq {weight} \leq {number(bounds['cap'])}"


def _omega(level: Level) -> Equation:
    return equation(_WEIGHT, rf"\exp({_GAP if level == 'token' else _GAPS})")


class Truncate(CorrectionTerm):
    """min(ω, cap): truncated importance weights."""

    kind: Literal["truncate"] = "truncate"
    level: Level = "token"
    cap: Positive = 2.0
    source: ClassVar[str] = "Ionides 2008"
    weighs: ClassVar[bool] = True

    def limited(self, signals: Signals) -> Tensor:
        whole = self.model_copy(update={"cap": math.inf})
        return whole.computed(signals) > self.cap

    def describe(self) -> Description:
        return Description(
            (equation("c_n", rf"\mathrm{{sg}}[\min(\omega_n, {number(self.cap)})]"),
             _omega(self.level)),
            f"One weight a {_EACH[self.level]}: truncated importance sampling.",
        )  # fmt: skip

    def refusals(self, key: str) -> Iterator[str]:
        if self.cap < 1:
            yield (
                f"{key}.cap = {self.cap:g} cuts every weight, that of a token sampled on policy "
                "(1) too: set it to 1 or more"
            )


class MaskWeights(CorrectionTerm):
    """The weight inside [floor, cap], 0 outside."""

    kind: Literal["mask"] = "mask"
    level: Level = "token"
    floor: Coefficient = 0.5
    cap: Positive = 2.0
    source: ClassVar[str] = "arXiv:2510.18855"
    weighs: ClassVar[bool] = True

    def describe(self) -> Description:
        right = rf"\mathrm{{sg}}[\omega_n \cdot [{self._within(_WEIGHT)}]]"
        text = f"One weight a {_EACH[self.level]}, 0 outside the band. {_KEPT}"
        return Description((equation("c_n", right), _omega(self.level)), text)


class GeometricMask(CorrectionTerm):
    """Leaves out completions whose weights are far from 1 in the geometric mean."""

    kind: Literal["geometric_mask"] = "geometric_mask"
    floor: Coefficient = 0.99
    cap: Positive = 1.01
    source: ClassVar[str] = "Liu et al. 2025, When Speed Kills Stability"

    def describe(self) -> Description:
        text = (
            "A completion is left out where the geometric mean of its weights is outside the "
            f"band, which its length does not move. {_KEPT}"
        )
        return Description((equation("c_n", f"[{self._within(_MEAN)}]"), _omega("token")), text)


_NO_FLOOR = UnusedIf(
    lambda key: key.table.statistic != "k1", '"{key.table.statistic}" is never below 0'
)


class Reject(CorrectionTerm):
    """Leaves out tokens or completions by an estimate of the divergence of their weights.

    `cap` and `floor` bound exp(k1); k2 and k3 have a `cap` alone, which must be set.
    """

    kind: Literal["reject"] = "reject"
    statistic: Literal["k1", "k2", "k3"] = "k1"
    over: Literal["token", "sum", "mean", "max"] = "mean"
    cap: Positive | None = None
    """None: 1.01, of k1."""
    floor: Annotated[Coefficient, _NO_FLOOR] = 0.99
    source: ClassVar[str] = "Schulman 2020; verl 2026, rollout correction"

    @property
    def _cap(self) -> float:
        return 1.01 if self.cap is None else self.cap

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "cap": self._cap}

    def describe(self) -> Description:
        k = {
            "k1": r"-\log \omega_t",
            "k2": r"\frac{1}{2} (\log \omega_t)^2",
            "k3": r"\omega_t - 1 - \log \omega_t",
        }[self.statistic]
        whole = {
            "token": "k_n",
            "sum": r"\sum_{t\in i} k_t",
            "mean": r"\frac{1}{L_i} \cdot \sum_{t\in i} k_t",
            "max": r"\max(k_t : t \in i)",
        }[self.over]
        bound = rf"{whole} \leq {number(self._cap)}"
        if self.statistic == "k1":
            bound = self._within(rf"\exp\left({whole}\right)")
        each = "token" if self.over == "token" else "completion"
        text = (
            f"A {each} is left out where the {self.statistic} of its weights, an estimate of "
            rf"$\mathrm{{KL}}(\pi_\mathrm{{engine}} \Vert \pi_\mathrm{{old}})$, is outside its "
            f"bounds. {_KEPT}"
        )
        return Description(
            (equation("c_n", f"[{bound}]"), equation("k_t", k), _omega("token")), text
        )

    def refusals(self, key: str) -> Iterator[str]:
        if self.statistic != "k1" and self.cap is None:
            yield f"{key}.cap bounds {self.statistic}, an estimate of a divergence: set it"
        if self.statistic == "k1":
            yield from super().refusals(key)
            if self.over == "max":
                yield (
                    f"{key}: the largest k1 is of the tokens that became less likely alone: set "
                    'statistic = "k2" or "k3"'
                )


class OutlierMask(CorrectionTerm):
    """Leaves out completions with a token whose weight is outside wide bounds."""

    kind: Literal["outlier_mask"] = "outlier_mask"
    floor: Coefficient = 1e-4
    cap: Positive = 100.0
    source: ClassVar[str] = "SkyRL 2026, outlier token masking"

    def describe(self) -> Description:
        inside = self._within(r"\omega_t") + r" \text{ for all } t \in i"
        text = f"One weight outside the bounds leaves its whole completion out. {_KEPT}"
        return Description((equation("c_n", f"[{inside}]"), _omega("token")), text)


class Normalise(CorrectionTerm):
    """The weights so far, over their mean in the optimizer batch."""

    kind: Literal["normalise"] = "normalise"
    level: Level = "token"
    source: ClassVar[str] = "Hesterberg 1995"
    multiplies: ClassVar[bool] = False

    def apply(self, weight_N: Tensor, signals: Signals) -> Tensor:
        return corrections.normalise(weight_N, signals.lengths_S, level=self.level)

    def limited(self, signals: Signals) -> None:
        return None

    def describe(self) -> Description:
        mean = r"\frac{1}{N} \cdot \sum_m c_m"
        if self.level == "sequence":
            mean = r"\frac{1}{S} \cdot \sum_i \frac{1}{L_i} \cdot \sum_{t\in i} c_t"
        each = "tokens" if self.level == "token" else "completions"
        text = (
            f"The weights of what stands before it, over their mean: over all {each} of the "
            "optimizer batch, on all ranks, so that together they weigh as much as without."
        )
        ratio = equation("c_n", rf"\frac{{c_n}}{{{mean}}}", relation=r"\leftarrow")
        return Description((ratio,), text)


class CustomCorrection(CorrectionTerm):
    """The user's own: what it names of the weights so far and of the batch, it gets; it gives the
    new weights, one for each token, from the whole optimizer batch."""

    kind: Literal["custom"] = "custom"
    function: EntryPoint
    options: dict[str, Any] = Field(default_factory=dict)
    multiplies: ClassVar[bool] = False

    def limited(self, signals: Signals) -> None:
        return None

    def describe(self) -> Description:
        formula, given = user_function(self.function, self.options, r"c, \mathrm{batch}")
        text = (
            f"Your own {quote(self.function)}, of the weights of what stands before it and of "
            f"the batch.{given}"
        )
        return Description((equation("c_n", formula),), text)
