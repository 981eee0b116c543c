"""How fast a step was: counted operations of a batch, what is recorded, the line of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from keel.analysis.costs import attention_pairs
from keel.analysis.progress import speed
from keel.config.load import load_recipe
from keel.config.model import BuildModel, Model
from keel.learn.batch import from_groups
from keel.models.policy import load_policy
from keel.runs.reader import load
from keel.training.run import train
from keel.training.speed import StepWork, operations_of, speeds_of
from keel.types import Completion, Group, Prompt
from keel.view.library import Library, panels, status_of


def test_speeds_leave_out_what_is_unknown() -> None:
    assert speeds_of(StepWork(100.0), 10.0, 0.0) == {"speed/step": 10.0}
    assert speeds_of(StepWork(100.0, 2.0, 50.0, 10.0), 10.0, 20.0) == {
        "speed/step": 10.0,
        "speed/generation": 50.0,
        "speed/update": 5.0,
        "mfu/update": 0.25,
    }
    assert speeds_of(StepWork(0.0), 10.0, 1.0) == {}


def test_line_of_a_step_is_short() -> None:
    rates = {"speed/step": 3512.4, "speed/generation": 9800.0, "speed/update": 6100.0}
    assert speed(rates) == "3,512 tok/s (gen 9,800, update 6,100)"
    assert speed({**rates, "mfu/update": 0.384}).endswith("update 6,100, MFU 38%)")
    assert speed({"speed/step": 7.0, "speed/update": 9.0}) == "7 tok/s"
    assert speed({}) == ""


def test_operations_of_a_batch_are_those_of_its_lengths() -> None:
    """Two answers of 3 and 5 tokens to a prompt of 4; the second alone has a gradient."""
    policy = load_policy(Model(build=BuildModel(hidden_size=32, layers=2, heads=2)), 0)
    answers = tuple(
        Completion(
            tokens=np.arange(n),
            log_probs=np.zeros(n, dtype=np.float32),
            written=np.ones(n, dtype=np.bool_),
            finish="eos",
            text="",
        )
        for n in (3, 5)
    )
    group = Group(Prompt("0", "", {}, "task", tokens=(1, 2, 3, 4)), answers)
    batch, shape = from_groups([group], policy.device), policy.shape
    both = operations_of(policy, batch, [0, 1])
    assert both == shape.update(4 + 3 + 5, attention_pairs([7, 9], [0, 4]), 8)
    one = operations_of(policy, batch, [1])
    first, second = attention_pairs([7]), attention_pairs([9])
    assert one == shape.update(9, second, 5) + shape.forward(7, first, 3)
    assert one < both


def test_speeds_are_recorded_with_timings_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics are the same with a card whose peak is known; the page has their panel."""
    recipe = load_recipe("tiny", ["steps=2", "evaluation.prompts=4", "threads=1"])
    plain = train(recipe, tmp_path / "plain")
    monkeypatch.setattr("keel.training.rl.peak_of", lambda device: 1e12)
    known = train(recipe, tmp_path / "known")
    assert known.metrics.read_bytes() == plain.metrics.read_bytes()
    first, second = load(known.path).timings()
    assert {"speed/step", "speed/generation", "speed/update", "mfu/update"} <= set(second)
    assert 0 < first["mfu/update"] < 1
    assert not [name for name in load(plain.path).timings()[0] if name.startswith("mfu")]
    tokens = load(known.path).metrics()[0]["rollout/tokens"]
    assert first["speed/update"] == pytest.approx(tokens / first["update"])
    # Sampling is a part of the rollout, which is a part of the step.
    assert first["speed/generation"] > tokens / first["rollout"]
    assert first["speed/step"] < tokens / (first["rollout"] + first["update"])
    library = Library([known.path])
    run = library.get(library.names()[0])
    run.update()
    assert "Tokens per second" in [panel.title for panel in panels(run, "rl")]
    assert any(part.endswith(" tokens/s") for part in status_of(run, "rl").parts())
