"""Rows that are left out: which, where they are kept, and how they are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.cli.main import main
from keel.config.sources import PreferenceData
from keel.data.mixture import build_task, stored
from keel.data.preferences import read_pairs
from keel.data.tasks import DataTask
from keel.runs.rows import SHOWN, LeftOut, counted, named_from, write_quarantine
from keel.training.run import train
from keel.types import KeelError
from tests.data.made import jsonl, source
from tests.training.judged import recipe

QUARANTINE = {"bad_rows": "quarantine"}


def data_task(name: str = "jsonl", **keys: Any) -> DataTask:
    task = stored(build_task(source(name, **keys), seed=0))
    assert task is not None
    return task


def used(task: DataTask) -> list[int]:
    return sorted(entry.row.line for split in task.splits.values() for entry in split)


def written(path: Path, *lines: str | bytes) -> str:
    raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------- rows of a task

BAD: list[tuple[str | bytes, str]] = [
    ("{", "not JSON: Expecting property name enclosed in double quotes at column "),
    ("[1]", "a JSON list, not an object: one {…} a line"),
    ('{"prompt": "a", "prompt": "b"}', "not readable: the key 'prompt' stands there twice: drop"),
    ('{"prompt": "a\\ud83d"}', "holds half of a character (\\ud800 to \\udfff alone)"),
    (b'{"prompt": "\xffa"}', "not UTF-8 text (the byte 0xff): save it as UTF-8"),
    ('{"prompt": ' + "9" * 4301 + "}", "not readable: Exceeds the limit (4300 digits)"),
    ('{"prompt": ' + "[" * 9000 + "]" * 9000 + "}", "not readable: nested too deeply"),
    ('{"question": "a"}', "unknown column 'prompt'"),
    ('{"prompt": null}', "column 'prompt' is empty: leave the row out"),
    ('{"prompt": " \\t"}', "the prompt is empty: leave the row out"),
    ('{"prompt": {"role": "user"}}', "column 'prompt' holds a table, not a text or messages"),
    ('{"prompt": [{"role": "user"}]}', "column 'prompt' holds a list that is not of messages"),
    (
        '{"prompt": [{"role": "User", "content": "a"}]}',
        "column 'prompt' holds message 1 of role 'User': write 'user'",
    ),
]
UNREAD = 7
"""So many of them are no JSON objects that can be had."""


def test_bad_rows_stand_aside_with_line_reason_and_row(tmp_path: Path) -> None:
    good = '{"prompt": "p%d"}'
    lines: list[str | bytes] = ["", good % 0]
    for bad, _ in BAD:
        lines += [bad, "  "]
    lines.append(good % 1)
    path = written(tmp_path / "rows.jsonl", *lines)
    task = data_task(path=path, **QUARANTINE)
    assert used(task) == [2, len(lines)]
    assert [row.line for row in task.left_out] == list(range(3, len(lines), 2))
    for number, (row, (line, reason)) in enumerate(zip(task.left_out, BAD, strict=True)):
        assert row.source == path
        assert row.reason.startswith(f"{path}:{row.line}: {reason}")
        text = line.decode("utf-8", "backslashreplace") if isinstance(line, bytes) else line
        assert row.row == (text if number < UNREAD else json.loads(text))
    # Ids are numbers of the row in its file, whether or not another row is fixed.
    ids = {task.prompt(s, 0).id for s in ("train", "validation")}
    assert {i.rsplit("/", 1)[1] for i in ids} == {"0", str(len(BAD) + 1)}


def test_one_message_counts_every_kind_of_bad_row(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"p{n}", "gold": n} for n in range(160)]
    for n in (18, 30, 77):
        rows[n] = {"prompt": f"p{n}", "gold": None}
    rows[139] = {"prompt": {"q": 1}, "gold": 1}
    rows[150] = {"prompt": "", "gold": 1}
    rows[151] = {"prompt": " ", "gold": 1}
    lines = [json.dumps(row) for row in rows] + ["{", '{"a": }']
    path = written(tmp_path / "rows.jsonl", *lines)
    with pytest.raises(KeelError) as error:
        data_task(path=path, answer="gold")
    text = str(error.value)
    assert text.startswith(f"{path}:19: the answer column 'gold' is empty: leave the row out (3 ")
    for said in (
        ":140: column 'prompt' holds a table",
        ":151: the prompt is empty",
        "(8 bad rows)",
    ):
        assert said in text
    assert text.count("not JSON") == 2  # of two kinds
    assert text.endswith('; tasks.bad_rows = "quarantine" drops bad rows')
    assert len(data_task(path=path, answer="gold", **QUARANTINE).left_out) == 8
    # Values do not make kinds of their own.
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b", "margin": m} for m in ("x", "y", "z")]
    with pytest.raises(KeelError, match=r"column 'margin' = 'x': .* \(3 rows like it\); data.bad"):
        read_pairs(PreferenceData(name="jsonl", path=jsonl(tmp_path / "b.jsonl", pairs)))


def test_a_file_of_bad_rows_alone_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", "{", '{"prompt": ""}')
    with pytest.raises(KeelError, match=r"no row of 2 can be read; the first: .*:1: not JSON"):
        data_task(path=path, **QUARANTINE)
    path = written(tmp_path / "rows.jsonl", "{", "[1]")
    with pytest.raises(KeelError, match=r"no row of 2 can be read"):
        data_task(path=path, **QUARANTINE)
    with pytest.raises(KeelError, match=r"no row of 2 can be read"):
        read_pairs(PreferenceData(name="jsonl", path=path, bad_rows="quarantine"))


def test_a_byte_order_mark_and_other_line_ends_are_no_fault(tmp_path: Path) -> None:
    rows = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r{"prompt": "\\ud83d\\ude00"}'
    (tmp_path / "rows.jsonl").write_bytes(rows)
    task = data_task(path=str(tmp_path / "rows.jsonl"))
    assert used(task) == [1, 3, 4]
    message = {task.prompt(s, i).content for s in task.splits for i in range(task.size(s))}
    assert message == {"a", "b", "😀"}


def test_parquet_and_python_rows(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    with pytest.raises(KeelError, match=r"rows\.parquet: column 'prompt' cannot be read: 'utf-8'"):
        data_task("parquet", path=path)
    made = tmp_path / "made.py"
    made.write_text("def rows(): return [{'prompt': 'a'}, 5, {1: 'x'}, {'prompt': 'b'}]\n")
    task = data_task(f"{made}:rows", **QUARANTINE)
    assert used(task) == [1, 4]
    assert [row.line for row in task.left_out] == [2, 3]
    assert "row 2 is a int, not a dict of columns" in task.left_out[0].reason
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(KeelError, match="two columns are named 'prompt': rename one"):
        data_task("parquet", path=path, **QUARANTINE)


# ---------------------------------------------------------------- judged rows


def test_empty_answers_overlap_and_double_ids(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    rows = [row, {**row, "chosen": ""}, {**row, "id": 7}, {**row, "id": 7}, {**row, "prompt": "q"}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    held = jsonl(tmp_path / "held.jsonl", [{**row, "prompt": "q"}])
    splits = read_pairs(
        PreferenceData(
            name="jsonl", path=path, validation_path=held, empty="drop", bad_rows="quarantine"
        )
    )
    assert [one.origin.line for one in splits.train if one.origin] == [1, 3]
    assert [(one.line, one.why) for one in splits.left_out] == [
        (2, "empty"),
        (4, "bad"),
        (5, "overlap"),
    ]
    assert (splits.dropped, splits.overlap) == (1, 1)
    assert "two rows have the id '7'" in splits.left_out[1].reason
    assert splits.left_out[2].row == rows[4]


# ---------------------------------------------------------------- the file


def test_the_file_holds_any_row(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"a": 1},
        "text",
        {"x": float("nan")},
        {1: b"x"},
        {"s": "\ud800"},
        [(1, {3})],
    ]
    target = tmp_path / "quarantine" / "rl-rows.jsonl"
    write_quarantine(target, [LeftOut("f", n, f"why\n{n}", row) for n, row in enumerate(rows, 1)])
    message = read(target)
    assert [list(one) for one in message] == [["source", "line", "reason", "row"]] * len(rows)
    assert [one["line"] for one in message] == list(range(1, len(rows) + 1))
    assert message[1]["reason"] == "why 2"
    kept = [one["row"] for one in message]
    assert kept[:2] == [{"a": 1}, "text"]
    assert kept[2:] == [{"x": "nan"}, {"1": "b'x'"}, {"s": "\ud800"}, [[1, "{3}"]]]
    before = target.read_bytes()
    write_quarantine(target, [LeftOut("f", 1, "x" * 9_999, None)])
    assert len(read(target)[0]["reason"]) == SHOWN
    write_quarantine(target, [LeftOut("f", n, f"why\n{n}", row) for n, row in enumerate(rows, 1)])
    assert target.read_bytes() == before
    write_quarantine(target, [])
    assert not target.exists()


def test_how_many_for_what() -> None:
    rows = [LeftOut("/run/rows/a", n, "/run/rows/a:1: x", None, why) for n, why in enumerate(
        ("long", "bad", "long", "overlap", "empty"), 1)]  # fmt: skip
    assert counted(rows) == (
        "1 that cannot be read, 2 too long, 1 also in the validation split, 1 with an empty answer"
    )
    named = named_from(Path("/run"), rows)
    assert {(row.source, row.reason) for row in named} == {("rows/a", "rows/a:1: x")}


# ---------------------------------------------------------------- a run


def tasks(path: str, **keys: Any) -> dict[str, Any]:
    return {"tasks": [{"name": "jsonl", "path": path, "answer": "answer", **keys}]}


ROWS = [{"prompt": f"{n}>", "answer": str(n)} for n in range(100, 112)]
SFT = {"stage": "sft", "steps": 2, "batch_size": 4, "prompts": {"max_tokens": 8}}


def notes(folder: Path) -> list[str]:
    return [event["text"] for event in read(folder / "events.jsonl") if event["event"] == "note"]


def test_a_run_leaves_its_rows_where_they_can_be_read(tmp_path: Path) -> None:
    odd = [{"prompt": "é>", "answer": "1"}, {"prompt": "1" * 20, "answer": "1"}, {"answer": "1"}]
    path = jsonl(tmp_path / "rows.jsonl", [*ROWS[:6], *odd, *ROWS[6:]])
    with pytest.raises(KeelError, match=r"rows\.jsonl:9: unknown column 'prompt'"):
        train(recipe({**SFT, **tasks(path)}), tmp_path / "stopped")
    folder = train(recipe({**SFT, **tasks(path, **QUARANTINE)}), tmp_path / "run")
    kept = folder.quarantine / "sft-prompts.jsonl"
    before, message = kept.read_bytes(), read(kept)
    assert [(row["line"], row["row"]) for row in message] == [(9, odd[2]), (7, odd[0]), (8, odd[1])]
    assert "holds 'é', which the tokenizer does not know" in message[1]["reason"]
    assert "is 20 tokens long, more than the 8 allowed" in message[2]["reason"]
    kept.unlink()
    train(None, folder.path, resume=True)  # a resumed run writes the same, and notes it once
    assert kept.read_bytes() == before
    assert notes(folder.path) == [
        "sft: rows left out: 2 that cannot be read, 1 too long (quarantine/sft-prompts.jsonl)"
    ]


def test_what_cannot_be_encoded_stops_before_the_first_step(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "é>", "answer": "1"}])
    with pytest.raises(KeelError, match=r"rows\.jsonl:13: prompt .* holds 'é', which"):
        train(recipe({**SFT, **tasks(path)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"é{n}", "answer": "1"} for n in range(9)])
    with pytest.raises(KeelError, match=r"no row of \d can be read; the first: .* holds 'é'"):
        train(recipe({**SFT, **tasks(path, **QUARANTINE)}), tmp_path / "run")


def test_of_more_rows_than_are_looked_at_the_bad_are_left_out_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.training.setup.ENCODED_BEFORE", 12)
    path = jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "é>", "answer": "1"}])
    stage = {**SFT, "steps": 5}
    train(
        recipe({**stage, **tasks(path, validation_fraction=0.01, **QUARANTINE)}), tmp_path / "run"
    )
    (note,) = notes(tmp_path / "run")
    assert note.startswith("prompt left out, others of 'jsonl:rows' like it are counted only: ")
    assert "'jsonl:rows/train/12' holds 'é'" in note
    with pytest.raises(KeelError, match="jsonl:rows/train/12' holds 'é'"):
        train(recipe({**stage, **tasks(path, validation_fraction=0.01)}), tmp_path / "stopped")


def test_a_reward_model_leaves_its_rows_where_they_can_be_read(tmp_path: Path) -> None:
    good = [{"prompt": f"{n}>", "chosen": "11", "rejected": "00"} for n in range(9)]
    odd = [
        {"prompt": "1>", "chosen": "é", "rejected": "0"},
        {"prompt": "2>", "chosen": "1" * 30, "rejected": "0"},
        {"prompt": "3>", "chosen": None, "rejected": "0"},
        {"prompt": "4>", "chosen": "", "rejected": "0"},
    ]
    path = jsonl(tmp_path / "rows.jsonl", [*good, *odd])
    data = {"name": "jsonl", "path": path, "empty": "drop"}
    stage = {"stage": "reward_model", "steps": 1, "batch_size": 2, "max_tokens": 12}
    with pytest.raises(KeelError, match=r"rows\.jsonl:12: column 'chosen' = None"):
        train(recipe({**stage, "data": data}), tmp_path / "stopped")
    train(recipe({**stage, "data": {**data, **QUARANTINE}}), tmp_path / "run")
    kept = tmp_path / "run" / "quarantine" / "reward_model-rows.jsonl"
    message = {row["line"]: row for row in read(kept)}
    assert {line: row["row"] for line, row in message.items()} == dict(zip(range(10, 14), odd))  # noqa: B905
    assert "rows.jsonl:10: the answer of jsonl:rows/9 holds 'é'" in message[10]["reason"]
    assert message[11]["reason"] == f"{path}:11: 33 tokens, more than 12"
    assert message[13]["reason"] == f"{path}:13: an answer is empty"
    (note,) = notes(tmp_path / "run")
    assert note == (
        "reward_model: rows left out: 1 longer than 12 tokens, 1 with an empty answer, 2 that "
        "cannot be read (quarantine/reward_model-rows.jsonl)"
    )
    path = jsonl(tmp_path / "rows.jsonl", [*good, odd[0]])
    with pytest.raises(KeelError, match=r"rows\.jsonl:10: the answer of jsonl:rows/9 holds 'é'"):
        train(recipe({**stage, "data": {"name": "jsonl", "path": path}}), tmp_path / "stopped")


def test_names_that_act_on_a_terminal_are_printed_inert(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "a\x1b[31m\u202e" + "x" * 9_999 + ".toml"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert len(message) < 2_100
    assert message[:-1].isprintable()


def test_how_many_rows_are_looked_at_is_of_all_tasks_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.training.setup.ENCODED_BEFORE", 20)
    one = tasks(jsonl(tmp_path / "one.jsonl", ROWS))["tasks"]
    odd = [*ROWS, {"prompt": "é>", "answer": "1"}]
    two = tasks(jsonl(tmp_path / "two.jsonl", odd), weight=0.001, **QUARANTINE)["tasks"]
    train(recipe({**SFT, "steps": 1, "tasks": [*one, *two]}), tmp_path / "run")
    assert not (tmp_path / "run" / "quarantine").exists()
