"""What a preflight finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
"""An error: the run would stop, or learn nothing. A warning: it would waste or mislead."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that will go wrong: what, the evidence, and the key to change.

    `kind` is a short name that stays the same from version to version (`zero-variance`). `key` is
    written as the user writes it (`rollout.max_tokens`), `mend` says what to do with it.
    """

    kind: str
    severity: Severity
    what: str
    evidence: str
    key: str
    mend: str

    def as_dict(self) -> dict[str, str]:
        """As JSON has it."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "what": self.what,
            "evidence": self.evidence,
            "key": self.key,
            "mend": self.mend,
        }
