"""Hostile answers, against every scorer that is more than a comparison of strings.

Each answer is scored by each: it reaches no file and no process, does not change the verdicts on
the answers after it, and is worth nothing much, in bounded time.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.data.gym import PREFIX, GymProcess, GymTask, gym_installed
from keel.data.gym_worker import COMPARING
from keel.data.tasks import Presentation
from keel.graders.answers import final_answer, stated_number
from keel.graders.formats import answer_part, before_stop, has_tags, tag_content
from keel.graders.mathematics import Mathematics
from keel.graders.numbers import read_number
from keel.platform.sandbox import Resident
from keel.rewards.judge_questions import Cost, Question, StoredAnswer, parse
from keel.types import KeelError, Prompt
from tests.data.made import completion
from tests.platform.processes import descendants, gone
from tests.shared import needs_bubblewrap

TABLE = tomllib.loads(Path(__file__).with_name("hostile.toml").read_text("utf-8"))
SCORERS: list[str] = [*TABLE["evaluated"], *TABLE["parsed"]]
"""Data sets whose scorers evaluate or parse the answer."""
REACHING: dict[str, str] = TABLE["reaching"]
HEAVY = {
    "power": "9**9**9",
    "tower": "9**9**9**9",
    "negative power": "2**-9**9**9",
    "symbol power": "(x+1)**999999999",
    "factorial": "factorial(10**9)",
    "factorials": "9!!!!!!",
    "digits": "9" * 5000,
    "exponent": "1e999999999",
    "negative exponent": "1e-999999999",
    "moves": "F999999999",
    "nan": "nan",
    "json nan": "[NaN, NaN, NaN]",
    "infinity": "inf",
    "list": "[" * 20_000 + "]" * 20_000,
    "braces": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "brackets": "(" * 20_000 + "1" + ")" * 20_000,
    "minuses": "-" * 20_000 + "1",
    "nots": "¬" * 20_000 + "P",
    "sum": "+".join(["1"] * 5_000),
    "letters": "a" * 50_000 + "!",
    "blanks": " " * 50_000 + "x",
    "commas": "," * 50_000,
    "null": "\x00",
    "surrogate": "\ud800",
}


@pytest.fixture(scope="module")
def process() -> GymProcess:
    if not gym_installed():
        pytest.skip("reasoning-gym is not installed")
    return GymProcess()


@pytest.fixture(scope="module")
def tasks(process: GymProcess) -> dict[str, GymTask]:
    return {n: GymTask(PREFIX + n, 0, Presentation(), {}, process) for n in SCORERS}


def prompt(task: GymTask) -> Prompt:
    """The first item whose answer is none of the small numbers that hostile answers hold."""
    items = (task.prompt("train", index) for index in range(100))
    return next(item for item in items if task.gold(item) not in ("0", "0.0", "1", "2", "8", "9"))


def score(task: GymTask, text: str) -> float:
    return task.score(prompt(task), completion(text))


@pytest.mark.quick("chain_sum")
@needs_bubblewrap
@pytest.mark.parametrize("name", SCORERS)
def test_no_answer_reaches_anything_or_earns(
    name: str, tasks: dict[str, GymTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.data.gym.SCORE_SECONDS", 1.0)
    task = tasks[name]
    gold = task.gold(prompt(task))
    wrong = score(task, "")
    assert task.process.process.child is not None
    pid, before = task.process.process.child.pid, descendants(task.process.process.child.pid)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        known = {"marker": str(tmp_path / "marker"), "port": server.getsockname()[1]}
        reaching = [text.format(**known) for text in REACHING.values()]
        for text in (*reaching, *HEAVY.values()):
            assert 0.0 <= score(task, text) < 0.75, text[:60]
            assert not list(tmp_path.iterdir()), text[:60]
        with pytest.raises(BlockingIOError):
            server.accept()
    assert score(task, "") == wrong
    if gold is not None:
        assert score(task, gold) == 1.0
    assert task.process.process.child.pid == pid  # no answer ended what scores the others
    assert gone(descendants(pid) - before) == set()


@needs_bubblewrap
def test_every_data_set_is_compared_or_has_a_fork(process: GymProcess) -> None:
    """Those that are compared in the worker are known by name; all others are forked for."""
    assert not set(SCORERS) & COMPARING
    known = set(process.ask(120.0, op="names"))
    assert {*SCORERS, *COMPARING} <= known


@needs_bubblewrap
def test_a_composite_of_data_sets_evaluates_nothing_either(
    process: GymProcess, tmp_path: Path
) -> None:
    for name in ("string_insertion", "countdown"):
        options = {"datasets": [{"name": name, "weight": 1.0}]}
        task = GymTask(f"{PREFIX}composite", 0, Presentation(), options, process)
        for text in (f"open('{tmp_path}/x', 'w')", "9**9**9"):
            assert score(task, text) < 0.5
        assert score(task, str(task.gold(prompt(task)))) == 1.0
    assert not list(tmp_path.iterdir())


@needs_bubblewrap
def test_numbers_that_are_none_equal_nothing(tasks: dict[str, GymTask]) -> None:
    task = tasks["number_sorting"]
    count = len(str(task.gold(prompt(task))).split(","))
    for item in ("NaN", '"nan"', '"\\u006ean"'):
        assert score(task, "[" + ", ".join([item] * count) + "]") == 0.0
    assert score(tasks["complex_arithmetic"], "nan") == 0.0
    assert score(tasks["complex_arithmetic"], "nan+nani") == 0.0


@needs_bubblewrap
def test_an_expression_uses_the_numbers_that_it_shows(tasks: dict[str, GymTask]) -> None:
    task = tasks["countdown"]
    metadata = prompt(task).columns["metadata"]
    zeros, target = "+".join(map(str, metadata["numbers"])), str(metadata["target"])
    for hidden in (hex(metadata["target"]), f"{target[0]}_{target[1:]}"):
        assert score(task, f"{hidden} # {zeros}") < 0.5
        assert score(task, f"{hidden} + ({zeros}) - ({zeros})") < 0.5
    assert score(tasks["puzzle24"], "8*3 # 1 2") < 0.5
    integral = tasks["simple_integration"]
    integrand = prompt(integral).columns["metadata"]["integrand"]
    variable = prompt(integral).columns["metadata"]["variable"]
    assert score(integral, f"integrate({integrand}, {variable})") == 0.0


@pytest.mark.slow
def test_texts_are_read_in_time_near_their_length() -> None:
    """Numbers, tags and languages, which are read in this process: no recursion, no ReDoS."""
    texts = [*HEAVY.values(), *REACHING.values(), "<answer>" * 20_000, "#### " * 20_000]
    texts += ["1," * 20_000, "\\frac{1" * 10_000, "\\boxed{" * 10_000, "$" * 50_001, "`" * 50_001]
    texts += [
        "\\boxed{1}" + "\n{" * 50_000 + "\\boxed{2}",
        "#### 1\n" + "\n{" * 50_000 + "#### 2",
        "The answer is 5" + " as" * 50_000 + ",x",
        "The answer is 5" + " ()" * 50_000 + "x",
        "The answer is 5 a" + "\u0301\u0323" * 50_000,
        "The answer is 5" + " ()" * 1_300 + "x",
        "1 " * 50_000,
    ]
    texts += [
        *("9" * 1_000_000, "1e999999999", "1," * 50_000, "-" * 100_000, "1 1/2 " * 50_000),
        *("\\boxed{" * 20_000, "\\boxed{" * 20_000 + "}" * 20_000, "\\boxed{}" * 20_000),
        *("#### x\n" * 50_000, "#### Step 1\n" * 30_000, "answer: ?" * 30_000, "$" * 100_000),
        *("the answer is " * 20_000, "1 " * 100_000, "**" * 50_000, "= " * 50_000, "9**9**9"),
        *("\\boxed{1} or " * 10_000, "\\[" * 50_000, "(" * 100_000, "²" * 100_000, ". " * 50_000),
        *(r"\boxed{" + "9" * 1_000_000 + "}", r"\boxed{" + "a" * 100_000 + "=1}"),
        *(r"\boxed{9^{9^{9}}}", "#### " + " " * 100_000 + "x", "is " * 30_000, "\n" * 100_000),
        *("$" + "\n" * 50_000 + "x", "1" + " " * 100_000 + "x", "so 1, " * 30_000, "3 + " * 30_000),
        *("# 1\n" * 50_000, r"\boxed{" + "1 + " * 30_000 + "= 2}", "1. - | " * 30_000),
        *("<think>" * 9_000, "</a>" * 9_000, " " * 90_000, "'<" * 40_000, "<" * 90_000),
        *("<|channel|>" * 9_000, "analysis" * 9_000, "\n" * 90_000 + "x"),
    ]
    for text in texts:
        start = time.process_time()
        read_number(text)
        final_answer(text, words=True)
        stated_number(text)
        stated_number(text, evaluated=False)
        tag_content(text, "answer")
        has_tags(text, ("think", "answer"))
        answer_part(text)
        before_stop(text, ["</a>"])
        # Far above what it takes, far below a hang.
        assert time.process_time() - start < 5.0, text[:60]


def test_replies_of_a_judge_are_read_whatever_their_depth_and_numbers() -> None:
    question = Question((), "score", (0, 1, 10))

    def read(text: str) -> int | str | None:
        return parse(StoredAnswer(text, "stop", "", Cost(0, 0, 0.0)), question).value

    for depth in (*range(100, 1100, 7), 100_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            assert read(f'{{"score": {opening * depth}1{closing * depth}}}') is None
            reason = f'"reason": {opening * depth}1{closing * depth}'
            assert read(f'{{"score": 1, {reason}}}') in (1, None)
    for number in ("9" * 5000, "1e999", "-1e999", '1e400, "score": 1', "NaN", "0x1"):
        assert read(f'{{"score": {number}}}') is None
    assert read('{"score": 1, "a": {"b": 1, "b": 1}}') is None
    start = time.process_time()
    for text in ("{", "```json\n", "</think>", '{"score": 1}', "```" + "\n" * 9):
        assert read(text * 50_000) is None
    assert time.process_time() - start < 10.0


@pytest.mark.slow
@needs_bubblewrap
def test_math_verify_reaches_nothing_and_judges_on(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    judge = Mathematics(timeout=1.0)
    gold = "2x + 1"
    assert judge.compare([(gold, "$1 + 2x$")] * 2) == ["same"] * 2
    pids = [p.child.pid for p in judge.processes if p.child is not None]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        known = {"marker": str(tmp_path / "marker"), "port": server.getsockname()[1]}
        texts = [text.format(**known) for text in REACHING.values()] + list(HEAVY.values())
        message = [f"\\boxed{{{text}}}" for text in texts] + [f"${text}$" for text in texts]
        message += [f"\\boxed{{2x + {text}}}" for text in texts]
        message += ["$9^{9^{9}}$", "\\boxed{" * 500, "$x" + "^{x" * 200 + "}" * 200 + "$"]
        try:
            assert "same" not in judge.compare([(gold, text) for text in message])
            verdicts = judge.compare([(gold, "$x + 1 + x$"), (gold, "$2x$")])
            assert verdicts == ["same", "different"]
        finally:
            judge.close()
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not list(tmp_path.iterdir())
    assert len(pids) == 1  # of one distinct pair
    assert [p.child.pid for p in judge.processes[:1] if p.child is not None] == pids


@needs_bubblewrap
def test_math_refuses_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KeelError, match=r"in a sandbox only: .*apt install bubblewrap") as error:
        Mathematics()
    assert "trusted" not in str(error.value)


@pytest.mark.slow
@needs_bubblewrap
def test_a_process_killed_from_outside_scores_nothing_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One kill is made good; that it is killed again and again is an error, not a wrong answer."""
    process = GymProcess()
    task = GymTask(PREFIX + "countdown", 0, Presentation(), {}, process)
    answer = task.gold(prompt(task))
    assert answer is not None
    assert score(task, answer) == 1.0

    def kill() -> None:
        assert process.process.child is not None
        inside = descendants(process.process.child.pid)
        for one in inside:
            os.kill(one.pid, signal.SIGKILL)
        assert gone(inside) == set()

    kill()
    assert score(task, answer) == 1.0
    send = Resident._send

    def killed(self: Resident, what: Mapping[str, Any]) -> None:
        if what.get("op") == "score":
            kill()
        send(self, what)

    monkeypatch.setattr(Resident, "_send", killed)
    with pytest.raises(KeelError, match="killed twice"):
        score(task, answer)


@needs_bubblewrap
def test_an_answer_reads_no_file_of_the_user(tasks: dict[str, GymTask], tmp_path: Path) -> None:
    """The right answer, but only to somebody who may read."""
    task = tasks["countdown"]
    gold = str(task.gold(prompt(task)))
    (tmp_path / "hidden").write_text(gold)
    assert score(task, gold) == 1
    assert score(task, f"eval(open('{tmp_path}/hidden').read())") < 1


@needs_bubblewrap
def test_an_answer_as_a_python_list_is_read(tasks: dict[str, GymTask]) -> None:
    """What the scorers evaluate for: the answer as a list, worth a share."""
    task = tasks["string_insertion"]
    assert 0 < score(task, repr(list(str(task.gold(prompt(task)))))) < 1
