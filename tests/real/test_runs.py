"""A trained model through whole runs: kill, resume, export, evaluation, the example.

`python -m studies.real_model` does all kinds of stages, and more prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.export import export
from tests.real.cases import recipe
from tests.real.export import furthest_log_prob
from tests.real.model import model_name
from tests.shared import ROOT, shared_path
from tests.soak.killing import Instant, Outcome, killed, whole

pytestmark = pytest.mark.real

KILLED = [pytest.param(case, marks=pytest.mark.xdist_group(case)) for case in ("grpo", "dpo-lora")]
Outcomes = Callable[[str], tuple[Path, Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Each case run whole, and killed after its third step; the second was its checkpoint."""

    @functools.cache
    def outcome(case: str) -> tuple[Path, Outcome]:
        folder = tmp_path_factory.mktemp(case)
        made = recipe(case, folder)
        whole(made, folder / "whole")
        plan = [Instant("row", 3)]
        return folder / "whole", killed(made, folder / "killed", folder / "whole", plan)

    return outcome


def test_evaluation_on_gsm8k() -> None:
    """100 problems: the model is right in 3 % of 200, 95 % interval 1.4 % to 6.4 %."""
    file = shared_path("data/gsm8k/test.jsonl")
    result = evaluate(
        model_name(),
        task="jsonl",
        task_keys=[f"path={file}", "prompt={question}", "answer=answer"],
        rewards=["numeric_match"],
        prompts=100,
        max_tokens=256,
    )
    assert (result["n"], result["measure"]) == (100, "pass@1")
    assert 0 < result["mean"] < 0.12
    assert 80 < result["mean_length"] < 200


@pytest.mark.parametrize("case", KILLED)
def test_killed_and_resumed_run_ends_the_same(case: str, outcomes: Outcomes) -> None:
    _, outcome = outcomes(case)
    assert outcome.differences == []
    assert (outcome.kills, outcome.resumes) == ([Instant("row", 3)], 1)


@pytest.mark.parametrize("case", KILLED)
def test_exported_model_has_the_policys_log_probs(
    case: str, outcomes: Outcomes, tmp_path: Path
) -> None:
    """In plain transformers, float32; a merged adapter rounds once more. Three steps moved it."""
    run, _ = outcomes(case)
    exported = export(run, tmp_path / "exported")
    assert furthest_log_prob(run, exported) < 1e-4
    assert furthest_log_prob(run, Path(model_name())) > 1e-3


def test_recipe_for_a_trained_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers some of the sums before training."""
    monkeypatch.chdir(ROOT)
    words = ["steps=1", "rollout.group_size=4", "evaluation.every=0", "evaluation.prompts=40"]
    words += [f"model.name={model_name()}", "threads=1", "--run", str(tmp_path), "--quiet"]
    assert main(["train", "smollm2-grpo", *words]) == 0
    before = load(tmp_path).info()["evaluation"]["rl"]["before"]
    assert 0.15 < before["mean"] < 0.6
