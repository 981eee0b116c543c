"""The ratios ρ_n and the weights w_n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from keel.algorithms.terms import (
    Description,
    Equation,
    FrozenModel,
    Lazy,
    Setting,
    UnusedIf,
    equation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.objective import ratios, weights
else:
    ratios, weights = Lazy("ratios"), Lazy("weights")

_LOG_RATIO = r"\ell_n - \ell_{\mathrm{old},n}"
_SUM = r"\sum_{t\in i} (\ell_t - \ell_{\mathrm{old},t})"
_LOG_LINEAR = (
    equation(
        r"\ell_{\mathrm{old},n}",
        r"\mathrm{sg}[\ell_n + \alpha_i (\ell_{\mathrm{engine},n} - \ell_n)]",
    ),
    equation(r"\alpha_i", r"\frac{1}{\max(d_i, 1)}"),
)
_MEAN = rf"\exp\left(\frac{{1}}{{L_i}} \cdot {_SUM}\right)"


@dataclass(frozen=True, slots=True)
class RatioKind:
    """A ratio; `keel.objective.ratios` has its function under the name of its kind."""

    kind: str
    equations: tuple[Equation, ...]
    text: str
    source: str
    per_sequence: bool = False
    """Whether it is one number for a whole sequence."""

    def log_ratio(self, log_prob_N: Tensor, old_log_prob_N: Tensor, lengths_S: Tensor) -> Tensor:
        """log ρ_n; of "none", ℓ_n."""
        found: Tensor = getattr(ratios, self.kind)(log_prob_N, old_log_prob_N, lengths_S)
        return found

    def describe(self, setting: Setting) -> Description:
        """The equation of ρ, and what ρ is in the setting."""
        if self.kind == "none":
            return Description((), self.text)
        text = (
            rf"{self.text} $\ell_\mathrm{{old}}$ is the log-probability under the policy that "
            "sampled: a stored number, no model."
        )
        if setting.one_update:
            text += (
                r" With one update per batch $\rho_n = 1$ in value, and only its gradient counts."
            )
        if setting.old_log_probs == "engine":
            text += (
                " The sampling engine's own log-probabilities stand for the old ones: equal to the "
                "trainer's to about 1e-6 in float32."
            )
        if setting.old_log_probs == "log_linear":
            text = (
                rf"{self.text} $\ell_\mathrm{{old}}$ lies between the policy and the one that "
                "sampled, by how many updates $d_i$ the latter is behind; at one or none it is "
                "the latter's."
            )
            return Description((*self.equations, *_LOG_LINEAR), text)
        return Description(self.equations, text)


_RATIOS: Final = (
    RatioKind(
        "none",
        (),
        "No ratio: the surrogate reads the log-probability $\\ell_n$ itself.",
        "Williams 1992",
    ),
    RatioKind(
        "token",
        (equation(r"\rho_n", rf"\exp({_LOG_RATIO})"),),
        "One for each token.",
        "arXiv:1707.06347 §3",
    ),
    RatioKind(
        "sequence",
        (equation(r"\rho_n", _MEAN),),
        "One for each completion: the geometric mean of its token ratios, with a gradient through "
        "every token.",
        "arXiv:2507.18071 eq. 7",
        per_sequence=True,
    ),
    RatioKind(
        "sequence_token",
        (
            equation(r"\rho_n", r"\mathrm{sg}[\rho_i] \cdot \exp(\ell_n - \mathrm{sg}[\ell_n])"),
            equation(r"\rho_i", _MEAN),
        ),
        "The completion's ratio in value, with a gradient through the token alone "
        r"($\mathrm{sg}$ stops it).",
        "arXiv:2507.18071 eq. 14",
    ),
    RatioKind(
        "sequence_product",
        (equation(r"\rho_n", rf"\exp({_SUM})"),),
        "The whole completion as one action: one ratio for all its tokens.",
        "arXiv:2402.14740 §2.2",
        per_sequence=True,
    ),
)
RATIOS: Final = {ratio.kind: ratio for ratio in _RATIOS}
if TYPE_CHECKING:
    Ratio = str
else:
    Ratio = Literal[tuple(RATIOS)]

_NO_CONSTANT = UnusedIf(
    lambda key: key.table.kind != "constant", 'kind = "{key.table.kind}" has no constant'
)


class Weights(FrozenModel):
    kind: Literal["sequence_mean", "token_mean", "constant", "sequence_sum"] = "sequence_mean"
    constant: Annotated[int | None, _NO_CONSTANT] = Field(default=None, ge=1, le=2**24)
    """C of `constant`; None means the completion budget."""

    def value(self, lengths_S: Tensor, budget: int) -> Tensor:
        """w_n of every token of an optimizer batch; `budget` is C where the recipe sets none."""
        if self.kind == "constant":
            return weights.constant(lengths_S, constant=self.constant or budget)
        found: Tensor = getattr(weights, self.kind)(lengths_S)
        return found

    @property
    def source(self) -> str:
        """The paper that weighs so."""
        return _WEIGHTS[self.kind][2]

    def describe(self, setting: Setting) -> Description:
        """The equation of w, with C's figure where it is known."""
        below, text, _ = _WEIGHTS[self.kind]
        if self.kind == "constant":
            size = self.constant or setting.max_tokens
            below += "C" if size is None else str(size)
            where = "set in the algorithm" if self.constant else "the completion budget"
            text += (
                " C (the completion budget) is the recipe's rollout.max_tokens."
                if size is None
                else f" C = {size}, {where}."
            )
        return Description(
            (equation("w_n", rf"\frac{{1}}{{{below}}}"),),
            f"{text} Set once for the whole optimizer batch, before it is cut.",
        )


_WEIGHTS: Final[dict[str, tuple[str, str, str]]] = {
    "sequence_mean": (
        r"S \cdot L_i",
        "A mean over completions of the mean over each one's tokens: a token of a long completion "
        "counts less. The weights sum to 1.",
        "arXiv:2402.03300 eq. 3",
    ),
    "token_mean": (
        "N",
        "A mean over all tokens of the optimizer batch: a long completion counts more. The weights "
        "sum to 1.",
        "arXiv:2503.14476 §3.3",
    ),
    "constant": (
        r"S \cdot ",
        "A sum over a completion's tokens over a constant: no token's weight depends on the length "
        "of its completion.",
        "arXiv:2503.20783 §3.2",
    ),
    "sequence_sum": (
        "S",
        "A mean over completions of the sum over each one's tokens: the exact gradient of the "
        "episode's log-probability.",
        "arXiv:2402.14740 §2.2",
    ),
}
"""Divisor, meaning and source of each kind of weights."""
