"""Examples that were left out, in files of the run folder that are a function of data and recipe.

    quarantine/STAGE-prompts.jsonl   of tasks        quarantine/STAGE-rows.jsonl   of preferences

A line is {"source": file or name, "line": from 1, "reason": one line, "row": as it was read, or the
text of a line that is not JSON}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from keel.platform.files import make_folder, remove, write_bytes

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
    line = " ".join(reason.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


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
