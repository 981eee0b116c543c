from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
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
TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("code.toml").read_text("utf-8"))
code_of = itemgetter("code")
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
@pytest.mark.parametrize("row", TABLE["failing"], ids=code_of)
def test_code_that_does_not(run: Run, row: dict[str, Any]) -> None:
    tested = run(row["code"], ASSERTS)
    assert tested.passed == tuple(map(bool, row["passed"]))
    assert tested.status == row["status"]
    assert tested.cause.startswith(row["cause"])
    assert "\n" not in tested.cause
    assert tested.share == sum(row["passed"]) / 3


@needs_bubblewrap
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_what_passed_before_the_time_was_up_counts(isolation: Isolation) -> None:
    sandbox = Sandbox(Limits(timeout=2.0))
    code = "def double(x):\n    while x == 2: pass\n    return 2 * x"
    assert run_tests(sandbox, code, ASSERTS, isolation=isolation) == Checked(
        (True, False, False), "timeout", "out of time"
    )


@needs_bubblewrap
@pytest.mark.parametrize("row", TABLE["cheap_cheats"], ids=code_of)
def test_cheap_cheats_do_not_pass(sandbox: Sandbox, row: dict[str, Any]) -> None:
    tested = run_tests(sandbox, row["code"], ASSERTS, isolation="shared")
    assert tested.status != "passed"
    assert not all(tested.passed)
    assert tested.cause


MODULES = "import math, unittest\nassert math.isclose(double(2), 4)\n" + (
    "unittest.TestCase().assertEqual(double(3), 6)"
)


@needs_bubblewrap
@pytest.mark.parametrize("row", TABLE["patched_modules"], ids=code_of)
def test_modules_that_the_tests_import_are_as_they_were(run: Run, row: dict[str, Any]) -> None:
    wrong = "\nimport unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
    wrong += "def double(x): return 0"
    tests = ["import math\nassert math.isclose(double(2), 4)", MODULES]
    assert not any(run(row["code"] + wrong, tests).passed)


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
@pytest.mark.parametrize("row", TABLE["forms"], ids=str)
def test_other_forms_of_tests(run: Run, row: dict[str, Any]) -> None:
    assert run(RIGHT, row["tests"]).status == "passed"
    assert run("def double(x): return x", row["tests"]).status != "passed"


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
@pytest.mark.parametrize("row", TABLE["written"], ids=str)
def test_tests_run_as_they_are_written(run: Run, row: dict[str, Any]) -> None:
    assert run("def f(x): return x", row["tests"]).cause == ""
    assert run("def f(x): return 7.5", row["tests"]).status == "failed"


@needs_bubblewrap
@pytest.mark.parametrize("before", ["", "random.seed(0)\n", "random.seed('0')\n"])
def test_the_chance_of_tests_is_not_the_codes(run: Run, before: str) -> None:
    code = f"import random\n{before}def guess(n): return random.randrange(n)"
    tests = "import random\nassert guess(1) == 0\nassert guess(10**9) == random.randrange(10**9)"
    assert run(code, tests).cause == "test 0: AssertionError"


@needs_bubblewrap
@pytest.mark.parametrize("row", TABLE["crossing"], ids=code_of)
def test_what_crosses_between_code_and_tests(sandbox: Sandbox, row: dict[str, Any]) -> None:
    found = run_tests(sandbox, row["code"], row["tests"])
    assert found.cause.startswith(row["cause"])
    assert (found.status == "passed") == (not row["cause"])


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
    others: list[tuple[Any, str]] = [([], "empty list"), ({"a": 1}, "is not text")]
    others += [(one, f"the test {one!r} is not text") for one in (None, 5, b"x")]
    others += [([None], "the test None is not text")]
    for tests, words in [*((row["tests"], row["words"]) for row in TABLE["no_tests"]), *others]:
        with pytest.raises(KeelError, match=words) as raised:
            read_tests(tests, None)
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
