"""Which models a row keeps in memory, and what its setting brings beside the objective."""

from __future__ import annotations

from keel.algorithms.spec import Algorithm
from keel.algorithms.symbols import number
from keel.algorithms.terms import ModelUse, Setting


def models(row: Algorithm, setting: Setting) -> tuple[ModelUse, ...]:
    """Policy, reference, reward, value: those that the row has a part for."""
    trained = "trained; adapters on a frozen base (LoRA)" if setting.lora else "trained"
    uses = [ModelUse("policy", trained, loaded=True)]
    if row.needs_reference or setting.reference_measured:
        uses.append(_reference(row, setting))
    if setting.reward == "model":
        uses.append(ModelUse("reward", "a reward model, frozen", loaded=True))
    else:
        uses.append(ModelUse("reward", "a rule: no model", loaded=False))
    if row.needs_value:
        uses.append(
            ModelUse("value", "a critic, trained", loaded=True)
            if setting.value == "critic"
            else ModelUse("value", "a head on the policy's backbone: only a head", loaded=False)
        )
    return tuple(uses)


def _reference(row: Algorithm, setting: Setting) -> ModelUse:
    every = setting.reference_reset_every
    reset = "" if every is None else f", re-set to the policy every {every} steps"
    if not row.needs_reference:
        reset += ", to measure by"
    if not setting.lora:
        return ModelUse("reference", f"a frozen copy of the policy{reset}", loaded=True)
    if every is None:
        return ModelUse("reference", "the base with the adapter off: no memory", loaded=False)
    return ModelUse("reference", f"the base with a second, frozen adapter{reset}", loaded=False)


def notes(row: Algorithm, setting: Setting) -> tuple[str, ...]:
    """What the loop adds that no term shows, one sentence or two each."""
    found: list[str] = []
    if row.needs_greedy:
        found.append("One more completion of each prompt is sampled, greedily, for the baseline.")
    if row.needs_steps:
        found.append("The reward must speak of every reasoning step, not of the answer alone.")
    if setting.dynamic_sampling:
        found.append(
            "Dynamic sampling: a group whose rewards are all equal is dropped and replaced by "
            "another prompt's."
        )
    overlong = _overlong(setting)
    if overlong:
        found.append(overlong)
    if setting.mask_truncated:
        found.append("Completions cut at the budget are left out of the loss.")
    d = row.loss_divergence
    if d is not None and d.estimator == "full":
        found.append("The full divergence runs both policies' heads over the whole vocabulary.")
    return tuple(found)


def updates(row: Algorithm, setting: Setting) -> str:
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
    if row.ratio == "none" and not setting.one_update:
        return f"{text} After the first update it is off policy, and no ratio corrects for that."
    return text


def _overlong(setting: Setting) -> str:
    tokens, budget = setting.soft_overlong, setting.max_tokens
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
