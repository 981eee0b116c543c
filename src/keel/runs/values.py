"""Comparison of plain values: equal to the bit, or where they differ. Torch-free."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CLIP = 60
"""Characters of a text that a change shows; of two texts from shortly before they differ."""
_BEFORE = 20
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A named value that differs: `a` and `b`, None where absent and "null" where null.

    `at` is the place of the value within what has the name: (sequence,) or (sequence, token) of a
    column of rollouts, the element of a tensor. `difference` is absolute, of finite floats.
    """

    name: str
    a: Any
    b: Any
    at: tuple[int, ...] = ()
    difference: float | None = None


def change(name: str, values: Iterable[Any], at: tuple[int, ...] = ()) -> Change:
    """The change between two values, with long texts clipped."""
    a, b = values
    return Change(name, *clipped(a, b), at=at, difference=_distance(a, b))


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
            inner = f"{path}.{key}" if path else str(key)
            yield from changes(a.get(key, _ABSENT), b.get(key, _ABSENT), inner)
    elif isinstance(a, list) and isinstance(b, list):
        for at, (x, y) in enumerate(itertools.zip_longest(a, b, fillvalue=_ABSENT)):
            yield from changes(x, y, f"{path}[{at}]")
    elif not same(a, b):
        values = (None if x is _ABSENT else "null" if x is None else x for x in (a, b))
        yield change(path, values)


def first_unequal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int | None:
    """The first place at which two one-dimensional arrays differ, floats by their bits; the end of
    the shorter one where it equals the beginning of the other. None: they are equal."""
    if a.dtype != b.dtype:
        a, b = a.astype(np.float64), b.astype(np.float64)
    short = min(len(a), len(b))
    kind = f"u{a.dtype.itemsize}" if a.dtype.kind == "f" else a.dtype
    unequal = a[:short].view(kind) != b[:short].view(kind)
    if unequal.any():
        return int(unequal.argmax())
    return short if len(a) != len(b) else None


def plain(value: Any) -> Any:
    """A numpy scalar as a Python value; a float as the shortest decimal that reads back as it."""
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def clipped(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values; where one is a long text, both texts from shortly before they differ."""
    texts = [x for x in (a, b) if isinstance(x, str)]
    if all(len(text) <= CLIP for text in texts):
        return a, b
    pairs = enumerate(zip(a, b, strict=False)) if len(texts) == 2 else iter(())
    shared = next((at for at, (x, y) in pairs if x != y), min(map(len, texts)))
    start = max(0, shared - _BEFORE) if len(texts) == 2 else 0
    end = start + CLIP + (_BEFORE if start else 0)

    def window(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")

    return window(a), window(b)


def _distance(a: Any, b: Any) -> float | None:
    if {type(a), type(b)} not in ({float}, {float, int}):
        return None
    distance = abs(float(a) - float(b))
    return distance if math.isfinite(distance) else None
