"""`keel runs diff`: what it prints and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.training.run import train
from tests.runs.test_diff import edit_rollouts, parquet, put
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


def test_the_same(here: Path, capsys: Capture) -> None:
    assert printed(capsys, 0) == [
        "a and b: same recipe",
        "no difference in any step, nor in 1 checkpoint that both have",
        "both end at rl step 2",
    ]


def test_one_token(here: Path, capsys: Capture) -> None:
    was = edit_rollouts(parquet(Path("b"), 1), put(3, "tokens", 99, 1))
    recipe = Path("b/recipe.toml")
    recipe.write_text(recipe.read_text().replace("seed = 0", "seed = 1"))
    info = json.loads(Path("b/run.json").read_text())
    info["versions"]["torch"] = "2.0"
    Path("b/run.json").write_text(json.dumps(info))
    torch = json.loads(Path("a/run.json").read_text())["versions"]["torch"]
    assert printed(capsys, 1) == [
        "a and b: same recipe except seed (0, 1)",
        f"different environments: torch {torch} against 2.0",
        "first difference: rl step 1, rollouts/step-000001.parquet, sequence 3, token 1 "
        f"(prompt {was[3]['prompt_id']}): tokens {was[3]['tokens'][1]} against 99",
        "both end at rl step 2",
    ]
    assert main(["runs", "diff", "a", "b", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["first"] == {
        **{"stage": "rl", "step": 1, "file": "rollouts/step-000001.parquet"},
        "change": {
            **{"name": "tokens", "a": was[3]["tokens"][1], "b": 99},
            **{"at": [3, 1], "difference": None},
        },
        "prompt_id": was[3]["prompt_id"],
    }
    assert found["recipe"] == [{"name": "seed", "a": 0, "b": 1, "at": [], "difference": None}]


def test_metrics_and_reach(here: Path, capsys: Capture) -> None:
    path = Path("b/metrics.jsonl")
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    path.write_text(lines[0] + "\n" + json.dumps({**row, "beta": 0.54}) + "\n")
    assert printed(capsys, 1)[1:] == [
        "first difference: rl step 2, metrics.jsonl: beta 0.04 against 0.54 (by 0.5)",
        "both end at rl step 2",
    ]
    path.write_text(lines[1] + "\n")
    assert printed(capsys, 1)[1] == (
        "first difference: rl step 1, metrics.jsonl: record present against none"
    )
    path.write_text(lines[0] + "\n" + lines[1][:-2])
    assert printed(capsys, 1)[1:] == [
        "no difference in the steps of both, nor in 1 checkpoint that both have",
        "a ends at rl step 2, b at rl step 1",
    ]
    path.unlink()
    shutil.rmtree("b/checkpoints")
    assert printed(capsys, 1, "b", "a")[1:] == [
        "no difference in the steps of both, nor in 0 checkpoints that both have",
        "b ends at no step, a at rl step 2",
    ]


def test_long_recipes_are_cut(here: Path, capsys: Capture) -> None:
    path = Path("b/recipe.toml")
    text = path.read_text()
    for key in ("hidden_size = 64", "layers = 2", "heads = 2", "context = 64", "steps = 2"):
        assert f"\n{key}\n" in text
        text = text.replace(f"\n{key}\n", f"\n{key}0\n")
    text = text.replace("seed = 0", "seed = 1").replace('lora = "none"', "lora = {rank = 4}")
    path.write_text(text.replace("epochs = 1", "epochs = 3"))
    line = printed(capsys, 1)[0]
    head = 'a and b: same recipe except seed (0, 1), model.lora (none, {"rank": 4}), '
    assert line.startswith(head)
    assert line.endswith(", and 2 more")
