from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from keel.config.sources import RewardSource
from keel.rewards import Scorer
from keel.rewards.code import CodeReward, in_threads
from keel.rewards.registry import load_reward
from keel.types import KeelError
from tests.platform.processes import children, eventually
from tests.shared import needs_bubblewrap

ASSERTS = ["assert double(1) == 2", "assert double(2) == 4", "assert double(0) == 0"]
RIGHT = "def double(x):\n    return 2 * x\n"


class Asked:
    """A code reward, and what it logged."""

    def __init__(self, **options: Any) -> None:
        options = {"timeout": 60.0, **options}
        self.reward = load_reward(RewardSource(function="code", options=options))
        self.metrics: dict[str, float] = {}
        self.extras: dict[str, Any] = {}

    def __call__(self, completions: list[Any], **columns: list[Any]) -> list[float | None]:
        assert self.reward.function is not None
        self.metrics.clear()
        message: list[float | None] = self.reward.function(
            completions=completions,
            log_extra=self.extras.__setitem__,
            log_summary=lambda found, summary: self.metrics.update(summary(found)),
            **columns,
        )
        return message

    @property
    def causes(self) -> list[str]:
        causes: list[str] = self.extras["code/cause"]
        return causes


@needs_bubblewrap
def test_rewards() -> None:
    asked = Asked()
    assert asked.reward.required == ("completions", "tests", "log_extra", "log_summary")
    message = [
        f"So:\n```python\n{RIGHT}```\n",
        [{"role": "assistant", "content": RIGHT}],
        "def double(x): return x * x",
        RIGHT,
    ]
    assert asked(message, tests=[ASSERTS, "\n".join(ASSERTS), ASSERTS, None]) == [1, 1, 0, None]
    assert asked.causes == ["", "", "test 0: AssertionError", ""]
    assert asked.metrics == {"code/passed": 2 / 3, "code/failed": 1 / 3}
    assert asked([], tests=[]) == []


@needs_bubblewrap
def test_a_share_of_the_tests() -> None:
    asked = Asked(partial=True, tests="list")
    message = ["def double(x): return x * x", RIGHT, "1 / 0"]
    assert asked(message, list=[ASSERTS] * 3) == [2 / 3, 1, 0]


@needs_bubblewrap
def test_humanevals_columns() -> None:
    asked = Asked(tests="test", entry_point="entry_point", prepend="prompt")
    assert asked.reward.required[1:4] == ("test", "entry_point", "prompt")
    prompt = 'import math\n\n\ndef double(x):\n    """Twice x."""'
    row = {
        "prompt": f"{prompt}\n",
        "entry_point": "double",
        "test": "def check(candidate):\n    assert candidate(2) == 4",
    }
    message = [
        "    return math.ceil(2 * x)\n",
        f"```python\n{RIGHT}```",
        "    return x\n",
        "\nreturn",
    ]
    assert asked(message, **{name: [value] * 4 for name, value in row.items()}) == [1, 1, 0, 0]
    row["prompt"] = prompt
    assert asked(message[1:2], **{name: [value] for name, value in row.items()}) == [1]
    row["prompt"] = prompt + "\n    return"
    assert asked([" 2 * x"], **{name: [value] for name, value in row.items()}) == [1]


@needs_bubblewrap
def test_mbpps_columns() -> None:
    asked = Asked(tests="test_list", setup="test_setup_code")
    assert asked.reward.required[1:3] == ("test_list", "test_setup_code")
    tests = ["assert isclose(area(2), 12.566, rel_tol=1e-3)", "assert area(n) == 0"]
    setups = ["from math import isclose\nn = 0", ["from math import isclose", "n = 0"], "", None]
    message = ["import math\ndef area(r):\n    return math.pi * r * r\n"] * 4
    assert asked(message, test_list=[tests] * 4, test_setup_code=setups) == [1, 1, 0, 0]
    with pytest.raises(KeelError, match="sample 0: the set-up code 'from' is not Python"):
        asked(message[:1], test_list=[tests], test_setup_code=["from"])


@needs_bubblewrap
def test_isolation_shared_puts_code_and_tests_in_one_interpreter() -> None:
    cheat = "class E:\n    def __eq__(self, other): return True\ndef double(x): return E()"
    assert Asked()([cheat], tests=[ASSERTS]) == [0]
    assert Asked(isolation="process")([cheat], tests=[ASSERTS]) == [0]
    assert Asked(isolation="shared")([cheat], tests=[ASSERTS]) == [1]


@needs_bubblewrap
def test_invalid_tests_and_options_stop_before_anything_runs() -> None:
    asked = Asked()
    with pytest.raises(KeelError, match="sample 1: the test 'assert ' is not Python"):
        asked([RIGHT, RIGHT], tests=[ASSERTS, "assert "])
    assert asked.extras == {}
    for options, words in (
        ({"memory_mb": 1}, "memory_mb = 1:"),
        ({"timeout": math.inf}, "timeout = inf: input should be a finite number"),
        ({"workers": 0}, "workers = 0"),
        ({"isolation": "none"}, "isolation = 'none': input should be 'process' or 'shared'"),
        ({"entry_point": "my name"}, "entry_point: 'my name' cannot be an argument's name"),
    ):
        with pytest.raises(KeelError, match=f"reward 'code': {words}"):
            Asked(**options)


@needs_bubblewrap
def test_abandoned_call_ends_all_that_it_runs() -> None:
    asked = Asked(timeout=600.0)
    before, ended = children(), []

    def call() -> None:
        try:
            asked(["while True: pass"] * 9, tests=[ASSERTS] * 9)
        except KeelError as error:
            ended.append(str(error))

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    # Two workers, each with a sandbox for the code and one for its tests.
    assert eventually(lambda: len(children() - before) == 4)
    # Whoever gave it up says so, as the scorer does at its end.
    Scorer([asked.reward]).close()
    calling.join(60.0)
    assert ended == ["stopped before its end"]
    assert children() <= before
    assert asked.extras == {}
    assert asked([RIGHT], tests=[ASSERTS]) == [1]


def test_trusted_code_needs_no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KeelError, match="reward 'code': bubblewrap is not installed"):
        Asked()
    asked = Asked(trusted=True)
    assert asked([RIGHT, "1 / 0"], tests=[ASSERTS, ASSERTS]) == [1, 0]
    assert asked.causes[1] == "code: ZeroDivisionError: division by zero"


def test_threads_keep_the_order_and_stop_at_an_error() -> None:
    assert in_threads(lambda n: n * n, range(50), 4) == [n * n for n in range(50)]
    assert in_threads(str, [], 4) == []
    here = threading.Barrier(3, timeout=60.0)  # passes only if three run at a time
    assert len(in_threads(lambda n: here.wait(), range(3), 3)) == 3
    done: list[int] = []

    def work(n: int) -> None:
        done.append(n)
        if n == 2:
            raise KeelError("two")

    with pytest.raises(KeelError, match="two"):
        in_threads(work, range(1000), 1)
    assert done == [0, 1, 2]


def test_threads_that_are_stopped_begin_no_further_item() -> None:
    done: list[int] = []
    stop = threading.Event()

    def work(n: int) -> None:
        done.append(n)
        if n == 2:
            stop.set()

    with pytest.raises(KeelError, match="stopped"):
        in_threads(work, range(1000), 1, stop)
    assert done == [0, 1, 2]


@needs_bubblewrap
def test_code_in_thoughts_is_not_judged() -> None:
    asked = Asked()
    wrong = "```python\ndef double(x): return x\n```"
    right = f"```python\n{RIGHT}```"
    texts = [
        f"<think>{wrong}</think>{right}",
        f"{wrong}\n</think>\n{right}",
        f"<think>{right}</think>{wrong}",
        f"<think>{right}</think>Done.",
        f"{right} and",
        f"<answer>\n{RIGHT}</answer>",
    ]
    openings = ["", "<think>\n", "", "", "<think>\n", ""]
    assert asked(texts, tests=[ASSERTS] * 6, openings=openings) == [1, 1, 0, 0, 0, 1]
    assert asked.causes[4] == "no code: the completion ends within a thought"


WEAK = {
    "import numpy as np\nassert np.isclose(double(2), [4]).all()": {"[]"},
    "assert not double(1)": {"[]", "None", '""', "0"},
    "assert not double(1) > 2": {"nan", "0"},
    "try: double(1)\nexcept ValueError: pass": {"[]", "nan", "None", '""', "0", "a raise"},
    "assert double(2) == 4": set(),
    "assert sum([1]) == 1": set(),
}


@needs_bubblewrap
@pytest.mark.slow
def test_tests_that_answers_pass_which_solve_nothing() -> None:
    named = {"tests": "def check(f):\n    assert not f(1)", "entry_point": "double"}
    for columns, isolation in (({}, "process"), ({"entry_point": "entry_point"}, "shared")):
        asked = Asked(isolation=isolation, **columns)
        reward = asked.reward.function
        assert isinstance(reward, CodeReward)
        if not columns:
            found = reward.trivial([*({"tests": test} for test in WEAK), {"tests": None}])
            assert [set(one) for one in found] == [*WEAK.values(), set()]
        else:
            assert set(reward.trivial([named])[0]) == {"[]", "None", '""', "0"}
