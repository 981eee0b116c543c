"""Compares algorithms over seeds: scores with intervals, differences, curves, costs. Torch-free.

Scores are means of few runs, so every statement comes with an interval over seeds: for an
interquartile mean a percentile bootstrap whose levels are widened by Student's t; for a difference
the bootstrap's standard error, with the same seeds drawn for both arms, and Student's t. A
difference is only called one if its interval, corrected for the number of comparisons, leaves
out 0 [Agarwal et al. 2021, 2108.13264; Hesterberg 2015, Am. Stat. 69:371]. One or two seeds give
values and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np

from keel.analysis.statistics import Array, Interval, iqm, student_quantile, wilson_ends
from keel.runs.reader import Run
from keel.types import KeelError

LEAST = 3
"""Seeds below which there is no interval."""
ENOUGH = 10
"""Seeds below which no claim should be made."""
NO_DIFFERENCE = "no difference shown"
RESAMPLES = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class RunScore:
    """The outcome of one run: its last evaluation, its curves, and what it cost.

    `passed` is the result of each validation prompt's greedy completion by prompt id (its reward
    if nothing is declared as correctness); `curves` are (steps, values) by metric.
    """

    arm: str
    seed: int
    score: float
    measure: str
    passed: Mapping[str, float]
    curves: Mapping[str, tuple[Array, Array]]
    seconds: float
    tokens: float
    peak_bytes: float | None = None


Runs = Sequence[RunScore]


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The runs of one arm: interquartile mean of the scores, means of the costs per run."""

    arm: str
    score: Interval
    scores: tuple[float, ...]
    seconds: float
    tokens: float
    peak_bytes: float | None
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairSummary:
    """Arm `a` against arm `b` on the seeds that both have, with simultaneous intervals.

    `difference` is of the interquartile means, `by_seed` each seed's, `by_prompt` the mean
    difference on the same prompts (None if evaluations were not recorded), the last the
    probability that a run of `a` scores above one of `b`, ties ½.
    """

    a: str
    b: str
    difference: Interval
    by_seed: tuple[float, ...]
    by_prompt: Interval | None
    probability_of_improvement: Interval

    @property
    def statement(self) -> str:
        """What may be said."""
        low, high = self.difference.low, self.difference.high
        if low > 0:
            return f"{self.a} scores higher than {self.b}"
        return f"{self.b} scores higher than {self.a}" if high < 0 else NO_DIFFERENCE


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms, every pair of them, and the confidence of the pairs' intervals."""

    measure: str
    arms: tuple[ArmSummary, ...]
    pairs: tuple[PairSummary, ...]
    pair_confidence: float
    seeds: int
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found = asdict(self)
        for pair, one in zip(found["pairs"], self.pairs, strict=True):
            pair["statement"] = one.statement
        return found


def compare(
    runs: Mapping[str, Runs],
    models: Mapping[str, Sequence[str]] | None = None,
    baseline: str | None = None,
) -> Comparison:
    """The comparison of arms, in the order given; `models` names those that an arm holds.

    The pairs are all there are, or every arm with the `baseline`. Intervals of the k pairs have a
    confidence of 1 − 0.05/k each [Bonferroni].
    """
    arms = [_arm(name, scores, (models or {}).get(name, ())) for name, scores in runs.items()]
    pairs = list(combinations(runs, 2))
    if baseline is not None:
        pairs = [(name, baseline) for name in runs if name != baseline]
    confidence = 1 - 0.05 / max(len(pairs), 1)
    seeds = min((len(scores) for scores in runs.values()), default=0)
    notes = []
    if seeds < ENOUGH:
        worth = (
            "too few for an interval" if seeds < LEAST else "intervals are wide and may not hold"
        )
        notes.append(f"{seeds} seed{'s' * (seeds != 1)}: {worth}; use {ENOUGH} or more for a claim")
    measures = sorted({run.measure for scores in runs.values() for run in scores})
    return Comparison(
        measure=", ".join(measures),
        arms=tuple(arms),
        pairs=tuple(_pair(a, b, runs[a], runs[b], confidence) for a, b in pairs),
        pair_confidence=confidence,
        seeds=seeds,
        notes=tuple(notes),
    )


def score_of(run: Run, arm: str, seed: int, stage: str, peak_bytes: float | None) -> RunScore:
    """What a finished run says; `stage` is the one whose last evaluation is the score."""
    try:
        result = run.info()["evaluation"][stage]["after"]
    except KeyError:
        raise KeelError(f"run {run.folder.path} has no evaluation after stage {stage}") from None
    last = max((p.step for p in run.evaluation_places()), default=0)
    greedy = [row for row in run.evaluation(last, stage) if row["mode"] == "greedy"]
    passed = {
        row["prompt_id"]: float(row["reward"] if row["passed"] is None else row["passed"])
        for row in greedy
        if row["passed"] is not None or row["reward"] is not None
    }
    columns = run.columns(stage)
    names = ("eval/pass@1", "eval/reward", "reward")
    curves = {n: (columns[n].steps, columns[n].values) for n in names if n in columns}
    tokens = columns["rollout/tokens"].values if "rollout/tokens" in columns else ()
    return RunScore(
        arm=arm,
        seed=seed,
        score=math.nan if result["mean"] is None else float(result["mean"]),
        measure=str(result.get("measure", "pass@1")),
        passed=passed,
        curves=curves,
        seconds=run.seconds(stage),
        tokens=float(np.nansum(tokens)),
        peak_bytes=peak_bytes,
    )


# ---------------------------------------------------------------- statistics


def wins(x: Array, y: Array) -> Array:
    """ψ_ij = 1[x_i > y_j] + ½ 1[x_i = y_j]; its mean is the probability of improvement.

    Source: Agarwal et al. 2021 [2108.13264] §4.3 (for one task).
    """
    return np.asarray((x[:, None] > y) + 0.5 * (x[:, None] == y))


def levels(n: int, confidence: float) -> tuple[float, float]:
    """Percentile levels of a bootstrap over n values: those of Student's t with n − 1 degrees.

    Φ(±t_{(1+confidence)/2, n−1}). The plain percentile interval is too narrow for few values.
    Source: Hesterberg 2015, Am. Stat. 69:371, §5.3 (there also widened by √(n/(n−1)), which covers
    more than 97 % here; `studies/coverage.py`).
    """
    if n < 2:
        return 0.0, 1.0
    low = NormalDist().cdf(-student_quantile((1 + confidence) / 2, n - 1))
    return low, 1 - low


def iqm_interval(scores: Array) -> Interval:
    """Interquartile mean over seeds with its bootstrap interval.

    Infinite for one or two seeds, and for a few that happen to agree (see `around`).
    """
    n = len(scores)
    middle, low, high = (float(ends[0]) for ends in band(scores[:, None]))
    if n < ENOUGH and low == high:
        low, high = -math.inf, math.inf
    return Interval(middle, low, high, n)


def band(values: Array, confidence: float = 0.95, seed: int = 0) -> tuple[Array, Array, Array]:
    """Interquartile mean of curves (seeds, steps) at each step, and the ends of its interval."""
    n = len(values)
    middle = iqm(values, axis=0)
    if n < LEAST:
        return middle, middle, middle
    drawn = iqm(values[_places(n, seed)], axis=1)
    low, high = np.quantile(drawn, levels(n, confidence), axis=0)
    return middle, low, high


def around(estimate: float, drawn: Array, n: int, confidence: float) -> Interval:
    """estimate ± t_{(1+confidence)/2, n−1} · s, with s the standard deviation of the bootstrap.

    Quantiles of the bootstrap cannot leave the range of n values, which is too narrow for three
    seeds and for the high confidences of many pairs (`studies/coverage.py`). A few values
    that happen to agree say nothing about their deviation: infinite ends.
    Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, §13.1 (there with z).
    """
    deviation = float(drawn.std())
    if n < LEAST or (n < ENOUGH and deviation < 1e-12):
        return Interval(estimate, -math.inf, math.inf, n)
    half = student_quantile((1 + confidence) / 2, n - 1) * deviation
    return Interval(estimate, estimate - half, estimate + half, n)


def difference_interval(x: Array, y: Array, confidence: float = 0.95) -> Interval:
    """Difference of the interquartile means of runs with the same seeds, (n,) each."""
    places = _places(len(x), 0)
    drawn = iqm(x[places], axis=1) - iqm(y[places], axis=1)
    return around(float(iqm(x) - iqm(y)), drawn, len(x), confidence)


def improvement_interval(x: Array, y: Array, confidence: float = 0.95) -> Interval:
    """Probability of improvement of runs with the same seeds, (n,) each, with its interval.

        D_i = mean_j ψ_ij + mean_j ψ_ji,   ψ of `wins`
        Var = Σ (D_i − D̄)² / (n(n − 1))          [DeLong et al. 1988, Biometrics 44:837]

    The ends are Wilson's for a sample of size p(1 − p)/Var with Student's t for z: unlike those of
    a bootstrap they have a width at 0 and 1 (there the size is n).
    """
    n = len(x)
    won = wins(x, y)
    chance = float(won.mean())
    if n < LEAST:
        return Interval(chance, 0.0, 1.0, n)
    variance = float((won.mean(axis=1) + won.mean(axis=0)).var(ddof=1)) / n
    size = chance * (1 - chance) / variance if 0 < chance < 1 and variance > 0 else n
    return Interval(
        chance, *wilson_ends(chance, size, student_quantile((1 + confidence) / 2, n - 1)), n
    )


def _places(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, n, size=(RESAMPLES, n))


def _arm(name: str, runs: Sequence[RunScore], models: Sequence[str]) -> ArmSummary:
    scores = np.array([run.score for run in runs])
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return ArmSummary(
        arm=name,
        score=iqm_interval(scores),
        scores=tuple(scores.tolist()),
        seconds=float(np.mean([run.seconds for run in runs])),
        tokens=float(np.mean([run.tokens for run in runs])),
        peak_bytes=float(np.median(peaks)) if peaks else None,
        models=tuple(models),
    )


def _pair(a: str, b: str, runs_a: Runs, runs_b: Runs, confidence: float) -> PairSummary:
    """Compare two arms on the seeds that both have: those share a start and prompts."""
    other = {run.seed: run for run in runs_b}
    pairs = [(run, other[run.seed]) for run in runs_a if run.seed in other]
    x, y = (np.array([pair[side].score for pair in pairs]) for side in (0, 1))
    n = len(pairs)
    if not n:
        nothing = Interval(math.nan, -math.inf, math.inf, 0)
        return PairSummary(a, b, nothing, (), None, Interval(math.nan, 0.0, 1.0, 0))
    return PairSummary(
        a,
        b,
        difference_interval(x, y, confidence),
        tuple((x - y).tolist()),
        _by_prompt(pairs, confidence),
        improvement_interval(x, y, confidence),
    )


def _by_prompt(pairs: Sequence[tuple[RunScore, RunScore]], confidence: float) -> Interval | None:
    """The mean difference on the same prompts with the same seeds.

    The bootstrap draws seeds and prompts, each with replacement, since both are samples.
    """
    runs = [run for pair in pairs for run in pair]
    prompts = [p for p in runs[0].passed if all(p in run.passed for run in runs)]
    if len(pairs) < 2 or len(prompts) < 2:
        return None
    gap_SP = np.array([[x.passed[p] - y.passed[p] for p in prompts] for x, y in pairs])
    generator = np.random.default_rng(2)
    shares = [
        generator.multinomial(size, np.full(size, 1 / size), RESAMPLES) / size
        for size in gap_SP.shape
    ]
    drawn = np.einsum("bs,sp,bp->b", shares[0], gap_SP, shares[1])
    return replace(around(float(gap_SP.mean()), drawn, len(pairs), confidence), n=len(prompts))
