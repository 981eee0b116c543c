"""The curriculum takes the prompts whose pass rate is in its window."""

from __future__ import annotations

import json
from typing import Any

from keel.config.sources import Curriculum
from keel.data.curriculum import CurriculumStream
from keel.data.mixture import PromptStream
from tests.data.made import Listed

RULE = Curriculum(low=0.25, high=0.75, threshold=0.5, decay=0.25, revisit=3)


def mixture() -> PromptStream:
    """Two tasks, of 5 and 3 prompts."""
    return PromptStream([Listed("a", 5), Listed("b", 3)], [2.0, 1.0], 7)


def answers(prompt: str, step: int) -> list[float]:
    """Rewards of four completions: of some prompts none is right, of some all, of others two."""
    kind = sum(map(ord, prompt)) % 3
    right = (0, 4, 2)[kind] if step < 12 else 2
    return [1.0] * right + [0.5] * (4 - right)  # 0.5 is not more than the threshold


def steps(stream: Any, first: int, last: int) -> list[list[str]]:
    taken = []
    for step in range(first, last):
        prompts = [prompt.id for prompt in stream.take(4)]
        stream.observe([(prompt, answers(prompt, step)) for prompt in prompts])
        taken.append(prompts)
    return taken


def test_prompts_are_those_of_the_loop() -> None:
    plain, rates, waited = mixture(), dict[str, float](), dict[str, int]()
    passed, wanted = 0, []
    for step in range(30):
        prompts: list[str] = []
        while len(prompts) < 4:
            one = plain.take(1)[0].id
            inside = one not in rates or 0.25 <= rates[one] <= 0.75
            if inside or waited.get(one, 0) == 2:
                waited[one] = 0
                prompts.append(one)
            else:
                waited[one] = waited.get(one, 0) + 1
                passed += 1
        for one in prompts:
            rate = sum(r > 0.5 for r in answers(one, step)) / 4
            rates[one] = 0.25 * rates[one] + 0.75 * rate if one in rates else rate
        wanted.append(prompts)
    stream = CurriculumStream(mixture(), RULE, {})
    assert steps(stream, 0, 30) == wanted
    assert {prompt[0] for step in wanted[10:] for prompt in step} == {"a", "b"}
    inside = [0.25 <= rate <= 0.75 for rate in rates.values()]
    assert stream.metrics() == {
        "prompts/passed_over": passed,
        "prompts/in_window": sum(inside) / len(inside),
    }
    assert passed > 10


def test_stream_goes_on_from_its_state() -> None:
    whole = steps(CurriculumStream(mixture(), RULE, {}), 0, 20)
    first = CurriculumStream(mixture(), RULE, {})
    assert steps(first, 0, 9) == whole[:9]
    state = json.loads(json.dumps(first.state()))
    steps(first, 9, 20)
    inner = mixture()
    inner.restore(state)
    again = CurriculumStream(inner, RULE, state)
    assert again.state() == state
    assert steps(again, 9, 20) == whole[9:]


def test_an_infinite_window_takes_every_prompt() -> None:
    stream = CurriculumStream(mixture(), Curriculum(low=0.0, high=1.0), {})
    plain = mixture()
    assert steps(stream, 0, 20) == [[p.id for p in plain.take(4)] for _ in range(20)]
    assert {**stream.state(), "curriculum": None} == {**plain.state(), "curriculum": None}
    assert stream.metrics() == {"prompts/passed_over": 0.0, "prompts/in_window": 1.0}
