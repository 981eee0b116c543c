"""Plain values: as JSON (lossy for metrics and plots, exact for state), and where two differ."""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TAG = "$type"
"""Marks a value that JSON has no type for. A mapping may not have this key."""
_BEFORE, _LENGTH = 20, 80
"""Characters of two long texts that a change shows: from shortly before they differ."""
_ABSENT = object()


def clean_text(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, replaced by `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


def plain(value: Any) -> Any:
    """The value as JSON: keys sorted, arrays as lists, numbers that are not finite as null."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(str(key)): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    raise TypeError(f"no JSON for {type(value).__name__}: {value!r}")


def record_line(first: Mapping[str, Any], rest: Mapping[str, Any]) -> bytes:
    """One JSONL record: the keys of `first` in their order, then those of `rest`, sorted."""
    record = {key: plain(value) for key, value in first.items()}
    for key, value in plain(rest).items():
        if key in record:
            raise ValueError(f'"{key}" is a key of every record and cannot be a value\'s name')
        record[key] = value
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


# ---------------------------------------------------------------- exact


def exact(value: Any) -> Any:
    """A JSON value from which `restore` makes an equal one, bit for bit.

    Holds None, bool, int of any size, float (the shortest decimal that reads back the same; nan
    and infinities too), str, list, tuple, mappings with text keys, numpy arrays and scalars.
    Raises TypeError for others: tensors go into safetensors.
    """
    if isinstance(value, np.generic):  # before float: np.float64 is one
        array = np.asarray(value)
        return {TAG: "scalar", "dtype": array.dtype.str, "data": _packed(array)}
    if isinstance(value, float) and not math.isfinite(value):
        return {TAG: "float", "value": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [exact(item) for item in value]}
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of Python objects is not state: use a list")
        shape = list(value.shape)
        return {TAG: "array", "dtype": value.dtype.str, "shape": shape, "data": _packed(value)}
    if isinstance(value, Mapping):
        return {_text_key(key): exact(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not JSON state: tensors go into safetensors")


def restore(value: Any) -> Any:
    """The value from `exact`; ValueError, KeyError or TypeError for JSON not made by it."""
    if isinstance(value, list):
        return [restore(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: restore(item) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(restore(item) for item in value["items"])
    if kind == "scalar":
        return _unpacked(value, ())[()]
    if kind == "array":
        return _unpacked(value, value["shape"])
    raise ValueError(f'unknown {TAG} "{kind}"')


def _text_key(key: Any) -> str:
    if not isinstance(key, str) or key == TAG:
        raise TypeError(f"{key!r} cannot be a key of JSON state: use text other than {TAG!r}")
    return key


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _unpacked(value: Mapping[str, Any], shape: Sequence[int]) -> np.ndarray:
    dtype = np.dtype(value["dtype"])
    if dtype.hasobject:
        raise ValueError("an array of Python objects is not state")
    flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype=dtype)
    return flat.reshape(tuple(shape)).copy()


# ---------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class Change:
    """A named value that differs: `a` and `b`, None if absent and "null" where null.

    `at` is the place of the value within what has the name: (sequence,) or (sequence, token) of a
    column of rollouts, the element of a tensor. `difference` is absolute, of finite floats.
    """

    name: str
    a: Any
    b: Any
    at: tuple[int, ...] = ()
    difference: float | None = None


def change(name: str, a: Any, b: Any, at: tuple[int, ...] = ()) -> Change:
    """The change between two values, with long texts cut to where they differ."""
    if isinstance(a, str) and isinstance(b, str) and max(len(a), len(b)) > _LENGTH:
        unequal = (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        start = max(0, next(unequal, min(len(a), len(b))) - _BEFORE)
        a, b = (("…" if start else "") + text[start : start + _LENGTH] for text in (a, b))
    kinds = {type(a), type(b)}
    distance = abs(float(a) - float(b)) if float in kinds <= {float, int} else math.inf
    return Change(name, a, b, at, distance if math.isfinite(distance) else None)


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
        x, y = (None if v is _ABSENT else "null" if v is None else v for v in (a, b))
        yield change(path, x, y)
