"""Messages and tools in rows: whole from a file to the prompt, in every kind of data."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.config.sources import PreferenceData
from keel.data.columns import read_messages, read_tools
from keel.data.mixture import build_task, stored
from keel.data.preferences import read_labelled, read_pairs, read_steps
from keel.data.tasks import DataTask
from keel.models.chat import ChatEncoder, encode_prompt
from keel.models.reward import Reader
from keel.preferences.files import Attribution, import_file, preference_rows, steps_rows
from keel.preferences.pool import read_texts
from keel.preferences.store import PreferenceStore
from keel.training.judged_data import encoder
from keel.types import KeelError, Prompt, Split
from tests.data.made import jsonl, source
from tests.models.published_templates import tokenizer_of


def tool(name: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)[:1]}
    function = {"name": name, "description": f"{name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def call(identifier: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


WEATHER: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warmer in Bergen or in Lima?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Two look-ups.",
        "tool_calls": [
            call("c1", "weather", town="Bergen"),
            call("c2", "forecast", days=1, at="L"),
        ],
    },
    {"role": "tool", "content": '{"celsius": 9}', "tool_call_id": "c1", "name": "weather"},
    {"role": "tool", "content": '{"celsius": 21}', "tool_call_id": "c2", "name": "forecast"},
]
CLOCK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What time is it in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [call("x", "clock", zone="CET", h24=True)]},
    {"role": "tool", "content": "13:07", "tool_call_id": "x"},
]
PLAIN = [{"role": "user", "content": "Good morning"}]
ROWS: list[dict[str, Any]] = [
    {
        "prompt": WEATHER,
        "tools": [tool("weather", town="string"), tool("forecast", days="integer")],
    },
    {"prompt": CLOCK, "tools": [tool("clock", zone="string", h24="boolean")]},
    {"prompt": PLAIN, "tools": None},
]


def parquet(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def prompts(task: DataTask) -> list[Prompt]:
    splits: tuple[Split, ...] = ("train", "validation")
    found = [task.prompt(split, at) for split in splits for at in range(task.size(split))]
    return sorted(found, key=lambda prompt: int(prompt.id.rsplit("/", 1)[1]))


def task_of(kind: str, **keys: Any) -> DataTask:
    task = stored(build_task(source(kind, **keys), seed=0))
    assert task is not None
    return task


def written(path: Path, kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if kind == "datasets":
        files = {"train": parquet(path / "rows.parquet", rows)}
        return {"path": "parquet", "options": {"data_files": files}}
    return {"path": (parquet if kind == "parquet" else jsonl)(path / f"rows.{kind}", rows)}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_a_task_keeps_whole_messages_and_tools(kind: str, tmp_path: Path) -> None:
    found = prompts(task_of(kind, **written(tmp_path, kind, ROWS)))
    assert [list(prompt.content) for prompt in found] == [WEATHER, CLOCK, PLAIN]
    assert [list(prompt.tools) for prompt in found] == [row["tools"] or [] for row in ROWS]
    # Templates write keys in the order in which the data has them.
    assert json.dumps(found[1].content[2]) == json.dumps(CLOCK[2])


def test_null_arguments_of_json_stay(tmp_path: Path) -> None:
    turns = [*PLAIN, {"role": "assistant", "tool_calls": [call("a", "f", unit=None)]}, CLOCK[3]]
    (found,) = prompts(task_of("jsonl", path=jsonl(tmp_path / "a.jsonl", [{"prompt": turns}])))
    assert list(found.content) == turns


def test_tools_may_be_json_text(tmp_path: Path) -> None:
    rows = [{**row, "tools": json.dumps(row["tools"])} for row in ROWS] + [
        {"prompt": "alone", "tools": ""}
    ]
    found = prompts(task_of("parquet", **written(tmp_path, "parquet", rows[:3])))
    assert [list(prompt.tools) for prompt in found] == [row["tools"] or [] for row in ROWS]
    assert read_tools([json.dumps(one) for one in ROWS[0]["tools"]]) == tuple(ROWS[0]["tools"])
    (alone,) = prompts(task_of("jsonl", **written(tmp_path, "jsonl", rows[3:])))
    assert alone.tools == ()


@pytest.mark.parametrize("value", ['{"name": "f"}', "[1]", "hammer", [5], {"name": "f"}, 3])
def test_what_is_no_list_of_tools_is_refused(value: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "tools": value}])
    with pytest.raises(KeelError, match=r"a.jsonl:1: column 'tools' holds no list of tools"):
        task_of("jsonl", path=path)
    with pytest.raises(ValueError, match="no list of tools"):
        read_tools(value)


# ---------------------------------------------------------------- preference data


def pair(row: dict[str, Any], number: int) -> dict[str, Any]:
    return {**row, "chosen": f"Lima {number}.", "rejected": "Bergen."}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_preference_data_keep_messages_and_tools(kind: str, tmp_path: Path) -> None:
    readers: list[tuple[Any, dict[str, Any]]] = [
        (read_pairs, {"chosen": "Lima.", "rejected": "Bergen."}),
        (read_labelled, {"completion": "Lima.", "label": True}),
        (read_steps, {"completions": ["9 < 21.", "Lima."], "labels": [True, True]}),
        (read_steps, {"steps": ["9 > 21.", "Bergen."], "first_error": 0}),
    ]
    for read, more in readers:
        keys = written(tmp_path, kind, [{**row, **more} for row in ROWS])
        splits = read(PreferenceData.model_validate({"name": kind, **keys}))
        found = {row.id[-1]: row for row in (*splits.train, *splits.validation)}
        assert [list(found[n].prompt) for n in "012"] == [WEATHER, CLOCK, PLAIN]
        assert [list(found[n].tools) for n in "012"] == [row["tools"] or [] for row in ROWS]


def test_whole_conversations_share_turns_with_calls(tmp_path: Path) -> None:
    rows = [
        {
            "chosen": [*WEATHER, {"role": "assistant", "content": "Lima."}],
            "rejected": [*WEATHER, {"role": "assistant", "content": "Bergen."}],
        }
    ]
    splits = read_pairs(PreferenceData(name="parquet", **written(tmp_path, "parquet", rows)))
    (row,) = splits.train
    assert (list(row.prompt), row.chosen, row.rejected) == (WEATHER, "Lima.", "Bergen.")


@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": None, "tool_calls": [call("a", "f", x=1)]},
        {"role": "assistant", "content": "Lima.", "reasoning_content": "21 is more."},
    ],
)
def test_an_answer_that_is_no_text_is_refused(last: dict[str, Any], tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": [last], "rejected": [{"role": "assistant", "content": "b"}]}
    path = jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(
        KeelError, match=r"an answer is a text, and the last message has (tool|rea)"
    ):
        read_pairs(PreferenceData(name="jsonl", path=path))


def test_the_store_keeps_messages_and_tools(tmp_path: Path) -> None:
    rows = [pair(row, number) for number, row in enumerate(ROWS)]
    steps = [{**row, "completions": ["a"], "labels": [True]} for row in ROWS]
    by = Attribution()
    with PreferenceStore(tmp_path / "store.db", create=True) as store:
        import_file(store, "trl", Path(jsonl(tmp_path / "a.jsonl", rows)), by)
        import_file(store, "steps", Path(jsonl(tmp_path / "b.jsonl", steps)), by)
        for kept in (list(preference_rows(store)), list(steps_rows(store))):
            assert [row["prompt"] for row in kept] == [WEATHER, CLOCK, PLAIN]
            assert [row.get("tools") for row in kept] == [row["tools"] for row in ROWS]
            assert json.dumps(kept[1]["prompt"][2]) == json.dumps(CLOCK[2])
        texts = list(read_texts(store, [pair.id for pair in store.pairs()]))
        assert [list(row.tools) for row in texts] == [row["tools"] or [] for row in ROWS]
        turned = [dict(reversed(turn.items())) for turn in CLOCK]
        path = jsonl(tmp_path / "c.jsonl", [{**rows[1], "prompt": turned}])
        import_file(store, "trl", Path(path), by)
        assert store.counts()["prompts"] == 3


# ---------------------------------------------------------------- other forms of messages


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_may_be_json_text(kind: str, tmp_path: Path) -> None:
    """A list in brackets that is not of messages stays a text."""
    texts = ["[1, 2] plus [3]?", "[4, 5]", '[{"a": 1}]', "[]"]
    rows = [{"prompt": json.dumps(WEATHER), "chosen": "Lima", "rejected": "x"}]
    rows += [{"prompt": text, "chosen": "a", "rejected": "b"} for text in texts]
    found = prompts(task_of(kind, **written(tmp_path, kind, rows)))
    assert [prompt.content for prompt in found] == [tuple(WEATHER), *texts]
    splits = read_pairs(PreferenceData(name=kind, **written(tmp_path, kind, rows)))
    pairs = [pair.prompt for pair in (*splits.train, *splits.validation)]
    assert sorted(map(str, pairs)) == sorted(map(str, [tuple(WEATHER), *texts]))


def test_sharegpt_and_parts_of_text_are_read() -> None:
    talk = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi", "weight": 1},
        {"from": "gpt", "value": "Hello"},
        {"from": "observation", "value": "7"},
    ]
    read = [(m["role"], m["content"]) for m in read_messages(talk)]
    assert read == [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("tool", "7")]
    assert "from" not in read_messages(talk)[1]
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 x 7?"}]
    (message,) = read_messages([{"role": "user", "content": parts}])
    assert message["content"] == "What is 6 x 7?"


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "type 'image_url'"),
        ({"role": "user", "content": [{"type": "image"}]}, "type 'image': each content a text"),
        ({"role": "user", "content": None}, "each content a text"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "each content a text"),
        ({"role": "assistant", "tool_calls": '[{"name": "f"}]'}, "tool_calls that are not a list"),
        ({"role": 1, "content": "a"}, "each content a text"),
        ({"from": "bard", "value": "a"}, "from 'bard': rename it"),
        ({"from": "human", "value": 5}, "each content a text"),
        ({"role": "user", "content": "a", "seen": {1}}, "JSON cannot hold"),
        ({"role": "user", "content": "a", "note": "\ud800"}, "invalid UTF-8"),
    ],
)
def test_other_messages_are_refused_with_the_reason(turn: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_messages([{"role": "user", "content": "b"}, turn])


# ---------------------------------------------------------------- through the template


def test_files_reach_the_template_as_they_are_written(tmp_path: Path) -> None:
    """The tokens of a task, and of the prompts of preference data, from a Parquet file."""
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    )
    chat = ChatEncoder(tokenizer, {})
    rows = [{**row, "chosen": "Lima.", "rejected": "Oslo."} for row in ROWS]
    keys = written(tmp_path, "parquet", rows)
    splits = read_pairs(PreferenceData.model_validate({"name": "parquet", **keys}))
    pairs = {row.id[-1]: row for row in (*splits.train, *splits.validation)}
    encode = encoder("pairs", Reader(tokenizer))
    for at, prompt in enumerate(prompts(task_of("parquet", **keys))):
        wanted = tokenizer.apply_chat_template(
            ROWS[at]["prompt"], tools=ROWS[at]["tools"], add_generation_prompt=True, tokenize=False
        )
        tokens = encode_prompt(prompt, chat).tokens
        assert tokenizer.decode(tokens) == wanted
        assert encode(pairs[str(at)]).chosen.tokens[: len(tokens)] == tokens
