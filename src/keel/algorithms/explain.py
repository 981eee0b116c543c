"""The objective that a row stands for: the formula with its figures in place, term by term.

J(θ) = Σ_n w_n · s(ρ_n, A_n)  −  β Σ_n w_n · D_n
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from keel.algorithms import render
from keel.algorithms.explain_advantage import advantage
from keel.algorithms.explain_divergence import (
    active,
    beta,
    divergence,
    reward_equation,
    rule_equation,
    summand,
)
from keel.algorithms.explain_models import models, notes, updates
from keel.algorithms.explain_terms import (
    correction,
    entropy,
    ratio,
    surrogate,
    surrogate_details,
    surrogate_formula,
    value,
    value_equation,
    weights,
)
from keel.algorithms.presets import PRESETS, Preset
from keel.algorithms.spec import Algorithm
from keel.algorithms.symbols import number
from keel.algorithms.terms import Equation, Setting, Term, equation
from keel.types import KeelError

RECIPE: Final = "set in the recipe"
_CHOICES: Final = (
    "advantage", "ratio", "surrogate", "weights", "divergence", "value", "entropy", "correction",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(render.Sheet):
    """Objective, terms, models and notes; printed by `unicode`, `latex` or `json`."""

    def unicode(self, width: int = 100) -> str:
        """Plain text for a terminal of `width` columns (60 or more), without colour."""
        return render.unicode(self, max(width, 60))

    def latex(self) -> str:
        """A LaTeX fragment; the document must load amsmath and be UTF-8."""
        return render.latex(self)

    def json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return render.json(self)

    def page_equation(self) -> str:
        """The part of the algorithm's page in `docs/algorithms` that states its formula."""
        return render.page_equation(self)


def explain(
    row: Algorithm,
    *,
    name: str,
    title: str,
    sources: Mapping[str, str],
    context: Setting | None = None,
) -> Explanation:
    """What a row optimises in a setting; `sources` by choice, as `Preset.sources`.

    A choice without a source was set by the recipe.
    """
    setting = Setting() if context is None else context

    def source(choice: str) -> str:
        return sources.get(choice, RECIPE)

    terms: list[Term] = [
        advantage(row, setting, source("advantage")),
        ratio(row, setting, source("ratio")),
        surrogate(row, source("surrogate")),
        weights(row, setting, source("weights")),
        divergence(row, setting, source("divergence")),
    ]
    if row.value is not None:
        terms.append(value(row, setting, source("value")))
    if row.entropy > 0:
        terms.append(entropy(row, source("entropy")))
    if row.correction is not None:
        terms.append(correction(row, source("correction")))
    if "epochs" in sources:
        terms.append(_epochs(row, setting, source("epochs")))
    remarks = notes(row, setting)
    return Explanation(
        name=name,
        title=title,
        objective=_objective(row, setting),
        reading=_reading(row, setting),
        terms=tuple(terms),
        models=models(row, setting),
        notes=remarks if "epochs" in sources else (updates(row, setting), *remarks),
    )


def explain_preset(name: str, context: Setting | None = None) -> Explanation:
    """What the preset of this name optimises; KeelError where there is none."""
    preset = _preset(name)
    return explain(
        preset.row,
        name=preset.name,
        title=f"{preset.title} [{preset.paper}]",
        sources=_known(preset),
        context=preset_setting(preset) if context is None else context,
    )


def explain_row(
    row: Algorithm, preset: str | None = None, context: Setting | None = None, name: str = ""
) -> Explanation:
    """What a recipe's row optimises; sources are those of the preset that it started from.

    Where the row differs from the preset, the source says "set in the recipe" and which figures.
    """
    setting = Setting() if context is None else context
    if preset is None:
        return explain(
            row, name=name or "row", title="a row of its own", sources={}, context=setting
        )
    base = _preset(preset)
    return explain(
        row,
        name=name or base.name,
        title=f"{base.title} [{base.paper}]",
        sources=recipe_sources(row, base, setting),
        context=setting,
    )


def preset_setting(preset: Preset) -> Setting:
    """The loop settings that a preset goes with; all else unknown, and a reward model assumed."""
    return Setting(
        epochs=preset.epochs,
        minibatches=preset.minibatches if preset.minibatches > 1 else None,
        dynamic_sampling=preset.dynamic_sampling,
        overlong_share=preset.overlong_share,
    )


def recipe_sources(row: Algorithm, preset: Preset, setting: Setting) -> dict[str, str]:
    """The preset's sources, choice by choice, with what the recipe changed said first."""
    known, sources = _known(preset), dict[str, str]()
    for choice in _CHOICES:
        now, before = getattr(row, choice), getattr(preset.row, choice)
        if now == before:
            if choice in known:
                sources[choice] = known[choice]
            continue
        sources[choice] = _changed(now, before, known.get(choice, ""))
    loop = [f"μ = {setting.epochs}, not {preset.epochs}"] if setting.epochs != preset.epochs else []
    if setting.minibatches not in (None, preset.minibatches):
        loop.append(f"mini-batches = {setting.minibatches}, not {preset.minibatches}")
    if loop:
        sources["epochs"] = f"{RECIPE} ({'; '.join(loop)})"
    elif "epochs" in known:
        sources["epochs"] = known["epochs"]
    return sources


def _known(preset: Preset) -> dict[str, str]:
    return {str(choice): source for choice, source in preset.sources.items()}


def _changed(now: object, before: object, source: str) -> str:
    """What the recipe set: single figures where the kind stayed, else the whole choice."""
    if not (isinstance(now, BaseModel) and isinstance(before, BaseModel)):
        return RECIPE
    if type(now) is not type(before) or getattr(now, "kind", 0) != getattr(before, "kind", 0):
        return RECIPE
    fields = [
        f"{key} = {_shown(value)}, not {_shown(getattr(before, key))}"
        for key, value in now
        if value != getattr(before, key)
    ]
    return f"{RECIPE} ({'; '.join(fields)}); the rest: {source}"


def _shown(value: object) -> str:
    if isinstance(value, BaseModel):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value)
    return "none" if value is None else str(value).removesuffix(".0")


def _preset(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, list(PRESETS), n=1)
    mend = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(PRESETS))}"
    raise KeelError(f"unknown algorithm {name!r}: {mend}")


def _objective(row: Algorithm, setting: Setting) -> tuple[Equation, ...]:
    formula, _ = surrogate_formula(row.surrogate)
    weight = "w_n c_n" if row.correction is not None else "w_n"
    parts = [rf"\sum_n {weight} \cdot {formula}"]
    d = row.divergence
    if d is not None and active(d) and d.where == "loss":
        parts.append(rf"- {beta(d)} \sum_n w_n \cdot {summand(d)}")
    if row.entropy > 0:
        parts.append(rf"+ {number(row.entropy)} \cdot \frac{{1}}{{N}} \cdot \sum_n H_n")
    lines = [Equation(r"J(\theta)", tuple(parts)), *surrogate_details(row.surrogate)]
    lines += reward_equation(row)
    if d is not None and active(d) and d.adaptive is not None:
        lines += [equation(r"\beta", number(d.beta), r"\text{ at first}")]
        lines += [rule_equation(d.adaptive, setting)]
    if row.value is not None:
        lines.append(value_equation(row.value))
    return tuple(lines)


def _reading(row: Algorithm, setting: Setting) -> str:
    goal = (
        r"$J$ is maximised"
        if row.value is None
        else r"$J$ is maximised and $L_V$ minimised beside it"
    )
    tokens = (
        r"; $n$ runs over the $N$ completion tokens of the optimizer batch (those that the policy "
        r"wrote), $i$ is the completion that $n$ lies in, one of $S$, of $L_i$ tokens, $\ell_n = "
        r"\log \pi_\theta(o_n)$ in its context"
    )
    if not row.needs_steps:
        tokens += ", $R_i$ the reward of completion $i$"
    if setting.temperature != 1.0:
        tokens += f", all logits divided by the temperature {number(setting.temperature)}"
    return f"{goal}{tokens}. {_batch(setting)}".strip()


def _batch(setting: Setting) -> str:
    step = setting.step_sequences
    if step is None:
        return ""
    text = f"A step has {setting.prompts_per_step} prompts of {setting.group_size} completions"
    if setting.minibatches is None:
        return f"{text}, {step} in all."
    if setting.minibatches == 1:
        return f"{text}: $S = {step}$."
    each = step / setting.minibatches
    about = "=" if each == int(each) else r"\leq"
    size = -(-step // setting.minibatches)
    return f"{text}, in {setting.minibatches} mini-batches: $S {about} {size}$."


def _epochs(row: Algorithm, setting: Setting, source: str) -> Term:
    parts = setting.minibatches
    cut = "" if parts in (None, 1) else f", in {parts} mini-batches"
    return Term(
        key="epochs",
        symbol=r"\mu",
        title="Passes over each batch",
        kind=f"{setting.epochs}{cut}",
        text=updates(row, setting),
        source=source,
    )
