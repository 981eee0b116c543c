"""Examples to imitate: forms found by their columns, blocks, and sets that are streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.config.sources import SFTData
from keel.data.preferences import read_pairs
from keel.data.sft import SFTEncoder, Trained, pack, read_sft
from keel.data.streamed import StreamedSet, read_stream
from keel.data.tables import read_table
from keel.models.build import byte_tokenizer
from keel.models.conversations import ConversationEncoder
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
        (
            {"instruction": "a", "input": "b", "output": "c"},
            "join instruction and input into one column",
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
        next(read_stream(source, "tran"))


@pytest.mark.parametrize(("size", "left_out", "cut"), [(None, 8, 7), (24, 24, 24)])
def test_a_stream_goes_on_from_its_place(
    size: int | None, left_out: int, cut: int, tmp_path: Path
) -> None:
    """What it gives, counts and puts into quarantine is that of one that was not interrupted.

    23 blocks: of one example each, 6 in a pass, or of two or more, 2 in a pass.
    """
    rows = [{"text": "" if at in (2, 5) else "a" * at} for at in range(1, 9)]
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", rows)
    source = SFTData(
        name="datasets", path=str(tmp_path / "set"), bad_rows="quarantine",
        options={"streaming": True},
    )  # fmt: skip
    target = tmp_path / "quarantine" / "rows.jsonl"
    chat = ConversationEncoder(byte_tokenizer(256))

    def opened() -> StreamedSet:
        encode = SFTEncoder(chat, "assistant", 7, False)
        return StreamedSet(source, "set", "data.0", encode, size, target)

    def rest(one: StreamedSet) -> Any:
        lengths = [[len(x.tokens) for x in one.prompt("train", 0)] for _ in range(14)]
        return lengths, one.counts(), target.read_bytes()

    whole = opened()
    places = []
    for _ in range(9):
        places.append(json.loads(json.dumps(whole.place())))
        whole.prompt("train", 0)
    ends = [rest(whole)]
    assert target.read_bytes().count(b"\n") == 2
    for taken, place in enumerate(places):
        other = opened()
        other.seek(place)
        for _ in range(9 - taken):
            other.prompt("train", 0)
        ends.append(rest(other))
    assert all(end == ends[0] for end in ends)
    assert ends[0][1] == {"left_out": left_out, "cut": cut}
