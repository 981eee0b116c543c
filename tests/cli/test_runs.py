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


def told(capsys: Capture, code: int, a: str = "a", b: str = "b") -> list[str]:
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
    assert told(capsys, 0) == [
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

    was = alter(1, change)[3]
    recipe = Path("b/recipe.toml")
    recipe.write_text(recipe.read_text().replace("seed = 0", "seed = 1"))
    info = json.loads(Path("b/run.json").read_text())
    info["versions"]["torch"] = "2.0"
    Path("b/run.json").write_text(json.dumps(info))
    torch = json.loads(Path("a/run.json").read_text())["versions"]["torch"]
    text, start = was["completion"], json.dumps(was["completion"][:1])
    assert told(capsys, 1) == [
        "a and b: same recipe but seed (0, 1)",
        f"made with torch {torch} against 2.0",
        f"first difference: rl step 1, sequence 3 (prompt {was['prompt_id']}), token 1: "
        f"{was['tokens'][1]} against 99, in sampling",
        f'  text: after {start}, {json.dumps(text[1:])} against "\\""',
        "  differing   sequences    tokens     at most  first at sequence:token",
        "  tokens              1         1              3:1",
        "  completion          1                        3",
        "  reward              1                   0.5  12",
        "  of 16 sequences",
        "both go to rl step 2",
    ]
    assert main(["runs", "diff", "a", "b", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["first"] == {
        **{"stage": "rl", "step": 1, "where": "rollouts", "phase": "sampling", "only_in": None}
    }
    assert (found["rollouts"]["sequence"], found["rollouts"]["token"]) == (3, 1)
    assert found["rollouts"]["b"] == 99
    assert found["recipe"] == [{"name": "seed", "a": 0, "b": 1, "difference": 1.0}]


def test_a_completion_that_ends_earlier(here: Path, capsys: Capture) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for name in ("tokens", "log_probs", "written", "advantages"):
            rows[0][name] = rows[0][name][:1]

    was = alter(2, change)[0]
    (line,) = [line for line in told(capsys, 1) if line.startswith("first")]
    assert line.endswith(f"token 1: {was['tokens'][1]} against the end, in sampling")


def test_a_token_that_follows_from_a_log_prob(here: Path, capsys: Capture) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[2]["log_probs"][0] = -0.25
        rows[4]["tokens"][1] = 99
        rows[4]["completion"] = "x"

    was = alter(2, change)
    lines = told(capsys, 1)
    assert "sequence 2 " in lines[1]
    assert ", token 0: log_probs -" in lines[1]
    assert lines[2:4] == [
        f"  first token: sequence 4, token 1: {was[4]['tokens'][1]} against 99",
        f'  text: {json.dumps(was[4]["completion"])} against "x"',
    ]


def test_a_log_prob_a_reward_and_an_advantage(here: Path, capsys: Capture) -> None:
    was = alter(2, lambda rows: rows[5]["advantages"].__setitem__(0, 9.0))[5]
    head = f"first difference: rl step 2, sequence 5 (prompt {was['prompt_id']})"
    line = told(capsys, 1)[1]
    assert line.startswith(f"{head}, token 0: advantages ")
    assert line.endswith(" ulps), in learning")
    alter(2, lambda rows: rows[5].update(reward=None))
    assert told(capsys, 1)[1] == f"{head}: reward {was['reward']} against none, in scoring"
    alter(2, lambda rows: rows[5]["log_probs"].__setitem__(0, float("nan")))
    line = told(capsys, 1)[1]
    assert line.startswith(f"{head}, token 0: log_probs -")
    assert line.endswith(" against nan, in sampling")
    alter(2, lambda rows: rows[5]["written"].__setitem__(0, False))
    assert told(capsys, 1)[1] == f"{head}, token 0: written true against false, in sampling"
    alter(2, lambda rows: rows[5].update(prompt="1\n2>"))
    lines = told(capsys, 1)
    assert lines[1] == f"{head}: prompt {was['prompt']} against 1\\n2>, in sampling"
    assert lines[2].startswith("  text: ")
    alter(2, lambda rows: rows.clear())
    lines = told(capsys, 1)
    assert "16 sequences against 0, in sampling" in lines[1]
    assert lines[2] == "both go to rl step 2"


def test_metrics(here: Path, capsys: Capture) -> None:
    path = Path("b/metrics.jsonl")
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    path.write_text(lines[0] + "\n" + json.dumps({**row, "kl": None, "beta": 0.54}) + "\n")
    assert told(capsys, 1)[1:] == [
        "first difference: rl step 2: metrics, in learning",
        "  beta  0.04 against 0.54 (by 0.5)",
        f"  kl    {row['kl']} against null",
        "both go to rl step 2",
    ]
    alter(2, lambda rows: rows[5].update(reward=2.0))
    lines = told(capsys, 1)
    assert "in scoring" in lines[1]
    assert "metrics first differ at rl step 2" in lines
    many = {name: 7.25 for name in row if name not in ("stage", "step")}
    path.write_text(path.read_text().splitlines()[0] + "\n" + json.dumps({**row, **many}) + "\n")
    assert told(capsys, 1)[-2] == f"  and {len(many) - 6} more"


def test_a_run_that_goes_further(here: Path, capsys: Capture) -> None:
    path = Path("b/metrics.jsonl")
    path.write_text(path.read_text()[:-2])
    assert told(capsys, 1)[1:] == [
        "no difference as far as both go, nor in 1 checkpoint that both have",
        "a goes to rl step 2, b to rl step 1",
    ]
    path.unlink()
    shutil.rmtree("b/checkpoints")
    assert told(capsys, 1, "b", "a")[1:] == [
        "no difference as far as both go, nor in 0 checkpoints that both have",
        "b goes to no step, a to rl step 2",
    ]


def test_what_one_run_lacks(here: Path, capsys: Capture) -> None:
    Path("b/rollouts/step-000002.parquet").unlink()
    assert told(capsys, 1)[1:] == [
        "no difference in any step, nor in 1 checkpoint that both have",
        "both go to rl step 2",
        "only a has the rollouts of 1 step",
    ]
    Path("a/rollouts/step-000001.parquet").unlink()
    assert told(capsys, 1)[1] == (
        "first difference: rl step 1: its rollouts only in b, though a goes further"
    )
    shutil.copy("b/rollouts/step-000001.parquet", "a/rollouts")
    path = Path("b/metrics.jsonl")
    path.write_text(path.read_text().splitlines()[1] + "\n")
    assert told(capsys, 1)[1] == (
        "first difference: rl step 1: its row of metrics.jsonl only in a, though b goes further"
    )


def test_stages(here: Path, capsys: Capture) -> None:
    path = Path("b/recipe.toml")
    text = path.read_text()
    path.write_text(text.replace('stage = "rl"\nname = "rl"', 'stage = "rl"\nname = "other"'))
    metrics = Path("b/metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"stage": "rl"', '"stage": "other"'))
    assert told(capsys, 1) == [
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

    head = "first difference: rl step 2: its checkpoint's trainable.safetensors"
    change("trainable.safetensors", 1.5)
    line = told(capsys, 1)[1]
    assert line.startswith(f"{head}, model.model.norm.weight[3]: ")
    assert line.endswith(
        " against 1.5 (" + line.split("(")[1].split(" ")[0] + " ulps), in learning; "
        "1 of 64 elements, 1 tensor of the file differ"
    )
    change("trainable.safetensors", None)
    assert told(capsys, 1)[1] == f"{head}: there against none, in learning"
    shutil.rmtree(target)
    shutil.copytree("a/checkpoints/step-000002", target)
    with checkpoint.writing(target) as aside:
        shutil.copytree("a/checkpoints/step-000002", aside, dirs_exist_ok=True)
        (aside / "manifest.json").unlink()
        state = json.loads((aside / "state.json").read_text())
        (aside / "state.json").write_text(json.dumps({**state, "beta": 0.5}))
    assert told(capsys, 1)[1] == (
        "first difference: rl step 2: its checkpoint's state.json, beta: 0.04 against 0.5, "
        "in learning; 1 key of the file differ"
    )


def test_long_recipes_are_cut(here: Path, capsys: Capture) -> None:
    path = Path("b/recipe.toml")
    text = path.read_text()
    for key in ("hidden_size = 64", "layers = 2", "heads = 2", "context = 64", "steps = 2"):
        assert f"\n{key}\n" in text
        text = text.replace(f"\n{key}\n", f"\n{key}0\n")
    text = text.replace("seed = 0", "seed = 1").replace('lora = "none"', "lora = {rank = 4}")
    path.write_text(text.replace("epochs = 1", "epochs = 3"))
    line = told(capsys, 1)[0]
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


def test_the_verb_needs_no_torch(here: Path) -> None:
    code = (
        "import sys; from keel.cli.main import main; code = main(['runs', 'diff', 'a', 'b']); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["0", "False", "False"]
