from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from keel.types import KeelError
from keel.verify.sandbox import Limits, Sandbox
from keel.verify.unit_tests import Checked, UnitTests, python_code, read_tests, run_tests
from tests.shared import shared_path
from tests.verify.processes import needs_bubblewrap

ASSERTS = ["assert double(1) == 2", "assert abs(double(2)) == 4", "assert double(0) == 0"]
RIGHT = "def double(x):\n    return 2 * x\n"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(Limits(timeout=60.0))


def problems() -> list[dict[str, Any]]:
    path = shared_path("data/humaneval/HumanEval.jsonl.gz")
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@needs_bubblewrap
def test_code_that_passes(sandbox: Sandbox) -> None:
    assert run_tests(sandbox, RIGHT, ASSERTS) == Checked((True,) * 3, "passed", "")
    assert run_tests(sandbox, RIGHT, "\n".join(ASSERTS)).passed == (True,)
    check = "def check(candidate):\n    assert candidate(3) == 6"
    assert run_tests(sandbox, RIGHT, check, "double").status == "passed"
    # Where tests share names, a later one sees what an earlier one made.
    tests = ["import math\nn = 2\nassert n", "assert double(n) == math.sqrt(16)"]
    assert run_tests(sandbox, RIGHT, tests).passed == (True, True)
    main = f"{RIGHT}\nif __name__ == '__main__':\n    raise SystemExit(input())\n"
    assert run_tests(sandbox, main, ASSERTS).status == "passed"


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
    sandbox: Sandbox, code: str, passed: tuple[int, ...], status: str, cause: str
) -> None:
    tested = run_tests(sandbox, code, ASSERTS)
    assert tested.passed == tuple(map(bool, passed))
    assert tested.status == status
    assert tested.cause.startswith(cause)
    assert "\n" not in tested.cause
    assert tested.share == sum(passed) / 3


@needs_bubblewrap
def test_what_passed_before_the_time_was_up_counts() -> None:
    sandbox = Sandbox(Limits(timeout=2.0))
    code = "def double(x):\n    while x == 2: pass\n    return 2 * x"
    assert run_tests(sandbox, code, ASSERTS) == Checked(
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
        # A child that is told to go on, while the parent ends.
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
    tested = run_tests(sandbox, code, ASSERTS)
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
def test_modules_that_the_tests_import_are_as_they_were(sandbox: Sandbox, code: str) -> None:
    wrong = "\nimport unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
    wrong += "def double(x): return 0"
    tests = ["import math\nassert math.isclose(double(2), 4)", MODULES]
    assert not any(run_tests(sandbox, code + wrong, tests).passed)


@needs_bubblewrap
def test_what_modules_are_made_of_is_put_back_too(sandbox: Sandbox) -> None:
    tests = "import unittest, fractions\nunittest.TestCase().assertEqual(double(3), 6)"
    for code in (
        # A class's attribute, one that it did not have, and a module's own name for a builtin.
        "unittest.TestCase.assertEqual = lambda *a: None",
        "unittest.TestCase.__getattribute__ = lambda *a: print",
        "unittest.case.type = lambda one: dict\n"
        "unittest.case.getattr = lambda *a: lambda *b, **more: None",
        "unittest.case.TestCase._getAssertEqualityFunc = lambda *a: print",
    ):
        tested = run_tests(sandbox, f"import unittest\n{code}\ndef double(x): return 0", tests)
        assert tested.cause == "test 0: AssertionError: 0 != 6", code
    # What a right answer does to them is no hindrance.
    code = "import fractions, xml.etree.ElementTree\nfractions.mine = 2\n"
    code += "def double(x): return fractions.mine * x + 0 * len(xml.etree.ElementTree.__name__)"
    tests = "import xml, random\n" + tests
    assert run_tests(sandbox, code, tests).cause == ""


@needs_bubblewrap
def test_a_builtin_is_the_codes_only_where_nothing_else_can_be(sandbox: Sandbox) -> None:
    wrong = "set = lambda *a: 0\ndef double(x): return 0"
    assert run_tests(sandbox, wrong, "assert set([double(1)]) == set([2])").status == "failed"
    # Names that the tests make themselves are not the code's.
    own = "import math\ndef same(a, *b):\n    for n in b: assert n == a, math.e\nsame(4, sum(1, 3))"
    assert run_tests(sandbox, "def sum(a, b): return a + b", own).cause == ""


@needs_bubblewrap
def test_what_the_tests_of_other_programs_become(sandbox: Sandbox) -> None:
    case = (
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(double(1), 2)\n"
    )
    suite = "unittest.defaultTestLoader.loadTestsFromTestCase(T)"
    run = f"{case}assert unittest.TextTestRunner().run({suite}).wasSuccessful()"
    pytests = "import asyncio\nasync def test_it(): assert double(1) == 2\nasyncio.run(test_it())"
    debug = f"{case}T('test').debug()"
    looked_up = "def test_it(): assert double(1) == 2\nfor n in [*globals()]:\n"
    looked_up += "    if n.startswith('test'): globals()[n]()"
    for tests in (run, pytests, debug, looked_up):
        assert run_tests(sandbox, RIGHT, tests).cause == "", tests
        assert run_tests(sandbox, "def double(x): return 0", tests).status == "failed", tests


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
def test_other_forms_of_tests(sandbox: Sandbox, tests: Any) -> None:
    assert run_tests(sandbox, RIGHT, tests).status == "passed"
    assert run_tests(sandbox, "def double(x): return x", tests).status != "passed"


def test_a_decorator_of_anothers_calls_nothing() -> None:
    marked = "import pytest\n@pytest.mark.slow\ndef test_it(): assert double(1) == 2"
    with pytest.raises(KeelError, match="never calls it"):
        read_tests(marked, None)


@needs_bubblewrap
def test_typing_beside_a_check(sandbox: Sandbox) -> None:
    check = "from typing import List\ndef check(candidate):\n    assert candidate(3) == 6"
    assert run_tests(sandbox, RIGHT, check, "double").status == "passed"


@needs_bubblewrap
def test_a_list_may_hold_tests_of_both_kinds(sandbox: Sandbox) -> None:
    check = "def check(candidate):\n    assert candidate(3) == 6"
    assert (
        run_tests(sandbox, RIGHT, [ASSERTS[0], check, ASSERTS[1]], "double").passed == (True,) * 3
    )
    wrong = "def double(x): return 6"
    assert run_tests(sandbox, wrong, [ASSERTS[0], check], "double").passed == (False, True)
    wrong = "def double(x): return 2"
    assert run_tests(sandbox, wrong, [ASSERTS[0], check], "double").passed == (True, False)
    assert run_tests(sandbox, wrong, f"from completion import double\n{ASSERTS[0]}").passed == (
        True,
    )
    wrong = "def double(x): return 6"
    assert run_tests(sandbox, wrong, [f"{check}\ncheck(double)"]).passed == (True,)
    assert run_tests(sandbox, RIGHT + "assert 0", [f"{check}\ncheck(double)"]).passed == (False,)


@needs_bubblewrap
def test_tests_that_pass_with_too_much_said_do_not_count() -> None:
    # Little enough to lie in Python's own buffer until the tests are over.
    sandbox = Sandbox(Limits(timeout=60.0, output_kb=1))
    code = "def double(x):\n    print('x' * 1000)\n    return 2 * x"
    assert run_tests(sandbox, code, ASSERTS) == Checked((False,) * 3, "output", "too much output")


@needs_bubblewrap
def test_a_function_may_have_a_builtins_name(sandbox: Sandbox) -> None:
    code = "def sum(a, b): return a - b\ndef len(x): return 7"
    assert run_tests(sandbox, code, "assert sum(3, 1) == 2", "sum").status == "passed"
    assert run_tests(sandbox, code, "assert sum(3, 1) == 2").status == "passed"
    # Where the function under test is named, other builtins are the tests' own.
    assert run_tests(sandbox, code, "assert len([]) == 0", "sum").status == "passed"
    assert run_tests(sandbox, code, "assert len([]) == 0").status == "failed"
    tested = run_tests(sandbox, code, "assert 1", "total")
    assert (tested.status, tested.cause) == ("error", "code: no function 'total'")


@needs_bubblewrap
def test_chance_is_the_same_each_time(sandbox: Sandbox) -> None:
    code = "import random\nword = str(random.random()) + str({'a', 'b', 'c'})\nassert 0, word"
    causes = {run_tests(sandbox, code, "assert 1").cause for _ in range(3)}
    assert len(causes) == 1


@needs_bubblewrap
def test_humaneval() -> None:
    """All canonical solutions pass; with their last return made None, or one number off, none."""
    sandbox = Sandbox(Limits(timeout=60.0))
    every = problems()
    assert len(every) == 164
    for problem in every:
        program = problem["prompt"] + problem["canonical_solution"]
        tested = run_tests(sandbox, program, problem["test"], problem["entry_point"])
        assert tested.status == "passed", (problem["task_id"], tested.cause)
    for problem in every[::8]:
        program = problem["prompt"] + "    return None\n"
        tested = run_tests(sandbox, program, problem["test"], problem["entry_point"])
        assert tested.status == "failed", problem["task_id"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\n```py\n  b\n```", "  b\n"),
        ("```python\na\n```\nwhich prints\n```text\nb\n```", "a\n"),
        ("```Python title\na\n", "a\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("s = '```'", "s = '```'"),
        ("```python\na\n```\nOutput:\n```\n5\n```", "a\n"),
        ("```\na\n```\nthen\n```\nb\n```\n```text\nc\n```", "b\n"),
    ],
)
def test_the_code_of_a_text(text: str, code: str) -> None:
    assert python_code(text) == code


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
