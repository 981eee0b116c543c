"""The kinds of stages: one file each, and a short way from the command to the gradient."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.cli.main import main
from keel.config.entry import stage_kinds
from keel.config.stage import StageConfig
from keel.training.run import train
from tests.shared import ROOT
from tests.training.small import Notes, small

FRAMES, FILES = 12, 9
OWN_KIND = """
from typing import Literal

from keel.config.fields import StageName
from keel.config.entry import stage_kinds
from keel.config.stage import StageConfig


class OwnStage(StageConfig):
    stage: Literal["own"] = "own"
    name: StageName = "own"
    steps: int = 2

    def train(self, run, progress):
        from keel.learn.memory import TokenBudget
        from keel.training.loop import Loop, StepResult
        from keel.training import loop
        from keel.training.state import State

        class OwnLoop(Loop):
            def take_step(self, progress, number):
                return StepResult({"loss": 1.0 / number}, tokens=3)

            def state(self, progress):
                return State(progress, run.policy, lambda folder: None)

        made = OwnLoop(
            steps=self.steps, checkpoints=self.checkpoints, on_nonfinite=self.on_nonfinite,
            budget=TokenBudget(64), writer=run.writer,
        )
        return loop.run(made, progress)


STAGE = OwnStage
"""
RUN_OWN_KIND = """
import sys
from pathlib import Path

from keel.training import stages

stages.__path__.append(sys.argv[1])
from keel.cli.main import main

sys.exit(main(["train", sys.argv[2], "--run", sys.argv[3], "--quiet"]))
"""


@pytest.mark.slow
def test_new_kind_of_stage_is_one_file(tmp_path: Path) -> None:
    kinds = tmp_path / "kinds"
    kinds.mkdir()
    (kinds / "own.py").write_text(OWN_KIND)
    recipe = tmp_path / "own.toml"
    recipe.write_text('[model.build]\nhidden_size = 16\nheads = 2\n[[stages]]\nstage = "own"\n')
    words = [str(kinds), str(recipe), str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", RUN_OWN_KIND, *words], check=False)
    assert done.returncode == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [line.split(", ")[:2] for line in lines] == [
        ['{"stage": "own"', f'"step": {step}'] for step in (1, 2)
    ]


def test_no_other_code_asks_for_the_kind() -> None:
    asks = re.compile(r"isinstance\([\w.]+, \(?\w+Stage\b|stage\.stage\b *[!=]=")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "src" / "keel").rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if asks.search(line) and "control" not in path.parts
    ]
    assert found == []


@pytest.mark.parametrize("config", stage_kinds())
def test_a_stage_trains_the_policy_or_a_reward_model(config: type[StageConfig]) -> None:
    assert config.trains_policy == (config.reward_model is None)


def test_gradient_is_few_frames_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []
    backward = torch.Tensor.backward

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        stacks.append([frame.name for frame in traceback.extract_stack()[:-1]])
        backward(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    words = ["steps=1", "threads=1", "evaluation.prompts=0", "--run", str(tmp_path / "run")]
    assert main(["train", "tiny", *words, "--quiet"]) == 0
    stack = stacks[0]
    passed = stack[len(stack) - stack[::-1].index("main") - 1 :]
    assert len(passed) <= FRAMES, passed


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_run_prints_its_objective(preset: str, tmp_path: Path) -> None:
    start = Notes()
    recipe = small(f"algorithm.preset={preset}", "algorithm.surrogate.low=0.125", "steps=1")
    train(recipe, tmp_path / "run", callbacks=[start])
    (line,) = [note for note in start.notes if "J(θ)" in note]
    assert line.startswith("rl optimises J(θ) = Σ_n w_n · min(ρ_n A_n, clip(ρ_n, 0.875, 1.2) A_n)")
    assert ("; L_V(φ) = " in line) == (preset == "ppo")


WAY = """
import sys
import keel
from keel.config.schema import Recipe
from keel.config.stage import StageConfig
from keel.training.rl import RLLoop
from keel.types import KeelError

source, folder = sys.argv[1:]
seen = set()

def look(frame, event, _):
    file = frame.f_code.co_filename
    if event in ("call", "return") and file.startswith(source) and file not in seen:
        if any(isinstance(value, Recipe | StageConfig) for value in frame.f_locals.values()):
            seen.add(file)

def first_step(*_):
    sys.setprofile(None)
    raise KeelError("the first step")

RLLoop.take_step = first_step
sys.setprofile(look)
try:
    keel.train("tiny", folder, steps=1, threads=1, progress=False)
except KeelError as error:
    assert "the first step" in str(error), error
print(*sorted(seen), sep="\\n")
"""


@pytest.mark.slow
def test_recipe_passes_few_files_before_the_first_step(tmp_path: Path) -> None:
    """Files of keel with a frame that has the recipe or the stage's config among its locals, when
    it is called or returns, from `keel.train()` to the first step.

    In a process of its own: a profile function of a process with the threads of other tests hung.
    """
    source = str(ROOT / "src" / "keel")
    done = subprocess.run(
        [sys.executable, "-c", WAY, source, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = done.stdout.splitlines()
    assert "rl.py" in {Path(file).name for file in seen}
    assert len(seen) <= FILES, seen
