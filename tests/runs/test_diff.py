"""Copies of real runs, altered at one place each: the difference names that very place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from keel.cli.main import main
from keel.models.policy import load_policy
from keel.runs import checkpoint
from keel.runs.diff import FirstDifference, Point, diff
from keel.runs.layout import RunFolder
from keel.runs.values import Change, change
from keel.training.run import train
from keel.types import KeelError
from tests.training.judged import recipe
from tests.training.small import small

DENSE = "rewards.functions=[{function='place_match'}]"
QUICK = (DENSE, "steps=3", "evaluation.prompts=0", "checkpoints.every=1")
Alter = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three GRPO steps, and (`twin`) the same again."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("whole", "twin"):
        train(small(*QUICK), root / name)
    return root


@pytest.fixture
def whole(made: Path) -> Path:
    return made / "whole"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def parquet(run: Path, step: int, stage: str = "") -> Path:
    return run / "rollouts" / f"{stage}step-{step:06d}.parquet"


def edit_rollouts(
    path: Path, change: Callable[[list[dict[str, Any]]], Any]
) -> list[dict[str, Any]]:
    """Change the examples of a rollouts file in place; returns them as they were."""
    table = pq.read_table(path)
    before: list[dict[str, Any]] = table.to_pylist()
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path, compression="zstd")
    return before


def put(row: int, column: str, value: Any, token: int | None = None) -> Any:
    """A change of one cell, or of one token's value in it."""

    def change(rows: list[dict[str, Any]]) -> None:
        if token is None:
            rows[row][column] = value
        else:
            rows[row][column][token] = value

    return change


def edit_record(run: Path, number: int, **changes: Any) -> dict[str, Any]:
    """Change a line of metrics.jsonl (from 0); returns the record as it was."""
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines()
    record: dict[str, Any] = json.loads(lines[number])
    lines[number] = json.dumps({**record, **changes})
    path.write_text("\n".join(lines) + "\n")
    return record


def edit_checkpoint(run: Path, change: Callable[[Path], Any], name: str = "step-000002") -> None:
    """Change a checkpoint as a run would have written it: whole, with its manifest."""
    target = run / "checkpoints" / name
    with checkpoint.writing(target) as aside:
        shutil.copytree(target, aside, dirs_exist_ok=True)
        (aside / "manifest.json").unlink()
        change(aside)


def edit_tensors(name: str, change: Alter) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return edit


def set_norm(tensors: dict[str, Any]) -> None:
    (name,) = (name for name in tensors if name.endswith("model.norm.weight"))
    tensors[name][3] = 0


def first(a: Path, b: Path) -> FirstDifference:
    """The first difference of two runs that differ."""
    found = diff(a, b)
    assert found.first is not None
    assert not found.same
    json.dumps(found.as_dict(), allow_nan=False)
    return found.first


def where(a: Path, b: Path) -> tuple[Any, ...]:
    """Step, file, name of the value and place of the first difference."""
    found = first(a, b)
    return found.step, found.file.split("/")[-1], found.change.name, found.change.at


# ---------------------------------------------------------------- equal runs, recipes


def test_other_content_of_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tmp_path / "model (1)"
    for run, seed in (("a", 5), ("b", 5), ("c", 6)):
        shutil.rmtree(name, ignore_errors=True)
        load_policy(small(f"seed={seed}").model, seed).save(name)
        train(small("steps=1", "evaluation.prompts=0", f"model.name={name}"), tmp_path / run)
    a, b, c = (tmp_path / run for run in "abc")
    assert diff(a, b).inputs == ()
    assert diff(a, b).same
    (found,) = diff(a, c).inputs
    assert found.name == "model.name"
    assert None not in (found.a, found.b)
    assert not diff(a, c).same
    assert main(["runs", "diff", str(a), str(c)]) == 1
    assert "different content of model.name" in capsys.readouterr().out


def test_two_runs_of_one_recipe_and_seed_are_the_same(made: Path) -> None:
    found = diff(made / "whole", made / "twin")
    assert found.same
    assert (found.recipe, found.environment, found.stages) == ((), (), ("rl",))
    assert (found.reach_a, found.reach_b, found.checkpoints) == (*[Point("rl", 3)] * 2, 3)


def test_times_pictures_and_bytes_that_hold_the_same_are_no_difference(
    whole: Path, copy: Path
) -> None:
    for name in ("timings.jsonl", "events.jsonl", "curve.png"):
        (copy / name).write_bytes(b"otherwise")
    pq.write_table(pq.read_table(parquet(copy, 1)), parquet(copy, 1), compression="none")
    assert parquet(copy, 1).read_bytes() != parquet(whole, 1).read_bytes()
    (copy / "metrics.jsonl").write_text((copy / "metrics.jsonl").read_text().replace(", ", " , "))

    def rewrite(folder: Path) -> None:
        path = folder / "trainable.safetensors"
        save_file(load_file(path), path, metadata={"by": "hand"})
        (folder / "policy" / "config.json").write_text("{}")

    edit_checkpoint(copy, rewrite)
    shutil.rmtree(copy / "checkpoints" / "step-000001")
    found = diff(whole, copy)
    assert (found.same, found.checkpoints) == (True, 2)


def test_recipe_differences_are_dotted_paths(whole: Path, copy: Path) -> None:
    path = copy / "recipe.toml"
    text = path.read_text()
    for old, new in (
        ("threads = 1\n", ""),
        ('lora = "none"', "lora = {rank = 4}"),
        ("learning_rate = 0.0003", "learning_rate = nan"),
        ("    0.999,\n", ""),
        ("minibatches = 1", "minibatches = 1.0"),
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
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["recipe"][3]["b"] == "nan"
    assert (found.first, found.same) == (None, False)
    assert diff(copy, shutil.copytree(copy, copy.with_name("again"))).same  # NaN is NaN


def test_stages_are_compared_as_far_as_the_recipes_agree(whole: Path, copy: Path) -> None:
    text = (copy / "recipe.toml").read_text()
    head, stage = text.split("[[stages]]", 1)
    more = stage.partition("\n[expected]")[0].replace('name = "rl"\n', 'name = "more"\n', 1)
    (copy / "recipe.toml").write_text(f"{head}[[stages]]{stage}\n[[stages]]{more}")
    for folder in ("rollouts", "checkpoints"):
        for path in sorted((copy / folder).iterdir()):
            path.rename(path.with_name(f"rl-{path.name}"))
    edit_rollouts(parquet(copy, 2, "rl-"), put(3, "tokens", 99, 1))
    found = diff(whole, copy)
    assert (found.recipe, found.stages) == ((Change("stages", "rl", "rl, more"),), ("rl",))
    assert where(whole, copy) == (2, "step-000002.parquet", "tokens", (3, 1))
    (copy / "recipe.toml").write_text(f"{head}[[stages]]{more}\n[[stages]]{stage}")
    found = diff(whole, copy)
    assert (found.stages, found.first, found.same, found.checkpoints) == ((), None, False, 0)


def test_versions_and_threads_are_reported_and_are_no_difference(whole: Path, copy: Path) -> None:
    info = json.loads((copy / "run.json").read_text())
    was = info["versions"]["torch"]
    info["versions"]["torch"], info["threads"], info["finished"] = "2.0.0", 3, "no matter"
    (copy / "run.json").write_text(json.dumps(info))
    found = diff(whole, copy)
    changed = (Change("versions.torch", was, "2.0.0"), Change("threads", 1, 3))
    assert (found.environment, found.same) == (changed, True)
    (copy / "run.json").unlink()
    assert Change("threads", 1, None) in diff(whole, copy).environment


# ---------------------------------------------------------------- rollouts


def test_one_token_is_found_with_its_prompt(whole: Path, copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[5]["tokens"][1] = 99
        rows[5]["log_probs"][2] = -9.0
        rows[5]["completion"] = "?"
        rows[2]["reward"] = 9.0

    was = edit_rollouts(parquet(copy, 2), change)[5]
    assert first(whole, copy) == FirstDifference(
        *("rl", 2, "rollouts/step-000002.parquet"),
        Change("tokens", was["tokens"][1], 99, (5, 1)),
        was["prompt_id"],
    )


def test_causal_order_within_a_step(whole: Path, copy: Path) -> None:
    """Each line changes something earlier than the lines before it did."""
    path = parquet(copy, 1)
    table = pq.read_table(path)
    pq.write_table(table.append_column("extra/note", pa.array(["a"] * 16)), path)
    assert first(whole, copy).change == Change("extra/note", None, "a", (0,))
    for row, column, value, token in (
        (11, "advantages", 5.0, 0),
        (11, "reward", 5.0, None),
        (11, "reward/place_match", 5.0, None),
        (15, "finish", "stop", None),
        (9, "tokens", 99, 0),
        (4, "completion", "?", None),
        (4, "tokens", 99, 2),
        (4, "log_probs", -9.0, 1),
        (4, "tokens", 98, 1),
        (4, "prompt", "7>", None),
        (4, "prompt_id", "elsewhere/1", None),
    ):
        edit_rollouts(path, put(row, column, value, token))
        found = first(whole, copy).change
        at = (row,) if token is None else (row, token)
        assert (found.name, found.at, found.b) == (column, at, value)


def test_missing_tokens_sequences_and_values(whole: Path, copy: Path) -> None:
    rows = edit_rollouts(parquet(copy, 2), lambda rows: rows.pop())
    assert first(whole, copy).change == Change("sequences", 16, 15, (15,))
    assert first(copy, whole).prompt_id == rows[15]["prompt_id"]
    edit_rollouts(parquet(copy, 2), put(0, "reward", 5.0))  # scored later
    assert first(whole, copy).change.name == "sequences"
    longer = rows[6]["tokens"] + [1, 2]
    edit_rollouts(parquet(copy, 2), put(6, "tokens", longer))
    assert first(whole, copy).change == Change("tokens", None, 1, (6, len(longer) - 2))
    left = Path(shutil.copytree(whole, copy.with_name("left")))
    for run, values in ((left, None), (copy, [])):
        edit_rollouts(parquet(run, 1), put(3, "advantages", values))
    assert where(left, copy)[2:] == ("advantages", (3, 0))


def test_nan_equals_nan_and_minus_zero_differs_from_zero(whole: Path, copy: Path) -> None:
    left = Path(shutil.copytree(whole, copy.with_name("left")))
    for run, zero in ((left, 0.0), (copy, -0.0)):
        edit_rollouts(parquet(run, 1), put(0, "log_probs", float("nan"), 0))
        edit_rollouts(parquet(run, 1), put(3, "advantages", zero, 0))
    found = first(left, copy).change
    assert (found.name, found.at, str(found.a), str(found.b)) == (
        *("advantages", (3, 0)),
        *("0.0", "-0.0"),
    )
    assert diff(whole, copy).as_dict()["first"]["change"]["b"] == "nan"


# ---------------------------------------------------------------- metrics, reach


def test_one_metric(whole: Path, copy: Path) -> None:
    was = edit_record(copy, 1, kl=None, loss=5.0)
    found = first(whole, copy)
    assert (found.step, found.file) == (2, "metrics.jsonl")
    assert found.change == Change("kl", was["kl"], "null")
    edit_record(copy, 1, kl=was["kl"])
    assert first(whole, copy).change == change("loss", was["loss"], 5.0)
    # The rollouts of a step come before its metrics, the checkpoint of the step before earlier.
    edit_rollouts(parquet(copy, 2), put(0, "tokens", 99, 0))
    assert where(whole, copy)[2] == "tokens"
    edit_checkpoint(copy, edit_tensors("trainable.safetensors", set_norm), "step-000001")
    assert where(whole, copy)[:2] == (1, "trainable.safetensors")


def test_a_run_that_goes_further_agrees_as_far_as_both_go(whole: Path, copy: Path) -> None:
    path = copy / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # an incomplete last line is not there
    shutil.rmtree(copy / "checkpoints" / "step-000003")
    for found in (diff(whole, copy), diff(copy, whole)):
        assert (found.first, found.same, found.checkpoints) == (None, False, 2)
        assert {found.reach_a, found.reach_b} == {Point("rl", 3), Point("rl", 2)}
    path.write_bytes(b"")
    found = diff(copy, whole)
    assert (found.reach_a, found.first, found.checkpoints) == (None, None, 2)


def test_what_a_run_must_have_had_is_a_difference(whole: Path, copy: Path) -> None:
    file = "rollouts/step-000002.parquet"
    parquet(copy, 2).unlink()
    assert first(whole, copy) == FirstDifference("rl", 2, file, Change("rollouts", "present", None))
    assert first(copy, whole).change == Change("rollouts", None, "present")
    text = (copy / "recipe.toml").read_text()
    (copy / "recipe.toml").write_text(text.replace("rollouts_every = 1", "rollouts_every = 3"))
    found = diff(whole, copy)
    assert found.first is None
    assert [change.name for change in found.recipe] == ["rl.rollouts_every"]
    shutil.copytree(whole, copy, dirs_exist_ok=True)
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(lines[0] + lines[2])
    assert where(whole, copy) == (2, "metrics.jsonl", "record", ())


# ---------------------------------------------------------------- checkpoints


def test_one_weight_by_one_bit(whole: Path, copy: Path) -> None:
    name = "model.model.layers.1.mlp.up_proj.weight"
    values = []

    def change(tensors: dict[str, Any]) -> None:
        values.append(float(tensors[name][5, 7]))
        tensors[name][5, 7] = float(np.nextafter(np.float32(values[0]), np.float32(1)))
        tensors[name][6, 0] = 2.0
        values.append(float(tensors[name][5, 7]))

    edit_checkpoint(copy, edit_tensors("trainable.safetensors", change))
    found = first(whole, copy)
    assert (found.step, found.file) == (2, "checkpoints/step-000002/trainable.safetensors")
    assert (found.change.name, found.change.at) == (name, (5, 7))
    assert [found.change.a, found.change.b] == values


def test_what_is_trained_comes_before_copies_of_it_and_state(whole: Path, copy: Path) -> None:
    def set_beta(folder: Path) -> None:
        path = folder / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "beta": 0.5}))

    def drop(tensors: dict[str, Any]) -> None:
        tensors.popitem()

    edit_checkpoint(copy, set_beta)
    assert where(whole, copy) == (2, "state.json", "beta", ())
    for name in ("policy/model.safetensors", "reference.safetensors", "optimizer.safetensors"):
        edit_checkpoint(copy, edit_tensors(name, drop))
        found = first(whole, copy)
        assert found.file == f"checkpoints/step-000002/{name}"
    assert str(found.change.a).startswith("F32 [")
    assert found.change.b is None
    edit_checkpoint(copy, lambda folder: (folder / "trainable.safetensors").unlink())
    name = "trainable.safetensors"
    assert first(whole, copy).change == Change(name, "present", None)


def test_tensors_of_bfloat16_and_of_other_shapes(whole: Path, copy: Path) -> None:
    dtype = torch.bfloat16
    left = Path(shutil.copytree(whole, copy.with_name("left")))

    def replace(last: int, count: int = 1) -> Alter:
        def change(tensors: dict[str, Any]) -> None:
            tensors.clear()
            tensors["none"] = torch.zeros(0, dtype=dtype)
            tensors["scalar"] = torch.tensor(last).to(dtype)
            tensors["other"] = torch.tensor([[1, 0], [1, last]] * count).to(dtype)

        return change

    edit_checkpoint(left, edit_tensors("trainable.safetensors", replace(0)))
    edit_checkpoint(copy, edit_tensors("trainable.safetensors", replace(1)))
    assert first(left, copy).change == change("other", 0.0, 1.0, (1, 1))
    edit_checkpoint(copy, edit_tensors("trainable.safetensors", replace(0, count=2)))
    found = first(left, copy).change
    assert (found.name, str(found.a)[-6:], str(found.b)[-6:]) == ("other", "[2, 2]", "[4, 2]")


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("rollouts/step-000002.parquet", b"", r"cannot read .*step-000002\.parquet: .*delete"),
        ("metrics.jsonl", b"3\n", r"metrics\.jsonl:1 is damaged"),
        ("metrics.jsonl", b'{"stage": "x", "step": 2}\n', r"metrics\.jsonl:1 is damaged"),
        ("run.json", b"{", r"run\.json"),
        ("checkpoints/step-000003/state.json", b"{", r"step-000003 is damaged \(state.json has"),
    ],
)
def test_damaged_files_end_with_one_line(
    whole: Path, copy: Path, path: str, content: bytes, message: str
) -> None:
    (copy / path).write_bytes(content)
    for pair in ((whole, copy), (copy, whole)):
        with pytest.raises(KeelError, match=message):
            diff(*pair)


def test_what_follows_the_first_difference_is_not_read(whole: Path, copy: Path) -> None:
    for step in (2, 3):
        parquet(copy, step).write_bytes(b"damaged")
    edit_record(copy, 0, loss=5.0)
    assert where(whole, copy)[:3] == (1, "metrics.jsonl", "loss")


# ---------------------------------------------------------------- other kinds of stages


def test_stages_and_their_samples_in_the_order_of_the_run(tmp_path: Path) -> None:
    """A reward model on sampled pairs, then GRPO."""
    sampled = {
        "tasks": [{"name": "sort_digits", "options": {"min_digits": 3, "max_digits": 4}}],
        "rewards": {"functions": [{"function": "place_match"}]},
        **{"train": 12, "validation": 4, "group_size": 5, "max_tokens": 5},
    }
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    made = recipe(
        {"stage": "reward_model", "sampled": sampled, "steps": 2, "batch_size": 4},
        {
            **{"stage": "rl", "steps": 2, "tasks": sampled["tasks"]},
            "rewards": sampled["rewards"],
            "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 5},
            "evaluation": {"prompts": 0},
        },
    )
    train(made, whole)
    shutil.copytree(whole, copy)
    found = diff(whole, copy)
    assert (found.same, found.stages, found.checkpoints) == (True, ("reward_model", "rl"), 2)
    edit_rollouts(parquet(copy, 1, "rl-"), put(1, "log_probs", 0.5, 0))
    assert where(whole, copy) == (1, "rl-step-000001.parquet", "log_probs", (1, 0))
    edit_record(copy, 0, accuracy=-1.0)
    assert first(whole, copy).stage == "reward_model"
    path = RunFolder.open(copy).rows("reward_model", "train")
    lines = path.read_text().splitlines()
    was = json.loads(lines[2])
    lines[2] = json.dumps({**was, "chosen": "12"})
    path.write_text("\n".join(lines) + "\n")
    file = "rows/reward_model-train.jsonl"
    change = Change("line 3.chosen", was["chosen"], "12")
    assert first(whole, copy) == FirstDifference("reward_model", 0, file, change)
    path.write_text("\n".join(lines[:2]) + "\n")
    assert first(whole, copy).change.name.startswith("line 3.")


def test_long_texts_are_cut_to_where_they_differ() -> None:
    found = change("x", "x" * 500 + "a" * 500, "x" * 500 + "b")
    assert (found.a, found.b) == ("…" + "x" * 20 + "a" * 60, "…" + "x" * 20 + "b")
    assert change("x", "a" * 61, None).a == "a" * 61
