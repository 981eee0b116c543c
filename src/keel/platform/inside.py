"""What runs inside the sandbox: it limits itself, then runs a command, or code and its tests.

Handed to the interpreter as text (`-c`), with its orders on standard input; standard library only,
and of that little: every import is paid for at each start (`json` would be 5 ms).
"""

from __future__ import annotations

import _thread
import builtins
import marshal
import os
import resource
import site
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType
    from typing import Any

    BOUNDARY: CodeType
    """`boundary.py`, compiled; it comes with this text."""

CODE = "completion"
"""The module that the code under test becomes; not `__main__`, so that no main block runs."""


def main() -> None:
    """Read the orders to their end, and carry them out."""
    lifeline = int(sys.argv[-1])
    if "first" in sys.argv:
        run_as_init(lifeline)
        os.close(lifeline)
    orders = marshal.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    confine(orders["uid"], orders["limits"])
    for end in (orders["report"], *orders["ends"]):
        os.set_inheritable(end, False)
    kept = sorted((orders["report"], lifeline, *orders["ends"]))
    for low, high in zip([2, *kept], [*kept, 1024], strict=True):
        os.closerange(low + 1, high)
    os.write(orders["report"], (orders.pop("started") + "\n").encode())
    if "argv" in orders:
        os.execvp(orders["argv"][0], orders["argv"])
    vars(sys).update(orders.pop("path"))  # this interpreter was started without the module site
    for names in (site.setquit, site.sethelper, site.setcopyright):
        names()
    if "side" in orders:
        space: dict[str, Any] = {"__name__": "boundary"}
        exec(BOUNDARY, space)  # noqa: F821  (declared above)
        space[orders["side"]](orders)
    else:
        _test(orders)


def run_as_init(lifeline: int) -> None:
    """Fork; the child goes on, and this process waits for it, as a process space's first must.

    It ends, and with it all of the process space, when the other end of the lifeline closes. The
    child, a temporary user's, cannot end it, nor read the orders from its standard input.
    """
    child = os.fork()
    if child == 0:
        return
    os.close(0)
    _thread.start_new_thread(lambda: (os.read(lifeline, 1), os._exit(1)), ())
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def confine(uid: int | None, limits: dict[str, int]) -> None:
    """Drop to an unprivileged user (in root's sandbox), and set the limits."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for name, value in limits.items():
        limit(getattr(resource, name), value, value)


def limit(what: int, soft: int, hard: int) -> None:
    """Set a limit, within the one that is there already."""
    there = resource.getrlimit(what)[1]
    if there != resource.RLIM_INFINITY:
        soft, hard = min(soft, there), there if hard == resource.RLIM_INFINITY else min(hard, there)
    resource.setrlimit(what, (soft, hard))


def _test(orders: dict[str, Any]) -> None:
    """Run the code, then each test, in this interpreter; one that passes has its secret reported.

    What is needed after the code has run is held in variables here, out of reach of code that puts
    something else in the place of a function of a module or a builtin; the tests see the builtins,
    and the modules that they import, as they were.
    """
    import random

    report, secrets, checks = orders["report"], orders["secrets"], orders["checks"]
    write, leave, process, out = os.write, os._exit, os.getpid, sys.stdout
    trace, profile, this = sys.settrace, sys.setprofile, os.getpid()
    run, read, numbered = exec, compile, list(enumerate(orders["tests"]))
    pristine = dict(vars(builtins))

    def say(line: str) -> None:
        if process() == this:  # a fork of the code under test does not judge it
            write(report, " ".join(line.split()).encode(errors="replace")[:500] + b"\n")

    put_back = _keep(orders["imports"])
    module = type(sys)(CODE)
    sys.modules[CODE] = module
    random.seed(0)
    seed = random.seed
    try:
        run(read(orders["code"], f"{CODE}.py", "exec"), vars(module))
    except BaseException as error:
        say(f"code {_line(error)}")
        leave(1)
    trace(None)
    profile(None)
    put_back()
    seed(orders["seed"])
    entry = orders["entry_point"]
    names = {name: value for name, value in module.__dict__.items() if not name.startswith("__")}
    if not orders["shadow"]:
        names = {n: value for n, value in names.items() if n == entry or n not in pristine}
    if entry is not None and entry not in names:
        say(f"code no function {entry!r}")
        leave(1)
    space = {**names, "__builtins__": pristine, "__name__": "tests"}
    try:
        run(read(orders["setup"], "setup", "exec"), space)
    except BaseException as error:
        say(f"setup {_line(error)}")
        leave(1)
    for at, test in numbered:
        try:
            run(read(test, f"test {at}", "exec"), space)
            if checks[at]:
                space["check"](names[entry])
        except BaseException as error:
            say(f"test {at}: {_line(error)}")
        else:
            say(secrets[at])
    try:
        out.flush()
    finally:
        leave(0)


def _keep(imports: Sequence[str]) -> Callable[[], None]:
    """Import what the tests will; what puts that and the builtins back as they are now.

    All of a package counts, its modules' names and the attributes of their classes. What is put
    back with uses no name that the code could have put something else in the place of.
    """
    for name in imports:
        try:
            __import__(name)
        except BaseException:  # the test that imports it says so
            continue
    roots = {name.partition(".")[0] for name in imports}
    entries = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in roots and n != CODE}
    # Not every entry is a module: typing.io is a class, and None blocks an import.
    whole = [m for m in entries.values() if isinstance(m, type(sys))]
    kept = [(m, type(m), vars(m), dict(vars(m))) for m in (*whole, builtins)]
    classes = {
        id(value): (value, dict(vars(value)))
        for *_, was in kept
        for value in was.values()
        if isinstance(value, type) and str(value.__module__).partition(".")[0] in roots
    }
    owners = list(classes.values())
    modules, pristine, immutable = sys.modules, dict(vars(builtins)), (TypeError, AttributeError)
    be, assign, delete, attributes = object.__setattr__, type.__setattr__, type.__delattr__, vars

    def put_back() -> None:
        for module, kind, names, was in kept:
            be(module, "__class__", kind)
            for name in [*names]:
                if name not in was and name in pristine:
                    del names[name]  # it would stand before the builtin of that name
            names.update(was)
        for owner, was in owners:
            try:
                for name in [*attributes(owner)]:
                    if name not in was:
                        delete(owner, name)
                for name in was:
                    if attributes(owner).get(name) is not was[name]:
                        assign(owner, name, was[name])
            except immutable:
                continue
        modules.update(entries)

    return put_back


def _line(error: BaseException) -> str:
    """An error in a line; its own words are those of the code under test, and may fail."""
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except BaseException:
        return "an error that cannot be printed"


if __name__ == "__main__":
    main()
