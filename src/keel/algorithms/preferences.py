"""The losses by which a policy learns from judged answers, in a table. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from keel.algorithms.terms import Lazy

if TYPE_CHECKING:
    from torch import Tensor

_MATHS = Lazy("preference")


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """A loss, computed by the `function` of `keel.objective.preference`.

    `keys` are those of the stage that it reads, with its own values. It reads log-ratios to the
    `reference`, or log-probabilities; summed over an answer's tokens, or `means`, or the log-odds
    of means. Its NLL is of the answer, or with `prompt` of the prompt too.
    """

    function: str
    source: str
    keys: Mapping[str, float]
    records: Literal["pairs", "labels"] = "pairs"
    reference: bool = True
    means: bool = False
    odds: bool = False
    prompt: bool = False

    def __call__(self, *signals: Tensor, **keys: float) -> Tensor:
        found: Tensor = getattr(_MATHS, self.function)(*signals, **keys)
        return found

    def scores(self, log_ratio_S: Tensor) -> Tensor:
        """What is compared of each answer."""
        found: Tensor = _MATHS.log_odds(log_ratio_S) if self.odds else log_ratio_S
        return found


_PAIRS: Final = {"beta": 0.1, "nll": 0.0}
_SMOOTHED: Final = {**_PAIRS, "smoothing": 0.0}
_ALONE: Final[dict[str, Any]] = {"reference": False}
PREFERENCE_LOSSES: Final[Mapping[str, PreferenceLoss]] = {
    "sigmoid": PreferenceLoss("dpo", "DPO, arXiv:2305.18290", _SMOOTHED),
    "sigmoid_norm": PreferenceLoss(
        "dpo", "length-normalised DPO, arXiv:2411.15124", {**_SMOOTHED, "beta": 5.0}, means=True
    ),
    "robust": PreferenceLoss("robust", "arXiv:2403.00409", _SMOOTHED),
    "hinge": PreferenceLoss("hinge", "SLiC, arXiv:2305.10425", _PAIRS),
    "ipo": PreferenceLoss("ipo", "arXiv:2310.12036", _PAIRS, means=True),
    "cpo": PreferenceLoss("dpo", "arXiv:2401.08417", {**_SMOOTHED, "nll": 1.0}, **_ALONE),
    "simpo": PreferenceLoss(
        "simpo", "arXiv:2405.14734", {"beta": 2.0, "margin": 1.0, "nll": 0.0}, means=True, **_ALONE
    ),
    "orpo": PreferenceLoss(
        "orpo", "arXiv:2403.07691", {"beta": 0.1, "nll": 1.0}, means=True, odds=True, prompt=True,
        **_ALONE,
    ),
    "kto": PreferenceLoss(
        "kto", "arXiv:2402.01306",
        {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, records="labels",
    ),
}  # fmt: skip
