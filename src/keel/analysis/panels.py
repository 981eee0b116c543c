"""The curves of a stage's first screen: which metrics, in which panel, with which words.

What `keel view` and `keel report` plot, so that both show the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import numpy as np

from keel.analysis.glossary import look_up, unknown
from keel.analysis.plots import smooth
from keel.runs.follow import Array, Column


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of a panel, by name or pattern; `label` names it in the legend.

    `band` are the metrics of a band's lower and upper end, or of a half width around the line
    ("±NAME"). A line on the `right` axis has another unit.
    """

    metric: str
    label: str
    band: tuple[str, ...] = ()
    right: bool = False
    points: bool = False
    """Values of few steps, such as evaluations, which are marked and never smoothed."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot: its lines, and what explains it: the glossary's entry for a metric, or a text."""

    key: str
    title: str
    explains: str
    lines: tuple[Line, ...]
    unit: str = ""
    right_unit: str = ""

    @property
    def help(self) -> str:
        """What the plotted quantity is, and what to watch for."""
        entry = look_up(self.explains)
        text = self.explains if entry is None else " ".join((entry.meaning, entry.watch))
        return text.strip().replace("`", "")


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """A line with its points, ready to plot; `low` and `high` are None without a band."""

    line: Line
    label: str
    steps: Array
    values: Array
    low: Array | None = None
    high: Array | None = None


_EVALUATED = (
    Line("eval/pass@1", "validation, greedy", ("eval/pass@1/low", "eval/pass@1/high"), points=True),
    Line("eval/reward", "validation, greedy", ("eval/reward/low", "eval/reward/high"), points=True),
)
_GRADIENT = Line("grad_norm", "gradient norm", right=True)

RL = (
    Panel(
        "reward",
        "Reward",
        "reward",
        (Line("reward", "training", ("±reward_std",)), Line("rewards/*/mean", "*"), *_EVALUATED),
    ),
    Panel(
        "signal",
        "Groups without variance",
        "frac_reward_zero_std",
        (
            Line("frac_reward_zero_std", "share of groups"),
            Line("groups/dropped", "groups dropped", right=True),
        ),
        "share",
        "groups",
    ),
    Panel(
        "kl",
        "KL divergence and engine mismatch",
        "kl",
        (
            Line("kl/reference", "to the reference (k1)"),
            Line("teacher/kl", "to the teacher (k1)"),
            Line("kl", "in the loss or reward"),
            Line("kl/old", "within the step"),
            Line("sampling/sampling_logp_difference/mean", "engine − trainer", right=True),
        ),
        "nats per token",
        "nats",
    ),
    Panel("entropy", "Entropy", "entropy", (Line("entropy", "entropy"),), "nats per token"),
    Panel(
        "length",
        "Length and truncation",
        "completions/mean_length",
        (
            Line(
                "completions/mean_length",
                "mean length",
                ("completions/min_length", "completions/max_length"),
            ),
            Line("completions/clipped_ratio", "cut off", right=True),
        ),
        "tokens",
        "share",
    ),
    Panel(
        "update",
        "Clip fraction and gradient norm",
        "clip_ratio/region_mean",
        (Line("clip_ratio/region_mean", "clipped tokens"), _GRADIENT),
        "share",
        "norm",
    ),
    Panel(
        "value",
        "Value model",
        "value/explained_variance",
        (
            Line("value/explained_variance", "explained variance"),
            Line("value/loss", "value loss", right=True),
        ),
    ),
)

SPREAD = Panel(
    "spread",
    "Spread of rewards",
    "reward_std",
    (
        Line("reward_std", "standard deviation"),
        Line("reward/greedy", "reward of the greedy completions", right=True),
    ),
    "reward",
    "reward",
)
"""In the place of the groups where each has one completion and there is no value model."""


def _loss(explains: str, unit: str = "") -> Panel:
    return Panel("loss", "Loss", explains, (Line("loss", "loss"), _GRADIENT), unit, "norm")


SFT = (
    _loss(
        "Cross-entropy: minus the log-probability of a token of the demonstrations, mean over the "
        "step's tokens, before the update. Should fall; at 0 they are known by heart.",
        "nats",
    ),
    Panel(
        "probability",
        "Probability of the demonstrations",
        "mean_token_probability",
        (Line("mean_token_probability", "mean per token"),),
        "share",
    ),
    Panel("rate", "Learning rate", "learning_rate", (Line("learning_rate", "learning rate"),)),
)

JUDGED = (
    Panel(
        "loss",
        "Loss",
        "eval/log_loss",
        (
            Line("loss", "training"),
            Line("eval/log_loss", "validation log loss", points=True),
            _GRADIENT,
        ),
        "nats",
        "norm",
    ),
    Panel(
        "accuracy",
        "Accuracy",
        "eval/accuracy",
        (
            Line("accuracy", "training"),
            Line("rewards/accuracies", "training"),
            Line("eval/accuracy", "validation", points=True),
        ),
        "share",
    ),
    Panel(
        "margin",
        "Margins",
        "rewards/margins",
        (
            Line("margin", "chosen − rejected"),
            Line("rewards/margins", "margin"),
            Line("rewards/chosen", "chosen"),
            Line("rewards/rejected", "rejected"),
        ),
        "reward",
    ),
    Panel(
        "calibration",
        "Calibration",
        "eval/ece",
        (
            Line("eval/ece", "calibration error", points=True),
            Line("eval/brier", "Brier score", points=True),
        ),
    ),
)

CONTROL = (
    Panel(
        "return",
        "Return",
        "eval/return",
        (
            Line("episode/return", "training episodes"),
            Line(
                "eval/return",
                "greedy evaluation",
                ("eval/return/low", "eval/return/high"),
                points=True,
            ),
        ),
        "reward",
    ),
    Panel(
        "length", "Episode length", "episode/length", (Line("episode/length", "steps"),), "steps"
    ),
    Panel(
        "exploration",
        "Exploration",
        "entropy",
        (Line("entropy", "entropy"), Line("epsilon", "ε", right=True)),
        "nats",
        "share",
    ),
    Panel(
        "value",
        "Value estimates",
        "q/mean",
        (
            Line("q/mean", "mean action value"),
            Line("value/explained_variance", "explained variance", right=True),
        ),
        "reward",
        "share",
    ),
    _loss(
        "What the optimizer step minimised: of Q-learning the error of the action values, of "
        "policy gradients minus the surrogate plus the value loss. Watch the return."
    ),
)

KINDS = {
    "rl": RL,
    "sft": SFT,
    "reward_model": JUDGED,
    "process_reward_model": JUDGED,
    "dpo": JUDGED,
}


def panels_of(kind: str, names: Sequence[str], *, alone: bool = False) -> list[Panel]:
    """The panels of a kind of stage of which some metric is there; of games any other kind. Then
    those of the metrics that reward functions recorded, which the glossary does not know.

    `alone`: a group is one completion. The value model, or else the spread over all prompts, then
    has the place of the variance in groups.
    """
    panels = KINDS.get(kind, CONTROL)
    if alone and panels is RL:
        reward, _, *rest, value = RL
        learned = any(name.startswith("value/") for name in names)
        panels = (reward, value if learned else SPREAD, *rest)
    found = [
        panel
        for panel in panels
        if any(fnmatchcase(name, line.metric) for line in panel.lines for name in names)
    ]
    return [*found, *_recorded(unknown(names))]


def _recorded(names: Sequence[str]) -> list[Panel]:
    """A panel for each of the names; one for all that have the same part before a slash."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(name.partition("/")[0], []).append(name)
    text = "Recorded by a reward function with log_metric."
    return [
        Panel(
            f"recorded-{at}",
            group if len(of_group) > 1 else of_group[0],
            text,
            tuple(Line(escape(name), name.removeprefix(f"{group}/")) for name in of_group),
        )
        for at, (group, of_group) in enumerate(groups.items(), start=1)
    ]


def with_first(
    columns: Mapping[str, Column], info: Mapping[str, Any], stage: str
) -> Mapping[str, Column]:
    """The columns with what was evaluated before the first step, which `info` (run.json) has, as
    values of step 0."""
    found: dict[str, Any] = {}
    for kind in ("evaluation", "measured"):
        before = info.get(kind, {}).get(stage, {}).get("before", {})
        own = {before.get("measure", "pass@1"): before} if "mean" in before else {}
        for name, value in {**before, **own}.items():
            ends = value if isinstance(value, Mapping) else {"mean": value}
            found |= {f"eval/{name}/{end}": ends[end] for end in ends}
            found[f"eval/{name}"] = ends.get("mean")
    return {
        name: Column(np.array([0.0, *column.steps]), np.array([found[name], *column.values]))
        if isinstance(found.get(name), int | float) and 0 not in column.steps
        else column
        for name, column in columns.items()
    }


def series_of(
    panel: Panel, columns: Mapping[str, Column], *, window: int = 1, points: int = 600
) -> list[Series]:
    """The lines of a panel: smoothed by a moving mean of `window` steps, thinned to `points`."""
    at = columns.get("environment_steps")
    found = []
    for line in panel.lines:
        names = [name for name in columns if fnmatchcase(name, line.metric)]
        if "*" in line.metric and len(names) < 2:
            continue  # one component is the reward itself
        for name in sorted(names):
            label = line.label
            if "*" in line.metric:
                start, _, end = line.metric.partition("*")
                label = name.removeprefix(start).removesuffix(end)
            found.append(_series(line, label, name, columns, at, window, points))
    return [one for one in found if len(one.steps)]


def _series(
    line: Line,
    label: str,
    name: str,
    columns: Mapping[str, Column],
    at: Column | None,
    window: int,
    points: int,
) -> Series:
    column = columns[name]
    known = np.isfinite(column.values)
    steps = column.steps[known]
    values = column.values[known]
    low = high = None
    if len(line.band) == 1:
        half = _on(columns.get(line.band[0].removeprefix("±")), steps)
        if half is not None:
            low, high = values - half, values + half
            if values.size and values.min() >= 0 and values.max() <= 1:
                # Such rewards are shares: a band outside of them would show what cannot be.
                low, high = low.clip(min=0), high.clip(max=1)
    elif line.band:
        low, high = (_on(columns.get(end), steps) for end in line.band)
    parts = [part for part in (values, low, high) if part is not None]
    if not line.points and window > 1:
        parts = [smooth(part, window) for part in parts]
    if at is not None:  # games count the steps of their environments
        steps = np.interp(steps, at.steps, at.values)
    return Series(line, label, *(_thin(part, points) for part in (steps, *parts)))


def _on(column: Column | None, steps: Array) -> Array | None:
    """The values of a column at these steps, NaN where it has none; None without the column."""
    if column is None or not len(column.steps):
        return None
    at = np.searchsorted(column.steps, steps).clip(max=len(column.steps) - 1)
    return np.where(column.steps[at] == steps, column.values[at], np.nan)


def _thin(values: Array, points: int) -> Array:
    """At most `points` of the values, each the mean of neighbours."""
    if len(values) <= points:
        return values
    starts = np.linspace(0, len(values), points + 1).astype(int)
    sums = np.add.reduceat(values, starts[:-1])
    return np.asarray(sums / np.diff(starts))
