"""`keel runs diff`: what it prints and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.cli.main import main
from keel.training.run import train
from tests.training.small import small

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    dense = "rewards.functions=[{function='place_match'}]"
    train(small(dense, "steps=2", "evaluation.prompts=0"), root / "a")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the runs a and b, of the same content."""
    for name in "ab":
        shutil.copytree(made / "a", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: Capture, code: int, a: str = "a", b: str = "b") -> list[str]:
    """The lines printed by a diff that ends with a code."""
    assert main(["runs", "diff", a, b]) == code
    out = capsys.readouterr()
    assert out.err == ""
    return out.out.splitlines()


def alter(step: int, change: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
    """Change the rollouts of run b; the rows as they were."""
    path = Path("b/rollouts") / f"step-{step:06d}.parquet"
    table = pq.read_table(path)
    before, rows = table.to_pylist(), table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return before


def test_the_same(here: Path, capsys: Capture) -> None:
    assert printed(capsys, 0) == [
        "a and b: same recipe",
        "no difference in any step, nor in 1 checkpoint that both have",
        "both go to rl step 2",
    ]
    assert main(["runs", "diff", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is True
    assert (found["a"], found["b"], found["first"], found["recipe"]) == ("a", "b", None, [])
    assert found["reach_a"] == {"stage": "rl", "step": 2}


def test_one_token(here: Path, capsys: Capture) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[3]["tokens"][1] = 99
        rows[3]["completion"] = rows[3]["completion"][:1] + '"'
        rows[12]["reward"] += 0.5

    was = alter(1, change)
    recipe = Path("b/recipe.toml")
    recipe.write_text(recipe.read_text().replace("seed = 0", "seed = 1"))
    info = json.loads(Path("b/run.json").read_text())
    info["versions"]["torch"] = "2.0"
    Path("b/run.json").write_text(json.dumps(info))
    torch = json.loads(Path("a/run.json").read_text())["versions"]["torch"]
    token, text, reward = was[3]["tokens"][1], was[3]["completion"], was[12]["reward"]
    assert printed(capsys, 1) == [
        "a and b: same recipe but seed (0, 1)",
        f"made with torch {torch} against 2.0",
        "first difference: rl step 1, rollouts/step-000001.parquet, sequence 3 "
        f"(prompt {was[3]['prompt_id']}), token 1: tokens {token} against 99",
        f'  completion {text} against {text[0]}" at sequence 3',
        f"  reward {reward} against {reward + 0.5} (by 0.5) at sequence 12",
        "both go to rl step 2",
    ]
    assert main(["runs", "diff", "a", "b", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    first = found["first"]
    assert (first["stage"], first["step"], first["where"]) == ("rl", 1, "rollouts")
    assert first["file"] == "rollouts/step-000001.parquet"
    assert (first["changes"][0]["at"], first["changes"][0]["b"]) == ([3, 1], 99)
    assert found["recipe"] == [{"name": "seed", "a": 0, "b": 1, "at": [], "difference": None}]


def test_rollouts(here: Path, capsys: Capture) -> None:
    was = alter(2, lambda rows: rows[5]["advantages"].__setitem__(0, 9.0))[5]
    head = (
        "first difference: rl step 2, rollouts/step-000002.parquet, sequence 5 "
        f"(prompt {was['prompt_id']})"
    )
    line = printed(capsys, 1)[1]
    assert line.startswith(f"{head}, token 0: advantages ")
    assert " against 9.0 (by " in line
    alter(2, lambda rows: rows[5].update(reward=None))
    assert printed(capsys, 1)[1] == f"{head}: reward {was['reward']} against none"
    alter(2, lambda rows: rows[5]["written"].__setitem__(0, False))
    lines = printed(capsys, 1)
    assert lines[1] == f"{head}, token 0: written true against false"
    assert lines[3].endswith(" against 9.0 (by " + lines[3].split("(by ")[1])
    assert lines[3].endswith(") at sequence 5 token 0")
    alter(2, lambda rows: rows[5].update(prompt="1\n2>"))
    assert printed(capsys, 1)[1] == f"{head}: prompt {was['prompt']} against 1\\n2>"
    alter(2, lambda rows: rows.clear())
    assert ": sequences 16 against 0" in printed(capsys, 1)[1]


def test_metrics(here: Path, capsys: Capture) -> None:
    path = Path("b/metrics.jsonl")
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    path.write_text(lines[0] + "\n" + json.dumps({**row, "kl": None, "beta": 0.54}) + "\n")
    assert printed(capsys, 1)[1:] == [
        "first difference: rl step 2, metrics.jsonl: beta 0.04 against 0.54 (by 0.5)",
        f"  kl {row['kl']} against null",
        "both go to rl step 2",
    ]
    many = {name: 7.25 for name in row if name not in ("stage", "step")}
    path.write_text(path.read_text().splitlines()[0] + "\n" + json.dumps({**row, **many}) + "\n")
    assert printed(capsys, 1)[-2] == f"  and {len(many) - 6} more"


def test_a_run_that_goes_further(here: Path, capsys: Capture) -> None:
    path = Path("b/metrics.jsonl")
    path.write_text(path.read_text()[:-2])
    assert printed(capsys, 1)[1:] == [
        "no difference as far as both go, nor in 1 checkpoint that both have",
        "a goes to rl step 2, b to rl step 1",
    ]
    path.unlink()
    shutil.rmtree("b/checkpoints")
    assert printed(capsys, 1, "b", "a")[1:] == [
        "no difference as far as both go, nor in 0 checkpoints that both have",
        "b goes to no step, a to rl step 2",
    ]


def test_what_one_run_lacks(here: Path, capsys: Capture) -> None:
    Path("b/rollouts/step-000002.parquet").unlink()
    assert printed(capsys, 1)[1:] == [
        "no difference in any step, nor in 1 checkpoint that both have",
        "both go to rl step 2",
        "only a has the rollouts of 1 step",
    ]
    Path("a/rollouts/step-000001.parquet").unlink()
    assert printed(capsys, 1)[1] == (
        "first difference: rl step 1, rollouts/step-000001.parquet: is only in b, "
        "though a goes further"
    )
    shutil.copy("b/rollouts/step-000001.parquet", "a/rollouts")
    path = Path("b/metrics.jsonl")
    path.write_text(path.read_text().splitlines()[1] + "\n")
    assert printed(capsys, 1)[1] == (
        "first difference: rl step 1, metrics.jsonl: the record is only in a, though b goes further"
    )


def test_stages(here: Path, capsys: Capture) -> None:
    path = Path("b/recipe.toml")
    text = path.read_text()
    path.write_text(text.replace('stage = "rl"\nname = "rl"', 'stage = "rl"\nname = "other"'))
    metrics = Path("b/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"stage": "rl"', '"stage": "other"'))
    assert printed(capsys, 1) == [
        "a and b: same recipe but stages (rl, other)",
        "nothing to compare: their first stages differ",
        "a goes to rl step 2, b to other step 2",
    ]


def test_a_weight(here: Path, capsys: Capture) -> None:
    from safetensors.torch import load_file, save_file

    from keel.runs import checkpoint

    target = Path("b/checkpoints/step-000002")

    def change(name: str, value: float | None) -> None:
        with checkpoint.writing(target) as aside:
            shutil.copytree(target, aside, dirs_exist_ok=True)
            (aside / "manifest.json").unlink()
            tensors = load_file(aside / name)
            if value is None:
                (aside / name).unlink()
            else:
                tensors["model.model.norm.weight"][3] = value
                save_file(tensors, aside / name)

    head = "first difference: rl step 2, checkpoints/step-000002/trainable.safetensors: "
    change("trainable.safetensors", 1.5)
    line = printed(capsys, 1)[1]
    assert line.startswith(f"{head}model.model.norm.weight[3] ")
    assert " against 1.5 (by " in line
    change("trainable.safetensors", None)
    assert printed(capsys, 1)[1] == f"{head}trainable.safetensors there against none"
    shutil.rmtree(target)
    shutil.copytree("a/checkpoints/step-000002", target)
    with checkpoint.writing(target) as aside:
        shutil.copytree("a/checkpoints/step-000002", aside, dirs_exist_ok=True)
        (aside / "manifest.json").unlink()
        state = json.loads((aside / "state.json").read_text())
        (aside / "state.json").write_text(json.dumps({**state, "beta": 0.5}))
    assert printed(capsys, 1)[1] == (
        "first difference: rl step 2, checkpoints/step-000002/state.json: "
        "beta 0.04 against 0.5 (by 0.46)"
    )


def test_long_recipes_are_cut(here: Path, capsys: Capture) -> None:
    path = Path("b/recipe.toml")
    text = path.read_text()
    for key in ("hidden_size = 64", "layers = 2", "heads = 2", "context = 64", "steps = 2"):
        assert f"\n{key}\n" in text
        text = text.replace(f"\n{key}\n", f"\n{key}0\n")
    text = text.replace("seed = 0", "seed = 1").replace('lora = "none"', "lora = {rank = 4}")
    path.write_text(text.replace("epochs = 1", "epochs = 3"))
    line = printed(capsys, 1)[0]
    assert line.startswith('a and b: same recipe but seed (0, 1), model.lora (none, {"rank": 4}), ')
    assert line.endswith(", and 2 more")


@pytest.mark.parametrize("damage", ["no run", "parquet", "metrics", "checkpoint", "recipe"])
def test_wrong_inputs_end_with_one_line(here: Path, capsys: Capture, damage: str) -> None:
    if damage == "no run":
        shutil.rmtree("b")
    else:
        path = {
            "parquet": Path("b/rollouts/step-000001.parquet"),
            "metrics": Path("b/metrics.jsonl"),
            "checkpoint": Path("b/checkpoints/step-000002/trainable.safetensors"),
            "recipe": Path("b/recipe.toml"),
        }[damage]
        path.write_bytes(b"damage\n")
    assert main(["runs", "diff", "a", "b"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("keel: error: ")
    assert out.err.count("\n") == 1
    assert "b" in out.err


def test_the_command_needs_no_torch(here: Path) -> None:
    code = (
        "import sys; from keel.cli.main import main; code = main(['runs', 'diff', 'a', 'b']); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["0", "False", "False"]
