"""Curves of a stage from its metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keel.analysis.metrics import look_up, panels_of, series_of, smooth, tables, with_first
from keel.runs.reader import Column


def column(values: list[float], first: int = 1) -> Column:
    return Column(np.arange(first, first + len(values), dtype=float), np.array(values))


def test_every_panel_is_explained_by_the_glossary() -> None:
    for panels in tables().values():
        for panel in panels:
            assert panel.help, panel.key
            for line in panel.lines:
                assert look_up(line.metric) is not None, line.metric


def test_panels_without_metrics_are_left_out() -> None:
    assert [panel.key for panel in panels_of("rl", ["entropy", "num_tokens"])] == ["entropy"]
    assert [panel.key for panel in panels_of("dqn", ["q/mean"])] == ["value"]


def test_recorded_metrics_have_panels_of_their_own() -> None:
    names = ["game/wins", "digits [0]", "entropy", "game/losses", "rewards/a/mean", "a<b>"]
    found = panels_of("rl", names)[-3:]
    assert [panel.title for panel in found] == ["a<b>", "digits [0]", "game"]
    assert {panel.help for panel in found} == {"Recorded by a reward function with log_metric."}
    columns = {name: column([1.0, 2.0]) for name in names}
    labels = [[one.label for one in series_of(panel, columns)] for panel in found]
    assert labels == [["a<b>"], ["digits [0]"], ["losses", "wins"]]


@pytest.mark.parametrize(
    ("kind", "before", "name", "value"),
    [
        ("evaluation", {"measure": "pass@1", "mean": 0.46, "low": 0.4}, "eval/pass@1", 0.46),
        ("evaluation", {"measure": "pass@1", "mean": 0.46, "low": 0.4}, "eval/pass@1/low", 0.4),
        ("evaluation", {"measure": "reward", "mean": -2.0}, "eval/reward", -2.0),
        ("evaluation", {"mean": 0.1, "pass@4": {"mean": 0.5}}, "eval/pass@4", 0.5),
        ("measured", {"kind": "pairs", "accuracy": {"mean": 0.5}}, "eval/accuracy", 0.5),
        ("measured", {"kind": "pairs", "log_loss": 0.69}, "eval/log_loss", 0.69),
    ],
)
def test_evaluations_begin_before_the_first_step(
    kind: str, before: dict[str, Any], name: str, value: float
) -> None:
    columns = {name: Column(np.array([6.0, 12.0]), np.array([0.6, 0.5])), "reward": column([1.0])}
    found = with_first(columns, {kind: {"rl": {"before": before}}}, "rl")
    assert found[name].steps.tolist() == [0, 6, 12]
    assert found[name].values.tolist() == [value, 0.6, 0.5]
    assert found["reward"].steps.tolist() == [1]
    assert with_first(columns, {}, "rl")[name].steps.tolist() == [6, 12]
    unknown = {kind: {"rl": {"before": {"measure": "pass@1", "mean": None}}}}
    assert with_first(columns, unknown, "rl")[name].steps.tolist() == [6, 12]


def test_each_kind_of_stage_explains_its_own_loss() -> None:
    texts = {kind: panels_of(kind, ["loss"])[0].help for kind in ("sft", "dpo", "dqn")}
    assert len({*texts.values()}) == 3
    assert "demonstrations" in texts["sft"]
    assert not any("divergence" in text for text in texts.values())


def test_alone_completions_have_another_panel_in_place_of_groups() -> None:
    names = ["num_tokens", "learning_rate"]
    for panel in tables()["rl"]:
        names += [line.metric for line in panel.lines]
    keys = [panel.key for panel in panels_of("rl", names, alone=True)]
    assert keys == ["reward", "value", "kl", "entropy", "length", "update"]
    without = [name for name in names if not name.startswith("value/")] + ["reward_std"]
    keys = [panel.key for panel in panels_of("rl", without, alone=True)]
    assert keys == ["reward", "spread", "kl", "entropy", "length", "update"]
    assert len(panels_of("rl", names)) == 7


def test_components_are_plotted_where_there_are_several() -> None:
    panel = panels_of("rl", ["reward"])[0]
    columns = {"reward": column([1.0, 2.0]), "rewards/a/mean": column([3.0, 4.0])}
    assert [one.label for one in series_of(panel, columns)] == ["training"]
    columns["rewards/b/mean"] = column([5.0, 6.0])
    assert [one.label for one in series_of(panel, columns)] == ["training", "a", "b"]


def test_bands_and_steps_without_a_value() -> None:
    panel = panels_of("rl", ["reward"])[0]
    columns = {
        "reward": column([1.0, np.nan, 3.0]),
        "reward_std": column([0.5, 0.5], first=1),
        "eval/pass@1": column([0.5], first=3),
        "eval/pass@1/low": column([0.25], first=3),
        "eval/pass@1/high": column([0.75], first=3),
    }
    reward, evaluated = series_of(panel, columns)
    assert reward.steps.tolist() == [1, 3]
    assert reward.low is not None
    assert reward.low[0] == 0.5
    assert np.isnan(reward.low[1])
    assert (evaluated.low, evaluated.high) == (np.array([0.25]), np.array([0.75]))


def test_long_curves_are_thinned_to_means_of_neighbours() -> None:
    panel = panels_of("rl", ["entropy"])[0]
    values = np.arange(10_000, dtype=float)
    (series,) = series_of(panel, {"entropy": Column(values + 1, values)}, points=100)
    assert len(series.steps) == 100
    np.testing.assert_allclose(series.values, values.reshape(100, 100).mean(axis=1))


def test_games_count_the_steps_of_their_environments() -> None:
    columns = {"environment_steps": column([100.0, 250.0]), "q/mean": column([1.0, 2.0])}
    (panel,) = panels_of("dqn", list(columns))
    assert series_of(panel, columns)[0].steps.tolist() == [100, 250]


def test_smoothing_leaves_out_what_is_not_known() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(smooth(values, 3), [1, 2, 4, 4, 5, np.nan, np.nan])


def test_smoothing_is_a_moving_mean() -> None:
    values = np.array([1.0, 2, 6, 3, 8])
    expected = [(1 + 2) / 2, (1 + 2 + 6) / 3, (2 + 6 + 3) / 3, (6 + 3 + 8) / 3, (3 + 8) / 2]
    assert smooth(values, 3) == pytest.approx(expected, rel=1e-12)
    assert smooth(values, 1).tolist() == values.tolist()
    assert smooth(values, 99) == pytest.approx([4.0] * 5, rel=1e-12)


def test_smoothed_lines_keep_their_raw_values() -> None:
    panel = panels_of("rl", ["entropy"])[0]
    (series,) = series_of(panel, {"entropy": column([1.0, 2.0, 6.0])}, window=3)
    assert series.raw is not None
    assert (series.raw[1].tolist(), series.values.tolist()) == ([1, 2, 6], [1.5, 3, 4])
