"""Recorded completions as lines of tables, of the page and of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from keel.analysis.text import visible
from keel.analysis.token_values import Measure, scale_of
from keel.runs.rollouts import COMPONENT, EXTRA

PREVIEW = 160
"""Characters of a text in a table."""
Row = Mapping[str, Any]


def summary(row: Row) -> dict[str, Any]:
    """A completion in a line of a table: only texts and numbers."""
    components = {name: number(value) for name, value in row.items() if name.startswith(COMPONENT)}
    own = [a for a, w in zip(row.get("advantages") or [], row["written"], strict=False) if w]
    mean = sum(own) / len(own) if own else None
    written = row["written"]
    starts = sum(w and not before for before, w in zip([False, *written], written, strict=False))
    out: dict[str, Any] = {"reward": number(row["reward"])}
    out |= components if len(components) > 1 else {}
    out |= {"advantage": number(mean), "length": sum(written), "finish": row["finish"]}
    if row.get(EXTRA + "extracted") is not None:
        out["extracted"] = visible(str(row[EXTRA + "extracted"]), 60)
    return {**out, "turns": starts, "completion": visible(row["completion"], PREVIEW)}


def legend(row: Row, measure: Measure) -> str:
    """What the colours mean."""
    full = scale_of(row, measure)
    if measure.key == "ratios":
        return f"blue above 1, vermilion below; full colour at a factor of {math.exp(full):.3g}"
    if measure.signed:
        return f"blue above 0, vermilion below; full colour at ±{full:.3g} {measure.unit}"
    sign = "−" if measure.key == "log_probs" else ""
    return f"white at 0, full colour at {sign}{full:.3g} {measure.unit}"


def prompt_text(content: Any) -> str:
    """A prompt as text; of a conversation each message with its role."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in content)


def score(row: Row) -> float:
    """The reward to rank by; a completion without one comes last."""
    reward = row["reward"]
    return -math.inf if reward is None or math.isnan(reward) else float(reward)


def number(value: float | None) -> str:
    """Four figures; a dash where there is none."""
    return "–" if value is None else f"{value:.4g}"
