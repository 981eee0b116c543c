from __future__ import annotations

import collections
import decimal
import enum
import json
import math
from typing import Any

import numpy as np
import pytest

from keel.platform.boundary import DEPTH, NotPlainData, _exception, decode, encode, refill

Pair = collections.namedtuple("Pair", "a b")


class Colour(enum.IntEnum):
    RED = 3


class Sly(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def crossed(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


PLAIN = [
    None,
    True,
    False,
    0,
    -(3**90000),
    1.5,
    math.inf,
    -0.0,
    2 - 3j,
    "",
    "äπ\ud800;\n",
    b"\x00;",
    bytearray(b"a"),
    [1, [2, "x"], ()],
    (None, {"a": [1.0], 2: {3}}),
    {"b": 1, (1, 2): 2, "tuple": []},
    frozenset({1, 2}),
    nested(DEPTH),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}")
def test_plain_data_is_the_same_on_the_other_side(value: Any) -> None:
    again = crossed(value)
    assert type(again) is type(value)
    assert again == value
    assert abs(value) > 2**64 if type(value) is int and value < 0 else repr(again) == repr(value)


def test_nan_and_the_order_of_keys_cross() -> None:
    assert math.isnan(crossed(float("nan")))
    assert list(crossed({"b": 1, "a": 2})) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Pair(1, 2), (1, 2)),
        (Colour.RED, 3),
        (Sly(5), 5),
        (np.float64(1.5), 1.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        ([Pair(1, [Sly(2)])], [(1, [2])]),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (type("Text", (str,), {})("a"), "a"),
    ],
)
def test_a_subclass_crosses_as_its_base(value: Any, plain: Any) -> None:
    again = crossed(value)
    assert type(again) is type(plain)
    assert repr(again) == repr(plain)


@pytest.mark.parametrize(
    "value",
    [object(), int, len, iter([]), {}.keys(), ..., range(3), decimal.Decimal(1), ValueError("a")],
)
def test_other_values_do_not_cross(value: Any) -> None:
    for held in (value, [value], {1: (value,)}):
        with pytest.raises(NotPlainData, match=f"holds a {type(value).__qualname__}"):
            encode(held)


def test_deep_values_do_not_cross() -> None:
    with pytest.raises(NotPlainData, match="nested more than 100 deep"):
        encode(nested(DEPTH + 1))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"tuple": [], "set": []},
        {"tuple": 5},
        {"print": ["a"]},
        {"__class__": []},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"set": [[]]},
        {"bytes": "x"},
        {"int": 5},
        {"complex": [1, 2, 3]},
        {"complex": ["a", 2]},
    ],
)
def test_objects_that_name_no_type_are_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([3, 1], [1, 3]),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 2}),
        ({1}, {2, 3}),
        (bytearray(b"a"), bytearray(b"bc")),
        (([1], 2), ([3, 4], 2)),
        ([[1], {2}], [[5], {6}]),
    ],
)
def test_arguments_get_the_new_contents(old: Any, new: Any) -> None:
    inner = old[0] if type(old) in (list, tuple) and type(old[0]) is list else None
    refill(old, new)
    assert old == new
    assert inner is None or old[0] is inner


@pytest.mark.parametrize(
    ("names", "arguments", "text"),
    [
        (["ValueError", "Exception"], ("a", 1), "ValueError('a', 1)"),
        (["FileNotFoundError", "OSError"], (2, "no"), "FileNotFoundError(2, 'no')"),
        (["UnicodeDecodeError", "ValueError", "Exception"], ("x",), "ValueError('x')"),
        (["ExceptionGroup", "Exception"], (), "Exception()"),
        (["SystemExit", "BaseException"], (0,), "SystemExit(0)"),
        (["StopIteration", "Exception"], (), "RuntimeError('the code raised StopIteration')"),
        (["SkipTest", "print", "object"], ("x",), "Exception('x')"),
        ([5, ["KeyError"]], ("x",), "Exception('x')"),
        ("KeyError", "x", "Exception()"),
    ],
)
def test_exceptions_are_builtin_ones(names: Any, arguments: Any, text: str) -> None:
    assert repr(_exception(names, arguments)) == text
