"""What an explanation is made of: plain frozen values. Formulas are in the subset of `symbols`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from keel.algorithms.presets import CHOICE
from keel.algorithms.symbols import prose_to_unicode, to_unicode

TermKey = Literal[
    "advantage",
    "ratio",
    "surrogate",
    "weights",
    "divergence",
    "value",
    "entropy",
    "correction",
    "epochs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a recipe adds to a row. None leaves the symbol standing for the figure.

    `max_tokens` is C, the completion budget; `soft_overlong` is in tokens, `overlong_share` the
    same as a share of C, where C is not known.
    """

    group_size: int | None = None
    prompts_per_step: int | None = None
    max_tokens: int | None = None
    epochs: int = 1
    minibatches: int | None = None
    reward: Literal["model", "rule"] = "model"
    value: Literal["head", "critic"] = "critic"
    lora: bool = False
    temperature: float = 1.0
    dynamic_sampling: bool = False
    soft_overlong: int = 0
    overlong_share: float = 0.0
    mask_truncated: bool = False
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    reference_reset_every: int | None = None
    reference_measured: bool = False

    @property
    def step_sequences(self) -> int | None:
        """Completions of a step, where both factors are known."""
        if self.prompts_per_step is None or self.group_size is None:
            return None
        return self.prompts_per_step * self.group_size

    @property
    def one_update(self) -> bool:
        """Whether each batch is used for one optimizer step (an unknown count is taken as one)."""
        return self.epochs == 1 and self.minibatches in (None, 1)


@dataclass(frozen=True, slots=True)
class Equation:
    """`left relation right`, the right side in parts between which a line may be broken."""

    left: str
    parts: tuple[str, ...]
    relation: str = "="

    @property
    def latex(self) -> str:
        return f"{self.left} {self.relation} {' '.join(self.parts)}"

    @property
    def unicode(self) -> str:
        return to_unicode(self.latex)

    def json(self) -> dict[str, str]:
        return {"unicode": self.unicode, "latex": self.latex}


def equation(left: str, *parts: str, relation: str = "=") -> Equation:
    """An equation from its sides."""
    return Equation(left, parts, relation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One choice of the row: its symbol, its equations, what they mean here, and the source.

    `expression` is the term in Python's syntax, over the names that `docs/algorithms` lists, for
    those terms that one line of arithmetic can say.
    """

    key: TermKey
    symbol: str
    title: str
    kind: str
    equations: tuple[Equation, ...] = ()
    text: str = ""
    source: str = ""
    expression: str | None = None

    @property
    def keels_choice(self) -> bool:
        """Whether some figure here is Keel's, where no paper fixes it."""
        return CHOICE in self.source

    def json(self) -> dict[str, Any]:
        return {
            "term": self.key,
            "symbol": {"unicode": to_unicode(self.symbol), "latex": self.symbol},
            "title": self.title,
            "kind": self.kind,
            "equations": [e.json() for e in self.equations],
            "text": prose_to_unicode(self.text),
            "source": self.source,
            "keels_choice": self.keels_choice,
            "expression": self.expression,
        }


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A role in the objective and what fills it; `loaded` where it takes weights of its own."""

    role: Literal["policy", "reference", "reward", "value"]
    what: str
    loaded: bool

    def json(self) -> dict[str, Any]:
        return {"role": self.role, "what": prose_to_unicode(self.what), "loaded": self.loaded}
