"""What each metric of a run means. `python -m keel.analysis.glossary` prints docs/metrics.md."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of them: what it is, its unit, what to watch for."""

    name: str
    meaning: str
    unit: str
    watch: str = ""


@cache
def sections() -> dict[str, tuple[Metric, ...]]:
    """The metrics of each section of the glossary, by its title."""
    text = files("keel.analysis").joinpath("glossary.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)["section"]
    return {one["title"]: tuple(Metric(**entry) for entry in one["metric"]) for one in tables}


def look_up(name: str) -> Metric | None:
    """The glossary's entry for a metric; an exact name goes before a pattern. None: unknown."""
    metrics = [metric for section in sections().values() for metric in section]
    for metric in metrics:
        if metric.name == name:
            return metric
    fitting = [metric for metric in metrics if fnmatchcase(name, metric.name)]
    # The most particular of the patterns: `eval/*/low` before `eval/pass@*` for eval/pass@4/low.
    return max(fitting, key=lambda metric: (metric.name[-1] != "*", len(metric.name)), default=None)


def unknown(names: Iterable[str]) -> list[str]:
    """Those of the names that the glossary does not hold."""
    return [name for name in names if look_up(name) is None]


INTRO = """\
# Metrics

What the columns of `metrics.jsonl` mean. Names are TRL's where TRL has one; a `*` stands
for a name or a number k. In parentheses is the unit, unless the description names it; shares
are from 0 to 1. In italics: what to watch for. Every row also has `stage` and `step` (counted
from 1 within the stage; 0 is before training); a number that is not finite is `null`. Times
are in `timings.jsonl`, so that `metrics.jsonl` is a function of recipe and seed. What a reward
function records with `log_metric` comes under the name that it gives.
"""


def markdown() -> str:
    """The glossary as the page docs/metrics.md."""
    lines = [INTRO.rstrip()]
    for title, metrics in sections().items():
        lines += ["", f"## {title}", ""]
        for metric in metrics:
            plain = metric.unit == "1" or metric.unit.partition(",")[0] in metric.meaning.lower()
            unit = "" if plain else f" ({metric.unit})"
            watch = f" *{metric.watch}*" if metric.watch else ""
            lines.append(f"- `{metric.name}`{unit}: {metric.meaning}{watch}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
