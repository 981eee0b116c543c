"""Code judged by unit tests in a sandbox.

The verdict rests on secrets, one for each test, that are reported only once the test has passed: no
printed word, exit status or early end stands for a pass.

With the isolation `process` the code runs in one sandbox and its tests in another. The tests call
its functions through pipes that carry JSON (`keel.platform.boundary`): the code sees the
arguments of the calls, and neither the tests nor what they expect; the tests see no object of the
code's. A test that needs what JSON cannot carry fails, and its cause says so: it needs `shared`.

With `shared` the tests run in the interpreter that ran the code, so that they can use its classes
and other objects. They see the builtins and the packages that they import themselves as they were
before the code; yet code written to attack this very harness can pass: it searches the
interpreter's frames for the secrets, changes functions in place or while a test calls it, leaves
something of its own under a name that the tests use and do not import, or makes objects that say
they equal everything. It cannot leave the sandbox.
"""

from __future__ import annotations

import ast
import builtins
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from keel.graders.code_blocks import DEFINING, NOT_PYTHON, names_in, parsed
from keel.platform.inside import CODE
from keel.platform.sandbox import Sandbox, SandboxResult
from keel.types import KeelError

Status = Literal[
    "passed", "failed", "error", "exited", "timeout", "memory", "processes", "output", "died"
]
"""What became of a piece of code, all its tests together.

A test failed; the code raised before its tests; it ended before they did; it ran out of time, of
memory, of processes, of the output it may print; a signal ended it.
"""
Isolation = Literal["process", "shared"]
"""Whether the code has a process of its own, or shares that of its tests."""
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_TESTING = (ast.Assert, ast.Call, ast.Raise)
_LOOKING_UP = ("globals", "locals", "vars", "dir")
"""Builtins through which a test may call what it does not name."""
_CAUSES: dict[str, Status] = {"MemoryError": "memory", "BlockingIOError": "processes"}


@dataclass(frozen=True, slots=True)
class Checked:
    """Which tests passed, what became of all, and the cause in a line (empty if all passed)."""

    passed: tuple[bool, ...]
    status: Status
    cause: str

    @property
    def share(self) -> float:
        """The share of the tests that passed."""
        return sum(self.passed) / len(self.passed)


@dataclass(frozen=True, slots=True)
class UnitTests:
    """Tests that were read: their texts, and what running them needs to know.

    `checks` says of each whether it defines `check(candidate)` and leaves the call to us, `imports`
    what they import. `shadow` is whether a function of the code may stand in place of a builtin:
    if the tests use no other name that only the code can define, as in `assert sum(3, 1) == 2`.
    `setup` runs before the tests; `helpers` are those definitions of the prompt that they use, and
    `alone` says that there was a prompt: of the code they then call `entry_point` alone. `binding`
    ends the code if the entry point is a method: `twoSum = Solution().twoSum`.
    """

    tests: tuple[str, ...]
    checks: tuple[bool, ...]
    imports: tuple[str, ...]
    shadow: bool
    entry_point: str | None
    setup: str = ""
    helpers: str = ""
    alone: bool = False
    binding: str = ""


def wanted_names(tests: UnitTests) -> set[str]:
    """The function `entry_point`, or else all that the tests use of the code."""
    if tests.entry_point is not None:
        return names_in([parsed(tests.binding)], ast.Load) or {tests.entry_point}
    trees = [parsed(text) for text in (tests.setup, *tests.tests)]
    return names_in(trees, ast.Load) - names_in(trees, ast.Store) - set(dir(builtins))


def read_tests(
    tests: str | Sequence[str],
    entry_point: str | None,
    *,
    setup: str | Sequence[str] = "",
    prompt: str = "",
) -> UnitTests:
    """Read tests: Python texts that raise if they fail.

    `setup` is Python that runs before them, and what it defines is theirs. With an entry point,
    what the `prompt` defines and they use is theirs too, so that the code cannot replace it.
    Raises KeelError for what are not tests: not Python, empty, nothing in them that runs, functions
    for another program to call (pytest's, unittest's), or `check` with nothing to check.
    """
    if not isinstance(setup, str):
        setup = "\n".join(_texts(setup, "set-up code")) if setup else ""
    name = (entry_point or "").rpartition(".")[2]
    binding = f"{name} = {entry_point}\n" if name != (entry_point or "") else ""
    _parse(binding, "entry point")
    read = _read(_texts(tests, "test"), name or entry_point, setup, prompt if entry_point else "")
    return replace(read, binding=binding)


@lru_cache(maxsize=256)  # a group's completions have the same tests, and some are long
def _read(each: tuple[str, ...], entry_point: str | None, setup: str, prompt: str) -> UnitTests:
    trees = [_parse(test, "test") for test in each]
    before = _parse(setup, "set-up code")
    running = [list(_running(tree)) for tree in trees]
    called = {node.id for nodes in running for node in nodes if isinstance(node, ast.Name)}
    used = names_in(trees, ast.Load)
    owned = _handed_over(trees)
    checks = []
    for test, tree, nodes in zip(each, trees, running, strict=True):
        for node in tree.body:
            if isinstance(node, DEFINING):
                _refuse_idle(f"the test {test[:60]!r}", node, used | owned, nodes)
        if any(isinstance(n, ast.Attribute) and _dotted(n) == "unittest.main" for n in nodes):
            raise KeelError(
                f"the test {test[:60]!r} calls unittest.main, which finds no test here and exits: "
                "run the TestCase with unittest.TextTestRunner, and assert wasSuccessful()"
            )
        check = "check" not in called and any(map(_is_check, tree.body))
        defined = {node.name for node in tree.body if isinstance(node, DEFINING)}
        tested = any(isinstance(node, _TESTING) for node in nodes) or defined & (called | owned)
        if not check and not tested:
            raise KeelError(
                f"the test {test[:60]!r} tests nothing: no assert, call or raise in it runs "
                "(functions do when they are called; a main block does not)"
            )
        checks.append(check)
    if any(checks) and entry_point is None:
        raise KeelError(
            "the test defines check(candidate): name the function's column, entry_point"
        )
    trees.append(before)
    own = names_in(trees, ast.Store)
    used = names_in(trees, ast.Load) - own
    shadow = entry_point is None and used <= set(dir(builtins))
    helpers = _helpers(prompt, used, entry_point)
    trees.append(parsed(helpers))
    return UnitTests(
        tests=each,
        checks=tuple(checks),
        imports=_imports(trees),
        shadow=shadow,
        entry_point=entry_point,
        setup=setup,
        helpers=helpers,
        alone=bool(prompt),
    )


def _parse(text: str, what: str) -> ast.Module:
    try:
        return parsed(text)
    except NOT_PYTHON as error:
        raise KeelError(f"the {what} {text[:60]!r} is not Python: {error}") from None


TRIVIAL = {one: f"return {one}" for one in ("[]", "None", '""', "0")}
TRIVIAL |= {"nan": "return float('nan')", "a raise": "raise ValueError"}
"""Bodies of functions that solve nothing, by what they give."""


def trivial_codes(tests: UnitTests) -> dict[str, str]:
    """Code that solves nothing, by what its functions give; none without the name of a function."""
    heads = [f"def {name}(*args, **named): " for name in sorted(wanted_names(tests))]
    return {name: "".join(f"{h}{body}\n" for h in heads) for name, body in TRIVIAL.items() if heads}


def _helpers(prompt: str, used: set[str], entry_point: str | None) -> str:
    """What a prompt defines or imports of the names that are used, and what that needs in turn."""
    body: list[ast.stmt] = []
    for end in ("\n    pass\n", ""):  # a prompt may break off after the head of its function
        with suppress(*NOT_PYTHON):
            body = parsed(prompt + end).body
    wanted = set(used)
    kept: list[str] = []
    for node in reversed(body):
        bound = {node.name} if isinstance(node, DEFINING) else names_in([node], ast.Store)
        if bound & wanted and entry_point not in bound:
            kept.insert(0, ast.unparse(node))
            wanted |= names_in([node], ast.Load)
    return "\n".join(kept)


def _texts(tests: object, what: str) -> tuple[str, ...]:
    each: tuple[object, ...] = (tests,)
    if not isinstance(tests, str | bytes | Mapping) and isinstance(tests, Iterable):
        each = tuple(tests)
    if not each:
        raise KeelError("an empty list of tests, which all code passes")
    for test in each:
        if not isinstance(test, str):
            raise KeelError(f"the {what} {test!r:.60} is not text: give Python, or a list of it")
    return tuple(map(str, each))


def _is_check(node: ast.AST) -> bool:
    """Whether a statement defines `check`, and that tests something."""
    if not isinstance(node, ast.FunctionDef) or node.name != "check":
        return False
    return any(isinstance(one, _TESTING) for one in ast.walk(node))


def _refuse_idle(where: str, node: _Definition, used: set[str], running: Sequence[ast.AST]) -> None:
    """Raise KeelError for a function or class in the form of a test that tests nothing as it is."""
    name = node.name
    if isinstance(node, ast.ClassDef) and any("TestCase" in _dotted(b) for b in node.bases):
        if not any(map(_raises, running)):
            raise KeelError(
                f"{where} defines the TestCase {name}, but raises nothing if that fails: end it "
                "with `assert unittest.TextTestRunner().run(unittest.defaultTestLoader."
                f"loadTestsFromTestCase({name})).wasSuccessful()`"
            )
    elif name.lower().startswith("test") and not used & {name, *_LOOKING_UP}:
        raise KeelError(f"{where} defines {name} but never calls it: add the call")
    elif isinstance(node, ast.AsyncFunctionDef):
        left = (one.value for one in running if isinstance(one, ast.Expr))
        if any(isinstance(one, ast.Call) and _dotted(one.func) == name for one in left):
            raise KeelError(
                f"{where} calls {name}, which is async, and does not await it: use "
                f"asyncio.run({name}())"
            )


def _raises(node: ast.AST) -> bool:
    """Whether what runs can tell that a TestCase failed; unittest.main cannot, it just exits."""
    if isinstance(node, ast.Attribute):
        return node.attr == "debug"  # TestCase.debug, which lets errors through
    if isinstance(node, ast.Call):
        return _dotted(node.func) in ("exit", "quit", "sys.exit", "os._exit")
    return isinstance(node, ast.Assert | ast.Raise)


def _handed_over(trees: Iterable[ast.Module]) -> set[str]:
    """Names of functions that a decorator gets which the tests define: it may call them."""
    tops = [node for tree in trees for node in tree.body if isinstance(node, DEFINING)]
    names = {node.name for node in tops}
    return {
        node.name
        for node in tops
        if any(names_in([decorator], ast.Load) & names for decorator in node.decorator_list)
    }


def _running(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when a test does: not what functions and classes hold, nor a main block."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*DEFINING, ast.Lambda)):
            continue
        yield node
        if isinstance(node, ast.If) and "__name__" in names_in([node.test], ast.Load):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _imports(trees: Sequence[ast.Module]) -> tuple[str, ...]:
    """The modules that tests import, and what may be modules among what they import from them."""
    found: dict[str, None] = {}
    for node in (one for tree in trees for one in ast.walk(tree)):
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
            found.update(dict.fromkeys(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(found)


def run_tests(
    sandbox: Sandbox,
    code: str,
    tests: UnitTests | str | Sequence[str],
    entry_point: str | None = None,
    *,
    isolation: Isolation = "process",
    stop: threading.Event | None = None,
) -> Checked:
    """Run code, then its tests on what it defined; a test is Python that raises if it fails.

    A test that defines `check(candidate)`, as HumanEval's do, has it called with the function
    `entry_point`. Raises KeelError for what are not tests. Once `stop` is set, the run is killed.
    """
    read = tests if isinstance(tests, UnitTests) else read_tests(tests, entry_point)
    code = f"{code}\n{read.binding}" if read.binding else code
    secret = [secrets.token_hex(16) for _ in read.tests]
    orders = {**asdict(read), "secrets": secret, "seed": "\n".join((read.setup, *read.tests))}
    if isolation == "process":
        return _run_apart(sandbox, code, {**orders, "used": _mentioned(read)}, stop)
    ran = sandbox.carry_out({**orders, "code": code}, stop=stop)
    passed = _passed(ran, secret)
    if all(passed) and ran.status == "ended":
        return Checked(passed, "passed", "")
    return _failed(ran, passed, [line for line in ran.reported if line not in secret])


def _mentioned(read: UnitTests) -> set[str]:
    """All names in the source of tests: of variables, attributes and what is imported."""
    texts = (read.helpers, read.setup, *read.tests)
    nodes = [node for text in texts for node in ast.walk(parsed(text))]
    return {
        *(node.id for node in nodes if isinstance(node, ast.Name)),
        *(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        *(node.name for node in nodes if isinstance(node, ast.alias)),
    }


def _run_apart(
    sandbox: Sandbox, code: str, orders: dict[str, Any], stop: threading.Event | None
) -> Checked:
    """Run code and tests in a sandbox each, at the same time, with a pipe either way."""
    common = {"module": CODE}
    done = secrets.token_hex(16)
    (asked, asking), (replies, replying) = os.pipe(), os.pipe()
    served: list[SandboxResult | BaseException] = []

    def serve() -> None:
        try:
            own = {**common, "side": "serve", "code": code}
            served.append(sandbox.carry_out(own, ends=(asked, replying), stop=stop))
        except BaseException as error:
            served.append(error)

    # It ends with the tests' sandbox, whose ends of the pipes close with it, or by its limits.
    serving = threading.Thread(target=serve, name="keel-code-serving", daemon=True)
    serving.start()
    try:
        orders = {**common, **orders, "side": "judge", "done": done}
        tested = sandbox.carry_out(orders, ends=(replies, asking), stop=stop)
    finally:
        serving.join()
    (ran,) = served
    if isinstance(ran, BaseException):
        raise ran
    passed, lines = _passed(tested, orders["secrets"]), tested.reported
    if ran.status == tested.status == "ended" and done in lines and all(passed):
        return Checked(passed, "passed", "")
    if "garbled" in lines:
        words = "the code's process sent something that is not a reply to its tests"
        return Checked((False,) * len(passed), "failed", words)
    if ran.status != "ended":
        return _failed(ran, passed, ())
    raised = [line for line in ran.reported if line.startswith("code ")]
    printed = [line for line in lines if line not in (done, *orders["secrets"])]
    if tested.status == "ended" and printed[:1] == ["gone"]:
        return _failed(ran, passed, raised[:1])
    return _failed(tested, passed, printed)


def _passed(ran: SandboxResult, secret: Sequence[str]) -> tuple[bool, ...]:
    lines = set(ran.reported)
    return tuple(one in lines for one in secret)


def _failed(ran: SandboxResult, passed: tuple[bool, ...], lines: Sequence[str]) -> Checked:
    """What became of code that did not pass; `lines` are those that report what went wrong."""
    status, cause = _cause(ran, lines)
    # What counts is that the whole ended well: with too much output, say, no test counts.
    if ran.status not in ("ended", "timeout"):
        passed = (False,) * len(passed)
    return Checked(passed, status, cause)


def _cause(ran: SandboxResult, lines: Sequence[str]) -> tuple[Status, str]:
    """What went wrong, by how the run ended and then by the first thing reported."""
    if ran.status != "ended":
        return ran.status, ran.cause
    if not lines:
        return "exited", f"ended before its tests did ({ran.cause})"
    where, _, message = lines[0].partition(" ")
    if where == "test":
        number, _, message = message.partition(": ")
        where = f"test {number}"
    name = message.partition(":")[0]
    status: Status = "failed" if where != "code" else "error"
    if name in _CAUSES:
        status = _CAUSES[name]
    elif "can't start new thread" in message:
        status = "processes"
    return status, f"{where}: {message}"[:300]


def _dotted(node: ast.AST) -> str:
    """A name, or names joined by dots; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""
