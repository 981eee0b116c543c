"""The page docs/howto/diagnosis.md, made from the table of conditions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from keel.analysis.diagnosis.table import Advice, conditions

INTRO = """# What is wrong with a run?

    keel diagnose runs/quickstart-1
    keel diagnose runs/quickstart-1 --json

reads a run folder, also of a run that goes on, and reports each problem of its stages of
reinforcement learning: the evidence with its figures and steps, completions that show it, likely
causes, and the recipe keys to change, with a value computed from the present one where possible. A
problem is an *error* (the run learns nothing more, or the wrong thing) or a *warning* (it wastes
time, or may mislead). The exit code is 0 either way.

`keel train` and `keel.train` look for the same problems while the run goes on: each is shown once,
in a line that begins with `WARNING`, and recorded as an event `diagnosis` in `events.jsonl`. A
condition must be found by two checks in a row, five steps apart or a fiftieth of the steps so far.
The run itself is not changed by it. At its end `keel train` prints what it was diagnosed with, and
with `--json` the same objects as `keel diagnose --json`, as `diagnoses`.

The rules use medians of five steps or more and tests by rank, since metrics are noisy; a run that
is too short for a rule is not diagnosed by it. Rewards of single completions, lengths and texts are
those of the first 256 completions of up to 24 steps, if the run wrote rollouts
([`rollouts_every`](../recipe.md)). A diagnosis is a sign, not a proof: read the completions that it
names ([`keel rollouts`](rollouts.md)). What the metrics mean is in [metrics](../metrics.md).

From Python:

    from keel.analysis.diagnosis.table import diagnose
    for one in diagnose(keel.load("runs/quickstart-1")):
        print(one.condition, one.evidence, one.changes)

A further condition is a function of a `StageHistory` that returns a `Symptom` or None, in `RULES`
of `keel/analysis/diagnosis/table.py`, and an entry of its name in `conditions.toml` next to it.
"""


def markdown() -> str:
    """The page."""
    lines = [INTRO, "| condition | problem | severity |", "|---|---|---|"]
    lines += [f"| [`{c.id}`](#{c.id}) | {c.title} | {c.severity} |" for c in conditions()]
    for condition in conditions():
        rule = " ".join((inspect.getdoc(condition.rule) or "").split())
        lines += ["", f"## {condition.id}", "", f"{condition.title}.", "", f"**Rule.** {rule}", ""]
        lines += ["**Likely causes**", "", *(f"- {cause}" for cause in condition.causes), ""]
        lines += ["**What to change**", "", *(f"- {line}" for line in _advice(condition.advice))]
    return "\n".join(lines) + "\n"


def _advice(advice: tuple[Advice, ...]) -> Iterator[str]:
    for one in advice:
        how = "" if one.direction == "other" else f" {one.direction}"
        if one.factor is not None:
            how = f" × {one.factor:g}"
        elif one.value is not None:
            value = str(one.value).lower() if isinstance(one.value, bool) else one.value
            how = f" = {value}"
        yield f"`{one.key}`{how}: {one.why}"


if __name__ == "__main__":
    print(markdown(), end="")
