"""The surrogates s(ρ_n, A_n) that are a function of the ratio: one class for each kind.

To add a surrogate, define a subclass of `SurrogateTerm` here or in `weighted`, with the fields that
the recipe may set. The recipe's schema, `keel explain`, `keel check` and the loss read the
subclasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from keel.algorithms.masks import COVARIANCE
from keel.algorithms.symbols import number, offset, quote
from keel.algorithms.terms import (
    Choices,
    Coefficient,
    Description,
    EntryPoint,
    Lazy,
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
    from keel.objective import masks
else:
    masks = Lazy("masks")


class SurrogateTerm(TermChoice):
    """A surrogate; the defaults are those of one that bounds nothing, token by token."""

    needs_ratio: ClassVar[bool] = True
    """Whether ratio = "none" leaves it nothing to compute."""
    per_sequence: ClassVar[bool] = False
    """Whether it is one number for a whole sequence."""
    bounds_ratio: ClassVar[bool] = False
    """Whether it keeps the ratio near 1, by a clip or a gate."""

    module: ClassVar[str] = "surrogates"
    reads: ClassVar[tuple[str, ...]] = ("log_ratio_N", "advantage_N", "lengths_S")
    token_ratio: ClassVar[bool] = False
    """Whether it makes more of the ratio of each token itself, and takes no other."""
    reads_advantage: ClassVar[bool] = True
    """Whether it is 0, without a gradient, where the advantage is 0."""
    whole_batch: ClassVar[bool] = False
    """Whether `prepare` reads the whole optimizer batch before it is cut."""
    reads_sequence: ClassVar[bool] = False
    """Whether a token's value reads other tokens of its sequence."""
    reads_groups: ClassVar[bool] = False
    """Whether it compares the completions of one prompt, which are then in one mini-batch."""
    reads_outcome: ClassVar[bool] = False
    """Whether it reads rewards."""
    reads_reference: ClassVar[bool] = False
    """Whether it reads the log-probabilities of the reference policy."""
    acts_on_policy: ClassVar[bool] = False
    """Whether its parameters matter where the ratio is 1."""

    def value(self, signals: LossSignals) -> Tensor:
        """s_n, of shape (N,)."""
        return self.computed(signals)

    def prepare(self, signals: LossSignals) -> Tensor:
        """What `value` reads of the whole optimizer batch, (N,) or (N, K), as `prepared_N`."""
        raise NotImplementedError

    def describe(self) -> Description:
        """First the equation of s, then those of symbols that only s has."""
        raise NotImplementedError

    @property
    def edges(self) -> tuple[float, float]:
        """The ratios outside which it clips: what the clip fractions count by."""
        return 0.0, math.inf

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        """Why it does not go with the algorithm's other choices."""
        if self.token_ratio and algorithm.ratio != "token":
            yield (
                f'surrogate "{self.kind}" reads the ratio of each token: set ratio = "token", not '
                f'"{algorithm.ratio}"'
            )


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


class Fipo(SurrogateTerm):
    """The clipped surrogate, with tokens weighed by how much likelier what follows has become."""

    kind: Literal["fipo"] = "fipo"
    low: Unit = 0.2
    high: Coefficient = 0.28
    half_life: Positive = 32.0
    """In tokens, of the weight that a later log-ratio has."""
    floor: Coefficient = 1.0
    cap: Positive = 1.2
    source: ClassVar[str] = "arXiv:2603.19835"
    reads_sequence: ClassVar[bool] = True
    bounds_ratio: ClassVar[bool] = True
    token_ratio: ClassVar[bool] = True

    @property
    def edges(self) -> tuple[float, float]:
        return 1 - self.low, 1 + self.high

    def describe(self) -> Description:
        low, high = offset(-self.low, 1.0), offset(self.high, 1.0)
        floor, cap, life = number(self.floor), number(self.cap), number(self.half_life)
        clipped = rf"\mathrm{{clip}}(\rho_n, {low}, {high}) \, A_n"
        future = rf"\exp\left(\sum_{{k\geq n}} 2^{{-(k-n)/{life}}} \log \rho_k\right)"
        text = (
            "A token counts for more where the tokens after it have become likelier since it was "
            "sampled: it led there."
        )
        return Description(
            (
                equation("s", rf"f_n \min(\rho_n A_n, \, {clipped})"),
                equation("f_n", rf"\mathrm{{sg}}[\mathrm{{clip}}({future}, {floor}, {cap})]"),
            ),
            text,
        )


class Kimi(SurrogateTerm):
    """The importance-weighted advantage less what the policy has moved already."""

    kind: Literal["kimi"] = "kimi"
    tau: Coefficient = 0.01
    source: ClassVar[str] = "arXiv:2501.12599"
    bounds_ratio: ClassVar[bool] = True
    reads_advantage: ClassVar[bool] = False

    def describe(self) -> Description:
        inner = rf"A_n - {number(self.tau)} \, \mathrm{{sg}}[\log \rho_n]"
        text = (
            "The further a token has moved from the sampling policy, the more it is pulled back: a "
            "squared penalty on the log-ratio, by its gradient."
        )
        return Description((equation("s", rf"\rho_n ({inner})"),), text)


class KLCov(SurrogateTerm):
    """The importance-weighted advantage, with a penalty on the tokens of highest covariance."""

    kind: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-3
    coefficient: Coefficient = 1.0
    source: ClassVar[str] = "arXiv:2505.22617"
    reads: ClassVar[tuple[str, ...]] = (*SurrogateTerm.reads, "prepared_N")
    reads_advantage: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = True
    token_ratio: ClassVar[bool] = True

    def prepare(self, signals: LossSignals) -> Tensor:
        cov_N = masks.covariance(signals.log_prob_N, signals.advantage_N)
        return masks.highest(cov_N, share=self.share).to(signals.advantage_N)

    def _options(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def describe(self) -> Description:
        penalty = rf"- {number(self.coefficient)} \cdot \kappa_n \, \mathrm{{abs}}(\log \rho_n)"
        highest = rf"[\mathrm{{cov}}_n \text{{ among the highest }} {number(self.share)}]"
        text = (
            "Of all tokens of the optimizer batch, and at least one: those that lower the entropy "
            "most are held near the sampling policy."
        )
        shown = equation("s", r"\rho_n A_n", penalty), equation(r"\kappa_n", highest), COVARIANCE
        return Description(shown, text)


class _OfGroup:
    """What surrogates share that are a loss of a whole group: their numbers are made before it is
    cut, by a function under the name of the kind and `_shares`."""

    module: ClassVar[str] = "contrasts"
    per_sequence: ClassVar[bool] = True
    reads_groups: ClassVar[bool] = True
    reads_outcome: ClassVar[bool] = True
    acts_on_policy: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = KLCov.reads
    reads_advantage: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = True
    compares: ClassVar[tuple[str, ...]] = ("lengths_S", "outcome_S", "groups_S")
    """The signals that the other function takes."""

    def prepare(self: Any, signals: LossSignals) -> Tensor:
        given = {name: signals.need(name) for name in self.compares}
        function = getattr(Lazy(self.module), f"{self.kind}_shares")
        shares: Tensor = function(**given, **SurrogateTerm._options(self))
        return shares.repeat_interleave(signals.lengths_S, dim=0)

    def _options(self) -> dict[str, Any]:
        return {}


class Real(_OfGroup, SurrogateTerm):
    """Rewards as labels: a classifier of right and wrong answers by their log-ratios."""

    kind: Literal["real"] = "real"
    threshold: float = Field(default=0.0, ge=-1e9, le=1e9)
    """A completion is right if its reward is more than this."""
    temperature: Positive = 0.5
    source: ClassVar[str] = "arXiv:2602.05630"
    token_ratio: ClassVar[bool] = True
    compares: ClassVar[tuple[str, ...]] = ("log_ratio_N", *_OfGroup.compares)

    def describe(self) -> Description:
        tau = number(self.temperature)
        right = rf"\log(1 + \sum_{{i: R_i > {number(self.threshold)}}} e^{{-m_i / {tau}}})"
        wrong = rf"\log(1 + \sum_{{j: R_j \leq {number(self.threshold)}}} e^{{m_j / {tau}}})"
        text = (
            r"Of a prompt's $G$ completions, with no advantage: the right ones are to have become "
            "likelier, the wrong ones less likely, and those on the wrong side have the gradient. "
            "Each completion has the same share of its group's loss."
        )
        mean = r"\frac{1}{L_i} \cdot \sum_{t\in i} \log \rho_t"
        return Description(
            (
                equation("s", r"(-\frac{L_g}{G})"),
                equation("L_g", right, f"+ {wrong}"),
                equation("m_i", mean),
            ),
            text,
        )


class OnlineDPO(_OfGroup, SurrogateTerm):
    """DPO's loss of the best against the worst completion of a prompt."""

    kind: Literal["online_dpo"] = "online_dpo"
    beta: Positive = 0.1
    source: ClassVar[str] = "arXiv:2402.04792; arXiv:2305.18290 eq. 7"
    needs_ratio: ClassVar[bool] = False
    reads_reference: ClassVar[bool] = True
    compares: ClassVar[tuple[str, ...]] = (
        "log_prob_N", "reference_log_prob_N", *_OfGroup.compares,
    )  # fmt: skip

    def describe(self) -> Description:
        text = (
            "Of a prompt's completions $c$ has the highest reward and $r$ the lowest; of several, "
            "the pair that the policy has least right. Equal rewards teach nothing. No advantage "
            "is in it."
        )
        margin = r"\sum_{t\in i} (\ell_t - \ell_{\mathrm{ref},t})"
        sigmoid = rf"\log \sigma({number(self.beta)} (h_c - h_r))"
        return Description((equation("s", sigmoid), equation("h_i", margin)), text)

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        return without_ratio(self, algorithm)


def without_ratio(term: SurrogateTerm, algorithm: Choices) -> Iterator[str]:
    """Refuses a ratio for a surrogate of the log-probability itself."""
    if algorithm.ratio != "none":
        yield f'surrogate "{term.kind}" has no ratio: set ratio = "none", not "{algorithm.ratio}"'


class CustomSurrogate(SurrogateTerm):
    """The user's own: what it names of `LossSignals`, it gets, and its options; it gives one number
    for each token."""

    kind: Literal["custom"] = "custom"
    function: EntryPoint
    options: dict[str, Any] = Field(default_factory=dict)
    needs_ratio: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    reads_sequence: ClassVar[bool] = True

    def describe(self) -> Description:
        formula, given = user_function(self.function, self.options, r"\log \rho, A, \mathrm{batch}")
        text = (
            f"Your own {quote(self.function)}, of log-ratios, advantages and whatever else it "
            f"names of the batch, one number a token.{given}"
        )
        return Description((equation("s", formula),), text)
