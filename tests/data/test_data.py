"""Stored rows, and what a user's function returns, as tasks."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.config.entry import passed
from keel.config.sources import PreferenceData, TaskSource
from keel.data.mixture import build_task, build_tasks
from keel.data.preferences import READERS
from keel.data.splits import position
from keel.data.tables import read_table
from keel.data.tasks import DataTask
from keel.types import KeelError
from tests.data.made import completion, jsonl, source
from tests.shared import shared_path

ROWS = [
    {"question": f"What is {n}+1?", "gold": str(n + 1), "answer": "a long rationale"}
    for n in range(200)
]
KEYS = {"prompt": "{question}", "answer": "gold"}


def build(name: str, **keys: Any) -> DataTask:
    task = build_task(source(name, **keys), seed=0)
    assert isinstance(task, DataTask)
    return task


def ids(task: DataTask) -> list[str]:
    return [task.prompt(s, i).id for s in ("train", "validation") for i in range(task.size(s))]


def test_rows_become_prompts_with_stable_ids(tmp_path: Path) -> None:
    task = build("jsonl", path=jsonl(tmp_path / "sums.jsonl", ROWS), **KEYS)
    assert task.name == "jsonl:sums"
    seen = set()
    for split in ("train", "validation"):
        for index in range(task.size(split)):
            prompt = task.prompt(split, index)
            row = ROWS[int(prompt.id.rpartition("/")[2])]
            assert prompt.content == row["question"]
            assert prompt.columns == {**row, "answer": row["gold"]}
            assert task.gold(prompt) == row["gold"]
            seen.add(prompt.id)
    assert len(seen) == 200
    # Binomial(200, 0.1): standard deviation 4.2; four of them.
    assert 3 <= task.size("validation") <= 37


def test_the_split_of_a_row_is_its_own(tmp_path: Path) -> None:
    whole = build("jsonl", path=jsonl(tmp_path / "a.jsonl", ROWS), **KEYS)
    part = build("jsonl", path=jsonl(tmp_path / "b.jsonl", ROWS[::-1][:120]), **KEYS)
    held = {whole.prompt("validation", i).content for i in range(whole.size("validation"))}
    for i in range(part.size("validation")):
        assert part.prompt("validation", i).content in held
    more = build("jsonl", path=str(tmp_path / "a.jsonl"), validation_fraction=0.5, **KEYS)
    assert 70 < more.size("validation") < 130


def test_blanks_and_line_endings_make_no_other_prompt(tmp_path: Path) -> None:
    forms = ("{}", " {}\n", "{}\r\n", "\u00a0{}\t")
    texts = [
        f.format(f"Add {n}.{end}Then double it.")
        for n in range(60)
        for f in forms
        for end in ("\n", "\r\n", "\r")
    ]
    rows: list[dict[str, Any]] = [{"prompt": text} for text in texts]
    talks = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    for name, every in (("a", rows), ("b", talks)):
        task = build("jsonl", path=jsonl(tmp_path / f"{name}.jsonl", every))
        held = [task.prompt("validation", at).id for at in range(task.size("validation"))]
        numbers = sorted(int(one.rsplit("/", 1)[1]) for one in held)
        assert 0 < len(numbers) < len(texts)
        questions = {number // 12 for number in numbers}
        assert numbers == [12 * q + at for q in sorted(questions) for at in range(12)]
    message = {"role": "user", "content": "What is 2 + 2?\r\n"}
    assert position([message]) == position("What is 2 + 2?")
    assert position([{**message, "role": "system"}]) != position("What is 2 + 2?")
    # Blanks within a text are part of it.
    assert position("a  b") != position("a b") != position("a\nb")
    train = jsonl(tmp_path / "train.jsonl", [{"prompt": "x\r\ny "}, {"prompt": "z"}])
    keys = {"path": train, "validation_path": jsonl(tmp_path / "v.jsonl", [{"prompt": "x\ny"}])}
    assert build("jsonl", **keys).overlap == 1


@pytest.mark.parametrize(
    ("value", "gold", "right", "wrong"),
    [
        (["Oslo", "Kristiania"], "Oslo", ["Oslo", " Kristiania\n"], ["['Oslo']", "Bergen"]),
        ([14.0, None, math.nan], "14", ["14"], ["14.0", "nan", "None"]),
        (["", "Oslo"], "Oslo", ["Oslo"], [""]),
        (14.0, "14", ["14"], ["14.0"]),
        (0.5, "0.5", ["0.5"], ["0"]),
        (True, "True", ["True"], ["1"]),
    ],
)
def test_answers_are_texts_numbers_or_lists(
    value: Any, gold: str, right: list[str], wrong: list[str], tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "gold": value}])
    task = build("jsonl", path=path, answer="gold")
    prompt = task.prompt("train", 0)
    assert task.gold(prompt) == gold
    assert [task.score(prompt, completion(text)) for text in right] == [1.0] * len(right)
    assert [task.score(prompt, completion(text)) for text in wrong] == [0.0] * len(wrong)


def test_squads_answers_are_a_key_of_a_table(tmp_path: Path) -> None:
    answers = {"text": ["Oslo", "Kristiania"], "answer_start": [3, 40]}
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "p", "answers": answers, "n": 14.0}]),
        tmp_path / "a.parquet",
    )
    path = str(tmp_path / "a.parquet")
    with pytest.raises(KeelError, match=r"table of text, answer_start: .* answer = 'answers.text'"):
        build("parquet", path=path, answer="answers")
    task = build("parquet", path=path, answer="answers.text")
    prompt = task.prompt("train", 0)
    assert task.gold(prompt) == "Oslo"
    assert prompt.columns["answer"] == ["Oslo", "Kristiania"]
    assert task.score(prompt, completion("Kristiania")) == 1.0
    with pytest.raises(KeelError, match=r"unknown answer column 'texts': did you mean 'text'"):
        build("parquet", path=path, answer="answers.texts")
    assert build("parquet", path=path, answer="n").prompt("train", 0).columns["answer"] == 14


def test_answers_of_other_published_forms(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "p", "answers": [{"text": "Oslo", "start": 3}, {"text": "Kristiania"}]},
        {"prompt": "p", "answers": [{"text": ["Oslo"]}, {"text": ["Kristiania", ""]}]},
    ]
    for row in rows:
        path = jsonl(tmp_path / "a.jsonl", [row])
        with pytest.raises(KeelError, match=r"is a table of text.*answer = 'answers.text'"):
            build("jsonl", path=path, answer="answers")
        prompt = build("jsonl", path=path, answer="answers.text").prompt("train", 0)
        assert prompt.columns["answer"] == ["Oslo", "Kristiania"]
    for answers in ({"text": [], "start": []}, [], [{"text": []}]):
        path = jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answers": answers}])
        with pytest.raises(KeelError, match=r"column 'answers.text' is empty: leave the row out"):
            build("jsonl", path=path, answer="answers.text")
    prices = pa.array(["14.00"]).cast(pa.decimal128(6, 2))
    pq.write_table(pa.table({"prompt": ["p"], "n": prices}), tmp_path / "a.parquet")
    task = build("parquet", path=str(tmp_path / "a.parquet"), answer="n")
    assert task.prompt("train", 0).columns["answer"] == 14


def test_narrow_floats_of_parquet_are_short_numbers(tmp_path: Path) -> None:
    values = [0.1, None, 2.5]
    columns = {
        "answer": pa.array(values, pa.float32()),
        "half": pa.array(np.array([0.1, 1, 2], np.float16)),
        "several": pa.array([[0.1], None, [None, 0.7]], pa.list_(pa.float32())),
        "wide": pa.array([np.float32(0.1)] * 3, pa.float64()),
        "table": pa.array([{"x": 0.1}] * 3, pa.struct([("x", pa.float32())])),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    table = read_table("parquet", str(tmp_path / "a.parquet"), {}, "train")
    rows = [row.values for row in table.rows]
    assert [row["answer"] for row in rows] == values
    assert [row["half"] for row in rows] == [0.1, 1, 2]
    assert [row["several"] for row in rows] == [[0.1], None, [None, 0.7]]
    assert {row["wide"] for row in rows} == {0.10000000149011612}
    assert rows[0]["table"] == {"x": 0.1}


@pytest.mark.parametrize("value", [math.nan, [], [None, math.nan, ""], None, "", " "])
def test_an_answer_without_content_is_empty(value: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "gold": value}])
    with pytest.raises(KeelError, match=r"a.jsonl:1: the answer column 'gold' is empty"):
        build("jsonl", path=path, answer="gold")
    if value is None or isinstance(value, float):
        with pytest.raises(KeelError, match=r"a.jsonl:1: column 'gold' is empty"):
            build("jsonl", path=path, prompt="gold")


@pytest.mark.parametrize("value", [["a", {"a": 1}], [["a"], ["b"]], ["a", b"b"]])
def test_lists_of_anything_else_are_no_answers(value: Any, tmp_path: Path) -> None:
    with (
        passed({"rows": lambda: [{"prompt": "p", "gold": value}]}),
        pytest.raises(KeelError, match=r"row 1: the answer column 'gold' is not a text or a l"),
    ):
        build("python:rows", answer="gold")


def test_parquet_and_datasets_and_python_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "my_rows.py").write_text(
        "import json\n"
        "def rows(path):\n"
        "    with open(path, encoding='utf-8') as file:\n"
        "        yield from map(json.loads, file)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    want = build("jsonl", path=path, **KEYS)
    for task in (
        build("parquet", path=str(tmp_path / "rows.parquet"), **KEYS),
        build("my_rows:rows", options={"path": path}, **KEYS),
        build(f"{tmp_path}/my_rows.py:rows", options={"path": path}, **KEYS),
    ):
        assert [i.split("/")[-2:] for i in ids(task)] == [i.split("/")[-2:] for i in ids(want)]
        assert task.prompt("train", 3).columns == want.prompt("train", 3).columns


def test_a_datasets_name(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    files = {"train": jsonl(tmp_path / "a.jsonl", ROWS[:50])}
    files["test"] = jsonl(tmp_path / "b.jsonl", ROWS[50:60])
    options = {"data_files": files, "cache_dir": str(tmp_path / "cache")}
    task = build("datasets", path="json", validation_path="test", options=options, **KEYS)
    assert (task.size("train"), task.size("validation")) == (50, 10)
    with pytest.raises(KeelError, match=r"unknown split 'tset': did you mean 'test'\?"):
        build("datasets", path="json", validation_path="tset", options=options, **KEYS)
    with pytest.raises(KeelError, match="jsonn' cannot be loaded: "):
        build("datasets", path=str(tmp_path / "jsonn"), **KEYS)


def test_messages_and_system(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    rows = [{"chat": turns, "n": 1}, {"chat": [{"role": "user", "content": "Ho"}], "n": 2}]
    path = jsonl(tmp_path / "chat.jsonl", rows)
    for template in ("chat", "{chat}"):
        task = build("jsonl", path=path, prompt=template)
        contents = [list(task.prompt(s, 0).content) for s in ("train", "validation")]
        assert turns in contents
    printed = build("jsonl", path=path, prompt="chat", system="Be kind.").prompt("train", 0)
    assert [t["role"] for t in printed.content] == ["system", "user"]  # type: ignore[index]
    rows = [{"chat": [{"role": "system", "content": "x"}, *turns]}]
    with pytest.raises(KeelError, match=r"chat\.jsonl:1: the messages begin with a system"):
        build("jsonl", path=jsonl(tmp_path / "chat.jsonl", rows), prompt="chat", system="y")


def test_verdict_is_exact_match_where_an_answer_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    task = build("jsonl", path=path, **KEYS)
    prompt = task.prompt("train", 0)
    assert task.score(prompt, completion(f" {prompt.columns['gold']} ")) == 1.0
    assert task.score(prompt, completion("the answer")) == 0.0
    gold = prompt.columns["gold"]
    assert task.score(prompt, completion(f"<think>5?</think>\n{gold}")) == 1.0
    assert task.score(prompt, completion(f"<think>{gold}</think>5")) == 0.0
    opened = replace(prompt, opening="<think>\n")
    assert task.score(opened, completion(f"5?</think>{gold}")) == 1.0
    assert task.score(opened, completion(str(gold))) == 0.0
    silent = build("jsonl", path=path, prompt="{question}")
    prompt = silent.prompt("train", 0)
    assert silent.score(prompt, completion("1")) is None
    assert silent.gold(prompt) is None


def text(path: Path, content: str) -> str:
    path.write_text(content, encoding="utf-8")
    return str(path)


BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "no path": (lambda p: {}, "task.path is not set"),
    "missing": (lambda p: {"path": str(p / "sums.jsnl")}, "there is no such file"),
    "mistyped": (
        lambda p: {"path": jsonl(p / "sums.jsonl", ROWS).replace("sums", "smus")},
        "sums.jsonl'?",
    ),
    "folder": (lambda p: {"path": str(p)}, "is a folder"),
    "empty": (lambda p: {"path": text(p / "a.jsonl", "\n\n")}, "the data set is empty"),
    "column": (
        lambda p: {"path": text(p / "a.jsonl", '{"questions": "x", "gold": "1"}')},
        "a.jsonl:1: unknown column 'question': did you mean 'questions'?",
    ),
    "answer column": (
        lambda p: {"path": text(p / "a.jsonl", '{"question": "x", "golden": "1"}')},
        "a.jsonl:1: unknown answer column 'gold': did you mean 'golden'?",
    ),
    "template": (
        lambda p: {"path": jsonl(p / "a.jsonl", ROWS), "prompt": "{question"},
        "prompt = '{question'",
    ),
    "option": (
        lambda p: {"path": jsonl(p / "a.jsonl", ROWS), "options": {"split": "x"}},
        "unknown option 'split'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_with_the_place(case: str, tmp_path: Path) -> None:
    make, says = BAD[case]
    with pytest.raises(KeelError) as error:
        build("jsonl", **{**KEYS, **make(tmp_path)})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


FAILING = "from keel.types import KeelError\n"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def make(): return 5", "returns a int: return a task or rows"),
        ("def make(): return ['x']", "row 1 is a str, not a dict"),
        ("def make(): return []", "no rows"),
        ("def make(): raise ValueError('gone')", "raises ValueError: gone"),
        ("def make():\n yield {}\n raise ValueError('gone')", "raises ValueError: gone"),
        ("def maker(): return []", "did you mean 'maker'?"),
        (f"{FAILING}def make(): raise KeelError('fix it')", "fix it"),
        ("make = 5", "is a int, not a function"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("def make(n=1): return []", "did you mean 'n'"),
    ],
)
def test_bad_python_entries(code: str, says: str, tmp_path: Path) -> None:
    path = text(tmp_path / "entry.py", code)
    options = {"nn": 1} if "n=1" in code else {}
    with pytest.raises(KeelError) as error:
        build_task(source(f"{path}:make", options=options), seed=0)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_python_may_return_a_task(tmp_path: Path) -> None:
    task = build_task(source("tests.data.made:Calculator", options={"name": "mine"}), seed=7)
    assert task.name == "mine"
    assert task.inner.seed == 7  # type: ignore[attr-defined]


def test_gsm8k() -> None:
    path = shared_path("data/gsm8k/train.jsonl")
    test = shared_path("data/gsm8k/test.jsonl")
    keys = {"prompt": "{question}", "answer": "answer", "system": "Think."}
    task = build("jsonl", path=str(path), validation_path=str(test), **keys)
    assert task.size("train") + task.overlap == 7_473
    assert task.size("validation") == 1_319
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    prompt = task.prompt("train", 0)
    assert prompt.id == "jsonl:train/train/0"
    assert list(prompt.content)[1] == {"role": "user", "content": first["question"]}
    assert prompt.columns["answer"].endswith("#### 72")


class Broken:
    """A user's task, half written."""

    name = "broken"

    def size(self, split: str) -> int:
        return 4

    def prompt(self, split: str, index: int) -> object:
        if index:
            return "just text"
        raise ZeroDivisionError("no prompt\nhere")

    def score(self, prompt: object, completion: object) -> float:
        return 0.0


def test_what_a_users_task_raises_is_named_as_its_own() -> None:
    task = build_task(source(f"{__name__}:Broken"), seed=0)
    with pytest.raises(
        KeelError, match=r"prompt raised ZeroDivisionError: no prompt here \(.*:\d+"
    ):
        task.prompt("train", 0)
    with pytest.raises(KeelError, match=r"returned a str: return a keel\.types\.Prompt"):
        task.prompt("train", 1)
    assert task.gold(None) is None  # type: ignore[arg-type]


OWN = """
def rows():
    return [
        {"prompt": str(n), "answer": "1", "chosen": "1", "rejected": "2"} for n in range(20)
    ]
"""


def test_prompts_do_not_depend_on_the_folder_of_their_file(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b/c"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "own.py").write_text(OWN)
        entry = f"{folder}/own.py:rows"
        (task,) = build_tasks([TaskSource(name=entry)], 0)
        pairs = READERS["pairs"](PreferenceData(name=entry), 0)
        ids.append((task.name, task.prompt("train", 3).id, pairs.train[3].id))
        shutil.rmtree(folder)
    assert ids[0] == ids[1]
    assert ids[0][0] == "own.py:rows"
