"""Benchmarks by name: prompts, worked examples, and graders on every answer of the real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.config.benchmarks import benchmarks
from keel.config.load import load_recipe
from keel.config.sources import RewardSource, TaskSource
from keel.data.benchmarks import benchmark_task
from keel.data.mixture import build_tasks
from keel.platform.sandbox import bubblewrap
from keel.rewards.registry import load_reward
from keel.types import KeelError
from tests.data.benchmark_answers import ANSWERS
from tests.shared import shared_path

FILES = {
    "gsm8k": "data/gsm8k/test.jsonl",
    "math500": "data/math/math500.jsonl",
    "humaneval": "data/humaneval/HumanEval.jsonl.gz",
}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sandboxed(name: str) -> None:
    if name != "gsm8k":
        try:
            bubblewrap()
        except KeelError as error:
            pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "unseen"), [("gsm8k", 1319, 0), ("math500", 500, 0), ("humaneval", 164, 20)]
)
def test_every_gold_answer_is_right_every_changed_one_wrong(
    name: str, size: int, unseen: int
) -> None:
    """`unseen`: solutions of which no changed operator is seen by a plain run of their tests."""
    sandboxed(name)
    source = TaskSource(name=name, path=str(shared_path(FILES[name])))
    task = benchmark_task(source, whole=True)
    assert task.size("validation") == size
    rows: list[tuple[Any, str, float]] = []
    hidden = 0
    for at in range(size):
        prompt = task.prompt("validation", at)
        right, wrong = ANSWERS[name](prompt.columns)
        hidden += not wrong
        rows += [(prompt, text, 1.0) for text in right] + [(prompt, text, 0.0) for text in wrong]
    assert hidden == unseen
    reward = load_reward(RewardSource(**benchmarks()[name].rewards[0]))
    given: dict[str, Any] = {"log_extra": lambda *_: None, "log_summary": lambda *_: None}
    given |= {"completions": [text for _, text, _ in rows]}
    given |= {"prompts": [prompt.content for prompt, *_ in rows]}
    given |= {key: [p.columns[key] for p, *_ in rows] for key in rows[0][0].columns}
    wanted = {*reward.required, *reward.optional} & given.keys()
    assert reward.function is not None
    found = reward.function(**{key: given[key] for key in wanted}, **reward.options)
    different = [
        (prompt.id, text) for (prompt, text, value), got in zip(rows, found, strict=True)
        if got != value
    ]  # fmt: skip
    assert different == []


MMLU = [
    {"question": f"{n}?", "subject": subject, "choices": list("wxyz"), "answer": n}
    for n, subject in ((0, "law"), (3, "law"), (1, "art"))
]


def test_worked_examples_are_of_the_same_subject(tmp_path: Path) -> None:
    dev = [{**row, "question": f"dev {row['question']}"} for row in MMLU]
    options = {"shots_path": jsonl(tmp_path / "dev.jsonl", dev), "shots": 1}
    source = TaskSource(name="mmlu", path=jsonl(tmp_path / "a.jsonl", MMLU), options=options)
    task = benchmark_task(source, chat=False, whole=True)
    law, _, art = (task.prompt("validation", at) for at in range(3))
    assert str(law.content).startswith("Question: dev 0?\nA. w\n")
    assert "\nAnswer: A\n\nQuestion: 0?\n" in str(law.content)
    with pytest.raises(KeelError, match=r"this prompt shows none: set task\.raw"):
        benchmark_task(source, whole=True)
    assert str(art.content).startswith("Question: dev 1?")
    assert (task.gold(law), task.gold(art)) == ("A", "B")
    assert task.protocol == "a text to go on from, 1 worked example"
    few = source.model_copy(update={"options": {"shots_path": options["shots_path"]}})
    few = few.model_copy(update={"prompt": "{shots}{question}", "system": "Be brief."})
    assert benchmark_task(few, whole=True).protocol == (
        "the chat template, a prompt of your own, with a system message, 1 to 2 worked examples"
    )


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("mmlu", {"shots": -1}, "shots = -1: give a whole number"),
        ("mmlu", {"shots": "5"}, "shots = '5': give a whole number"),
        ("mmlu", {"shots": 2}, "shots = 2: name their file by shots_path"),
        ("mmlu", {"shots": 2, "shots_path": "HERE"}, "shots = 2, but there are 1 examples"),
        ("math500", {"shots": 4}, "has no worked examples"),
    ],
)
def test_wrong_worked_examples_are_refused(
    name: str, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "a.jsonl", MMLU)
    options = {key: path if value == "HERE" else value for key, value in options.items()}
    source = TaskSource(name=name, path=path, options=options)
    with pytest.raises(KeelError, match=match):
        benchmark_task(source, chat=False, whole=True)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"choices": None}, r"a.jsonl has no column choices \(but question, subject, answer\)"),
        ({"answer": "A"}, "holds 'A', which is not the index of a choice, from 0 to 3"),
        ({"answer": 4}, "holds 4, which is not the index"),
    ],
)
def test_wrong_layout_of_a_file_is_refused(row: dict[str, Any], match: str, tmp_path: Path) -> None:
    row = {key: value for key, value in (MMLU[0] | row).items() if value is not None}
    source = TaskSource(name="mmlu", path=jsonl(tmp_path / "a.jsonl", [row]))
    with pytest.raises(KeelError, match=match):
        benchmark_task(source, whole=True)


def test_base_models_go_on_and_chat_models_are_asked(tmp_path: Path) -> None:
    row = {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(1)", "entry_point": "f"}
    source = TaskSource(name="humaneval", path=jsonl(tmp_path / "a.jsonl", [row, row]))
    raw = source.model_copy(update={"raw": True})
    prompts = [
        build_tasks([one], 0, chat=chat, whole=True)[0].prompt("validation", 0).content
        for one, chat in ((source, False), (source, True), (raw, True))
    ]
    assert prompts[0] == prompts[2] == row["prompt"]
    assert f"```python\n{row['prompt']}```" in str(prompts[1])


def test_benchmark_without_train_split_is_for_evaluation(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="has a test split only"):
        build_tasks([TaskSource(name="aime24")], 0)
    path = jsonl(tmp_path / "a.jsonl", [{"problem": f"{n}", "answer": "1"} for n in range(20)])
    (task,) = build_tasks([TaskSource(name="aime24", path=path)], 0)
    assert task.size("train")


def test_recipe_gets_the_graders_of_its_benchmarks() -> None:
    (stage,) = load_recipe("tiny", ["rewards.functions=[]", "tasks=[{name='mbpp'}]"]).stages
    (reward,) = stage.rewards.functions
    assert (reward.function, reward.options["setup"]) == ("code", "test_setup_code")
    own = load_recipe("tiny", ["tasks=[{name='mbpp'}]"]).stages[0].rewards.functions
    assert [one.function for one in own] == ["place_match"]
    with pytest.raises(KeelError, match="not graded by one reward"):
        load_recipe("tiny", ["rewards.functions=[]", "tasks=[{name='mbpp'}, {name='gsm8k'}]"])


def test_splits_of_the_hub_are_train_and_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` takes a folder in the hub's layout for the hub's data set of its name."""
    folder = tmp_path / "openai" / "gsm8k"
    (folder / "main").mkdir(parents=True)
    for split, count in (("train", 9), ("test", 4)):
        rows = [{"question": f"{split} {n}?", "answer": f"so\n#### {n}"} for n in range(count)]
        jsonl(folder / "main" / f"{split}.jsonl", rows)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    task = benchmark_task(TaskSource(name="gsm8k"))
    assert (task.size("train"), task.size("validation")) == (9, 4)
    assert "test 0?" in str(task.prompt("validation", 0).content)
    base = benchmark_task(TaskSource(name="gsm8k"), chat=False, whole=True)
    assert (base.size("validation"), base.protocol) == (
        4, "a text to go on from, 8 worked examples",
    )  # fmt: skip
    text = str(base.prompt("validation", 3).content)
    assert text.startswith("Question: train 0?\nAnswer: so\n#### 0\n\nQuestion: train 1?")
    assert text.endswith("#### 7\n\nQuestion: test 3?\nAnswer:")
