"""The value loss L_V, the entropy bonus H_n and the off-policy correction c_n."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from keel.algorithms.advantages import AdvantageTerm
from keel.algorithms.symbols import number
from keel.algorithms.terms import (
    SINGLE_UPDATE,
    Coefficient,
    Description,
    FrozenModel,
    Lazy,
    Positive,
    Setting,
    UnusedIf,
    equation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.objective import gae, ratios
else:
    gae, ratios = Lazy("gae"), Lazy("ratios")

_NO_FLOOR = UnusedIf(lambda key: key.table.kind != "mask", 'kind = "truncate" has no floor')


class ValueLoss(FrozenModel):
    """coefficient · ½ max((V−R)², (clip(V, V_old ± clip) − R)²), a token mean."""

    coefficient: Coefficient = 0.1
    clip: Annotated[Positive | None, SINGLE_UPDATE] = 0.2
    source: ClassVar[str] = "arXiv:2403.17031"

    def value(self, value_N: Tensor, old_N: Tensor, return_N: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each token without the coefficient, and where the clip acted."""
        return gae.value_loss(value_N, old_N, return_N, clip=self.clip)

    def describe(self, advantage: AdvantageTerm, setting: Setting) -> Description:
        """First the equation of the loss, then that of the returns R̂."""
        returns, text = advantage.describe_returns()
        text += ". A token mean, whatever the weights of the surrogate." + (
            " A head on the policy's backbone: both losses move the same weights."
            if setting.value == "head"
            else " A critic with weights of its own."
        )
        formula = r"(V_n - \hat{R}_n)^2"
        if self.clip is not None:
            near = rf"V_n, V_{{\mathrm{{old}},n}} \pm {number(self.clip)}"
            formula = rf"\max({formula}, \, (\mathrm{{clip}}({near}) - \hat{{R}}_n)^2)"
        mean = r"\cdot \frac{1}{N} \cdot \sum_n \frac{1}{2}"
        loss = equation(r"L_V(\phi)", f"{number(self.coefficient)} {mean} {formula}")
        return Description((loss, returns), text)


class Correction(FrozenModel):
    """Truncated importance weights where the engine's log-probs differ from the trainer's.

    `truncate`: min(weight, cap); `mask`: weight inside [floor, cap], 0 outside.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    cap: Positive = 2.0
    floor: Annotated[Coefficient, _NO_FLOOR] = 0.5
    source: ClassVar[str] = "Ionides 2008; masked: arXiv:2510.18855"

    def value(self, engine_N: Tensor, old_N: Tensor, lengths_S: Tensor) -> Tensor:
        """c_n of the log-probabilities of the engine and of the trainer."""
        if self.kind == "truncate":
            return ratios.truncate(engine_N, old_N, lengths_S, level=self.level, cap=self.cap)
        return ratios.mask(
            engine_N, old_N, lengths_S, level=self.level, floor=self.floor, cap=self.cap
        )

    def describe(self) -> Description:
        """The equations of c and of the weight ω that it bounds."""
        difference = r"\ell_{\mathrm{old},n} - \ell_{\mathrm{engine},n}"
        if self.level == "sequence":
            difference = r"\sum_{t\in i} (\ell_{\mathrm{old},t} - \ell_{\mathrm{engine},t})"
        cap, floor = number(self.cap), number(self.floor)
        if self.kind == "truncate":
            right = rf"\mathrm{{sg}}[\min(\omega_n, {cap})]"
            text = "truncated importance sampling"
        else:
            right = rf"\mathrm{{sg}}[\omega_n \cdot [{floor} \leq \omega_n \leq {cap}]]"
            text = "outside the band it is 0, and the token keeps its place in the weights"
        each = "token" if self.level == "token" else "completion, an unnormalised product"
        return Description(
            (equation("c_n", right), equation(r"\omega_n", rf"\exp({difference})")),
            f"One weight a {each}: {text}. It corrects for a sampling engine whose "
            "log-probabilities differ from the trainer's, and multiplies the surrogate alone.",
        )

    def refusals(self) -> Iterator[str]:
        """Bounds that leave out the weight of a token that was sampled on policy."""
        if self.kind == "truncate" and self.cap < 1:
            yield (
                f"correction.cap = {self.cap:g} cuts every weight, that of a token sampled on "
                "policy (1) too: set it to 1 or more"
            )
        if self.kind == "mask" and not self.floor <= 1 <= self.cap:
            yield (
                f"correction.floor = {self.floor:g} and correction.cap = {self.cap:g} leave out 1, "
                "the weight on policy: every token would be masked, set floor <= 1 <= cap"
            )


def describe_entropy(coefficient: float) -> Description:
    """The entropy bonus, whose only parameter is its coefficient."""
    return Description(
        (equation("H_n", r"- \sum_v \pi(v) \log \pi(v)"),),
        f"Over the whole vocabulary, exact; coefficient {number(coefficient)}, a token mean.",
    )
