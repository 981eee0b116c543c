"""What is done with each input, and what must hold of it: a `Fault` names what did not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keel.cli.main import main
from keel.cli.main import one_line as shown
from keel.config.sources import PreferenceData, TaskSource
from keel.data.mixture import build_task, stored
from keel.data.preferences import read_labelled, read_pairs, read_steps
from keel.runs.rows import LeftOut, write_quarantine
from keel.types import KeelError

READERS: dict[str, Callable[[PreferenceData], Any]] = {
    "pairs": read_pairs,
    "labels": read_labelled,
    "steps": read_steps,
}


class Fault(AssertionError):
    """Something that must never happen."""


@dataclass(frozen=True)
class Outcome:
    """How an input ended, and what became of its rows."""

    how: str
    rows: int = 0
    used: int = 0
    left_out: int = 0


OK, REFUSED, QUARANTINED = "ok", "refused", "quarantined"


# ---------------------------------------------------------------- the command line


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """In a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def command(words: Sequence[str], folder: Path, *, leaves: bool = False) -> Outcome:
    """`keel WORDS` ends with 0, or with 2 and one line; it leaves no file unless it may."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = list(sys.path)
    out, err = io.StringIO(), io.StringIO()
    with inside(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        finally:
            sys.path[:] = path
    text = err.getvalue()
    if code not in (0, 2):
        raise Fault(f"exit code {code}: {text[:300]!r}")
    # By the end of a line alone: a terminal begins a new one at nothing else.
    if code == 2 and not re.fullmatch(r"keel: error: [^\n\r]+\n", text):
        raise Fault(f"not one line: {text[:300]!r}")
    if code == 2 and len(text) > 10_000:
        raise Fault(f"a line of {len(text)} characters: {text[:300]!r}")
    left = sorted(path for path in folder.rglob("*") if path.is_file())
    if left != files and not leaves:
        raise Fault(f"files left: {[str(p) for p in left if p not in files]}")
    return Outcome(OK if code == 0 else REFUSED)


def recipe(content: bytes, overrides: Sequence[str], folder: Path, name: str) -> Outcome:
    """A recipe's bytes, explained, or trained as far as its model, which is not there."""
    (folder / "recipe.toml").write_bytes(content)
    absent = ["model.name=./none", "threads=1"] if name == "train" else []
    return command([name, "recipe.toml", "--", *overrides, *absent], folder)


# ---------------------------------------------------------------- rows


def lines_of(content: bytes) -> dict[int, str]:
    """The lines of a file that are not blank, by number, found without the reader's own code."""
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    found = enumerate(re.split("\r\n|\r|\n", text), start=1)
    return {number: line for number, line in found if line.strip()}


def one_line(error: KeelError) -> None:
    """An error is one line, with some content, on the command line."""
    text = shown(str(error))
    if len(text) < 10 or not text.isprintable():
        raise Fault(f"not one line: {text[:300]!r}")


def accounted(
    every: Sequence[int], used: Sequence[int], left: Sequence[LeftOut], target: Path
) -> Outcome:
    """Each row is used once or left out once, and the quarantine states why."""
    lines = [*used, *(row.line for row in left)]
    if sorted(lines) != sorted(every):
        raise Fault(f"rows {sorted(every)}, used {sorted(used)}, left out {[r.line for r in left]}")
    write_quarantine(target, left)
    kept = target.read_text(encoding="utf-8").split("\n")[:-1] if target.exists() else []
    if len(kept) != len(left):
        raise Fault(f"{len(left)} rows left out, {len(kept)} in the quarantine")
    for line, row in zip(kept, left, strict=True):
        record = json.loads(line)
        if list(record) != ["source", "line", "reason", "row"] or record["line"] != row.line:
            raise Fault(f"a quarantined row is {line[:300]!r}")
        if not record["reason"] or len(record["reason"].splitlines()) != 1:
            raise Fault(f"its reason is {record['reason'][:300]!r}")
    return Outcome(QUARANTINED if left else OK, len(every), len(used), len(left))


def source(kind: type[Any], **keys: Any) -> Any:
    """A source of the recipe; None where its keys are refused already."""
    try:
        return kind(**keys)
    except ValidationError:
        return None


def task(every: Sequence[int], target: Path, **keys: Any) -> Outcome:
    """The rows of a task, of which `every` are the lines."""
    given = source(TaskSource, **keys)
    if given is None:
        return Outcome(REFUSED)
    try:
        made = stored(build_task(given, 0))
        assert made is not None
    except KeelError as error:
        one_line(error)
        return Outcome(REFUSED, len(every))
    used = [entry.row.line for split in made.splits.values() for entry in split]
    for split in ("train", "validation"):
        for index in range(made.size(split)):
            prompt = made.prompt(split, index)
            gold = made.gold(prompt)
            json.dumps(prompt.content).encode()
            assert gold is None or gold.encode() is not None
    return accounted(every, used, made.left_out, target)


MADE: list[Any] = []
"""The rows of the Python entry below."""


def rows() -> list[Any]:
    """A Python entry."""
    return MADE


def judged(kind: str, every: Sequence[int], target: Path, **keys: Any) -> Outcome:
    """The rows that a reward model would learn from."""
    given = source(PreferenceData, **keys)
    if given is None:
        return Outcome(REFUSED)
    try:
        splits = READERS[kind](given)
    except KeelError as error:
        one_line(error)
        return Outcome(REFUSED, len(every))
    used = [row.origin.line for row in (*splits.train, *splits.validation)]
    return accounted(every, used, splits.left_out, target)


def parquet_rows(content: bytes) -> int | None:
    """How many rows Arrow reads of a Parquet file; None where it is none."""
    import pyarrow.parquet as pq

    try:
        return int(pq.read_table(io.BytesIO(content)).num_rows)
    except Exception:
        return None
