"""Runs on environments: the folder they leave, the same curve twice, and after any stop."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence
from safetensors.torch import load_file

from keel.analysis.metrics import unknown
from keel.config.control import ControlRecipe, Environment, PolicyGradientStage, load_control, tuned
from keel.config.fields import derive
from keel.config.load import load_recipe, to_toml
from keel.control.learner import evaluate
from keel.control.run import COUNTER, FRAMES, control, record_video, trained
from keel.platform.signals import Interrupted
from keel.runs.callbacks import RunState
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.types import KeelError
from tests.control import worlds
from tests.shared import ROOT

SHORT = ("checkpoints.every=2", "checkpoints.keep=9", "watching.film=false", "network.hidden=[8]")
EVALUATED = ("evaluation.every=200", "evaluation.episodes=3")
Q = ("steps=600", "row_every=100", "replay.warmup=50", "replay.batch_size=16")
BY_STEPS = ("steps=480", "rollout_steps=20", "environment.count=4")
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "dqn": ("dqn", "CartPole-v1", (*Q, "replay.capacity=200")),
    "dqn-variants": (
        "dqn",
        "CartPole-v1",
        (*Q, "double=true", "n_step=3", "loss=huber", "target.rate=0.05", "environment.count=2"),
    ),
    "ppo": (
        "ppo",
        "CartPole-v1",
        (*BY_STEPS, "minibatches=4", "epochs=2", "optimizer.schedule=linear", "target_kl=1e-3"),
    ),
    "ppo-normalised": (
        "ppo",
        "Pendulum-v1",
        (
            *BY_STEPS,
            "normalisation.observations=true",
            "normalisation.rewards=true",
            *("environment.options.max_episode_steps=50", "epochs=2", "minibatches=4"),
        ),
    ),
    "ppo-penalty": ("ppo_kl_penalty", "CartPole-v1", (*BY_STEPS, "epochs=2", "minibatches=2")),
    "ppo-reference": (
        "ppo",
        "CartPole-v1",
        (
            *BY_STEPS,
            "algorithm.divergence={to='reference', where='reward', estimator='k1', beta=0.1}",
            "reference.reset_every=2",
        ),
    ),
    "grpo": ("grpo", "CartPole-v1", ("steps=700", "environment.count=4", "group_size=4")),
}


def small(case: str, *overrides: str) -> ControlRecipe:
    algorithm, environment, own = CASES[case]
    return load_control(algorithm, environment, (*SHORT, *EVALUATED, *own, *overrides))


def same(a: RunFolder, b: RunFolder) -> None:
    """Rows, and all that the last checkpoint holds, are byte for byte the same."""
    for name in ("metrics.jsonl", "recipe.toml"):
        assert (a.path / name).read_bytes() == (b.path / name).read_bytes(), name
    ends = [load(folder.path).checkpoints()[-1].path for folder in (a, b)]
    assert ends[0].name == ends[1].name
    for name in ("state.json", "tensors.safetensors"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name


def tear(folder: RunFolder) -> None:
    """Damage the newest checkpoint."""
    path = load(folder.path).checkpoints()[-1].path / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_repeated_and_resumed_runs_are_the_same(case: str, tmp_path: Path) -> None:
    recipe = small(case)
    whole = control(recipe, tmp_path / "whole")
    again = control(recipe, tmp_path / "again")
    same(whole, again)
    assert len(load(again.path).checkpoints()) > 1
    tear(again)
    control(None, again.path, resume=True)
    same(whole, again)
    assert not unknown(load(whole.path).names())


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL, again and again, wherever the run happens to be; then to the end."""
    recipe = small("ppo", "steps=3200", "checkpoints.every=1", "checkpoints.keep=2")
    whole = control(recipe, tmp_path / "whole")
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe))
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "keel", "control"]
    rng = random.Random(0)
    kills = 0
    for attempt in range(20):
        there = (folder / "recipe.toml").exists()
        what = ["--resume"] if there else [str(file)]
        process = subprocess.Popen(
            [*command, *what, "--run", str(folder), "--quiet"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        if kills < 2 and attempt < 19:
            more = _rows(folder) + rng.randint(1, 10)
            while process.poll() is None and _rows(folder) < more:
                time.sleep(0.001)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
        _, error = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error.decode()
    assert kills > 0
    same(whole, RunFolder.open(folder))


def test_a_checkpoint_of_other_networks_is_refused_on_resume(tmp_path: Path) -> None:
    folder = control(small("ppo"), tmp_path / "run")
    tear(folder)  # so that there is something left to do
    text = folder.recipe.read_text(encoding="utf-8")
    assert "hidden = [\n    8,\n]" in text or "hidden = [8]" in text
    wider = text.replace("hidden = [\n    8,\n]", "hidden = [9]").replace(
        "hidden = [8]", "hidden = [9]"
    )
    folder.recipe.write_text(wider, encoding="utf-8")
    with pytest.raises(KeelError, match=r"does not fit the recipe's networks .*put the keys"):
        control(None, folder.path, resume=True)


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_asked_to_stop_it_leaves_a_checkpoint(tmp_path: Path) -> None:
    recipe = small("ppo", "checkpoints.every=999")
    whole = control(recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        control(recipe, tmp_path / "stopped", callbacks=[_Stopper()])
    stopped = RunFolder.open(tmp_path / "stopped")
    assert len(load(stopped.path).checkpoints()) == 1
    assert json.loads(stopped.run_json.read_text())["finished"] is False
    control(None, stopped.path, resume=True)
    same(whole, stopped)


class _Schedule:
    """Asks for what a step can become, and to stop."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def on_step(self, state: RunState) -> None:
        if state.step == 2:
            state.control.scale_learning_rate(0.5)
            state.control.evaluate()
            state.control.log({"probe": 1})
        if state.step == self.stop:
            state.control.stop("enough")


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_requests_of_callbacks_last_over_a_resume(algorithm: str, tmp_path: Path) -> None:
    recipe = small(algorithm, "optimizer.schedule=constant")
    whole = control(recipe, tmp_path / "whole", callbacks=[_Schedule(0)])
    rates = [record["learning_rate"] for record in load(whole.path).metrics()]
    assert rates[2] == rates[1] / 2
    assert {"eval/return", "probe"} <= load(whole.path).metrics()[1].keys()
    stopped = control(recipe, tmp_path / "stopped", callbacks=[_Schedule(3)])
    control(None, stopped.path, resume=True)
    same(whole, stopped)


class _Stopper:
    """Asks the run to stop after its third row."""

    def on_step(self, state: RunState) -> None:
        if state.step == 3:
            signal.raise_signal(signal.SIGINT)


def test_what_a_run_leaves(tmp_path: Path) -> None:
    folder = control(small("dqn", "watching.film=true"), tmp_path / "run")
    info = json.loads(folder.run_json.read_text())
    assert info["environment_steps"] == 600
    after = info["evaluation"]["q_learning"]["after"]
    assert after["n"] == 3
    assert len(after["returns"]) == 3
    with Image.open(folder.curve) as curve:
        assert curve.size[0] > 800
    with Image.open(folder.film) as film:
        frames = getattr(film, "n_frames", 1)
    steps = info["film"]["steps"]
    assert steps / 2 < frames <= steps + 1  # a picture like the one before is not written again
    state = load(folder.path).checkpoints()[-1].path
    assert {"online/0.weight", "target/0.weight"} <= load_file(state / "tensors.safetensors").keys()


def test_environment_without_rendering_is_noted(tmp_path: Path) -> None:
    folder = control(
        load_control("dqn", "tests.control.worlds:Counter-v0", (*SHORT, *Q, "watching.film=true")),
        tmp_path / "run",
    )
    assert not folder.film.exists()
    (note,) = [e["text"] for e in load(folder.path).events() if "no film" in str(e.get("text"))]
    assert "Counter-v0' cannot be rendered" in note
    assert "\n" not in note


@pytest.mark.parametrize(("algorithm", "environment"), tuned())
def test_tuned_settings_load(algorithm: str, environment: str) -> None:
    recipe = load_control(algorithm, environment)
    assert recipe.stage.environment.id == environment
    assert recipe.name == f"{algorithm}-{environment}"


@pytest.mark.parametrize(
    ("algorithm", "environment", "overrides", "words"),
    [
        ("pop", "CartPole-v1", (), "did you mean 'ppo'"),
        ("ppo", None, (), "name one with --env"),
        ("ppo", "CartPole-v1", ("rolout_steps=3",), "did you mean 'rollout_steps'"),
        ("ppo", "CartPole-v1", ("algorithm.surrogat.low=3",), "key 'algorithm.surrogat.low'"),
        ("dqn", "CartPole-v1", ("gama=0.9",), "did you mean 'gamma'"),
        ("dqn", "CartPole-v1", ("replay.capacity=1",), "replay.capacity = 1 holds less"),
        ("grpo", "CartPole-v1", ("group_size=1",), "leaves nothing to compare"),
        ("grpo", "CartPole-v1", ("group_size=3",), "do not part into groups of 3"),
        ("remax", "CartPole-v1", (), "for completions, not environments"),
        ("grpo_process", "CartPole-v1", (), "for completions, not environments"),
        ("opd", "CartPole-v1", (), "as teacher, not environments: leave it out"),
        ("gigpo", "CartPole-v1", (), "for completions, not environments"),
        ("rae", "CartPole-v1", (), "for completions, not environments"),
        ("missing.toml", None, (), "no such file"),
        ("ppo", "Pendulum-v1", ("environment.options.render_mode=human",), "set by Keel"),
        ("ppo", "Pendulum-v1", ("group_size=2",), "compares no episodes"),
        ("grpo", "CartPole-v1", ("minibatches=17",), "is more than the 16 episodes"),
        ("dqn", "CartPole-v1", ("steps=500",), "leaves none of 500 steps"),
        (
            "ppo",
            "Pendulum-v1",
            ("algorithm.divergence={to='reference'}", "normalisation.observations=true"),
            "frozen reference",
        ),
    ],
)
def test_wrong_recipes(
    algorithm: str, environment: str | None, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(KeelError, match=words.replace("(", r"\(")):
        load_control(algorithm, environment, overrides)


@pytest.mark.parametrize(
    ("environment", "words"), [("CartPoll-v1", "CartPole"), ("Pendulum-v1", "use ppo")]
)
def test_a_wrong_environment_leaves_no_folder(environment: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=words):
        control(load_control("dqn", environment), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_was_learned_acts(tmp_path: Path) -> None:
    folder = control(small("ppo", "evaluation.every=0"), tmp_path / "run")
    learner = trained(folder.path)
    result = evaluate(
        learner.greedy(),
        learner.stage.environment,
        learner.stage.evaluation,
        derive(0, "policy_gradient"),
    )
    message = json.loads(folder.run_json.read_text())["evaluation"]["policy_gradient"]["after"]
    assert result["returns"] == message["returns"]


def test_own_recipe_starts_from_its_algorithms_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "stage = 'policy_gradient'\nalgorithm = 'ppo'\nsteps = 7\n"
        "environment = {id = 'CartPole-v1'}\n"
    )
    stage = load_control(path).stage
    assert isinstance(stage, PolicyGradientStage)
    assert stage.algorithm.divergence is None
    assert stage.algorithm.advantage.gamma == 0.99  # type: ignore[union-attr]
    assert (stage.steps, stage.environment.count, stage.epochs) == (7, 8, 4)
    path.write_text("extends = 'ppo.CartPole-v1'\nsteps = 7\n")
    stage = load_control(path).stage
    assert isinstance(stage, PolicyGradientStage)
    assert (stage.steps, stage.rollout_steps, stage.environment.id) == (7, 32, "CartPole-v1")
    path.write_text("stage = 'rl'\n")
    with pytest.raises(KeelError, match="a recipe of keel train"):
        load_control(path)
    with pytest.raises(KeelError, match="a recipe of keel control"):
        load_recipe({"stage": "q_learning", "environment": {"id": "CartPole-v1"}})


@pytest.mark.filterwarnings("ignore:.*NaN value:UserWarning")
def test_an_environment_that_fails_is_named(tmp_path: Path) -> None:
    text = ("steps=64", "rollout_steps=8", "watching.film=false")
    for name, words in (("Raises-v0", "ValueError: broken"), ("NaN-v0", "not finite")):
        with pytest.raises(KeelError, match=words):
            control(load_control("ppo", f"tests.control.worlds:{name}", text), tmp_path / name)


def test_the_early_stop_works_without_a_ratio_too(tmp_path: Path) -> None:
    overrides = ("epochs=3", "target_kl=1e-9", "optimizer.learning_rate=0.1", "steps=700")
    recipe = load_control("reinforce", "CartPole-v1", (*SHORT, *overrides))
    folder = control(recipe, tmp_path / "run")
    assert {row["updates"] for row in load(folder.path).metrics()} == {1.0}


SEED = 6


def shown(path: Path) -> list[tuple[int, int]]:
    """The step and the mark's last byte of each picture (see Drawn)."""
    with Image.open(path) as film_:
        colours = [np.array(f.convert("RGB"))[COUNTER, 0] for f in ImageSequence.Iterator(film_)]
    return [(int(r) // 4 * 16 + int(g) // 16, int(b)) for r, g, b in colours]


def played(path: Path, length: int) -> tuple[int, list[tuple[int, int]]]:
    choice = Environment(id=worlds.DRAWN, options={"length": length})
    return record_video(path, worlds.choose_all, choice, SEED, 10_000), shown(path)


def test_film_shows_every_state_of_the_episode(tmp_path: Path) -> None:
    steps, pictures = played(tmp_path / "film.gif", 40)
    assert steps == 40
    mark = worlds.mark_of(SEED, 0) % 256
    assert pictures == [(n, mark) for n in range(41)]


@pytest.mark.parametrize("length", [FRAMES, FRAMES + 1, 2 * FRAMES + 111])
def test_a_long_episode_is_shown_in_part(tmp_path: Path, length: int) -> None:
    steps, pictures = played(tmp_path / "film.gif", length)
    assert steps == length
    numbers = [number for number, _ in pictures]
    assert FRAMES // 2 <= len(numbers) <= FRAMES + 1
    assert (numbers[0], numbers[-1]) == (0, length)
    # At one pace; the last state is shown whatever the pace.
    assert len(set(np.diff(numbers[:-1]))) == 1
    assert numbers == sorted(set(numbers))
