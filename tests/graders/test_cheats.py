"""Code that goes for its tests instead of their task."""

from __future__ import annotations

import pytest

from keel.graders.unit_tests import Checked, Isolation, read_tests, run_tests
from keel.platform.sandbox import Limits, Sandbox
from keel.rewards.code import in_threads
from tests.graders.cheats import CHEATS, SHAPES, Cheat
from tests.shared import needs_bubblewrap

RIGHT = "def double(x):\n    return [2 * n for n in x] if isinstance(x, list) else 2 * x\n"
RIGHT += "def ordered(n):\n    return sorted(n)\n"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(Limits(timeout=60.0))


def judged(sandbox: Sandbox, cheat: Cheat, isolation: Isolation) -> Checked:
    tests, entry_point, prompt = SHAPES[cheat.shape]
    read = read_tests(tests, entry_point, prompt=prompt)
    return run_tests(sandbox, prompt + cheat.code, read, isolation=isolation)


@pytest.mark.slow
@needs_bubblewrap
def test_no_cheat_is_paid_with_separate_processes(sandbox: Sandbox) -> None:
    assert len(CHEATS) >= 60
    found = in_threads(lambda cheat: judged(sandbox, cheat, "process"), CHEATS, 2)
    assert [c.name for c, one in zip(CHEATS, found, strict=True) if any(one.passed)] == []
    assert all(one.status != "passed" and one.cause for one in found)


@needs_bubblewrap
@pytest.mark.parametrize(
    "name",
    [
        "an object that equals everything",
        "a float that is near everything",
        "expected values in the constants of check",
        "secrets by the garbage collector",
        "re's cache",
        "SkipTest",
        "StopIteration ends a loop",
        "a helper of its own",
    ],
)
def test_cheats_are_real_in_the_tests_interpreter(sandbox: Sandbox, name: str) -> None:
    (cheat,) = (cheat for cheat in CHEATS if cheat.name == name)
    assert judged(sandbox, cheat, "shared").status == "passed"


@needs_bubblewrap
@pytest.mark.slow
def test_what_the_cheats_are_tried_on_can_be_passed(sandbox: Sandbox) -> None:
    for shape, (tests, entry_point, prompt) in SHAPES.items():
        if shape in ("raises", "true"):  # no number is both 4 and 5
            continue
        read = read_tests(tests, entry_point, prompt=prompt)
        assert run_tests(sandbox, f"{prompt}\n{RIGHT}", read).cause == "", shape


@needs_bubblewrap
def test_an_argument_is_the_codes_only_in_its_interpreter(sandbox: Sandbox) -> None:
    """As in plain Python; docs/reward-reference.md says how to write the test instead."""
    for name in ("an argument changed in place", "an argument given back"):
        (cheat,) = (cheat for cheat in CHEATS if cheat.name == name)
        weak = "n = [3, 1]\ngot = ordered(n)\nassert got == sorted(n)"
        assert run_tests(sandbox, cheat.code, weak, isolation="shared").status == "passed"
        assert run_tests(sandbox, cheat.code, weak).status == "failed"
