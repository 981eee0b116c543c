"""What `keel check` reports, and how shares and lengths are judged and written in it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from keel.analysis.statistics import wilson_interval

Severity = Literal["error", "warning"]
"""An error: the run would stop, or learn nothing. A warning: it would waste or mislead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a recipe: what, the evidence, the key to change, and how to fix it.

    `kind` is a short name that stays the same from version to version (`zero-variance`);
    docs/check.md lists all. `key` is written as in the recipe (`rollout.max_tokens`).
    """

    kind: str
    what: str
    evidence: str
    key: str
    fix: str
    severity: Severity = "warning"


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """What findings say, by kind: the table `findings.toml`."""
    table = resources.files("keel.preflight") / "findings.toml"
    return tomllib.loads(table.read_text(encoding="utf-8"))


def found(kind: str, key: str, severity: Severity | None = None, /, **facts: Any) -> Finding:
    """The finding of a kind at a key, with these facts in its texts."""
    own = catalogue()[kind]
    what, evidence, fix = (own[part].format(**facts) for part in ("what", "evidence", "fix"))
    return Finding(kind, what, evidence, key, fix, severity or own.get("severity", "warning"))


def percent(share: float) -> str:
    """A share as `42 %`; small ones with one decimal."""
    digits = 1 if 0 < share < 0.1 else 0
    return f"{100 * share:.{digits}f} %"


def surely_more(count: int, n: int, share: float) -> bool:
    """Whether `count` of `n` shows more than a share: by the lower end of its 95 % interval."""
    return n > 0 and wilson_interval(count, n).low > share


def interval(count: int, n: int) -> str:
    """The 95 % interval of a share, in words."""
    share = wilson_interval(count, n)
    return f"95 % interval {percent(share.low)} to {percent(share.high)}"


def shorten(text: str, width: int = 80) -> str:
    """The text, cut to a width."""
    return text if len(text) <= width else text[: width - 1] + "…"


# ---------------------------------------------------------------- lengths


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """A budget that holds a share of all completions; a lower bound if not `known`."""

    tokens: int
    known: bool

    def __str__(self) -> str:
        return f"{self.tokens}" if self.known else f"more than {self.tokens}"


def holding(lengths: Sequence[int], ended: Sequence[bool], share: float = 0.95) -> BudgetShare:
    """The smallest budget that holds `share` of the completions, by Kaplan and Meier's estimate.

        S(t) = Π_{t_i ≤ t} (1 − d_i / n_i),   budget = min {t : 1 − S(t) ≥ share}

    d_i completions end at length t_i, n_i are at least that long. A completion that was cut
    (`ended` is False) is only known to be longer. Where the estimate does not reach the share, the
    longest length is a lower bound. Source: Kaplan and Meier 1958, JASA 53:457.

    Raises ValueError for no lengths.
    """
    if not lengths:
        raise ValueError("no lengths")
    left = 1.0
    for t in sorted({n for n, done in zip(lengths, ended, strict=True) if done}):
        at_risk = sum(n >= t for n in lengths)
        ends = sum(n == t and done for n, done in zip(lengths, ended, strict=True))
        left *= 1 - ends / at_risk
        if 1 - left >= share - 1e-12:  # rounding of the product
            return BudgetShare(t, True)
    return BudgetShare(max(lengths), False)


def quantile(lengths: Sequence[int], share: float) -> int:
    """The smallest length that `share` of the lengths do not exceed. Raises ValueError for none."""
    return holding(lengths, [True] * len(lengths), share).tokens
