"""One reward from many: clips, normalisation, weights, gates, and which functions are called."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from keel.rewards import Scorer
from keel.rewards.outputs import RewardOutput
from keel.rewards.registry import NamedReward
from keel.rewards.scorer import compose
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Step
from tests.data.made import completion
from tests.rewards.made import flat, named

ABOUT = {"rel": 1e-12, "abs": 1e-12}


def component(name: str = "f", **keys: Any) -> NamedReward:
    return named(None, name, **keys)


def numbers(*values: float | None) -> list[RewardOutput]:
    return [RewardOutput(value) for value in values]


def rewards(composed: Sequence[RewardResult]) -> list[float | None]:
    return [one.reward for one in composed]


def one(outputs: Sequence[RewardOutput], groups: Sequence[int] | None = None, **keys: Any) -> Any:
    return rewards(compose([component(**keys)], {"f": outputs}, groups or [0] * len(outputs)))


def standard(values: Sequence[float]) -> list[float]:
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    return [(x - mean) / (spread + 1e-4) for x in values]


# ---------------------------------------------------------------- weights, clips, normalisation


def test_reward_is_the_weighted_sum_of_known_components() -> None:
    functions = [component("a", weight=2.0), component("b", weight=-1.0)]
    outputs = {"a": numbers(1, 2, None, None), "b": numbers(3, None, 5, None)}
    assert rewards(compose(functions, outputs, [0, 0, 0, 0])) == [-1.0, 4.0, -5.0, None]


def test_weight_zero_is_reported_only() -> None:
    functions = [component("a", weight=0.0), component("b")]
    steps = RewardOutput(3.0, (Step(0, 1.0), Step(1, 2.0)))
    assert compose(functions, {"a": [steps, steps], "b": numbers(5, None)}, [0, 0]) == [
        RewardResult(5.0, {"a": 3.0, "b": 5.0}, outcome=5.0, unshaped=5.0),
        RewardResult(None, {"a": 3.0, "b": None}),
    ]


def test_clip_comes_before_weight_and_normalisation() -> None:
    assert one(numbers(-9, 0.5, 9), clip=(-1.0, 2.0), weight=3.0) == [-3.0, 1.5, 6.0]
    assert one(numbers(-9, None), clip=(-1.0, 2.0)) == [-1.0, None]
    found = one(numbers(0, 1, 100), normalise="batch", clip=(0.0, 3.0))
    assert found == pytest.approx(standard([0, 1, 3]), **ABOUT)


def test_normalise_by_group_and_by_batch() -> None:
    outputs, groups = numbers(1, 5, 2, 4, 9), [0, 1, 0, 1, 1]
    first, second = standard([1, 2]), standard([5, 4, 9])
    expected = [2 * x for x in (first[0], second[0], first[1], second[1], second[2])]
    by_group = one(outputs, groups, normalise="group", weight=2.0)
    assert by_group == pytest.approx(expected, **ABOUT)
    by_batch = one(outputs, groups, normalise="batch")
    assert by_batch == pytest.approx(standard([1, 5, 2, 4, 9]), **ABOUT)
    found = one(numbers(1, None, 4), normalise="group")
    assert found[1] is None
    assert [found[0], found[2]] == pytest.approx(standard([1, 4]), **ABOUT)


@pytest.mark.parametrize("how", ["group", "batch"])
def test_normalised_equal_or_single_values_are_zero(how: str) -> None:
    # Thrice 0.1 has a mean that is not 0.1, and so a spread of rounding.
    assert one(numbers(0.1, 0.1, 0.1), normalise=how) == [0.0, 0.0, 0.0]
    assert one(numbers(7), normalise=how) == [0.0]
    assert one(numbers(None, 7), normalise=how) == [None, 0.0]
    assert one(numbers(None, None), normalise=how) == [None, None]


# ---------------------------------------------------------------- steps


def test_steps_are_clipped_singly_and_add_up() -> None:
    steps = RewardOutput(5.5, (Step(1, 4.0), Step(3, -0.5), Step(4, 2.0)))
    (found,) = compose([component(clip=(-0.25, 1.0), weight=2.0)], {"f": [steps]}, [0])
    assert found.steps == (Step(1, 2.0), Step(3, -0.5), Step(4, 2.0))
    assert found.reward == sum(step.reward for step in found.steps) == 3.5


def test_steps_of_two_components_are_merged_by_their_ends() -> None:
    outputs = {
        "a": [RewardOutput(3.0, (Step(2, 1.0), Step(5, 2.0)))],
        "b": [RewardOutput(7.0, (Step(1, 3.0), Step(5, 4.0)))],
        "c": numbers(0.5),
    }
    functions = [component("a"), component("b", weight=0.5), component("c")]
    (found,) = compose(functions, outputs, [0])
    assert found.steps == (Step(1, 1.5), Step(2, 1.0), Step(5, 4.0))
    assert (found.reward, found.outcome) == (7.0, 0.5)


@pytest.mark.parametrize("how", ["group", "batch"])
def test_steps_are_not_normalised_as_whole_answers(how: str) -> None:
    outputs = [RewardOutput(1.0), RewardOutput(1.0, (Step(0, 1.0),))]
    with pytest.raises(KeelError, match=f"reward 'f' rewards steps, and normalise = \"{how}\""):
        one(outputs, normalise=how)


# ---------------------------------------------------------------- gates


def test_shut_gate_gives_its_reward_and_no_steps() -> None:
    functions = [component("a"), component("g", gate_below=1.0, gated_reward=-2.0, weight=0.0)]
    steps = RewardOutput(3.0, (Step(0, 3.0),))
    assert compose(functions, {"a": [steps, steps], "g": numbers(0.9, 1)}, [0, 0]) == [
        RewardResult(-2.0, {"a": 3.0, "g": 0.9}, outcome=-2.0, unshaped=-2.0),
        RewardResult(3.0, {"a": 3.0, "g": 1.0}, (Step(0, 3.0),), unshaped=3.0),
    ]


def test_first_shut_gate_decides() -> None:
    functions = [
        component("g", gate_below=1.0, gated_reward=-1.0),
        component("h", gate_below=1.0, gated_reward=-5.0),
    ]
    outputs = {"g": numbers(0, 0, 1, 1), "h": numbers(0, 1, 0, 1)}
    assert rewards(compose(functions, outputs, [0] * 4)) == [-1.0, -1.0, -5.0, 2.0]


# ---------------------------------------------------------------- through the scorer


class Recorder:
    """Functions that record which completions they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def reward(self, name: str, value: Callable[[str], Any], **keys: Any) -> NamedReward:
        def function(completions: list[str], log_extra: Any) -> list[Any]:
            self.calls.append((name, list(completions)))
            log_extra(f"{name}_saw", [text.upper() for text in completions])
            return [value(text) for text in completions]

        return named(function, name, **keys)


def groups(*texts: Sequence[str]) -> list[Group]:
    return [
        Group(Prompt(f"p{n}", "say"), tuple(completion(text) for text in some))
        for n, some in enumerate(texts)
    ]


def starts_with_x(text: str) -> float:
    return float(text.startswith("x"))


def test_gates_are_called_before_the_others() -> None:
    recorder = Recorder()
    scorer = Scorer(
        [
            recorder.reward("content", lambda text: float(len(text))),
            recorder.reward("gate", starts_with_x, gate_below=1.0, gated_reward=-3.0),
            recorder.reward("watch", lambda _: 9.0, weight=0.0),
        ]
    )
    scored = scorer(groups(["xa", "b"], ["c", "xddd"]), 0)
    assert recorder.calls == [
        ("gate", ["xa", "b", "c", "xddd"]),
        ("content", ["xa", "xddd"]),
        ("watch", ["xa", "xddd"]),
    ]
    assert flat(scored) == [3.0, -3.0, -3.0, 5.0]
    assert scored.results[0][1].components == {"content": None, "gate": 0.0, "watch": None}
    assert scored.results[1][1].components == {"content": 4.0, "gate": 1.0, "watch": 9.0}
    means = {"gate/gated": 0.5, "gate/mean": 0.5, "content/mean": 3.0, "watch/mean": 9.0}
    assert {key: scored.metrics[f"rewards/{key}"] for key in means} == means
    assert "rewards/content/gated" not in scored.metrics
    assert scored.extras["content_saw"] == ["XA", None, None, "XDDD"]
    assert scored.extras["gate_saw"] == ["XA", "B", "C", "XDDD"]
    assert scored.failures == {}


def test_where_no_completion_passes_only_gates_are_called() -> None:
    recorder = Recorder()
    keys = {"gate_below": 1.0, "weight": 0.0}
    scorer = Scorer(
        [
            recorder.reward("gate", starts_with_x, **keys),
            recorder.reward("other", starts_with_x, **keys, gated_reward=-1.0),
            recorder.reward("content", lambda text: float(len(text))),
        ]
    )
    scored = scorer(groups(["a", "b"]), 0)
    assert recorder.calls == [("gate", ["a", "b"]), ("other", ["a", "b"])]
    assert flat(scored) == [0.0, 0.0]
    assert scored.metrics["rewards/gate/gated"] == scored.metrics["rewards/other/gated"] == 1.0
    assert "rewards/content/mean" not in scored.metrics


def test_gate_without_a_value_is_open() -> None:
    recorder = Recorder()

    def unsure(text: str) -> Any:
        return {"a": None, "b": float("nan")}.get(text, 0.0)

    functions = [
        recorder.reward("gate", unsure, gate_below=1.0, weight=0.0),
        recorder.reward("content", lambda _: 2.0),
    ]
    scored = Scorer(functions, on_error="skip")(groups(["a", "b", "c"]), 0)
    assert flat(scored) == [2.0, 2.0, 0.0]
    assert recorder.calls[1] == ("content", ["a", "b"])
    assert scored.failures == {"gate": 1}
    with pytest.raises(KeelError, match="reward 'gate' at step 4: sample 1"):
        Scorer(functions)(groups(["a", "b", "c"]), 4)


def test_normalisation_by_group_follows_the_prompts() -> None:
    scorer = Scorer([Recorder().reward("length", lambda t: float(len(t)), normalise="group")])
    scored = scorer(groups(["a", "bb", "ccc"], ["aaaa", "aaaa"], ["bb"]), 0)
    assert flat(scored) == pytest.approx([*standard([1, 2, 3]), 0.0, 0.0, 0.0], **ABOUT)
    # What is logged, and kept of each completion, is the raw value.
    assert scored.results[0][1].components == {"length": 2.0}
    assert scored.metrics["rewards/length/mean"] == pytest.approx(16 / 6)


def test_no_completions_are_no_calls() -> None:
    recorder = Recorder()
    gate = recorder.reward("gate", starts_with_x, gate_below=1.0)
    scored = Scorer([gate, recorder.reward("content", lambda _: 1.0)])([], 0)
    assert (scored.results, dict(scored.metrics)) == ((), {})
    assert recorder.calls == []
    empty: tuple[Completion, ...] = ()
    assert Scorer([gate])([Group(Prompt("p", "say"), empty)], 0).results == ((),)
