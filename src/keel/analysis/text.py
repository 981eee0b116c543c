"""Text that models and data wrote, made safe to show, and coloured by values of its tokens."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.runs.rows import TERMS

JOINERS = "\u200c\u200d"
"""Zero width, between letters that are written apart or together."""


def visible(
    text: str, limit: int | None = None, *, lines: bool = False, prose: bool = False
) -> str:
    """The text with characters that are not seen, or that act on what is, written as escapes.

    These are those that `str.isprintable` calls so: controls (such as `\\x1b`), zero-width and
    bidirectional formats (`\\u202e`), surrogates, unassigned characters, and blanks other than the
    space. With `lines`, newlines and tabs stay. With `prose`, blanks of any width stay, and so do
    joiners between characters that are not ASCII, which Persian, Hindi and emoji need. What is
    longer than `limit` characters is cut, with a note of how many are left out.
    """
    left = 0
    if limit is not None and len(text) > limit:
        left, text = len(text) - limit, text[:limit]
    if not text.isprintable():
        kept = "\n\t" if lines else ""
        text = "".join(
            c
            if c.isprintable() or c in kept or (prose and _is_prose(text, at))
            else c.encode("unicode_escape").decode("ascii")
            for at, c in enumerate(text)
        )
    return f"{text}… ({left:,} more characters)" if left else text


def _is_prose(text: str, at: int) -> bool:
    """Whether a character that does not print is a blank, or joins two that do."""
    if text[at] not in JOINERS:
        return unicodedata.category(text[at]) == "Zs"
    around = text[max(at - 1, 0) : at] + text[at + 1 : at + 2]
    return len(around) == 2 and around.isprintable() and not any(c.isascii() for c in around)


Array = npt.NDArray[np.float64]
POSITIVE, NEGATIVE, AMOUNT = "0,114,178", "213,94,0", "0,158,115"
"""Colours of Okabe and Ito: blue above 0 (or 1), vermilion below, green for amounts."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A value of tokens that a text can be coloured by.

    `signed` values have both colours, white at 0; others go from white at 0 to one colour.
    """

    key: str
    label: str
    unit: str
    signed: bool


MEASURES = (
    Measure("advantages", "advantage", "", True),
    Measure("log_probs", "log-prob", "nats", False),
    Measure("ratios", "ratio", "log scale", True),
    Measure("kl", "KL to the reference (k3)", "nats", False),
    Measure("entropies", "entropy", "nats", False),
    Measure("values", "value", "reward", True),
    Measure("loss", "part of the loss", "", True),
)


class Tokens:
    """The tokens of a recorded completion: their texts, and the values that were recorded."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self.pieces: Sequence[str] = row.get("pieces") or [f"⟨{one}⟩" for one in row["tokens"]]
        self.terms = {name: row[name] for name in TERMS if row.get(name) is not None}
        """The terms of the loss by name."""
        written = np.array(row["written"])
        found = ((measure, self._recorded(measure.key)) for measure in MEASURES)
        self.values = {
            measure: np.where(written, value_N, np.nan)
            for measure, value_N in found
            if value_N is not None
        }
        """A value of each token by measure; NaN of tokens that the policy did not write."""

    def __len__(self) -> int:
        return len(self.pieces)

    def _recorded(self, key: str) -> Array | None:
        """A value of each token; `kl` is k3 = r − 1 − log r with log r = log π_ref − log π_old
        [Schulman 2020, joschu.net], and `loss` the sum of the terms of the loss."""
        if key == "loss":
            return np.sum([*self.terms.values()], axis=0) if self.terms else None
        if key != "kl":
            return None if self.row.get(key) is None else np.array(self.row[key], np.float64)
        old, reference = self.row.get("old_log_probs"), self.row.get("reference_log_probs")
        policy = self.row.get("log_probs") if old is None else old
        if reference is None or policy is None:
            return None
        gap = np.array(reference) - np.array(policy)
        return np.asarray(np.expm1(gap) - gap)

    def loss_terms(self, at: int) -> dict[str, float]:
        """The terms of the loss at a token, by name, and their sum as `loss`."""
        found = {name: float(terms[at]) for name, terms in self.terms.items()}
        return {**found, "loss": sum(found.values())} if found else {}

    def describe(self, at: int) -> list[tuple[str, str]]:
        """Name and figure of all that is recorded of a token."""
        out = [("token", f"{at} of {len(self)}, id {self.row['tokens'][at]}")]
        if not self.row["written"][at]:
            return [*out, ("source", "the environment: never trained on")]
        for measure, value_N in self.values.items():
            text = f"{value_N[at]:.4g}"
            if measure.key == "log_probs":
                text += f" (p = {math.exp(value_N[at]):.3g})"
            out += [] if measure.key == "loss" else [(measure.label, text)]
        return out

    def html(self, measure: Measure | None, *, first: int = 0, limit: int = 2_000) -> str:
        """The tokens from `first` on as HTML spans, coloured, with their figures on hover.

        All text is escaped. A token's `data-token` attribute is its place. Tokens of the
        environment are grey.
        """
        colours = None if measure is None else self._colours(measure)
        spans = []
        for at in range(first, min(first + limit, len(self))):
            title = "\n".join(f"{name}: {text}" for name, text in self.describe(at))
            kind, style = "tok", "" if colours is None else f"background:rgba({colours[at]})"
            if not self.row["written"][at]:
                kind, style = "tok env", "opacity:.55"
            text = escape(visible(self.pieces[at], 400, lines=True)).replace("\n", "⏎<br>")
            spans.append(
                f'<span class="{kind}" data-token="{at}" style="{style}" title="{escape(title)}">'
                f"{text}</span>"
            )
        return "".join(spans)

    def scale(self, measure: Measure) -> float:
        """The value that has the full colour: the 98th percentile of the amounts."""
        amounts = np.abs(self._centred(measure))
        amounts = amounts[np.isfinite(amounts)]
        return float(np.quantile(amounts, 0.98)) if amounts.size else 0.0

    def _centred(self, measure: Measure) -> Array:
        """Values with 0 for no colour."""
        values = self.values[measure]
        if measure.key == "ratios":
            return np.asarray(np.log(np.clip(values, 1e-6, 1e6)))
        return -values if measure.key == "log_probs" else values

    def _colours(self, measure: Measure) -> list[str]:
        """The colour of each token, as `r,g,b,alpha`."""
        full = self.scale(measure) or 1.0
        out = []
        for value in self._centred(measure):
            alpha = min(abs(value) / full, 1.0) * 0.75 if math.isfinite(value) else 0.0
            colour = AMOUNT if not measure.signed else POSITIVE if value > 0 else NEGATIVE
            out.append(f"{colour},{alpha:.3f}")
        return out
