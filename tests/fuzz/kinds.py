"""The kinds of input: what generates one, and what must hold of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import held, strategies, tokenizers


@dataclass(frozen=True)
class Kind:
    """`hold(input, folder)` raises where the input shows a fault. `share` of all the inputs."""

    share: float
    inputs: st.SearchStrategy[Any]
    hold: Callable[[Any, Path], held.Outcome]


bad_rows = st.sampled_from(["stop", "quarantine", "quarantine"])
task_keys = st.fixed_dictionaries(
    {
        "bad_rows": bad_rows,
        "prompt": st.one_of(st.just("{prompt}"), st.just("prompt"), strategies.templates),
        "answer": st.sampled_from([None, None, "answer", "x"]),
        "system": st.one_of(st.none(), strategies.texts),
        "validation_fraction": st.floats(0.05, 0.95),
    }
)


def _file(
    kind: str, content: bytes, keys: dict[str, Any], folder: Path, name: str = "jsonl"
) -> held.Outcome:
    """The rows of a file of this kind."""
    path = folder / f"rows.{name}"
    path.write_bytes(content)
    every: Sequence[int] = list(held.lines_of(content))
    if name == "parquet":
        every = range(1, (held.parquet_rows(content) or 0) + 1)
    target, where = folder / "q" / "rows.jsonl", {"name": name, "path": str(path)}
    if kind == "task":
        return held.task(every, target, **where, **keys)
    return held.judged(kind, every, target, **where, **keys)


def _python(value: tuple[list[Any], dict[str, Any]], folder: Path) -> held.Outcome:
    rows, keys = value
    held.MADE[:] = rows
    every = range(1, len(rows) + 1)
    return held.task(every, folder / "q" / "rows.jsonl", name="tests.fuzz.held:rows", **keys)


def _parquet(value: tuple[bytes, dict[str, Any], str], folder: Path) -> held.Outcome:
    content, keys, kind = value
    if kind != "task":
        keys = {name: keys[name] for name in ("bad_rows", "validation_fraction") if name in keys}
    return _file(kind, content, keys, folder, "parquet")


def _command(words: list[str], folder: Path) -> held.Outcome:
    (folder / "rows.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    return held.command(strategies.harmless(words), folder)


judged_keys = st.fixed_dictionaries(
    {
        "bad_rows": bad_rows,
        "empty": st.sampled_from(["refuse", "drop", "keep"]),
        "validation_fraction": st.floats(0.05, 0.95),
        "group": st.sampled_from([None, None, None, "group", "prompt"]),
        "columns": st.one_of(
            st.just({}),
            st.dictionaries(
                st.sampled_from(["prompt", "chosen", "label", "x"]), strategies.texts, max_size=1
            ),
        ),
    }
)
judged_inputs = st.sampled_from(list(held.READERS)).flatmap(
    lambda kind: st.tuples(
        st.just(kind),
        strategies.jsonl(strategies.good_rows(kind), strategies.judged_rows(kind)),
        judged_keys,
    )
)
answers = st.one_of(*[strategies.lone] * 12, strategies.giants)
KINDS: dict[str, Kind] = {
    "recipes": Kind(
        25,
        st.tuples(
            strategies.recipes(),
            st.lists(strategies.overrides, max_size=2),
            st.sampled_from(["explain", "explain", "train"]),
        ),
        lambda value, folder: held.recipe(value[0], value[1], folder, value[2]),
    ),
    "task rows": Kind(
        20,
        st.tuples(strategies.jsonl(strategies.good_tasks, strategies.task_rows), task_keys),
        lambda value, folder: _file("task", *value, folder),
    ),
    "python rows": Kind(5, st.tuples(strategies.python_rows(), task_keys), _python),
    "parquet": Kind(
        12,
        st.tuples(strategies.parquet(), task_keys, st.sampled_from(["task", *held.READERS])),
        _parquet,
    ),
    "preferences": Kind(18, judged_inputs, lambda value, folder: _file(*value, folder)),
    "tokenizers": Kind(
        12,
        st.tuples(
            st.sampled_from(sorted(tokenizers.MADE)),
            st.sampled_from(sorted(tokenizers.CHATS)),
            st.one_of(answers, strategies.conversations),
            answers,
            st.lists(strategies.lone, max_size=3),
        ),
        lambda value, folder: tokenizers.encoded(*value),
    ),
    "commands": Kind(8, strategies.commands, _command),
}
