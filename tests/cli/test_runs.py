"""What `keel runs diff`, `rollouts`, `diagnose` and `train` print of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from keel.cli.main import main
from keel.cli.train import _example
from keel.training.run import train
from tests.analysis.written_runs import completion, written_run
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


# ---------------------------------------------------------------- rollouts


def test_rollouts_prints_the_first_sequences_of_a_step(made: Path, capsys: Capture) -> None:
    assert main(["rollouts", str(made / "a"), "--step", "2", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 16
    assert {one["step"] for one in records} == {2}
    assert main(["rollouts", str(made / "a"), "--step", "2", "-n", "3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    mean = sum(one["reward"] for one in records) / 16
    assert head == f"16 completions of 4 prompts, mean reward {mean:.3g}"
    shown = [line for line in lines if "advantage" in line]
    assert len(shown) == 3
    for line, one in zip(shown, records, strict=False):
        value = f"{one['advantages'][0]:+.3g}"
        assert line.startswith(f"{one['prompt_id']}: reward {one['reward']:.3g}")
        assert f", advantage {value}, {len(one['tokens'])} tokens, ended by " in line
    assert f"  completion  {json.dumps(records[0]['completion'])}" in lines
    assert lines[-1].startswith("13 more")


def test_rollouts_of_a_step_that_is_not_there(made: Path, capsys: Capture) -> None:
    assert main(["rollouts", str(made / "a"), "--step", "37"]) == 2
    assert "no rollouts of step 37" in (message := capsys.readouterr().err)
    assert "steps 1 to 2" in message


# ---------------------------------------------------------------- diagnose

HOSTILE = "\x1b[2J\x9b31m\u202e[bold]\r\nerror: fake\x07"


def repeating(folder: Path, text: str = "1 1 1", name: str = "proxy") -> Path:
    """A run whose completions repeat themselves, and whose reward is constant."""
    rollouts = {
        step: [
            completion(
                g, float(i % 2), (7,) * min(24, step) + tuple(range(50, 50 + max(0, 24 - step))),
                completion=text, prompt=text,
            )
            for g in range(4) for i in range(4)
        ]
        for step in range(1, 31, 3)
    }  # fmt: skip
    columns = {
        "reward": np.full(30, 0.5),
        "frac_reward_zero_std": 0.1,
        f"rewards/{name}/mean": np.linspace(0.9, 0.1, 30),
    }
    return written_run(folder, columns, rollouts).folder.path


def test_text_has_a_block_for_each_diagnosis(tmp_path: Path, capsys: Capture) -> None:
    assert main(["diagnose", str(repeating(tmp_path / "run"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("warning: Completions repeat themselves more and more (repetition; rl, ")
    assert '  sample  step 28, completion 0, reward 0: "1 1 1"' in out
    assert "  change  rl.optimizer.learning_rate = 3e-07 (now 1e-06): smaller updates" in out


def test_json_holds_the_same(tmp_path: Path, capsys: Capture) -> None:
    assert main(["diagnose", str(repeating(tmp_path / "run")), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["condition"] == "repetition"
    assert found["samples"][0] == {"step": 28, "row": 0}
    assert found["figures"]["repetition_last"] > 0.3
    keys = "condition title stage first_step last_step severity evidence figures samples causes"
    assert set(found) == {*keys.split(), "changes"}


def test_a_run_without_problems_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    run = written_run(tmp_path / "run", {"reward": np.linspace(0, 1, 5)}).folder.path
    assert main(["diagnose", str(run)]) == 0
    assert capsys.readouterr().out == "no problems found\n"
    assert main(["diagnose", str(run), "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_hostile_text_is_inert(tmp_path: Path, capsys: Capture) -> None:
    run = repeating(tmp_path / "run", text=HOSTILE)
    assert main(["diagnose", str(run)]) == 0
    text = capsys.readouterr().out
    assert "31m" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert not any(line.startswith("error: fake") for line in text.splitlines())
    assert main(["diagnose", str(run), "--json"]) == 0
    assert capsys.readouterr().out.isascii()


def test_a_damaged_rollouts_file_is_an_error_of_one_line(tmp_path: Path, capsys: Capture) -> None:
    run = repeating(tmp_path / "run")
    path = next((run / "rollouts").iterdir())
    path.write_bytes(path.read_bytes()[:100])
    assert main(["diagnose", str(run)]) == 2
    assert path.name in capsys.readouterr().err


# ---------------------------------------------------------------- the end of keel train


@pytest.mark.parametrize(
    ("reward", "passed", "mark"),
    [
        (1.0, True, "1"),
        (0.0, False, "0"),
        (2.31, False, "wrong, reward 2.31"),
        (-0.5, True, "right, reward -0.5"),
        (1.0, False, "wrong, reward 1"),
        (None, True, "right, reward -"),
        (2.31, None, "2.31"),
        (None, None, "-"),
    ],
)
def test_examples_say_whether_answers_are_right(
    reward: float | None, passed: bool | None, mark: str
) -> None:
    """Accuracy is printed with them, and may be of another reward than the one trained on."""
    example = {"prompt": "1+1?", "completion": "2", "reward": reward, "passed": passed}
    assert _example(example) == f"  [{mark}] 1+1? 2"
    earlier = {key: value for key, value in example.items() if key != "passed"}
    assert _example(earlier) == f"  [{'-' if reward is None else f'{reward:g}'}] 1+1? 2"
