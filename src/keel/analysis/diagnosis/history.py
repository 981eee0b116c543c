"""What rules read of a stage (recipe, metrics, some rollouts), how they summarise it, and return.

Summaries of a metric over the steps are robust: medians of windows, ranks, no means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.analysis.metrics import has_rollouts
from keel.runs.layout import RunFolder
from keel.runs.reader import Column, Run
from keel.runs.rows import COMPONENT, TERMS, read_table
from keel.types import KeelError

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
MOST_ROWS = 256
"""Completions of a step that are looked at, from the first: medians need no more."""
MOST_STEPS = 24
"""Steps whose rollouts are read of a finished run, evenly spread."""
NGRAM = 4
MARKERS = re.compile(r"<[^<>]*>|\\boxed|[^\w\s]+")
"""What frames an answer: tags, `\\boxed`, `####` and signs other than letters and digits."""
SHORTEST = 3 * NGRAM
"""Tokens below which a completion is too short for a share of repeated 4-grams."""
_POLICY = TERMS[0]
_WANTED = ("group", "completion", "tokens", "written", "advantages", _POLICY, "finish", "reward")


@dataclass(frozen=True, eq=False)
class StepRollouts:
    """The completions of one step, arrays with an entry for each; NaN if there is no number.

    `written` counts the tokens of the policy, `context` those of the environment. `repetition` is
    the share of 4-grams of tokens that occurred before in the same completion (NaN for short ones),
    `advantage` that of its first token, `mass` the sum of |w_n s(ρ_n, A_n)| over its tokens, if
    the terms of the loss were recorded, `empty` whether the completion holds no text, and `bare`
    whether it holds markers and nothing else. `words` are the different tokens that the policy
    wrote, if the environment wrote some too.
    """

    step: int
    group: npt.NDArray[np.int64]
    reward: Array
    written: Array
    context: Array
    truncated: Bools
    repetition: Array
    advantage: Array
    mass: Array
    words: Sequence[npt.NDArray[Any]]
    empty: Bools
    bare: Bools
    components: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.reward)

    def centred(self, values: Array) -> Array:
        """Values less the mean of their group, over completions with a value; others NaN."""
        out = np.full(len(values), np.nan)
        for one in np.unique(self.group):
            inside = (self.group == one) & np.isfinite(values)
            out[inside] = values[inside] - values[inside].mean() if inside.any() else np.nan
        return out


def read_step(folder: RunFolder, stage: int, step: int) -> StepRollouts | None:
    """The rollouts of a step; None if there are none. Raises KeelError for a damaged file."""
    path = folder.rollouts(stage, step)
    if not path.is_file():
        return None
    table = read_table(path)
    names = [n for n in table.column_names if n in _WANTED or n.startswith(COMPONENT)]
    rows = table.select(names).slice(0, MOST_ROWS).to_pylist()
    return summarise(step, rows) if rows else None


def spread(steps: Sequence[int], most: int = MOST_STEPS) -> list[int]:
    """At most `most` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[place] for place in places]


def summarise(step: int, rows: Sequence[Mapping[str, Any]]) -> StepRollouts:
    """The summary of rows as `Run.rollouts` gives them; columns that they lack are left out."""
    own = [np.asarray(row["written"], dtype=bool) for row in rows]
    tokens = [np.asarray(row["tokens"])[mask] for row, mask in zip(rows, own, strict=True)]
    names = sorted({n for row in rows for n in row if n.startswith(COMPONENT)})
    written = np.array([mask.sum() for mask in own], dtype=np.float64)
    context = np.array([len(mask) for mask in own]) - written
    return StepRollouts(
        step=step,
        group=np.array([row["group"] for row in rows], dtype=np.int64),
        reward=_numbers(row["reward"] for row in rows),
        written=written,
        context=context,
        truncated=np.array([row["finish"] == "length" for row in rows], dtype=bool),
        repetition=_numbers(_repeated(one) for one in tokens),
        advantage=_numbers(
            _first(row.get("advantages"), mask) for row, mask in zip(rows, own, strict=True)
        ),
        mass=_numbers(_mass(row.get(_POLICY)) for row in rows),
        words=[
            np.unique(one if others else one[:0])
            for one, others in zip(tokens, context, strict=True)
        ],
        empty=np.array([not (row.get("completion") or "").strip() for row in rows], dtype=bool),
        bare=np.array([_bare(row.get("completion") or "") for row in rows], dtype=bool),
        components={
            name.removeprefix(COMPONENT): _numbers(row.get(name) for row in rows) for name in names
        },
    )


def _numbers(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _first(advantages: Sequence[float] | None, own: Bools) -> float | None:
    """The advantage of the first token that the policy wrote."""
    return None if advantages is None or not own.any() else advantages[int(np.argmax(own))]


def _mass(terms: Sequence[float] | None) -> float | None:
    return None if terms is None else float(np.abs(terms).sum())


def _repeated(tokens: npt.NDArray[Any]) -> float | None:
    """1 − different 4-grams / all 4-grams."""
    if len(tokens) < SHORTEST:
        return None
    grams = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    return 1 - len(np.unique(grams, axis=0)) / len(grams)


def _bare(text: str) -> bool:
    return bool(text.strip()) and not MARKERS.sub("", text).strip()


Steps = npt.NDArray[np.int64]
GROUP_ADVANTAGES = ("group_relative", "leave_one_out", "process_group_relative", "optimal")
"""Advantages that are 0 if all rewards of a group are equal."""
UNREWARDED_ADVANTAGES = ("zero",)
"""Advantages that read no reward: what rewards show says nothing of the signal."""


@dataclass(frozen=True, eq=False)
class StageHistory:
    """A stage of reinforcement learning: `recipe` is its table, `model` the recipe's of the model.

    `columns` are the metrics by name. `rollouts` are of some steps only, in order. `before` is the
    evaluation before the stage.
    """

    stage: str
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    columns: Mapping[str, Column]
    rollouts: Sequence[StepRollouts] = ()
    before: Mapping[str, Any] | None = None

    def column(self, name: str) -> tuple[Steps, Array]:
        """Steps and values of a metric, if it is a finite number; empty if it was not logged."""
        if name not in self.columns:
            return np.empty(0, np.int64), np.empty(0)
        steps, values = self.columns[name].steps, self.columns[name].values
        finite = np.isfinite(values)
        return steps[finite].astype(np.int64), values[finite]

    def values(self, name: str) -> Array:
        return self.column(name)[1]

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the stage's recipe by its dotted name; `default` if it is absent or none."""
        found: Any = self.recipe
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None or found == "none" else found

    @property
    def updates(self) -> int:
        """Optimizer steps on each batch."""
        return int(self.setting("epochs", 1)) * int(self.setting("minibatches", 1))

    @property
    def grouped(self) -> bool:
        """Whether advantages compare the completions of one prompt."""
        several = int(self.setting("rollout.group_size", 1)) > 1
        if self.setting("algorithm.distillation.place") is not None:
            return False  # a teacher has something to say where rewards are equal
        kind = self.setting("algorithm.advantage.kind")
        baseline = self.setting("algorithm.advantage.group_baseline", False)
        return several and (kind in GROUP_ADVANTAGES or bool(baseline))

    @property
    def rewarded(self) -> bool:
        """Whether advantages are made of rewards."""
        return self.setting("algorithm.advantage.kind") not in UNREWARDED_ADVANTAGES

    @property
    def reference(self) -> str:
        """The metric of the divergence to the reference."""
        return "kl/reference" if "kl/reference" in self.columns else "kl"

    @property
    def rewards(self) -> list[Mapping[str, Any]]:
        """The recipe's table of each reward function."""
        return list(self.setting("rewards.functions", []))

    @cached_property
    def reward_range(self) -> tuple[float, float] | None:
        """The lowest and highest reward of any completion that was read; None for no rollouts."""
        found = [r.reward[np.isfinite(r.reward)] for r in self.rollouts]
        every = np.concatenate(found) if found else np.empty(0)
        return (float(every.min()), float(every.max())) if len(every) else None

    @property
    def reward_extent(self) -> float:
        """How far apart the lowest and the highest reward are; without rollouts, of step means."""
        bounds, means = self.reward_range, self.values("reward")
        return float(np.ptp(means)) if bounds is None else bounds[1] - bounds[0]

    def reward_spread(self) -> tuple[Steps, Array]:
        """Steps, and the largest standard deviation of a reward in each of them."""
        found = [self.column(name) for name in self.columns if fnmatchcase(name, "rewards/*/std")]
        steps = np.unique(np.concatenate([np.empty(0, np.int64), *(at for at, _ in found)]))
        largest = np.zeros(len(steps))
        for at, values in found:
            np.maximum.at(largest, np.searchsorted(steps, at), values)
        return steps, largest


def histories(run: Run, damaged: list[str] | None = None) -> Iterator[StageHistory]:
    """Each stage of reinforcement learning, in order.

    Rollout files that cannot be read are left out and named in the list `damaged`. Raises KeelError
    if recipe or metrics, or without the list rollouts, cannot be read.
    """
    recipe = run.recipe()
    written = run.rollout_places()
    tables = recipe.get("stages", [recipe.get("stage")])
    for number, (name, table) in enumerate(zip(run.stages, tables, strict=False)):
        if not isinstance(table, Mapping) or not has_rollouts(str(table.get("stage"))):
            continue
        before = run.info().get("evaluation", {}).get(name, {}).get("before")
        found = StageHistory(name, table, recipe.get("model", {}), run.columns(name), (), before)
        rollouts = []
        for step in spread([place.step for place in written if place.stage == number]):
            try:
                one = read_step(run.folder, number, step)
                rollouts += [] if one is None else [one]
            except KeelError:
                if damaged is None:
                    raise
                damaged.append(run.folder.rollouts(number, step).name)
        yield replace(found, rollouts=rollouts)


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """A completion that shows a condition: its step, and its row in that step's rollouts."""

    step: int
    row: int


def newest(
    history: StageHistory, rows: Callable[[StepRollouts], Iterable[Any]]
) -> tuple[RolloutSample, ...]:
    """The first three of the newest rollouts that `rows` chooses."""
    return tuple(
        RolloutSample(r.step, int(row)) for r in history.rollouts[-1:] for row in [*rows(r)][:3]
    )


@dataclass(frozen=True, slots=True)
class Symptom:
    """What the rule of a condition found: the steps that it is of, figures, and completions.

    `words` are names, such as of a metric, that the evidence needs with the figures.
    """

    steps: Sequence[float] | Steps | Array
    figures: Mapping[str, float]
    samples: tuple[RolloutSample, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    severe: bool = False
    """The condition is an error here, even if it is a warning in general."""


# ---------------------------------------------------------------- summaries of a metric

WINDOW = 5
"""Fewest steps of a window: a median of five ignores two outliers."""
WINDOWS = 20
"""Most windows of a run, so that the cost of a trend does not grow with the run."""
LONGEST = 200
"""Most values that a rank test compares; of more it gets the medians of windows."""


def window_medians(values: Array, most: int = WINDOWS) -> Array:
    """Medians of equal windows of `WINDOW` values or more that tile the values.

    At most `most` windows; what does not fill a window is left out at the start, so that the last
    window ends with the last value. Empty for fewer than `WINDOW` values.
    """
    width = max(WINDOW, math.ceil(len(values) / most))
    count = len(values) // width
    if count == 0:
        return np.empty(0)
    return np.asarray(np.median(values[len(values) - count * width :].reshape(count, width), 1))


def rolling_medians(values: Array, width: int = WINDOW) -> Array:
    """The median of each value and the `width` − 1 before it; one for each place but the first."""
    if len(values) < width:
        return np.empty(0)
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1))


@dataclass(frozen=True, slots=True)
class Trend:
    """How a metric moved: medians of its first and last fifth, and the trend between them.

    `change` is Theil and Sen's slope over windows, times the length; `p` is the two-sided p-value
    of Mann and Kendall's test.
    """

    first: float
    last: float
    change: float
    p: float
    n: int

    @property
    def gain(self) -> float:
        """How much the last fifth lies above the first."""
        return self.last - self.first

    def figures(self, name: str) -> dict[str, float]:
        """The two medians, as evidence has them."""
        return {f"{name}_first": self.first, f"{name}_last": self.last}

    def rises(self, p: float = 0.01) -> bool:
        return self.change > 0 and self.p < p

    def falls(self, p: float = 0.01) -> bool:
        return self.change < 0 and self.p < p


def trend(values: Array) -> Trend:
    """The trend of values in order; NaN and p = 1 for fewer than five.

        change = (n − 1) · median over pairs i < j of (x_j − x_i) / (j − i),   x medians of windows
        p      = of Kendall's τ between place and value

    Sources: Theil 1950, Sen 1968 (JASA 63:1379); Mann 1945, Kendall 1975. Both hold for any
    distribution of the noise. Noise that is correlated from step to step makes p too small: a rule
    also needs a change that matters.
    """
    from scipy.stats import kendalltau, theilslopes

    x = values[np.isfinite(values)]
    if len(x) < WINDOW:
        return Trend(math.nan, math.nan, math.nan, 1.0, len(x))
    part = max(WINDOW, len(x) // 5) if len(x) >= 2 * WINDOW else max(1, len(x) // 3)
    first, last = float(np.median(x[:part])), float(np.median(x[-part:]))
    medians = window_medians(x) if len(x) >= 4 * WINDOW else x
    change = float(theilslopes(medians).slope) * (len(medians) - 1)
    ranked = x if len(x) <= LONGEST else window_medians(x, LONGEST)
    if np.ptp(ranked) == 0:
        return Trend(first, last, 0.0, 1.0, len(x))
    p = float(kendalltau(np.arange(len(ranked)), ranked).pvalue)
    return Trend(first, last, change, p, len(x))


def median(values: Array, default: float = math.nan) -> float:
    """The median; `default` of no values."""
    return float(np.median(values)) if len(values) else default


def holds_since(values: Array, least: float) -> int | None:
    """The index since which the median of each value and the four before is at least so high.

    None if it is not at the end. A stretch from the start on counts from the first value.
    """
    low = np.flatnonzero(rolling_medians(values) < least)
    if len(values) < WINDOW or (len(low) and low[-1] == len(values) - WINDOW):
        return None
    return int(low[-1]) + WINDOW if len(low) else 0


def noise(values: Array) -> float:
    """Standard deviation of the values about their course, from the differences of neighbours.

        σ = 1.4826 · median |x_{i+1} − x_i − median(x_{i+1} − x_i)| / √2

    0 for fewer than three values.
    """
    steps = np.diff(values[np.isfinite(values)])
    if len(steps) < 2:
        return 0.0
    return float(1.4826 * np.median(np.abs(steps - np.median(steps))) / math.sqrt(2))
