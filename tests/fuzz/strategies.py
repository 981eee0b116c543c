"""Strategies of bad input: recipes, words, rows and the bytes of their files, texts, tokenizers."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from importlib import resources
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from hypothesis import strategies as st

from keel.algorithms.presets import PRESETS
from keel.config.load import shipped

GIANT = 100_000
"""Characters of a giant string."""
SHIPPED = sorted(shipped())
TOML = {name: (resources.files("keel.config") / "recipes" / f"{name}.toml") for name in SHIPPED}

SPECIAL = ("<pad>", "<eos>", "<unk>", "<s>", "</s>", "<|im_end|>", "<|endoftext|>")
ODD = (
    "", " ", "\n", "\0", "\x1b[31m", "a\nb\rc", "e\u0301\u0301\u0301", "\u202eabc", "\ufeff",
    "\u200d\U0001f469\u200d\U0001f4bb", "\ufffd", "\U0010ffff", "ﷺ", "none", "{", "}", "{0}",
    "{prompt!r}", "../../etc", "~no_user/x", "a/b\0c",
    "x" * 300, *SPECIAL,
)  # fmt: skip
LONE = ("\ud800", "a\udfffb", "\udc80")
"""Lone surrogates."""

plain = st.text(max_size=12)
texts = st.one_of(
    st.sampled_from(ODD),
    plain,
    st.text(st.characters(codec="ascii"), max_size=30),
    st.builds(lambda a, s, b: a + s + b, plain, st.sampled_from(SPECIAL), plain),
)
giants = st.builds(
    lambda c, n: (c * n)[:n], st.sampled_from(["a", "é ", "0", "\n", "{"]), st.just(GIANT)
)
halves = st.one_of(st.sampled_from(LONE), st.text(st.characters(), max_size=5))
numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([10**6, 2**31, -(2**40)]),
    st.floats(allow_nan=True, allow_infinity=True),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
lone = st.one_of(texts, texts, texts, halves)


def nested(depth: int) -> Any:
    """A value so many levels deep."""
    value: Any = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(texts, scalars, max_size=3),
    st.sampled_from([5, 60]).map(nested),
)

# ---------------------------------------------------------------- recipes

toml_scalars = st.one_of(
    st.booleans(), numbers, texts.filter(lambda t: "\ud800" not in t), st.just("x" * GIANT)
)
toml_values = st.one_of(
    toml_scalars,
    st.lists(toml_scalars, max_size=3),
    st.dictionaries(plain, toml_scalars, max_size=2),
    st.lists(st.dictionaries(plain, toml_scalars, max_size=2), max_size=3),
    st.just(nested(30)),
)
KEYS = (
    *("name", "seed", "threads", "model", "stages", "stage", "extends", "description", "tasks"),
    *("steps", "algorithm", "rollout", "rewards", "prompts", "data", "sampled", "optimizer"),
    *("rl", "sft", "reward_model", "dpo", "base", "columns", "kind", "preset", "bad_rows"),
    *("value", "evaluation", "lora", "build", "functions", "options", "path", "model.build"),
)
keys = st.one_of(st.sampled_from(KEYS), plain)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of nested tables and lists."""
    found = [path]
    if isinstance(data, Mapping):
        found += [p for key, value in data.items() for p in places(value, (*path, key))]
    elif isinstance(data, list):
        found += [p for at, value in enumerate(data) for p in places(value, (*path, at))]
    return found


def changed(data: Any, path: tuple[Any, ...], change: Any) -> Any:
    """The data with `change` called on the value at a path."""
    if not path:
        return change(data)
    first, *rest = path
    inner = changed(data[first], tuple(rest), change)
    if isinstance(data, Mapping):
        return {**data, first: inner}
    return [*data[:first], inner, *data[first + 1 :]]


@st.composite
def mutated(draw: st.DrawFn, data: Any, values: st.SearchStrategy[Any] = toml_values) -> Any:
    """A few places of the data replaced, doubled, emptied, nested or given a key."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(data)))
        value, name = draw(values), draw(keys)
        changes: dict[str, Any] = {
            "replace": lambda old, value=value: value,
            "key": lambda old, name=name, value=value: (
                {**old, name: value} if isinstance(old, dict) else value
            ),
            "drop": lambda old: type(old)(),
            "double": lambda old: old * 2 if isinstance(old, list) else old,
            "wrap": lambda old: [old],
        }
        kind = draw(st.sampled_from(("replace", *changes)))
        if path or kind in ("key", "double"):
            data = changed(data, path, changes[kind])
        if not isinstance(data, Mapping):
            data = {"stages": data}
    return data


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    """The bytes of a recipe: a shipped one, or one of a preset, changed as a table or as bytes."""
    if draw(st.booleans()):
        text = TOML[draw(st.sampled_from(SHIPPED))].read_text(encoding="utf-8")
    else:
        preset = draw(st.sampled_from(sorted(PRESETS)))
        text = f'algorithm = "{preset}"\n[[tasks]]\nname = "addition"\n[model]\nname = "./none"\n'
    if draw(st.integers(0, 3)):
        return tomli_w.dumps(draw(mutated(tomllib.loads(text)))).encode("utf-8", "surrogatepass")
    return draw(damaged(text.encode()))


PIECES = st.sampled_from([b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\r", b'"""', b"[[", b"\n"])


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes cut short, or with a few inserted, deleted or overwritten."""
    for _ in range(draw(st.integers(1, 3))):
        at, piece = (
            draw(st.integers(0, len(content))),
            draw(st.one_of(st.binary(max_size=6), PIECES)),
        )
        before, after = content[:at], content[at:]
        content = draw(
            st.sampled_from(
                [before, before + piece + after, before + piece + after[len(piece) :],
                 before + after[len(piece) + 1 :]]
            )
        )  # fmt: skip
    return content


overrides = st.one_of(
    texts,
    st.sampled_from(["steps=1\nname = 2", "tasks.0.name=x", "=", "a==b"]),
    st.builds("{}={}".format, st.one_of(keys, st.lists(keys, max_size=3).map(".".join)), texts),
    st.builds(
        "{}={}".format,
        st.sampled_from(("steps", "rl.steps", "model", "tasks", "stages", "algorithm", "seed")),
        st.one_of(
            st.sampled_from(["[", "{", "1e999", "nan", "9" * 20]),
            numbers.map(str),
            toml_scalars.map(repr),
        ),
    ),
)

# ---------------------------------------------------------------- rows

COLUMNS = ("prompt", "answer", "question", "a.b", "id", "label", "messages", "é", "", "{x}")
turns = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", ""]), "content": texts}
    ),
    st.fixed_dictionaries({"role": scalars}, optional={"content": values}),
    scalars,
)
messages = st.lists(turns, max_size=3)
task_rows = st.one_of(
    st.fixed_dictionaries({"prompt": texts, "answer": texts}),
    st.fixed_dictionaries({"prompt": plain.map("p{}".format)}, optional={"answer": values}),
    st.dictionaries(st.one_of(st.sampled_from(COLUMNS), texts), values, max_size=4),
    st.fixed_dictionaries({"prompt": messages}),
    st.fixed_dictionaries({"prompt": lone, "answer": lone}),
    values,
)
good_tasks = st.builds(lambda n: {"prompt": f"p{n}", "answer": str(n)}, st.integers(0, 30))
TEMPLATES = (
    *("{prompt}", "prompt", "{prompt} {answer}", "{}", "{0}", "{a.b}", "{prompt!r}", "{prompt!z}"),
    *("{__class__}", "{{}}", "{prompt:>9}"),
    *("{prompt[0]}", "{prompt[role]}", "{answer:f}", "{prompt", "}", "a.b", "é", "", "{answer:,}"),
    *("{answer:.9f}", "{prompt:\0}"),
)
templates = st.one_of(st.just("{prompt}"), st.sampled_from(TEMPLATES), texts)

bodies = st.one_of(lone, messages, values)
pairs = st.fixed_dictionaries(
    {"prompt": bodies, "chosen": bodies, "rejected": bodies},
    optional={"probability": values, "margin": values, "id": scalars, "group": values},
)
labels = st.fixed_dictionaries(
    {"prompt": bodies, "completion": bodies, "label": st.one_of(st.booleans(), numbers, values)},
    optional={"id": scalars},
)
steps = st.fixed_dictionaries(
    {"prompt": bodies},
    optional={
        "completions": st.one_of(st.lists(texts, max_size=3), values),
        "labels": st.one_of(
            st.lists(st.one_of(st.booleans(), st.none(), numbers), max_size=3), values
        ),
        "first_error": st.one_of(numbers, values),
        "steps": st.lists(texts, max_size=3),
    },
)
GOOD: Mapping[str, Mapping[str, Any]] = {
    "pairs": {"prompt": "p", "chosen": "a", "rejected": "b"},
    "labels": {"prompt": "p", "completion": "a", "label": True},
    "steps": {"prompt": "p", "completions": ["a", "b"], "labels": [True, None]},
}


def good_rows(kind: str) -> st.SearchStrategy[Any]:
    """Rows of a kind as they should be."""
    return st.builds(lambda n: {**GOOD[kind], "prompt": f"p{n}"}, st.integers(0, 30))


def judged_rows(kind: str) -> st.SearchStrategy[Any]:
    """Rows of a kind: nearly as they should be, and far from it."""
    near = {"pairs": pairs, "labels": labels, "steps": steps}[kind]
    mutants = good_rows(kind).flatmap(lambda row: mutated(row, values=values))
    return st.one_of(near, mutants, values)


LINES = (
    *("{", "[1]", "null", "1", '"x"', "{}", " ", "\t", '{"prompt": 1e999}', '{"prompt": NaN}'),
    '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "\\ud800"}',
    '{"prompt": "\\ud83d\\ude00 \\udc00"}',
    '{"prompt": "a\0b"}',
    '{"prompt": ' + "9" * 5_000 + "}",
    '{"prompt": ' + "9" * 100_000 + "}",
    '{"prompt": ' + "[" * 200 + "]" * 200 + "}",
    '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '\ufeff{"prompt": "bom"}',
    '{"prompt": "a",}',
    "{'prompt': 'a'}",
)
ENDS = (b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"")


@st.composite
def jsonl(draw: st.DrawFn, good: st.SearchStrategy[Any], rows: st.SearchStrategy[Any]) -> bytes:
    """The bytes of a file of rows, good ones and others, among them lines that are none."""
    lines: list[bytes] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.integers(0, 5))
        if kind < 3:
            lines.append(json.dumps(draw(good)).encode() + draw(st.sampled_from(ENDS[:-1])))
            continue
        if kind < 5:
            ascii_ = draw(st.booleans())
            text = json.dumps(draw(rows), ensure_ascii=ascii_)
        else:
            text = draw(st.one_of(st.sampled_from(LINES), texts))
        lines.append(text.encode("utf-8", "surrogatepass") + draw(st.sampled_from(ENDS)))
    content = b"".join(lines)
    if not draw(st.integers(0, 3)):
        content = draw(damaged(content))
    if not draw(st.integers(0, 9)):
        content = b"\xef\xbb\xbf" + content
    return content


@st.composite
def python_rows(draw: st.DrawFn) -> list[Any]:
    """Rows as code may make them: of any type, with keys that are no strings."""
    odd = st.sampled_from([b"x", object, {1: 2}, {None: "x"}, {3}])
    near = st.fixed_dictionaries({"prompt": st.one_of(lone, odd), "answer": st.one_of(lone, odd)})
    rows = st.one_of(good_tasks, good_tasks, task_rows, near, odd)
    return draw(st.lists(rows, max_size=6))


# ---------------------------------------------------------------- Parquet


@st.composite
def columns(draw: st.DrawFn, rows: int) -> pa.Array:
    """A column of any of Arrow's types."""
    kind = draw(st.sampled_from(sorted(ARROW)))
    return ARROW[kind](rows, draw(st.integers(0, 3)))


def _of(values: list[Any], type: Any) -> Any:
    return lambda n, k: pa.array([values[(i + k) % len(values)] for i in range(n)], type)


ARROW: Mapping[str, Any] = {
    "text": _of(["a", "é\0", " ", None, "\u202e"], pa.string()),
    "texts": _of(["one", "two", "three"], pa.large_string()),
    "null": _of([None], pa.null()),
    "int": _of([0, -(2**63), None], pa.int64()),
    "uint": _of([2**64 - 1, 1], pa.uint64()),
    "float": _of([float("nan"), float("inf"), 0.5, None], pa.float64()),
    "half": _of([np.float16(1.5)], pa.float16()),
    "bool": _of([True, False, None], pa.bool_()),
    "binary": _of([b"\xff", b"", None], pa.binary()),
    "decimal": _of([Decimal("1.50"), None], pa.decimal128(38, 2)),
    "date": _of([datetime.date(1, 1, 1), None], pa.date32()),
    "far": lambda n, k: pa.array([2**31 - 1] * n, pa.int32()).cast(pa.date32()),
    "ns": lambda n, k: pa.array([1, 2**62 + k, None][:n] + [7] * (n - 3), pa.timestamp("ns")),
    "years": lambda n, k: pa.array([2**60] * n, pa.timestamp("s")),
    "zone": lambda n, k: pa.array([k] * n, pa.timestamp("us", tz="Nowhere/None")),
    "time": _of([datetime.time(1, 2, 3)], pa.time64("us")),
    "duration": lambda n, k: pa.array([2**62] * n, pa.duration("us")),
    "list": _of([["a"], [], None], pa.list_(pa.string())),
    "struct": _of(
        [{"role": "user", "content": "x"}, None],
        pa.struct([("role", pa.string()), ("content", pa.string())]),
    ),
    "messages": _of(
        [[{"role": "user", "content": "x"}], []],
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    ),
    "map": _of([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "dictionary": lambda n, k: pa.array(
        ["p", "q", None, "p"][:n] + ["r"] * (n - 4)
    ).dictionary_encode(),
    "no utf-8": lambda n, k: pa.array([b"\xff", b"ok"][:n] + [b"b"] * (n - 2), pa.binary()).view(
        pa.string()
    ),
}


@st.composite
def parquet(draw: st.DrawFn) -> bytes:
    """The bytes of a Parquet file: good rows of every kind, some columns others, or damaged."""
    n = draw(st.integers(0, 6))
    good: dict[str, Any] = {
        "prompt": pa.array([f"p{i}" for i in range(n)], pa.string()),
        "answer": pa.array(["1"] * n, pa.string()),
        "chosen": pa.array(["a"] * n, pa.string()),
        "rejected": pa.array(["b"] * n, pa.string()),
        "completion": pa.array(["a"] * n, pa.string()),
        "label": pa.array([True] * n, pa.bool_()),
        "completions": pa.array([["a"]] * n, pa.list_(pa.string())),
        "labels": pa.array([[True]] * n, pa.list_(pa.bool_())),
    }
    holed = draw(st.sampled_from(sorted(good)))
    if n and draw(st.booleans()):
        values = good[holed].to_pylist()
        values[draw(st.integers(0, n - 1))] = None
        good[holed] = pa.array(values, good[holed].type)
    names, arrays = list(good), list(good.values())
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(names)))
        names[at : at + 1] = [
            draw(st.sampled_from([*good, "x", ""])) if at == len(names) else names[at]
        ]
        arrays[at : at + 1] = [draw(columns(n))]
    if not draw(st.integers(0, 9)):
        names, arrays = [], []
    sink = io.BytesIO()
    with contextlib.suppress(pa.ArrowException):  # Arrow itself will not write years so far off
        pq.write_table(pa.Table.from_arrays(arrays, names=names), sink)
    content = sink.getvalue()
    return content if draw(st.integers(0, 3)) else draw(damaged(content))


# ---------------------------------------------------------------- words

COMMANDS = ("train", "check", "eval", "explain", "export", "control", "prefs", "runs", "recipes",
            "tasks")  # fmt: skip
OPTIONS = (
    *("--run", "--resume", "--quiet", "--json", "--task", "--set", "--reward", "--checkpoint"),
    *("--prompts", "--samples", "--temperature", "--top-k", "--seed", "--pairs", "--labels"),
    *("--steps", "--stage", "--separator", "--threshold", "--pictures", "--latex", "--env"),
    *("--out", "--keep-empty", "--price", "--show", "--help", "--version", "-h", "--", "-x"),
)
WORDS = (
    *("import", "stats", "diff", "hh", "helpsteer", "rows.jsonl", "none", "./none", "grpo", "."),
    *("dqn", "ppo", "Nowhere-v0", "path=x", "steps=1", "-1", "1e999", "nan", "last", "/dev/null"),
)
words = st.lists(
    st.one_of(st.sampled_from(OPTIONS), st.sampled_from(WORDS), texts, overrides), max_size=6
)
commands = st.builds(
    lambda first, rest: [first, *rest], st.one_of(st.sampled_from(COMMANDS), texts), words
)


def harmless(words: list[str]) -> list[str]:
    """The words, so that none of them starts what takes long: a run, a list of all tasks, a hub."""
    strange = [w.replace("reasoning_gym", "gym") for w in words]
    if strange[0] == "tasks":
        return [*strange, "--show", "nothing"]
    if strange[0] in ("train", "check"):
        return [*strange, "model.name=./none"]
    if strange[0] == "control":
        return [*strange, "--env", "Nowhere-v0"]
    return strange


conversations = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"]), "content": lone}
    ),
    max_size=3,
)
