"""The cost of a judge: the forecast, and what a server bills for the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import keel
from keel.config.load import load_recipe
from keel.config.sources import RewardSource
from keel.preflight.check import check
from keel.preflight.judge_cost import Forecast, forecast_judge, over_budget
from keel.training.stages.rl import RLStage
from keel.types import Group, Prompt
from tests.rewards.judge_made import completion
from tests.rewards.judge_server import JudgeServer

GROUPS = [Group(Prompt("p", "2+2="), (completion("four"), completion("five")))]
PRICES = {"price_in": 1.0, "price_out": 10.0}


def stage(*overrides: str) -> RLStage:
    found = load_recipe(
        "tiny",
        ["steps=20", "rollout.prompts_per_step=10", "rollout.group_size=4", *overrides],
    ).stages[-1]
    assert isinstance(found, RLStage)
    return found


def judged(server: JudgeServer) -> dict[str, Any]:
    """A recipe whose reward is a judge on the server."""
    options = {"model": "judge-1", "url": server.url, "low": 0, "high": 100, **PRICES}
    return {
        "extends": "tiny",
        "rewards": {"functions": [{"function": "judge", "options": options}]},
    }


def forecast(validation: int = 0, *overrides: str, **options: Any) -> Forecast:
    source = RewardSource(function="judge", options={"model": "m", **options})
    found = forecast_judge(source, GROUPS, stage(*overrides), validation, "rewards.functions.0")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("options", "of_a_step"),
    [
        ({}, 10 * 4),
        ({"mode": "pairwise"}, 10 * 4 * 2),  # two rivals each, in both orders
        ({"mode": "pairwise", "both_orders": False}, 10 * 4),
        ({"mode": "pairwise", "against": "other", "both_orders": False}, 10 * 4),
    ],
)
def test_forecast_counts_the_questions_of_all_steps(
    options: dict[str, Any], of_a_step: int
) -> None:
    assert forecast(**options).questions == 20 * of_a_step


def test_forecast_counts_the_questions_of_every_evaluation() -> None:
    """Before, after 5, 10 and 15 steps, and after: one greedy answer and four sampled of each."""
    found = forecast(7, "evaluation.every=5", "evaluation.samples=4")
    assert found.evaluation == 5 * 7 * 5
    assert found.questions == 20 * 40 + found.evaluation
    # A greedy answer alone has no rival; four of a prompt make four pairs in both orders.
    paired = forecast(7, "evaluation.every=5", "evaluation.samples=4", mode="pairwise")
    assert paired.evaluation == 5 * 7 * 8


def test_forecast_interval_holds_the_estimate() -> None:
    found = forecast(5, **PRICES)
    dollars = [cost.dollars for cost in found.costs]
    assert dollars == sorted(dollars)
    assert dollars[0] > 0
    assert found.costs[2].tokens_out == found.questions * 512
    refilled = forecast(5, "rollout.dynamic_sampling=true", "rollout.max_refills=3", **PRICES)
    train = found.questions - found.evaluation
    assert refilled.costs[2].tokens_out == 512 * (4 * train + found.evaluation)
    assert refilled.costs[1] == found.costs[1]


def test_forecast_is_none_without_samples() -> None:
    source = RewardSource(function="judge", options={"model": "m"})
    assert forecast_judge(source, [], stage(), 0, "k") is None


@pytest.mark.parametrize(
    ("share", "severity", "words"),
    [(0.5, "error", " ends "), (2.0, "warning", "probably ends"), (1e9, None, "")],
)
def test_budget_below_the_forecast_is_a_finding(
    share: float, severity: str | None, words: str
) -> None:
    plain = forecast(**PRICES)
    budget = share * plain.costs[0].dollars
    assert share > 2 or budget < plain.costs[1].dollars
    findings = list(over_budget([forecast(budget=budget, **PRICES)]))
    assert [f.severity for f in findings] == ([severity] if severity else [])
    for finding in findings:
        assert words in finding.what
        assert finding.key == "rewards.functions.0.options.budget"


def test_stages_that_share_a_cache_share_the_budget() -> None:
    one = forecast(**PRICES)
    budget = 1.5 * one.costs[2].dollars
    held = forecast(budget=budget, **PRICES)
    assert list(over_budget([held])) == []
    assert len(list(over_budget([held, forecast(budget=budget, **PRICES)]))) == 1
    assert list(over_budget([held, forecast(budget=budget, label="other", **PRICES)])) == []


def test_token_budget_is_named() -> None:
    (finding,) = over_budget([forecast(budget_tokens=10)])
    assert finding.key.endswith("options.budget_tokens")
    assert finding.severity == "error"


def test_run_is_billed_within_the_forecast_interval(tmp_path: Path) -> None:
    """The server bills a token for four bytes read and for each character written."""
    with JudgeServer() as server:
        evaluation = {"every": 2, "prompts": 6, "samples": 2}
        recipe = {**judged(server), "evaluation": evaluation, "steps": 4}
        report = check(recipe, runs=False)
        assert server.log == []
        keel.train(load_recipe(recipe), tmp_path / "run")
        billed_in, billed_out = server.billed
    run = keel.load(tmp_path / "run")
    spent = (billed_in * 1.0 + billed_out * 10.0) / 1e6
    judge = report.stages[-1].judge
    assert judge["low"] <= spent <= judge["high"]
    assert report.total["cost"] == pytest.approx(judge["estimate"], abs=1e-4)
    # Metrics hold what evaluations cost too; the note at the end, what was billed in all.
    rows = run.metrics()
    assert sum(row["judge/dollars"] for row in rows) > 0
    assert sum(row.get("eval/judge/dollars", 0.0) for row in rows) > 0
    notes = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert f"${spent:.6g}" in notes


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        # Groups whose answers are worth the same are refilled, twice at the most.
        (["rollout.dynamic_sampling=true", "rollout.max_refills=2"], 3 * 2 * 2),
        (["algorithm=remax"], 2 * 2 + 2),
    ],
    ids=["refills", "greedy"],
)
def test_metrics_count_all_questions_of_a_step(keys: list[str], asked: int, tmp_path: Path) -> None:
    with JudgeServer(lambda request: '{"reason": "alike", "score": 50}') as server:
        sizes = ["steps=1", "evaluation.prompts=0", "rollout.prompts_per_step=2"]
        keel.train(
            load_recipe(judged(server), [*sizes, "rollout.group_size=2", *keys]), tmp_path / "run"
        )
        (row,) = keel.load(tmp_path / "run").metrics()
        assert len(server.log) <= row["judge/asked"] == asked
        billed = [rate * tokens for rate, tokens in zip((1.0, 10.0), server.billed, strict=True)]
        assert row["judge/dollars"] == pytest.approx(sum(billed) / 1e6)
