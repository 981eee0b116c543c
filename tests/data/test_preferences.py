"""Judged answers from files: the forms that are read, the two splits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from keel.config.sources import PreferenceData
from keel.data.judged_rows import Labelled, Preference, Stepwise
from keel.data.preferences import read_labelled, read_pairs, read_steps
from keel.data.splits import splits_of
from keel.types import KeelError
from tests.data.made import jsonl
from tests.shared import shared_path

PAIRS = [
    {"prompt": f"What is {n // 2}+1?", "chosen": f"{n}: yes", "rejected": f"{n}: no"}
    for n in range(400)
]
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be kind."}


def message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def of(path: str, name: str = "jsonl", **keys: Any) -> PreferenceData:
    return PreferenceData.model_validate({"name": name, "path": path, **keys})


def one(tmp_path: Path, read: Any, row: dict[str, Any], **keys: Any) -> Any:
    """What the only row of a file becomes."""
    splits = read(of(jsonl(tmp_path / "one.jsonl", [row]), **keys))
    assert len(splits.train) == 1
    assert splits.validation == ()
    return splits.train[0]


def refused(tmp_path: Path, read: Any, row: dict[str, Any], **keys: Any) -> str:
    """The line that refuses the second of two rows; it names the file and line."""
    path = jsonl(tmp_path / "bad.jsonl", [GOOD[read], row])
    with pytest.raises(KeelError) as error:
        read(of(path, **keys))
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"{path}:2: ")
    return text.removeprefix(f"{path}:2: ")


GOOD: dict[Any, dict[str, Any]] = {
    read_pairs: {"prompt": "p", "chosen": "a", "rejected": "b"},
    read_labelled: {"prompt": "p", "completion": "a", "label": True},
    read_steps: {"prompt": "p", "completions": ["a"], "labels": [True]},
}


# ---------------------------------------------------------------- splits


def test_no_prompt_is_on_both_splits(tmp_path: Path) -> None:
    splits = read_pairs(of(jsonl(tmp_path / "rows.jsonl", PAIRS)))
    train, held = ({p.prompt for p in split} for split in (splits.train, splits.validation))
    assert not train & held
    assert len(train | held) == 200
    assert len(splits.train) + len(splits.validation) == 400
    # Binomial(200, 0.1): standard deviation 4.2; four of them.
    assert 3 <= len(held) <= 37
    assert (splits.overlap, splits.dropped) == (0, 0)
    half = read_pairs(of(str(tmp_path / "rows.jsonl"), validation_fraction=0.5))
    assert 130 < len(half.validation) < 270


def test_a_group_stays_together_and_so_does_a_prompt(tmp_path: Path) -> None:
    rows = [{**row, "book": 100 + n % 40} for n, row in enumerate(PAIRS)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    books = {row["chosen"]: row["book"] for row in rows}
    splits = read_pairs(of(path, group="book", validation_fraction=0.3))
    train, held = ({books[p.chosen] for p in split} for split in (splits.train, splits.validation))
    assert held
    assert not train & held
    # A prompt has two rows, of two books: where one is held out, the other is left out of training.
    assert not {p.prompt for p in splits.train} & {p.prompt for p in splits.validation}
    assert splits.overlap == 400 - len(splits.train) - len(splits.validation) > 0
    with pytest.raises(
        KeelError, match=r"rows\.jsonl:1: unknown column 'bok': did you mean 'book'"
    ):
        read_pairs(of(path, group="bok"))
    path = jsonl(tmp_path / "rows.jsonl", [{**rows[0], "book": None}])
    with pytest.raises(KeelError, match=r"rows\.jsonl:1: column 'book' = None: the group is empty"):
        read_pairs(of(path, group="book"))


def test_which_split_a_position_is_on() -> None:
    assert splits_of([0.2, 0.05, 0.2, 0.9], 0.1) == ["train", "validation", "train", "train"]
    assert splits_of([0.1, 0.05, 0.3], 0.1) == ["train", "validation", "train"]
    assert splits_of([0.3, 0.2, 0.4, 0.2], 0.1) == ["train", "validation", "train", "validation"]
    assert splits_of([0.3, 0.2, 0.4, 0.4], 0.5) == ["validation", "validation", "train", "train"]
    assert splits_of([0.01, 0.01], 0.1) == ["train", "train"]
    assert splits_of([], 0.1) == []


def test_train_prompts_in_the_validation_split_are_left_out(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", PAIRS[:50])
    held = jsonl(tmp_path / "held.jsonl", PAIRS[44:60])
    splits = read_pairs(of(train, validation_path=held))
    assert (len(splits.train), len(splits.validation), splits.overlap) == (44, 16, 6)
    assert splits.train[43].id == "jsonl:train/43"
    assert splits.validation[15].id == "jsonl:train/validation/15"
    with pytest.raises(
        KeelError, match="every train prompt is also in the validation split: drop validation_path"
    ):
        read_pairs(of(train, validation_path=train))
    groups = [jsonl(tmp_path / f"{n}.jsonl", [{**PAIRS[n], "g": n % 4}]) for n in (0, 4)]
    with pytest.raises(KeelError, match="is also in the validation split"):
        read_pairs(of(groups[0], validation_path=groups[1], group="g"))


def test_ids_are_the_rows_own_where_they_have_one(tmp_path: Path) -> None:
    rows = [{**PAIRS[0], "id": "a"}, {**PAIRS[1], "id": 7}, {**PAIRS[2], "id": True}, PAIRS[3]]
    rows.append({**PAIRS[4], "id": ""})
    splits = read_pairs(of(jsonl(tmp_path / "x.jsonl", rows)))
    ids = {pair.id for pair in (*splits.train, *splits.validation)}
    assert ids == {"a", "7", "jsonl:x/2", "jsonl:x/3", "jsonl:x/4"}
    rows = [{**PAIRS[0], "id": "a"}, {**PAIRS[9], "id": "a"}]
    with pytest.raises(KeelError, match=r"x\.jsonl:2: two rows have the id 'a': give each its own"):
        read_pairs(of(jsonl(tmp_path / "x.jsonl", rows)))


def test_two_files_may_number_their_rows_alike(tmp_path: Path) -> None:
    def numbered(name: str, rows: list[dict[str, Any]], **more: Any) -> str:
        made = [{**row, "id": n, **more} for n, row in enumerate(rows)]
        return jsonl(tmp_path / name, made)

    train, held = numbered("train.jsonl", PAIRS[:6]), numbered("held.jsonl", PAIRS[6:8])
    splits = read_pairs(of(train, validation_path=held))
    assert [pair.id for pair in splits.train] == ["0", "1", "2", "3", "4", "5"]
    assert [pair.id for pair in splits.validation] == ["validation/0", "validation/1"]
    # Of one file, split here, ids stay as they are.
    split = read_pairs(of(train))
    assert {pair.id for pair in (*split.train, *split.validation)} == {str(n) for n in range(6)}
    # Within one file they still differ, and the prefix makes none that is there already.
    twice = numbered("twice.jsonl", PAIRS[6:8], id="a")
    with pytest.raises(KeelError, match=r"twice\.jsonl:2: two rows have the id 'validation/a'"):
        read_pairs(of(train, validation_path=twice))
    one = numbered("one.jsonl", PAIRS[:1], id="validation/0")
    with pytest.raises(KeelError, match="two rows have the id 'validation/0'"):
        read_pairs(of(one, validation_path=held))
    blank = jsonl(tmp_path / "blank.jsonl", [{**PAIRS[9], "chosen": ""}])
    with pytest.raises(KeelError, match=r"^jsonl:train/validation: no rows are left"):
        read_pairs(of(train, validation_path=blank, empty="drop"))


# ---------------------------------------------------------------- pairs


def test_a_pair_of_texts(tmp_path: Path) -> None:
    found = one(tmp_path, read_pairs, GOOD[read_pairs])
    assert found == Preference("jsonl:one/0", "p", "a", "b", 1.0, 0.0)
    row = {**GOOD[read_pairs], "probability": 0.25, "margin": 2, "extra": [1]}
    found = one(tmp_path, read_pairs, row)
    assert (found.probability, found.margin) == (0.25, 2.0)
    row = {**GOOD[read_pairs], "probability": None, "margin": None}
    assert one(tmp_path, read_pairs, row).probability == 1.0
    tie = {"prompt": "p", "chosen": "a", "rejected": "a", "probability": 0.5}
    assert one(tmp_path, read_pairs, tie).probability == 0.5


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        # The prompt as messages, the answers as a turn, or as text.
        (
            {"prompt": [SYSTEM, USER], "chosen": [message("a")], "rejected": [message("b")]},
            [SYSTEM, USER],
        ),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, [USER]),
        # A text before turns is the user's.
        ({"prompt": "Hi", "chosen": [message("a")], "rejected": [message("b")]}, [USER]),
        # Implicit: whole conversations.
        ({"chosen": [USER, message("a")], "rejected": [USER, message("b")]}, [USER]),
        (
            {"chosen": [SYSTEM, USER, message("a")], "rejected": [SYSTEM, USER, message("b")]},
            [SYSTEM, USER],
        ),
        # Both: the prompt stands in the conversation already.
        (
            {"prompt": "Hi", "chosen": [USER, message("a")], "rejected": [USER, message("b")]},
            [USER],
        ),
        (
            {"prompt": [USER], "chosen": [USER, message("a")], "rejected": [USER, message("b")]},
            [USER],
        ),
    ],
)
def test_pairs_of_messages(tmp_path: Path, row: dict[str, Any], prompt: list[Any]) -> None:
    found = one(tmp_path, read_pairs, row)
    assert list(found.prompt) == prompt
    assert (found.chosen, found.rejected) == ("a", "b")


P = GOOD[read_pairs]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"prompt": "p", "chosen": "a", "rejectd": "b"}, "column 'rejected': did you mean"),
        ({"chosen": "a", "rejected": "b"}, "no column 'prompt', and 'chosen' is a text: add"),
        (
            {"chosen": [message("a")], "rejected": [message("b")]},
            "'chosen' is one turn: add the column",
        ),
        ({**P, "prompt": " "}, "column 'prompt' = ' ': the prompt is empty: leave the row out"),
        ({**P, "prompt": 3}, "column 'prompt' = 3: give a text or messages"),
        (
            {**P, "chosen": ""},
            "column 'chosen' = '': the answer is empty: leave the row out, or se",
        ),
        ({**P, "rejected": " \n"}, "column 'rejected' = ' \\n': the answer is empty"),
        ({**P, "chosen": None}, "column 'chosen' = None: give a text or messages"),
        ({**P, "chosen": [{"role": "assistant"}]}, "each content a text"),
        ({**P, "chosen": [USER]}, "the last message must be the assistant's"),
        (
            {**P, "chosen": [message("a")]},
            "column 'rejected' = 'b': give it in the form of 'chosen'",
        ),
        (
            {"chosen": [USER, message("a")], "rejected": [SYSTEM, USER, message("b")]},
            "its turns before the last are not those of 'chosen'",
        ),
        (
            {"prompt": "Ho", "chosen": [USER, message("a")], "rejected": [USER, message("b")]},
            "column 'prompt' = 'Ho': it is not what the turns of 'chosen' begin with",
        ),
        (
            {"prompt": [SYSTEM], "chosen": [USER, message("a")], "rejected": [USER, message("b")]},
            "it is not what the turns of 'chosen' begin with",
        ),
        ({**P, "rejected": "a"}, "the same text and probability is 1: set probability to 0.5"),
        ({**P, "probability": 1.01}, "column 'probability' = 1.01: give a number from 0 to 1"),
        ({**P, "probability": -0.5}, "column 'probability' = -0.5: give a number from 0 to 1"),
        ({**P, "probability": True}, "column 'probability' = True: give a finite number"),
        ({**P, "probability": "0.5"}, "column 'probability' = '0.5': give a finite number"),
        ({**P, "probability": float("nan")}, "column 'probability' = nan: give a finite number"),
        ({**P, "margin": float("inf")}, "column 'margin' = inf: give a finite number"),
        ({**P, "margin": 10**400}, "give a finite number"),
        ({**P, "margin": "x" * 5000}, "xxx…: give a finite number"),
    ],
)
def test_bad_pairs_are_refused(tmp_path: Path, row: dict[str, Any], line: str) -> None:
    text = refused(tmp_path, read_pairs, row)
    assert line in text
    assert len(text) < 300


def test_empty_answers_are_dropped_or_kept_by_choice(tmp_path: Path) -> None:
    rows = [*PAIRS[:6], {**PAIRS[8], "rejected": ""}, {**PAIRS[10], "chosen": " "}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    dropped = read_pairs(of(path, empty="drop"))
    assert (len(dropped.train) + len(dropped.validation), dropped.dropped) == (6, 2)
    kept = read_pairs(of(path, empty="keep"))
    assert (len(kept.train) + len(kept.validation), kept.dropped) == (8, 0)
    held = jsonl(tmp_path / "held.jsonl", [PAIRS[20], {**PAIRS[22], "chosen": ""}])
    both = read_pairs(of(path, empty="drop", validation_path=held))
    assert (len(both.train), len(both.validation), both.dropped) == (6, 1, 3)
    with pytest.raises(KeelError, match="no rows are left: every one has an empty answer"):
        read_pairs(of(jsonl(tmp_path / "none.jsonl", rows[6:]), empty="drop"))


# ---------------------------------------------------------------- labelled answers


@pytest.mark.parametrize(
    ("label", "value"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0), (0.25, 0.25)]
)
def test_labelled_answers(tmp_path: Path, label: Any, value: float) -> None:
    row = {"prompt": "p", "completion": "a", "label": label}
    assert one(tmp_path, read_labelled, row) == Labelled("jsonl:one/0", "p", "a", value)
    row = {"completion": [USER, message("a")], "label": label}
    found = one(tmp_path, read_labelled, row)
    assert (list(found.prompt), found.completion, found.label) == ([USER], "a", value)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        *(
            ({"label": label}, f"column 'label' = {label!r}: give true, false or a number from 0")
            for label in ("yes", -1, 2, float("nan"), None, [1])
        ),
        ({"completion": ""}, "column 'completion' = '': the answer is empty"),
        ({"label": None, "completion": None}, "column 'completion' = None: give a text"),
    ],
)
def test_bad_labels_are_refused(tmp_path: Path, row: dict[str, Any], line: str) -> None:
    assert refused(tmp_path, read_labelled, {**GOOD[read_labelled], **row}).startswith(line)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({"completions": ["a", "b"], "labels": [True, False]}, (1.0, 0.0)),
        ({"completions": ["a", "b"], "labels": [0.5, None]}, (0.5, None)),
        ({"steps": ["a", "b"], "labels": [1, 0]}, (1.0, 0.0)),
        ({"steps": ["a", "b"], "first_error": 1}, (1.0, 0.0)),
        ({"steps": ["a", "b"], "first_error": 0}, (0.0, None)),
        ({"steps": ["a", "b"], "mistake_index": 0.0}, (0.0, None)),
        ({"steps": ["a", "b"], "first_error": None}, (1.0, 1.0)),
        ({"completions": ["a", ""], "mistake_index": None}, (1.0, 1.0)),
        # A Parquet file has every column in every row.
        ({"steps": ["a", "b"], "labels": None, "first_error": 1}, (1.0, 0.0)),
        ({"steps": ["a", "b"], "labels": [True, True], "first_error": None}, (1.0, 1.0)),
    ],
)
def test_steps(tmp_path: Path, row: dict[str, Any], labels: tuple[float | None, ...]) -> None:
    steps = tuple(row.get("steps") or row["completions"])
    want = Stepwise("jsonl:one/0", "p", steps, labels)
    assert one(tmp_path, read_steps, {"prompt": "p", **row}) == want
    assert one(tmp_path, read_steps, {"input": "p", **row}) == want


S = {"prompt": "p", "steps": ["a", "b"]}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (S, "column 'labels' = None: give a list with a label a step, or a first_error column"),
        ({**S, "labels": [True]}, "1 labels for 2 steps: give as many"),
        ({**S, "labels": [True, "no"]}, "each is true, false, a number from 0 to 1, or null"),
        ({**S, "labels": [None, None]}, "no step is judged: leave the row out"),
        ({**S, "labels": "10"}, "column 'labels' = '10': give a list with a label a step"),
        (
            {**S, "labels": [1, 0], "first_error": 1},
            "'first_error' = 1: the row has labels as well",
        ),
        ({**S, "first_error": 2}, "'first_error' = 2: give the index of a step, 0 to 1, or null"),
        ({**S, "first_error": -1}, "'first_error' = -1: give the index of a step, 0 to 1, or null"),
        ({**S, "first_error": 0.5}, "= 0.5: give the index of a step"),
        ({**S, "mistake_index": True}, "'mistake_index' = True: give the index of a step"),
        ({**S, "first_error": 1, "steps": []}, "column 'steps' = []: the list is empty"),
        ({**S, "first_error": 1, "steps": "ab"}, "column 'steps' = 'ab': give a list of texts"),
        ({**S, "first_error": 1, "steps": ["a", 2]}, "['a', 2]: give a list of texts"),
        ({**S, "first_error": 1, "steps": ["", " "]}, "'steps' = ['', ' ']: the answer is empty"),
        ({"prompt": "p", "first_error": 1}, "unknown column 'completions'"),
        ({"steps": ["a"], "first_error": 0}, "unknown column 'prompt'"),
    ],
)
def test_bad_steps_are_refused(tmp_path: Path, row: dict[str, Any], line: str) -> None:
    assert line in refused(tmp_path, read_steps, row)


@pytest.mark.parametrize(
    ("name", "rows", "wrong"),
    [
        ("dyck_languages", 986, 650),
        ("logical_deduction", 300, 294),
        ("multistep_arithmetic", 300, 238),
        ("tracking_shuffled_objects", 300, 260),
        ("word_sorting", 300, 266),
    ],
)
def test_bigbench_mistake(name: str, rows: int, wrong: int) -> None:
    path = shared_path(f"data/bigbench-mistake/{name}.jsonl")
    splits = read_steps(of(str(path)))
    found = [*splits.train, *splits.validation]
    assert len(found) == rows
    assert sum(row.first_error is not None for row in found) == wrong
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in found:
        raw = lines[int(row.id.rsplit("/", 1)[1])]
        assert (row.prompt, list(row.steps)) == (raw["input"], raw["steps"])
        assert row.first_error == raw["mistake_index"]


# ---------------------------------------------------------------- where rows come from


def test_a_function_gives_rows_by_the_runs_seed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", PAIRS[:60])
    (tmp_path / "made.py").write_text(
        "import json\n"
        "def rows(path, seed):\n"
        "    with open(path, encoding='utf-8') as file:\n"
        "        for line in file:\n"
        "            yield {**json.loads(line), 'margin': seed}\n"
    )

    source = PreferenceData(name=f"{tmp_path}/made.py:rows", options={"path": path})
    made, want = read_pairs(source, seed=3), read_pairs(of(path))
    assert [p.prompt for p in made.train] == [p.prompt for p in want.train]
    assert made.train[0].margin == 3.0
    assert read_pairs(source).train[0].margin == 0.0
    own = source.model_copy(update={"options": {"path": path, "seed": 7}})
    assert read_pairs(own, seed=3).train[0].margin == 7.0


def test_columns_by_the_files_own_names(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "good": row["chosen"], "bad": ""} for row in PAIRS[:4]]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    names = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    splits = read_pairs(of(path, columns=names, empty="keep"))
    assert {p.prompt for p in (*splits.train, *splits.validation)} == {r["question"] for r in rows}
    with pytest.raises(KeelError, match=r"rows\.jsonl:1: column 'bad' = '': the answer is empty"):
        read_pairs(of(path, columns=names))
    with pytest.raises(KeelError, match=r"columns\.margin: unknown column 'god': did you mean"):
        read_pairs(of(path, columns={**names, "margin": "god"}))
    with pytest.raises(KeelError, match=r"columns: unknown column 'promt': did you mean 'prompt'"):
        read_pairs(of(path, columns={"promt": "question"}))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"name": "jsonl"}, "preference data 'jsonl': path is not set: give a file"),
        (
            {"name": "datasets"},
            "preference data 'datasets': path is not set: give a data set's name",
        ),
        ({"name": "jsonn", "path": "x"}, "unknown kind 'jsonn': did you mean 'jsonl'?"),
        ({"name": "m:f", "path": "x"}, "path is not read by a function: put it into options"),
        ({"name": "m:f", "validation_path": "x"}, "validation_path is not read by a function"),
        ({"name": "{dir}/made.py:table"}, "returns a dict: return rows of dicts"),
    ],
)
def test_bad_sources_are_refused(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    (tmp_path / "made.py").write_text("def table(): return {'prompt': []}\n")
    keys = {**keys, "name": keys["name"].replace("{dir}", str(tmp_path))}
    with pytest.raises(KeelError) as error:
        read_pairs(PreferenceData.model_validate(keys))
    assert line in str(error.value)


@pytest.mark.parametrize(
    "keys",
    [{"validation_fraction": 1.0}, {"validation_fraction": 0.0}, {"empty": "no"}, {"pth": "x"}],
)
def test_bad_keys_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PreferenceData.model_validate({"name": "jsonl", **keys})
