"""The boundary between code under test and its tests: two processes that exchange JSON lines.

Both sides run in sandboxes of their own, by `inside`: `serve` runs the code and answers calls,
`judge` runs the tests, which see stand-ins for the code's functions. Values cross as JSON, so that
no object of the code's ever reaches its tests. Standard library only, and of that little: every
import is paid for at each start.
"""

from __future__ import annotations

import _thread
import builtins
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO, NoReturn

DEPTH = 100
"""How deep values may be nested."""
REPLY_BYTES = 16 * 2**20
"""The longest reply that the tests' side reads."""
_ENDING = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Exceptions that end a loop silently: `all(map(test, cases))` would pass at the first of them."""


class NotPlainData(TypeError):
    """A value that JSON cannot carry."""


class Lost(BaseException):
    """The code's process ended, or sent something that is not a reply."""


# Values as JSON: what JSON does not have is an object with one key, which names the type.


def encode(value: Any, depth: int = 0) -> Any:
    """A value in JSON's types. Raises NotPlainData if it, or what it holds, has no such form.

    A value of a subclass is written as its plain base, and numpy's scalars as Python's.
    """
    if depth > DEPTH:
        raise NotPlainData(f"is nested more than {DEPTH} deep")
    kinds = type(value).__mro__
    if any((kind.__module__, kind.__name__) == ("numpy", "generic") for kind in kinds):
        value = value.item()
        kinds = type(value).__mro__
    if value is None or bool in kinds:
        return value
    if int in kinds:
        number = int.__int__(value)
        return number if abs(number) < 2**63 else {"int": hex(number)}
    if float in kinds:
        return float.__float__(value)
    if str in kinds:
        return str.__str__(value)
    if complex in kinds:
        return {"complex": [value.real, value.imag]}
    if bytes in kinds or bytearray in kinds:
        return {"bytes" if bytes in kinds else "bytearray": bytes(value).hex()}
    if dict in kinds:
        pairs = dict.items(value)
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in pairs]}
    for kind in (list, tuple, set, frozenset):
        if kind in kinds:
            items = [encode(item, depth + 1) for item in value]
            return items if kind is list else {kind.__name__: items}
    raise NotPlainData(f"is or holds a {type(value).__qualname__}, which JSON cannot carry")


_DECODE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": lambda items: {decode(key): decode(one) for key, one in items},
}


def decode(value: Any) -> Any:
    """The value that `encode` wrote. Raises an Exception of any kind if it wrote no such thing."""
    if isinstance(value, list):
        return list(map(decode, value))
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return _DECODE[kind](content)
    return value


def send(pipe: int, message: Any) -> None:
    """Write a message, JSON already, as a line."""
    left = memoryview(json.dumps(message).encode() + b"\n")
    while left:
        left = left[os.write(pipe, left) :]


# The code's side.


def serve(orders: dict[str, Any]) -> NoReturn:
    """Run the code, then answer calls of what it defined until the tests end them or are gone."""
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
    for line in os.fdopen(calls, "rb"):
        number, what, *rest = decode(json.loads(line))
        reply = getattr(server, what)(*rest)
        try:
            data = encode((number, *reply))
        except Exception as error:
            data = encode((number, "refused", _refusal(error, reply), None))
        send(replies, data)
        if what == "end":
            break
    os._exit(0)


def _line(error: BaseException) -> str:
    """An error on one line; its message is the code's, and may fail."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())[:400]
    except BaseException:
        return "an error that cannot be shown"


def _refusal(error: Exception, reply: tuple[Any, ...]) -> str:
    """Why a reply cannot cross: for the value itself, or for what it leaves in an argument."""
    message = str(error) if isinstance(error, NotPlainData) else "cannot be written as JSON"
    try:
        encode(reply[:2])
    except Exception:
        return message
    return f"or leaves in an argument {message}"


class _Server:
    """Answers requests, each method those of its name: the kind of reply, and its two parts."""

    def __init__(self, space: dict[str, Any]) -> None:
        self.space = space
        self.iterators: list[Iterator[Any]] = []

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
        """Call a function. One that returns None may have changed its arguments: so they follow."""
        try:
            result = self.space[name](*args, **named)
        except BaseException as error:
            return _raised(error)
        if hasattr(type(result), "__next__"):
            self.iterators.append(result)
            return "iterator", len(self.iterators) - 1, None
        return "value", result, (*args, *named.values()) if result is None else None

    def next(self, number: int) -> tuple[Any, ...]:
        """The next item of an iterator that a call returned."""
        try:
            return "value", next(self.iterators[number]), None
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
        encode(error.args)
        return "raise", names, error.args
    except Exception:
        return "raise", names, (_line(error),)


# The tests' side.


class Code:
    """The code under test as its tests see it: what they ask, and whether a reply was in order.

    `fault` is why the test that runs cannot pass, whatever it makes of the exception that it got;
    `lost` is set once nothing further can be asked.
    """

    def __init__(self, replies: int, calls: int) -> None:
        self.replies: BinaryIO = os.fdopen(replies, "rb")
        self.calls = calls
        self.lock, self.fault, self.lost = _thread.allocate_lock(), "", ""

    def ask(self, what: str, *rest: Any) -> tuple[str, Any, Any]:
        """Make one request. Raises Lost if there is no valid reply to it."""
        number = os.urandom(8).hex()  # a reply that was sent before its request cannot know it
        try:
            request = encode((number, what, *rest))
        except NotPlainData as error:
            self.fault = f"TypeError: an argument of {rest[0]} {error}; see the option isolation"
            raise
        with self.lock:
            if self.lost:
                raise Lost(self.lost)
            try:
                send(self.calls, request)
                line = self.replies.readline(REPLY_BYTES)
            except OSError:
                line = b""
            if not line.endswith(b"\n") and len(line) < REPLY_BYTES:
                raise self._lose("gone")
            try:
                mine, kind, value, more = decode(json.loads(line))
            except Exception:
                raise self._lose("garbled") from None
            if mine != number or type(kind) is not str:
                raise self._lose("garbled")
            return kind, value, more

    def _lose(self, why: str) -> Lost:
        self.lost = why
        return Lost(why)

    def value(self, name: str, what: str, *rest: Any) -> Any:
        """The value, or the exception, that a request about `name` gives."""
        kind, value, more = self.ask(what, *rest)
        if kind == "value":
            if what == "call" and value is None:
                _, args, named = rest
                self._change((*args, *named.values()), more)
            return value
        if kind == "iterator" and what == "call":
            return self.items(name, value)
        if kind == "stop" and what == "next":
            raise StopIteration
        if kind == "raise":
            raise _exception(value, more)
        if kind == "refused":
            self.fault = f"TypeError: what {name} returns {value}; see the option isolation"
            raise NotPlainData(self.fault)
        raise self._lose("garbled")

    def _change(self, arguments: tuple[Any, ...], now: Any) -> None:
        """Give the mutable arguments of a call the contents that they have on the code's side."""
        if type(now) is not tuple or len(now) != len(arguments):
            raise self._lose("garbled")
        for one, new in zip(arguments, now, strict=True):
            refill(one, new)

    def items(self, name: str, number: int) -> Iterator[Any]:
        """The items of an iterator that a call returned, each asked for when it is needed."""
        while True:
            try:
                item = self.value(name, "next", number)
            except StopIteration:
                return
            yield item

    def function(self, name: str) -> Callable[..., Any]:
        """The stand-in of a function."""

        def stand_in(*args: Any, **named: Any) -> Any:
            return self.value(name, "call", name, args, named)

        stand_in.__name__ = stand_in.__qualname__ = name
        return stand_in

    def names(self) -> dict[str, bool]:
        """What the code defines: for each name, whether it can be called."""
        names = self.value("", "names")
        try:
            return {str(name): bool(called) for name, called in names if not name.startswith("__")}
        except Exception:
            raise self._lose("garbled") from None


def refill(old: Any, new: Any) -> None:
    """Give a mutable container, and those in it that are still there, the contents of another."""
    if type(old) is not type(new) or old == new:
        return
    if isinstance(old, tuple | list) and len(old) == len(new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            if type(one) is type(other) and isinstance(one, tuple | list | dict | set | bytearray):
                refill(one, other)
            elif isinstance(old, list):
                old[at] = other
    elif isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


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
    """Run each test on stand-ins; for one that passes, report its own secret."""

    def say(line: str) -> None:
        line = " ".join(line.split())[:400]  # one line, whatever separates lines
        os.write(orders["report"], line.encode(errors="replace") + b"\n")

    code = Code(*orders["ends"])
    if any(name.partition(".")[0] == "random" for name in orders["imports"]):
        import random

        random.seed(orders["seed"])  # the code cannot know it
    space: dict[str, Any] = {"__name__": "tests"}
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
    """Give the tests their names; the function under test, or None if there is no such function.

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
