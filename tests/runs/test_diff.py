"""Copies of real runs, altered at one place each: the difference names that very place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from keel.config.control_load import load_control
from keel.control.run import control
from keel.runs import checkpoint
from keel.runs.diff import FirstDifference, Point, diff
from keel.runs.layout import RunFolder
from keel.runs.values import Change, clipped
from keel.training.run import train
from keel.types import KeelError
from tests.training.judged import recipe
from tests.training.small import small

DENSE = "rewards.functions=[{function='place_match'}]"
QUICK = (DENSE, "steps=3", "evaluation.prompts=0", "checkpoints.every=1")
ALL = (
    *("prompt", "tokens", "written", "log_probs", "completion", "finish"),
    *("reward/place_match", "reward", "advantages"),
)
Copy = Callable[[], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three GRPO steps, and (`twin`) the same again; `other` has another seed."""
    root = tmp_path_factory.mktemp("runs")
    for name, more in (("whole", ()), ("twin", ()), ("other", ("seed=1",))):
        train(small(*QUICK, *more), root / name)
    return root


@pytest.fixture
def whole(made: Path) -> Path:
    return made / "whole"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def parquet(run: Path, step: int, stage: str = "") -> Path:
    return run / "rollouts" / f"{stage}step-{step:06d}.parquet"


def alter(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
    """Change the rows of a rollouts file in place; the rows as they were."""
    table = pq.read_table(path)
    before, rows = table.to_pylist(), table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path, compression="zstd")
    return before


def put(row: int, column: str, value: Any, token: int | None = None) -> Any:
    """A change of one cell; `value` may be a function of what was there."""

    def change(rows: list[dict[str, Any]]) -> None:
        if token is None:
            old = rows[row][column]
            rows[row][column] = value(old) if callable(value) else value
        else:
            old = rows[row][column][token]
            rows[row][column][token] = value(old) if callable(value) else value

    return change


def edit_line(run: Path, number: int, **changes: Any) -> dict[str, Any]:
    """Change a line of metrics.jsonl (from 0); the row as it was."""
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines()
    row: dict[str, Any] = json.loads(lines[number])
    lines[number] = json.dumps({**row, **changes})
    path.write_text("\n".join(lines) + "\n")
    return row


def edit_checkpoint(
    run: Path, change: Callable[[Path], None], step: int = 2, stage: str = ""
) -> None:
    """Change a checkpoint as a run would have written it: whole, with its manifest."""
    target = run / "checkpoints" / f"{stage}step-{step:06d}"
    with checkpoint.writing(target) as aside:
        shutil.copytree(target, aside, dirs_exist_ok=True)
        (aside / "manifest.json").unlink()
        change(aside)


def edit_tensor(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return edit


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def first(a: Path, b: Path) -> FirstDifference:
    """The first difference of two runs that differ."""
    found = diff(a, b)
    assert found.first is not None
    assert not found.same
    json.dumps(found.as_dict(), allow_nan=False)
    return found.first


def where(a: Path, b: Path) -> tuple[Any, ...]:
    """Where two runs first differ: stage, step, part, and the name of the first value."""
    found = first(a, b)
    name = found.changes[0].name if found.changes else found.only_in
    return found.stage, found.step, found.where, name


def cell(a: Path, b: Path) -> tuple[Any, ...]:
    """Column, place and values of the first difference in rollouts."""
    found = first(a, b)
    assert found.where == "rollouts"
    assert found.file == f"rollouts/step-{found.step:06d}.parquet"
    change = found.changes[0]
    return change.name, change.at, change.a, change.b


def next_float(value: float) -> float:
    """One ulp of a 32-bit float further from 0."""
    return float(np.nextafter(np.float32(value), np.float32(-np.inf)))


# ---------------------------------------------------------------- the same


def test_two_runs_of_one_recipe_and_seed_are_the_same(made: Path) -> None:
    found = diff(made / "whole", str(made / "twin"))
    assert found.same
    assert found.first is None
    assert (found.recipe, found.environment, found.stages) == ((), (), ("rl",))
    assert found.reach_a == found.reach_b == Point("rl", 3)
    assert (found.rollouts_only, found.checkpoints) == ((0, 0), 3)
    with pytest.raises(FrozenInstanceError):
        found.a = "x"  # type: ignore[misc]


def test_times_and_pictures_are_no_difference(whole: Path, copy: Path) -> None:
    for name in ("timings.jsonl", "events.jsonl", "curve.png"):
        (copy / name).write_bytes(b"otherwise")
    assert diff(whole, copy).same


def test_files_of_other_bytes_that_hold_the_same_are_the_same(whole: Path, copy: Path) -> None:
    path = parquet(copy, 1)
    pq.write_table(pq.read_table(path), path, compression="none")
    assert path.read_bytes() != parquet(whole, 1).read_bytes()
    (copy / "metrics.jsonl").write_text((copy / "metrics.jsonl").read_text().replace(", ", " , "))
    edit_checkpoint(copy, lambda folder: _with_metadata(folder / "trainable.safetensors"))
    found = diff(whole, copy)
    assert found.same
    assert found.checkpoints == 3


def _with_metadata(path: Path) -> None:
    save_file(load_file(path), path, metadata={"by": "hand"})


# ---------------------------------------------------------------- recipes and environments


def test_another_seed_differs_from_the_first_prompt_on(made: Path) -> None:
    found = diff(made / "whole", made / "other")
    assert found.recipe == (Change("seed", 0, 1),)
    rows = [pq.read_table(parquet(made / run, 1)).to_pylist()[0] for run in ("whole", "other")]
    prompts = rows[0]["prompt"], rows[1]["prompt"]
    assert cell(made / "whole", made / "other") == ("prompt", (0,), *prompts)
    assert found.first is not None
    assert found.first.step == 1
    assert {change.name for change in found.first.changes} == set(ALL)
    assert found.checkpoints == 0


def test_recipes_differ_by_dotted_path(whole: Path, copy: Path) -> None:
    path = copy / "recipe.toml"
    text = path.read_text()
    for old, new in (
        ("threads = 1\n", ""),
        ('lora = "none"', "lora = {rank = 4}"),
        ("learning_rate = 0.0003", "learning_rate = nan"),
        ("    0.999,\n", ""),
        ("minibatches = 1", "minibatches = 1.0"),
        ("[stages.trackers]", "[stages.extra]\n[stages.trackers]"),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    found = diff(whole, copy)
    assert found.recipe == (
        Change("threads", 1, None),
        Change("model.lora", "none", {"rank": 4}),
        Change("rl.minibatches", 1, 1.0, difference=0.0),
        Change("rl.optimizer.learning_rate", 0.0003, found.recipe[3].b),
        Change("rl.optimizer.betas[1]", 0.999, None),
        Change("rl.value.optimizer.betas[1]", 0.999, None),
    )
    assert str(found.recipe[3].b) == "nan"
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["recipe"][3]["b"] == "nan"
    assert (found.first, found.same) == (None, False)
    other = shutil.copytree(copy, copy.with_name("again"))
    assert diff(copy, other).recipe == ()


def test_recipes_of_other_stages_are_compared_as_far_as_they_agree(whole: Path, copy: Path) -> None:
    text = (copy / "recipe.toml").read_text()
    head, stage = text.split("[[stages]]", 1)
    more = stage.replace('name = "rl"\n', 'name = "more"\n', 1)
    (copy / "recipe.toml").write_text(f"{head}[[stages]]{stage}\n[[stages]]{more}")
    for folder in ("rollouts", "checkpoints"):
        for path in sorted((copy / folder).iterdir()):
            path.rename(path.with_name(f"rl-{path.name}"))
    alter(parquet(copy, 2, "rl-"), put(3, "tokens", 99, 1))
    found = diff(whole, copy)
    assert found.recipe == (Change("stages", "rl", "rl, more"),)
    assert found.stages == ("rl",)
    assert where(whole, copy) == ("rl", 2, "rollouts", "tokens")
    (copy / "recipe.toml").write_text(f"{head}[[stages]]{more}\n[[stages]]{stage}")
    found = diff(whole, copy)
    assert (found.stages, found.first, found.same) == ((), None, False)
    assert (found.rollouts_only, found.checkpoints) == ((0, 0), 0)


def test_versions_and_threads_are_reported_and_are_no_difference(whole: Path, copy: Path) -> None:
    info = json.loads((copy / "run.json").read_text())
    was = info["versions"]["torch"]
    info["versions"]["torch"], info["threads"] = "2.0.0", 3
    info["finished"] = "no matter"
    (copy / "run.json").write_text(json.dumps(info))
    found = diff(whole, copy)
    assert found.environment == (
        Change("versions.torch", was, "2.0.0"),
        Change("threads", 1, 3),
    )
    assert found.same
    (copy / "run.json").unlink()
    assert Change("threads", 1, None) in diff(whole, copy).environment
    for damaged in ("{", "[1]", '"x"', "3"):
        (copy / "run.json").write_text(damaged)
        with pytest.raises(KeelError, match=r"run\.json"):
            diff(whole, copy)


# ---------------------------------------------------------------- rollouts


def test_one_token(whole: Path, copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[5]["tokens"][1] = 99
        rows[5]["completion"] = rows[5]["completion"][:1] + "?" + rows[5]["completion"][2:]
        rows[7]["reward"] = 9.0

    was = alter(parquet(copy, 2), change)
    found = first(whole, copy)
    assert (found.stage, found.step, found.prompt_id) == ("rl", 2, was[5]["prompt_id"])
    text, reward = was[5]["completion"], was[7]["reward"]
    assert found.changes == (
        Change("tokens", was[5]["tokens"][1], 99, (5, 1)),
        Change("completion", text, text[:1] + "?" + text[2:], (5,)),
        Change("reward", reward, 9.0, (7,), 9.0 - reward),
    )


def test_one_log_prob_by_one_bit(whole: Path, copy: Path) -> None:
    was = alter(parquet(copy, 3), put(2, "log_probs", next_float, 1))[2]["log_probs"][1]
    (change,) = first(whole, copy).changes
    assert (change.name, change.at) == ("log_probs", (2, 1))
    # The shortest decimals that read back as the two.
    assert np.float32(change.a) == np.float32(was) != np.float32(change.b)
    assert np.float32(change.b) == np.float32(next_float(was))
    assert len(str(change.a)) <= 12


def test_causal_order_within_a_step(whole: Path, copy: Path) -> None:
    """Each line changes something earlier than the lines before it did."""
    path = parquet(copy, 1)
    table = pq.read_table(path)
    pq.write_table(table.append_column("extra/note", pa.array(["a"] * 16)), path)
    assert cell(whole, copy) == ("extra/note", (0,), None, "a")
    for row, column, value, token in (
        (11, "advantages", 5.0, 0),
        (11, "reward", 5.0, None),
        (11, "reward/place_match", 5.0, None),
        (1, "reward", 5.0, None),
        (15, "finish", "stop", None),
        (9, "tokens", 99, 0),
        (4, "completion", "?", None),
        (4, "tokens", 99, 2),
        (4, "log_probs", -9.0, 1),
        (4, "tokens", 98, 1),
        (4, "written", False, 0),
        (4, "prompt", "7>", None),
        (4, "prompt_id", "elsewhere/1", None),
    ):
        alter(path, put(row, column, value, token))
        at = (row,) if token is None else (row, token)
        name, place, _, new = cell(whole, copy)
        assert (name, place, new) == (column, at, value)


def test_a_longer_completion_differs_where_the_shorter_ends(whole: Path, copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for name, more in (("tokens", [1, 2]), ("written", [True] * 2), ("log_probs", [-1.0] * 2)):
            rows[6][name] = rows[6][name] + more

    end = len(alter(parquet(copy, 1), change)[6]["tokens"])
    assert cell(whole, copy) == ("tokens", (6, end), None, 1)
    assert cell(copy, whole) == ("tokens", (6, end), 1, None)


def test_null_is_not_an_empty_array(whole: Path, copy: Path) -> None:
    left = Path(shutil.copytree(whole, copy.with_name("left")))
    for run, values in ((left, None), (copy, [])):
        empty = {key: [] for key in ("tokens", "log_probs", "written", "advantages")}
        alter(parquet(run, 1), lambda rows, e=empty: rows[3].update(e))  # type: ignore[misc]
        alter(parquet(run, 1), put(3, "old_log_probs", values))
    assert cell(left, copy)[:2] == ("old_log_probs", (3, 0))


def test_a_sequence_that_one_run_lacks(whole: Path, copy: Path) -> None:
    was = alter(parquet(copy, 2), lambda rows: rows.pop())
    assert cell(whole, copy) == ("sequences", (15,), 16, 15)
    assert first(copy, whole).prompt_id == was[15]["prompt_id"]
    # A reward in a sequence before it comes later, a token in one comes earlier.
    alter(parquet(copy, 2), put(0, "reward", 5.0))
    assert cell(whole, copy)[0] == "sequences"
    alter(parquet(copy, 2), put(14, "tokens", 99, 0))
    assert cell(whole, copy)[:2] == ("tokens", (14, 0))


def test_nan_is_nan_and_minus_zero_is_not_zero(whole: Path, copy: Path) -> None:
    left = Path(shutil.copytree(whole, copy.with_name("left")))
    for run in (left, copy):
        alter(parquet(run, 1), put(0, "log_probs", float("nan"), 0))
    alter(parquet(copy, 1), put(3, "advantages", -0.0, 0))
    alter(parquet(left, 1), put(3, "advantages", 0.0, 0))
    name, place, a, b = cell(left, copy)
    assert (name, place, str(a), str(b)) == ("advantages", (3, 0), "0.0", "-0.0")
    (change, *_) = diff(whole, copy).as_dict()["first"]["changes"]
    assert (change["name"], change["b"], change["difference"]) == ("log_probs", "nan", None)


def test_a_damaged_parquet_file(whole: Path, copy: Path) -> None:
    path = parquet(copy, 2)
    content = path.read_bytes()
    for damaged in (content[:-100], b"", b"PAR1" + content[4:-20] + b"x" * 20):
        path.write_bytes(damaged)
        with pytest.raises(KeelError, match=r"cannot read .*step-000002\.parquet: .*delete"):
            diff(whole, copy)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(KeelError, match=r"step-000002.parquet holds no rollouts \(no column comp"):
        diff(whole, copy)
    path.write_bytes(content)
    table = pq.read_table(path)
    at = table.column_names.index("tokens")
    pq.write_table(table.set_column(at, "tokens", pa.array(["x"] * 16)), path)
    with pytest.raises(KeelError, match=r"holds no rollouts \(column tokens has no lists\)"):
        diff(whole, copy)
    path.unlink()
    path.mkdir()
    with pytest.raises(KeelError, match=r"cannot read .*step-000002\.parquet: Is a directory"):
        diff(whole, copy)


def test_what_follows_the_first_difference_is_not_read(whole: Path, copy: Path) -> None:
    for step in (2, 3):
        parquet(copy, step).write_bytes(b"damaged")
    edit_line(copy, 0, loss=5.0)
    assert where(whole, copy) == ("rl", 1, "metrics", "loss")
    alter(parquet(copy, 1), put(0, "tokens", 99, 0))
    assert where(whole, copy) == ("rl", 1, "rollouts", "tokens")


# ---------------------------------------------------------------- metrics


def test_one_metric(whole: Path, copy: Path) -> None:
    was = edit_line(copy, 1, kl=None, loss=5.0)
    edit_line(copy, 2, loss=7.0)
    found = diff(whole, copy)
    assert found.first is not None
    assert (found.first.step, found.first.file) == (2, "metrics.jsonl")
    assert found.first.changes == (
        Change("kl", was["kl"], "null"),
        Change("loss", was["loss"], 5.0, difference=5.0 - was["loss"]),
    )
    assert found.checkpoints == 1
    edit_line(copy, 1, kl=was["kl"], loss=was["loss"], own=1)
    assert first(whole, copy).changes == (Change("own", None, 1),)
    # The weights before that record are compared.
    edit_checkpoint(copy, edit_tensor("trainable.safetensors", _zero_norm), step=1)
    assert where(whole, copy)[:3] == ("rl", 1, "checkpoint")


def _zero_norm(tensors: dict[str, Any]) -> None:
    (name,) = (name for name in tensors if name.endswith("model.norm.weight"))
    tensors[name][3] = 0


def test_a_torn_last_line_is_not_there(whole: Path, copy: Path) -> None:
    path = copy / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    found = diff(whole, copy)
    assert (found.reach_a, found.reach_b) == (Point("rl", 3), Point("rl", 2))
    assert (found.first, found.same) == (None, False)
    assert diff(copy, copy).same


def test_a_run_that_goes_further_agrees_as_far_as_both_go(whole: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-000003")
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    # Killed between the row and the rollouts of its step.
    parquet(copy, 3).unlink()
    parquet(copy, 2).unlink()
    for found in (diff(whole, copy), diff(copy, whole)):
        assert (found.first, found.same, found.checkpoints) == (None, False, 2)
        assert {found.reach_a, found.reach_b} == {Point("rl", 3), Point("rl", 2)}
        assert sorted(found.rollouts_only) == [0, 2]
    assert diff(whole, copy).rollouts_only == (2, 0)
    path.write_bytes(b"")
    shutil.rmtree(copy / "rollouts")
    shutil.rmtree(copy / "checkpoints")
    found = diff(copy, whole)
    assert (found.reach_a, found.first, found.checkpoints) == (None, None, 0)
    path.unlink()
    assert diff(copy, copy).same


def test_what_a_run_must_once_have_had(whole: Path, copy: Path) -> None:
    parquet(copy, 2).unlink()
    assert where(whole, copy) == ("rl", 2, "rollouts", "a")
    assert where(copy, whole) == ("rl", 2, "rollouts", "b")
    text = (copy / "recipe.toml").read_text()
    (copy / "recipe.toml").write_text(text.replace("rollouts_every = 1", "rollouts_every = 3"))
    found = diff(whole, copy)
    assert (found.first, found.rollouts_only) == (None, (1, 0))
    assert [change.name for change in found.recipe] == ["rl.rollouts_every"]
    shutil.copy(whole / "recipe.toml", copy / "recipe.toml")
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(lines[0] + lines[2])
    assert where(whole, copy) == ("rl", 2, "rollouts", "a")
    shutil.copy(parquet(whole, 2), parquet(copy, 2))
    assert where(whole, copy) == ("rl", 2, "metrics", "a")
    assert where(copy, whole) == ("rl", 2, "metrics", "b")


@pytest.mark.parametrize(
    "line", ['{"stage": "rl"', '{"stage": "x", "step": 2}', '{"step": 2}', "3", "[1]"]
)
def test_a_damaged_line(whole: Path, copy: Path, line: str) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(KeelError, match=r"metrics\.jsonl:3 is damaged"):
        diff(whole, copy)


# ---------------------------------------------------------------- checkpoints


def weight(a: Path, b: Path) -> tuple[int, str, tuple[Change, ...]]:
    """Step, file and changes of the first difference in checkpoints."""
    found = first(a, b)
    assert found.where == "checkpoint"
    name = found.file.partition("step-")[2].partition("/")[2]
    return found.step, name, found.changes


def test_one_weight_by_one_bit(whole: Path, copy: Path) -> None:
    name = "model.model.layers.1.mlp.up_proj.weight"

    def change(tensors: dict[str, Any]) -> None:
        tensors[name][5, 7] = next_float(float(tensors[name][5, 7]))
        tensors[name][6, 0] = 2.0
        tensors["model.model.norm.weight"][3] = 2.0

    edit_checkpoint(copy, edit_tensor("trainable.safetensors", change))
    edit_checkpoint(copy, edit_tensor("optimizer.safetensors", lambda t: t.popitem()), step=3)
    step, file, changes = weight(whole, copy)
    before = load_file(whole / "checkpoints" / "step-000002" / "trainable.safetensors")[name]
    assert (step, file) == (2, "trainable.safetensors")
    assert [(c.name, c.at) for c in changes] == [(name, (5, 7)), ("model.model.norm.weight", (3,))]
    assert np.float32(changes[0].a) == np.float32(float(before[5, 7])) != np.float32(changes[0].b)


def test_what_is_trained_comes_before_copies_of_it_and_state(whole: Path, copy: Path) -> None:
    def count(folder: Path) -> None:
        path = folder / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokens": 1, "beta": 0.5}))

    edit_checkpoint(copy, count)
    _, file, changes = weight(whole, copy)
    assert (file, changes[0].name, changes[0].a, changes[0].b) == ("state.json", "beta", 0.04, 0.5)
    assert [c.name for c in changes] == ["beta", "tokens"]
    edit_checkpoint(copy, edit_tensor("policy/model.safetensors", _zero_norm))
    assert weight(whole, copy)[1] == "policy/model.safetensors"
    edit_checkpoint(copy, edit_tensor("reference.safetensors", lambda t: t.popitem()))
    assert weight(whole, copy)[1] == "reference.safetensors"
    edit_checkpoint(copy, edit_tensor("optimizer.safetensors", lambda t: t.popitem()))
    _, file, (change,) = weight(whole, copy)
    assert (file, change.b, change.at) == ("optimizer.safetensors", None, ())
    assert str(change.a).startswith("F32 [")
    edit_checkpoint(copy, edit_tensor("trainable.safetensors", _zero_norm))
    assert weight(whole, copy)[1] == "trainable.safetensors"
    edit_checkpoint(copy, lambda folder: (folder / "trainable.safetensors").unlink())
    missing = Change("trainable.safetensors", None, "there")
    assert weight(copy, whole) == (2, "trainable.safetensors", (missing,))


def test_configuration_next_to_the_weights_is_no_difference(whole: Path, copy: Path) -> None:
    edit_checkpoint(
        copy, lambda folder: (folder / "policy" / "config.json").write_text("{}") and None
    )
    assert diff(whole, copy).same


def test_checkpoints_that_one_run_alone_kept_are_no_difference(whole: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-000002")
    found = diff(whole, copy)
    assert (found.same, found.checkpoints) == (True, 2)


@pytest.mark.parametrize(
    "kind", ["bfloat16", "float16", "float64", "int64", "bool", "float8_e4m3fn"]
)
def test_tensors_of_every_kind(whole: Path, copy: Path, kind: str) -> None:
    dtype = getattr(torch, kind)
    left = Path(shutil.copytree(whole, copy.with_name("left")))

    def given(last: int) -> Callable[[dict[str, Any]], None]:
        def change(tensors: dict[str, Any]) -> None:
            tensors.clear()
            for layer in (2, 10):
                tensors[f"layer.{layer}"] = torch.tensor([[1, 0], [1, last]]).to(dtype)
            tensors["none"] = torch.zeros(0, dtype=dtype)

        return change

    edit_checkpoint(left, edit_tensor("trainable.safetensors", given(0)))
    edit_checkpoint(copy, edit_tensor("trainable.safetensors", given(1)))
    _, _, (two, ten) = weight(left, copy)
    assert (two.name, ten.name, two.at) == ("layer.2", "layer.10", (1, 1))
    wanted: tuple[Any, Any] = {"bool": (False, True), "int64": (0, 1)}.get(kind, (0.0, 1.0))
    if kind.startswith("float8"):  # numpy has no such type: its bits
        wanted = ("0x0", "0x38")
    assert (two.a, two.b) == wanted
    assert type(two.a) is type(wanted[0])


def test_a_tensor_of_another_shape(whole: Path, copy: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.model.norm.weight"] = torch.zeros(3, 2)

    edit_checkpoint(copy, edit_tensor("trainable.safetensors", change))
    changes = (Change("model.model.norm.weight", "F32 [64]", "F32 [3, 2]"),)
    assert weight(whole, copy) == (2, "trainable.safetensors", changes)


def test_a_damaged_checkpoint(whole: Path, copy: Path) -> None:
    path = copy / "checkpoints" / "step-000003" / "trainable.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(KeelError, match=r"step-000003 is damaged \(trainable.safetensors differs"):
        diff(whole, copy)
    with pytest.raises(KeelError, match=r"step-000003 is damaged"):
        diff(copy, whole)
    # A manifest may vouch for what never was a tensor.
    for content in (b"", b"x" * 9, b"\x02" + b"\0" * 7 + b"[]", _header("[0, 64]"), _header("3")):
        edit_checkpoint(copy, lambda f, c=content: write(f / path.name, c), step=3)  # type: ignore[misc]
        with pytest.raises(KeelError, match=r"cannot read trainable\.safetensors of "):
            diff(whole, copy)
    edit_checkpoint(copy, lambda f: write(f / "state.json", b"{"), step=1)
    with pytest.raises(KeelError, match=r"cannot read state\.json of "):
        diff(whole, copy)
    edit_line(copy, 0, loss=5.0)
    assert where(whole, copy) == ("rl", 1, "metrics", "loss")


def _header(offsets: str) -> bytes:
    text = f'{{"a": {{"dtype": "F32", "shape": [16], "data_offsets": {offsets}}}}}'.encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 63


# ---------------------------------------------------------------- other kinds of stages


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model on sampled rows, then GRPO: two stages, and rows of the first."""
    sampled = {
        "tasks": [{"name": "sort_digits", "options": {"min_digits": 3, "max_digits": 4}}],
        "rewards": {"functions": [{"function": "place_match"}]},
        **{"train": 12, "validation": 4, "group_size": 5, "max_tokens": 5},
    }
    made = recipe(
        {"stage": "reward_model", "sampled": sampled, "steps": 2, "batch_size": 4},
        {
            "stage": "rl",
            "steps": 2,
            "tasks": sampled["tasks"],
            "rewards": sampled["rewards"],
            "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 5},
            "evaluation": {"prompts": 0},
        },
    )
    folder = tmp_path_factory.mktemp("staged") / "whole"
    train(made, folder)
    return folder


def test_stages_in_the_order_of_the_run(staged: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(staged, tmp_path / "copy"))
    found = diff(staged, copy)
    assert (found.same, found.stages) == (True, ("reward_model", "rl"))
    assert (found.checkpoints, found.reach_a) == (2, Point("rl", 2))
    alter(parquet(copy, 1, "rl-"), put(1, "log_probs", next_float, 0))
    assert where(staged, copy) == ("rl", 1, "rollouts", "log_probs")
    edit_checkpoint(
        copy, edit_tensor("trainable.safetensors", lambda t: t.popitem()), stage="reward_model-"
    )
    assert where(staged, copy)[:3] == ("reward_model", 2, "checkpoint")
    edit_line(copy, 0, accuracy=-1.0, reward=3.0)
    assert where(staged, copy) == ("reward_model", 1, "metrics", "accuracy")


def test_samples_of_a_stage(staged: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(staged, tmp_path / "copy"))
    path = RunFolder.open(copy).rows("reward_model", "train")
    lines = path.read_text().splitlines()
    was = json.loads(lines[2])
    lines[2] = json.dumps({**was, "chosen": "12"})
    path.write_text("\n".join(lines) + "\n")
    edit_line(copy, 0, loss=9.0)
    found = first(staged, copy)
    assert (found.stage, found.step, found.where) == ("reward_model", 0, "samples")
    assert found.file == "rows/reward_model-train.jsonl"
    assert found.changes == (Change("line 3.chosen", was["chosen"], "12"),)
    path.write_text("\n".join(lines[:2]) + "\n")
    assert {change.name for change in first(staged, copy).changes} == {
        f"line 3.{name}" for name in was
    }
    path.write_text("{\n")
    with pytest.raises(KeelError, match=r"reward_model-train\.jsonl:1 is damaged"):
        diff(staged, copy)


def test_runs_on_environments(tmp_path: Path) -> None:
    overrides = ["steps=200", "row_every=50", "replay.warmup=50", "replay.batch_size=8"]
    overrides += ["checkpoints.every=2", "checkpoints.keep=9", "watching.film=false"]
    overrides += ["network.hidden=[8]", "evaluation.every=0"]
    for name in ("a", "b"):
        control(load_control("dqn", "CartPole-v1", overrides), tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    assert diff(a, b).same
    assert diff(a, b).checkpoints == 2
    edit_checkpoint(b, edit_tensor("tensors.safetensors", _first_bit), step=4)
    step, file, changes = weight(a, b)
    assert (step, file, len(changes)) == (4, "tensors.safetensors", 1)
    edit_line(b, 2, **{"episode/return": 0.5})
    assert where(a, b)[1:] == (3, "metrics", "episode/return")


def _first_bit(tensors: dict[str, Any]) -> None:
    name = min(tensors)
    tensors[name].view(-1)[0] += 1


# ---------------------------------------------------------------- parts


def test_long_texts_are_clipped_to_where_they_differ() -> None:
    a, b = clipped("x" * 500 + "a" * 500, "x" * 500 + "b")
    assert a == "…" + "x" * 20 + "a" * 60 + "…"
    assert b == "…" + "x" * 20 + "b"
    assert clipped("a" * 61, None) == ("a" * 60 + "…", None)
    assert clipped("a" * 60, 3) == ("a" * 60, 3)


def test_no_run_in_a_folder(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="does not exist"):
        diff(whole, tmp_path / "none")
    with pytest.raises(KeelError, match="is no run folder"):
        diff(tmp_path, whole)


def test_a_folder_that_may_not_be_read(whole: Path, copy: Path) -> None:
    """Root, who may read all, reads as another user."""
    (copy / "rollouts").chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(KeelError, match=r"cannot read .*: Permission denied: fix it"):
            diff(copy, copy)
    finally:
        if user == 0:
            os.seteuid(0)
        (copy / "rollouts").chmod(0o755)


def test_it_needs_no_torch(made: Path) -> None:
    code = (
        "import sys; from keel.runs.diff import diff; "
        f"print(diff({str(made / 'whole')!r}, {str(made / 'other')!r}).same, "
        f"diff({str(made / 'whole')!r}, {str(made / 'twin')!r}).same, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
