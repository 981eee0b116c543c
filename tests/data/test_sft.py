"""Examples to imitate: forms found by their columns, blocks, and sets that are streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.config.sources import SFTData
from keel.data.preferences import read_pairs
from keel.data.sft import Trained, pack, read_sft, streamed_rows
from keel.data.tables import read_table
from keel.platform.files import write_jsonl
from keel.types import KeelError

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def read(folder: Path, *rows: dict[str, Any], **keys: Any) -> Any:
    """The examples of some rows, and of one more that the validation split takes."""
    write_jsonl(folder / "held.jsonl", [{"text": "held"}])
    held = str(folder / "held.jsonl")
    write_jsonl(folder / "rows.jsonl", rows)
    return read_sft(SFTData(path=str(folder / "rows.jsonl"), validation_path=held, **keys)).train


@pytest.mark.parametrize(
    ("row", "keys", "prompt", "completion"),
    [
        ({"messages": TALK, "prompt": "x"}, {}, None, TALK),
        ({"conversations": SHAREGPT, "id": 3}, {}, None, TALK),
        ({"prompt": "a", "completion": "b", "text": "ab"}, {}, "a", "b"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, {}, TALK[:1], TALK[1:]),
        ({"text": "ab"}, {}, None, "ab"),
        (
            {"q": "a", "r": "b"},
            {"columns": {"prompt": "q", "completion": "r"}, "system": "s"},
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
            "b",
        ),
    ],
)
def test_the_form_follows_from_the_columns(
    row: dict[str, Any], keys: dict[str, Any], prompt: Any, completion: Any, tmp_path: Path
) -> None:
    (found,) = read(tmp_path, row, **keys)
    as_list = [v if v is None or isinstance(v, str) else list(v) for v in
               (found.prompt, found.completion)]  # fmt: skip
    assert as_list == [prompt, completion]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"Question": "a", "response": "b"},
            r'rows.jsonl: the columns are .*: did you mean columns = {prompt = "Question", '
            'completion = "response"}',
        ),
        ({"a": "b"}, 'as in columns = {prompt = "question", completion = "answer"}'),
        ({"messages": "hello"}, "rows.jsonl:1: column 'messages' = 'hello': give a list"),
        ({"prompt": "a", "completion": ""}, "the completion is empty"),
        (
            {"prompt": "a", "completion": [{"role": "user", "content": "b"}]},
            "no message in it is the assistant's",
        ),
    ],
)
def test_a_row_of_no_form_names_the_columns_meant(
    row: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(KeelError, match=line):
        read(tmp_path, row)


def test_preference_columns_are_guessed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "a", "chosen": "b", "worse": "c"}])
    source = SFTData(path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(KeelError, match=r'or set columns = \{rejected = "worse"\}'):
        read_pairs(source)  # type: ignore[arg-type]


def example(length: int) -> Trained:
    return Trained(str(length), np.zeros(length, dtype=np.int64), np.ones(length, dtype=np.bool_))


def test_the_longest_goes_where_least_room_is_left() -> None:
    blocks = pack([example(n) for n in (3, 6, 7, 2, 4, 1)], 10)
    assert [[len(one.tokens) for one in block] for block in blocks] == [[7, 3], [6, 4], [2, 1]]


@pytest.fixture
def hub(tmp_path: Path) -> str:
    """A data set of 9 rows in a split, as the hub lays it out."""
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": f"row {at}"} for at in range(9)])
    write_jsonl(folder / "test.jsonl", [{"text": "held"}])
    return str(folder)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("split", "first", "count"), [("train[2:5]", 2, 3), ("train[7:]", 7, 2), ("train", 0, 9)]
)
def test_parts_of_a_split_are_read(
    split: str, first: int, count: int, streaming: bool, hub: str
) -> None:
    options = {"streaming": True} if streaming else {}
    table = read_table("datasets", hub, options, split)
    texts = [row.values["text"] for row in table.rows]
    assert texts == [f"row {at}" for at in range(first, first + count)]


def test_a_streamed_split_that_is_not_there_is_named(hub: str) -> None:
    source = SFTData(name="datasets", path=hub, options={"streaming": True})
    with pytest.raises(KeelError, match="unknown split 'tran': did you mean 'train'"):
        streamed_rows(source, "tran")
