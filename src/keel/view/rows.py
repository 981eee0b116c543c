"""Recorded completions as lines of tables, of the page and of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.analysis.text import visible
from keel.analysis.token_values import Measure, Tokens
from keel.runs.rollouts import COMPONENT, EXTRA
from keel.types import shown_text

PREVIEW = 160
"""Characters of a text in a table."""
Row = Mapping[str, Any]


def summary(row: Row) -> dict[str, Any]:
    """A completion in a line of a table: only texts and numbers, None if there is none."""
    components = {name: figure(value) for name, value in row.items() if name.startswith(COMPONENT)}
    own = [a for a, w in zip(row.get("advantages") or [], row["written"], strict=False) if w]
    mean = sum(own) / len(own) if own else None
    written = row["written"]
    starts = sum(w and not before for before, w in zip([False, *written], written, strict=False))
    out: dict[str, Any] = {"reward": figure(row["reward"])}
    out |= components if len(components) > 1 else {}
    out |= {"advantage": figure(mean), "length": sum(written), "finish": row["finish"]}
    if row.get(EXTRA + "extracted") is not None:
        out["extracted"] = visible(str(row[EXTRA + "extracted"]), 60)
    return {**out, "turns": starts, "completion": visible(row["completion"], PREVIEW)}


def legend(tokens: Tokens, measure: Measure) -> str:
    """What the colours mean."""
    full = tokens.scale(measure)
    if measure.key == "ratios":
        return f"blue above 1, vermilion below; full colour at a factor of {math.exp(full):.3g}"
    if measure.signed:
        return f"blue above 0, vermilion below; full colour at ±{full:.3g} {measure.unit}"
    sign = "−" if measure.key == "log_probs" else ""
    return f"no colour at 0, full colour at {sign}{full:.3g} {measure.unit}"


def prompt_text(content: Any) -> str:
    """A prompt as text; of a conversation each message with its role."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{turn['role']}: {shown_text(turn)}" for turn in content)


def figure(value: float | None) -> float | None:
    """A number of four figures, whole from 10,000 on, which a table sorts as a number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}") if abs(value) < 10_000 else float(round(value))


def number(value: float | None) -> str:
    """A number as text; a dash if there is none."""
    return "–" if value is None else f"{value:.4g}"


def columns_of(rows: Sequence[Row], names: Sequence[str]) -> list[dict[str, Any]]:
    """The columns of a table, each sortable; those of numbers stand at the right."""
    out = []
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        numeric = bool(values) and all(isinstance(value, int | float) for value in values)
        align = "right" if numeric else "left"
        out.append({"name": name, "label": name.removeprefix(COMPONENT), "field": name,
                    "sortable": True, "align": align})  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one reward says of a completion: its score, and what it recorded with it."""

    name: str
    score: float | None
    words: tuple[tuple[str, str], ...]


def verdicts(row: Row) -> list[Verdict]:
    """Each component of the reward with its words, as a judge's `judge_reason`; then the rest.

    An extra belongs to the component with the longest name that it begins with. Empty texts are
    left out.
    """
    extras = {
        name.removeprefix(EXTRA): str(value)
        for name, value in row.items()
        if name.startswith(EXTRA) and value not in (None, "")
    }
    scores = {
        column.removeprefix(COMPONENT): value
        for column, value in row.items()
        if column.startswith(COMPONENT)
    }
    words: dict[str, list[tuple[str, str]]] = {name: [] for name in scores}
    for key in [*extras]:
        owners = [name for name in scores if key.startswith((f"{name}_", f"{name}/"))]
        if owners:
            owner = max(owners, key=len)
            words[owner].append((key[len(owner) + 1 :], extras.pop(key)))
    found = [Verdict(name, score, tuple(words[name])) for name, score in scores.items()]
    return found + [Verdict(name, None, (("", text),)) for name, text in extras.items()]
