"""The objective that an algorithm stands for: the formula with its figures in place, term by term.

J(θ) = Σ_n w_n · s(ρ_n, A_n)  −  β Σ_n w_n · D_n
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import BaseModel

from keel.algorithms.losses import AdaptiveEntropy, describe_entropy
from keel.algorithms.presets import PRESETS
from keel.algorithms.render import Explanation
from keel.algorithms.spec import Algorithm, Preset
from keel.algorithms.symbols import factor, number
from keel.algorithms.terms import (
    RECIPE,
    Description,
    Equation,
    ModelUse,
    Setting,
    Term,
    TermKey,
    equation,
)
from keel.types import KeelError

_CHOICES: Final = (
    "advantage", "ratio", "surrogate", "masks", "weights", "divergence", "distillation", "value",
    "entropy", "auxiliary", "corrections",
)  # fmt: skip


def explain(
    algorithm: Algorithm,
    *,
    name: str,
    title: str,
    sources: Mapping[str, str],
    context: Setting | None = None,
) -> Explanation:
    """What an algorithm optimises in a setting; `sources` by choice, as `Preset.sources`.

    A choice without a source was set by the recipe.
    """
    setting = Setting() if context is None else context

    terms = list(_terms(algorithm, setting, sources))
    remarks = notes(algorithm, setting)
    return Explanation(
        name=name,
        title=title,
        objective=_objective(algorithm, setting),
        reading=_reading(algorithm, setting),
        terms=tuple(terms),
        models=models(algorithm, setting),
        notes=remarks if "epochs" in sources else (updates(algorithm, setting), *remarks),
    )


def explain_preset(name: str, context: Setting | None = None) -> Explanation:
    """What the preset of this name optimises; KeelError where there is none."""
    preset = _preset(name)
    return explain(
        preset.algorithm,
        name=preset.name,
        title=f"{preset.title} [{preset.paper}]",
        sources=_known(preset),
        context=preset_setting(preset) if context is None else context,
    )


def explain_algorithm(
    algorithm: Algorithm, preset: str | None = None, context: Setting | None = None, name: str = ""
) -> Explanation:
    """What a recipe's algorithm optimises; sources are those of the preset that it started from.

    Where it differs from the preset, the source is "set in the recipe" with the figures.
    """
    setting = Setting() if context is None else context
    if preset is None:
        return explain(
            algorithm,
            name=name or "algorithm",
            title="an algorithm of its own",
            sources={},
            context=setting,
        )
    base = _preset(preset)
    return explain(
        algorithm,
        name=name or base.name,
        title=f"{base.title} [{base.paper}]",
        sources=recipe_sources(algorithm, base, setting),
        context=setting,
    )


def preset_setting(preset: Preset) -> Setting:
    """The loop settings that a preset goes with; all else unknown, and a reward model assumed where
    the advantage is made of rewards."""
    return Setting(
        reward="model" if preset.algorithm.needs_reward else "rule",
        epochs=preset.epochs,
        minibatches=preset.minibatches if preset.minibatches > 1 else None,
        dynamic_sampling=preset.dynamic_sampling,
        overlong_share=preset.overlong_share,
        teacher=preset.teacher,
    )


def recipe_sources(algorithm: Algorithm, preset: Preset, setting: Setting) -> dict[str, str]:
    """The preset's sources, choice by choice, first what the recipe changed."""
    known, sources = _known(preset), dict[str, str]()
    for choice in _CHOICES:
        now, before = getattr(algorithm, choice), getattr(preset.algorithm, choice)
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
    fix = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(PRESETS))}"
    raise KeelError(f"unknown algorithm {name!r}: {fix}")


def _terms(algorithm: Algorithm, setting: Setting, sources: Mapping[str, str]) -> Iterator[Term]:
    """The algorithm's terms, described, in the order in which they are printed."""

    def term(
        key: TermKey, symbol: str, title: str, kind: str, description: Description, paper: str = ""
    ) -> Term:
        source = sources.get(key, RECIPE)
        if source == RECIPE and paper:
            source = f"{RECIPE}; the equation: {paper}"
        return Term(
            description.equations, description.text,
            key=key, symbol=symbol, title=title, kind=kind, source=source,
        )  # fmt: skip

    a, rho, s, w = algorithm.advantage, algorithm.ratio_kind, algorithm.surrogate, algorithm.weights
    d = algorithm.divergence
    yield term("advantage", "A_n", "Advantage", a.kind, _advantage(algorithm, setting), a.source)
    yield term("ratio", r"\rho_n", "Ratio", algorithm.ratio, rho.describe(setting), rho.source)
    yield term("surrogate", "s", "Surrogate", s.kind, s.describe(), s.source)
    for mask in algorithm.masks:
        yield term("masks", "m_n", "Mask", mask.kind, mask.describe(), mask.source)
    yield term("weights", "w_n", "Weights", w.kind, w.describe(setting), w.source)
    if d is None:
        description = Description((), "No divergence: nothing but the surrogate holds the policy.")
    else:
        description = d.describe(algorithm, setting)
    kind, paper = "none", ""
    if d is not None and d.active:
        kind = f"{d.estimator} to the {d.to} policy, in the {d.where}"
        paper = d.source
    yield term("divergence", "D_n", "Divergence", kind, description, paper)
    if (t := algorithm.distillation) is not None:
        kind = f"in the {t.place}"
        yield term("distillation", "T_n", "Distillation", kind, t.describe(), t.source)
    if algorithm.value is not None:
        kind = "squared error" if algorithm.value.clip is None else "clipped"
        yield term(
            "value",
            "L_V",
            "Value loss",
            kind,
            algorithm.value.describe(a, setting),
            algorithm.value.source,
        )
    entropy = algorithm.entropy
    if entropy != 0:
        kind, paper = "exact", ""
        if isinstance(entropy, AdaptiveEntropy):
            kind, paper = "adaptive", "arXiv:2505.22312"
        yield term("entropy", "H_n", "Entropy bonus", kind, describe_entropy(entropy), paper)
    for one in algorithm.auxiliary:
        yield term("auxiliary", r"\ell", "Auxiliary term", one.kind, one.describe(), one.source)
    for at, c in enumerate(algorithm.corrections):
        found = _following(c.describe()) if at and c.multiplies else c.describe()
        yield term("corrections", "c_n", "Off-policy correction", c.kind, found, c.source)
    if "epochs" in sources:
        parts = setting.minibatches
        kind = f"{setting.epochs}" + ("" if parts in (None, 1) else f", in {parts} mini-batches")
        description = Description((), updates(algorithm, setting))
        yield term("epochs", r"\mu", "Passes over each batch", kind, description)


def _following(description: Description) -> Description:
    """A correction that multiplies the weights of those before it."""
    first, *rest = description.equations
    changed = equation("c_n", r"c_n \cdot", *first.parts, relation=r"\leftarrow")
    return Description((changed, *rest), description.text)


def _advantage(algorithm: Algorithm, setting: Setting) -> Description:
    """The advantage with its whitening."""
    description = algorithm.advantage.describe(algorithm, setting)
    if not algorithm.advantage.whitens:
        return description
    whitened = equation(
        "A_n",
        r"\frac{A_n - \mathrm{mean}(A)}{\sqrt{\mathrm{var}(A) + 10^{-8}}}",
        relation=r"\leftarrow",
    )
    text = (
        f"{description.text} Whitened over all $N$ tokens of the optimizer batch, on all ranks, "
        "with the unbiased variance"
        + (", after the returns of the value model are taken." if algorithm.value else ".")
    )
    return Description((*description.equations, whitened), text)


def _objective(algorithm: Algorithm, setting: Setting) -> tuple[Equation, ...]:
    surrogate, *details = algorithm.surrogate.describe().equations
    weight = "w_n" + (" m_n" if algorithm.masks else "") + (" c_n" if algorithm.corrections else "")
    parts = [rf"\sum_n {weight} \cdot {factor(' '.join(surrogate.parts))}"]
    silent = algorithm.advantage.kind == "zero" and algorithm.surrogate.reads_advantage
    if silent and algorithm.loss_distillation is not None:
        parts = []  # it is 0
    d = (
        algorithm.divergence
        if algorithm.divergence is not None and algorithm.divergence.active
        else None
    )
    if d is not None and d.where == "loss":
        parts.append(rf"- {d.symbol} \sum_n w_n \cdot {d.summand}")
    if (t := algorithm.loss_distillation) is not None:
        parts.append(rf"- {t.symbol}\sum_n w_n \cdot T_n")
    entropy = algorithm.entropy
    if entropy != 0:
        figure = r"\eta" if isinstance(entropy, AdaptiveEntropy) else number(entropy)
        parts.append(rf"+ {figure} \cdot \frac{{1}}{{N}} \cdot \sum_n H_n")
    for one in sorted(algorithm.auxiliary, key=lambda one: one.of == "demonstrations"):
        added, symbol = one.describe().equations
        if one.active and one.of == "demonstrations":
            parts[0] = rf"(1 - \kappa) ({parts[0]}"
            parts[-1] += ")"
            details.append(symbol)
        parts += [f"+ {added.parts[0]}"] if one.active else []
    lines = [Equation(r"J(\theta)", tuple(parts)), *details]
    lines += describe_entropy(entropy).equations[1:]
    if d is not None:
        lines += d.in_reward(algorithm)
    if d is not None and d.adaptive is not None:
        lines += [equation(r"\beta", number(d.beta), r"\text{ at first}")]
        lines += d.adaptive.describe(setting).equations
    if algorithm.value is not None:
        lines.append(algorithm.value.describe(algorithm.advantage, setting).equations[0])
    return tuple(lines)


def _reading(algorithm: Algorithm, setting: Setting) -> str:
    goal = (
        r"$J$ is maximised"
        if algorithm.value is None
        else r"$J$ is maximised and $L_V$ minimised with it"
    )
    tokens = (
        r"; $n$ runs over the $N$ completion tokens of the optimizer batch (those that the policy "
        r"wrote), $i$ is the completion that $n$ lies in, one of $S$, of $L_i$ tokens, $\ell_n = "
        r"\log \pi_\theta(o_n)$ in its context"
    )
    if not algorithm.needs_steps and algorithm.needs_reward:
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


# ---------------------------------------------------------------- models and the loop


def models(algorithm: Algorithm, setting: Setting) -> tuple[ModelUse, ...]:
    """Policy, reference, teacher, reward, value: those that the algorithm has a part for."""
    trained = "trained; adapters on a frozen base (LoRA)" if setting.lora else "trained"
    uses = [ModelUse("policy", trained, loaded=True)]
    if algorithm.needs_reference or setting.reference_measured:
        uses.append(_reference(algorithm, setting))
    if algorithm.needs_teacher:
        what = {
            "model": "another model with the same tokenizer, frozen",
            "models": "another model with the same tokenizer, frozen, of its own tasks",
            "server": "another model with the same tokenizer, on a server",
            "live": "the policy, with more in its prompt: no memory",
            "base": "the policy before the stage, with more in its prompt",
            "averaged": "a moving average of the policy, with more in its prompt",
        }[setting.teacher]
        held = setting.teacher in ("model", "models", "base", "averaged")
        if setting.teacher in ("base", "averaged") and setting.lora:
            held = False  # an adapter
        if setting.teacher == "base" and len(uses) > 1:
            held = False  # the reference's copy
        uses += [ModelUse("teacher", what, loaded=held)] * setting.teachers
    if setting.reward == "model":
        uses.append(ModelUse("reward", "a reward model, frozen", loaded=True))
    elif algorithm.needs_reward:
        uses.append(ModelUse("reward", "a rule: no model", loaded=False))
    if algorithm.needs_value:
        uses.append(
            ModelUse("value", "a critic, trained", loaded=True)
            if setting.value == "critic"
            else ModelUse("value", "a head on the policy's backbone: only a head", loaded=False)
        )
    return tuple(uses)


def _reference(algorithm: Algorithm, setting: Setting) -> ModelUse:
    every = setting.reference_reset_every
    reset = "" if every is None else f", re-set to the policy every {every} steps"
    if not algorithm.needs_reference:
        reset += ", to measure by"
    if not setting.lora:
        return ModelUse("reference", f"a frozen copy of the policy{reset}", loaded=True)
    if every is None:
        return ModelUse("reference", "the base with the adapter off: no memory", loaded=False)
    return ModelUse("reference", f"the base with a second, frozen adapter{reset}", loaded=False)


def notes(algorithm: Algorithm, setting: Setting) -> tuple[str, ...]:
    """What the loop adds that no term shows, one sentence or two each."""
    found: list[str] = []
    if algorithm.needs_greedy:
        found.append("One more completion of each prompt is sampled, greedily, for the baseline.")
    if algorithm.needs_steps:
        found.append("The reward must speak of every reasoning step, not of the answer alone.")
    if setting.dynamic_sampling:
        found.append(
            "Dynamic sampling: a group whose rewards are all equal is dropped and replaced by "
            "another prompt's."
        )
    overlong = _overlong(setting)
    if overlong:
        found.append(overlong)
    if setting.length_penalty:
        found.append(
            "A penalty of length, more for an easy prompt: the reward less "
            rf"${number(setting.length_penalty)} \max(p_g, \frac{{1}}{{G}}) "
            r"\frac{L_i}{\mathrm{mean}_g(L)}$, $p_g$ the share of the group's rewards above 0."
        )
    if setting.truncated_factor != 1:
        factor = number(setting.truncated_factor)
        found.append(f"The reward of a completion cut at the budget is multiplied by {factor}.")
    if setting.mask_truncated:
        found.append("Completions cut at the budget are left out of the loss.")
    d = algorithm.loss_divergence
    if d is not None and d.estimator == "full":
        found.append("The full divergence runs both policies' heads over the whole vocabulary.")
    return tuple(found)


def updates(algorithm: Algorithm, setting: Setting) -> str:
    """How often a batch is used."""
    epochs, parts = setting.epochs, setting.minibatches
    passes = "one pass" if epochs == 1 else f"{epochs} passes"
    cut = (
        ""
        if parts is None
        else ", in one mini-batch"
        if parts == 1
        else f", {parts} mini-batches each"
    )
    text = rf"Each step's batch is used for {passes} ($\mu = {epochs}$){cut}."
    if algorithm.ratio == "none" and not setting.one_update:
        return f"{text} After the first update it is off policy, and no ratio corrects for that."
    return text


def _overlong(setting: Setting) -> str:
    tokens, budget = setting.overlong_buffer, setting.max_tokens
    if tokens == 0 and setting.overlong_share > 0:
        if budget is None:
            share = number(setting.overlong_share)
            return (
                f"Soft overlong punishment: over the last ${share} C$ tokens of the budget the "
                "reward falls linearly, by 1 in all: "
                f"$\\min(0, ({_rest(share)} C - L_i) / ({share} C))$."
            )
        tokens = int(setting.overlong_share * budget)
    if tokens == 0:
        return ""
    start = "C" if budget is None else str(budget)
    free = f"{start} - {tokens}" if budget is None else str(budget - tokens)
    return (
        f"Soft overlong punishment: over the last {tokens} tokens of the budget {start} the reward "
        f"falls linearly, by 1 in all: $\\min(0, ({free} - L_i) / {tokens})$."
    )


def _rest(share: str) -> str:
    return number(round(1 - float(share), 12))
