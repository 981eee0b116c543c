"""The boundary between code under test and its tests: two processes that exchange plain data.

Both sides run inside sandboxes of their own, by `inside`: `serve` runs the code and
answers calls, `judge` runs the tests, which see stand-ins for the code's functions. A request or
reply is one frame of bytes in a format of this module; what it says is built from nothing but
exact types of the standard library, so that no object of the code's ever reaches its tests.
Standard library only, and of that little: every import is paid for at each start.
"""

from __future__ import annotations

import _thread
import builtins
import os
import sys
from _operator import is_ as _is

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

DEPTH = 200
"""How deep plain data may be nested; each level takes a frame of Python's stack."""
REPLY_BYTES = 16 * 2**20
"""The longest reply that the tests' side reads."""
CONTAINERS: dict[Any, bytes] = {list: b"l", tuple: b"t", dict: b"d", set: b"S", frozenset: b"Z"}
BUILD: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "collections.Counter": lambda v: (),
    "collections.OrderedDict": lambda v: (),
    "collections.defaultdict": lambda v: (),
    "collections.deque": lambda v: ((), v.maxlen),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.datetime": lambda v: (*v.timetuple()[:6], v.microsecond, v.tzinfo),
    "datetime.time": lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
}
"""Further types of the standard library, and the plain arguments that make an equal value.

For a mutable type they make an empty one, and its items follow.
"""
_FILLED = ("Counter", "OrderedDict", "defaultdict", "deque")
_ENDING = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Exceptions that end a loop silently: `all(map(test, cases))` would pass at the first of them."""


class NotPlainData(TypeError):
    """A value that cannot cross the boundary."""


class Lost(BaseException):
    """The code's process ended, or replied with something that is no reply."""


class Shared:
    """The mutable objects of a message, in the order in which they are first met.

    Both sides number them alike, so that one that is met again is sent as its number. All are
    held, and so are those of which a plain base is sent: no other object may take their ids.
    """

    def __init__(self, objects: list[Any]) -> None:
        self.objects: list[Any] = objects
        self.originals: list[Any] = []
        self.numbers = {id(one): at for at, one in enumerate(objects)}

    def add(self, value: Any) -> None:
        self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)


def dump(value: Any, *, lenient: bool = False, shared: Shared | None = None) -> bytes:
    """Plain data as bytes. Raises NotPlain for anything else.

    With `lenient` a value of a subclass is written as its plain base, and numpy's scalars as
    Python's; without, only exact types are written. Mutable objects are added to `shared`; those
    that it has already are written as their number.
    """
    parts: list[bytes] = []
    _write(value, parts, lenient, 0, Shared([]) if shared is None else shared)
    return b"".join(parts)


def _write(value: Any, parts: list[bytes], lenient: bool, depth: int, shared: Shared) -> None:
    kind = type(value)
    if depth > DEPTH:
        raise NotPlainData(f"is nested more than {DEPTH} deep")
    if value is None or kind is bool:
        parts.append(b"N" if value is None else b"T" if value else b"F")
    elif kind is int:
        parts.append(b"i%x;" % value)
    elif kind is float:
        parts.append(f"f{value.hex()};".encode())
    elif kind is complex:
        parts.append(f"c{value.real.hex()};{value.imag.hex()};".encode())
    elif (number := shared.numbers.get(id(value))) is not None:
        parts.append(b"r%x;" % number)
    elif kind is str or kind is bytes or kind is bytearray:
        if kind is bytearray:
            shared.add(value)
        data = value.encode("utf-8", "surrogatepass") if kind is str else bytes(value)
        parts += (b"s" if kind is str else b"b" if kind is bytes else b"B", b"%x;" % len(data))
        parts.append(data)
    elif kind in CONTAINERS or (name := f"{kind.__module__}.{kind.__qualname__}") in BUILD:
        if kind not in CONTAINERS:
            parts.append(b"x")
            for part in (name, BUILD[name](value)):
                _write(part, parts, lenient, depth + 1, shared)
            if kind.__name__ not in _FILLED:
                return
        if kind is not tuple and kind is not frozenset:
            shared.add(value)
        items = _contents(value)
        parts.append(CONTAINERS.get(kind, b"") + b"%x;" % len(items))
        for item in items:
            _write(item, parts, lenient, depth + 1, shared)
    elif lenient:
        base = _base(value)
        if type(base) in (list, dict, set, bytearray):
            shared.numbers[id(value)] = len(shared.objects)  # that of the base
            shared.originals.append(value)
        _write(base, parts, lenient, depth + 1, shared)
    else:
        raise NotPlainData(f"is or holds a {kind.__qualname__}, which is not plain data")


def _contents(value: Any) -> Any:
    """What a container holds, in its order; of a mapping, keys and values in turn."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return tuple(part for pair in value.items() for part in pair)
    return tuple(value)


def _refill(value: Any, contents: Any) -> None:
    """Give a mutable container these contents, and no others."""
    value.clear()
    if isinstance(value, dict):
        for key, one in zip(contents[::2], contents[1::2], strict=True):
            value[key] = one
    else:
        (value.update if isinstance(value, set) else value.extend)(contents)


def _base(value: Any) -> Any:
    """A value of a subclass as its plain base; numpy's scalars as Python's."""
    if any((c.__module__, c.__name__) == ("numpy", "generic") for c in type(value).__mro__):
        return value.item()
    plain: dict[Any, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__}
    plain |= {float: float.__float__, dict: dict.copy}
    bases = (*plain, complex, bytes, bytearray, list, tuple, set, frozenset)
    for base in bases:
        if isinstance(value, base):
            return plain.get(base, base)(value)
    raise NotPlainData(f"is or holds a {type(value).__qualname__}, which is not plain data")


def load(data: bytes, objects: list[Any] | None = None) -> Any:
    """The plain data of some bytes. Raises an Exception of any kind where they are none.

    `objects` are the mutable ones that both sides know; those of the data are added to them.
    """
    reader = _FrameReader(data, [] if objects is None else objects)
    value = reader.value(0)
    if reader.at != len(data):
        raise ValueError("more than one value")
    return value


class _FrameReader:
    def __init__(self, data: bytes, objects: list[Any]) -> None:
        self.data, self.at, self.objects = data, 0, objects

    def word(self) -> bytes:
        """What stands before the next semicolon."""
        start, end = self.at, self.data.index(b";", self.at)
        self.at = end + 1
        return self.data[start:end]

    def count(self) -> int:
        """A number of bytes or items, of which each takes a byte at least."""
        count = int(self.word(), 16)
        if not 0 <= count <= len(self.data) - self.at:
            raise ValueError("a wrong count")
        return count

    def text(self) -> bytes:
        count = self.count()
        self.at += count
        return self.data[self.at - count : self.at]

    def items(self, depth: int) -> tuple[Any, ...]:
        return tuple([self.value(depth + 1) for _ in range(self.count())])

    def filled(self, empty: Any, depth: int) -> Any:
        """A mutable container with its items, which may hold it in turn."""
        self.objects.append(empty)
        _refill(empty, self.items(depth))
        return empty

    def value(self, depth: int) -> Any:
        if depth > DEPTH + 2:
            raise ValueError("nested too deep")
        tag = self.data[self.at : self.at + 1]
        self.at += 1
        if tag == b"i":
            return int(self.word(), 16)
        if tag == b"s":
            return self.text().decode("utf-8", "surrogatepass")
        if tag in (b"N", b"T", b"F"):
            return None if tag == b"N" else tag == b"T"
        if tag == b"f":
            return float.fromhex(self.word().decode())
        if tag == b"c":
            return complex(*(float.fromhex(self.word().decode()) for _ in "ri"))
        if tag == b"r":
            return self.objects[int(self.word(), 16)]
        if tag == b"b":
            return self.text()
        if tag == b"B":
            self.objects.append(made := bytearray(self.text()))
            return made
        if tag == b"x":
            name, arguments = self.value(depth + 1), self.value(depth + 1)
            if name not in BUILD:
                raise ValueError("an unknown type")
            module, _, kind = name.partition(".")
            made = getattr(__import__(module), kind)(*arguments)
            return self.filled(made, depth) if kind in _FILLED else made
        for kind, known in CONTAINERS.items():
            if tag == known:
                fixed = kind is tuple or kind is frozenset
                return kind(self.items(depth)) if fixed else self.filled(kind(), depth)
        raise ValueError("an unknown tag")


def send(pipe: int, data: bytes) -> None:
    """Write one frame."""
    left = memoryview(b"%016x" % len(data) + data)
    while left:
        left = left[os.write(pipe, left) :]


def receive(pipe: int, most: int) -> bytes | None:
    """Read one frame; None where the pipe was closed. Raises ValueError for one above `most`."""
    head = _read(pipe, 16)
    if head is None:
        return None
    size = int(head, 16)
    if not 0 <= size <= most:
        raise ValueError("too long")
    return _read(pipe, size)


def _read(pipe: int, size: int) -> bytes | None:
    parts = []
    while size > 0:
        part = os.read(pipe, min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# The code's side.


def serve(orders: dict[str, Any]) -> NoReturn:
    """Run the code, then answer calls of what it defined until the tests' side says or goes."""
    (calls, replies), report, this = orders["ends"], orders["report"], os.getpid()
    module = type(sys)(orders["module"])
    sys.modules[orders["module"]] = module
    if "random" in orders["code"]:
        import random

        random.seed(0)
    try:
        exec(compile(orders["code"], f"{orders['module']}.py", "exec"), vars(module))
    except BaseException as error:
        os.write(report, b"code %b\n" % _line(error).encode(errors="replace"))
        os._exit(1)
    if os.getpid() != this:  # a fork of the code is not asked
        os._exit(0)
    server = _Server(vars(module))
    while (frame := receive(calls, sys.maxsize)) is not None:
        objects: list[Any] = []
        number, what, *rest = load(frame, objects)
        server.passed = _Passed(objects)
        reply = getattr(server, what)(*rest)
        try:
            data = server.passed.reply(number, reply)
        except Exception as error:
            data = dump((number, "refused", _refusal(error, reply), None, ()))
        send(replies, data)
        if what == "end":
            break
    os._exit(0)


def _line(error: BaseException) -> str:
    """An error in a line; its own words are the code's, and may fail."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())[:400]
    except BaseException:
        return "an error that cannot be shown"


def _refusal(error: Exception, reply: tuple[Any, ...]) -> str:
    """What cannot cross, the value itself or what an argument holds now, and why."""
    message = str(error) if isinstance(error, NotPlainData) else "cannot be written as plain data"
    try:
        dump(reply, lenient=True)
    except Exception:
        return message
    return f"or leaves in an argument {message}"


class _Passed:
    """The mutable objects that a call was given, and what each held when the tests last knew."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects, self.held = objects, [_contents(one) for one in objects]

    def reply(self, number: bytes, reply: tuple[Any, ...]) -> bytes:
        """A reply, with the new contents of those that were changed. Raises NotPlain as `dump`."""
        before, self.held = self.held, [_contents(one) for one in self.objects]
        changes = tuple(
            (at, new)
            for at, (old, new) in enumerate(zip(before, self.held, strict=True))
            if len(old) != len(new) or not all(map(_is, old, new))
        )
        return dump((number, *reply, changes), lenient=True, shared=Shared([*self.objects]))


class _Server:
    """Answers requests, each method those of its name: what kind of reply, and its two parts."""

    def __init__(self, space: dict[str, Any]) -> None:
        self.space = space
        self.passed = _Passed([])
        self.iterators: list[tuple[Iterator[Any], _Passed]] = []

    def names(self) -> tuple[Any, ...]:
        """What the code defines: for each name, whether it can be called; no modules."""
        kinds = [
            (name, callable(value))
            for name, value in self.space.items()
            if type(value) is not type(sys) and not name.startswith("__")
        ]
        return "value", kinds, None

    def constant(self, name: str) -> tuple[Any, ...]:
        """A value that is not called."""
        return "value", self.space[name], None

    def call(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Call a function."""
        try:
            result = self.space[name](*args, **named)
        except BaseException as error:
            return _raised(error)
        if hasattr(type(result), "__next__"):
            self.iterators.append((result, self.passed))
            return "iterator", len(self.iterators) - 1, None
        return "value", result, None

    def next(self, number: int) -> tuple[Any, ...]:
        """The next item of an iterator that a call returned, whose arguments it may change yet."""
        iterator, self.passed = self.iterators[number]
        try:
            return "value", next(iterator), None
        except StopIteration:
            return "stop", None, None
        except BaseException as error:
            return _raised(error)

    def end(self) -> tuple[Any, ...]:
        """The last request: what was printed goes out before the reply."""
        sys.stdout.flush()
        return "end", None, None


def _raised(error: BaseException) -> tuple[Any, ...]:
    """The builtin classes of an exception, nearest first, and its arguments."""
    names = [c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins"]
    try:
        dump(error.args, lenient=True)
        return "raise", names, error.args
    except Exception:
        return "raise", names, (_line(error),)


# The tests' side.


class Code:
    """The code under test as its tests see it: what they ask, and whether a reply was in order.

    `fault` says why the test that runs cannot pass, whatever it makes of the exception that it
    got; `lost` is set once nothing further can be asked.
    """

    def __init__(self, replies: int, calls: int) -> None:
        self.replies, self.calls = replies, calls
        self.lock, self.fault, self.lost = _thread.allocate_lock(), "", ""
        self.changed: tuple[bytes, list[Any]] | None = None

    def ask(self, what: str, *rest: Any, passed: list[Any] | None = None) -> tuple[str, Any, Any]:
        """Put one request. Raises Lost where there is no valid reply to it.

        `passed` are the mutable objects that it may change; those of the request are added.
        """
        number = os.urandom(8)  # a reply that was sent before its request cannot know it
        passed = [] if passed is None else passed
        self.settle()
        try:
            request = dump((number, what, *rest), shared=Shared(passed))
        except NotPlainData as error:
            self.fault = f"TypeError: an argument of {rest[0]} {error}"
            raise
        with self.lock:
            if not self.lost:
                self.lost = self._exchange(number, request, passed)
            if self.lost:
                raise Lost(self.lost)
            return self.reply

    def _exchange(self, number: bytes, request: bytes, passed: list[Any]) -> str:
        """Send a request, keep the reply and make its changes; what went wrong, or nothing."""
        try:
            send(self.calls, request)
            data = receive(self.replies, REPLY_BYTES)
        except OSError:
            return "gone"
        except ValueError:
            return "garbled"
        if data is None:
            return "gone"
        try:
            mine, kind, value, more, changes = load(data, [*passed])
            if mine != number or type(kind) is not str:
                return "garbled"
            if changes and kind == "value" and value is not None:  # the reply has copies
                copies = load(dump(passed), [])
                _, kind, value, more, changes = load(data, [*copies])
                self.changed, passed = (data, passed), copies
            for at, contents in changes:
                _refill(passed[at], contents)
        except Exception:
            return "garbled"
        self.reply = (kind, value, more)
        return ""

    def settle(self) -> None:
        """Make the changes that wait; the tests call it before each of their statements."""
        if self.changed is not None:
            (data, passed), self.changed = self.changed, None
            for at, contents in load(data, [*passed])[4]:
                _refill(passed[at], contents)

    def value(self, name: str, what: str, *rest: Any, passed: list[Any] | None = None) -> Any:
        """What a request about `name` gives, as a value or an exception."""
        kind, value, more = self.ask(what, *rest, passed=passed)
        if kind == "value":
            return value
        if kind == "iterator" and what == "call":
            return self.items(name, value, passed or [])
        if kind == "stop" and what == "next":
            raise StopIteration
        if kind == "raise":
            raise _exception(value, more)
        if kind == "refused":
            self.fault = f"TypeError: what {name} returns {value}; see the option isolation"
            raise NotPlainData(self.fault)
        self.lost = "garbled"
        raise Lost(self.lost)

    def items(self, name: str, number: int, passed: list[Any]) -> Iterator[Any]:
        """The items of an iterator that a call returned, each asked for when it is needed."""
        while True:
            try:
                item = self.value(name, "next", number, passed=passed)
            except StopIteration:
                return
            yield item

    def function(self, name: str) -> Callable[..., Any]:
        """The stand-in of a function."""

        def stand_in(*args: Any, **named: Any) -> Any:
            return self.value(name, "call", name, args, named, passed=[])

        stand_in.__name__ = stand_in.__qualname__ = name
        return stand_in

    def names(self) -> dict[str, bool]:
        """What the code defines: for each name, whether it can be called."""
        names = self.value("", "names")
        try:
            return {str(name): bool(called) for name, called in names if not name.startswith("__")}
        except Exception:
            self.lost = "garbled"
            raise Lost(self.lost) from None


def _exception(names: Any, arguments: Any) -> BaseException:
    """The nearest builtin exception that can be made of the arguments."""
    names = [name for name in names if type(name) is str] if type(names) is list else []
    arguments = arguments if type(arguments) is tuple else ()
    for name in names:
        if name in _ENDING:
            return RuntimeError(f"the code raised {name}")
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                return kind(*arguments)
            except Exception:
                continue
    return Exception(*arguments)


def judge(orders: dict[str, Any]) -> NoReturn:
    """Run each test on stand-ins; one that passes has its own secret reported."""

    def say(line: str) -> None:
        line = " ".join(line.split())[:400]  # one line, whatever separates lines
        os.write(orders["report"], line.encode(errors="replace") + b"\n")

    code = Code(*orders["ends"])
    if any(name.partition(".")[0] == "random" for name in orders["imports"]):
        import random

        random.seed(orders["seed"])  # the code cannot know it
    space: dict[str, Any] = {"__name__": "tests", orders["settle"]: code.settle}
    try:
        entry = _fill(space, code, orders)
        if entry is None:
            say(f"code no function {orders['entry_point']!r}")
            os._exit(1)
        if orders["setup"]:
            exec(compile(orders["setup"], "setup", "exec"), space)
    except BaseException as error:
        say(code.lost or f"setup {code.fault or _line(error)}")
        os._exit(1)
    for at, test in enumerate(orders["tests"]):
        message = ""
        try:
            exec(compile(test, f"test {at}", "exec"), space)
            if orders["checks"][at]:
                space["check"](entry)
        except BaseException as error:
            message = _line(error)
        if code.lost:
            break
        message, code.fault = code.fault or message, ""
        say(f"test {at}: {message}" if message else orders["secrets"][at])
    try:
        if code.ask("end")[0] == "end":
            say(orders["done"])
    except Lost:
        say(code.lost)
    try:
        sys.stdout.flush()
    finally:
        os._exit(0)


def _fill(space: dict[str, Any], code: Code, orders: dict[str, Any]) -> Any:
    """Give the tests their names; the function under test, or None where there is no such.

    Helpers that the prompt defines are the prompt's, and no other function is the code's then.
    """
    entry, offered = orders["entry_point"], code.names()
    exec(compile(orders["helpers"], "prompt", "exec"), space)
    used = orders["used"]
    module = type(sys)(orders["module"])
    sys.modules[orders["module"]] = module
    for name, called in offered.items():
        if name in space or (name != entry and not orders["shadow"] and hasattr(builtins, name)):
            continue
        if called and (name == entry or not orders["alone"]):
            space[name] = code.function(name)
        elif not called and (name in used or used & {"globals", "locals", "vars", "dir"}):
            kind, value, _ = code.ask("constant", name)
            if kind != "value":
                continue
            space[name] = value
        else:
            continue
        setattr(module, name, space[name])
    if entry is None:
        return ()
    return space[entry] if offered.get(entry) else None
