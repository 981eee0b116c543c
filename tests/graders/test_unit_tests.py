from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from keel.graders.unit_tests import (
    Checked,
    Isolation,
    UnitTests,
    read_tests,
    run_tests,
    wanted_names,
)
from keel.platform.sandbox import Limits, Sandbox, environment
from keel.rewards.code import in_threads
from keel.types import KeelError
from tests.graders.mutants import mutants
from tests.shared import needs_bubblewrap, shared_path

ASSERTS = ["assert double(1) == 2", "assert abs(double(2)) == 4", "assert double(0) == 0"]
RIGHT = "def double(x):\n    return 2 * x\n"
ISOLATIONS: tuple[Isolation, ...] = ("process", "shared")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(Limits(timeout=60.0))


Run = Callable[..., Checked]
"""`run_tests` in one of the two isolations."""


@pytest.fixture(params=ISOLATIONS)
def run(request: pytest.FixtureRequest, sandbox: Sandbox) -> Run:
    return partial(run_tests, sandbox, isolation=request.param)


def problems() -> list[dict[str, Any]]:
    path = shared_path("data/humaneval/HumanEval.jsonl.gz")
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@needs_bubblewrap
def test_code_that_passes(run: Run) -> None:
    assert run(RIGHT, ASSERTS) == Checked((True,) * 3, "passed", "")
    assert run(RIGHT, "\n".join(ASSERTS)).passed == (True,)
    check = "def check(candidate):\n    assert candidate(3) == 6"
    assert run(RIGHT, check, "double").status == "passed"
    method = "class Solution:\n    def triple(self, n): return 3 * n\n"
    assert run(method, check.replace("6", "9"), "Solution().triple").status == "passed"
    assert run(method, check, "Solution().triple").status == "failed"
    # Where tests share names, a later one sees what an earlier one made.
    tests = ["import math\nn = 2\nassert n", "assert double(n) == math.sqrt(16)"]
    assert run(RIGHT, tests).passed == (True, True)
    main = f"{RIGHT}\nif __name__ == '__main__':\n    raise SystemExit(input())\n"
    assert run(main, ASSERTS).status == "passed"


@needs_bubblewrap
@pytest.mark.parametrize(
    ("code", "passed", "status", "cause"),
    [
        ("def double(x): return x * x", (0, 1, 1), "failed", "test 0: AssertionError"),
        ("def double(x): return 2 // x", (1, 0, 0), "failed", "test 1: AssertionError"),
        ("def double(x): return None", (0, 0, 0), "failed", "test 0: AssertionError"),
        ("def triple(x): return x", (0, 0, 0), "failed", "test 0: NameError: name 'double' is"),
        ("def double(x): raise SystemExit(0)", (0, 0, 0), "failed", "test 0: SystemExit: 0"),
        ("def double(", (0, 0, 0), "error", "code: SyntaxError"),
        ("1 / 0", (0, 0, 0), "error", "code: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", (0, 0, 0), "error", "code: SystemExit: 0"),
        ("import os; os._exit(0)", (0, 0, 0), "exited", "ended before its tests did (exit status"),
        (f"{RIGHT}\nimport os; os.kill(os.getpid(), 9)", (0, 0, 0), "died", "killed by signal 9"),
        ("x = [0] * 10**10", (0, 0, 0), "memory", "code: MemoryError"),
        ("def double(x): return bytearray(10**10)", (0, 0, 0), "memory", "test 0: MemoryError"),
        ("import os\nwhile True: os.fork()", (0, 0, 0), "processes", "code: BlockingIOError"),
        ("while True: print('x' * 1000)", (0, 0, 0), "output", "too much output"),
        (
            "import threading, time\n"
            "while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            (0, 0, 0),
            "processes",
            "code: RuntimeError: can't start new thread",
        ),
    ],
)
def test_code_that_does_not(
    run: Run, code: str, passed: tuple[int, ...], status: str, cause: str
) -> None:
    tested = run(code, ASSERTS)
    assert tested.passed == tuple(map(bool, passed))
    assert tested.status == status
    assert tested.cause.startswith(cause)
    assert "\n" not in tested.cause
    assert tested.share == sum(passed) / 3


@needs_bubblewrap
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_what_passed_before_the_time_was_up_counts(isolation: Isolation) -> None:
    sandbox = Sandbox(Limits(timeout=2.0))
    code = "def double(x):\n    while x == 2: pass\n    return 2 * x"
    assert run_tests(sandbox, code, ASSERTS, isolation=isolation) == Checked(
        (True, False, False), "timeout", "out of time"
    )


@needs_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        # Words, statuses and early ends that look like success.
        "def double(x): print('passed', flush=True); __import__('os')._exit(0)",
        "print('passed')\nimport os\nfor n in range(3, 30):\n"
        "  try: os.write(n, b'passed\\n')\n  except OSError: pass\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
        # Builtins that the tests use, taken over at once or when called.
        "import builtins\nbuiltins.abs = lambda x: 4\ndef double(x): return 2 * x if x < 2 else -5",
        "import builtins\ndef double(x):\n"
        "  builtins.abs = lambda x: 4\n  return 2 * x if x < 2 else -5",
        # What the harness uses, taken over.
        "import os, builtins\nos._exit = os.write = builtins.exec = builtins.compile = print\n"
        "def double(x): return 0",
        "import builtins\n"
        "builtins.enumerate = builtins.list = lambda *a: [(n, '') for n in range(3)]\n"
        "builtins.vars = builtins.dict = lambda *a: {}\ndef double(x): return 0",
        "def __exit__(*a): return True\n__builtins__['AssertionError'] = None\n"
        "def double(x): return 0",
        # A child that is asked to go on, while the parent ends.
        "import os\nif os.fork(): os._exit(0)\ndef double(x): return 2 * x",
        "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\n"
        "def double(x): return 0 if child else 2 * x",
        # What came by the standard input is gone, and no file of it is open.
        "import os\nfor n in os.listdir('/proc/self/fd'):\n"
        "  try: print(open(f'/proc/self/fd/{n}', 'rb').read(0))\n  except OSError: pass\n"
        "assert not __import__('sys').stdin.read()\ndef double(x): return 0",
        "import sys\ndef double(x): return 0\nsys.settrace(lambda *a: None)",
    ],
)
def test_cheap_cheats_do_not_pass(sandbox: Sandbox, code: str) -> None:
    """In one interpreter; cheats.py tries the like with two processes."""
    tested = run_tests(sandbox, code, ASSERTS, isolation="shared")
    assert tested.status != "passed"
    assert not all(tested.passed)
    assert tested.cause


MODULES = "import math, unittest\nassert math.isclose(double(2), 4)\n" + (
    "unittest.TestCase().assertEqual(double(3), 6)"
)


@needs_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        "import math\nmath.isclose = lambda *a, **k: True",
        "import sys, types\nsys.modules['math'] = types.SimpleNamespace(isclose=lambda *a: True)",
        "import sys\ndel sys.modules['math']\nimport math\nmath.isclose = lambda *a: True",
        "import math\nclass Odd(type(math)):\n"
        "  def __getattribute__(self, name): return lambda *a: True\nmath.__class__ = Odd",
        "import __main__, math, builtins\nmath.isclose = lambda *a: True\n"
        "for name in ('vars', 'object', 'type', 'sys', '_keep', 'dict'):\n"
        "  setattr(__main__, name, print)",
    ],
)
def test_modules_that_the_tests_import_are_as_they_were(run: Run, code: str) -> None:
    wrong = "\nimport unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
    wrong += "def double(x): return 0"
    tests = ["import math\nassert math.isclose(double(2), 4)", MODULES]
    assert not any(run(code + wrong, tests).passed)


@needs_bubblewrap
def test_what_modules_are_made_of_is_put_back_too(sandbox: Sandbox) -> None:
    run = partial(run_tests, sandbox, isolation="shared")
    tests = "import unittest, fractions\nunittest.TestCase().assertEqual(double(3), 6)"
    for code in (
        # A class's attribute, one that it did not have, and a module's own name for a builtin.
        "unittest.TestCase.assertEqual = lambda *a: None",
        "unittest.TestCase.__getattribute__ = lambda *a: print",
        "unittest.case.type = lambda one: dict\n"
        "unittest.case.getattr = lambda *a: lambda *b, **more: None",
        "unittest.case.TestCase._getAssertEqualityFunc = lambda *a: print",
    ):
        tested = run(f"import unittest\n{code}\ndef double(x): return 0", tests)
        assert tested.cause == "test 0: AssertionError: 0 != 6", code
    # What a right answer does to them is no hindrance.
    code = "import fractions, xml.etree.ElementTree\nfractions.mine = 2\n"
    code += "def double(x): return fractions.mine * x + 0 * len(xml.etree.ElementTree.__name__)"
    tests = "import xml, random\n" + tests
    assert run(code, tests).cause == ""


@needs_bubblewrap
def test_builtin_is_the_codes_only_if_nothing_else_is(run: Run) -> None:
    wrong = "set = lambda *a: 0\ndef double(x): return 0"
    assert run(wrong, "assert set([double(1)]) == set([2])").status == "failed"
    # Names that the tests make themselves are not the code's.
    own = "import math\ndef same(a, *b):\n    for n in b: assert n == a, math.e\nsame(4, sum(1, 3))"
    assert run("def sum(a, b): return a + b", own).cause == ""


@needs_bubblewrap
def test_what_the_tests_of_other_programs_become(run: Run) -> None:
    case = (
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(double(1), 2)\n"
    )
    suite = "unittest.defaultTestLoader.loadTestsFromTestCase(T)"
    runner = f"{case}assert unittest.TextTestRunner().run({suite}).wasSuccessful()"
    pytests = "import asyncio\nasync def test_it(): assert double(1) == 2\nasyncio.run(test_it())"
    debug = f"{case}T('test').debug()"
    looked_up = "def test_it(): assert double(1) == 2\nfor n in [*globals()]:\n"
    looked_up += "    if n.startswith('test'): globals()[n]()"
    for tests in (runner, pytests, debug, looked_up):
        assert run(RIGHT, tests).cause == "", tests
        assert run("def double(x): return 0", tests).status == "failed", tests


@needs_bubblewrap
@pytest.mark.parametrize(
    "tests",
    [
        # typing's entries in sys.modules are not all modules.
        "from typing import List\nassert double(1) == 2",
        ["def test_it():\n    assert double(1) == 2", "test_it()"],
        "import sys\nif double(1) != 2: sys.exit(1)",
        "def case(f):\n    f()\n    return f\n@case\ndef test_it(): assert double(1) == 2",
    ],
)
def test_other_forms_of_tests(run: Run, tests: Any) -> None:
    assert run(RIGHT, tests).status == "passed"
    assert run("def double(x): return x", tests).status != "passed"


@needs_bubblewrap
def test_a_list_may_hold_tests_of_both_kinds(run: Run) -> None:
    check = "def check(candidate):\n    assert candidate(3) == 6"
    assert run(RIGHT, [ASSERTS[0], check, ASSERTS[1]], "double").passed == (True,) * 3
    wrong = "def double(x): return 6"
    assert run(wrong, [ASSERTS[0], check], "double").passed == (False, True)
    wrong = "def double(x): return 2"
    assert run(wrong, [ASSERTS[0], check], "double").passed == (True, False)
    assert run(wrong, f"from completion import double\n{ASSERTS[0]}").passed == (True,)
    wrong = "def double(x): return 6"
    assert run(wrong, [f"{check}\ncheck(double)"]).passed == (True,)
    assert run(RIGHT + "assert 0", [f"{check}\ncheck(double)"]).passed == (False,)


@needs_bubblewrap
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_tests_with_too_much_output_do_not_count(isolation: Isolation) -> None:
    # Little enough to lie in Python's own buffer until the tests are over.
    sandbox = Sandbox(Limits(timeout=60.0, output_kb=1))
    code = "def double(x):\n    print('x' * 1000)\n    return 2 * x"
    assert run_tests(sandbox, code, ASSERTS, isolation=isolation) == Checked(
        (False,) * 3, "output", "too much output"
    )


@needs_bubblewrap
def test_a_function_may_have_a_builtins_name(run: Run) -> None:
    code = "def sum(a, b): return a - b\ndef len(x): return 7"
    assert run(code, "assert sum(3, 1) == 2", "sum").status == "passed"
    assert run(code, "assert sum(3, 1) == 2").status == "passed"
    # Where the function under test is named, other builtins are the tests' own.
    assert run(code, "assert len([]) == 0", "sum").status == "passed"
    assert run(code, "assert len([]) == 0").status == "failed"
    tested = run(code, "assert 1", "total")
    assert (tested.status, tested.cause) == ("error", "code: no function 'total'")


@needs_bubblewrap
def test_chance_is_the_same_each_time(run: Run) -> None:
    code = "import random\nword = str(random.random()) + str({'a', 'b', 'c'})\nassert 0, word"
    causes = {run(code, "assert 1").cause for _ in range(3)}
    assert len(causes) == 1


@needs_bubblewrap
@pytest.mark.parametrize(
    "tests",
    [
        "n = f(100)\nif n == 0: 1 / 0\n"
        + "".join(f"elif n == {at}: assert at\n" for at in range(1, 100))
        + "else: assert f(n) == 100",
        f"assert f(0x{'f' * 6000}) > 0x{'e' * 6000} and (0x{'f' * 6000}).bit_length() == f(24000)",
        f"assert f(1500) == {'+'.join('1' * 1500)}",
        "from __future__ import annotations\nn: é = 'é'; assert f(n) == n\nassert f(1) == 1",
        "def other(x):\n\treturn x\r\n@other\ndef é(n): 'é'; assert f(n) == n\né(2)",
        "n = f(2)\nif(n == 1): 1 / 0\nelif[] or f(0): 1 / 0\nelif(n) == 2 if n else 3: f(2)\n"
        "else: 1 / 0",
        "match f(2):\n    case 1: raise ValueError\n    case _: assert f(3) == 3",
        "try: f()\nexcept TypeError: pass\nelse: raise ValueError\nfinally: assert f(3) == 3",
    ],
)
def test_tests_run_as_they_are_written(run: Run, tests: str) -> None:
    assert run("def f(x): return x", tests).cause == ""
    assert run("def f(x): return 7.5", tests).status == "failed"


@needs_bubblewrap
@pytest.mark.parametrize("before", ["", "random.seed(0)\n", "random.seed('0')\n"])
def test_the_chance_of_tests_is_not_the_codes(run: Run, before: str) -> None:
    code = f"import random\n{before}def guess(n): return random.randrange(n)"
    tests = "import random\nassert guess(1) == 0\nassert guess(10**9) == random.randrange(10**9)"
    assert run(code, tests).cause == "test 0: AssertionError"


@needs_bubblewrap
@pytest.mark.parametrize(
    ("code", "tests", "cause"),
    [
        # Arguments changed in place are changed for the tests if the call returns None.
        ("def f(x): x.sort()", "n = [3, 1]\nassert f(n) is None and n == [1, 3]", ""),
        ("def f(x): x['a'].append(1)", "n = {'a': []}\nf(n)\nassert n == {'a': [1]}", ""),
        ("def f(x): x[0].add(1)", "n = (set(), 2)\nf(n)\nassert n == ({1}, 2)", ""),
        ("def f(*, x): x += b'a'", "n = bytearray()\nf(x=n)\nassert n == b'a'", ""),
        (
            "def f(x): x.sort(); return x",
            "n = [3, 1]\nassert f(n) == [1, 3]\nassert n == [3, 1]",
            "",
        ),
        (
            "def f(x): x.append(f)",
            "f([])\nassert True",
            "test 0: TypeError: what f returns or leaves in an argument is or holds a function",
        ),
        ("def f(x): x.append(x)", "f([])", "test 0: TypeError: what f returns or leaves in an arg"),
        # The code's own state keeps to its process.
        ("def f(x, y=[]): y.append(x); return y", "assert f(1) == [1] and f(2) == [1, 2]", ""),
        # Exceptions keep their class and their arguments.
        (
            "class Own(KeyError): pass\ndef f(): raise Own('a', 1)",
            "try: f()\nexcept KeyError as e: assert e.args == ('a', 1) and type(e) is KeyError\n"
            "else: assert 0",
            "",
        ),
        (
            "def f(): raise ValueError('no')",
            "import unittest\nt = unittest.TestCase()\n"
            "with t.assertRaisesRegex(ValueError, 'no'): f()",
            "",
        ),
        ("def f(): raise ValueError('no')", "f()", "test 0: ValueError: no"),
        # Iterators are read item by item.
        (
            "def f():\n    n = 0\n    while True:\n        yield (n := n + 1)",
            "from itertools import islice\nassert [*islice(f(), 3)] == [1, 2, 3]",
            "",
        ),
        ("def f(): yield 1; raise KeyError(2)", "[*f()]", "test 0: KeyError: 2"),
        ("def f(): return map(str, [1])", "a = f()\nassert next(a) == '1' and [*a] == []", ""),
        ("def f(): yield len", "[*f()]", "test 0: TypeError: what f returns is or holds a builtin"),
        # Names that are no functions.
        ("N = {'a': (1, 2.5)}\ndef f(): return 1", "assert N == {'a': (1, 2.5)} and f()", ""),
        (
            "import math\ndef f(): return 1",
            "assert math.pi",
            "test 0: NameError: name 'math' is not",
        ),
        (
            "class F:\n    def g(self): return 1",
            "assert F().g() == 1",
            "test 0: TypeError: what F returns is or holds a F, which JSON cannot carry; see the",
        ),
        # A test cannot pass by the exception of a value that cannot cross.
        (
            "def f(x): return 1",
            "try: f(object())\nexcept TypeError: pass",
            "test 0: TypeError: an argument of f is or holds a object, which JSON cannot carry",
        ),
        (
            "def f(): return object()",
            "try: f()\nexcept TypeError: pass",
            "test 0: TypeError: what f returns is or holds a object, which JSON cannot carry",
        ),
        # State stays between calls, and the code cannot know the chance of its tests.
        ("n = []\ndef f(): n.append(1); return len(n)", "assert [f(), f()] == [1, 2]", ""),
        (
            "import random\ndef f(): return random.random()",
            "import random\nassert f() == random.random()",
            "test 0: AssertionError",
        ),
    ],
)
def test_what_crosses_between_code_and_tests(
    sandbox: Sandbox, code: str, tests: str, cause: str
) -> None:
    found = run_tests(sandbox, code, tests)
    assert found.cause.startswith(cause)
    assert (found.status == "passed") == (not cause)


@needs_bubblewrap
def test_nothing_that_separates_lines_splits_a_message(run: Run) -> None:
    for mark in ("\n", "\r\n", "\x1c", "\u2028"):
        words = f"a{mark}garbled{mark}b"
        code = f"def f(x):\n  print({words!r})\n  if x is None: raise ValueError({words!r})\n"
        found = run(f"{code}  return x", f"assert f({words!r}) == {words!r}")
        assert (found.status, found.cause) == ("passed", "")
        found = run(f"{code}  return x", ["f(None)", f"f({words!r})"])
        assert found == Checked((False, True), "failed", "test 0: ValueError: a garbled b")
        found = run(f"{code}f(None)", "f(1)")
        assert (found.status, found.cause) == ("error", "code: ValueError: a garbled b")
        found = run(RIGHT, read_tests("assert double(1)", None, setup=f"raise KeyError({mark!r})"))
        assert (found.status, found.cause.count("\n")) == ("failed", 0)


@needs_bubblewrap
def test_what_the_weaker_isolation_is_for(sandbox: Sandbox) -> None:
    code = "class F:\n    def g(self, h): print('a'); return h(1)"
    tests = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n"
    tests += "    assert F().g(lambda n: n + 1) == 2\nassert out.getvalue() == 'a\\n'"
    assert run_tests(sandbox, code, tests, isolation="shared").cause == ""
    assert run_tests(sandbox, code, tests).status == "failed"


@needs_bubblewrap
def test_set_up_code(run: Run) -> None:
    setup = ["import math", "def near(a, b): return math.isclose(a, b)"]
    read = read_tests(["assert near(double(2), 4)", "assert math.pi"], None, setup=setup)
    assert run(RIGHT, read).passed == (True, True)
    # What it defines is the tests' own.
    wrong = "def near(a, b): return True\ndef double(x): return 0"
    assert run(wrong, read).passed == (False, True)
    # It sees what the code defines, as MBPP's does.
    read = read_tests("assert n == 4", None, setup="n = double(2)")
    assert run(RIGHT, read).status == "passed"
    assert run("def double(x): return x", read).status == "failed"
    found = run(RIGHT, read_tests("assert double(1)", None, setup="1 / 0"))
    assert (found.status, found.cause) == ("failed", "setup: ZeroDivisionError: division by zero")
    for setup, words in (("x =", "set-up code 'x =' is not Python"), ([5], "set-up code 5 is not")):
        with pytest.raises(KeelError, match=words):
            read_tests("assert f()", None, setup=setup)  # type: ignore[arg-type]


def test_what_the_tests_use_of_a_prompt() -> None:
    prompt = "import math, os\nN = 3\ndef helper(x):\n    return math.ceil(x) + N\n"
    prompt += "def other(): pass\ndef f(x):"
    check = "def check(f):\n    assert helper(f(1)) == 2"
    helpers = read_tests(check, "f", prompt=prompt).helpers
    assert helpers == ("import math, os\nN = 3\ndef helper(x):\n    return math.ceil(x) + N")
    assert read_tests(check, "f", prompt="Write helper and f.").helpers == ""
    assert read_tests("assert helper(f(1))", None, prompt=prompt).helpers == ""
    own = f"def helper(x): return x\n{check}"
    assert read_tests(own, "f", prompt=prompt).helpers == ""
    assert not read_tests(check, "f").alone


@pytest.mark.slow
@needs_bubblewrap
def test_humaneval(sandbox: Sandbox) -> None:
    """All canonical solutions pass; with their last return made None, or one number off, none."""
    every = problems()
    assert len(every) == 164

    def judged(case: tuple[dict[str, Any], str]) -> tuple[str, str]:
        problem, program = case
        name, prompt = problem["entry_point"], problem["prompt"]
        read = read_tests(problem["test"], name, prompt=prompt)
        return problem["task_id"], run_tests(sandbox, program, read).status

    right = [(one, one["prompt"] + one["canonical_solution"]) for one in every]
    found = in_threads(judged, right, 2)
    assert [one for one in found if one[1] != "passed"] == []
    idle = [(one, one["prompt"] + "    return None\n") for one in every[::8]]
    found = in_threads(judged, idle, 2)
    assert [one for one in found if one[1] != "failed"] == []


@needs_bubblewrap
@pytest.mark.slow
def test_mutants_fare_alike_in_both_isolations(sandbox: Sandbox) -> None:
    """A sample; `studies/code_isolation.py` tries several of each."""
    passed = []
    for problem in problems()[3::16]:
        read = read_tests(problem["test"], problem["entry_point"], prompt=problem["prompt"])
        program = problem["prompt"] + problem["canonical_solution"]
        for mutant in mutants(program, problem["entry_point"], 2, seed=0):
            ends = [
                run_tests(sandbox, mutant, read, isolation=isolation).status == "passed"
                for isolation in ISOLATIONS
            ]
            assert ends[0] == ends[1], mutant
            passed.append(ends[0])
    assert len(passed) == 22
    assert sum(passed) < 8  # what the tests do not notice


@needs_bubblewrap
def test_without_the_prompt_a_helper_is_the_codes(sandbox: Sandbox) -> None:
    (problem,) = (one for one in problems() if one["task_id"] == "HumanEval/32")
    program = problem["prompt"] + problem["canonical_solution"]
    assert run_tests(sandbox, program, problem["test"], problem["entry_point"]).cause == ""


def test_what_are_no_tests() -> None:
    case = "class T(TestCase):\n    def test(self): assert f()\n"
    for tests, words in (
        ([], "empty list"),
        ("", "tests nothing"),
        ("x = 1", "tests nothing"),
        ("assert (", "is not Python"),
        (["assert f(1)", "def g(): pass"], "'def g.* tests nothing"),
        ("def check(f): assert f()", "entry_point"),
        ("def check(f): return 1", "tests nothing"),
        # Asserts and calls that do not run.
        ("def g(): assert f()", "tests nothing"),
        ("g = lambda: f()", "tests nothing"),
        ("if __name__ == '__main__': f()", "tests nothing"),
        ("class A:\n    def g(self): assert f()", "tests nothing"),
        ("async def g(): assert f()\ng()", r"does not await it: use asyncio.run\(g\(\)\)"),
        ("async def test_g(): assert f()\ntest_g()", "does not await it"),
        ("def test_f(): assert f()", "defines test_f but never calls it: add the call"),
        ("assert f()\ndef test_f(): assert f(1)", "defines test_f but never calls it"),
        ("class TestF:\n    def test_f(self): assert f()", "defines TestF but never calls it"),
        ("async def test_f(): assert f()", "defines test_f but never calls it"),
        # A decorator of another's calls nothing.
        ("import pytest\n@pytest.mark.slow\ndef test_f(): assert f()", "never calls it"),
        ("def check(f): assert f()\nif __name__ == '__main__': check(f)", "entry_point"),
        (case, "defines the TestCase T, but raises nothing.*TestCase.T..*wasSuccessful"),
        (f"{case}TextTestRunner().run(T('test'))", "raises nothing"),
        (f"{case}if __name__ == '__main__': unittest.main()", "raises nothing"),
        (f"{case}assert f()\nunittest.main(exit=False)", "calls unittest.main, which"),
        (None, "the test None is not text"),
        ([None], "the test None is not text"),
        (5, "the test 5 is not text"),
        ({"a": 1}, "is not text"),
        (b"assert f()", "is not text"),
    ):
        with pytest.raises(KeelError, match=words) as raised:
            read_tests(tests, None)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)


def test_what_is_read_of_tests() -> None:
    check = "def check(f): assert f()"
    assert read_tests(check, "f") == UnitTests((check,), (True,), (), False, "f")
    method = read_tests(check, "Solution().twoSum")
    assert (method.entry_point, wanted_names(method)) == ("twoSum", {"Solution"})
    with pytest.raises(KeelError, match=r"the entry point .* is not Python"):
        read_tests(check, "a b.c")
    assert read_tests(["assert f()", "g()"], None).checks == (False, False)
    assert read_tests(f"{check}\ncheck(f)", None).checks == (False,)
    assert read_tests("if __name__ == 'main': f()\nelse: g()", None).checks == (False,)
    many = "import a.b as c, d\nfrom e.f import g\nfrom . import h\nassert c(d)"
    assert read_tests(many, None).imports == ("a.b", "d", "e.f", "e.f.g")
    for tests, shadow in (
        ("assert sum(1, 2) == 3", True),
        ("import math\nassert math.ceil(sum(1.5, 1)) == 3", True),
        ("for n in range(3): assert sum(n, 1) == n + 1", True),
        ("try: sum(1)\nexcept TypeError as e: assert str(e)", True),
        ("assert sum(f(1), 2) == 3", False),
        (["assert sum(1, 2) == 3", "f()"], False),
    ):
        assert read_tests(tests, None).shadow is shadow, tests
        assert not read_tests(tests, "sum").shadow
    # Deep nesting is no error of its own.
    assert read_tests("assert f() == " + "+".join("1" * 1500), None).checks == (False,)


@needs_bubblewrap
def test_code_imports_what_this_interpreter_does(run: Run) -> None:
    """The sandbox's interpreter starts without the module `site`, and is given its results."""
    command = [sys.executable, "-P", "-s", "-c", "import sys; print(sys.path, sys.prefix)"]
    plain = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment("/tmp")
    ).stdout.strip()
    code = "import sys, numpy\ndef seen(): return f'{sys.path} {sys.prefix}'"
    assert run(code, [f"assert seen() == {plain!r}", "assert callable(exit)"]).cause == ""
