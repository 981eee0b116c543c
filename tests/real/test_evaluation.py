"""A trained model is evaluated on real problems, and by the example that trains it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.cli.main import main
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from tests.real.model import model_name
from tests.shared import ROOT, shared_path

pytestmark = pytest.mark.real


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


def test_example_with_a_trained_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers some of the sums before training."""
    monkeypatch.chdir(ROOT)
    words = ["steps=1", "rollout.group_size=4", "evaluation.every=0", "evaluation.prompts=40"]
    words += [f"model.name={model_name()}", "threads=1", "--run", str(tmp_path), "--quiet"]
    assert main(["train", "examples/06_trained_model.toml", *words]) == 0
    before = load(tmp_path).info()["evaluation"]["rl"]["before"]
    assert 0.15 < before["mean"] < 0.6
