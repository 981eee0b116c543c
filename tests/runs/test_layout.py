from __future__ import annotations

from pathlib import Path

import pytest

from keel.runs.layout import Place, RunFolder, make_next
from keel.types import KeelError
from tests.runs.example import ONE, TWO, one_stage, two_stages


def test_paths_carry_the_stage_where_there_are_several(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    assert folder.rollouts(0, 12) == tmp_path / "run/rollouts/step-000012.parquet"
    assert folder.checkpoint(0, 100) == tmp_path / "run/checkpoints/step-000100"
    assert folder.recipe.read_text() == ONE
    folder = two_stages(tmp_path / "two")
    assert folder.checkpoint(0, 100).name == "warmup-step-000100"
    assert folder.rollouts(1, 3).name == "rl-step-000003.parquet"


def test_checkpoints_are_listed_in_the_order_of_the_run(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    # By name, rl would come before warmup, and a million before two.
    places = [Place(0, 50), Place(0, 100), Place(1, 2), Place(1, 1_000_000)]
    for place in reversed(places):
        folder.checkpoint(place.stage, place.step).mkdir()
    for stranger in (".tmp-rl-step-000009", "best", "step-000001", "other-step-000001"):
        (folder.checkpoints_folder / stranger).mkdir()
    assert [entry.place for entry in folder.list_checkpoints()] == places
    assert [entry.path.name for entry in folder.list_checkpoints()][-1] == "rl-step-1000000"


def test_names_with_a_stage_are_ignored_in_a_recipe_with_one(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    for name in ("step-000007", ".tmp-step-000008", "rl-step-000009", "step-10"):
        (folder.checkpoints_folder / name).mkdir()
        (folder.rollouts_folder / f"{name}.parquet").write_text("")
    assert [entry.place for entry in folder.list_checkpoints()] == [Place(0, 7)]
    assert [entry.place for entry in folder.list_rollouts()] == [Place(0, 7)]


def test_stage_may_have_the_name_of_a_step(tmp_path: Path) -> None:
    text = ONE.replace('name = "rl"', 'name = "step-000001"') + TWO.split("\n\n", 1)[1]
    folder = RunFolder.create(tmp_path / "run", text)
    folder.checkpoint(0, 2).mkdir()
    assert [entry.place for entry in folder.list_checkpoints()] == [Place(0, 2)]


def test_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    one_stage(tmp_path)
    with pytest.raises(KeelError, match=r"exists and is not empty: resume it with --resume, or"):
        RunFolder.create(tmp_path / "run", ONE)
    (tmp_path / "file").write_text("")
    with pytest.raises(KeelError, match="is a file"):
        RunFolder.create(tmp_path / "file", ONE)
    with pytest.raises(KeelError, match="cannot make"):
        RunFolder.create(tmp_path / "file" / "run", ONE)


def test_remains_of_a_killed_start_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("")
    (tmp_path / "run" / ".tmp-recipe.toml").write_text("na")
    assert one_stage(tmp_path).recipe.read_text() == ONE


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (None, "does not exist"),
        ("", r"no \[\[stages\]\]"),
        ("stages = 3", r"no \[\[stages\]\]"),
        ("name = ", "not valid TOML"),
        (ONE.replace('name = "rl"', 'name = "../../home"'), r"names a stage '\.\./\.\./home'"),
        (ONE.replace('name = "rl"', "name = 3"), "names a stage 3"),
    ],
)
def test_folder_without_a_valid_recipe_is_refused(
    tmp_path: Path, recipe: str | None, message: str
) -> None:
    if recipe is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "recipe.toml").write_text(recipe)
    with pytest.raises(KeelError, match=message):
        RunFolder.open(tmp_path / "run")


def test_next_folder_counts_up(tmp_path: Path) -> None:
    assert make_next(tmp_path / "runs", "sort").name == "sort-1"
    for name in ("sort-1", "sort-3", "sort-x", "other-9"):
        (tmp_path / name).mkdir()
    assert make_next(tmp_path, "sort").name == "sort-4"
    assert make_next(tmp_path, "a/b c").name == "a-b-c-1"
    assert make_next(tmp_path, "../..").name == "run-1"
