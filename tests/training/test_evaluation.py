"""What an evaluation scores and reports: whole files, correctness, and what it was chosen by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.config.load import load_recipe
from keel.config.model import BuildModel, Model
from keel.models.policy import load_policy
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.rollout import Sampler
from keel.training.run import train
from keel.types import Sampling
from tests.training.small import info, metrics, notes, run, small

MINE = """
from keel.types import Prompt


def half(completions):
    return [0.5 for _ in completions]


def sure(completions):
    return [1.0 for _ in completions]


class Task:
    name = "mine"

    def size(self, split):
        return 8

    def prompt(self, split, index):
        return Prompt(f"mine/{split}/{index}", f"{index}{len(split)}>", {}, "mine")

    def score(self, prompt, completion):
        return 2.0


def plain():
    return Task()


def declared():
    task = Task()
    task.correctness = True
    return task
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy as a plain folder."""
    folder = tmp_path_factory.mktemp("model") / "policy"
    build = BuildModel(hidden_size=16, layers=1, heads=2, context=32, alphabet="0123456789>")
    load_policy(Model(build=build), 0).save(folder)
    return folder


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def rows(path: Path, numbers: Sequence[int]) -> str:
    lines = [json.dumps({"prompt": f"{n}>", "answer": str(n)}) for n in numbers]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


# ---------------------------------------------------------------- files


def test_eval_scores_a_whole_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "test.jsonl", range(230))
    keys = [f"path={path}", "answer=answer"]
    words = ["--task", "jsonl", "--set", keys[0], "--set", keys[1], "--max-tokens", "2", "--json"]
    assert main(["eval", str(model), *words]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 230
    some = evaluate(model, task="jsonl", task_keys=keys, max_tokens=2, prompts=7)
    assert some["n"] == 7
    split = evaluate(
        model, task="jsonl", task_keys=[*keys, "validation_fraction=0.2"], max_tokens=2
    )
    assert 20 < split["n"] < 80
    other = rows(tmp_path / "other.jsonl", range(300, 305))
    named = evaluate(
        model, task="jsonl", task_keys=[*keys, f"validation_path={other}"], max_tokens=2
    )
    assert named["n"] == 5
    assert evaluate(model, task=other, task_keys=["answer=answer"], max_tokens=2)["n"] == 5
    keys = [f"path={other}", "answer=answer"]
    assert evaluate(model, task_keys=keys, max_tokens=2)["n"] == 5


def test_eval_of_a_run_on_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, held = rows(tmp_path / "a.jsonl", range(40)), rows(tmp_path / "b.jsonl", range(50, 59))
    task = f"tasks=[{{name='jsonl', path='{own}', validation_path='{held}', answer='answer'}}]"
    folder = run(tmp_path / "run", task, "steps=1", "rewards.functions=[{function='place_match'}]")
    other = rows(tmp_path / "c.jsonl", range(60, 75))
    assert evaluate(folder.path, prompts=99)["n"] == 9
    found = evaluate(folder.path, task_keys=[f"path={other}"])
    assert (found["n"], "trained_on" in found) == (15, False)
    for prompt in ("{prompt}", "{prompt}>"):  # the same rows in other words too
        assert main(["eval", str(folder.path), "--task", own, "--set", f"prompt={prompt}"]) == 0
        line = f"trained on: 40 of the 40 prompts are train prompts of stage 'rl' ({own}): report"
        assert line in capsys.readouterr().out
    lines = [json.dumps({"prompt": f"{n}>", "completion": "1"}) for n in range(60, 70)]
    (tmp_path / "sft.jsonl").write_text("\n".join(lines) + "\n")
    data = {"path": str(tmp_path / "sft.jsonl"), "validation_fraction": 0.01}
    sft = {"stage": "sft", "steps": 1, "batch_size": 2, "data": [data]}
    recipe = load_recipe(
        {"threads": 1, "model": small().model_dump()["model"], "stages": [sft]}, ()
    )
    imitated = train(recipe, tmp_path / "sft")
    table = {"path": other, "answer": "answer"}
    (line,) = evaluate(imitated.path, task=table, max_tokens=2)["trained_on"]
    assert line.startswith("9 of the 15 prompts are train prompts of stage 'sft'")


def test_eval_names_the_reward_and_warns_about_solutions(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gsm.jsonl"
    golds = ["1 + 1 = 2\n#### 2", r"so \boxed{3}", "4"]
    lines = [json.dumps({"prompt": f"{n}>", "answer": gold}) for n, gold in enumerate(golds)]
    path.write_text("\n".join(lines) + "\n")
    words = ["eval", str(model), "--task", "jsonl", "--max-tokens", "2"]
    words += ["--set", f"path={path}", "--set", "answer=answer"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reward"] == "task"
    assert found["warning"].startswith("2 of 3 answers hold ####")
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "\nreward: task\n" in printed
    assert "warning: 2 of 3 answers" in printed
    for reward, warns in (("exact_match", True), ("numeric_match", False), ("place_match", False)):
        assert main([*words, "--json", "--reward", reward]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["reward"] == reward
        assert ("warning" in found) is warns


# ---------------------------------------------------------------- correctness


def numbers_of(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = info(folder)["evaluation"]["rl"]["after"]
    return found


def test_no_pass_at_k_without_a_correctness_reward(
    tmp_path: Path, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"rewards.functions=[{{function='{mine}:half'}}]"
    folder = run(tmp_path / "run", own, "steps=1", "evaluation.samples=2")
    result = numbers_of(folder)
    assert (result["measure"], result["mean"], result["sampled"]["mean"]) == ("reward", 0.5, 0.5)
    assert not [name for name in result if name.startswith("pass@")]
    last = metrics(folder)[-1]
    assert last["eval/reward"] == 0.5
    assert not [name for name in last if "pass@" in name]
    assert main(["eval", str(folder.path)]) == 0
    assert "no reward that is declared as correctness" in capsys.readouterr().out


def test_eval_takes_fewer_samples_than_the_run(tmp_path: Path) -> None:
    own = "evaluation={samples=4, k=[1, 4], best='eval/pass@4'}"
    folder = run(tmp_path / "run", own, "steps=1")
    found = evaluate(folder.path, samples=2)
    assert (found["sampled"]["n"], "pass@2" in found, "pass@4" in found) == (8, True, False)


def test_prompts_without_a_gold_answer_have_no_verdict(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}>", "answer": None if n % 2 else "x"} for n in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = f"tasks=[{{path='{path}', validation_fraction=0.4}}]"
    reward = "rewards.functions=[{function='exact_match'}]"
    folder = run(tmp_path / "run", tasks, reward, "steps=1", "evaluation={prompts=40, samples=2}")
    result = numbers_of(folder)
    rows = [row for row in load(folder.path).evaluation(1) if row["mode"] == "greedy"]
    assert {row["passed"] for row in rows} == {None, False}
    left = sum(row["passed"] is None for row in rows)
    assert (result["unjudged"], result["n"]) == (left, len(rows) - left)
    assert result["sampled"]["n"] == result["pass@2"]["n"] == len(rows) - left


def test_an_answer_without_a_value_is_wrong(tmp_path: Path) -> None:
    """Making a reward fail must not raise the accuracy."""
    lines = [
        "def shy(completions):  # the validation split has eight prompts",
        "    count = len(completions)",
        "    return [1.0, *[None] * 7] if count == 8 else [float(n % 2) for n in range(count)]",
    ]
    code = "\n".join(lines)
    (tmp_path / "shy.py").write_text(code)
    own = f"rewards.functions=[{{function='{tmp_path}/shy.py:shy', correctness=true}}]"
    result = numbers_of(run(tmp_path / "run", own, "steps=1"))
    assert (result["n"], result["mean"], "unjudged" in result) == (8, 1 / 8, False)


FUNCTIONS = "rewards.functions=[{function='MINE:half'}, {function='MINE:sure', correctness=true}]"


@pytest.mark.parametrize(
    ("keys", "measure", "mean"),
    [
        ((FUNCTIONS,), "pass@1", 1.0),
        ((FUNCTIONS, "evaluation.component=half"), "reward", 0.5),
        (("tasks=[{name='MINE:plain'}]", "rewards.functions=[]"), "reward", 2.0),
        (("tasks=[{name='MINE:declared'}]", "rewards.functions=[]"), "pass@1", 1.0),
    ],
)
def test_measure_is_correctness_only_if_declared(
    keys: tuple[str, ...], measure: str, mean: float, tmp_path: Path, mine: str
) -> None:
    """Whether it is the first reward or not; the task's score likewise."""
    keys = tuple(key.replace("MINE", mine) for key in keys)
    folder = run(tmp_path / "run", *keys, "steps=1", "evaluation.samples=2")
    result = numbers_of(folder)
    assert (result["measure"], result["mean"]) == (measure, mean)
    passed = {"pass@1": True, "reward": None}[measure]
    assert {one["passed"] for one in info(folder)["examples"]["rl"]["after"]} == {passed}
    assert metrics(folder)[-1][f"eval/{measure}"] == mean
    pass_at_2 = {"pass@1": {"mean": 1.0}, "reward": {}}[measure]
    assert pass_at_2.items() <= result.get("pass@2", {}).items()
    assert ("pass@2" in result) == bool(pass_at_2)


def test_evaluations_end_at_the_end_of_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rollouts ignore it."""
    seen: list[tuple[int, Sampling]] = []
    call = Sampler.sample_and_score

    def noting(self: Sampler, prompts: Any, n: int, sampling: Sampling, *rest: Any) -> Any:
        seen.append((n, sampling))
        return call(self, prompts, n, sampling, *rest)

    monkeypatch.setattr(Sampler, "sample_and_score", noting)
    run(tmp_path / "run", "steps=1", "rollout.ignore_eos=true", "evaluation.samples=3")
    assert {n for n, sampling in seen if not sampling.ignore_eos} == {1, 3}
    assert {n for n, sampling in seen if sampling.ignore_eos}.isdisjoint({1, 3})


# ---------------------------------------------------------------- what was trained on, or chosen by


def test_warning_about_validation_prompts_that_another_stage_trains_on(
    tmp_path: Path,
) -> None:
    train_path = rows(tmp_path / "train.jsonl", range(40))
    held = rows(tmp_path / "val.jsonl", range(30, 60))
    file = {"name": "jsonl", "answer": "answer", "path": train_path}
    other = {**file, "path": rows(tmp_path / "other.jsonl", range(100, 140))}
    rl = {
        "stage": "rl", "steps": 1, "tasks": [{**other, "validation_path": held}],
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 2},
        "evaluation": {"prompts": 4, "every": 0},
    }  # fmt: skip
    build = {"alphabet": "0123456789>", "hidden_size": 16, "layers": 1, "heads": 2, "context": 32}
    sft = {
        "stage": "sft",
        "steps": 1,
        "batch_size": 2,
        "tasks": [{**file, "validation_path": held}],
    }
    model = {"build": build}
    split = {**sft, "tasks": [{**file, "validation_fraction": 0.01}]}
    for name, first, wanted in (("apart", sft, []), ("shared", split, ["WARNING: "])):
        recipe = load_recipe({"threads": 1, "model": model, "stages": [first, rl]})
        folder = train(recipe, tmp_path / name)
        message = [line for line in notes(folder) if "validation prompts of stage" in line]
        assert [line[:9] for line in message] == wanted
    assert "9 of the 30 validation prompts of stage 'rl'" in message[0]
    assert "train prompts of stage 'sft'" in message[0]
    assert held in message[0]
    assert train_path in message[0]


def test_best_checkpoint_is_labelled_as_selected(
    tmp_path: Path,
) -> None:
    folder = run(tmp_path / "run", "steps=2", "evaluation.every=1")
    assert info(folder)["best_metric"] == {"rl": "eval/pass@1"}
    assert evaluate(folder.path, checkpoint="best")["selected"] is True
    assert "selected" not in evaluate(folder.path)
