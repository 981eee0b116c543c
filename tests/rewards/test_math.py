from __future__ import annotations

import pytest

from keel.config.sources import RewardSource
from keel.rewards.outputs import Wrong
from keel.rewards.registry import load_reward
from tests.shared import needs_bubblewrap

pytest.importorskip("math_verify")
pytestmark = needs_bubblewrap


def test_rewards() -> None:
    reward = load_reward(RewardSource(function="math", options={"timeout": 300.0}))
    assert (reward.required, reward.optional) == (
        ("completions", "answer"),
        ("prompts", "openings", "log_summary", "log_extra"),
    )
    logged: dict[str, float] = {}
    extras: dict[str, object] = {}
    texts = ["it is $1/2$", "0.25", "1/2", "what?"]
    message = [[{"role": "assistant", "content": text}] for text in texts]
    gold = [r"\frac{1}{2}", 0.5, None, "0.5"]
    assert reward.function is not None
    for completions in (texts, message):
        values = reward.function(
            completions=completions,
            answer=gold,
            log_summary=lambda found, summary: logged.update(summary(found)),
            log_extra=extras.__setitem__,
        )
        assert values == [1, 0, None, 0]
        assert extras == {"extracted": ["it is $1/2$", "0.25", "1/2", None]}
    assert logged == {"math/timed_out": 0, "math/died": 0}
    assert reward.function(completions=["1"], answer=["1"]) == [1]
    several = [[r"\frac{1}{2}", "2"], ["3", ")("], [None, 0.5]]
    assert reward.function(completions=["2", "4", "1/2"], answer=several) == [1, 0, 1]
    reward.function.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_tags_timeouts_and_gold_that_cannot_be_read() -> None:
    reward = load_reward(RewardSource(function="math", options={"timeout": 5, "tag": "answer"}))
    assert reward.function is not None
    logged: dict[str, float] = {}
    texts = [
        "<answer>p - q</answer> 7",
        "p - q",
        r"<answer>$p + 9^{9^{9^{9}}}$</answer>",
        r"<answer>\boxed{p-q}</answer>",
    ]
    values = reward.function(
        completions=texts,
        answer=["p - q"] * 4,
        log_summary=lambda found, summary: logged.update(summary(found)),
    )
    assert values == [1, 0, 0, 1]
    assert sum(logged.values()) == 1  # out of time, or of memory: as fast as the machine is
    texts = ["<answer>Answer: **3**</answer>", "<answer>it is 3</answer>", "<answer></answer>"]
    assert reward.function(completions=texts, answer=["3"] * 3) == [1, 1, 0]
    right, wrong = reward.function(completions=["<answer>1</answer>"] * 2, answer=["1", ")("])
    assert right == 1
    assert isinstance(wrong, Wrong)
    assert wrong.why.startswith("the answer column holds ')(', which cannot be read: use")
    reward.function.close()  # type: ignore[attr-defined]
