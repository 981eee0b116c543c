"""The surrogates s(ρ_n, A_n), the ratio ρ_n and the weights w_n: one class or entry for each kind.

To add a surrogate, define a subclass of `SurrogateTerm` here, with the fields that the recipe may
set. The recipe's schema, `keel explain`, `keel check` and the loss read the subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from keel.algorithms.symbols import number, offset, quote
from keel.algorithms.terms import (
    Choices,
    Coefficient,
    Description,
    EntryPoint,
    Equation,
    FrozenModel,
    Lazy,
    Positive,
    Setting,
    TermChoice,
    Unit,
    UnusedIf,
    equation,
    one_of,
    user_function,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.objective import ratios, surrogates, weights
else:
    ratios, surrogates, weights = Lazy("ratios"), Lazy("surrogates"), Lazy("weights")


class SurrogateTerm(TermChoice):
    """A surrogate; the defaults are those of one that bounds nothing, token by token."""

    needs_ratio: ClassVar[bool] = True
    """Whether ratio = "none" leaves it nothing to compute."""
    per_sequence: ClassVar[bool] = False
    """Whether it is one number for a whole sequence."""
    bounds_ratio: ClassVar[bool] = False
    """Whether it keeps the ratio near 1, by a clip or a gate."""

    def value(
        self, log_ratio_N: Tensor, advantage_N: Tensor, lengths_S: Tensor, log_prob_N: Tensor
    ) -> Tensor:
        """s_n; every argument but `lengths_S` is of shape (N,).

        `keel.objective.surrogates` has the function under the name of the kind, and its options
        under those of the fields.
        """
        function = getattr(surrogates, self.kind)
        found: Tensor = function(log_ratio_N, advantage_N, lengths_S, **self._options())
        return found

    def _options(self) -> dict[str, Any]:
        return self.model_dump(exclude={"kind"})

    def describe(self) -> Description:
        """First the equation of s, then those of symbols that only s has."""
        raise NotImplementedError

    @property
    def edges(self) -> tuple[float, float]:
        """The ratios outside which it clips: what the clip fractions count by."""
        return 0.0, math.inf

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        """Why it does not go with the algorithm's other choices."""
        yield from ()


class Unclipped(SurrogateTerm):
    kind: Literal["unclipped"] = "unclipped"
    source: ClassVar[str] = "arXiv:1707.06347 eq. 6, 8"

    def describe(self) -> Description:
        text = (
            "The importance-weighted advantage, unclipped: where the ratio moves, a divergence "
            "must hold it."
        )
        return Description((equation("s", r"\rho_n A_n"),), text)


class Clip(SurrogateTerm):
    """min(ρA, clip(ρ, 1−low, 1+high)A); `dual` is the factor c > 1 that bounds A < 0 from below."""

    kind: Literal["clip"] = "clip"
    low: Unit = 0.2
    high: Coefficient = 0.2
    dual: float | None = Field(default=None, gt=1, le=1e9)
    source: ClassVar[str] = "arXiv:1707.06347 eq. 7"
    bounds_ratio: ClassVar[bool] = True

    @property
    def edges(self) -> tuple[float, float]:
        return 1 - self.low, 1 + self.high

    def describe(self) -> Description:
        low, high = offset(-self.low, 1.0), offset(self.high, 1.0)
        formula = rf"\min(\rho_n A_n, \, \mathrm{{clip}}(\rho_n, {low}, {high}) \, A_n)"
        text = (
            rf"$\epsilon_\mathrm{{low}} = {number(self.low)}$, $\epsilon_\mathrm{{high}} = "
            rf"{number(self.high)}$. The gradient stops where $\rho_n$ has passed the edge towards "
            "which $A_n$ pushes it; on the other side it stays."
        )
        if self.dual is not None:
            dual = number(self.dual)
            formula = rf"\max({formula}, \, {dual} \min(A_n, 0))"
            text += rf" Where $A_n < 0$, $s$ is at least ${dual} A_n$ (dual clip)."
        return Description((equation("s", formula),), text)


class Cispo(SurrogateTerm):
    """sg[clip(ρ, floor, cap)]·A·log π, cap and floor absolute."""

    kind: Literal["cispo"] = "cispo"
    cap: Positive = 5.0
    floor: Coefficient = 0.0
    source: ClassVar[str] = "arXiv:2506.13585 eq. 4-5"
    bounds_ratio: ClassVar[bool] = True

    def value(
        self, log_ratio_N: Tensor, advantage_N: Tensor, lengths_S: Tensor, log_prob_N: Tensor
    ) -> Tensor:
        options = {**self._options(), "log_prob_N": log_prob_N}
        return surrogates.cispo(log_ratio_N, advantage_N, lengths_S, **options)

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


class Sapo(SurrogateTerm):
    kind: Literal["sapo"] = "sapo"
    temperature_positive: Positive = 1.0
    temperature_negative: Positive = 1.05
    source: ClassVar[str] = "arXiv:2511.20347"
    bounds_ratio: ClassVar[bool] = True

    def describe(self) -> Description:
        positive, negative = self.temperature_positive, self.temperature_negative
        equations = (
            equation("s", r"\frac{4}{\tau_n} \cdot \sigma(\tau_n (\rho_n - 1)) \, A_n"),
            equation(
                r"\tau_n",
                rf"{number(positive)} \text{{ if }} A_n > 0, \quad {number(negative)} "
                r"\text{ otherwise}",
            ),
        )
        text = (
            r"A soft gate in place of the clip ($\sigma$ the logistic function): slope 1 at "
            r"$\rho_n = 1$, fading on both sides, faster where $\tau_n$ is larger."
        )
        return Description(equations, text)


class Geometric(SurrogateTerm):
    """GMPO: clipped per token in log space, then the geometric mean over the sequence."""

    kind: Literal["geometric"] = "geometric"
    low: Coefficient = 0.4
    high: Coefficient = 0.4
    source: ClassVar[str] = "arXiv:2507.20673 eq. 4"
    per_sequence: ClassVar[bool] = True
    bounds_ratio: ClassVar[bool] = True

    @property
    def edges(self) -> tuple[float, float]:
        return math.exp(-self.low), math.exp(self.high)

    def describe(self) -> Description:
        low, high = number(self.low), number(self.high)
        clipped = rf"g_i \, \mathrm{{clip}}(\log \rho_t, -{low}, {high})"
        inner = rf"g_i \min(g_i \log \rho_t, \, {clipped})"
        mean = r"\frac{1}{L_i} \cdot \sum_{t\in i}"
        equations = (
            equation("s", rf"A_n \exp\left({mean} {inner}\right)"),
            equation("g_i", r"\mathrm{sign}(A_n)"),
        )
        text = (
            rf"The token log-ratios are clipped to [−{low}, {high}] before the mean, only in the "
            "direction in which $A_n$ pushes; every token of the completion holds the same $s$."
        )
        return Description(equations, text)

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        if algorithm.ratio != "token":
            yield (
                'surrogate "geometric" takes the mean over a sequence itself, of token ratios: '
                f'set ratio = "token", not "{algorithm.ratio}"'
            )
        if algorithm.per_token_advantage:
            yield (
                'surrogate "geometric" is one number a sequence: advantage '
                f'"{algorithm.advantage.kind}" differs from token to token'
            )


class LogProb(SurrogateTerm):
    kind: Literal["log_prob"] = "log_prob"
    source: ClassVar[str] = "Williams 1992"
    needs_ratio: ClassVar[bool] = False

    def describe(self) -> Description:
        text = r"REINFORCE: the gradient of $\ell_n$, times the advantage. Exact on policy only."
        return Description((equation("s", r"A_n \ell_n"),), text)

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        if algorithm.ratio != "none":
            yield f'surrogate "log_prob" has no ratio: set ratio = "none", not "{algorithm.ratio}"'


class CustomSurrogate(SurrogateTerm):
    """The user's own: `(log_ratio_N, advantage_N, lengths_S, **options) -> value_N`."""

    kind: Literal["custom"] = "custom"
    function: EntryPoint
    options: dict[str, Any] = Field(default_factory=dict)
    needs_ratio: ClassVar[bool] = False

    def describe(self) -> Description:
        formula, given = user_function(self.function, self.options, r"\log \rho, A, L")
        text = (
            f"Your own {quote(self.function)}, of log-ratios, advantages and lengths, one "
            f"number a token.{given}"
        )
        return Description((equation("s", formula),), text)


if TYPE_CHECKING:
    Surrogate = SurrogateTerm
else:
    Surrogate = one_of(SurrogateTerm)


_LOG_RATIO = r"\ell_n - \ell_{\mathrm{old},n}"
_SUM = r"\sum_{t\in i} (\ell_t - \ell_{\mathrm{old},t})"
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
