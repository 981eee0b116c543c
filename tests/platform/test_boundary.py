from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import math
import os
import threading
from typing import Any

import numpy as np
import pytest

from keel.platform.sandbox.boundary import (
    DEPTH,
    NotPlainData,
    _exception,
    dump,
    load,
    receive,
    send,
)

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


PLAIN = [
    None,
    True,
    False,
    0,
    -(3**900),
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
    {"b": 1, "a": 2},
    frozenset({1, 2}),
    range(1, 9, 2),
    collections.deque([1, 2], maxlen=3),
    collections.Counter("aab"),
    collections.OrderedDict(b=1, a=2),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    datetime.time(1, 2, 3, 4),
    datetime.timedelta(-1, 2, 3),
    nested(DEPTH),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.30}")
def test_plain_data_is_the_same_on_the_other_side(value: Any) -> None:
    again = load(dump(value))
    assert type(again) is type(value)
    assert again == value
    assert repr(again) == repr(value)


def test_what_is_written_of_further_values() -> None:
    assert math.isnan(load(dump(float("nan"))))
    factory = load(dump(collections.defaultdict(list, a=[1])))
    assert (type(factory), factory) == (collections.defaultdict, {"a": [1]})
    assert factory.default_factory is None
    assert list(load(dump({"b": 1, "a": 2}))) == ["b", "a"]


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
        (type("Text", (str,), {})("a"), "a"),
        (type("Mapping", (dict,), {})(a=1), {"a": 1}),
    ],
)
def test_a_subclass_is_written_as_its_base_or_not_at_all(value: Any, plain: Any) -> None:
    again = load(dump(value, lenient=True))
    assert type(again) is type(plain)
    assert repr(again) == repr(plain)
    with pytest.raises(NotPlainData, match="which is not plain data"):
        dump(value)


@pytest.mark.parametrize(
    "value",
    [object(), int, len, lambda: 0, iter([]), {}.keys(), ..., NotImplemented, ValueError("a")],
)
def test_what_is_not_plain(value: Any) -> None:
    for held in (value, [value], {1: (value,)}):
        with pytest.raises(NotPlainData, match=f"holds a {type(value).__qualname__}"):
            dump(held, lenient=True)
    with pytest.raises(NotPlainData, match="nested more than 200 deep"):
        dump(nested(DEPTH + 1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"i",
        b"i12",
        b"iz;",
        b"NN",
        b"s5;abc",
        b"s-1;",
        b"s1;\xff",
        b"l2;N",
        b"l7fffffff;",
        b"l-5;",
        b"d1;l0;N",
        b"S1;l0;",
        b"l1;" * (DEPTH + 4) + b"N",
        b"xs2;ost0;",
        b"xs9;os.systemt1;s2;ls",
        b"xs0e;builtins.ranget1;s1;a",
        b"xNt0;",
    ],
)
def test_what_is_not_data(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        load(data)


def test_frames() -> None:
    reading, writing = os.pipe()
    sender = threading.Thread(target=lambda: [send(writing, x) for x in (b"", b"a" * 200_000)])
    sender.start()
    assert receive(reading, 10) == b""
    assert receive(reading, 200_000) == b"a" * 200_000
    sender.join()
    send(writing, b"abc")
    with pytest.raises(ValueError, match="too long"):
        receive(reading, 2)
    os.write(writing, b"0" * 10)
    os.close(writing)
    assert os.read(reading, 3) == b"abc"
    assert receive(reading, 10) is None
    os.close(reading)


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
