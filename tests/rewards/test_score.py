from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from keel.config.sources import RewardSource
from keel.data.mixture import build_task
from keel.rewards import Scorer, load_reward
from keel.rewards.registry import NamedReward
from keel.types import Completion, Group, KeelError, Message, Prompt, Step
from tests.data.made import Listed, completion, source
from tests.platform.processes import run_python
from tests.rewards import functions
from tests.rewards.made import named


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    """Hanging functions end with the test."""
    functions.RELEASE.clear()
    yield
    functions.RELEASE.set()
    time.sleep(0.12)  # the stubborn one looks every 0.05 s


def group(texts: Sequence[str], prompt: Prompt | None = None) -> Group:
    prompt = prompt or Prompt("t/train/0", "say", {"solution": "aa"}, "t")
    return Group(prompt, tuple(completion(text) for text in texts))


def two_groups() -> list[Group]:
    other = Prompt("t/train/1", "go", {"solution": "b"}, "t")
    return [group(["aa", "b", "ccc"]), group(["b"], other)]


def conversation(own: Sequence[str], reply: str) -> Completion:
    """Turns of the policy, a token a character, with the same reply between any two of them."""
    turns = [Message(role="assistant", content=own[0])]
    for text in own[1:]:
        turns += [
            Message(role="environment", content=reply),
            Message(role="assistant", content=text),
        ]
    text = "".join(turn["content"] for turn in turns)
    written = [turn["role"] == "assistant" for turn in turns for _ in turn["content"]]
    return Completion(
        tokens=np.array([ord(c) for c in text], dtype=np.int64),
        log_probs=np.zeros(len(text), dtype=np.float32),
        written=np.array(written),
        finish="eos",
        text="".join(own),
        turns=tuple(turns),
    )


def reward(function: str, /, **keys: Any) -> NamedReward:
    return named(getattr(functions, function), keys.pop("name", None), **keys)


def values(scored: Any) -> list[list[float | None]]:
    return [[v.reward for v in results] for results in scored.results]


# ---------------------------------------------------------------- what functions are handed


def test_functions_get_what_they_name_and_nothing_else() -> None:
    got: dict[str, Any] = {}

    def some(prompts: Any, solution: Any, extra: Any = "default") -> list[float]:
        got.update(locals())
        return [0.0] * 4

    def all_there_is(**kwargs: Any) -> list[float]:
        got["kwargs"] = kwargs
        return [0.0] * 4

    Scorer([named(some), named(all_there_is)])(two_groups(), 12)
    assert got["prompts"] == ["say", "say", "say", "go"]
    assert got["solution"] == ["aa", "aa", "aa", "b"]
    assert got["extra"] == "default"
    kwargs = got["kwargs"]
    assert set(kwargs) == {
        "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
        "solution",
    }  # fmt: skip
    assert kwargs["completions"] == ["aa", "b", "ccc", "b"]
    assert kwargs["completion_ids"] == [[0, 1], [0], [0, 1, 2], [0]]
    assert kwargs["trainer_state"].global_step == 12


def test_arguments_of_a_function_are_copies() -> None:
    def spoils(completions: list[str], solution: list[str]) -> list[float]:
        n = len(completions)
        completions.clear()
        solution[:] = ["x"] * n
        return [0.0] * n

    scored = Scorer([named(spoils), reward("needs_gold")])(two_groups(), 0)
    assert values(scored) == [[1, 0, 0], [1]]

    def deeper(completions: Any, prompts: Any, tests: Any) -> list[float]:
        reported = [len(tests[0]["in"]), len(tests[1]["in"]), len(prompts[0]), len(completions[0])]
        tests[0]["in"].append("more")
        prompts[0].append("more")
        completions[0].append("more")
        return [float(n) for n in reported[:2]] if reported[2:] == [1, 1] else [9.0, 9.0]

    turns = ({"role": "user", "content": "say"},)
    prompt = Prompt("p", turns, {"tests": {"in": ["a"]}})  # type: ignore[arg-type]
    scorer = Scorer([named(deeper, name) for name in ("first", "second")])
    for step in range(2):
        assert values(scorer([group(["a", "b"], prompt)], step)) == [[2.0, 2.0]]
    assert prompt.columns == {"tests": {"in": ["a"]}}


# ---------------------------------------------------------------- what comes out


def test_weights_components_and_metrics() -> None:
    scorer = Scorer([reward("by_length", weight=0.5), reward("needs_gold", weight=2.0)])
    scored = scorer(two_groups(), 1)
    assert values(scored) == [[3.0, 0.5, 1.5], [2.5]]
    assert scored.results[0][0].components == {"by_length": 2.0, "needs_gold": 1.0}
    assert scored.metrics == pytest.approx(
        {
            "rewards/by_length/mean": 7 / 4,
            "rewards/by_length/std": np.std([2, 1, 3, 1], ddof=1),
            "rewards/needs_gold/mean": 0.5,
            "rewards/needs_gold/std": np.std([1, 0, 0, 1], ddof=1),
        }
    )
    assert scored.failures == {}


def test_component_may_have_no_value() -> None:
    groups = [group(["xa", "b"])]
    scored = Scorer([reward("sometimes"), reward("by_length")])(groups, 0)
    assert values(scored) == [[2.0, 2.0]]
    assert scored.results[0][0].components == {"sometimes": None, "by_length": 2.0}
    assert scored.metrics["rewards/sometimes/mean"] == 1.0
    assert "rewards/sometimes/std" not in scored.metrics
    alone = Scorer([reward("sometimes")], overlong_buffer=1, max_tokens=1)(groups, 0)
    assert values(alone) == [[None, 0.0]]  # length alone is no result
    assert alone.results[0][0].components == {"sometimes": None, "overlong": None}


def test_overlong_is_a_component() -> None:
    scorer = Scorer([reward("by_length")], overlong_buffer=2, max_tokens=3)
    scored = scorer([group(["a", "aa", "aaa", "aaaa"])], 0)
    assert [v.components["overlong"] for v in scored.results[0]] == [0.0, -0.5, -1.0, -1.0]
    assert values(scored) == [[1.0, 1.5, 2.0, 3.0]]
    assert scored.metrics["rewards/overlong/mean"] == pytest.approx(-0.625)


def test_relative_length_is_the_loop() -> None:
    """Of rewards above 0 in each group; an answer without a reward is in no mean."""
    texts = (["xa", "aa", "aaaa", "b"], ["ab", "aaaaa", "a"], ["", ""])
    right = {"aa": 1.0, "aaaa": 2.0, "b": -1.0, "xa": None}

    def judged(completions: Any) -> list[float | None]:
        return [right.get(text, 0.0) for text in completions]

    scored = Scorer([named(judged)], length_penalty=0.3)([group(one) for one in texts], 0)
    for one, results in zip(texts, scored.results, strict=True):
        known = [text for text in one if right.get(text, 0.0) is not None]
        solved = max(sum(right.get(t, 0.0) > 0 for t in known), 1) / len(known)  # type: ignore[operator]
        mean = sum(map(len, known)) / len(known)
        for text, result in zip(one, results, strict=True):
            reward = right.get(text, 0.0)
            if reward is None:
                assert result.reward is result.components["relative_length"] is None
                continue
            wanted = -0.3 * solved * len(text) / mean if mean else 0.0
            assert result.components["relative_length"] == pytest.approx(wanted, abs=1e-15)
            assert result.reward == pytest.approx(reward + wanted, abs=1e-15)
            assert result.unshaped == reward


def test_reward_of_a_cut_completion_is_multiplied() -> None:
    both = replace(completion("aaaa"), finish="length"), completion("aaaa")
    cut = Group(Prompt("t/train/0", "say", {}, "t"), both)
    scorer = Scorer([reward("by_length")], truncated_factor=0.25, overlong_buffer=4, max_tokens=4)
    first, second = scorer([cut], 0).results[0]
    assert (first.reward, second.reward) == (1.0 - 1.0, 4.0 - 1.0)  # the penalty is not multiplied
    assert (first.outcome, first.unshaped) == (0.0, 4.0)
    steps = Scorer([named(lambda completions: [[(1, 2.0)]] * 2, "steps")], truncated_factor=0.25)
    first, second = steps([cut], 0).results[0]
    assert (first.steps, second.steps) == ((Step(1, 0.5),), (Step(1, 2.0),))
    assert first.reward == 0.5


def test_process_rewards_become_steps() -> None:
    def steps(completions: Any) -> list[Any]:
        return [[(0, 0.5), (2, -1.0)], [], None]

    def more(completions: Any) -> list[Any]:
        return [[[2, 2.0]], 1.0, None]

    scorer = Scorer([named(steps, weight=2.0), named(more)])
    first, second, third = scorer([group(["abc", "abc", "abc"])], 0).results[0]
    assert first.steps == (Step(0, 1.0), Step(2, 0.0))
    assert first.components == {"steps": -0.5, "more": 2.0}
    assert first.reward == 1.0
    assert (second.reward, second.steps) == (1.0, ())
    assert (third.reward, third.steps) == (None, ())


@pytest.mark.parametrize(
    "made",
    [
        (1.0, 0, True, None),
        np.array([1.0, 0.0, 1.0, 2.0], dtype=np.float32),
        torch.tensor([1.0, 0.0, 1.0, 2.0]),
        [np.float32(1.0), torch.tensor(0.0), np.int64(1), np.bool_(True)],
    ],
)
def test_kinds_of_numbers(made: Any) -> None:
    def gives(completions: Any) -> Any:
        return made

    scored = Scorer([named(gives)])(two_groups(), 0)
    assert values(scored)[0] == [1.0, 0.0, 1.0]


def test_what_functions_log() -> None:
    def logs(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("text", [c.upper() for c in completions])
        log_metric("share", 1.0)
        log_metric("share", 2.0)
        return [0.0] * len(completions)

    scored = Scorer([named(logs)])(two_groups(), 0)
    assert scored.extras == {"text": ["AA", "B", "CCC", "B"]}
    assert scored.metrics["share"] == 1.5

    def odd(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("made", [object() for _ in completions])
        return [0.0] * len(completions)

    with pytest.raises(
        KeelError, match=r"'odd' at step 0 .*: log_extra\('made'\): no JSON for obj"
    ):
        Scorer([named(odd)])(two_groups(), 0)

    def short(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("text", ["x"])
        return [0.0] * len(completions)

    with pytest.raises(
        KeelError, match=r"'short' at step 0 .*: log_extra\('text'\) got 1 values for 4 completions"
    ):
        Scorer([named(short)])(two_groups(), 0)
    skipped = Scorer([named(short), named(logs)], on_error="skip")(two_groups(), 0)
    assert skipped.extras == scored.extras
    assert skipped.failures == {"short": 4}
    assert values(skipped) == [[0.0, 0.0, 0.0], [0.0]]


def test_what_two_functions_log_under_one_name() -> None:
    def logs(completions: list[str], word: str, log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("why", [word] * len(completions))
        log_metric("share", float(len(word)))
        return [0.0] * len(completions)

    words = {"first": "a", "second": "bb", "third": "ccc"}
    rewards = [named(logs, name, options={"word": word}) for name, word in words.items()]
    scored = Scorer(rewards)([group(["x"])], 0)
    assert scored.extras == {"why": ["a"], "second/why": ["bb"], "third/why": ["ccc"]}
    shares = {k: v for k, v in scored.metrics.items() if k.endswith("share")}
    assert shares == {"share": 1.0, "second/share": 2.0, "third/share": 3.0}
    # Gates are called first, so their names stay.
    rewards[2] = rewards[2].changed(gate_below=0.0)
    gated = Scorer(rewards)([group(["x"])], 0)
    assert gated.extras == {"why": ["ccc"], "first/why": ["a"], "second/why": ["bb"]}


def test_async_functions_wait_together() -> None:
    arrived: list[asyncio.Event] = []

    async def meets(completions: list[str]) -> list[float]:
        """Returns once all five are there: one after the other they would hang."""
        arrived.append(asyncio.Event())
        if len(arrived) == 5:
            for event in arrived:
                event.set()
        await arrived[-1].wait()
        return [2.0] * len(completions)

    functions_ = [named(meets, f"slow{i}") for i in range(5)]
    scored = Scorer([*functions_, reward("by_length")])(two_groups(), 0)
    assert values(scored) == [[12.0, 11.0, 13.0], [11.0]]


# ---------------------------------------------------------------- the task's own result


def test_without_functions_the_task_judges() -> None:
    task = build_task(source("sort_digits"), seed=0)
    prompt = task.prompt("train", 0)
    gold = task.gold(prompt)
    assert gold is not None
    scored = Scorer(tasks={task.name: task})([group([gold, "0"], prompt)], 0)
    assert values(scored) == [[1.0, 0.0]]
    assert scored.results[0][0].components == {"task": 1.0}
    assert scored.metrics["rewards/task/mean"] == 0.5


def test_task_without_verdicts_names_the_fix() -> None:
    task = Listed("t", 5)
    with pytest.raises(KeelError, match=r"'t' cannot tell .* set rewards.functions"):
        Scorer(tasks={"t": task})(two_groups(), 0)
    with pytest.raises(KeelError, match="unknown task 't'"):
        Scorer(tasks={"tt": Listed("tt", 5)})(two_groups(), 0)


class BadTask(Listed):
    """Judges the first two answers, then misbehaves."""

    def __init__(self, how: str) -> None:
        super().__init__("t", 5)
        self.how = how

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """As `how` says, for the text ccc."""
        if completion.text != "ccc":
            return 1.0
        if self.how == "hangs":
            functions.RELEASE.wait(30)
        if self.how == "raises":
            raise RuntimeError("oh")
        return float("nan")


@pytest.mark.parametrize(
    ("how", "says"),
    [("hangs", "hangs: no answer within 1 s"), ("raises", "RuntimeError: oh"), ("nan", "nan")],
)
def test_a_verdict_that_fails(how: str, says: str) -> None:
    tasks = {"t": BadTask(how)}
    with pytest.raises(KeelError) as error:
        Scorer(tasks=tasks, timeout=1.0)(two_groups(), 7)
    assert "reward 'task' at step 7: sample 2 (prompt 't/train/0')" in str(error.value)
    assert says in str(error.value)
    skipped = Scorer(tasks=tasks, timeout=1.0, on_error="skip")(two_groups(), 7)
    assert values(skipped) == [[1.0, 1.0, None], [1.0]]
    assert skipped.failures == {"task": 1}


# ---------------------------------------------------------------- failures


BAD = {
    "raises": ("raised ValueError: no way (functions.py:", None),
    "exits": ("raised SystemExit: 3", None),
    "too_few": ("returned 3 rewards for 4 completions", None),
    "one_number": ("returned a float, not a list", None),
    "hangs": ("hangs: no answer within 1 s (in hangs (functions.py:", None),
    "stubborn_async": ("hangs: no answer within 1 s (in stubborn_async (functions.py:", None),
    "blocking_async": ("hangs: no answer within 1 s (in blocking_async (functions.py:", None),
    "nan_at_two": ("sample 2 (prompt 't/train/0'): nan is not finite", 2),
    "wordy": ("sample 0 (prompt 't/train/0'): 'good' is a str, not a number", 0),
}


@pytest.mark.parametrize("name", BAD)
def test_a_failure_stops_with_name_step_and_sample(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "blocking_async":
        monkeypatch.setattr("keel.platform.calls.NOTICE", 1.0)
    says, sample = BAD[name]
    start = time.monotonic()
    with pytest.raises(KeelError) as error:
        Scorer([reward("by_length"), reward(name)], timeout=1.0)(two_groups(), 42)
    message = str(error.value)
    assert says in message
    assert f"reward {name!r} at step 42" in message
    assert "\n" not in message
    if sample is None:
        assert "4 completions, prompts 't/train/0' to 't/train/1'" in message
    assert time.monotonic() - start < 60.0  # some would not end by themselves


@pytest.mark.parametrize("name", ["raises", "hangs", "stubborn_async", "nan_at_two"])
def test_on_error_skip_leaves_out_and_counts(name: str) -> None:
    _, sample = BAD[name]
    scorer = Scorer([reward("by_length"), reward(name)], timeout=1.0, on_error="skip")
    scored = scorer(two_groups(), 42)
    flat = [v for results in scored.results for v in results]
    failed = [i for i, v in enumerate(flat) if v.components[name] is None]
    assert failed == (list(range(4)) if sample is None else [sample])
    assert scored.failures == {name: len(failed)}
    assert [v.reward for v in flat] == [
        length + (i not in failed) for i, length in enumerate([2, 1, 3, 1])
    ]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([(0, 1.0), (0, 1.0)], "do not rise"),
        ([(2, 1.0), (1, 1.0)], "do not rise"),
        ([(3, 1.0)], "step end 3 is not a token of the 3"),
        ([(-1, 1.0)], "step end -1"),
        ([(0.5, 1.0)], "step end 0.5"),
        ([(0, float("nan"))], "step reward nan"),
        ([1.0], "1.0 is not a step"),
    ],
)
def test_bad_steps_are_named(steps: Any, says: str) -> None:
    def process(completions: Any) -> Any:
        return [steps]

    with pytest.raises(KeelError) as error:
        Scorer([named(process)])([group(["abc"])], 0)
    assert says in str(error.value)


def test_a_missing_column_is_named_before_any_call() -> None:
    called = []

    def first(completions: list[str]) -> list[float]:
        called.append(1)
        return [0.0] * len(completions)

    groups = [group(["a"], Prompt("t/train/0", "say", {"solutions": "a", "level": 1}, "t"))]
    scorer = Scorer([named(first), reward("needs_gold")])
    with pytest.raises(KeelError) as error:
        scorer(groups, 0)
    message = "reward 'needs_gold' needs the column 'solution': unknown column 'solution'"
    assert message in str(error.value)
    assert "did you mean 'solutions'?" in str(error.value)
    assert called == []
    with pytest.raises(KeelError, match="needs the column 'solution'"):
        scorer.check([groups[0].prompt])
    with pytest.raises(KeelError, match="the prompts have none"):
        scorer.check([Prompt("p", "say")])


def test_a_column_turns_is_not_mistaken_for_the_conversation() -> None:
    def first(completions: list[str], turns: list[Any]) -> list[float]:
        return [float(len(own)) for own in turns]

    def other(completions: list[str], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    groups = [group(["a"], Prompt("t/train/0", "say", {"turns": 3}, "t"))]
    with pytest.raises(KeelError, match=r"reward 'first' has an argument 'turns', .* rename the"):
        Scorer([named(first)])(groups, 0)
    assert values(Scorer([named(other)])(groups, 0)) == [[0.0]]


def test_column_of_another_task_is_none() -> None:
    def picky(completions: list[str], solution: list[Any]) -> list[float | None]:
        return [None if gold is None else 1.0 for gold in solution]

    here = Prompt("a/train/0", "say", {"solution": "a"}, "a")
    there = Prompt("b/train/0", "say", {}, "b")
    scorer = Scorer([named(picky)], {"a": Listed("a", 5), "b": Listed("b", 5)})
    assert values(scorer([group(["x"], here), group(["x"], there)], 0)) == [[1.0], [None]]
    # Even in a step that drew from the other task alone.
    assert values(scorer([group(["x"], there)], 0)) == [[None]]


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(KeelError, match="two rewards are named 'by_length'"):
        Scorer([reward("by_length"), reward("by_length")])
    with pytest.raises(KeelError, match="named 'overlong'"):
        Scorer([reward("by_length", name="overlong")], overlong_buffer=1, max_tokens=4)


@pytest.mark.slow
def test_a_reward_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import time\n"
        "from keel.rewards import Scorer\n"
        "from tests.rewards.made import named\n"
        "from keel.types import Group, KeelError, Prompt\n"
        "from tests.data.made import completion\n"
        "async def waits(completions): time.sleep(600)\n"
        "def hangs(completions): time.sleep(600)\n"
        "scorer = Scorer([named(hangs), named(waits)], timeout=0.2)\n"
        "try: scorer([Group(Prompt('p', 'say'), (completion('a'),))], 0)\n"
        "except KeelError as error: print(error)\n"
    )
    # It takes the imports; with a thread that counts it would take ten minutes.
    printed = run_python(code, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    assert printed.stdout.startswith("reward 'hangs' at step 0")


def test_async_reward_keeps_its_event_loop() -> None:
    """A semaphore at module level serves step after step, contended or not."""
    gate = asyncio.Semaphore(1)

    async def one(text: str) -> float:
        async with gate:
            await asyncio.sleep(0)
        return float(len(text))

    async def guarded(completions: list[str]) -> list[float]:
        return list(await asyncio.gather(*(one(text) for text in completions)))

    scorer = Scorer([named(guarded, "guarded")])
    for step in (1, 2, 3):
        scored = scorer([group(["a", "bb", "ccc"])], step)
        assert [v.reward for v in scored.results[0]] == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------- conversations


def test_rewards_see_the_policys_words_and_turns_on_request() -> None:
    got: dict[str, Any] = {}

    def plain(completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        got["plain"] = completions, completion_ids, kwargs
        return [0.0] * len(completions)

    def whole(turns: Any) -> list[float]:
        got["turns"] = turns
        return [0.0] * len(turns)

    reported = conversation(["a?", "b"], "no, 12")
    talk = Prompt("t/train/1", ({"role": "user", "content": "go"},), {}, "t")
    groups = [Group(Prompt("t/train/0", "go", {}, "t"), (reported,)), Group(talk, (reported,))]
    Scorer([named(plain), named(whole)])(groups, 1)
    completions, ids, rest = got["plain"]
    assert rest["prompts"] == ["go", [{"role": "user", "content": "go"}]]
    turns = [{"role": "assistant", "content": "a?"}, {"role": "assistant", "content": "b"}]
    assert completions == ["a?b", turns]
    assert ids == [[ord(c) for c in "a?b"]] * 2
    assert "turns" not in rest
    assert got["turns"][0] == [
        turns[0],
        {"role": "environment", "content": "no, 12"},
        turns[1],
    ]
    assert got["turns"][1] == got["turns"][0]


def test_an_environment_that_spells_the_answer_earns_nothing() -> None:
    prompt = Prompt("t/train/0", "6+6=", {"answer": "12"}, "t")
    group = Group(prompt, (conversation(["x", "y"], "no, 12"), conversation(["=", "12"], "no")))
    rules = [
        load_reward(RewardSource(function="numeric_match")),
        load_reward(RewardSource(function="length", options={"target": 1, "width": 4})),
    ]
    scored = Scorer(rules, max_tokens=10, overlong_buffer=10)([group], 1)
    reported = [dict(result.components) for result in scored.results[0]]
    assert reported == [
        {"numeric_match": 0.0, "length": -0.25, "overlong": -0.2},
        {"numeric_match": 1.0, "length": -0.5, "overlong": pytest.approx(-0.3)},
    ]


def test_step_ends_count_written_tokens() -> None:
    def each(completion_ids: Any) -> list[Any]:
        return [[(at, 1.0) for at in range(len(ids))] for ids in completion_ids]

    group = Group(Prompt("t/train/0", "go", {}, "t"), (conversation(["ab", "c"], "12"),))
    [[result]] = Scorer([named(each)])([group], 1).results
    assert result.steps == (Step(0, 1.0), Step(1, 1.0), Step(4, 1.0))


def ended(text: str, finish: Any = "stop", turns: tuple[Message, ...] = ()) -> Completion:
    return replace(completion(text), finish=finish, turns=turns)


def test_functions_get_the_text_before_the_stop_string() -> None:
    asked = Prompt("t/train/0", "say", {"answer": "25"}, "t")
    found = [
        ended("25\nUser:"),
        ended("5\nUser: 25"),
        ended("<answer>25</answer>"),
        ended("25\nUser: 7", "length"),
        ended(
            "?</call>25\nUser:",
            turns=(
                Message(role="assistant", content="?</call>"),
                Message(role="environment", content="\nUser:"),
                Message(role="assistant", content="25\nUser:"),
            ),
        ),
    ]
    seen: list[Any] = []
    ids: list[Any] = []

    def own(completions: list[str], completion_ids: list[Any], turns: list[Any]) -> list[float]:
        seen.extend(completions)
        ids.extend(completion_ids)
        seen.append([turn["content"] for turn in turns[-1]])
        return [0.0] * len(completions)

    functions = [named(own), load_reward(RewardSource(function="numeric_match"))]
    scorer = Scorer(functions, stop=("\nUser:", "</answer>", "</call>"))
    scored = scorer([Group(asked, tuple(found))], 1)
    assert [one.components["numeric_match"] for one in scored.results[0]] == [1, 0, 1, 0, 0]
    assert seen == [
        "25", "5", "<answer>25</answer>", "25\nUser: 7", "?</call>25",
        ["?</call>", "\nUser:", "25"],
    ]  # fmt: skip
    assert [len(one) for one in ids] == [len(one.tokens) for one in found]


def test_rewards_know_what_the_template_opened() -> None:
    turns = (Message(role="user", content="say"),)
    asked = Prompt("t/train/0", turns, {"answer": "36"}, "t", opening="<reasoning>\n")
    texts = ["35?</reasoning><answer>36</answer>", "<answer>36</answer>"]
    seen: list[Any] = []

    def own(completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(c[0]["content"] for c in completions)
        return [float("openings" in columns)] * len(completions)

    options = {"tags": ["reasoning", "answer"]}
    functions = [
        named(own),
        load_reward(RewardSource(function="format_match", options=options)),
        load_reward(RewardSource(function="numeric_match")),
    ]
    scored = Scorer(functions)([group(texts, asked)], 1)
    assert [one.components for one in scored.results[0]] == [
        {"own": 0.0, "format_match": 1.0, "numeric_match": 1.0},
        {"own": 0.0, "format_match": 0.0, "numeric_match": 0.0},
    ]
    assert seen == texts  # as generated
