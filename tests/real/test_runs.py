"""A trained model through whole runs: kill, resume, export.

`python -m studies.real_model` does all kinds of stages, and more prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.training.export import export
from tests.real.cases import recipe
from tests.real.export import furthest_log_prob
from tests.real.model import model_name
from tests.soak.killing import Instant, Outcome, killed, whole

pytestmark = pytest.mark.real

KILLED = ("grpo", "dpo-lora")


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
