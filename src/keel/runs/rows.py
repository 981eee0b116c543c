"""Rows that a run keeps: completions of a step, in the order sampled, as a Parquet table; examples
that were left out. Torch-free.

    quarantine/STAGE-prompts.jsonl   of tasks
    quarantine/STAGE-rows.jsonl      of preferences and of sets of examples
    quarantine/STAGE-data-N.jsonl    of the streamed set data.N, as it is read

A line of the quarantine, a function of data and recipe, is {"source": file or name, "line": from 1,
"reason": one line, "row": as it was read, or the text of a line that is not JSON}.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from keel.platform.files import append_bytes, make_folder, remove, write_bytes
from keel.runs.values import clean_text, plain
from keel.types import Content, FinishReason, KeelError, Step, shorten

if TYPE_CHECKING:
    import pyarrow as pa

COMPONENT = "reward/"
"""Prefix of the columns that hold the components of the reward."""
EXTRA = "extra/"
"""Prefix of the columns that hold what rewards recorded with `log_extra`."""
LOSS = "loss/"
"""Prefix of the columns that hold each token's part of a term of the loss."""
SCORED = ("old_log_probs", "reference_log_probs", "teacher_log_probs", "values")
"""Values of tokens that the models gave before the update."""
LEARNED = ("advantages", "ratios", "divergences", "entropies")
"""Values of tokens that the update computed, besides the terms of the loss."""
TERMS = tuple(
    LOSS + name
    for name in ("policy", "divergence", "distillation", "value", "entropy", "positive_nll")
)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRow:
    """One completion with its results. All arrays have the completion's length in tokens.

    `group` counts the groups of the step, or of the evaluation, from 0. `pieces` are the texts of
    the tokens, `log_probs` the engine's. `values` are further values of tokens, 0 if `written`
    is false: `old_log_probs`, those that the ratio divides by, `reference_log_probs`,
    `teacher_log_probs`, `values` (of the value model), `advantages`, and means over the updates of
    `ratios`, `divergences` (D_n) and `entropies`, in nats; `loss/policy`, `loss/divergence`,
    `loss/value`, `loss/entropy` and `loss/positive_nll` are the terms of the loss, which add up to
    the step's metric `loss`, less what is of other tokens. `expected` is the answer that the data
    has. `reward` is None without any reward. `steps`
    are the rewards of steps, `outcome` the part of the reward that is of the whole answer, if
    the advantage has one (None: it does not). `mode` and `passed` are of evaluations: how it was
    sampled, and whether it is correct. `weight_version` is the number of syncs that the engine had
    taken.
    """

    group: int
    prompt_id: str
    task: str
    prompt: Content
    completion: str
    tokens: npt.NDArray[Any]
    log_probs: npt.NDArray[Any]
    written: npt.NDArray[Any]
    finish: FinishReason
    reward: float | None
    pieces: tuple[str, ...] = ()
    values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    expected: str | None = None
    mode: Literal["greedy", "sampled"] | None = None
    passed: bool | None = None
    components: Mapping[str, float | None] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    outcome: float | None = None
    weight_version: int = 0


def table(stage: str, step: int, rows: Sequence[RolloutRow]) -> pa.Table:
    """The rows as an Arrow table.

    Columns: stage, step, group, prompt_id, task, prompt_format ("text", or "messages" in JSON),
    prompt, expected, completion, tokens, pieces, log_probs, each of the rows' values, written,
    finish, weight_version, reward, `reward/NAME` for each component and `extra/NAME` for each
    extra. If some row has rewards of steps also step_ends (the index of each step's last token),
    step_rewards and outcome; in evaluations mode and passed.
    """
    import pyarrow as pa

    formats = ["text" if isinstance(row.prompt, str) else "messages" for row in rows]
    text, numbers = pa.string(), pa.float64()
    floats, integers = pa.list_(pa.float32()), pa.list_(pa.int32())
    fields: tuple[tuple[str, pa.DataType, list[Any]], ...] = (
        ("stage", text, [stage] * len(rows)),
        ("step", pa.int32(), [step] * len(rows)),
        ("group", pa.int32(), [row.group for row in rows]),
        ("prompt_id", text, [clean_text(row.prompt_id) for row in rows]),
        ("task", text, [clean_text(row.task) for row in rows]),
        ("prompt_format", text, formats),
        ("prompt", text, [prompt_text(row.prompt) for row in rows]),
        ("expected", text, [row.expected and clean_text(row.expected) for row in rows]),
        ("completion", text, [clean_text(row.completion) for row in rows]),
        ("tokens", integers, [_array(row.tokens, np.int32) for row in rows]),
        ("pieces", pa.list_(text), [[clean_text(p) for p in row.pieces] for row in rows]),
        ("log_probs", floats, [_array(row.log_probs, np.float32) for row in rows]),
    )
    names = {name for row in rows for name in row.values}
    for name in (*SCORED, *LEARNED, *TERMS):
        if name in names:
            values = [_array(row.values.get(name), np.float32) for row in rows]
            fields += ((name, floats, values),)
    fields += (
        ("written", pa.list_(pa.bool_()), [_array(row.written, np.bool_) for row in rows]),
        ("finish", text, [row.finish for row in rows]),
        ("weight_version", pa.int32(), [row.weight_version for row in rows]),
        ("reward", numbers, [row.reward for row in rows]),
    )
    if any(row.mode for row in rows):
        fields += (
            ("mode", text, [row.mode for row in rows]),
            ("passed", pa.bool_(), [row.passed for row in rows]),
        )
    if any(row.steps for row in rows):
        fields += (
            ("step_ends", integers, [[step.end for step in row.steps] for row in rows]),
            ("step_rewards", pa.list_(numbers), [[s.reward for s in row.steps] for row in rows]),
            ("outcome", numbers, [row.outcome for row in rows]),
        )
    for name in _names(row.components for row in rows):
        fields += ((COMPONENT + name, numbers, [row.components.get(name) for row in rows]),)
    columns = {name: pa.array(values, type=kind) for name, kind, values in fields}
    for name in _names(row.extras for row in rows):
        columns[EXTRA + name] = _extra([plain(row.extras.get(name)) for row in rows])
    return pa.table(columns)


def encode(stage: str, step: int, rows: Sequence[RolloutRow]) -> bytes:
    """The table as the bytes of a Parquet file: a function of the rows, without a time."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    made = table(stage, step, rows)
    pq.write_table(made, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def read_table(path: Path) -> pa.Table:
    """The table of a rollouts file. Raises KeelError if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # In this thread only: an error in a thread of pyarrow can end the process.
        found = pq.read_table(
            pa.BufferReader(path.read_bytes()),
            use_threads=False,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        found.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        hint = "leave this step out, or delete the file"
        raise KeelError(f"cannot read {path}: {why}: {hint}") from error
    return found


def prompt_text(content: Content) -> str:
    """A prompt as one text; a conversation as JSON."""
    if isinstance(content, str):
        return clean_text(content)
    return json.dumps(plain([dict(message) for message in content]), ensure_ascii=False)


def _array(values: npt.NDArray[Any] | None, dtype: Any) -> npt.NDArray[Any] | None:
    return None if values is None else np.asarray(values, dtype=dtype)


def _names(mappings: Any) -> list[str]:
    return sorted({name for mapping in mappings for name in mapping})


def _extra(values: list[Any]) -> pa.Array:
    """Booleans, numbers and texts keep their type; anything else, or a mixture, becomes JSON."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if not any(kinds <= same for same in ({bool}, {int, float}, {str})):
        values = [None if v is None else json.dumps(v, ensure_ascii=False) for v in values]
        return pa.array(values, type=pa.string())
    if kinds & {int, float}:
        return pa.array([None if v is None else float(v) for v in values], type=pa.float64())
    return pa.array(values, type=pa.bool_() if kinds == {bool} else pa.string())


# ---------------------------------------------------------------- quarantine


Why = Literal["bad", "long", "overlap", "empty"]
WORDS: Mapping[Why, str] = {
    "bad": "that cannot be read",
    "long": "too long",
    "overlap": "also in the validation split",
    "empty": "with an empty answer",
}
SHOWN = 500
"""Characters of a reason that are kept."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An example that is not used: its file or data set, line (from 1), and the reason."""

    source: str
    line: int
    reason: str
    row: Any
    why: Why = "bad"


def write_quarantine(target: Path, rows: Sequence[LeftOut]) -> None:
    """Writes the examples to a file, completely or not at all; no file if there are none."""
    if not rows:
        if target.exists():
            remove(target)
        return
    make_folder(target.parent)
    write_bytes(target, b"".join(map(_line, rows)))


def append_quarantine(target: Path, rows: Sequence[LeftOut]) -> None:
    """Adds examples to the end of a file, which is on the disk when this returns."""
    if rows:
        make_folder(target.parent)
        append_bytes(target, b"".join(map(_line, rows)))


def keep_quarantine(target: Path, count: int | None) -> None:
    """Drops all but the first `count` examples of a file (None: nothing)."""
    if count is None or not target.exists():
        return
    lines = target.read_bytes().splitlines(keepends=True)
    if not count:
        remove(target)
    elif len(lines) > count:
        write_bytes(target, b"".join(lines[:count]))


def named_from(folder: Path, rows: Iterable[LeftOut]) -> list[LeftOut]:
    """The examples, with paths in the folder relative to it."""
    below = f"{folder}/"
    return [
        replace(row, source=row.source.removeprefix(below), reason=row.reason.removeprefix(below))
        for row in rows
    ]


def counted(rows: Iterable[LeftOut]) -> str:
    """How many rows were left out for what: `3 that cannot be read, 1 too long`."""
    every = [row.why for row in rows]
    return ", ".join(f"{every.count(why)} {words}" for why, words in WORDS.items() if why in every)


def shortened(reason: str) -> str:
    """A reason on one line, of bounded length."""
    return shorten(" ".join(reason.split()), SHOWN)


def _line(row: LeftOut) -> bytes:
    record = {"source": row.source, "line": row.line, "reason": shortened(row.reason)}
    text = json.dumps({**record, "row": _parts(row.row)}, ensure_ascii=False)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape
        return f"{json.dumps(json.loads(text))}\n".encode()


def _parts(value: Any) -> Any:
    """The value as JSON; what JSON cannot hold as text."""
    if isinstance(value, Mapping):
        return {str(key): _parts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_parts(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
