"""`model.autocast` of a run on a CPU: what "auto" decides is kept, and what bfloat16 moves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from keel.models import policy
from keel.platform.signals import Interrupted
from keel.preflight.check import check
from keel.training.run import train
from tests.cluster.commands import metrics as metrics_of
from tests.cluster.test_processes import train as train_on
from tests.soak.killing import differences
from tests.training.small import FAST, Stop, info, metrics, notes, run, small

AUTO = 'model.autocast="auto"'
ROUNDED = ('model.autocast="bfloat16"', "algorithm.corrections.kind=truncate")
GAP = "sampling/sampling_logp_difference/mean"
ALWAYS, NEVER = math.inf, 0.0
"""Values of `policy.WORTH` at which any timing finds that bfloat16 pays, and that it does
not."""


@pytest.mark.parametrize(("worth", "expected"), [(ALWAYS, "bfloat16"), (NEVER, "float32")])
def test_auto_is_what_the_timing_says_and_noted(
    worth: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "WORTH", worth)
    folder = run(tmp_path / "auto", AUTO, "minibatches=2")
    assert info(folder)["autocast"] == expected
    assert any(f'"auto": {expected} from here on' in note for note in notes(folder))
    gap = metrics(folder)[0][GAP]
    assert gap > 1e-5 if expected == "bfloat16" else gap < 2e-6


def test_a_resumed_run_keeps_the_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the same bytes, although a timing would now decide otherwise."""
    monkeypatch.setattr(policy, "WORTH", ALWAYS)
    recipe = small(AUTO)
    whole = train(recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "resumed", callbacks=[Stop(2)])
    monkeypatch.setattr(policy, "WORTH", NEVER)
    resumed = train(None, tmp_path / "resumed", resume=True)
    assert info(resumed)["autocast"] == "bfloat16"
    assert differences(whole.path, resumed.path) == []


@pytest.mark.slow
def test_two_processes_round_nearly_as_one(tmp_path: Path) -> None:
    """The gradient of a micro-batch is rounded to bfloat16 before it is added, and ranks cut other
    micro-batches: the largest difference found is 1e-5 of the norm."""
    one, two = (
        metrics_of(train_on(tmp_path / str(count), count, *ROUNDED, "steps=2")) for count in (1, 2)
    )
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4), name


def test_check_states_the_effect_and_what_is_not_corrected() -> None:
    keys = [*FAST, "steps=2", "algorithm.divergence=none"]
    (stage,) = (plain := check("tiny", [*keys, ROUNDED[0]], runs=False)).stages
    assert "the gradient by" in str(stage.figures["bfloat16 autocast"])
    (finding,) = (one for one in plain.findings if one.kind == "bfloat16-uncorrected")
    assert finding.key == "algorithm.corrections.kind"
    corrected = check("tiny", [*keys, *ROUNDED], runs=False)
    assert "bfloat16-uncorrected" not in {one.kind for one in corrected.findings}
    exact = check("tiny", keys, runs=False)
    assert "bfloat16 autocast" not in exact.stages[0].figures


def test_check_decides_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for worth, start in ((ALWAYS, "bfloat16, since"), (NEVER, "float32, since")):
        monkeypatch.setattr(policy, "WORTH", worth)
        (stage,) = check("tiny", [*FAST, AUTO], runs=False).stages
        assert str(stage.figures["autocast"]).startswith(start)
        assert ("bfloat16 autocast" in stage.figures) is (worth == ALWAYS)
