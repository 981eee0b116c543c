from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from keel.types import KeelError
from keel.verify.sandbox import Limits, Sandbox
from keel.verify.unit_tests import Checked, python_code, read_tests, run_tests
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
    ],
)
def test_the_code_of_a_text(text: str, code: str) -> None:
    assert python_code(text) == code


def test_what_are_no_tests() -> None:
    for tests, words in (
        ([], "empty list"),
        ("", "tests nothing"),
        ("x = 1", "tests nothing"),
        ("assert (", "is not Python"),
        (["assert f(1)", "def g(): pass"], "'def g.* tests nothing"),
        ("def check(f): assert f()", "entry_point"),
    ):
        with pytest.raises(KeelError, match=words):
            read_tests(tests, None)
    assert read_tests("def check(f): assert f()", "f") == (("def check(f): assert f()",), True)
    assert read_tests(["assert f()", "g()"], None) == (("assert f()", "g()"), False)
