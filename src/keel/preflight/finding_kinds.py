"""The kinds of findings: a short name that stays, and what each means."""

from __future__ import annotations

from typing import Literal

from keel.preflight.finding import Finding, Severity

Kind = Literal[
    "would-stop",
    "no-effect",
    "warm-up-never-ends",
    "timeout-cut",
    "shared-interpreter",
    "overlong-covers-all",
    "reuse-without-ratio",
    "ratio-stays-1",
    "frozen-weights",
    "adapter-hardly-moves",
    "no-compiler",
    "prompts-over-length",
    "rows-over-length",
    "unreadable-rows",
    "duplicate-prompts",
    "trained-on-held-out",
    "special-token-in-message",
    "bos-doubled",
    "eos-differs",
    "eos-never",
    "end-of-turn-not-stop",
    "template-loses-text",
    "template-not-prefix",
    "truncated",
    "reply-holds-answer",
    "gold-over-budget",
    "gold-unwritable",
    "gold-refused",
    "threshold-unreached",
    "reward-none",
    "reward-zero",
    "reward-constant",
    "zero-variance",
    "out-of-memory",
    "judge-over-budget",
]


def found(
    kind: Kind, what: str, evidence: str, key: str, mend: str, severity: Severity = "warning"
) -> Finding:
    """A finding of a known kind."""
    return Finding(kind, severity, what, evidence, key, mend)


def percent(share: float) -> str:
    """A share in words, as `42 %`; small ones with a digit more."""
    return (
        f"{share:.1%}".replace("%", " %") if 0 < share < 0.1 else f"{share:.0%}".replace("%", " %")
    )
