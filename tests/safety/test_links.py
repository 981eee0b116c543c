"""A run folder from elsewhere: its links lead nowhere, and nothing in it makes a reader wait."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.config.load import load_recipe
from keel.data.preferences.published import TEST_SET, read_llmbar, read_pandalm
from keel.runs import files, lifecycle
from keel.runs.diff import diff
from keel.runs.files import locked, refuse_if_taken
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.export import export, reward_model_of
from keel.training.run import train
from keel.types import KeelError

SECRET = "precious\n"
READERS: dict[str, Callable[[Path], object]] = {
    "load": load,
    "resume": lambda run: train(None, run, resume=True),
    "export": lambda run: export(run, run.with_name("out")),
    "evaluate": lambda run: evaluate(run, prompts=2),
    "diff": lambda run: diff(run, run),
    "reward model": lambda run: reward_model_of(run, "rl"),
}
PLACES = (
    *("metrics.jsonl", "run.json", "events.jsonl", ".lock", ".tmp-run.json"),
    *("rollouts/step-000001.parquet", "checkpoints/step-000001/policy/extra.txt"),
    *("models/rl/extra.txt", "rewards", "trackers/wandb/run-id"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {
        "threads": 1,
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
        "evaluation": {"prompts": 0},
        "steps": 1,
    }
    path = tmp_path_factory.mktemp("whole") / "run"
    return train(load_recipe({"extends": "tiny", **small}), path).path


def with_odd(whole: Path, tmp_path: Path, place: str, make: Callable[[Path], None]) -> Path:
    """A copy of the run in which something odd lies at a place."""
    run = shutil.copytree(whole, tmp_path / "run")
    odd = run / place
    odd.parent.mkdir(parents=True, exist_ok=True)
    odd.unlink(missing_ok=True)
    make(odd)
    return run


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside.txt"
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_link_out_of_a_run_folder_is_refused(
    reader: str, whole: Path, outside: Path, tmp_path: Path
) -> None:
    for number, place in enumerate(PLACES):
        run = with_odd(whole, tmp_path / str(number), place, lambda odd: odd.symlink_to(outside))
        with pytest.raises(KeelError, match="is a link") as error:
            READERS[reader](run)
        assert str(run / place) in str(error.value)
        assert not run.with_name("out").exists()
    assert outside.read_text() == SECRET


@pytest.mark.parametrize("reader", READERS)
def test_a_fifo_in_a_run_folder_is_refused(reader: str, whole: Path, tmp_path: Path) -> None:
    for number, place in enumerate(PLACES):
        run = with_odd(whole, tmp_path / str(number), place, os.mkfifo)
        with pytest.raises(KeelError, match="neither a file nor a folder"):
            READERS[reader](run)


def test_a_linked_run_folder_and_what_wandb_links_are_fine(whole: Path, tmp_path: Path) -> None:
    place = "trackers/wandb/wandb/latest-run"
    run = with_odd(whole, tmp_path, place, lambda odd: odd.symlink_to("run-1"))
    (tmp_path / "latest").symlink_to(run)
    assert len(load(tmp_path / "latest").metrics()) == 1


@pytest.mark.parametrize("name", [".lock", ".tmp-recipe.toml", "rollouts", "checkpoints"])
def test_a_new_run_follows_no_link(name: str, outside: Path, tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / name).symlink_to(outside if name.startswith(".") else elsewhere)
    with pytest.raises(KeelError, match="not empty"):
        lifecycle.create_run("[[stages]]\nname = 'rl'\n", "x", run)
    assert outside.read_text() == SECRET


def test_the_lock_of_a_folder_follows_no_link_and_waits_for_nobody(
    outside: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path, ("rl",))
    folder.lock.symlink_to(outside)
    with pytest.raises(KeelError, match=r"\.lock"), locked(folder.path):
        pass
    assert outside.read_text() == SECRET
    folder.lock.unlink()
    os.mkfifo(folder.lock)
    refuse_if_taken(tmp_path)
    with pytest.raises(KeelError, match="is no file"), locked(folder.path):
        pass


def test_a_file_written_aside_follows_no_link(outside: Path, tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    files.aside(target).symlink_to(outside)
    with locked(tmp_path):
        files.write_text(target, "new")
    assert (target.read_text(), outside.read_text()) == ("new", SECRET)
    assert not target.is_symlink()


@pytest.mark.parametrize(("name", "read"), [(TEST_SET, read_pandalm), ("a.json", read_llmbar)])
def test_a_fifo_in_a_data_sets_folder_is_refused(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(KeelError, match="is no file"):
        read(tmp_path)
