"""The robust summaries, against loops and known cases; the summary of a step's rollouts."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from keel.analysis.diagnosis.completions import similarities
from keel.analysis.diagnosis.history import (
    MOST_ROWS,
    StepRollouts,
    holds_since,
    read_step,
    rolling_medians,
    summarise,
    trend,
)
from tests.analysis.written_runs import completion, written_run


def test_rolling_medians_are_those_of_a_loop() -> None:
    x = np.random.default_rng(0).normal(size=30)
    loop = [float(np.median(x[i : i + 5])) for i in range(26)]
    assert rolling_medians(x).tolist() == loop
    assert rolling_medians(x[:4]).size == 0


def test_slope_is_theils_and_sens_and_ignores_outliers() -> None:
    x = 0.5 * np.arange(15.0)
    x[[3, 9]] = 1e6
    slopes = [(x[j] - x[i]) / (j - i) for i, j in itertools.combinations(range(15), 2)]
    assert trend(x).change == pytest.approx(14 * float(np.median(slopes)))
    assert trend(x).rises()
    assert not trend(x).falls()


def test_p_is_small_for_trends_seldom_for_noise() -> None:
    rng = np.random.default_rng(0)
    alarms = [trend(rng.normal(size=40)).p < 0.01 for _ in range(200)]
    assert sum(alarms) <= 8  # 2 expected
    assert trend(rng.normal(size=40) + np.arange(40) / 10).rises()


@pytest.mark.parametrize("values", [[], [1.0] * 4, [float("nan")] * 9, [1.0] * 30])
def test_too_few_values_or_a_constant_have_no_trend(values: list[float]) -> None:
    found = trend(np.array(values))
    assert (found.p, found.rises(), found.falls()) == (1.0, False, False)


def test_a_condition_holds_from_the_last_window_below_on() -> None:
    x = np.r_[np.zeros(10), np.ones(10)]
    since = holds_since(x, 1.0)
    assert since == 12  # the first of the last medians of five that are 1
    assert holds_since(np.ones(10), 1.0) == 0
    assert holds_since(x[::-1], 1.0) is None
    assert holds_since(np.ones(4), 1.0) is None
    x[15] = 0.0  # one step is no interruption
    assert holds_since(x, 1.0) == since


def summary(*rows: object) -> StepRollouts:
    records = [asdict(row) for row in rows]  # type: ignore[call-overload]
    return summarise(3, [{**record, **record.pop("values")} for record in records])


def test_summary_counts_the_policys_tokens_apart_from_others() -> None:
    one = summary(completion(0, 1.0, (5, 6, 7), context=2, advantage=0.5, finish="length"))
    assert one.written.tolist() == [3]
    assert one.context.tolist() == [2]
    assert one.truncated.tolist() == [True]
    assert one.advantage.tolist() == [0.5]


def test_repetition_is_the_share_of_ngrams_seen_before() -> None:
    same, other, short = (7,) * 13, tuple(range(13)), (7,) * 11
    found = summary(*(completion(0, 1.0, tokens) for tokens in (same, other, short))).repetition
    assert found[:2].tolist() == [pytest.approx(0.9), 0.0]
    assert np.isnan(found[2])


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("<answer></answer>", True),
        ("\\boxed{}", True),
        ("####", True),
        (">>", True),
        ("<answer>4</answer>", False),
        ("\\boxed{4}", False),
        ("42", False),
        ("", False),
        (" ", False),
    ],
)
def test_bare_completions_hold_markers_alone(text: str, bare: bool) -> None:
    assert summary(completion(0, 1.0, completion=text)).bare.tolist() == [bare]


def test_similarity_is_that_of_the_policys_token_sets() -> None:
    rows = [completion(0, 1.0, (*range(a, a + 9), a), context=1) for a in (0, 3, 50)]
    words = summary(*rows, completion(0, 1.0)).words
    assert similarities(words).tolist() == [
        [1, 6 / 12, 0, 0],
        [6 / 12, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],  # nothing of the environment's, so nothing to compare
    ]


def test_centred_values_have_mean_zero_in_each_group() -> None:
    one = summary(*(completion(g, r) for g, r in ((0, 1.0), (0, 0.0), (1, 5.0))))
    assert one.centred(one.reward).tolist() == [0.5, -0.5, 0.0]
    assert np.isnan(one.centred(np.array([np.nan, 1.0, 1.0]))[0])


def test_a_step_is_read_up_to_a_bound(tmp_path: Path) -> None:
    rows = [completion(at // 8, float(at), (1,)) for at in range(MOST_ROWS + 40)]
    run = written_run(tmp_path / "run", {"reward": [1.0, 1.0]}, {2: rows})
    one = read_step(run.folder, 0, 2)
    assert one is not None
    assert one.reward.tolist() == list(range(MOST_ROWS))
    assert read_step(run.folder, 0, 1) is None
