"""What each metric of a run means. `python -m keel.analysis.glossary` prints docs/metrics.md.

Names are TRL's where TRL has one (GRPOTrainer, 1.16), so that curves lie on top of each other.
A `*` stands for a name of the user's (a reward, a task) or a number k.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from keel.analysis.metrics import SECTIONS, Metric


def look_up(name: str) -> Metric | None:
    """The glossary's entry for a metric; an exact name goes before a pattern. None: unknown."""
    metrics = [metric for section in SECTIONS for metric in section.metrics]
    for metric in metrics:
        if metric.name == name:
            return metric
    fitting = [metric for metric in metrics if fnmatchcase(name, metric.name)]
    # The most particular of the patterns: `eval/*/low` before `eval/pass@*` for eval/pass@4/low.
    return max(fitting, key=lambda metric: (metric.name[-1] != "*", len(metric.name)), default=None)


def unknown(names: Iterable[str]) -> list[str]:
    """Those of the names that the glossary does not hold."""
    return [name for name in names if look_up(name) is None]


def markdown() -> str:
    """The glossary as the page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "What the columns of `metrics.jsonl` mean. Names are TRL's where TRL has one; a `*` stands",
        "for a name or a number k. Every row also has `stage` and `step` (counted from 1 within",
        "the stage; 0 is before training); a number that is not finite is `null`. Times are in",
        "`timings.jsonl`, so that `metrics.jsonl` is a function of recipe and seed. What a reward",
        "function records with `log_metric` comes under the name that it gives.",
        "",
        "Made by `python -m keel.analysis.glossary > docs/metrics.md`.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", "| metric | what it is | unit | watch |"]
        lines.append("|---|---|---|---|")
        for metric in section.metrics:
            cells = (f"`{metric.name}`", metric.meaning, metric.unit, metric.watch)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
