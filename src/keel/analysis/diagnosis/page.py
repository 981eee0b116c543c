"""The page docs/howto/diagnosis.md, made from the table of conditions."""

from __future__ import annotations

import inspect

from keel.analysis.diagnosis.table import Advice, conditions

INTRO = """# What is wrong with a run?

    keel diagnose RUN [--json]

reads a run folder, also of a run that goes on, and reports each problem of its stages of
reinforcement learning: the evidence, completions that show it, likely causes, and the recipe keys
to change, each with its reason and, if it follows from the present value, the new one. An *error*
means that the run learns nothing more, or the wrong thing; a *warning*, that it wastes time or may
mislead. The exit code is 0 either way.

`keel train` and `keel.train` look for the same problems during the run. Each is shown once, in a
line that begins with `WARNING`, and recorded as an event `diagnosis` in `events.jsonl`, if two
checks in a row find it (five steps apart, or a fiftieth of the steps so far). The run goes on
unchanged. `keel train --json` returns the problems of the whole run as `diagnoses`.

The rules use medians of five steps or more and rank tests; a run that is too short for a rule is
not diagnosed by it. Rules on single completions read the first 256 of up to 24 steps, if the run
wrote rollouts ([`rollouts_every`](../recipe.md)). A diagnosis is a sign, not a proof: read the
completions that it names ([`keel rollouts`](rollouts.md)). [Metrics](../metrics.md) explains the
metrics.

From Python:

    from keel.analysis.diagnosis.table import diagnose
    for one in diagnose(keel.load("runs/quickstart-1")):
        print(one.condition, one.evidence, one.changes)

A further condition is a function of a `StageHistory` that returns a `Symptom` or None, in `RULES`
of `keel/analysis/diagnosis/table.py`, and an entry of its name in `conditions.toml` next to it.
"""


def markdown() -> str:
    """The page."""
    lines = [INTRO]
    for condition in conditions():
        rule = " ".join((inspect.getdoc(condition.rule) or "").split())
        changes = dict.fromkeys(_change(one) for one in condition.advice)
        lines += [f"## {condition.id}", "", f"**{condition.severity.capitalize()}.** {rule}", ""]
        lines += [f"- Likely causes: {'; '.join(condition.causes)}."]
        lines += [f"- Change: {', '.join(changes)}.", ""]
    return "\n".join(lines[:-1]) + "\n"


def _change(advice: Advice) -> str:
    """A key, and what to do with it."""
    if advice.factor is not None:
        return f"`{advice.key}` × {advice.factor:g}"
    if advice.value is not None:
        value = str(advice.value).lower() if isinstance(advice.value, bool) else advice.value
        return f"`{advice.key}` = {value}"
    return f"`{advice.key}`" + ("" if advice.direction == "other" else f" {advice.direction}")


if __name__ == "__main__":
    print(markdown(), end="")
