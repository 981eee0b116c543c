"""Two values beside each other: the same to the bit, or where they part. Torch-free."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from keel.types import KeelError

Phase = Literal["sampling", "scoring", "learning", "record"]
"""Which part of a step parts first; "record" where a run lacks a row that it must once have had."""

CLIP = 60
"""Characters of a text that are told; of two texts those from shortly before they part."""
BEFORE = 20
_BLOCK = 1 << 20
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A named value that differs. None: a run lacks it. `difference` is absolute, of numbers."""

    name: str
    a: Any
    b: Any
    difference: float | None = None


@dataclass(frozen=True, slots=True)
class Around:
    """Two texts where they part: what both say just `before`, then what each goes on with."""

    before: str
    a: str
    b: str


def around(a: str, b: str) -> Around:
    """Where two texts part; at their ends where they do not."""
    at = _shared(a, b)
    start = max(0, at - BEFORE)
    return Around(a[start:at], a[at : at + CLIP], b[at : at + CLIP])


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are of one type and equal, floats to the bit (NaN equals itself)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def changes(a: Any, b: Any, path: str = "") -> Iterator[Change]:
    """What differs between two trees of plain values, by dotted path, in the order of the first."""
    if isinstance(a, Mapping) and b is _ABSENT:
        b = {}
    if isinstance(b, Mapping) and a is _ABSENT:
        a = {}
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in (*a, *(key for key in b if key not in a)):
            inside = f"{path}.{key}" if path else str(key)
            yield from changes(a.get(key, _ABSENT), b.get(key, _ABSENT), inside)
    elif isinstance(a, list) and isinstance(b, list):
        for at, (x, y) in enumerate(itertools.zip_longest(a, b, fillvalue=_ABSENT)):
            yield from changes(x, y, f"{path}[{at}]")
    elif not same(a, b):
        yield Change(path, *_told(a, b), distance(a, b))


def distance(a: Any, b: Any) -> float | None:
    """The absolute difference of two numbers; None of anything else, or if it is not finite."""
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in (a, b)):
        return None
    apart = abs(float(a) - float(b))
    return apart if math.isfinite(apart) else None


def ulps(a: Any, b: Any, kind: type[np.floating[Any]]) -> int | None:
    """How many floats of a kind apart two are; None unless both are finite floats."""
    if not (isinstance(a, float) and isinstance(b, float) and math.isfinite(a - b)):
        return None
    return abs(_rank(a, kind) - _rank(b, kind))


def unequal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where two arrays of one shape differ, floats by their bits."""
    if a.dtype != b.dtype:
        wide = np.float64 if "f" in (a.dtype.kind, b.dtype.kind) else np.int64
        a, b = a.astype(wide), b.astype(wide)
    if a.dtype.kind == "f":
        bits = f"u{a.dtype.itemsize}"
        a, b = a.view(bits), b.view(bits)
    found: npt.NDArray[np.bool_] = a != b
    return found


def plain(value: Any) -> Any:
    """A numpy scalar as a Python value; a float as the shortest decimal that reads back as it."""
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def document(value: Any) -> Any:
    """A tree of plain values as JSON can hold it: a float that is not finite as a word."""
    if isinstance(value, Mapping):
        return {key: document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [document(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two files hold the same."""
    with reading(a), reading(b), a.open("rb") as left, b.open("rb") as right:
        if os.fstat(left.fileno()).st_size != os.fstat(right.fileno()).st_size:
            return False
        while block := left.read(_BLOCK):
            if block != right.read(_BLOCK):
                return False
    return True


def rows(path: Path) -> list[bytes]:
    """The whole lines of a file, none where there is no file; a torn last one is left out."""
    if not path.exists():
        return []
    with reading(path):
        return [line for line in path.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]


def row(path: Path, number: int, text: bytes) -> dict[str, Any]:
    """A line of JSON (`number` counts from 1).

    Raises:
        KeelError: it is damaged.
    """
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise KeelError(f"{path}:{number} is damaged ({error}): mend it") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the system says of a file into one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise KeelError(f"cannot read {path}: {why}: mend the folder") from error


def _told(a: Any, b: Any) -> tuple[Any, Any]:
    """Both as they are told: None where absent, null as a word, long texts from where they part."""
    left, right = (None if x is _ABSENT else "null" if x is None else x for x in (a, b))
    return clipped(left, right)


def clipped(a: Any, b: Any) -> tuple[Any, Any]:
    """Long texts cut to where they part."""
    if isinstance(a, str) and isinstance(b, str) and max(len(a), len(b)) > CLIP:
        start = max(0, _shared(a, b) - BEFORE)
        return _window(a, start), _window(b, start)
    cut = [x[:CLIP] + "…" if isinstance(x, str) and len(x) > CLIP else x for x in (a, b)]
    return cut[0], cut[1]


def _window(text: str, start: int) -> str:
    end = start + BEFORE + CLIP
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _shared(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _rank(value: float, kind: type[np.floating[Any]]) -> int:
    """The place of a float among all floats of its kind, 0 for either zero."""
    size = np.dtype(kind).itemsize
    bits = int(np.asarray(value, kind).view(f"i{size}"))
    return bits if bits >= 0 else -(bits & ((1 << (8 * size - 1)) - 1))
