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
from keel.runs.diff.checkpoints import CheckpointDifference
from keel.runs.diff.compare import First, Point, diff
from keel.runs.diff.rollouts import RolloutsDifference, Token
from keel.runs.diff.values import Around, Change, around, clipped, same, ulps
from keel.runs.layout import RunFolder
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


def rollouts(a: Path, b: Path) -> RolloutsDifference:
    """The difference in rollouts, which is the first there is."""
    found = diff(a, b)
    assert found.rollouts is not None
    assert found.first == First("rl", found.rollouts.step, "rollouts", found.rollouts.phase)
    assert not found.same
    return found.rollouts


def columns(found: RolloutsDifference) -> dict[str, tuple[Any, ...]]:
    return {c.name: (c.sequences, c.tokens, c.largest, c.sequence, c.token) for c in found.columns}


def next_float(value: float) -> float:
    """One ulp of a 32-bit float further from 0."""
    return float(np.nextafter(np.float32(value), np.float32(-np.inf)))


# ---------------------------------------------------------------- the same


def test_two_runs_of_one_recipe_and_seed_are_the_same(made: Path) -> None:
    found = diff(made / "whole", str(made / "twin"))
    assert found.same
    assert found.first is None
    assert (found.recipe, found.surroundings, found.stages) == ((), (), ("rl",))
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


# ---------------------------------------------------------------- recipes and surroundings


def test_another_seed_differs_from_the_first_prompt_on(made: Path) -> None:
    found = diff(made / "whole", made / "other")
    assert found.recipe == (Change("seed", 0, 1, 1.0),)
    told = rollouts(made / "whole", made / "other")
    assert (told.step, told.sequence, told.column, told.phase) == (1, 0, "prompt", "sampling")
    rows = [pq.read_table(parquet(made / run, 1)).to_pylist() for run in ("whole", "other")]
    assert (told.a, told.b) == (rows[0][0]["prompt"], rows[1][0]["prompt"])
    assert told.text == around(told.a, told.b)
    assert (told.token, told.ulps, told.rows) == (None, None, (16, 16))
    assert columns(told).keys() == set(ALL)
    # Counted here by hand.
    pairs = list(zip(*rows, strict=True))
    assert columns(told)["finish"][0] == sum(x["finish"] != y["finish"] for x, y in pairs)
    tokens = [
        sum(p != q for p, q in zip(x["tokens"], y["tokens"], strict=False))
        + abs(len(x["tokens"]) - len(y["tokens"]))
        for x, y in pairs
    ]
    assert columns(told)["tokens"][:3] == (sum(n > 0 for n in tokens), sum(tokens), None)
    apart = max(abs(x["reward"] - y["reward"]) for x, y in pairs)
    assert columns(told)["reward"][:3] == (
        sum(x["reward"] != y["reward"] for x, y in pairs), None, apart,
    )  # fmt: skip
    largest = max(
        float(np.max(np.abs(np.subtract(x["log_probs"][:n], y["log_probs"][:n]))))
        for x, y in pairs
        if (n := min(len(x["log_probs"]), len(y["log_probs"])))
    )
    assert columns(told)["log_probs"][2] == largest
    assert found.metrics is not None
    assert (found.metrics.stage, found.metrics.step) == ("rl", 1)
    assert (found.checkpoint, found.checkpoints) == (None, 0)


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
        Change("rl.minibatches", 1, 1.0, 0.0),
        Change("rl.optimizer.learning_rate", 0.0003, found.recipe[3].b),
        Change("rl.optimizer.betas[1]", 0.999, None),
        Change("rl.value.optimizer.betas[1]", 0.999, None),
    )
    assert str(found.recipe[3].b) == "nan"
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["recipe"][3]["b"] == "nan"
    assert (found.first, found.same) == (None, False)
    shutil.copy(path, whole.parent / "nan.toml")
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
    assert found.first == First("rl", 2, "rollouts", "sampling")
    (copy / "recipe.toml").write_text(f"{head}[[stages]]{more}\n[[stages]]{stage}")
    found = diff(whole, copy)
    assert (found.stages, found.first, found.same) == ((), None, False)
    assert (found.rollouts_only, found.checkpoints) == ((0, 0), 0)


def test_versions_and_threads_are_told_and_are_no_difference(whole: Path, copy: Path) -> None:
    info = json.loads((copy / "run.json").read_text())
    was = info["versions"]["torch"]
    info["versions"]["torch"], info["threads"] = "2.0.0", 3
    info["finished"] = "no matter"
    (copy / "run.json").write_text(json.dumps(info))
    found = diff(whole, copy)
    assert found.surroundings == (
        Change("versions.torch", was, "2.0.0"),
        Change("threads", 1, 3, 2.0),
    )
    assert found.same
    (copy / "run.json").unlink()
    assert Change("threads", 1, None) in diff(whole, copy).surroundings
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
    told = rollouts(whole, copy)
    assert (told.stage, told.step, told.phase) == ("rl", 2, "sampling")
    assert (told.sequence, told.token, told.column) == (5, 1, "tokens")
    assert (told.a, told.b, told.ulps) == (was[5]["tokens"][1], 99, None)
    assert (
        (told.group, told.prompt_id)
        == (was[5]["group"], was[5]["prompt_id"])
        == (1, was[5]["prompt_id"])
    )
    text = was[5]["completion"]
    assert told.text == Around(text[:1], text[1:], "?" + text[2:])
    assert told.tokens == Token(5, 1, told.a, 99, told.text)
    assert columns(told) == {
        "tokens": (1, 1, None, 5, 1),
        "completion": (1, None, None, 5, None),
        "reward": (1, None, 9.0 - was[7]["reward"], 7, None),
    }
    assert diff(whole, copy).metrics is None


def test_one_log_prob_by_one_ulp(whole: Path, copy: Path) -> None:
    was = alter(parquet(copy, 3), put(2, "log_probs", next_float, 1))
    told = rollouts(whole, copy)
    assert (told.step, told.phase, told.column) == (3, "sampling", "log_probs")
    assert (told.sequence, told.token, told.ulps, told.text) == (2, 1, 1, None)
    # The shortest decimals that read back as the two.
    assert np.float32(told.a) == np.float32(was[2]["log_probs"][1])
    assert np.float32(told.b) == np.float32(next_float(was[2]["log_probs"][1]))
    assert len(str(told.a)) <= 12
    assert told.tokens is None
    (only,) = told.columns
    assert only.largest == abs(was[2]["log_probs"][1] - next_float(was[2]["log_probs"][1])) > 0


def test_within_a_sequence_the_earlier_token_is_first_then_the_token_itself(
    whole: Path, copy: Path
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[4]["log_probs"][1] = -9.0
        rows[4]["tokens"][2] = 99
        rows[9]["tokens"][0] = 99

    was = alter(parquet(copy, 1), change)
    told = rollouts(whole, copy)
    assert (told.sequence, told.column, told.token) == (4, "log_probs", 1)
    assert columns(told)["tokens"] == (2, 2, None, 4, 2)
    assert told.text is None
    text = was[4]["completion"]
    assert told.tokens == Token(4, 2, was[4]["tokens"][2], 99, Around(text[-20:], "", ""))
    alter(parquet(copy, 1), put(4, "tokens", 99, 1))
    told = rollouts(whole, copy)
    assert (told.sequence, told.column, told.token) == (4, "tokens", 1)
    alter(parquet(copy, 1), put(4, "written", False, 0))
    told = rollouts(whole, copy)
    assert (told.column, told.token, told.a, told.b) == ("written", 0, True, False)
    assert columns(told)["written"][2] is None
    alter(parquet(copy, 1), put(4, "prompt_id", "elsewhere/1"))
    told = rollouts(whole, copy)
    assert (told.column, told.token, told.b) == ("prompt_id", None, "elsewhere/1")
    assert told.prompt_id != told.b
    alter(parquet(copy, 1), put(3, "finish", "stop"))
    told = rollouts(whole, copy)
    assert (told.sequence, told.column, told.b) == (3, "finish", "stop")


@pytest.mark.parametrize(
    ("column", "value", "token", "phase"),
    [
        ("prompt", "7>", None, "sampling"),
        ("prompt_format", "messages", None, "sampling"),
        ("task", "none", None, "sampling"),
        ("group", 77, None, "sampling"),
        ("written", False, 1, "sampling"),
        ("completion", "0", None, "sampling"),
        ("finish", "stop", None, "sampling"),
        ("reward/place_match", 0.25, None, "scoring"),
        ("reward/place_match", None, None, "scoring"),
        ("reward", 0.25, None, "scoring"),
        ("reward", float("nan"), None, "scoring"),
        ("old_log_probs", None, None, "learning"),
        ("advantages", 0.25, 1, "learning"),
    ],
)
def test_one_cell(
    whole: Path, copy: Path, column: str, value: Any, token: int | None, phase: str
) -> None:
    was = alter(parquet(copy, 2), put(8, column, value, token))
    if was[8][column] is value:  # nothing but null was there
        assert diff(whole, copy).same
        alter(parquet(copy, 2), put(8, column, [-1.5] * len(was[8]["tokens"])))
        value, token = -1.5, 0
    told = rollouts(whole, copy)
    assert (told.step, told.sequence, told.column, told.token) == (2, 8, column, token)
    assert told.phase == phase
    old = was[8][column] if token is None or was[8][column] is None else was[8][column][token]
    assert told.a == (pytest.approx(old, abs=1e-6) if isinstance(old, float) else old)
    assert same(told.b, value)
    assert told.ulps is None or (isinstance(old, float) and told.ulps > 1)
    assert [c.name for c in told.columns] == [column]
    json.dumps(diff(whole, copy).as_dict(), allow_nan=False)


def test_sampling_is_before_scoring_and_that_before_learning(whole: Path, copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["advantages"][0] = 5.0
        rows[1]["reward"] = 5.0
        rows[3]["reward/place_match"] = 5.0
        rows[15]["finish"] = "stop"

    was = alter(parquet(copy, 1), change)
    told = rollouts(whole, copy)
    assert (told.phase, told.sequence, told.column) == ("sampling", 15, "finish")
    alter(parquet(copy, 1), put(15, "finish", was[15]["finish"]))
    told = rollouts(whole, copy)
    assert (told.phase, told.sequence, told.column) == ("scoring", 1, "reward")
    alter(parquet(copy, 1), put(1, "reward/place_match", 5.0))
    told = rollouts(whole, copy)
    assert (told.phase, told.sequence, told.column) == ("scoring", 1, "reward/place_match")


def test_extras_come_last_and_are_the_rewards(whole: Path, copy: Path) -> None:
    def with_extra(run: Path, values: list[Any]) -> None:
        path = parquet(run, 1)
        table = pq.read_table(path)
        pq.write_table(table.append_column("extra/note", pa.array(values)), path)

    left = Path(shutil.copytree(whole, copy.with_name("left")))
    with_extra(left, ["a"] * 16)
    with_extra(copy, ["a"] * 6 + ["b"] * 10)
    told = rollouts(left, copy)
    assert (told.phase, told.column, told.sequence) == ("scoring", "extra/note", 6)
    assert (told.a, told.b, columns(told)["extra/note"][0]) == ("a", "b", 10)
    told = rollouts(whole, copy)
    assert (told.column, told.sequence, told.a, told.b) == ("extra/note", 0, None, "a")
    alter(parquet(copy, 1), put(11, "advantages", 5.0, 0))
    told = rollouts(left, copy)
    assert (told.phase, told.column, told.sequence) == ("learning", "advantages", 11)


def test_a_longer_completion_differs_where_the_shorter_ends(whole: Path, copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for name, more in (("tokens", [1, 2]), ("written", [True] * 2), ("log_probs", [-1.0] * 2)):
            rows[6][name] = rows[6][name] + more

    was = alter(parquet(copy, 1), change)
    end = len(was[6]["tokens"])
    told = rollouts(whole, copy)
    assert (told.sequence, told.token, told.column) == (6, end, "tokens")
    assert (told.a, told.b) == (None, 1)
    assert columns(told)["tokens"] == (1, 2, None, 6, end)
    back = rollouts(copy, whole)
    assert (back.a, back.b) == (1, None)


def test_null_is_not_an_empty_array(whole: Path, copy: Path) -> None:
    left = Path(shutil.copytree(whole, copy.with_name("left")))
    for run, values in ((left, None), (copy, [])):
        empty = {key: [] for key in ("tokens", "log_probs", "written", "advantages")}
        alter(parquet(run, 1), lambda rows, e=empty: rows[3].update(e))  # type: ignore[misc]
        alter(parquet(run, 1), put(3, "old_log_probs", values))
    told = rollouts(left, copy)
    assert (told.sequence, told.column, told.phase) == (3, "old_log_probs", "learning")


def test_a_sequence_that_one_run_lacks(whole: Path, copy: Path) -> None:
    was = alter(parquet(copy, 2), lambda rows: rows.pop())
    told = rollouts(whole, copy)
    assert (told.column, told.sequence, told.rows) == ("sequence", 15, (16, 15))
    assert (told.a, told.b, told.prompt_id) == (was[15]["prompt_id"], None, was[15]["prompt_id"])
    assert (told.phase, told.columns) == ("sampling", ())
    assert rollouts(copy, whole).b == was[15]["prompt_id"]
    # A reward says nothing against it, a token of a sequence before it does.
    alter(parquet(copy, 2), put(0, "reward", 5.0))
    assert rollouts(whole, copy).column == "sequence"
    alter(parquet(copy, 2), put(14, "tokens", 99, 0))
    assert rollouts(whole, copy).sequence == 14


def test_nan_is_nan_and_minus_zero_is_not_zero(whole: Path, copy: Path) -> None:
    left = Path(shutil.copytree(whole, copy.with_name("left")))
    for run in (left, copy):
        alter(parquet(run, 1), put(0, "log_probs", float("nan"), 0))
    alter(parquet(copy, 1), put(3, "advantages", -0.0, 0))
    alter(parquet(left, 1), put(3, "advantages", 0.0, 0))
    told = rollouts(left, copy)
    assert (told.column, told.sequence, told.token) == ("advantages", 3, 0)
    assert (str(told.a), str(told.b), told.ulps) == ("0.0", "-0.0", 0)
    assert columns(told) == {"advantages": (1, 1, 0.0, 3, 0)}
    told = rollouts(whole, copy)
    assert (told.column, str(told.b), told.ulps) == ("log_probs", "nan", None)
    assert columns(told)["log_probs"] == (1, 1, None, 0, 0)
    assert diff(whole, copy).as_dict()["rollouts"]["b"] == "nan"


def test_a_damaged_parquet_file(whole: Path, copy: Path) -> None:
    path = parquet(copy, 2)
    content = path.read_bytes()
    for damaged in (content[:-100], b"", b"PAR1" + content[4:-20] + b"x" * 20):
        path.write_bytes(damaged)
        with pytest.raises(KeelError, match=r"cannot read .*step-000002\.parquet: .*mend"):
            diff(whole, copy)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(KeelError, match=r"step-000002.parquet holds no rollouts \(no column comp"):
        diff(whole, copy)
    path.write_bytes(content)
    table = pq.read_table(path)
    at = table.column_names.index("tokens")
    pq.write_table(table.set_column(at, "tokens", pa.array(["x"] * 16)), path)
    with pytest.raises(KeelError, match=r"holds no rollouts \(column tokens is string\)"):
        diff(whole, copy)
    path.unlink()
    path.mkdir()
    with pytest.raises(KeelError, match=r"cannot read .*step-000002\.parquet: Is a directory"):
        diff(whole, copy)


def test_rollouts_past_the_first_difference_are_not_read(whole: Path, copy: Path) -> None:
    for step in (2, 3):
        parquet(copy, step).write_bytes(b"damaged")
    edit_line(copy, 0, loss=5.0)
    assert diff(whole, copy).first == First("rl", 1, "metrics", "learning")
    alter(parquet(copy, 1), put(0, "tokens", 99, 0))
    found = diff(whole, copy)
    assert found.first == First("rl", 1, "rollouts", "sampling")
    assert found.metrics is not None


# ---------------------------------------------------------------- metrics


def test_one_metric(whole: Path, copy: Path) -> None:
    was = edit_line(copy, 1, kl=None, loss=5.0)
    edit_line(copy, 2, loss=7.0)
    found = diff(whole, copy)
    assert found.first == First("rl", 2, "metrics", "learning")
    assert found.metrics is not None
    assert found.metrics.changes == (
        Change("kl", was["kl"], "null"),
        Change("loss", was["loss"], 5.0, 5.0 - was["loss"]),
    )
    assert (found.rollouts, found.checkpoint, found.checkpoints) == (None, None, 1)
    edit_line(copy, 1, kl=was["kl"], loss=was["loss"], own=1)
    edit_line(copy, 2, loss=was["loss"])
    found = diff(whole, copy)
    assert found.metrics is not None
    assert found.metrics.changes == (Change("own", None, 1),)
    # The weights before that row are looked at.
    edit_checkpoint(copy, edit_tensor("trainable.safetensors", _zero_norm), step=1)
    assert diff(whole, copy).first == First("rl", 1, "checkpoint", "learning")


def _zero_norm(tensors: dict[str, Any]) -> None:
    (name,) = (name for name in tensors if name.endswith("model.norm.weight"))
    tensors[name][3] = 0


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("completions/mean_length", "sampling"),
        ("step/tokens", "sampling"),
        ("rewards/place_match/mean", "scoring"),
        ("reward", "scoring"),
        ("loss", "learning"),
    ],
)
def test_where_no_rollouts_were_kept_the_metrics_say_the_phase(
    whole: Path, copy: Path, name: str, phase: str
) -> None:
    edit_line(copy, 1, **{"loss": -3.5, name: -3.5})
    assert diff(whole, copy).first == First("rl", 2, "metrics", "learning")
    left = Path(shutil.copytree(whole, copy.with_name("left")))
    for run in (left, copy):
        parquet(run, 2).unlink()
        one_lacks_them = diff(left, copy).metrics
        assert one_lacks_them is not None
        assert one_lacks_them.phase == phase
    assert diff(left, copy).first == First("rl", 2, "metrics", phase)  # type: ignore[arg-type]


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
    assert diff(whole, copy).first == First("rl", 2, "rollouts", "record", "a")
    assert diff(copy, whole).first == First("rl", 2, "rollouts", "record", "b")
    text = (copy / "recipe.toml").read_text()
    (copy / "recipe.toml").write_text(text.replace("rollouts_every = 1", "rollouts_every = 3"))
    found = diff(whole, copy)
    assert (found.first, found.rollouts_only) == (None, (1, 0))
    assert [change.name for change in found.recipe] == ["rl.rollouts_every"]
    shutil.copy(whole / "recipe.toml", copy / "recipe.toml")
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(lines[0] + lines[2])
    assert diff(whole, copy).first == First("rl", 2, "rollouts", "record", "a")
    shutil.copy(parquet(whole, 2), parquet(copy, 2))
    assert diff(whole, copy).first == First("rl", 2, "metrics", "record", "a")
    assert diff(copy, whole).first == First("rl", 2, "metrics", "record", "b")


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


def checked(a: Path, b: Path) -> CheckpointDifference:
    found = diff(a, b)
    assert found.checkpoint is not None
    assert found.first == First(
        found.checkpoint.stage, found.checkpoint.step, "checkpoint", "learning"
    )
    assert not found.same
    return found.checkpoint


def test_one_weight_by_one_ulp(whole: Path, copy: Path) -> None:
    name = "model.model.layers.1.mlp.up_proj.weight"

    def change(tensors: dict[str, Any]) -> None:
        tensors[name][5, 7] = next_float(float(tensors[name][5, 7]))
        tensors[name][6, 0] = 2.0
        tensors["model.model.norm.weight"][3] = 2.0

    edit_checkpoint(copy, edit_tensor("trainable.safetensors", change))
    edit_checkpoint(copy, edit_tensor("optimizer.safetensors", lambda t: t.popitem()), step=3)
    told = checked(whole, copy)
    before = load_file(whole / "checkpoints" / "step-000002" / "trainable.safetensors")[name]
    assert (told.step, told.file, told.name) == (2, "trainable.safetensors", name)
    assert (told.index, told.ulps) == ((5, 7), 1)
    assert np.float32(told.a) == np.float32(float(before[5, 7])) != np.float32(told.b)
    assert (told.differing, told.elements, told.tensors) == (2, before.numel(), 2)


def test_what_is_trained_comes_before_copies_of_it_and_state(whole: Path, copy: Path) -> None:
    state = "checkpoints/step-000002/state.json"
    tokens = json.loads((whole / state).read_text())["tokens"]

    def count(folder: Path) -> None:
        path = folder / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokens": 1, "beta": 0.5}))

    edit_checkpoint(copy, count)
    told = checked(whole, copy)
    assert (told.file, told.name, told.a, told.b) == ("state.json", "beta", 0.04, 0.5)
    assert (told.index, told.tensors, told.elements) == (None, 2, None)
    assert tokens != 1
    edit_checkpoint(copy, edit_tensor("policy/model.safetensors", _zero_norm))
    assert checked(whole, copy).file == "policy/model.safetensors"
    edit_checkpoint(copy, edit_tensor("reference.safetensors", lambda t: t.popitem()))
    assert checked(whole, copy).file == "reference.safetensors"
    edit_checkpoint(copy, edit_tensor("optimizer.safetensors", lambda t: t.popitem()))
    told = checked(whole, copy)
    assert told.file == "optimizer.safetensors"
    assert (told.b, told.index) == (None, None)
    assert str(told.a).startswith("F32 [")
    edit_checkpoint(copy, edit_tensor("trainable.safetensors", _zero_norm))
    assert checked(whole, copy).file == "trainable.safetensors"
    edit_checkpoint(copy, lambda folder: (folder / "trainable.safetensors").unlink())
    told = checked(copy, whole)
    assert (told.file, told.name, told.a, told.b) == ("trainable.safetensors", None, None, "there")


def test_configuration_beside_the_weights_is_no_difference(whole: Path, copy: Path) -> None:
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
    told = checked(left, copy)
    assert (told.name, told.index, told.differing, told.elements) == ("layer.2", (1, 1), 1, 4)
    assert told.tensors == 2
    wanted: tuple[Any, Any] = {"bool": (False, True), "int64": (0, 1)}.get(kind, (0.0, 1.0))
    if kind.startswith("float8"):  # numpy has none such: its bits
        wanted = ("0x0", "0x38")
    assert (told.a, told.b) == wanted
    assert type(told.a) is type(wanted[0])
    # From 0 to 1 there are as many floats as the bits of 1 say.
    assert told.ulps == {"float64": 0x3FF << 52}.get(kind)


def test_a_tensor_of_another_shape(whole: Path, copy: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.model.norm.weight"] = torch.zeros(3, 2)

    edit_checkpoint(copy, edit_tensor("trainable.safetensors", change))
    told = checked(whole, copy)
    assert (told.a, told.b, told.index) == ("F32 [64]", "F32 [3, 2]", None)
    assert (told.tensors, told.elements) == (1, None)


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
        with pytest.raises(KeelError, match=r"cannot read .*trainable\.safetensors: .*delete"):
            diff(whole, copy)
    edit_checkpoint(copy, lambda f: write(f / "state.json", b"{"), step=1)
    with pytest.raises(KeelError, match=r"cannot read .*state\.json: .*delete"):
        diff(whole, copy)
    # It is past what is looked at once the steps differ.
    edit_line(copy, 0, loss=5.0)
    assert diff(whole, copy).first == First("rl", 1, "metrics", "learning")


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
        **{"train": 12, "heldout": 4, "group_size": 5, "max_tokens": 5},
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
    assert diff(staged, copy).first == First("rl", 1, "rollouts", "sampling")
    edit_checkpoint(
        copy, edit_tensor("trainable.safetensors", lambda t: t.popitem()), stage="reward_model-"
    )
    assert diff(staged, copy).first == First("reward_model", 2, "checkpoint", "learning")
    edit_line(copy, 0, accuracy=-1.0, reward=3.0)
    assert diff(staged, copy).first == First("reward_model", 1, "metrics", "learning")


@pytest.mark.parametrize(
    ("changed", "phase"),
    [({"chosen": "12"}, "sampling"), ("turned", "scoring"), ({"label": 0.5}, "scoring")],
)
def test_rows_that_a_stage_sampled(staged: Path, tmp_path: Path, changed: Any, phase: str) -> None:
    copy = Path(shutil.copytree(staged, tmp_path / "copy"))
    path = RunFolder.open(copy).rows("reward_model", "train")
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    if changed == "turned":
        changed = {"chosen": row["rejected"], "rejected": row["chosen"]}
    lines[2] = json.dumps({**row, **changed})
    path.write_text("\n".join(lines) + "\n")
    edit_line(copy, 0, loss=9.0)
    found = diff(staged, copy)
    assert found.first == First("reward_model", 0, "rows", phase)  # type: ignore[arg-type]
    assert found.rows is not None
    assert (found.rows.side, found.rows.row, found.rows.phase) == ("train", 3, phase)
    assert {c.name: c.b for c in found.rows.changes} == changed
    assert found.metrics is not None
    path.write_text("\n".join(lines[:2]) + "\n")
    found = diff(staged, copy)
    assert found.rows is not None
    assert (found.rows.row, found.rows.phase) == (3, "sampling")
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
    told = checked(a, b)
    assert (told.step, told.file, told.differing) == (4, "tensors.safetensors", 1)
    edit_line(b, 2, **{"episode/return": 0.5})
    found = diff(a, b)
    assert found.first is not None
    assert (found.first.step, found.first.where, found.first.phase) == (3, "metrics", "learning")


def _first_bit(tensors: dict[str, Any]) -> None:
    name = min(tensors)
    tensors[name].view(-1)[0] += 1


# ---------------------------------------------------------------- parts


def test_ulps_count_across_zero() -> None:
    least = float(np.float32(1e-45))
    assert ulps(least, -least, np.float32) == 2
    assert ulps(-0.0, 0.0, np.float32) == 0
    assert ulps(1.0, 1.0 + 2**-52, np.float64) == 1
    assert ulps(1.0, 1.0 + 2**-23, np.float32) == 1
    assert ulps(float("inf"), 1.0, np.float32) is None
    assert ulps(1, 2.0, np.float64) is None


def test_long_texts_are_told_from_where_they_part() -> None:
    a, b = clipped("x" * 500 + "a" * 500, "x" * 500 + "b")
    assert a == "…" + "x" * 20 + "a" * 60 + "…"
    assert b == "…" + "x" * 20 + "b"
    assert clipped("a" * 61, None) == ("a" * 60 + "…", None)
    assert clipped("a" * 60, 3) == ("a" * 60, 3)
    assert around("same", "same") == Around("same", "", "")


def test_no_run_in_a_folder(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="does not exist"):
        diff(whole, tmp_path / "none")
    with pytest.raises(KeelError, match="is no run folder"):
        diff(tmp_path, whole)


def test_a_folder_that_may_not_be_read(whole: Path, copy: Path) -> None:
    """Root, who may read all, reads as nobody."""
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
        "import sys; from keel.runs.diff.compare import diff; "
        f"print(diff({str(made / 'whole')!r}, {str(made / 'other')!r}).same, "
        f"diff({str(made / 'whole')!r}, {str(made / 'twin')!r}).same, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
