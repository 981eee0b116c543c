"""Inputs that changed between a checkpoint and a resume: reported in one line, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.config.load import load_recipe
from keel.rewards.learned import which_model
from keel.rewards.registry import RewardContext
from keel.runs.callbacks import Callback
from keel.runs.lifecycle import fingerprints
from keel.runs.reader import load
from keel.training.evaluation import evaluate_reward_model
from keel.training.export import export
from keel.training.run import train
from keel.types import KeelError
from tests.durability.same import TINY, same
from tests.durability.test_full_disk import JUDGED

REWARD = """
def digits(*, completions, **_):
    return [sum(c in {digits!r} for c in text) / (len(text) + 1) for text in completions]
"""


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


class Place:
    """A folder with a data file, a reward and a run of four steps from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data, self.reward = folder / "rows.jsonl", folder / "rewards.py"
        self.run = folder / "run"

    def make(self, seed: int = 0, run: Path | None = None) -> Path:
        self.write_data("")
        self.reward.write_text(REWARD.format(digits="02468"))
        return train(self.recipe(seed), run or self.run).path

    def recipe(self, seed: int = 0) -> object:
        task = f"{{name='jsonl', path='{self.data}', answer='answer'}}"
        reward = f"{{function='{self.reward}:digits', name='digits'}}"
        return load_recipe(
            "tiny",
            [*TINY, "steps=4", f"seed={seed}", f"tasks=[{task}]", "evaluation.component=digits",
             f"rewards.functions=[{reward}]"],
        )  # fmt: skip

    def write_data(self, more: str) -> None:
        rows = [{"prompt": f"{n}>", "answer": f"{n}"} for n in range(10, 60)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows) + more)

    def edit(self, old: str, new: str) -> None:
        recipe = self.run / "recipe.toml"
        text = recipe.read_text()
        assert text.count(old) == 1
        recipe.write_text(text.replace(old, new))

    def resume(self) -> list[str]:
        """From step 2; what it notes."""
        shutil.rmtree(self.run / "checkpoints" / "step-000004", ignore_errors=True)
        callback = Notes()
        train(None, self.run, resume=True, callbacks=[callback])
        printed = [row["text"] for row in load(self.run).events() if row["event"] == "note"]
        assert printed[-len(callback.notes) :] == callback.notes or not callback.notes
        return callback.notes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("inputs"))
    made.make()
    return made


@pytest.fixture
def copy(place: Place) -> Place:
    """The place with its run as it was after four steps; the files that it names are shared."""
    for path in place.folder.glob("run*"):
        if path.name != "run":
            shutil.rmtree(path)
    other = Place(place.folder)
    other.write_data("")
    other.reward.write_text(REWARD.format(digits="02468"))
    other.run = shutil.copytree(place.run, place.folder / "run-2")
    return other


def test_resume_without_changes_notes_nothing_and_ends_the_same(place: Place, copy: Place) -> None:
    assert copy.resume() == []
    same(copy.run, place.run)


CHANGES: dict[str, tuple[Callable[[Place], object], str]] = {
    "seed": (lambda p: p.edit("\nseed = 0", "\nseed = 1"), "seed = 1 (was 0)"),
    "steps": (lambda p: p.edit("\nsteps = 4", "\nsteps = 5"), "stages[0].steps = 5 (was 4)"),
    "data": (
        lambda p: p.write_data('{"prompt": "1>", "answer": "1"}\n'),
        "the content of stages[0].tasks[0].path (",
    ),
    "reward": (
        lambda p: p.reward.write_text(REWARD.format(digits="13579")),
        "the content of stages[0].rewards.functions[0].function (",
    ),
}


@pytest.mark.quick("data")
@pytest.mark.parametrize("what", CHANGES)
def test_change_since_the_checkpoint_is_noted(what: str, copy: Place) -> None:
    change, message = CHANGES[what]
    change(copy)
    notes = copy.resume()
    assert len(notes) == 1
    assert notes[0].startswith("since checkpoint step-000002 was written there changed: " + message)
    assert "from here on this is another run" in notes[0]


def test_model_of_other_sizes_is_refused(copy: Place) -> None:
    copy.edit("hidden_size = 64", "hidden_size = 32")
    before = (copy.run / "metrics.jsonl").read_bytes()
    with pytest.raises(KeelError, match=r"recipe's model: \S+ is 13 × 64 in it and 13 × 32 in"):
        copy.resume()
    assert b"\n".join(before.splitlines()[:2]) in (copy.run / "metrics.jsonl").read_bytes()


def test_fewer_steps_than_the_checkpoint_has_taken_are_refused(copy: Place) -> None:
    copy.edit("\nsteps = 4", "\nsteps = 1")
    with pytest.raises(KeelError, match=r"rl\.steps = 1, but .*step-000002 has taken 2"):
        copy.resume()


def test_checkpoint_of_another_run_is_refused(copy: Place) -> None:
    other = copy.make(seed=1, run=copy.folder / "run-3")
    shutil.rmtree(copy.run / "checkpoints" / "step-000004")
    shutil.copytree(other / "checkpoints" / "step-000004", copy.run / "checkpoints" / "step-000004")
    with pytest.raises(KeelError, match="is not what checkpoint step-000004 was written with"):
        train(None, copy.run, resume=True)


def test_fingerprints_of_the_files_a_recipe_names(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "a.jsonl").write_text("{}")
    recipe = {
        "model": {"name": str(model), "lora": {"adapter": str(adapter)}},
        "tasks": [{"path": str(tmp_path / "a.jsonl"), "name": "jsonl"}],
        "entries": [f"{tmp_path}/a.py:f", "json:loads", "nowhere.at.all:f", "gone.py:f"],
        "prompt": "a: b",
        "lost": {"path": str(tmp_path / "gone.jsonl")},
    }
    found = fingerprints(recipe, Path())
    keys = [key.split(" ")[0] for key in found]
    assert keys == [
        "model.name", "model.lora.adapter", "tasks[0].path", "entries[0]", "entries[1]",
    ]  # fmt: skip
    (model / "model.safetensors").write_text("weights")
    (adapter / "adapter_model.safetensors").write_text("weights")
    (tmp_path / "a.py").write_text("x = 2")
    (tmp_path / "a.jsonl").write_text("{} ")
    changed = [key for key, digest in fingerprints(recipe, Path()).items() if found[key] != digest]
    assert [key.split(" ")[0] for key in changed] == keys[:4]


def test_fingerprint_of_a_data_set_covers_all_its_files(tmp_path: Path) -> None:
    rows = tmp_path / "data" / "train" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text('{"a": 1}')
    recipe = {
        "stages": [
            {"tasks": [{"name": "datasets", "path": str(tmp_path / "data")}]},
            {"data": {"name": "datasets", "path": "json", "options": {"data_files": [str(rows)]}}},
        ]
    }
    found = fingerprints(recipe, Path())
    assert len(found) == 2
    rows.write_text('{"a": 2}')
    again = fingerprints(recipe, Path())
    assert found.keys() == again.keys()
    assert all(again[key] != digest for key, digest in found.items())


def test_damaged_reward_model_is_refused_wherever_it_is_loaded(tmp_path: Path) -> None:
    recipe, run = tmp_path / "judged.toml", tmp_path / "run"
    recipe.write_text(JUDGED)
    train(load_recipe(str(recipe)), run)
    made = run / "models" / "judge"
    weights = made / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    around = RewardContext(models={"judge": made})
    rows = run / "rows" / "judge-validation.jsonl"
    for load_it in (
        lambda: which_model(around, None, "judge"),
        lambda: export(run, tmp_path / "out", stage="judge"),
        lambda: evaluate_reward_model(run, "pairs", str(rows)),
    ):
        with pytest.raises(
            KeelError, match=r"models/judge is damaged \(model\.safetensors differs"
        ):
            load_it()
    rows.write_bytes(rows.read_bytes()[:-30])
    with pytest.raises(KeelError, match=r"judge-validation\.jsonl is damaged: restore it"):
        train(None, run, resume=True)
