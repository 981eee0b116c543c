"""The glossary of metrics, and the curves of a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.analysis.metrics import (
    look_up,
    markdown,
    panels_of,
    sections,
    series_of,
    smooth,
    tables,
    unknown,
    with_first,
)
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
    assert {panel.help for panel in found} == {
        "Recorded by a reward function with log_metric, or by a callback with control.log."
    }
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
    assert keys == ["reward", "value", "kl", "entropy", "length", "update", "sets"]
    without = [name for name in names if not name.startswith("value/")] + ["reward_std"]
    keys = [panel.key for panel in panels_of("rl", without, alone=True)]
    assert keys == ["reward", "spread", "kl", "entropy", "length", "update", "sets"]
    assert len(panels_of("rl", names)) == 8


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


PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m keel.analysis.metrics > docs/metrics.md"
    )


def test_every_entry_is_there_once_and_says_something() -> None:
    metrics = [metric for section in sections().values() for metric in section]
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names))
    for metric in metrics:
        assert metric.meaning.endswith((".", "].")), metric.name
        assert metric.unit, metric.name
        assert f"\n- `{metric.name}`" in markdown()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward", "reward"),
        ("rewards/exact_match/mean", "rewards/*/mean"),
        ("rewards/module:function/std", "rewards/*/std"),
        ("eval/pass@1", "eval/pass@1"),
        ("eval/pass@8", "eval/pass@*"),
        ("eval/pass@1/low", "eval/*/low"),
        ("eval/pass@8/high", "eval/*/high"),
        ("eval/mean_length", "eval/mean_length"),
        ("rewards/f/failures", "rewards/*/failures"),
    ],
)
def test_names_and_patterns_are_found(name: str, entry: str) -> None:
    metric = look_up(name)
    assert metric is not None
    assert metric.name == entry


def test_unknown_names_are_told() -> None:
    names = ["reward", "rewards/x/median", "Reward", "eval", "kl", "grad_norm/max"]
    assert unknown(names) == ["rewards/x/median", "Reward", "eval", "grad_norm/max"]


def test_the_names_that_trl_logs_are_kept() -> None:
    # GRPOTrainer of TRL 1.16; step_time lives in timings.jsonl, being no function of the seed.
    trl = """
        loss learning_rate grad_norm num_tokens reward reward_std frac_reward_zero_std
        rewards/f/mean rewards/f/std completions/mean_length completions/min_length
        completions/max_length completions/clipped_ratio completions/mean_terminated_length
        completions/min_terminated_length completions/max_terminated_length entropy kl
        clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean
        sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
        sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean
        sampling/importance_sampling_ratio/max
    """
    assert unknown(trl.split()) == []
