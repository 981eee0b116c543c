"""The tokens of a recorded completion with their values, and as HTML of coloured text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.text import visible
from keel.runs.rollouts import TERMS

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


def values_of(row: Mapping[str, Any], key: str) -> Array | None:
    """A value (N,) of each token of a recorded completion; None if it was not recorded.

    `kl` is k3 = r − 1 − log r with log r = log π_ref − log π_old [Schulman 2020, joschu.net], and
    `loss` the sum of the terms of the loss. Tokens that the policy did not write have NaN.
    """
    raw: Array | None
    if key == "kl":
        reference, policy = row.get("reference_log_probs"), _policy(row)
        if reference is None or policy is None:
            return None
        gap = np.array(reference) - np.array(policy)
        raw = np.expm1(gap) - gap
    elif key == "loss":
        terms = [np.array(row[name]) for name in TERMS if row.get(name) is not None]
        raw = np.sum(terms, axis=0) if terms else None
    else:
        found = row.get(key)
        raw = None if found is None else np.array(found, dtype=np.float64)
    return None if raw is None else np.where(np.array(row["written"]), raw, np.nan)


def measures_of(row: Mapping[str, Any]) -> list[Measure]:
    """The values that a recorded completion has."""
    return [measure for measure in MEASURES if values_of(row, measure.key) is not None]


def pieces_of(row: Mapping[str, Any]) -> list[str]:
    """The texts of the tokens; their ids if none were recorded."""
    return row.get("pieces") or [f"⟨{token}⟩" for token in row["tokens"]]


def loss_terms(row: Mapping[str, Any], token: int) -> dict[str, float]:
    """The terms of the loss at a token, by name, and their sum as `loss`."""
    found = {name: float(row[name][token]) for name in TERMS if row.get(name) is not None}
    return {**found, "loss": sum(found.values())} if found else {}


def describe_token(row: Mapping[str, Any], token: int) -> list[tuple[str, str]]:
    """Name and figure of all that is recorded of a token."""
    return _described(row, token, _values(row))


def _values(row: Mapping[str, Any]) -> list[tuple[Measure, Array]]:
    """The recorded measures with their values, but for the loss."""
    found = ((measure, values_of(row, measure.key)) for measure in MEASURES)
    return [(m, values) for m, values in found if values is not None and m.key != "loss"]


def _described(
    row: Mapping[str, Any], token: int, values: Sequence[tuple[Measure, Array]]
) -> list[tuple[str, str]]:
    out = [("token", f"{token} of {len(row['tokens'])}, id {row['tokens'][token]}")]
    if not row["written"][token]:
        return [*out, ("source", "the environment: never trained on")]
    for measure, value_N in values:
        text = f"{value_N[token]:.4g}"
        if measure.key == "log_probs":
            text += f" (p = {math.exp(value_N[token]):.3g})"
        out.append((measure.label, text))
    return out


def token_html(
    row: Mapping[str, Any], measure: Measure | None, *, first: int = 0, limit: int = 2_000
) -> str:
    """The tokens from `first` on as HTML spans, coloured, with their figures on hover.

    All text is escaped. A token's `data-token` attribute is its place. Tokens of the environment
    are grey.
    """
    pieces, written = pieces_of(row), row["written"]
    values = None if measure is None else values_of(row, measure.key)
    colours = None if values is None or measure is None else _colours(values, measure)
    figures = _values(row)
    spans = []
    for at in range(first, min(first + limit, len(pieces))):
        title = "\n".join(f"{name}: {text}" for name, text in _described(row, at, figures))
        style = "opacity:.55" if not written[at] else ""
        if written[at] and colours is not None:
            style = f"background:rgba({colours[at]})"
        text = escape(visible(pieces[at], 400, lines=True)).replace("\n", "⏎<br>")
        kind = "tok" if written[at] else "tok env"
        spans.append(
            f'<span class="{kind}" data-token="{at}" style="{style}" title="{escape(title)}">'
            f"{text}</span>"
        )
    return "".join(spans)


def scale_of(row: Mapping[str, Any], measure: Measure) -> float:
    """The value that has the full colour: the 98th percentile of the amounts."""
    values = values_of(row, measure.key)
    return 0.0 if values is None else _scale(_centred(values, measure))


def _centred(values: Array, measure: Measure) -> Array:
    """Values with 0 where there is no colour."""
    if measure.key == "ratios":
        return np.log(np.clip(values, 1e-6, 1e6))
    return -values if measure.key == "log_probs" else values


def _scale(values: Array) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(np.quantile(finite, 0.98)) if finite.size else 0.0


def _colours(values: Array, measure: Measure) -> list[str]:
    """The colour of each token, as `r,g,b,alpha`."""
    centred = _centred(values, measure)
    full = _scale(centred) or 1.0
    out = []
    for value in centred:
        if not math.isfinite(value):
            out.append("0,0,0,0")
            continue
        alpha = min(abs(value) / full, 1.0) * 0.75
        colour = AMOUNT if not measure.signed else POSITIVE if value > 0 else NEGATIVE
        out.append(f"{colour},{alpha:.3f}")
    return out


def _policy(row: Mapping[str, Any]) -> Any:
    old = row.get("old_log_probs")
    return row["log_probs"] if old is None else old
