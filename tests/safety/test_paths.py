"""What a recipe names never leads out of the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config.load import load_recipe
from keel.rewards.judge.reward import judge
from keel.rewards.registry import RewardContext
from keel.runs.layout import RunFolder, next_free
from keel.training.export import export
from keel.training.run import train
from keel.types import KeelError

NASTY = [
    *("..", ".", "", "/", "../x", "../../../etc/x", "/tmp/x", "a/b", "a\\b", "a/../b", "a\0b"),
    *("-a", "~", "~/x", " a", "a ", "a\n", "a\r", "a\u2028b", "a\u2029", "a/b", "․․/x", "．．"),
    *("$HOME", "%2e%2e%2f", "C:x", "a:b", "*", "a|b", ".hidden", "é", "a\u202eb"),
]
"""Names that would lead elsewhere, or be read as something else, as parts of a path."""
ORDINARY = "abcXYZ019._-"
names = st.one_of(
    st.text(max_size=12),
    st.text(ORDINARY, max_size=12),
    st.sampled_from(NASTY),
    st.lists(st.sampled_from(["..", ".", "/", "\\", "a", "-", "~", "\0"])).map("".join),
)
TINY = {
    "threads": 1,
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
    "evaluation": {"prompts": 0},
    "steps": 1,
}


def recipe(**stage: Any) -> Any:
    below = {"extends": "tiny", **TINY}
    return load_recipe({**below, **stage})


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def text_of(names: list[str]) -> str:
    """A resolved recipe's stages, as far as a run folder reads them."""
    return "".join(f"[[stages]]\nstage = 'rl'\nname = {json.dumps(name)}\n" for name in names)


@settings(deadline=None, derandomize=True)
@given(st.lists(names, min_size=1, max_size=2))
def test_a_stages_name_is_refused_or_stays_inside(
    tmp_path_factory: pytest.TempPathFactory, stages: list[str]
) -> None:
    run = tmp_path_factory.mktemp("runs") / "run"
    try:
        folder = RunFolder.create(run, text_of(stages))
    except KeelError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "\n" not in message
        assert not run.exists()
        return
    places = [folder.rollouts(0, 1), folder.checkpoint(0, 1)]
    places += [folder.model(stages[0]), folder.rows(stages[0], "train")]
    places += [folder.pictures / f"{stages[0]}-over-optimisation.png"]
    for place in places:
        inside = place.resolve().relative_to(run.resolve())
        assert len(inside.parts) == 2  # its kind's folder, and one name


@pytest.mark.parametrize("name", NASTY)
def test_nasty_names_of_stages_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(KeelError) as error:
        train(recipe(stages=[{**recipe().stages[0].model_dump(), "name": name}]), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert tree(tmp_path) == set()


@settings(deadline=None, derandomize=True)
@given(names)
def test_a_recipes_name_makes_one_folder_under_runs(name: str) -> None:
    root = Path("/nowhere/runs")
    found = next_free(root, name)
    assert found.parent == root
    assert found.resolve() == found
    assert found.name not in ("", ".", "..")
    assert not found.name.startswith(".")


def nasty_reward(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    """Notes everything under names that would lead elsewhere."""
    for name in NASTY:
        log_extra(name, [name] * len(completions))
        log_metric(name, 1.0)
    return [float(n) for n in range(len(completions))]


def test_names_of_what_is_recorded_are_no_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards, components, extras, metrics, and what goes to TensorBoard."""
    pytest.importorskip("tensorboard")
    place = tmp_path / "a" / "b" / "c"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    functions = [
        {"function": "tests.safety.test_paths:nasty_reward", "name": "../../up"},
        {"function": "place_match", "name": "/tmp/absolute"},
    ]
    wanted = recipe(
        name="../../up",
        rewards={"functions": functions},
        trackers={"tensorboard": True, "project": "../../up"},
    )
    before = tree(tmp_path)
    folder = train(wanted, None)
    assert folder.path == Path("runs/up-1").absolute()
    new = tree(tmp_path) - before
    assert {path for path in new if not path.startswith("a/b/c/runs")} == set()
    assert folder.metrics.read_text().count("../../up") > 0
    out = place / "out"
    export(folder.path, out)
    assert tree(tmp_path) - before - new == {"a/b/c/out"} | {
        f"a/b/c/out/{path}" for path in tree(out)
    }


# ---------------------------------------------------------------- the judge's file


@pytest.mark.parametrize("label", [name for name in NASTY if name not in ("-a", "é")])
def test_a_judges_label_is_no_path(label: str, tmp_path: Path) -> None:
    around = RewardContext(folder=tmp_path / "run" / "rewards")
    with pytest.raises(KeelError, match="label") as error:
        judge(around, model="m", url="http://127.0.0.1:9/v1", label=label)
    assert "\n" not in str(error.value)
    assert tree(tmp_path) == set()
